"""Commands that exchange data with other programs: export, import, mcp."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rearview.cli.options import (
    TakesRuns,
    names_argument,
    open_history,
    runs_option,
)
from rearview.cli.query import print_damage
from rearview.cli.terminal import output
from rearview.cli.terminal.output import plural
from rearview.cli.terminal.progress import waiting
from rearview.errors import UsageError

if TYPE_CHECKING:
    from rearview._history import Table
    from rearview.bridges.import_export import Exported, ExportedRun, TrackedRun

TRACKERS = ("tensorboard", "mlflow", "wandb-offline")
TABLES = ("csv", "parquet", "json", "jsonl", "md")


@click.command(name="import")
@click.argument("tracker", type=click.Choice(TRACKERS))
@click.argument("path")
def import_(tracker: str, path: str) -> int:
    """Import the runs of another tracker: TensorBoard, MLflow or W&B.

    Each becomes a run with records at its steps. PATH is a folder of event files, MLflow's database, mlruns folder or server, or a folder with
    offline runs of W&B. Parameters become arguments. Importing again adds only what is new.
    """
    from rearview.bridges.import_export import import_runs, project_at

    project = project_at(Path(os.environ.get("REARVIEW_ROOT") or Path.cwd()))
    imported = import_runs(project, _tracked(tracker, path))
    for run in imported:
        outcome = "imported" if run.is_new else "added" if run.records else "up to date"
        output.out(f"{run.run}  {outcome}  {plural(run.records, 'record')}  {run.source}")
    new = sum(run.is_new for run in imported)
    output.out(
        f"{plural(new, 'new run')} of {len(imported)}, "
        f"{plural(sum(run.records for run in imported), 'new record')}"
    )
    return 0


def _tracked(tracker: str, path: str) -> Iterator[TrackedRun]:
    if tracker == "mlflow":
        from rearview.bridges.mlflow_runs import read_mlflow

        return read_mlflow(path)
    place = Path(path)
    if not place.exists():
        raise UsageError(
            f"There is no file or folder {path}. Name the folder that {tracker} wrote to.",
            slug="import-nothing",
        )
    if tracker == "tensorboard":
        from rearview.bridges.tensorboard_files import read_tensorboard

        return read_tensorboard(place)
    from rearview.bridges.wandb_files import read_wandb

    return read_wandb(place)


def export_runs(
    tracker: str,
    words: Sequence[str],
    *,
    where: str | None,
    which: Sequence[str],
    unproved: bool,
) -> None:
    """Write runs to another tracker. The first of `words` is the destination, the rest are logged names to write.

    If only the destination is given, all names are written.
    """
    from rearview.bridges.import_export import exported_runs

    if not words:
        raise click.UsageError(f"Say where to: `rearview export {tracker} PLACE`.")
    place, *names = words
    history = open_history()
    unknown = [name for name in names if name not in history.names()]
    if unknown:
        raise UsageError(
            f"No run has values of {unknown[0]!r}. `rearview table` lists the names.",
            slug="no-name",
        )
    runs = exported_runs(history, names, where=where, runs=list(which) or None, unproved=unproved)
    exported = [
        _write_run(tracker, run, place, history.project.root.resolve().name) for run in runs
    ]
    for run in exported:
        outcome = plural(run.values, "value") if run.values else "up to date"
        left_out = f", {run.left_out} that {tracker} does not take" if run.left_out else ""
        output.out(f"{run.run}  {outcome}{left_out}  {run.place}")
    new_values = sum(run.values for run in exported)
    output.out(f"{plural(len(exported), 'run')}, {plural(new_values, 'new value')}")


def _write_run(tracker: str, run: ExportedRun, place: str, project: str) -> Exported:
    if tracker == "tensorboard":
        from rearview.bridges.tensorboard_files import write_tensorboard

        return write_tensorboard(run, Path(place))
    if tracker == "mlflow":
        from rearview.bridges.mlflow_runs import write_mlflow

        return write_mlflow(run, place, project)
    from rearview.bridges.wandb_files import write_wandb

    return write_wandb(run, Path(place), project)


@click.command()
@click.option(
    "--allow-replay",
    is_flag=True,
    help="Also offer to fill columns, which runs recorded programs again. Without it nothing is run "
    "and nothing is written.",
)
def mcp(allow_replay: bool) -> int:
    """Serve the runs of this project to coding agents.

    It speaks the Model Context Protocol on standard input and output. A client starts this command itself. Offers runs, table, sql, show and the price of a backfill.
    """
    from rearview.bridges.mcp_server import serve

    serve(open_history(), allow_replay=allow_replay)
    return 0


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
"""Suffix of a file -> function that yields the lines of a table in the format of such files."""


@click.command(cls=TakesRuns)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@names_argument(required=False)
@click.option("--where", metavar="SQL", help="Only rows for which this holds: 'acc < 0.9'.")
@runs_option
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
    Values that the target already has are not written again.
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
            f"{str(file)!r} has no known ending. End it with one of {endings}.",
            param_hint="FILE",
        )
    history = open_history()
    with waiting("writing the table"):
        table = history.table(*names, where=where, runs=list(which) or None, unproved=unproved)
        aside = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            if suffix == ".parquet":
                table.parquet(aside)
            else:
                _write_table(table, aside, TEXTS[suffix], "\r\n" if suffix == ".csv" else "\n")
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
    print_damage(history)


def _write_table(table: Table, file: Path, lines: Lines, end: str) -> None:
    with file.open("w", encoding="utf-8", errors="backslashreplace", newline="") as out:
        for line in lines(table.columns, (tuple(row.values()) for row in table)):
            out.write(line + end)
