"""The only place that prints. Answers go to stdout, remarks to stderr."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from pathlib import Path

BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"
_OURS = f"{int.from_bytes(os.urandom(6), 'big')};"
"""Marks our own colours until they are printed, so that a colour in a name or value is told from them."""
_COLOR = re.compile(f"\x1b\\[{_OURS}([0-9]+)m")
COLORS = {"ok": GREEN, "warn": YELLOW, "fail": RED}


def colored(stream: TextIO) -> bool:
    """Say whether colour is wanted on `stream`: a terminal, and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str, stream: TextIO | None = None) -> str:
    """Return `text` in a colour if the stream (stdout) wants it."""
    return f"\x1b[{_OURS}{code}m{text}\x1b[{_OURS}0m" if colored(stream or sys.stdout) else text


def safe(text: str) -> str:
    """Return a text as a terminal may have it: our colours work, any other control is written out."""
    parts = _COLOR.split(text)
    return "".join(
        f"\x1b[{part}m" if odd % 2 else printable(part) for odd, part in enumerate(parts)
    )


def printable(text: str, *, line: bool = False) -> str:
    """Return `text` with control characters written out, so that no terminal obeys them."""
    from rearview.model.printable import printable as written_out  # the model takes a while to load

    return written_out(text, line=line)


class ReaderGone(Exception):  # noqa: N818 - no error: `rearview table | head` is fine
    """Whoever read our output went away."""


def out(text: str = "") -> None:
    """Print one line of an answer."""
    _print(safe(text))


def data(text: str) -> None:
    """Print one line for programs: as it is into a pipe or file, safe on a terminal."""
    _print(safe(text) if sys.stdout.isatty() else text)


def _print(text: str) -> None:
    try:
        print(text)
    except BrokenPipeError as exc:
        raise ReaderGone from exc


def note(text: str) -> None:
    """Print a remark, on stderr."""
    sys.stdout.flush()
    print(safe(text), file=sys.stderr, flush=True)


def said(text: str) -> None:
    """Print a remark of ours beside the output of a script: stderr, with our name."""
    note(paint(f"rearview: {text}", DIM, sys.stderr))


def problem(message: str, slug: str) -> None:
    """Print one of our own errors: one line, and where it is explained."""
    name = paint("rearview:", RED, sys.stderr)
    where = paint(f"(docs/errors.md#{slug})", DIM, sys.stderr)
    note(f"{name} {message} {where}")


def usage(exc: click.ClickException) -> None:
    """Print what is wrong with a command line and how to get help."""
    note(f"{paint('rearview:', RED, sys.stderr)} {exc.format_message()}")
    ctx = getattr(exc, "ctx", None)
    if ctx is not None:
        note(f"Try `{ctx.command_path} --help`.")


def bug(exc: BaseException) -> None:
    """Print an error nobody foresaw."""
    name = paint("rearview:", RED, sys.stderr)
    note(
        f"{name} unexpected error: {type(exc).__name__}: {exc}\n"
        "This is a defect in Rearview; nothing that was recorded is lost. "
        "`rearview --traceback …` shows where it happened."
    )


def overview(version: str) -> None:
    """Print what to do first."""
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
    count, root = _here()
    if root is not None:
        many = "1 run" if count == 1 else f"{count} runs"
        out(f"\n{root} has {many}: `rearview runs` lists them.")


def _here() -> tuple[int, Path | None]:
    from pathlib import Path

    from rearview.errors import RearviewError
    from rearview.store.project import Project

    try:
        project = Project.find(Path(os.environ.get("REARVIEW_ROOT") or Path.cwd()))
        if project is None or not project.runs.is_dir():
            return 0, None
        return sum((run / "run.json").is_file() for run in project.runs.iterdir()), project.root
    except (OSError, RearviewError):
        return 0, None


def block(pairs: Iterable[tuple[str, str]]) -> None:
    """Print labelled lines, labels in one column."""
    pairs = [(printable(label, line=True), text) for label, text in pairs]
    width = max((len(label) for label, _ in pairs), default=0)
    for label, text in pairs:
        first, *more = text.split("\n")
        out(f"{paint(f'{label:<{width}}', DIM)}  {first}")
        for line in more:
            out(f"{'':<{width}}  {line}")


def width() -> int:
    """Return the columns of the terminal; 80, or what `COLUMNS` says, where there is none."""
    import shutil

    return shutil.get_terminal_size((80, 24)).columns


def room(columns: int) -> int:
    """Return the characters that the cells of one line of a table may take."""
    between = 3 if sys.stdout.isatty() else 2
    return width() - between * (columns - 1)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[bool]) -> None:
    """Print a table of texts: with rules on a terminal, aligned plain text elsewhere.

    Only a terminal wraps long cells; in a pipe or file every row is one whole line.
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
    """Return a cell without controls but our own colours."""
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


def checked(level: str, name: str, what: str, remedy: str) -> None:
    """Print one line of a check-up, and what to do if it is not well."""
    out(f"{paint(f'{level:<4}', COLORS[level])}  {name:<12} {what}")
    if remedy:
        out(f"{'':<19}{paint(remedy, DIM)}")


def json_document(value: Any) -> None:
    """Print a value as one JSON document."""
    from rearview.cli.formats import json_text

    data(json_text(value, indent=2))


def json_line(value: Any) -> None:
    """Print a value as one line of JSON, at once."""
    from rearview.cli.formats import json_text

    data(json_text(value))
    sys.stdout.flush()
