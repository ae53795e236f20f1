"""Says of a carried statement: exact, equivalent, wrong or refused; independent of the package.

A place is equivalent to the true one if it is in the same block and every statement between the
two is independent of the carried one: it binds and changes nothing the statement reads, reads
nothing it binds, does not leave the block, and is no training step (whose effects are everywhere).
"""

from __future__ import annotations

import ast
import re
import textwrap

from mine import parse, tokens

BARRIERS = re.compile(
    r"^(step|backward|zero_grad|load_state_dict|train|eval|clip_grad\w*|reset|update|all_reduce|barrier)$"
)
SINKS = re.compile(r"^(print|log\w*|info|debug|warning|add_\w+|write|append|set_\w+|format|len|int|float|str|item|round|sum|min|max|join|time|record\w*)$")  # fmt: skip


def verdict(old: str, truth: tuple[int, str] | None, answer: tuple[int, str] | None) -> str:
    """Return exact, equivalent, wrong, refused (though there is a place) or right-refusal."""
    if truth is None:
        return "right-refusal" if answer is None else "wrong"
    if answer is None:
        return "refused"
    line, text = answer
    if _solid(text) != _solid(truth[1]):
        return "wrong"
    if line == truth[0] and _indent(text) == _indent(truth[1]):
        return "exact"
    one, two = _spot(old, *truth), _spot(old, line, text)
    if one is None or two is None or one[0] != two[0]:
        return "wrong"
    low, high = sorted((one[1], two[1]))
    between = one[2][low:high]
    modules = imported(old)
    return "equivalent" if all(_free(one[3], each, modules) for each in between) else "wrong"


def imported(text: str) -> set[str]:
    """Return the names that imports bind: calling a function of a module does not change it."""
    tree = parse(text)
    return {
        (each.asname or each.name).split(".")[0]
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for each in node.names
    }


def _solid(text: str) -> str:
    """Return the code without layout: lines were followed without regard to blanks."""
    tree = parse(textwrap.dedent(text).strip("\n"))
    if tree is None:
        return re.sub(r"\s", "", "".join(word for _, word in tokens(text.strip())))
    return re.sub(r"\s|\\n", "", ast.dump(tree))


def _indent(text: str) -> int:
    line = next(x for x in text.split("\n") if x.strip() and not x.strip().startswith("#"))
    return len(line) - len(line.lstrip())


def _spot(old: str, line: int, text: str):
    lines = old.split("\n")
    inserted = text.rstrip("\n").split("\n")
    text = "\n".join([*lines[: line - 1], *inserted, *lines[line - 1 :]])
    tree = parse(text) or parse(re.sub(r"(?m)^(\s*)print (.*)$", r"\1print(\2)", text))
    if tree is None:
        return None
    end = line + len(inserted) - 1
    for path, owner, body in _bodies(tree):
        for at, stmt in enumerate(body):
            if line <= stmt.lineno and (stmt.end_lineno or 0) <= end:
                rest = body[:at] + body[at + 1 :]
                return path + _heads(path, owner, stmt), at, rest, stmt
    return None


def _bodies(tree: ast.AST):
    """Yield every statement list with a path that does not depend on lines."""
    stack = [((), tree)]
    while stack:
        path, node = stack.pop()
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            value = getattr(node, name, None)
            if not isinstance(value, list) or not value:
                continue
            where = (*path, name)
            if isinstance(value[0], ast.stmt):
                yield tuple(re.sub(r"\d+", "", str(p)) for p in where), node, value
            stack.extend(((*where, f"{type(each).__name__}"), each) for each in value)


def _heads(path, node, carried: ast.stmt) -> tuple:
    # two blocks are the same if the statements that own them start and end with the same text
    inner = getattr(node, "test", getattr(node, "iter", getattr(node, "name", None)))
    head = ast.dump(inner) if isinstance(inner, ast.AST) else str(inner)
    body = getattr(node, "body", None)
    own = [each for each in body if each is not carried] if isinstance(body, list) else []
    return (head, ast.dump(own[-1]) if own and path else "")


def _names(node: ast.AST, kind) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _free(carried: ast.stmt, other: ast.stmt, modules: set[str]) -> bool:
    changed = _names(other, (ast.Store, ast.Del))
    for node in ast.walk(other):
        if isinstance(
            node, (ast.Return, ast.Break, ast.Continue, ast.Raise, ast.Yield, ast.YieldFrom)
        ):
            return False
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            changed.add(_root(node))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            changed.add(node.name)
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if BARRIERS.match(name):
                return False
            if not SINKS.match(name):
                changed.add(_root(called) if isinstance(called, ast.Attribute) else "")
                changed.update(_root(each) for each in node.args)
                changed -= modules
    reads = _names(carried, ast.Load)
    if isinstance(carried, ast.AugAssign):
        reads.add(_root(carried.target))
    bound = _names(carried, ast.Store) | {_root(n) for n in ast.walk(carried) if isinstance(n, (ast.Attribute, ast.Subscript)) and isinstance(n.ctx, ast.Store)}  # fmt: skip
    return not (changed - {""}) & (reads | bound) and not bound & _names(other, ast.Load)
