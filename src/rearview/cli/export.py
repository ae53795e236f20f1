"""The command export: a table as a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rearview.cli import formats, show
from rearview.cli.ask import tell_damage
from rearview.cli.formats import plural
from rearview.cli.options import TakesRuns, asked, some_names, some_runs
from rearview.cli.progress import waiting
from rearview.errors import UsageError

if TYPE_CHECKING:
    from rearview.store.tables.table import Table


def _object_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    for row in rows:
        yield formats.json_text(dict(zip(columns, row, strict=True)))


Lines = Callable[[Sequence[str], Iterable[Sequence[Any]]], Iterator[str]]
TEXTS: dict[str, Lines] = {
    ".csv": formats.csv_lines,
    ".json": formats.json_lines,
    ".jsonl": _object_lines,
    ".md": formats.markdown_lines,
}
"""How to write a table as text, by the suffix of the file."""


@click.command(cls=TakesRuns)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@some_names(required=False)
@click.option("--where", metavar="SQL", help="Only rows for which this holds: 'acc < 0.9'.")
@some_runs
@click.option("--unproved", is_flag=True, help="Also values of replays that were not exact.")
def export(
    file: Path, names: tuple[str, ...], where: str | None, which: tuple[str, ...], unproved: bool
) -> None:
    """Write a table to FILE, as `rearview table NAMES` shows it.

    The suffix says how: .csv, .json, .jsonl, .md or .parquet. The file is replaced as a whole when
    the table is complete; the same question about the same runs writes the same bytes.
    """
    suffix = file.suffix.lower()
    if suffix not in {*TEXTS, ".parquet"}:
        known = ", ".join([*TEXTS, ".parquet"])
        raise click.BadParameter(
            f"{str(file)!r} does not say how to write it. End it with one of {known}.",
            param_hint="FILE",
        )
    past = asked()
    with waiting("writing the table"):
        found = past.table(*names, where=where, runs=list(which) or None, unproved=unproved)
        aside = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            if suffix == ".parquet":
                found.parquet(aside)
            else:
                _write(found, aside, TEXTS[suffix], "\r\n" if suffix == ".csv" else "\n")
            aside.replace(file)
        except OSError as exc:
            raise UsageError(
                f"{file} cannot be written: {exc.strerror or exc}. Name a file in a folder that is "
                "there and that you may write to.",
                slug="file-unwritable",
            ) from exc
        finally:
            aside.unlink(missing_ok=True)
    show.out(f"wrote {plural(found.count(), 'row')} to {file}")
    tell_damage(past)


def _write(table: Table, file: Path, lines: Lines, end: str) -> None:
    with file.open("w", encoding="utf-8", errors="backslashreplace", newline="") as out:
        for line in lines(table.columns, (tuple(row.values()) for row in table)):
            out.write(line + end)
