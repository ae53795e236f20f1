"""Commands about runs: runs (list them), compare, name, tag, note, rm."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from rearview.cli.options import (
    TakesRuns,
    complete_run,
    json_option,
    open_history,
    order_option,
    without_mark,
)
from rearview.cli.terminal import output
from rearview.cli.terminal.output import duration, plain, plural, size
from rearview.cli.terminal.progress import waiting
from rearview.model import Run

if TYPE_CHECKING:
    from rearview._history import Comparison, Removal, Row

STATUS = {
    "finished": output.GREEN,
    "failed": output.RED,
    "dead": output.RED,
    "running": output.CYAN,
    "paused": output.YELLOW,
}


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="Only the newest N.")
@click.option(
    "--where", metavar="SQL", help="Only runs for which this holds: \"tag = 'baseline'\"."
)
@order_option
@click.option("-w", "--wide", is_flag=True, help="Cut nothing off, however long the lines get.")
@json_option
def runs(
    *, limit: int | None, where: str | None, order: tuple[str, ...], wide: bool, as_json: bool
) -> None:
    """List the runs of this project, oldest first.

    --where takes SQL over facts of runs (name, tag, note, status, script, started, seconds, host …),
    over arguments, and over names that were logged, which stand for the last value logged:
    `--where "tag = 'baseline' and lr < 0.1 and acc > 0.9"`. `tag` is each tag of a run in turn.
    --order-by takes the same columns; rows without a value come last, and -n then means the first N.

    Lines fit the terminal, or 80 columns elsewhere: long commands, names and tags are cut.
    """
    past = open_history()
    selected = (
        past.runs(where, order=order) if order else past.runs(where) if where else past.runs()
    )
    for run in selected:
        if run.damaged:
            output.note(f"damaged: {run.damaged}")
    if limit is not None:
        selected = selected[:limit] if order else selected[-limit:]
    if as_json:
        output.json_document([_about(run) for run in selected])
        return
    if not selected and where is not None:
        output.note(f"No run fits {where!r}.")
        return
    if not selected:
        output.note("No run has been recorded here yet: `rearview run train.py`.")
        return
    _list(selected, wide=wide)


ls = runs


def _list(runs: list[Run], *, wide: bool) -> None:
    """Print a table of runs, with columns for names and tags if there are any."""
    columns = ["run", "status", "started", "took", "name", "tags", "command"]
    rows = [
        [
            run.id,
            run.status.value,
            output.short_moment(run.started),
            duration(seconds_taken(run)),
            run.name,
            ", ".join(run.tags),
            " ".join((run.script, *run.argv)),
        ]
        for run in runs
    ]
    keep = [k for k, name in enumerate(columns) if name not in {"name", "tags"} or _any(rows, k)]
    columns, rows = [columns[k] for k in keep], [[row[k] for k in keep] for row in rows]
    if not wide:
        rows = output.fitted(columns, rows, output.room(len(columns)), shrink=len(columns) - 4)
    for row in rows:
        row[1] = output.paint(row[1], STATUS[row[1]])
    output.table(columns, rows, right=[name == "took" for name in columns])


def _any(rows: list[list[str]], column: int) -> bool:
    return any(row[column] for row in rows)


def _about(run: Run) -> dict[str, Any]:
    about: dict[str, Any] = output.plain(run)
    del about["facts"], about["end"]  # it is long, and `show --json` has it
    return {**about, "seconds": seconds_taken(run)}


def seconds_taken(run: Run) -> float | None:
    """Return the seconds from start to end of a run; None if it has not ended."""
    return None if run.ended is None else run.ended - run.started


@click.command(cls=TakesRuns)
@click.argument("a", metavar="[A]", default="-2", type=without_mark, shell_complete=complete_run)
@click.argument(
    "b", metavar="[B]", default="latest", type=without_mark, shell_complete=complete_run
)
@click.option("--all", "every", is_flag=True, help="Also what is the same in both.")
@json_option
def compare(a: str, b: str, every: bool, as_json: bool) -> int:
    """Compare two runs: arguments, results, source, environment.

    From run A (the one before the newest) to run B (the newest). Only differences are shown, and all results,
    which are the last logged values; `rearview diff A B` shows the lines of the source. Exit code 0: nothing
    differs; 1: something does.
    """
    with waiting("comparing", quiet=as_json):
        comparison = open_history().compare(a, b)
    if as_json:
        output.json_document(
            {
                "a": comparison.a.id,
                "b": comparison.b.id,
                **{
                    part: [{**row._asdict(), "differs": row.differs} for row in rows]
                    for part, rows in _parts(comparison).items()
                },
            }
        )
    else:
        _print(comparison, every=every)
    return 1 if any(row.differs for rows in _parts(comparison).values() for row in rows) else 0


def _parts(comparison: Comparison) -> dict[str, list[Row]]:
    return {
        "arguments": comparison.arguments,
        "results": comparison.results,
        "source": comparison.source,
        "environment": comparison.environment,
    }


def _print(comparison: Comparison, *, every: bool) -> None:
    columns = ["", comparison.a.name or comparison.a.id, comparison.b.name or comparison.b.id]
    rows: list[list[str]] = []
    unchanged: list[str] = []
    for part, all_rows in _parts(comparison).items():
        shown_rows = [row for row in all_rows if every or row.differs or part == "results"]
        if len(shown_rows) < len(all_rows) or not all_rows:
            unchanged.append(f"{len(all_rows) - len(shown_rows)} of {part}" if all_rows else part)
        if not shown_rows:
            continue
        rows.append([part, "", ""])
        for row in shown_rows:
            cells = [_content(row, k) if part == "source" else output.cell(row[k]) for k in (1, 2)]
            rows.append([f"  {row.name}", *cells])
    room = output.room(3)
    longest = max((len(row[0]) for row in rows), default=0)
    width = max(12, (room - min(longest, 30)) // 2)
    rows = [[_cut(row[0], 30), _cut(row[1], width), _cut(row[2], width)] for row in rows]
    output.table([_cut(name, width) for name in columns], rows, right=[False] * 3)
    if unchanged and not every:
        output.note(f"The same in both: {', '.join(unchanged)}. `--all` shows them.")


def _content(row: Row, side: int) -> str:
    """Return the first digits of the git hash of a file in a run."""
    return row[side][:10] if row[side] else "(no such file)"


def _cut(text: str, max_length: int) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


_RUN = click.argument("which", metavar="RUN", type=without_mark, shell_complete=complete_run)


@click.command(cls=TakesRuns)
@_RUN
@click.argument("new", metavar="[NAME]", required=False)
@click.option("--remove", is_flag=True, help="Take its name away.")
def name(which: str, new: str | None, remove: bool) -> None:
    """Give a run a name, by which every command finds it.

    Wherever a command takes a run, its name will do. A later name replaces the earlier one. No two
    runs have the same name.
    """
    if remove == (new is not None):
        raise click.UsageError("Give either a NAME or --remove: `rearview name latest baseline`.")
    run = open_history().name(which, new)
    output.out(f"{run.id} is called {run.name}" if run.name else f"{run.id} has no name now")


@click.command(cls=TakesRuns)
@_RUN
@click.argument("tags", metavar="TAG...", nargs=-1, required=True)
@click.option("--remove", is_flag=True, help="Take these tags away.")
def tag(which: str, tags: tuple[str, ...], remove: bool) -> None:
    """Give a run tags, to find it again.

    `rearview runs --where "tag = 'baseline'"` lists the runs that have a tag.
    """
    past = open_history()
    run = past.untag(which, *tags) if remove else past.tag(which, *tags)
    output.out(
        f"{run.id} has the tags {', '.join(run.tags)}" if run.tags else f"{run.id} has no tags"
    )


@click.command(cls=TakesRuns)
@_RUN
@click.argument("text", metavar="[TEXT]...", nargs=-1)
@click.option("--remove", is_flag=True, help="Take all notes away.")
def note(which: str, text: tuple[str, ...], remove: bool) -> None:
    """Write a note about a run.

    Each note is a line after the ones before; `show` and the column `note` of the table `runs` have
    all of them. Without TEXT, print what is there.
    """
    past = open_history()
    if remove and text:
        raise click.UsageError("Give either a TEXT or --remove, not both.")
    if remove:
        output.out(f"{past.note(which, None).id} has no note now")
    elif text:
        output.out(f"noted about {past.note(which, ' '.join(text)).id}")
    else:
        run = past.run(which)
        output.out(run.note) if run.note else output.note(f"{run.id} has no note.")


@click.command(cls=TakesRuns)
@click.argument(
    "which",
    metavar="RUN...",
    nargs=-1,
    required=True,
    type=without_mark,
    shell_complete=complete_run,
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", "--dry", "dry_run", is_flag=True, help="Only say what would go.")
@json_option
def rm(which: tuple[str, ...], yes: bool, dry_run: bool, as_json: bool) -> int | None:
    """Remove runs: records, checkpoints, replays and source.

    What other runs need stays, and so do the files that the run wrote into your project. A run that
    is running is refused, and so is one that other runs came from. On a terminal it asks first;
    elsewhere it needs --yes. A removal that was interrupted is completed by saying it again.
    """
    past = open_history()
    if not dry_run and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                "There is no terminal to ask on. Say --yes to remove, or look first with --dry-run."
            )
        for line in _removal_lines(past.remove(*which, dry=True)):
            output.note(line)
        if not click.confirm("Remove this? It cannot be undone", err=True):
            output.note("Nothing was removed.")
            return 1
    removal = past.remove(*which, dry=dry_run)
    if as_json:
        output.json_document({"dry_run": dry_run, "nbytes": removal.nbytes, **plain(removal)})
        return None
    if dry_run:
        for line in _removal_lines(removal):
            output.out(line)
        return None
    output.out(f"removed {', '.join(removal.runs)}; freed {size(removal.nbytes)}")
    if removal.freed.spared:
        output.note(
            f"{size(removal.freed.spared)} may be in use by a save under way; `rearview gc` frees "
            "what is left of them later."
        )
    return None


def _removal_lines(removal: Removal) -> Iterator[str]:
    """Yield a line for each run: what is removed with it, and how much space that frees."""
    for run in removal.removed:
        yield (
            f"{run.run}: its records, {plural(run.checkpoints, 'checkpoint')}, "
            f"{plural(len(run.replays), 'replay')} and its source"
        )
    yield f"would free {size(removal.nbytes)}"
