"""Extract in an older text the variables that the newest text extracts from a recorded statement."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from rearview.source.mutations import last_name
from rearview.source.probes.probe import VariableExtraction
from rearview.source.propagate.match import match
from rearview.source.propagate.splice import insert_lines
from rearview.source.propagate.variable_names import words_in_scope
from rearview.source.statement_trees import StatementNode, StatementTree, grow
from rearview.source.text import Parsed, newline, split, try_parse

ExpressionPath = tuple[tuple[str, int], ...]
"""Way from a statement to an expression in it: (field, index in the field or 0) of each syntax node on the way."""


@dataclass(frozen=True, slots=True)
class _Edit:
    """A replacement of the text between two positions, each (line, column in bytes)."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


class _NotExtractableError(Exception):
    """Raised if the variables cannot be extracted in the older text; the message says why."""


def extract_variables(
    new: str, extraction: VariableExtraction, old: str
) -> tuple[str, VariableExtraction] | str:
    r"""Return (old text in which the variables are extracted, too, the extraction in it).

    `extraction` tells which statement of the new text extracts which variables. If the old text cannot be edited
    in the same way, return the reason.

    The old text may compute the values with different code, which remains unchanged.

    >>> extract_variables("n = f(x, 2)\nlog(n)\n", VariableExtraction("t.py", 1, ("n",)), "# why\nf(x, 1)\n")[0]
    '# why\nn = f(x, 1)\n'
    """
    new_parsed, old_parsed = try_parse(new), try_parse(old)
    if isinstance(new_parsed, str):
        return f"the new text cannot be read: {new_parsed}"
    if isinstance(old_parsed, str):
        return f"the old text cannot be read: {old_parsed}"
    new_tree, first_name = grow(new_parsed), extraction.names[0]
    binds = _statement_at(new_tree, extraction.line)
    reads = binds if extraction.into is None else _statement_at(new_tree, extraction.into)
    if binds is None or reads is None:
        return f"line {extraction.line} of the new text holds no statement"
    old_tree = grow(old_parsed)
    partner = _partner(new_parsed, binds, reads, extraction.names, old_tree) or match(
        new_tree, old_tree
    ).old_of.get(reads)
    if partner is None or old_parsed.repaired:
        return f"the statement that computes `{first_name}` cannot be found there"
    try:
        if extraction.into is None:
            edits = list(_assigning_edits(binds.tree, partner.tree, extraction.names))
            used_names = words_in_scope(partner) & set(extraction.names) if edits else None
            if used_names:
                return f"`{min(used_names)}` means something else in that version"
            return _applied(old_parsed, edits), VariableExtraction(
                extraction.path, partner.start, extraction.names
            )
        if first_name in words_in_scope(partner):
            return f"`{first_name}` means something else in that version"
        if not partner.leads or old_parsed.lines[partner.start - 1].lstrip().startswith("elif"):
            return f"`{first_name}` cannot have a separate line in that version"
        edit, value = _replacing_edit(binds.tree, reads.tree, partner.tree, first_name, old_parsed)
    except _NotExtractableError as exc:
        return str(exc)
    text = _applied(old_parsed, [edit])
    lines = split(text)
    line = lines[partner.start - 1]
    indent = line[: len(line) - len(line.lstrip())]
    assignment = f"{indent}{first_name} = {value}{newline(lines, partner.start - 1)}"
    first_line = partner.start
    return insert_lines(text, first_line, assignment), VariableExtraction(
        extraction.path, first_line, extraction.names, first_line + 1
    )


def _statement_at(tree: StatementTree, line: int) -> StatementNode | None:
    return next((n for n in tree.nodes if not n.is_block and n.start == line and n.parent), None)


def _partner(
    new_parsed: Parsed,
    binds: StatementNode,
    reads: StatementNode,
    names: tuple[str, ...],
    old: StatementTree,
) -> StatementNode | None:
    """Return the old statement that `match` pairs with the new statement, or None.

    For the comparison, the edit that extracts the variables `names` is undone in the new text. `binds` is the
    statement that assigns the variables, `reads` the recorded statement; both are one unless a line was added.
    """
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
    without_variables = try_parse(_applied(new_parsed, edits))
    if isinstance(without_variables, str):
        return None
    tree = (
        grow(without_variables, without=without) if without is not None else grow(without_variables)
    )
    node = _statement_at(tree, reads.start)
    return match(tree, old).old_of.get(node) if node is not None else None


def _assigning_edits(new: ast.AST, old: ast.AST, names: tuple[str, ...]) -> Iterator[_Edit]:
    """Yield the edits after which the statement `old` assigns the variables `names` as the statement `new` does."""
    assert isinstance(old, ast.stmt)
    unassigned_names = set(names)
    targets: list[ast.expr] = []
    if isinstance(new, ast.Assign | ast.AnnAssign):
        all_targets = new.targets if isinstance(new, ast.Assign) else [new.target]
        targets = [t for t in all_targets if unassigned_names & set(_bound(t))]
        unassigned_names -= {name for target in targets for name in _bound(target)}
    if targets and not (isinstance(old, ast.Assign) and set(_bound(old)) >= set(names)):
        value = getattr(new, "value", None)
        if not isinstance(old, ast.Expr | ast.Assign) or not _corresponds(value, old.value):
            raise _NotExtractableError(f"`{names[0]}` is computed differently in that version")
        text = "".join(f"{ast.unparse(target)} = " for target in targets)
        start = (old.lineno, old.col_offset)
        yield _Edit(start, start, text)
    for path, node in _walk(new):
        if isinstance(node, ast.NamedExpr) and node.target.id in unassigned_names:
            old_value = _follow(old, path)
            if isinstance(old_value, ast.NamedExpr) and old_value.target.id == node.target.id:
                continue
            if type(old) is not type(new) or not _corresponds(node.value, old_value):
                raise _NotExtractableError(
                    f"`{node.target.id}` is computed differently in that version"
                )
            assert old_value is not None
            start, end = _span(old_value)
            yield _Edit(start, start, f"({node.target.id} := ")
            yield _Edit(end, end, ")")


def _replacing_edit(
    binds: ast.AST, reads: ast.AST, old: ast.AST, name: str, old_parsed: Parsed
) -> tuple[_Edit, str]:
    """Return (edit that replaces a value in the statement `old` by the variable `name`, text of the value).

    In the new text, the statement `binds` assigns the variable and the statement `reads` reads it.
    """
    value = getattr(binds, "value", None)
    for path, node in _walk(reads):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            old_value = _follow(old, path)
            if (
                type(reads) is not type(old)
                or not _corresponds(value, old_value)
                or old_value is None
            ):
                raise _NotExtractableError(f"`{name}` is computed differently in that version")
            (row, begin), (last, stop) = _span(old_value)
            if row != last:
                raise _NotExtractableError(
                    f"the value of `{name}` takes several lines in that version"
                )
            text = old_parsed.code_lines[row - 1].encode()[begin:stop].decode()
            return _Edit((row, begin), (row, stop), name), text
    raise _NotExtractableError(f"`{name}` is inside another named value; name only one of them")


def _walk(stmt: ast.AST, path: ExpressionPath = ()) -> Iterator[tuple[ExpressionPath, ast.AST]]:
    """Yield (`ExpressionPath` of an expression, expression) for a statement without its blocks.

    The path of `value` in `(name := value)` is the path of the whole `:=` expression; `path` leads to `stmt`.
    """
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


def _follow(stmt: ast.AST, path: ExpressionPath) -> ast.expr | None:
    node: object = stmt
    for field, at in path:
        value = getattr(node, field, None)
        items = value if isinstance(value, list) else [value]
        if at >= len(items):
            return None
        node = items[at]
    return node if isinstance(node, ast.expr) else None


def _corresponds(new: ast.AST | None, old: ast.AST | None) -> bool:
    """Return True if two expressions are equal, or are calls of functions with the same name."""
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
        after_edit = lines[last - 1][_character(parsed, *edit.end) :]
        lines[row - 1] = lines[row - 1][: _character(parsed, *edit.start)] + edit.text + after_edit
        for emptied_row in range(row, last):  # not removed, so that later lines keep their numbers
            lines[emptied_row] = "\n"
    return "".join(lines)


def _character(parsed: Parsed, row: int, column: int) -> int:
    """Return the index of a character in line `row` (from 1) whose `column` is counted in bytes of the code.

    A byte order mark counts as one character.
    """
    mark = row == 1 and parsed.lines[0].startswith("\ufeff")
    return mark + len(parsed.code_lines[row - 1].encode()[:column].decode())
