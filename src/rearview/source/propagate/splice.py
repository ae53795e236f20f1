"""Insert lines into another text: between the right comments, with the indentation and the names of that text.

`separate_lines` first puts statements that share a line with other statements on separate lines.
"""

import ast
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from rearview.source.statement_trees import StatementNode, StatementTree, blocks_of
from rearview.source.text import Parsed, newline, split, try_parse

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\r\n]*)
    |(?P<string>(?P<prefix>[bBrRuUfFtT]{0,3})(?P<quote>'''|\"\"\"|'|"))
    |(?P<word>[^\W\d]\w*)
    |(?P<other>\s+|[0-9][\w.]*|.)""",
    re.VERBOSE | re.DOTALL,
)


def indent_of(line: str) -> str:
    """Return the blanks and tabs at the start of a line, after a byte order mark if there is one."""
    line = line.removeprefix("\ufeff")
    return line[: len(line) - len(line.lstrip(" \t\f"))]


def frozen_lines(trees: Iterable[ast.stmt]) -> set[int]:
    """Return the numbers of the lines that start inside a string: indenting such a line would change the string."""
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
    """Return the text of `lines` (first, last) as it is inserted into another text.

    The lines are indented by `indent`, and inner blocks by further steps of `unit`. Variables are `renamed` (name ->
    new name, as for `rename`), and each line ends with `end`. `trees` are the statements on the lines.
    """
    start, stop = lines
    selected_lines = [line.removeprefix("\ufeff") for line in parsed.lines[start - 1 : stop]]
    unchanged_lines = {at - start for at in frozen_lines(trees)}
    first = next(
        at for at, line in enumerate(selected_lines) if line.strip() and not _is_comment(line)
    )
    base = indent_of(selected_lines[first])
    own_unit = _unit(selected_lines, base)
    out: list[str] = []
    for at, line in enumerate(selected_lines):
        body = line.rstrip("\r\n")
        if at in unchanged_lines:
            out.append(body + end)
            continue
        inner = body.removeprefix(base) if body.startswith(base) else body.lstrip(" \t")
        if not inner.strip():
            out.append(end)
            continue
        out.append(indent + _reindent(inner, own_unit, unit) + end)
    text = "".join(out)
    return rename(text, renamed) if renamed else text


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _unit(lines: list[str], base: str) -> str:
    for line in lines:
        lead = indent_of(line)
        if line.strip() and lead.startswith(base) and len(lead) > len(base):
            return lead[len(base) :]
    return ""


def _reindent(inner: str, own: str, unit: str) -> str:
    """Return a line with each leading `own`, the indentation of its text, replaced by `unit`, if both are known."""
    if not own or not unit or own == unit or own[0] == unit[0]:
        return inner
    steps = 0
    while inner.startswith(own):
        inner = inner[len(own) :]
        steps += 1
    return unit * steps + inner


def rename(text: str, names: Mapping[str, str]) -> str:
    """Return code with variables renamed, also in f-strings; `names` maps names to new names.

    To rename an attribute, write the key of `names` with a dot: `{".loss": "cost"}`; to rename the keyword of an
    argument, write the key with an equals sign: `{"loss=": "cost"}`.

    >>> rename("log(loss=loss, v=f'{loss:.2f} loss', w=a.loss)", {"loss": "cost"})
    "log(loss=cost, v=f'{cost:.2f} loss', w=a.loss)"
    """
    out: list[str] = []
    at, before, depth = 0, "", 0
    while at < len(text):
        token = _TOKEN.match(text, at)
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
    """Return the index where the expression at `at` in an f-string ends: at `!`, `:` or the closing brace."""
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


def insert_lines(old: str, line: int, text: str) -> str:
    """Return the text `old` with the lines `text` inserted before `line`, counted from 1."""
    lines = split(old)
    return "".join(lines[: line - 1]) + text + "".join(lines[line - 1 :])


TextPosition = tuple[int, int]
"""(line, column in bytes) at which a statement begins or ends."""


@dataclass(frozen=True, slots=True)
class SeparatedLines:
    """The result of `separate_lines`: a text in which statements were put on separate lines."""

    text: str
    breaks: tuple[TextPosition, ...] = ()
    """The positions in the original text at which lines were split."""

    def line(self, line: int, column: int = 0) -> int:
        """Return the line in `text` of the code that was at (`line`, `column`) in the original text."""
        return line + bisect_right(self.breaks, (line, column))


def separate_lines(text: str, positions: Collection[TextPosition]) -> SeparatedLines:
    r"""Return `text` with each line split that has several statements, one of them at `positions`.

    Each of these statements then has its own line, because they may belong at different places of an older text.

    >>> separate_lines('x = f(); import rearview; rearview.log("x", x)  # now\n', [(1, 9)]).text
    'x = f()\nimport rearview\nrearview.log("x", x)  # now\n'
    >>> separate_lines('for i in x: g(i); log(i)\n', [(1, 18)]).text
    'for i in x:\n    g(i)\n    log(i)\n'
    """
    parsed = try_parse(text)
    if isinstance(parsed, str) or parsed.repaired or not positions:
        return SeparatedLines(text)
    breaks = sorted(
        line_break for line_break in _line_breaks(parsed) if line_break.statements & set(positions)
    )
    lines = list(parsed.lines)
    for line_break in reversed(breaks):
        lines[line_break.end[0] - 1] = _split_line(parsed, lines, line_break)
    return SeparatedLines("".join(lines), tuple(line_break.end for line_break in breaks))


@dataclass(frozen=True, order=True, slots=True)
class _LineBreak:
    end: TextPosition
    """Start of the statement after the break."""
    start: TextPosition
    """End of the statement before the break, or of the head of the block."""
    indent: str
    statements: frozenset[TextPosition]
    """The positions of all statements of the line."""


def _line_breaks(parsed: Parsed) -> Iterator[_LineBreak]:
    todo: list[tuple[int, list[ast.stmt]]] = [(0, parsed.tree.body)]
    while todo:
        head, body = todo.pop()
        for group in _lines(body):
            yield from _breaks_of_line(parsed, head, group)
        for stmt in body:
            todo.extend((_head_line(owner, inner[0]), inner) for _, owner, inner in blocks_of(stmt))


def _head_line(owner: ast.AST, first: ast.stmt) -> int:
    """Return the line on which the head of a block begins, such as the line of `for` for the body of a loop.

    `owner` is the syntax node with the block, `first` the first statement of the block.
    """
    line = getattr(getattr(owner, "pattern", owner), "lineno", first.lineno)
    # the syntax tree has no positions of `else` and `finally`: take the line of the first statement after them
    inside = getattr(owner, "orelse", None), getattr(owner, "finalbody", None)
    return first.lineno if any(part and part[0] is first for part in inside) else line


def _lines(body: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield lists of the statements of a block, in order; statements that share a line are in one list."""
    group: list[ast.stmt] = []
    for stmt in body:
        if group and group[-1].end_lineno != stmt.lineno:
            yield group
            group = []
        group.append(stmt)
    if group:
        yield group


def _breaks_of_line(parsed: Parsed, head: int, group: list[ast.stmt]) -> Iterator[_LineBreak]:
    if len(group) < 2:
        return
    statements = frozenset(_start(stmt) for stmt in group)
    code_before = _code(parsed, *_start(group[0]))
    indent = indent_of(parsed.lines[group[0].lineno - 1])
    if code_before.strip(" \t\f"):
        outer = indent_of(parsed.lines[head - 1])
        indent = outer + ("\t" if outer.endswith("\t") else "    ")
        stop = len(code_before.rstrip().encode())
        yield _LineBreak(_start(group[0]), (group[0].lineno, stop), indent, statements)
    for above, below in pairwise(group):
        end = (above.end_lineno or above.lineno, above.end_col_offset or 0)
        yield _LineBreak(_start(below), end, indent, statements)


def _start(stmt: ast.stmt) -> TextPosition:
    return stmt.lineno, stmt.col_offset


def _code(parsed: Parsed, line: int, column: int) -> str:
    return parsed.code_lines[line - 1].encode()[:column].decode()


def _split_line(parsed: Parsed, lines: list[str], line_break: _LineBreak) -> str:
    """Return the line with `line_break`, split in two; `lines` already has the later breaks of the same line."""
    row = line_break.end[0]
    # 1 if the line begins with a byte order mark, which `code_lines` do not have
    mark = len(parsed.lines[row - 1]) - len(parsed.code_lines[row - 1])
    first, second = (
        mark + len(_code(parsed, *each)) for each in (line_break.start, line_break.end)
    )
    return (
        lines[row - 1][:first]
        + newline(lines, row - 1)
        + line_break.indent
        + lines[row - 1][second:]
    )


def insertion_line(
    new_parsed: Parsed, lines: tuple[int, int], old_parsed: Parsed, block: StatementNode, index: int
) -> int:
    """Return the number of the old line before which `lines` of the new text are inserted.

    They are inserted before child `index` of `block` in the old text, and above, below or between the comments and
    blank lines there as in the new text.
    """
    old_lines = old_parsed.lines
    if not block.children:
        return len(old_lines) + 1
    if index < len(block.children):
        stop = block.children[index].start
        start = stop
        least = block.children[index - 1].end + 1 if index else 1
        while start > least and is_blank_or_comment(old_lines[start - 2]):
            start -= 1
    else:
        start = stop = block.children[-1].end + 1
        depth = len(indent_of(old_lines[block.children[0].start - 1]))
        at = start
        while at <= len(old_lines) and is_blank_or_comment(old_lines[at - 1]):
            at += 1
            if old_lines[at - 2].strip() and len(indent_of(old_lines[at - 2])) >= depth > 0:
                stop = at
    above, below = comments_around(new_parsed.lines, lines)
    if index == len(block.children) and start == stop:
        for line in above:  # insert below as many blank lines as in the new text
            if line or stop > len(old_lines) or old_lines[stop - 1].strip():
                break
            stop += 1
        return stop
    gap = [line.strip() for line in old_lines[start - 1 : stop - 1]]
    if not gap:
        return stop
    if not above and index:
        return start
    best_score, choice = -1.0, start
    for at in range(len(gap) + 1):
        score = 2.0 * _equal_lines_at_start(
            gap[:at][::-1], above[::-1]
        ) + 2.0 * _equal_lines_at_start(gap[at:], below)
        score -= 0.1 * (
            abs(at - len(above)) if above or not below else abs(len(gap) - at - len(below))
        )
        if score > best_score or at == 0:
            best_score, choice = score, start + at
    return choice


def _equal_lines_at_start(first_lines: list[str], second_lines: list[str]) -> int:
    count = 0
    for first, second in zip(first_lines, second_lines, strict=False):
        if first != second:
            break
        count += 1
    return count


def is_blank_or_comment(line: str) -> bool:
    """Return True if a line is blank or a comment."""
    line = line.strip()
    return not line or line.startswith("#")


def comments_around(
    all_lines: tuple[str, ...], lines: tuple[int, int]
) -> tuple[list[str], list[str]]:
    """Return (blank lines and comments directly before `lines`, those directly after `lines`), each stripped."""
    start, end = lines
    above: list[str] = []
    while start > 1 and is_blank_or_comment(all_lines[start - 2]):
        above.insert(0, all_lines[start - 2].strip())
        start -= 1
    below: list[str] = []
    while end < len(all_lines) and is_blank_or_comment(all_lines[end]):
        below.append(all_lines[end].strip())
        end += 1
    return above, below


def comment_above(parsed: Parsed, lines: tuple[int, int]) -> tuple[str, ...]:
    """Return the lines of the comment directly above `lines`, stripped; empty if there is no comment."""
    above, _ = comments_around(parsed.lines, lines)
    comments: list[str] = []
    for line in reversed(above):
        if not line:
            break
        comments.insert(0, line)
    return tuple(comments)


def indent_unit(tree: StatementTree) -> str:
    """Return the blanks or tabs by which a text indents a block; four blanks if it has no indented block."""
    for node in tree.nodes:
        if node.is_block and node.parent is not None and node.children:
            inner = indent_of(tree.parsed.lines[node.children[0].start - 1])
            outer = indent_of(tree.parsed.lines[node.parent.start - 1])
            if inner.startswith(outer) and len(inner) > len(outer):
                return inner[len(outer) :]
    return "    "
