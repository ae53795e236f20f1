"""Remove the statements that log given names from a source, as if the version had never logged these names.

Compared with the result, the source is an edit that adds log statements. So the log statements of a past version can
be carried into every version that lacks them, like those of a user's edit.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

from rearview.source.log_calls import Aliases, log_call
from rearview.source.probes.probe import fits
from rearview.source.statement_trees import blocks_of
from rearview.source.text import split, try_parse

_ASSIGNMENTS = (ast.Assign, ast.AnnAssign)


def without_logs(
    source: Mapping[str, str], names: Collection[str], *, with_values: bool = False
) -> dict[str, str] | None:
    r"""Return `source` (path -> text) without the statements that log `names`.

    Return None if a log call for one of `names` is part of a larger statement.

    With `with_values`, assignments of variables that only these statements read are removed, too. An `if` or `with`
    that contains only removed statements is removed, too.

    >>> text = "for x in y:\n    n = f(x)\n    rearview.log('n', n)\n    g(x)\n"
    >>> without_logs({"t.py": text}, ["n"])["t.py"]
    'for x in y:\n    n = f(x)\n    g(x)\n'
    >>> without_logs({"t.py": text}, ["n"], with_values=True)["t.py"]
    'for x in y:\n    g(x)\n'
    """
    out = dict(source)
    for path, text in source.items():
        parsed = try_parse(text) if path.endswith(".py") else ""
        if isinstance(parsed, str):
            continue
        tree = parsed.tree
        logs = _log_statements(tree, names)
        if logs is None:
            return None
        if logs:
            out[path] = _text_without(
                text, tree, logs | (_only_for(tree, logs) if with_values else set())
            )
    return out


def _log_statements(tree: ast.Module, names: Collection[str]) -> set[ast.stmt] | None:
    """Return the statements that log one of `names`, or None if such a log call is part of a larger statement.

    An `if` or `with` that contains only these statements is included.
    """
    aliases = Aliases(tree)
    logs: set[ast.stmt] = set()
    calls: set[int] = set()
    for stmt in _statements(tree.body):
        if isinstance(stmt, ast.Expr) and _logs(stmt.value, aliases, names):
            logs.add(stmt)
            calls.add(id(stmt.value))
    for node in ast.walk(tree):
        if id(node) not in calls and _logs(node, aliases, names):
            return None
    while wrapped := {
        stmt
        for stmt in _statements(tree.body)
        if isinstance(stmt, ast.If | ast.With)
        and not getattr(stmt, "orelse", [])
        and set(stmt.body) <= logs
        and stmt not in logs
    }:
        logs |= wrapped
    return logs


def _logs(node: ast.AST, aliases: Aliases, names: Collection[str]) -> bool:
    call = log_call(node, aliases)
    return call is not None and any(fits(each, name) for each in call.names for name in names)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for stmt in body:
        yield stmt
        for _, _, inner in blocks_of(stmt):
            yield from _statements(inner)


def _only_for(tree: ast.Module, logs: set[ast.stmt]) -> set[ast.stmt]:
    """Return the assignments whose variables only the statements `logs` read, directly or through assignments."""
    assignments: set[ast.stmt] = set()
    while True:
        removed_nodes = {id(node) for stmt in logs | assignments for node in ast.walk(stmt)}
        read_elsewhere = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load | ast.Del)
            and id(node) not in removed_nodes
        }
        read_by_logs = {
            node.id
            for stmt in logs | assignments
            for node in ast.walk(stmt)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        further_assignments = {
            stmt
            for stmt in _statements(tree.body)
            if isinstance(stmt, _ASSIGNMENTS)
            and stmt not in assignments
            and (names := _assigned(stmt))
            and names <= read_by_logs - read_elsewhere
        }
        if not further_assignments:
            return assignments
        assignments |= further_assignments


def _assigned(stmt: ast.Assign | ast.AnnAssign) -> set[str]:
    """Return the variables that an assignment sets, or the empty set if it sets attributes or items, too."""
    targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return names if len(names) == len(targets) else set()


def _text_without(text: str, tree: ast.Module, removed: set[ast.stmt]) -> str:
    """Return the text without the statements `removed`; a block that would be empty gets a `pass`.

    If a removed statement shares a line with another one, all removed statements are replaced by `pass`.
    """
    lines = split(text)
    spans: list[tuple[int, int, str]] = []
    blocks = [tree.body]
    while blocks:
        block = blocks.pop()
        remaining = [stmt for stmt in block if stmt not in removed]
        for k, stmt in enumerate(block):
            if stmt not in removed:
                blocks += [inner for _, _, inner in blocks_of(stmt)]
                continue
            first, last = stmt.lineno, stmt.end_lineno or stmt.lineno
            alone = not any(
                neighbour is not stmt
                and neighbour.lineno <= last
                and (neighbour.end_lineno or 0) >= first
                for neighbour in block
            )
            indent = lines[first - 1].encode()[: stmt.col_offset].decode()
            if (remaining or k) and alone and not indent.strip():
                spans.append((first, last, ""))
            elif not indent.strip() and alone:
                spans.append((first, last, f"{indent}pass\n"))
            else:
                return _replaced_by_pass(text, removed)
    for first, last, replacement in sorted(spans, reverse=True):
        lines[first - 1 : last] = [replacement] if replacement else []
    return "".join(lines)


def _replaced_by_pass(text: str, removed: set[ast.stmt]) -> str:
    """Return the text with each statement of `removed` replaced by `pass`, even within a line."""
    rows = [line.encode() for line in split(text)]
    for stmt in sorted(removed, key=lambda stmt: (stmt.lineno, stmt.col_offset), reverse=True):
        last = stmt.end_lineno or stmt.lineno
        tail = rows[last - 1][stmt.end_col_offset or 0 :]
        head = rows[stmt.lineno - 1][: stmt.col_offset]
        rows[stmt.lineno - 1 : last] = [head + b"pass" + tail]
    return b"".join(rows).decode()
