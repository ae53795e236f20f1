"""Let a script say at run time which of its cells is being executed."""

from __future__ import annotations

import ast
import difflib

from rearview.source.cells import cut

ENTER = "__rearview_cell__"
"""Name of the call that stands before the first statement of a cell."""


def cell_starts(recorded: str, text: str) -> dict[int, int]:
    r"""Return the cells of a script by the line of the statement that each begins with.

    They are cut as in the text that was `recorded`; `text` is that, perhaps with statements added, which
    belong to the cell that they stand in.

    >>> old = "import a\n\nx = 1\n\nfor i in x:\n    f(i)\n"
    >>> cell_starts(old, old)
    {1: 1, 3: 2, 5: 3}
    >>> cell_starts(old, old.replace("x = 1\n", "x = 1\n\nlog(x)\n"))
    {1: 1, 3: 2, 7: 3}
    """
    tree = ast.parse(recorded)
    firsts: dict[int, int] = {}
    statements = [_first_line(node) for node in tree.body]
    for number, cell in enumerate(cut(recorded), 1):
        inside = range(cell.line, cell.line + cell.text.count("\n") + 1)
        line = next((each for each in statements if each in inside and each not in firsts), None)
        if line is not None:
            firsts[line] = number
    if text == recorded:
        return firsts
    pairs = difflib.SequenceMatcher(None, recorded.split("\n"), text.split("\n"), autojunk=False)
    moved = {
        block.a + k + 1: block.b + k + 1
        for block in pairs.get_matching_blocks()
        for k in range(block.size)
    }
    heads = {_first_line(node) for node in ast.parse(text).body}
    return {
        moved[line]: number
        for line, number in firsts.items()
        if line in moved and moved[line] in heads
    }


def mark_cells(tree: ast.Module, starts: dict[int, int]) -> None:
    """Put a call before each statement with which a cell begins; `starts` gives the cells by line."""
    body: list[ast.stmt] = []
    waiting = 0
    for place, node in enumerate(tree.body):
        waiting = starts.get(_first_line(node), waiting)
        if waiting and not _must_be_first(node, place):
            call = ast.Call(ast.Name(ENTER, ast.Load()), [ast.Constant(waiting)], [])
            mark = ast.copy_location(ast.Expr(ast.copy_location(call, node)), node)
            body.append(ast.fix_missing_locations(mark))
            waiting = 0
        body.append(node)
    tree.body = body


def _must_be_first(node: ast.stmt, place: int) -> bool:
    """Return True for a docstring, and for an import from `__future__`."""
    if isinstance(node, ast.ImportFrom):
        return node.module == "__future__"
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return place == 0 and text


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])
