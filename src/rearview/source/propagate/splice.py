"""Insert statements into another text: at the right line among comments, indented and renamed.

Statements that share a line with others are first put on separate lines.
"""

import ast
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from rearview.source.statement_trees import StatementNode, StatementTree, blocks_of
from rearview.source.text import Parsed, newline, split, try_parse

_PIECE = re.compile(
    r"""(?P<comment>\#[^\r\n]*)
    |(?P<string>(?P<prefix>[bBrRuUfFtT]{0,3})(?P<quote>'''|\"\"\"|'|"))
    |(?P<word>[^\W\d]\w*)
    |(?P<other>\s+|[0-9][\w.]*|.)""",
    re.VERBOSE | re.DOTALL,
)


def indent_of(line: str) -> str:
    """Return the blanks at the start of a line, without a byte order mark."""
    line = line.removeprefix("\ufeff")
    return line[: len(line) - len(line.lstrip(" \t\f"))]


def frozen_lines(trees: Iterable[ast.stmt]) -> set[int]:
    """Return the lines that start inside a string, which indenting would change."""
    lines: set[int] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno:
                if isinstance(node, ast.Constant) and not isinstance(node.value, (str, bytes)):
                    continue
                lines.update(range(node.lineno + 1, node.end_lineno + 1))
    return lines


def render(
    parsed: Parsed,
    lines: tuple[int, int],
    trees: list[ast.stmt],
    *,
    renamed: Mapping[str, str],
    indent: str,
    unit: str,
    end: str,
) -> str:
    """Return the lines of a text with another indentation and other names."""
    start, stop = lines
    chosen = [line.removeprefix("\ufeff") for line in parsed.lines[start - 1 : stop]]
    frozen = {at - start for at in frozen_lines(trees)}
    first = next(at for at, line in enumerate(chosen) if line.strip() and not _comment(line))
    base = indent_of(chosen[first])
    own = _unit(chosen, base)
    out: list[str] = []
    for at, line in enumerate(chosen):
        body = line.rstrip("\r\n")
        if at in frozen:
            out.append(body + end)
            continue
        inner = body.removeprefix(base) if body.startswith(base) else body.lstrip(" \t")
        if not inner.strip():
            out.append(end)
            continue
        out.append(indent + _reindent(inner, own, unit) + end)
    text = "".join(out)
    return rename(text, renamed) if renamed else text


def _comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _unit(lines: list[str], base: str) -> str:
    for line in lines:
        lead = indent_of(line)
        if line.strip() and lead.startswith(base) and len(lead) > len(base):
            return lead[len(base) :]
    return ""


def _reindent(inner: str, own: str, unit: str) -> str:
    """Replace leading steps of one indentation by steps of another, if both are known."""
    if not own or not unit or own == unit or own[0] == unit[0]:
        return inner
    steps = 0
    while inner.startswith(own):
        inner = inner[len(own) :]
        steps += 1
    return unit * steps + inner


def rename(text: str, names: Mapping[str, str]) -> str:
    """Return code with names replaced, in f-strings too; keywords are left alone.

    An attribute is replaced where `names` has it with its dot: `{".loss": "cost"}`, the keyword of an
    argument where `names` has it with its sign: `{"loss=": "cost"}`.

    >>> rename("log(loss=loss, v=f'{loss:.2f} loss', w=a.loss)", {"loss": "cost"})
    "log(loss=cost, v=f'{cost:.2f} loss', w=a.loss)"
    """
    out: list[str] = []
    at, before, depth = 0, "", 0
    while at < len(text):
        token = _PIECE.match(text, at)
        assert token is not None
        piece = token[0]
        if token["string"]:
            stop = _string_end(text, token.end(), token["quote"])
            piece = text[at:stop]
            if "f" in token["prefix"].lower():
                piece = _fields(piece, names)
            at, before = stop, "s"
            out.append(piece)
            continue
        at = token.end()
        if token["word"] and before == "." and f".{piece}" in names:
            out.append(names[f".{piece}"])
        elif token["word"] and piece in names and before != ".":
            keyword = depth and before in {"(", ","} and re.match(r"\s*=(?!=)", text[at:])
            out.append(names.get(f"{piece}=", piece) if keyword else names[piece])
        elif token["word"] and f"{piece}=" in names and before in {"(", ","}:
            keyword = depth and re.match(r"\s*=(?!=)", text[at:])
            out.append(names[f"{piece}="] if keyword else piece)
        else:
            out.append(piece)
        depth += (piece in "([{") - (piece in ")]}") if len(piece) == 1 else 0
        if piece.strip() and not token["comment"]:
            before = piece
    return "".join(out)


def _string_end(text: str, at: int, quote: str) -> int:
    # a backslash keeps the next quote from ending the string, also in a raw string
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text.startswith(quote, at):
            return at + len(quote)
        else:
            at += 1
    return len(text)


def _fields(string: str, names: Mapping[str, str]) -> str:
    out: list[str] = []
    at = 0
    while at < len(string):
        if string.startswith(("{{", "}}"), at):
            out.append(string[at : at + 2])
            at += 2
        elif string[at] == "{":
            stop = _field_end(string, at + 1)
            out.append("{" + rename(string[at + 1 : stop], names))
            at = stop
        else:
            out.append(string[at])
            at += 1
    return "".join(out)


def _field_end(string: str, at: int) -> int:
    """Return where the expression of a field ends: at its conversion, its format or its brace."""
    depth = 0
    while at < len(string):
        char = string[at]
        if char in "([{":
            depth += 1
        elif char in ")]" or (char == "}" and depth):
            depth -= 1
        elif not depth and (char in "}:" or (char == "!" and string[at + 1 : at + 2] != "=")):
            return at
        at += 1
    return len(string)


def put(old: str, line: int, text: str) -> str:
    """Return a text with lines inserted before a 1-based line; all other bytes stay."""
    lines = split(old)
    return "".join(lines[: line - 1]) + text + "".join(lines[line - 1 :])


TextPosition = tuple[int, int]
"""Line and column in bytes at which a statement begins."""


@dataclass(frozen=True, slots=True)
class SeparatedLines:
    """A text in which some statements were put on separate lines, and where lines were cut."""

    text: str
    cuts: tuple[TextPosition, ...] = ()

    def line(self, line: int, column: int = 0) -> int:
        """Return the new line of the code that was at a position."""
        return line + bisect_right(self.cuts, (line, column))


def separate_lines(text: str, positions: Collection[TextPosition]) -> SeparatedLines:
    r"""Return a text in which each of the statements that shares a line with others gets its own line.

    The place for one of them in an older text need not be right for the others.

    >>> separate_lines('x = f(); import rearview; rearview.log("x", x)  # now\n', [(1, 9)]).text
    'x = f()\nimport rearview\nrearview.log("x", x)  # now\n'
    >>> separate_lines('for i in x: g(i); log(i)\n', [(1, 18)]).text
    'for i in x:\n    g(i)\n    log(i)\n'
    """
    parsed = try_parse(text)
    if isinstance(parsed, str) or parsed.repaired or not positions:
        return SeparatedLines(text)
    cuts = sorted(cut for cut in _cuts(parsed) if cut.together & set(positions))
    lines = list(parsed.lines)
    for cut in reversed(cuts):
        lines[cut.end[0] - 1] = _cut(parsed, lines, cut)
    return SeparatedLines("".join(lines), tuple(cut.end for cut in cuts))


@dataclass(frozen=True, order=True, slots=True)
class _Cut:
    end: TextPosition
    """Start of the next statement."""
    start: TextPosition
    """End of the statement before, or of the head of the block."""
    indent: str
    together: frozenset[TextPosition]
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
    # `else` and `finally` have no nodes: take the line of the first statement after them
    inside = getattr(owner, "orelse", None), getattr(owner, "finalbody", None)
    return first.lineno if any(part and part[0] is first for part in inside) else line


def _lines(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield the statements of a block; statements that share a line come together."""
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
    for above, below in pairwise(group):
        end = (above.end_lineno or above.lineno, above.end_col_offset or 0)
        yield _Cut(_start(below), end, indent, together)


def _start(stmt: ast.stmt) -> TextPosition:
    return stmt.lineno, stmt.col_offset


def _code(parsed: Parsed, line: int, column: int) -> str:
    return parsed.code_lines[line - 1].encode()[:column].decode()


def _cut(parsed: Parsed, lines: list[str], cut: _Cut) -> str:
    """Return a line split in two at a cut; later cuts in the same line are already made."""
    row = cut.end[0]
    mark = len(parsed.lines[row - 1]) - len(parsed.code_lines[row - 1])  # a byte order mark
    first, second = (mark + len(_code(parsed, *each)) for each in (cut.start, cut.end))
    return lines[row - 1][:first] + newline(lines, row - 1) + cut.indent + lines[row - 1][second:]


def line_at(
    here: Parsed, lines: tuple[int, int], there: Parsed, block: StatementNode, index: int
) -> int:
    """Return the line of the old text, comments and blank lines around it placed as in the new."""
    old = there.lines
    if not block.children:
        return len(old) + 1
    if index < len(block.children):
        stop = block.children[index].start
        start = stop
        least = block.children[index - 1].end + 1 if index else 1
        while start > least and idle(old[start - 2]):
            start -= 1
    else:
        start = stop = block.children[-1].end + 1
        depth = len(indent_of(old[block.children[0].start - 1]))
        at = start
        while at <= len(old) and idle(old[at - 1]):
            at += 1
            if old[at - 2].strip() and len(indent_of(old[at - 2])) >= depth > 0:
                stop = at
    above, below = around(here.lines, lines)
    if index == len(block.children) and start == stop:
        for line in above:  # as many blank lines between as in the new text
            if line or stop > len(old) or old[stop - 1].strip():
                break
            stop += 1
        return stop
    gap = [line.strip() for line in old[start - 1 : stop - 1]]
    if not gap:
        return stop
    if not above and index:
        return start
    best, choice = -1.0, start
    for at in range(len(gap) + 1):
        score = 2.0 * _same(gap[:at][::-1], above[::-1]) + 2.0 * _same(gap[at:], below)
        score -= 0.1 * (
            abs(at - len(above)) if above or not below else abs(len(gap) - at - len(below))
        )
        if score > best or at == 0:
            best, choice = score, start + at
    return choice


def _same(first_lines: list[str], second_lines: list[str]) -> int:
    count = 0
    for first, second in zip(first_lines, second_lines, strict=False):
        if first != second:
            break
        count += 1
    return count


def idle(line: str) -> bool:
    """Return True if a line is blank or a comment."""
    line = line.strip()
    return not line or line.startswith("#")


def around(all_lines: tuple[str, ...], lines: tuple[int, int]) -> tuple[list[str], list[str]]:
    """Return the blank lines and comments directly before and after some lines, stripped."""
    start, end = lines
    above: list[str] = []
    while start > 1 and idle(all_lines[start - 2]):
        above.insert(0, all_lines[start - 2].strip())
        start -= 1
    below: list[str] = []
    while end < len(all_lines) and idle(all_lines[end]):
        below.append(all_lines[end].strip())
        end += 1
    return above, below


def comment_above(parsed: Parsed, lines: tuple[int, int]) -> tuple[str, ...]:
    """Return the comment directly above some lines, line by line."""
    above, _ = around(parsed.lines, lines)
    comments: list[str] = []
    for line in reversed(above):
        if not line:
            break
        comments.insert(0, line)
    return tuple(comments)


def step(tree: StatementTree) -> str:
    """Return one step of indentation of a text."""
    for node in tree.nodes:
        if node.is_block and node.parent is not None and node.children:
            inner = indent_of(tree.parsed.lines[node.children[0].start - 1])
            outer = indent_of(tree.parsed.lines[node.parent.start - 1])
            if inner.startswith(outer) and len(inner) > len(outer):
                return inner[len(outer) :]
    return "    "
