"""Commands that ask about the past: runs, show, table, sql, diff."""

from __future__ import annotations

import shlex
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rearview.cli.options import (
    TakesRuns,
    complete_run,
    json_option,
    open_history,
    some_names,
    some_runs,
    without_mark,
)
from rearview.cli.terminal import output
from rearview.cli.terminal.output import duration, moment, plural, size
from rearview.cli.terminal.progress import waiting
from rearview.errors import RearviewError
from rearview.model import Run, Verdict
from rearview.model.environment import is_restored
from rearview.model.run import name_of

if TYPE_CHECKING:
    from rearview._history import History, Replay, RunReport, Table

SCREEN = 200
"""Rows of a table for people; more are counted, not shown."""
CAPTURED = 8
"""Captured columns of one origin that are named below a table."""
SIGN = "*"
"""Behind a value that could not be proved."""
FILLED_SIGN = "~"
"""Behind a value that was interpolated."""
LEGENDS = {
    SIGN: f"{SIGN} unproved: the run recorded nothing to compare it with, or its replay did not end",
    FILLED_SIGN: f"{FILLED_SIGN} interpolated: never logged, computed from the values before and after it",
}
VARIABLES = 12
"""Environment variables that are named; more are counted."""
STATUS = {
    "finished": output.GREEN,
    "failed": output.RED,
    "dead": output.RED,
    "running": output.CYAN,
    "paused": output.YELLOW,
}


def _order_option(command: Any) -> Any:
    return click.option(
        "--order-by",
        "order",
        multiple=True,
        metavar="KEYS",
        help="In this order: 'acc desc, epoch'.",
    )(command)


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="Only the newest N.")
@click.option(
    "--where", metavar="SQL", help="Only runs for which this holds: \"tag = 'baseline'\"."
)
@_order_option
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
    found = past.runs(where, order=order) if order else past.runs(where) if where else past.runs()
    for run in found:
        if run.damaged:
            output.note(f"damaged: {run.damaged}")
    if limit is not None:
        found = found[:limit] if order else found[-limit:]
    if as_json:
        output.json_document([_about(run) for run in found])
        return
    if not found and where is not None:
        output.note(f"No run fits {where!r}.")
        return
    if not found:
        output.note("No run has been recorded here yet: `rearview run train.py`.")
        return
    _list(found, wide=wide)


ls = runs


def _list(runs: list[Run], *, wide: bool) -> None:
    """Print a table of runs, with columns for names and tags if there are any."""
    columns = ["run", "status", "started", "took", "name", "tags", "command"]
    rows = [
        [
            run.id,
            run.status.value,
            output.short_moment(run.started),
            duration(_took(run)),
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
    return {**about, "seconds": _took(run)}


def _took(run: Run) -> float | None:
    return None if run.ended is None else run.ended - run.started


@click.command(cls=TakesRuns)
@click.argument(
    "words", metavar="[RUN] [NAME]...", nargs=-1, type=without_mark, shell_complete=complete_run
)
@click.option("--printed", is_flag=True, help="The lines that it printed, with their points.")
@click.option(
    "--save",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write what it logged to files in DIR: arrays, tensors, images, histograms; or the NAMEs.",
)
@json_option
def show(words: tuple[str, ...], printed: bool, folder: Path | None, as_json: bool) -> None:
    """Show one run: names, loops, checkpoints, cost, and whether it is exact.

    RUN is a name, an id or part of one, `latest` (the default), or -2 for the one before the newest.

    With --save, an array or tensor becomes an .npy file, an image or figure a .png, any other value
    a .txt or .json; the name of a file says run, point and name. NAMEs choose what is saved. The first
    word is a RUN if it is not the name of something logged. A file that is there with another content
    is never overwritten.
    """
    if folder is not None:
        _save(words, folder, as_json=as_json)
        return
    if len(words) > 1:
        raise click.UsageError(
            f"Only one run can be shown; {words[1]!r} is too much without --save."
        )
    which = words[0] if words else "latest"
    if printed:
        _printed(which, as_json=as_json)
        return
    past = open_history()
    report = past.show(which)
    if as_json:
        output.json_document(
            {**output.plain(report), "replays": list(map(_replay_as_json, report.replays))}
        )
    else:
        _show(report)
    tell_damage(past)


def _save(words: tuple[str, ...], folder: Path, *, as_json: bool) -> None:
    past = open_history()
    which, names = "latest", words
    if words and words[0] not in past.names():
        which, names = words[0], words[1:]
        try:
            past.run(which)
        except RearviewError:
            which, names = "latest", words  # it is an unknown name: report that
    with waiting("reading values"):
        saved = past.save_values(which, folder, names)
    if as_json:
        output.json_document(
            [{**output.plain(saved_value), "path": str(saved_value.path)} for saved_value in saved]
        )
        return
    for saved_value in saved:
        note = "" if saved_value.written else " (was there already)"
        output.out(f"{saved_value.path}  {saved_value.what}{note}")
    if not saved:
        nothing_logged = (
            f"nothing as {', '.join(names)}" if names else "no array, tensor, image or histogram"
        )
        output.note(f"Nothing to save: run {past.run(which).id} logged {nothing_logged}.")


def _printed(which: str, *, as_json: bool) -> None:
    lines = open_history().printed(which)
    if as_json:
        output.json_document(lines)
        return
    for line in lines:
        output.out(f"[{line.where}] {line.text}" if line.stream else f"({line.text})")


def _failure(run: Run) -> str:
    """Return how and where a run failed; empty if it did not."""
    if not run.exit_code:
        return ""
    early = run.end.early
    if early is None:
        return f" with exit code {run.exit_code}"
    steps = [f"{name_of(loop)}={iteration}" for loop, _, iteration in early.path]
    where = f" at {'/'.join(steps)}" if steps else ""
    cause = f" by {early.exception}" if early.exception not in {"", SystemExit.__name__} else ""
    return f"{cause}{where} with exit code {run.exit_code}"


def _show(report: RunReport) -> None:
    run = report.run
    took = f", took {duration(_took(run))}" if run.ended else ""
    loops = ", ".join(f"{name} ({plural(count, 'iteration')})" for name, count in report.loops)
    names = [f"{name} ({plural(count, 'record')})" for name, count in report.names.items()]
    lines = [
        ("run", output.paint(run.id, output.BOLD)),
        ("name", run.name),
        ("tags", ", ".join(run.tags)),
        ("note", run.note),
        ("status", output.paint(run.status.value, STATUS[run.status.value]) + _failure(run)),
        ("command", " ".join((run.script, *run.argv))),
        ("started", f"{moment(run.started)} on {run.host}{took}"),
        ("version", run.version[:12] + "".join(_continued(run))),
        ("args", ", ".join(f"{name}={value}" for name, value in run.args.items())),
        ("environment", "\n".join(_environment(report))),
        ("loops", loops),
        ("names", "\n".join(names)),
        ("captured", ", ".join(f"{name} ({origin})" for name, origin in report.captured.items())),
        ("checkpoints", _checkpoints(report)),
        ("partial", "\n".join(report.partial)),
        ("cost", "\n".join(_costs(dict(report.costs)))),
        ("replays", "\n".join(_replay(replay) for replay in report.replays)),
        ("exact", report.exact),
    ]
    output.block((label, text) for label, text in lines if text)


def _continued(run: Run) -> list[str]:
    return [
        f"\n{each.version[:12]} from {each.point or 'the end of its loop'} on"
        for each in run.continued
    ]


def _environment(report: RunReport) -> list[str]:
    """Return which variables replays restore, and which differ and are not restored."""
    then = report.environment
    if then is None:
        return []
    values = then.values.items()
    texts = [f"{k}={v}" for k, v in sorted(values) if v is not None and is_restored(k)]
    more = f" and {len(texts) - VARIABLES} more" if len(texts) > VARIABLES else ""
    lines = [f"restored in replays: {', '.join(texts[:VARIABLES])}{more}"] if texts else []
    if report.environment_differences:
        lines.append(f"not restored: {'; '.join(report.environment_differences)}")
    return lines


def _checkpoints(report: RunReport) -> str:
    checkpoints = report.checkpoints
    if not checkpoints:
        return "none"
    whole = sum(checkpoint.complete for checkpoint in checkpoints)
    partial = f", {len(checkpoints) - whole} partial" if whole < len(checkpoints) else ""
    span = f"{checkpoints[0].point or 'start'} … {checkpoints[-1].point or 'end'}"
    return (
        f"{len(checkpoints)}{partial}, {span}\n"
        f"{size(report.logical)} of state, {size(report.stored)} stored"
    )


def _costs(costs: dict[str, Any]) -> list[str]:
    """Return what recording cost, in sentences; costs without a sentence follow as `name: value`."""
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
    return lines + [f"{name}: {output.cell(value)}" for name, value in costs.items()]


def _replay(replay: Replay) -> str:
    """Return a line for one replay; why it is not exact, if it is not."""
    names = ", ".join(replay.names) or "as recorded"
    proof = replay.proof
    verdict = str(proof) if proof.verdict is not Verdict.EXACT else str(proof.verdict)
    verdict = f"redone from the start: {proof.why}" if proof.verdict is Verdict.REDONE else verdict
    again = " (from the start of the run)" if replay.redoes else ""
    return f"{moment(replay.started)}  {names}: {verdict}{again}"


def _replay_as_json(replay: Replay) -> dict[str, Any]:
    proof = replay.proof
    about: dict[str, Any] = output.plain(replay)
    return {**about, "verdict": proof.verdict, "why": proof.why, "redoes": replay.redoes or None}


def _unproved_option(command: Any) -> Any:
    return click.option(
        "--unproved",
        is_flag=True,
        help="Also show values of replays that were found not to be exact.",
    )(command)


def _format_option(command: Any) -> Any:
    return click.option(
        "-f",
        "--format",
        "form",
        type=click.Choice(output.FORMATS),
        default="table",
        help="json and csv keep every digit; table and markdown are for people.",
    )(command)


@click.command(cls=TakesRuns)
@some_names(required=False)
@click.option("--where", metavar="SQL", help="Only rows for which this holds: 'acc < 0.9'.")
@some_runs
@_order_option
@click.option("--limit", type=click.IntRange(1), metavar="N", help="At most this many rows.")
@click.option(
    "--interpolate",
    is_flag=True,
    help="Fill in numbers that are missing between two known ones, marked with ~.",
)
@_unproved_option
@_format_option
def table(
    *,
    names: tuple[str, ...],
    where: str | None,
    which: tuple[str, ...],
    order: tuple[str, ...],
    limit: int | None,
    interpolate: bool,
    unproved: bool,
    form: str,
) -> None:
    """Show logged values, one row per point, in the order they were logged.

    Columns are the run, one per loop, one per name; without NAMES, all of them. A name that the
    newest source logs but that has no values yet is an empty column; if it was named, how many
    cells are missing and what they cost follows on stderr. `rearview backfill` fills it.
    JSON has no NaN or infinity: they are the strings "NaN", "Infinity" and "-Infinity".

    Values of replays that were not exact are left out. Those that could not be proved carry a `*`;
    in csv and json the column `unproved` names them.

    --order-by takes columns separated by commas, each with desc behind it if large values come first:
    `--order-by "acc desc, epoch"`. Names, loops, arguments and facts of runs will do, also those that
    are not shown. Rows without a value come last; with --limit, the first rows of that order are shown.

    --interpolate fills numbers that are missing between two known ones of the same run and loop, on a
    straight line by iterations; nothing is filled before the first or after the last. They carry a `~`;
    in csv and json the column `interpolated` names them. --where and --order-by see them.
    """
    past = open_history()
    chosen = list(which) or None
    with waiting("reading records"):
        found = past.table(
            *names,
            where=where,
            runs=chosen,
            limit=limit,
            order=order or None,
            unproved=unproved,
            interpolate=interpolate,
        )
    emit(found, form)
    tell_damage(past)
    if form == "table":
        _tell_captured(past, found.columns, every=not names)
        for name in past.empty(names):
            _tell_missing(past, name, where, chosen)


def _tell_captured(past: History, columns: list[str], *, every: bool) -> None:
    """Print which columns come from elsewhere than Rearview, and which of them are not shown."""
    captured = past.captured()
    by_origin: dict[str, list[str]] = {}
    for name in columns:
        if name in captured:
            by_origin.setdefault(str(captured[name]), []).append(name)
    if by_origin:
        texts = [f"{', '.join(some[:CAPTURED])} ({origin})" for origin, some in by_origin.items()]
        output.note(f"captured: {'; '.join(texts)}")
    not_shown = [name for name in captured if name not in columns] if every else []
    if not_shown:
        more = ", …" if len(not_shown) > CAPTURED else ""
        output.note(
            f"also captured: {', '.join(not_shown[:CAPTURED])}{more}; name them to see them"
        )


def _tell_missing(past: History, name: str, where: str | None, which: list[str] | None) -> None:
    """Print how many cells of an empty column can be filled, and what that costs."""
    try:
        with waiting("counting what is missing"):
            plan = past.plan([name], where=where, runs=which)
    except RearviewError as exc:
        output.note(f"{name}: no values yet, and none can be filled: {exc}")
        return
    refused = f"; {plural(len(plan.refusals), 'run')} refused" if plan.refusals else ""
    if plan.nothing:
        output.note(f"{name}: no values yet{refused}.")
        return
    output.note(
        f"{name}: {plan.missing} missing, about {duration(plan.plan.seconds)} of "
        f"computing to fill{refused}: `rearview backfill {shlex.quote(name)}`."
    )


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="QUERY")
@_unproved_option
@_format_option
def sql(words: tuple[str, ...], unproved: bool, form: str) -> None:
    """Ask the records and runs in SQL.

    DuckDB's dialect. The tables are described in docs/schema.md: `rearview sql "select run,
    max(acc) from full_pivot group by run"`. EXPLAIN, DESCRIBE, SHOW and SUMMARIZE work too;
    nothing can be written.
    """
    past = open_history()
    query = " ".join(words)  # a question without quotes is still one question
    with waiting("asking"):
        found = past.sql(query, unproved=unproved)
    emit(found, form)
    tell_damage(past)


def tell_damage(past: History) -> None:
    """Print on stderr which damaged files are left out of an answer."""
    for text in past.problems():
        output.note(f"damaged: {text}")


class Marks:
    """Marks unproved and interpolated values, row by row, and collects the names that have any."""

    def __init__(self, table: Table) -> None:
        marked = {SIGN: table.mark, FILLED_SIGN: table.interpolated}
        self.columns = {sign: column for sign, column in marked.items() if column}
        """The column of marks for each sign that may occur."""
        self.names: dict[str, set[str]] = {sign: set() for sign in self.columns}
        """By sign, the names that have such values in the rows seen so far."""

    @property
    def legends(self) -> list[str]:
        """What the signs mean that were needed."""
        return [LEGENDS[sign] for sign, names in self.names.items() if names]

    def collect(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row unchanged, and remember which names it marks."""
        for sign, column in self.columns.items():
            self.names[sign].update(filter(None, (row[column] or "").split(", ")))
        return row

    def with_signs(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row for people: a sign at each marked value, and no columns of marks."""
        self.collect(row)
        out = {name: row[name] for name in row if name not in self.columns.values()}
        for sign, column in self.columns.items():
            for name in filter(None, (row[column] or "").split(", ")):
                out[name] = f"{output.cell(out[name])}{sign}"
        return out


def _tell_unproved(found: Table, marks: Marks) -> None:
    """Print on stderr which names have values that could not be proved."""
    names = sorted(marks.names[SIGN]) if found.mark else found.unproved
    if names:
        some = "are" if found.mark else "may be"
        output.note(
            f"unproved: values of {', '.join(names)} {some} among these that were not found equal to "
            "the run; `rearview show` says why, `rearview backfill --again` runs them again."
        )


def emit(found: Table, form: str) -> None:
    """Print a table in the form asked for."""
    columns = list(found.columns)
    marks = Marks(found)
    rows = (tuple(row.values()) for row in map(marks.collect, found.described()))
    if form != "table":
        if form == "markdown":
            columns = [column for column in columns if column not in marks.columns.values()]
            rows = (tuple(row.values()) for row in map(marks.with_signs, found.described()))
        lines = {
            "json": output.json_lines,
            "csv": output.csv_lines,
            "markdown": output.markdown_lines,
        }[form]
        say = output.out if form == "markdown" else output.data
        for line in lines(columns, rows):
            say(line)
        if form == "markdown" and marks.legends:
            output.out("\n" + "\n".join(marks.legends))
        _tell_unproved(found, marks)
        return
    if columns == ["explain_key", "explain_value"]:  # print the text of EXPLAIN as it is
        for _, plan in rows:
            output.out(plan)
        return
    every = found.described()
    first = list(islice(every, SCREEN))
    columns = [column for column in columns if column not in marks.columns.values()]
    head = [[row[column] for column in columns] for row in first]
    right = [output.numeric(column) for column in zip(*head, strict=True)] if head else []
    cells = [
        [output.cell(value) for column, value in marks.with_signs(row).items()] for row in first
    ]
    output.table(columns, cells, right=right or [False] * len(columns))
    for legend in marks.legends:
        output.out(legend)
    more = sum(1 for _ in map(marks.collect, every))
    _tell_unproved(found, marks)
    if more:
        output.note(
            f"… and {plural(more, 'row')} more. Narrow it with --where or --runs, "
            "or take all of it with --format csv."
        )
    elif not head:
        output.note("No rows.")


@click.command(cls=TakesRuns)
@click.argument(
    "first", metavar="[A]", default="latest", type=without_mark, shell_complete=complete_run
)
@click.argument(
    "second", metavar="[B]", default="worktree", type=without_mark, shell_complete=complete_run
)
@click.option(
    "--statements",
    is_flag=True,
    help="Statement by statement, as propagation matches them: renamed, moved, changed, added, removed.",
)
@json_option
def diff(first: str, second: str, *, statements: bool, as_json: bool) -> int:
    """Show how the source of two runs differs.

    From run A (the newest) to run B; without B, to the files as they are now (`worktree`). Exit code 0: no difference, 1: some.
    """
    if statements:
        return _statements(first, second, as_json=as_json)
    if as_json:
        raise click.UsageError("--json belongs to --statements.")
    text = open_history().diff(first, second)
    output.diff(text)
    return 1 if text else 0


def _statements(first: str, second: str, *, as_json: bool) -> int:
    changes = open_history().statement_diff(first, second)
    changed = [change for change in changes if change.edit != "same"]
    if as_json:
        output.json_document(changes)
        return 1 if changed else 0
    path = ""
    for change in changed:
        if change.path != path:
            path = change.path
            output.out(output.paint(path, output.BOLD))
        lines = f"{change.old_line or ''} → {change.new_line or ''}".strip()
        text = change.new_text if change.old_text in {"", change.new_text} else change.old_text
        if change.new_text and text != change.new_text:
            text += f"  →  {change.new_text}"
        output.out(f"  {change.edit.value:<8} {lines:<12} {text}")
    unchanged = len(changes) - len(changed)
    output.out(f"{unchanged} statement{'s' * (unchanged != 1)} the same, {len(changed)} not")
    return 1 if changed else 0
