"""Statements that share a line, each given a line of its own."""

import ast
from bisect import bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

from rearview.source.splice import indent_of
from rearview.source.text import Parsed, newline, parse
from rearview.source.tree import blocks_of

Spot = tuple[int, int]
"""Line and column in bytes at which a statement begins."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A text in which some statements got lines of their own, and where it was cut."""

    text: str
    cuts: tuple[Spot, ...] = ()

    def line(self, line: int, column: int = 0) -> int:
        """Return the line at which what stood at a place stands now."""
        return line + bisect_right(self.cuts, (line, column))


def apart(text: str, spots: Collection[Spot]) -> Apart:
    r"""Return a text with every line cut up that holds one of the statements beside others.

    A place that an older text gives to one of them need not be right for the others.

    >>> apart('x = f(); import rearview; rearview.log("x", x)  # now\n', [(1, 9)]).text
    'x = f()\nimport rearview\nrearview.log("x", x)  # now\n'
    >>> apart('for i in x: g(i); log(i)\n', [(1, 18)]).text
    'for i in x:\n    g(i)\n    log(i)\n'
    """
    parsed = parse(text)
    if isinstance(parsed, str) or parsed.repaired or not spots:
        return Apart(text)
    cuts = sorted(cut for cut in _cuts(parsed) if cut.together & set(spots))
    lines = list(parsed.lines)
    for cut in reversed(cuts):
        lines[cut.end[0] - 1] = _cut(parsed, lines, cut)
    return Apart("".join(lines), tuple(cut.end for cut in cuts))


@dataclass(frozen=True, order=True, slots=True)
class _Cut:
    end: Spot
    """Where the next statement begins."""
    start: Spot
    """Where the one before, or the head of the block, ends."""
    indent: str
    together: frozenset[Spot]
    """All statements of that line."""


def _cuts(parsed: Parsed) -> Iterator[_Cut]:
    todo: list[tuple[int, list[ast.stmt]]] = [(0, parsed.tree.body)]
    while todo:
        head, body = todo.pop()
        for group in _lines(body):
            yield from _between(parsed, head, group)
        for stmt in body:
            todo.extend((_head_line(owner, inner[0]), inner) for _, owner, inner in blocks_of(stmt))


def _head_line(owner: ast.AST, first: ast.stmt) -> int:
    """Return the line on which the head of a block begins."""
    line = getattr(getattr(owner, "pattern", owner), "lineno", first.lineno)
    # the heads of `else` and `finally` are no nodes; they stand on the line of what follows them
    inside = getattr(owner, "orelse", None), getattr(owner, "finalbody", None)
    return first.lineno if any(part and part[0] is first for part in inside) else line


def _lines(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield the statements of a block, those that share a line together."""
    group: list[ast.stmt] = []
    for stmt in body:
        if group and group[-1].end_lineno != stmt.lineno:
            yield group
            group = []
        group.append(stmt)
    if group:
        yield group


def _between(parsed: Parsed, head: int, group: list[ast.stmt]) -> Iterator[_Cut]:
    if len(group) < 2:
        return
    together = frozenset(_start(stmt) for stmt in group)
    before = _code(parsed, *_start(group[0]))
    indent = indent_of(parsed.lines[group[0].lineno - 1])
    if before.strip(" \t\f"):
        outer = indent_of(parsed.lines[head - 1])
        indent = outer + ("\t" if outer.endswith("\t") else "    ")
        stop = len(before.rstrip().encode())
        yield _Cut(_start(group[0]), (group[0].lineno, stop), indent, together)
    for one, two in pairwise(group):
        end = (one.end_lineno or one.lineno, one.end_col_offset or 0)
        yield _Cut(_start(two), end, indent, together)


def _start(stmt: ast.stmt) -> Spot:
    return stmt.lineno, stmt.col_offset


def _code(parsed: Parsed, line: int, column: int) -> str:
    return parsed.code_lines[line - 1].encode()[:column].decode()


def _cut(parsed: Parsed, lines: list[str], cut: _Cut) -> str:
    """Return a line with a new one begun at a cut; later cuts in it were made before."""
    row = cut.end[0]
    mark = len(parsed.lines[row - 1]) - len(parsed.code_lines[row - 1])  # a byte order mark
    first, second = (mark + len(_code(parsed, *spot)) for spot in (cut.start, cut.end))
    return lines[row - 1][:first] + newline(lines, row - 1) + cut.indent + lines[row - 1][second:]
