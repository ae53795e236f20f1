"""Commands that ask about the past: runs, show, table, sql, diff."""

from __future__ import annotations

import shlex
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from rearview.cli import formats
from rearview.cli import show as shown
from rearview.cli.formats import duration, moment, plural, size
from rearview.cli.options import (
    TakesRuns,
    a_run,
    asked,
    complete_run,
    json_option,
    one_run,
    some_names,
    some_runs,
)
from rearview.cli.progress import waiting
from rearview.errors import RearviewError

if TYPE_CHECKING:
    from rearview.model import Run
    from rearview.past import History, RunReport
    from rearview.store.tables.table import Table

SCREEN = 200
"""Rows of a table for people; more are counted, not shown."""
STATUS = {
    "finished": shown.GREEN,
    "failed": shown.RED,
    "dead": shown.RED,
    "running": shown.CYAN,
    "paused": shown.YELLOW,
}


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="Only the newest N.")
@json_option
def runs(limit: int | None, as_json: bool) -> None:
    """List the runs of this project, oldest first."""
    found = asked().runs()
    if limit is not None:
        found = found[-limit:]
    if as_json:
        shown.json_document([_about(run) for run in found])
        return
    if not found:
        shown.note("No run has been recorded here yet: `rearview run train.py`.")
        return
    shown.table(
        ["run", "status", "started", "took", "command"],
        [
            [
                run.id,
                shown.paint(run.status.value, STATUS[run.status.value]),
                moment(run.started),
                duration(_took(run)),
                " ".join((run.script, *run.argv)),
            ]
            for run in found
        ],
        right=[False, False, False, True, False],
    )


def _about(run: Run) -> dict[str, Any]:
    about: dict[str, Any] = formats.plain(run)
    about.pop("facts")  # long, and part of `show --json`
    return {**about, "seconds": _took(run)}


def _took(run: Run) -> float | None:
    return None if run.ended is None else run.ended - run.started


@click.command(cls=TakesRuns)
@one_run
@click.option("--printed", is_flag=True, help="The lines that it printed, with their points.")
@json_option
def show(which: str, printed: bool, as_json: bool) -> None:
    """Show one run: names, loops, checkpoints, cost, and whether it is exact.

    RUN is an id or part of one, `latest` (the default), or -2 for the one before the newest.
    """
    if printed:
        _printed(which, as_json=as_json)
        return
    report = asked().show(which)
    if as_json:
        shown.json_document(report)
    else:
        _show(report)


def _printed(which: str, *, as_json: bool) -> None:
    lines = asked().printed(which)
    if as_json:
        shown.json_document(lines)
        return
    for line in lines:
        shown.out(f"[{line.where}] {line.text}" if line.stream else f"({line.text})")


def _show(report: RunReport) -> None:
    run = report.run
    took = f", took {duration(_took(run))}" if run.ended else ""
    code = f" with exit code {run.exit_code}" if run.exit_code else ""
    loops = ", ".join(f"{name} ({plural(count, 'iteration')})" for name, count in report.loops)
    names = [f"{name} ({plural(count, 'record')})" for name, count in report.names.items()]
    lines = [
        ("run", shown.paint(run.id, shown.BOLD)),
        ("status", shown.paint(run.status.value, STATUS[run.status.value]) + code),
        ("command", " ".join((run.script, *run.argv))),
        ("started", f"{moment(run.started)} on {run.host}{took}"),
        ("version", run.version[:12]),
        ("args", ", ".join(f"{name}={value}" for name, value in run.args.items())),
        ("loops", loops),
        ("names", "\n".join(names)),
        ("checkpoints", _checkpoints(report)),
        ("partial", "\n".join(report.partial)),
        ("cost", "\n".join(_costs(dict(report.costs)))),
        ("replays", "\n".join(_replay(replay) for replay in report.replays)),
        ("exact", report.exact),
    ]
    shown.block((label, text) for label, text in lines if text)


def _checkpoints(report: RunReport) -> str:
    found = report.checkpoints
    if not found:
        return "none"
    whole = sum(checkpoint.complete for checkpoint in found)
    partial = f", {len(found) - whole} partial" if whole < len(found) else ""
    span = f"{found[0].point or 'start'} … {found[-1].point or 'end'}"
    return (
        f"{len(found)}{partial}, {span}\n"
        f"{size(report.logical)} of state, {size(report.stored)} stored"
    )


def _costs(costs: dict[str, Any]) -> list[str]:
    """Return what recording cost, in sentences; what they do not know follows as it is."""
    lines = []
    if "overhead" in costs and "computed" in costs:
        share, computed = costs.pop("overhead"), costs.pop("computed")
        lines.append(f"{share:.2%} beside {duration(computed)} of computing")
    waits = [
        f"{duration(costs.pop(name))} {words}"
        for name, words in (
            ("waited", "waiting for us"),
            ("lost", "lost, about, to writing beside it"),
        )
        if name in costs
    ]
    times = [
        f"{duration(costs.pop(name))} {name}"
        for name in ("blocking", "background", "cpu")
        if name in costs
    ]
    sizes = [
        f"{size(costs.pop(name))} {name}"
        for name in ("logical", "copied", "stored")
        if name in costs
    ]
    counts = [
        f"{costs.pop(name)} {name}" for name in ("saved", "skipped", "failed") if name in costs
    ]
    lines += [", ".join(some) for some in (waits, times, sizes, counts) if some]
    because = costs.pop("skipped_because", {})
    lines += [f"skipped {plural(count, 'time')}: {reason}" for reason, count in because.items()]
    return lines + [f"{name}: {formats.cell(value)}" for name, value in costs.items()]


def _replay(replay: Any) -> str:
    verdict = {True: "exact", False: "unproved", None: "not ended"}[replay.proved]
    return f"{moment(replay.started)}  {', '.join(replay.names) or 'as recorded'}: {verdict}"


def _format_option(command: Any) -> Any:
    return click.option(
        "-f",
        "--format",
        "form",
        type=click.Choice(formats.FORMATS),
        default="table",
        help="json and csv keep every digit; table and markdown are for people.",
    )(command)


@click.command(cls=TakesRuns)
@some_names(required=False)
@click.option("--where", metavar="SQL", help="Only rows for which this holds: 'acc < 0.9'.")
@some_runs
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most this many rows.")
@_format_option
def table(
    *,
    names: tuple[str, ...],
    where: str | None,
    which: tuple[str, ...],
    limit: int | None,
    form: str,
) -> None:
    """Show logged values, one row per point, in the order they were logged.

    Columns are the run, one per loop, one per name; without NAMES, all of them. A name that the
    newest source logs but that has no values yet is an empty column; if it was named, how many
    cells are missing and what they cost follows on stderr. `rearview backfill` fills it.
    JSON has no NaN or infinity: they are the strings "NaN", "Infinity" and "-Infinity".
    """
    past = asked()
    with waiting("reading records"):
        found = past.table(*names, where=where, runs=list(which) or None, limit=limit)
    emit(found, form)
    if form == "table":
        for name in past.empty(names):
            _tell_missing(past, name, where, list(which) or None)


def _tell_missing(past: History, name: str, where: str | None, which: list[str] | None) -> None:
    """Say how many cells of an empty column can be filled, and what that costs."""
    try:
        with waiting("counting what is missing"):
            plan = past.plan([name], where=where, runs=which)
    except RearviewError as exc:
        shown.note(f"{name}: no values yet, and none can be filled: {exc}")
        return
    refused = f"; {plural(len(plan.refusals), 'run')} refused" if plan.refusals else ""
    if plan.nothing:
        shown.note(f"{name}: no values yet{refused}.")
        return
    shown.note(
        f"{name}: {plan.missing} missing, about {duration(plan.plan.seconds)} of "
        f"computing to fill{refused}: `rearview backfill {shlex.quote(name)}`."
    )


@click.command()
@click.argument("query")
@_format_option
def sql(query: str, form: str) -> None:
    """Ask the records and runs in SQL.

    DuckDB's dialect. The tables are described in docs/schema.md: `rearview sql "select run,
    max(acc) from full_pivot group by run"`. EXPLAIN, DESCRIBE, SHOW and SUMMARIZE work too;
    nothing can be written.
    """
    with waiting("asking"):
        found = asked().sql(query)
    emit(found, form)


def emit(found: Table, form: str) -> None:
    """Print a table in the form asked for."""
    columns = list(found.columns)
    rows = (tuple(row.values()) for row in found)
    if form != "table":
        lines = {
            "json": formats.json_lines,
            "csv": formats.csv_lines,
            "markdown": formats.markdown_lines,
        }[form]
        for line in lines(columns, rows):
            shown.out(line)
        return
    if columns == ["explain_key", "explain_value"]:  # a drawing, not a cell
        for _, plan in rows:
            shown.out(plan)
        return
    head = list(islice(rows, SCREEN))
    right = [formats.numeric(column) for column in zip(*head, strict=True)] if head else []
    cells = [[formats.cell(value) for value in row] for row in head]
    shown.table(columns, cells, right=right or [False] * len(columns))
    more = sum(1 for _ in rows)
    if more:
        shown.note(
            f"… and {plural(more, 'row')} more. Narrow it with --where or --runs, "
            "or take all of it with --format csv."
        )
    elif not head:
        shown.note("No rows.")


@click.command(cls=TakesRuns)
@click.argument("first", metavar="[A]", default="latest", type=a_run, shell_complete=complete_run)
@click.argument(
    "second", metavar="[B]", default="worktree", type=a_run, shell_complete=complete_run
)
def diff(first: str, second: str) -> int:
    """Show how the source of two runs differs.

    From run A (the newest) to run B; without B, to the files as they are now (`worktree`). Exit code 0: no difference, 1: some.
    """
    text = asked().diff(first, second)
    shown.diff(text)
    return 1 if text else 0
