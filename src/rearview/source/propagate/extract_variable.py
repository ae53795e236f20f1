"""Give a value of an older text the name that a recorded statement of the newest text gives it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from rearview.source.mutations import last_name
from rearview.source.probes.probe import VariableExtraction
from rearview.source.propagate.match import match
from rearview.source.propagate.splice import put
from rearview.source.propagate.variable_names import names_in
from rearview.source.statement_trees import StatementNode, StatementTree, grow
from rearview.source.text import Parsed, newline, split, try_parse

Path = tuple[tuple[str, int], ...]
"""Fields, with the index in those that are lists, from a statement to an expression in it."""


@dataclass(frozen=True, slots=True)
class _Edit:
    """New text between two positions, (line, column in bytes)."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


class _NotThereError(Exception):
    """The older text cannot have the names; the message says why."""


def extract_variables(
    new: str, extraction: VariableExtraction, old: str
) -> tuple[str, VariableExtraction] | str:
    r"""Return (an older text in which the value has the same names, where it has them), or why that is impossible.

    The older text may compute the value with other code, which stays as it is.

    >>> extract_variables("n = f(x, 2)\nlog(n)\n", VariableExtraction("t.py", 1, ("n",)), "# why\nf(x, 1)\n")[0]
    '# why\nn = f(x, 1)\n'
    """
    here, there = try_parse(new), try_parse(old)
    if isinstance(here, str):
        return f"the new text cannot be read: {here}"
    if isinstance(there, str):
        return f"the old text cannot be read: {there}"
    new_tree, first = grow(here), extraction.names[0]
    binds = _at(new_tree, extraction.line)
    reads = binds if extraction.into is None else _at(new_tree, extraction.into)
    if binds is None or reads is None:
        return f"line {extraction.line} of the new text holds no statement"
    old_tree = grow(there)
    partner = _partner(here, binds, reads, extraction.names, old_tree) or match(
        new_tree, old_tree
    ).old_of.get(reads)
    if partner is None or there.repaired:
        return f"the statement that computes `{first}` cannot be found there"
    try:
        if extraction.into is None:
            edits = list(_named(binds.tree, partner.tree, extraction.names))
            taken = names_in(partner) & set(extraction.names) if edits else None
            if taken:
                return f"`{min(taken)}` means something else in that version"
            return _applied(there, edits), VariableExtraction(
                extraction.path, partner.start, extraction.names
            )
        if first in names_in(partner):
            return f"`{first}` means something else in that version"
        if not partner.leads or there.lines[partner.start - 1].lstrip().startswith("elif"):
            return f"`{first}` cannot have a separate line in that version"
        edit, value = _lifted(binds.tree, reads.tree, partner.tree, first, there)
    except _NotThereError as exc:
        return str(exc)
    text = _applied(there, [edit])
    lines = split(text)
    line = lines[partner.start - 1]
    lead = line[: len(line) - len(line.lstrip())]
    above = f"{lead}{first} = {value}{newline(lines, partner.start - 1)}"
    at = partner.start
    return put(text, at, above), VariableExtraction(extraction.path, at, extraction.names, at + 1)


def _at(tree: StatementTree, line: int) -> StatementNode | None:
    return next((n for n in tree.nodes if not n.is_block and n.start == line and n.parent), None)


def _partner(
    here: Parsed,
    binds: StatementNode,
    reads: StatementNode,
    names: tuple[str, ...],
    old: StatementTree,
) -> StatementNode | None:
    """Return the old statement that corresponds to the new one without its name for the value."""
    new, without = binds.tree, None
    edits: list[_Edit] = []
    if reads is not binds:
        without = (binds.start, binds.end)
        value = getattr(new, "value", None)
        edits += [
            _Edit(*_span(node), ast.unparse(value))
            for _, node in _walk(reads.tree)
            if isinstance(node, ast.Name) and node.id in names and value is not None
        ]
    elif isinstance(new, ast.Assign | ast.AnnAssign) and set(_bound(new)) == set(names):
        assert new.value is not None
        edits.append(_Edit(*_span(new), ast.unparse(new.value)))
    plain = try_parse(_applied(here, edits))
    if isinstance(plain, str):
        return None
    tree = grow(plain, without=without) if without is not None else grow(plain)
    node = _at(tree, reads.start)
    return match(tree, old).old_of.get(node) if node is not None else None


def _named(new: ast.AST, old: ast.AST, names: tuple[str, ...]) -> Iterator[_Edit]:
    """Yield edits that give the values of an old statement the names that they have in the new one."""
    assert isinstance(old, ast.stmt)
    left = set(names)
    targets: list[ast.expr] = []
    if isinstance(new, ast.Assign | ast.AnnAssign):
        every = new.targets if isinstance(new, ast.Assign) else [new.target]
        targets = [t for t in every if left & set(_bound(t))]
        left -= {name for target in targets for name in _bound(target)}
    if targets and not (isinstance(old, ast.Assign) and set(_bound(old)) >= set(names)):
        value = getattr(new, "value", None)
        if not isinstance(old, ast.Expr | ast.Assign) or not _corresponds(value, old.value):
            raise _NotThereError(f"`{names[0]}` is computed differently in that version")
        text = "".join(f"{ast.unparse(target)} = " for target in targets)
        start = (old.lineno, old.col_offset)
        yield _Edit(start, start, text)
    for path, node in _walk(new):
        if isinstance(node, ast.NamedExpr) and node.target.id in left:
            old_value = _follow(old, path)
            if isinstance(old_value, ast.NamedExpr) and old_value.target.id == node.target.id:
                continue
            if type(old) is not type(new) or not _corresponds(node.value, old_value):
                raise _NotThereError(f"`{node.target.id}` is computed differently in that version")
            assert old_value is not None
            start, end = _span(old_value)
            yield _Edit(start, start, f"({node.target.id} := ")
            yield _Edit(end, end, ")")


def _lifted(
    binds: ast.AST, reads: ast.AST, old: ast.AST, name: str, there: Parsed
) -> tuple[_Edit, str]:
    """Return the edit that replaces a value of an old statement by a name, and the text of the value."""
    value = getattr(binds, "value", None)
    for path, node in _walk(reads):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            part = _follow(old, path)
            if type(reads) is not type(old) or not _corresponds(value, part) or part is None:
                raise _NotThereError(f"`{name}` is computed differently in that version")
            (row, begin), (last, stop) = _span(part)
            if row != last:
                raise _NotThereError(f"the value of `{name}` takes several lines in that version")
            text = there.code_lines[row - 1].encode()[begin:stop].decode()
            return _Edit((row, begin), (row, stop), name), text
    raise _NotThereError(f"`{name}` is inside another named value; name only one of them")


def _walk(stmt: ast.AST, path: Path = ()) -> Iterator[tuple[Path, ast.AST]]:
    """Yield the expressions of a statement's head with their paths; `(name := value)` counts as `value`, too."""
    for field, value in ast.iter_fields(stmt):
        items = value if isinstance(value, list) else [value]
        for at, item in enumerate(items):
            if not isinstance(item, ast.AST) or isinstance(item, ast.stmt | ast.expr_context):
                continue
            inner, node = (*path, (field, at)), item
            while isinstance(node, ast.NamedExpr):
                yield inner, node
                node = node.value
            yield inner, node
            yield from _walk(node, inner)


def _follow(stmt: ast.AST, path: Path) -> ast.expr | None:
    node: object = stmt
    for field, at in path:
        value = getattr(node, field, None)
        items = value if isinstance(value, list) else [value]
        if at >= len(items):
            return None
        node = items[at]
    return node if isinstance(node, ast.expr) else None


def _corresponds(new: ast.AST | None, old: ast.AST | None) -> bool:
    """Return True if two expressions call the same function, or are equal."""
    if isinstance(new, ast.NamedExpr):
        new = new.value
    if isinstance(new, ast.Await) and isinstance(old, ast.Await):
        return _corresponds(new.value, old.value)
    if isinstance(new, ast.Call) and isinstance(old, ast.Call):
        return last_name(new.func) == last_name(old.func) != ""
    return new is not None and old is not None and ast.dump(new) == ast.dump(old)


def _bound(node: ast.AST) -> list[str]:
    return [
        sub.id
        for sub in ast.walk(node)
        if isinstance(sub, ast.Name) and isinstance(sub.ctx, ast.Store)
    ]


def _span(node: ast.expr | ast.stmt) -> tuple[tuple[int, int], tuple[int, int]]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _applied(parsed: Parsed, edits: list[_Edit]) -> str:
    lines = list(parsed.lines)
    for edit in sorted(edits, key=lambda each: each.start, reverse=True):
        (row, _), (last, _) = edit.start, edit.end
        rest = lines[last - 1][_character(parsed, *edit.end) :]
        lines[row - 1] = lines[row - 1][: _character(parsed, *edit.start)] + edit.text + rest
        for gone in range(row, last):  # blank, so that later lines keep their numbers
            lines[gone] = "\n"
    return "".join(lines)


def _character(parsed: Parsed, row: int, column: int) -> int:
    """Return the character index of a column in bytes; a byte order mark counts as one character."""
    mark = row == 1 and parsed.lines[0].startswith("\ufeff")
    return mark + len(parsed.code_lines[row - 1].encode()[:column].decode())
