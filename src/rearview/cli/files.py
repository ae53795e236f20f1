"""Commands that write files: export (a table as a file), and files (what a run wrote)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rearview.cli.bridges import TABLES, TRACKERS, export_runs
from rearview.cli.options import (
    TakesRuns,
    json_option,
    one_run,
    open_history,
    some_names,
    some_runs,
)
from rearview.cli.query import tell_damage
from rearview.cli.terminal import output
from rearview.cli.terminal.output import plain, plural, size
from rearview.cli.terminal.progress import waiting
from rearview.errors import UsageError

if TYPE_CHECKING:
    from rearview._history import Table


def _object_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    for row in rows:
        yield output.json_text(dict(zip(columns, row, strict=True)))


Lines = Callable[[Sequence[str], Iterable[Sequence[Any]]], Iterator[str]]
TEXTS: dict[str, Lines] = {
    ".csv": output.csv_lines,
    ".json": output.json_lines,
    ".jsonl": _object_lines,
    ".md": output.markdown_lines,
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
    """Write a table to FILE, or runs to another tracker.

    A table is as `rearview table NAMES` shows it. The suffix says how: .csv, .json, .jsonl, .md or
    .parquet, or a word before the file does: `rearview export parquet FILE NAMES`. The file is
    replaced as a whole when the table is complete; the same question about the same runs writes the
    same bytes.

    `rearview export tensorboard FOLDER NAMES` writes event files, `mlflow PLACE` runs of an MLflow
    store, `wandb-offline FOLDER` runs for `wandb sync`, with the values that replays have filled.
    What is there already is not written again.
    """
    if str(file) in TRACKERS:
        export_runs(str(file), names, where=where, which=which, unproved=unproved)
        return
    suffix = file.suffix.lower()
    if str(file) in TABLES and names:
        suffix, file, names = f".{file}", Path(names[0]), names[1:]
    if suffix not in {*TEXTS, ".parquet"}:
        endings = ", ".join([*TEXTS, ".parquet"])
        raise click.BadParameter(
            f"{str(file)!r} does not say how to write it. End it with one of {endings}.",
            param_hint="FILE",
        )
    past = open_history()
    with waiting("writing the table"):
        table = past.table(*names, where=where, runs=list(which) or None, unproved=unproved)
        aside = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            if suffix == ".parquet":
                table.parquet(aside)
            else:
                _write(table, aside, TEXTS[suffix], "\r\n" if suffix == ".csv" else "\n")
            aside.replace(file)
        except OSError as exc:
            raise UsageError(
                f"{file} cannot be written: {exc.strerror or exc}. Name a file in a folder that is "
                "there and that you may write to.",
                slug="file-unwritable",
            ) from exc
        finally:
            aside.unlink(missing_ok=True)
    output.out(f"wrote {plural(table.count(), 'row')} to {file}")
    tell_damage(past)


def _write(table: Table, file: Path, lines: Lines, end: str) -> None:
    with file.open("w", encoding="utf-8", errors="backslashreplace", newline="") as out:
        for line in lines(table.columns, (tuple(row.values()) for row in table)):
            out.write(line + end)


@click.command(cls=TakesRuns)
@one_run
@click.option("--get", metavar="PATH", help="Fetch this file.")
@click.option("--at", metavar="POINT", help="As it was at a checkpoint: epoch=3.")
@click.option(
    "-o", "--output", "destination", type=click.Path(path_type=Path), metavar="FILE",
    help="Where to put what is fetched; its own name in this folder by default.",
)  # fmt: skip
@json_option
def files(
    which: str, get: str | None, at: str | None, destination: Path | None, as_json: bool
) -> None:
    """List the files that a run wrote, and fetch them.

    A file is fetched from the project if it is as the run left it, else from the last checkpoint that
    holds it; --at takes an earlier one. A file that is there is never overwritten.
    """
    past = open_history()
    if get is not None:
        _fetch(which, get, at, destination)
        return
    if at is not None or destination is not None:
        raise click.UsageError("--at and --output go with --get PATH: which file is to be fetched?")
    files_written = past.files(which)
    if as_json:
        output.json_document(plain(files_written))
        return
    if not files_written:
        output.note("The run wrote no files that Rearview saw.")
        return
    rows = [
        [
            file.path,
            "" if file.nbytes is None else size(file.nbytes),
            "as the run left it"
            if file.in_place
            else "gone"
            if file.nbytes is None
            else "changed since",
            file.kept_at or "",
        ]
        for file in files_written
    ]
    output.table(["file", "size", "now", "kept at"], rows, right=[False, True, False, False])


def _fetch(which: str, path: str, at: str | None, destination: Path | None) -> None:
    data, where = open_history().fetch_file(which, path, at=at)
    target = destination or Path(Path(path).name)
    try:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(fd, "wb") as file:  # noqa: PTH123 - made by us alone
            file.write(data)
    except FileExistsError as exc:
        raise UsageError(
            f"{target} is there already and is not overwritten. Name another file: "
            f"`--output {target.stem}-{which}{target.suffix}`.",
            slug="file-unwritable",
        ) from exc
    except OSError as exc:
        raise UsageError(
            f"{target} cannot be written: {exc.strerror or exc}. Name a file in a folder that is "
            "there and that you may write to.",
            slug="file-unwritable",
        ) from exc
    output.out(f"wrote {size(len(data))} to {target}, {where}")
