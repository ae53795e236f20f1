"""Statements as text for another file: indented, renamed, with that file's line ends."""

import ast
import re
from collections.abc import Iterable, Mapping

from rearview.source.text import Parsed, split

_PIECE = re.compile(
    r"""(?P<comment>\#[^\r\n]*)
    |(?P<string>(?P<prefix>[bBrRuUfFtT]{0,3})(?P<quote>'''|\"\"\"|'|"))
    |(?P<word>[^\W\d]\w*)
    |(?P<other>\s+|[0-9][\w.]*|.)""",
    re.VERBOSE | re.DOTALL,
)


def indent_of(line: str) -> str:
    """Return the blanks a line starts with, a byte order mark not counted."""
    line = line.removeprefix("\ufeff")
    return line[: len(line) - len(line.lstrip(" \t\f"))]


def frozen_lines(trees: Iterable[ast.stmt]) -> set[int]:
    """Return the lines that start inside a string, which indenting would change."""
    found: set[int] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno:
                if isinstance(node, ast.Constant) and not isinstance(node.value, (str, bytes)):
                    continue
                found.update(range(node.lineno + 1, node.end_lineno + 1))
    return found


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
    """Return the lines of a text as they must read at another indentation, with other names."""
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
    """Turn leading steps of one indentation into steps of another where both are known."""
    if not own or not unit or own == unit or own[0] == unit[0]:
        return inner
    steps = 0
    while inner.startswith(own):
        inner = inner[len(own) :]
        steps += 1
    return unit * steps + inner


def rename(text: str, names: Mapping[str, str]) -> str:
    """Return code with names replaced, in f-strings too; keywords are left alone.

    An attribute is replaced where `names` has it with its dot: `{".loss": "cost"}`.

    >>> rename("log(loss=loss, v=f'{loss:.2f} loss', w=a.loss)", {"loss": "cost"})
    "log(loss=cost, v=f'{cost:.2f} loss', w=a.loss)"
    """
    out: list[str] = []
    at, before, depth = 0, "", 0
    while at < len(text):
        found = _PIECE.match(text, at)
        assert found is not None
        piece = found[0]
        if found["string"]:
            stop = _string_end(text, found.end(), found["quote"], "r" in found["prefix"].lower())
            piece = text[at:stop]
            if "f" in found["prefix"].lower():
                piece = _fields(piece, names)
            at, before = stop, "s"
            out.append(piece)
            continue
        at = found.end()
        if found["word"] and before == "." and f".{piece}" in names:
            out.append(names[f".{piece}"])
        elif found["word"] and piece in names and before != ".":
            keyword = depth and before in {"(", ","} and re.match(r"\s*=(?!=)", text[at:])
            out.append(piece if keyword else names[piece])
        else:
            out.append(piece)
        depth += (piece in "([{") - (piece in ")]}") if len(piece) == 1 else 0
        if piece.strip() and not found["comment"]:
            before = piece
    return "".join(out)


def _string_end(text: str, at: int, quote: str, raw: bool) -> int:
    del raw  # a backslash keeps the next quote from ending a raw string as well
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
    """Return a text with lines put before a 1-based line; the rest stays byte for byte."""
    lines = split(old)
    return "".join(lines[: line - 1]) + text + "".join(lines[line - 1 :])
