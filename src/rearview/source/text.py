"""Decode program text, split it into lines, and parse it to a syntax tree with blocks of statements.

`decode` and `encode` keep every byte. `parse` raises for text that is not Python; `try_parse` returns the reason
as a sentence, and also reads Python 2 if each line can be rewritten as Python 3.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import re
import warnings
from dataclasses import dataclass

from rearview.errors import SourceError

BODIES = ("body", "orelse", "finalbody")


def parse(text: str, path: str) -> ast.Module:
    """Return the syntax tree of `text`; if it is not Python, raise `SourceError`, which names `path` and the line."""
    try:
        return _tree(text)
    except _UnreadableError as exc:
        raise SourceError(
            f"{path}:{exc.line or 1} is not Python that this interpreter can read ({exc.reason}). "
            f"Correct the file and run the command again.",
            slug="source-syntax",
        ) from exc


def blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the blocks directly inside `node`, each a list of statements, in the order of the text."""
    lists: list[list[ast.stmt]] = []
    for name, value in ast.iter_fields(node):
        if name in BODIES and isinstance(value, list):
            lists.append(value)
        elif name in {"handlers", "cases"}:
            lists.extend(part.body for part in value)
    return lists


def effective(block: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements of a block that have an effect: all but `pass`, docstrings and other constants."""
    return [
        stmt
        for stmt in block
        if not isinstance(stmt, ast.Pass)
        and not (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant))
    ]


_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
UNDECODABLE = re.compile("[\ud800-\udfff]")
"""Matches a character that `decode` returns for a byte that is not valid in the encoding of the file."""

_REPAIRS = (
    (re.compile(r"^(\s*(?:.*?:\s+)?)print\s*>>\s*([\w.]+)\s*,\s*(.*)$"), r"\1print(\3, file=\2)"),
    (re.compile(r"^(\s*)print\s*$"), r"\1print()"),
    (re.compile(r"^(\s*(?:.*?[:;]\s+)?)print\s+(?![=(.])(.*?)(?<![\\(\[{,])\s*$"), r"\1print(\2)"),
    (re.compile(r"^(\s*(?:.*?[:;]\s+)?)print\s+(\(.*\)\s*%.*)$"), r"\1print(\2)"),
    (re.compile(r"^(\s*except\s+[\w.()\s,]*?[\w.)])\s*,\s*(\w+)\s*:"), r"\1 as \2:"),
    (re.compile(r"^(\s*raise\s+[\w.]+)\s*,\s*(.*)$"), r"\1(\2)"),
    (re.compile(r"^(\s*)exec\s+(?!\()(.*)$"), r"\1exec(\2)"),
)
"""(pattern for a line of Python 2, replacement by a line of Python 3)."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A program text with its lines and its syntax tree."""

    text: str
    lines: tuple[str, ...]
    tree: ast.Module
    code_lines: tuple[str, ...]
    """The lines that were parsed: `lines` without a byte order mark, with `?` for undecodable characters.

    If `repaired` is True, the lines are rewritten as Python 3."""
    repaired: bool = False
    """Whether the text is Python 2, and was parsed after its lines were rewritten as Python 3."""


def split(text: str) -> list[str]:
    r"""Return the lines of a text with their ends. As in Python source, only \n, \r\n and \r end a line.

    >>> split("a\r\nb\x0cc\n")
    ['a\r\n', 'b\x0cc\n']
    """
    return _LINE.findall(text)


def newline(lines: list[str] | tuple[str, ...], near: int) -> str:
    r"""Return the line end of the line nearest to index `near`; "\n" if no line within fifty lines has one."""
    order = sorted(
        range(max(0, near - 50), min(len(lines), near + 50)), key=lambda i: abs(i - near)
    )
    for number in order:
        line = lines[number]
        for end in ("\r\n", "\n", "\r"):
            if line.endswith(end):
                return end
    return "\n"


def decode(data: bytes) -> str:
    r"""Return the bytes of a source file as text, from which `encode(text, data)` makes the same bytes again.

    A byte order mark becomes a character. The bytes are decoded in the encoding that a coding comment declares, or
    in UTF-8 if there is none. Bytes that are not valid in the encoding become lone surrogates.

    >>> decode(bytes([120, 255]))
    'x\udcff'
    """
    return data.decode(encoding_of(data), "surrogateescape")


def encode(text: str, like: bytes) -> bytes:
    """Return text as bytes, in the encoding that the source bytes `like` declare."""
    return text.encode(encoding_of(like), "surrogateescape")


def encoding_of(data: bytes) -> str:
    """Return the encoding that source bytes declare, or UTF-8 if they declare no encoding or an unknown one."""
    for line in data.split(b"\n", 2)[:2]:
        if match := _COOKIE.match(line.removeprefix(codecs.BOM_UTF8)):
            name = match[1].decode("ascii")
            try:
                return codecs.lookup(name).name
            except LookupError:
                return "utf-8"
    return "utf-8"


def try_parse(text: str) -> Parsed | str:
    """Return the parsed text, or a sentence that says why it cannot be parsed.

    >>> try_parse("print 'loss', loss").repaired
    True
    >>> try_parse("def f(:")
    'line 1 does not parse (invalid syntax)'
    """
    lines = tuple(split(text))
    code = UNDECODABLE.sub("?", text)
    code = code.removeprefix("\ufeff")
    try:
        return Parsed(text, lines, _tree(code), tuple(split(code)))
    except _UnreadableError as exc:
        problem = str(exc)
    repaired = "".join(_repair(line) for line in split(code))
    if repaired != code:
        with contextlib.suppress(_UnreadableError):
            return Parsed(text, lines, _tree(repaired), tuple(split(repaired)), repaired=True)
    return problem


class _UnreadableError(Exception):
    """Raised if a text cannot be parsed. The message is a sentence that contains `line` and `reason`."""

    def __init__(self, sentence: str, reason: str, line: int | None = None) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.line = line


def _tree(code: str) -> ast.Module:
    """Return the syntax tree of `code`; raise `_UnreadableError` if it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of invalid escapes in the user's strings
            return ast.parse(code)
    except SyntaxError as exc:
        where = f"line {exc.lineno}" if exc.lineno is not None else "it"
        sentence = f"{where} does not parse ({exc.msg})"
        raise _UnreadableError(sentence, exc.msg, exc.lineno) from exc
    except ValueError as exc:
        raise _UnreadableError(f"it does not parse ({exc})", str(exc)) from exc
    except (RecursionError, MemoryError) as exc:
        reason = "it is nested too deeply to parse"
        raise _UnreadableError(reason, reason) from exc


def _repair(line: str) -> str:
    """Return a line of Python 2 as Python 3, or unchanged if no pattern of `_REPAIRS` matches."""
    body = line.rstrip("\r\n")
    end = line[len(body) :]
    for pattern, form in _REPAIRS:
        body, count = pattern.subn(form, body)
        if count:
            break
    return body + end
