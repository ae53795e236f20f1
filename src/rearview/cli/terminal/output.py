"""Print answers to stdout, notes and errors to stderr. Only this module of the package prints.

This module also formats rows as text: JSON, CSV, Markdown, or a table for a terminal.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from pathlib import Path


FORMATS = ("table", "json", "csv", "markdown")


_CONTROL = re.compile(
    "[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def plain(value: Any) -> Any:
    """Return `value` converted to types that JSON has; numbers are not rounded, and unknown types become text.

    JSON has no NaN and no infinities; these become the strings "NaN", "Infinity" and "-Infinity",
    because null would say that nothing was logged.

    >>> plain({"loss": float("nan"), "at": (1, 2)})
    {'loss': 'NaN', 'at': [1, 2]}
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if _is_stored(value):
        return plain(value.facts)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    # a msgspec.Struct, recognized without importing msgspec
    if hasattr(value, "__struct_fields__"):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    return str(value)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON text; floats have all digits, so that parsing the text gives the same floats."""
    text = json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)
    # escape control characters that JSON allows but a terminal obeys; parsing still gives the same text
    return _CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], text)


def json_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    r"""Yield the lines of a JSON list with one object per row; rows are read one at a time, to save memory.

    >>> print("\n".join(json_lines(["run", "loss"], [("a", 0.5), ("b", None)])))
    [
    {"run": "a", "loss": 0.5},
    {"run": "b", "loss": null}
    ]
    """
    before = None
    yield "["
    for row in rows:
        if before is not None:
            yield before + ","
        before = json_text(dict(zip(columns, row, strict=True)))
    if before is not None:
        yield before
    yield "]"


def csv_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield the lines of a CSV file with a header; None is an empty field, a list, mapping or array is JSON."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")  # this terminator makes csv quote \r and \n
    for row in chain([columns], _cells(rows)):
        writer.writerow(row)
        yield buffer.getvalue()[:-2]
        buffer.seek(0)
        buffer.truncate()


def _cells(rows: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
    for row in rows:
        yield [
            json_text(c) if isinstance(c, (dict, list)) or _is_stored(c) else plain(c) for c in row
        ]


def markdown_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    r"""Yield the lines of a Markdown table, with values in the short form of `cell`.

    >>> print("\n".join(markdown_lines(["run", "loss"], [("a", 0.123456789)])))
    | run | loss |
    |---|---|
    | a | 0.123457 |
    """
    yield "| " + " | ".join(map(_escape, columns)) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(_escape(cell(value)) for value in row) + " |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def cell(value: Any) -> str:
    """Return a value as short text for a table: floats with six digits, None as an empty text.

    >>> cell(0.000123456789), cell(None), cell(True)
    ('0.000123457', '', 'true')
    >>> from rearview.store.stored_arrays_and_media import StoredValue
    >>> cell([StoredValue("tensor", "float32", (64, 10), "ab12", 2560), 1])
    '[float32[64, 10], 1]'
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (Mapping, list, tuple)):
        return _nested(value)
    return value.isoformat(" ", "seconds") if isinstance(value, datetime) else str(value)


def _is_stored(value: Any) -> bool:
    """Return True if `value` is a `StoredValue`; the module of this class is not imported."""
    module = sys.modules.get("rearview.store.stored_arrays_and_media")
    return module is not None and isinstance(value, module.StoredValue)


def _nested(value: Any) -> str:
    """Return a list or dictionary as JSON text, with a short description in place of each stored array."""
    if isinstance(value, Mapping):
        items = (f"{json_text(str(key))}: {_nested(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_nested, value))}]"
    return str(value) if _is_stored(value) else json_text(value)


def numeric(values: Iterable[Any]) -> bool:
    """Return True if all `values` of a column except None are numbers, so that the column is aligned to the right."""
    present = [value for value in values if value is not None]
    return bool(present) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in present
    )


def duration(seconds: float | None) -> str:
    """Return a time span as text in at most two units; see `model.wording.duration`."""
    from rearview.model.wording import duration as time_span  # importing the model takes time

    return time_span(seconds)


def size(count: float) -> str:
    """Return a number of bytes as text in a suitable unit; see `model.wording.size`."""
    from rearview.model.wording import size as readable  # importing the model takes time

    return readable(count)


def moment(seconds: float) -> str:
    """Return the time `seconds` (since 1970) as date and time in the user's time zone."""
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M:%S}"


def short_moment(seconds: float) -> str:
    """Return the time `seconds` (since 1970) in twelve characters: day and time, or day and year if long ago."""
    then, now = datetime.fromtimestamp(seconds, UTC).astimezone(), datetime.now(UTC).astimezone()
    return f"{then:%b %d %H:%M}" if abs((now - then).days) < 180 else f"{then:%b %d  %Y}"


def fitted(
    columns: Sequence[str], rows: Sequence[Sequence[str]], room: int, *, shrink: int
) -> list[list[str]]:
    """Return `rows` with texts in the last `shrink` columns cut, so that each row fits into `room` characters.

    The column that exceeds its heading most is cut first. No column gets narrower than its heading, so rows may
    still be too long.

    >>> fitted(["run", "command"], [["a", "train.py --lr 0.1"]], 12, shrink=1)
    [['a', 'train.py…']]
    """
    widths = [max(len(name), *(len(row[k]) for row in rows)) for k, name in enumerate(columns)]
    loose = range(len(columns) - shrink, len(columns))
    while sum(widths) > room:
        widest = max(loose, key=lambda k: widths[k] - len(columns[k]), default=None)
        if widest is None or widths[widest] <= len(columns[widest]):
            break
        widths[widest] -= 1
    return [
        [
            text if len(text) <= max_width else text[: max_width - 1] + "…"
            for text, max_width in zip(row, widths, strict=True)
        ]
        for row in rows
    ]


def plural(count: int, word: str) -> str:
    """Return `count` and `word` as text, with the plural of `word` unless `count` is 1: "2 runs"."""
    from rearview.model.wording import plural as counted  # importing the model takes time

    return counted(count, word)


BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"
_OURS = f"{int.from_bytes(os.urandom(6), 'big')};"
"""Random number inside Rearview's own colour codes: when text is printed, all other escape codes are made harmless."""
_COLOR = re.compile(f"\x1b\\[{_OURS}([0-9]+)m")
COLORS = {"ok": GREEN, "warn": YELLOW, "fail": RED}


def colored(stream: TextIO) -> bool:
    """Return True if output to `stream` should be coloured: it is a terminal that knows colours.

    The environment variables NO_COLOR and FORCE_COLOR override this.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str, stream: TextIO | None = None) -> str:
    """Return `text` in the colour `code` if `stream` (default: stdout) is coloured, else `text` unchanged."""
    return f"\x1b[{_OURS}{code}m{text}\x1b[{_OURS}0m" if colored(stream or sys.stdout) else text


def safe(text: str) -> str:
    """Return `text` for a terminal: colours set by `paint` work, all other control characters are escaped."""
    parts = _COLOR.split(text)
    return "".join(
        f"\x1b[{part}m" if odd % 2 else printable(part) for odd, part in enumerate(parts)
    )


def printable(text: str, *, line: bool = False) -> str:
    """Return `text` with control characters escaped, so that a terminal does not obey them.

    `line` says that the text must stay on one line; see `model.wording.printable`.
    """
    from rearview.model.wording import printable as written_out  # importing the model takes time

    return written_out(text, line=line)


class ReaderGone(Exception):  # noqa: N818 - no error: `rearview table | head` is fine
    """Raised when stdout is a pipe and the process that read from it has ended."""


def out(text: str = "") -> None:
    """Print `text` as part of an answer, on stdout."""
    _print(safe(text))


def data(text: str) -> None:
    """Print on stdout a line that programs may read: unchanged into a pipe or file, escaped on a terminal."""
    _print(safe(text) if sys.stdout.isatty() else text)


def _print(text: str) -> None:
    try:
        print(text)
    except BrokenPipeError as exc:
        raise ReaderGone from exc


def note(text: str) -> None:
    """Print a note on stderr."""
    sys.stdout.flush()
    print(safe(text), file=sys.stderr, flush=True)


def prefixed_note(text: str) -> None:
    """Print a note on stderr that begins with "rearview:", because the user's script may print on stderr too."""
    note(paint(f"rearview: {text}", DIM, sys.stderr))


def problem(message: str, slug: str) -> None:
    """Print the message of a Rearview error on stderr, and the paragraph of docs/errors.md that explains it."""
    name = paint("rearview:", RED, sys.stderr)
    where = paint(f"(docs/errors.md#{slug})", DIM, sys.stderr)
    note(f"{name} {message} {where}")


def usage(exc: click.ClickException) -> None:
    """Print on stderr the mistake in a command line, and the command that prints help."""
    note(f"{paint('rearview:', RED, sys.stderr)} {exc.format_message()}")
    ctx = getattr(exc, "ctx", None)
    if ctx is not None:
        note(f"Try `{ctx.command_path} --help`.")


def bug(exc: BaseException) -> None:
    """Print on stderr an unexpected error, which is a defect in Rearview, and the option that shows its traceback."""
    name = paint("rearview:", RED, sys.stderr)
    note(
        f"{name} unexpected error: {type(exc).__name__}: {exc}\n"
        "This is a defect in Rearview; nothing that was recorded is lost. "
        "`rearview --traceback …` shows where it happened."
    )


def overview(version: str) -> None:
    """Print the first commands that a new user needs and, in a project, the number of its runs."""
    lines = (
        ("rearview run train.py", "record a run; the script needs no changes"),
        ("", "… later, add a log statement to train.py …"),
        ("rearview backfill grad_norm", "fill the new column for the past runs"),
        ("rearview table loss grad_norm", "look at it"),
        None,
        ("rearview demo", "see all of that happen in under a minute"),
        ("rearview --help", "every command"),
    )
    out(f"{paint('Rearview', BOLD)} {version}: hindsight for model training.\n")
    for line in lines:
        out(f"  {paint(f'{line[0]:<32}', CYAN)}{line[1]}" if line else "")
    count, root = _project_status()
    if root is not None:
        lists = "`rearview runs` lists it" if count == 1 else "`rearview runs` lists them"
        out(f"\n{root} has {plural(count, 'run')}: {lists}.")


def _project_status() -> tuple[int, Path | None]:
    from pathlib import Path

    from rearview._history import Project
    from rearview.errors import RearviewError

    try:
        project = Project.find(Path(os.environ.get("REARVIEW_ROOT") or Path.cwd()))
        if project is None or not project.runs.is_dir():
            return 0, None
        return sum((run / "run.json").is_file() for run in project.runs.iterdir()), project.root
    except (OSError, RearviewError):
        return 0, None


def block(pairs: Iterable[tuple[str, str]]) -> None:
    """Print (label, text) pairs, with the labels in one column; a text may have several lines."""
    pairs = [(printable(label, line=True), text) for label, text in pairs]
    width = max((len(label) for label, _ in pairs), default=0)
    for label, text in pairs:
        first, *further_lines = text.split("\n")
        out(f"{paint(f'{label:<{width}}', DIM)}  {first}")
        for line in further_lines:
            out(f"{'':<{width}}  {line}")


def width() -> int:
    """Return the width of the output in characters: `COLUMNS` if set, else that of the terminal, else 80."""
    import shutil

    return shutil.get_terminal_size((80, 24)).columns


def room(columns: int) -> int:
    """Return the number of characters for all cells of one row of a table that has this number of columns."""
    between = 3 if sys.stdout.isatty() else 2
    return width() - between * (columns - 1)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[bool]) -> None:
    """Print a table of texts; columns with True in `right` are aligned to the right.

    On a terminal, a line follows the headings, and long cells are wrapped. In a pipe or file, the table is plain
    text with one line per row.
    """
    columns = [printable(name, line=True) for name in columns]
    rows = [[_one_line(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        _plain(columns, rows, right)
        return
    import shutil

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    wide = shutil.get_terminal_size().columns
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for name, numeric in zip(columns, right, strict=True):
        shown.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text.from_ansi(cell) for cell in row))
    Console(width=wide, highlight=False, no_color=not colored(sys.stdout)).print(shown)


def _one_line(cell: str) -> str:
    """Return a cell as one line, with all control characters escaped except colour codes of `paint`."""
    parts = re.split(f"(\x1b\\[{_OURS}[0-9]+m)", cell)
    return "".join(
        part if odd % 2 else printable(part, line=True) for odd, part in enumerate(parts)
    )


def _plain(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    widths = [
        max([len(name), *(len(click.unstyle(row[index])) for row in rows)])
        for index, name in enumerate(columns)
    ]
    for row in (columns, *rows):
        cells = (
            " " * (width - len(click.unstyle(cell))) + cell
            if numeric
            else cell + " " * (width - len(click.unstyle(cell)))
            for cell, width, numeric in zip(row, widths, right, strict=True)
        )
        out("  ".join(cells).rstrip())


def diff(text: str) -> None:
    """Print a unified diff, coloured on a terminal."""
    for line in text.splitlines():
        out(paint(line, _diff_color(line)) if _diff_color(line) else line)


def _diff_color(line: str) -> str:
    if line.startswith(("+++", "---")):
        return BOLD
    return {"+": GREEN, "-": RED, "@": CYAN}.get(line[:1], "")


def check_result(level: str, name: str, result: str, remedy: str) -> None:
    """Print the result of one check of `rearview doctor`, and the remedy if it is not empty."""
    out(f"{paint(f'{level:<4}', COLORS[level])}  {name:<12} {result}")
    if remedy:
        out(f"{'':<19}{paint(remedy, DIM)}")


def json_document(value: Any) -> None:
    """Print a value on stdout as one JSON document, indented."""
    data(json_text(value, indent=2))


def json_line(value: Any) -> None:
    """Print a value on stdout as one line of JSON, and flush, so that a reading program gets it at once."""
    data(json_text(value))
    sys.stdout.flush()
