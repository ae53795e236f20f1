"""Commands about runs: runs (list them), show, files, compare, name, tag, note, rm."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rearview.cli.options import (
    TakesRuns,
    complete_run,
    json_option,
    open_history,
    order_option,
    run_argument,
    without_prefix,
)
from rearview.cli.query import print_damage
from rearview.cli.terminal import output
from rearview.cli.terminal.output import duration, moment, plain, plural, size
from rearview.cli.terminal.progress import waiting
from rearview.errors import RearviewError, UsageError
from rearview.model import Run, Verdict
from rearview.model.program_environment_variables import is_restored
from rearview.model.run import name_of

if TYPE_CHECKING:
    from rearview._history import Comparison, Removal, Replay, Row, RunReport

STATUS = {
    "finished": output.GREEN,
    "failed": output.RED,
    "dead": output.RED,
    "running": output.CYAN,
    "paused": output.YELLOW,
}

VARIABLES = 12
"""Maximum number of environment variables that `show` names; then follows the number of further variables."""


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="Only the newest N.")
@click.option(
    "--where", metavar="SQL", help="Only runs for which this holds: \"tag = 'baseline'\"."
)
@order_option
@click.option("-w", "--wide", is_flag=True, help="Do not cut long lines.")
@json_option
def runs(
    *, limit: int | None, where: str | None, order: tuple[str, ...], wide: bool, as_json: bool
) -> None:
    """List the runs of this project, oldest first.

    --where takes SQL over facts of runs (name, tag, note, status, script, started, seconds, host …),
    over arguments, and over names that were logged, which mean the last logged value:
    `--where "tag = 'baseline' and lr < 0.1 and acc > 0.9"`. `tag` is each tag of a run in turn.
    --order-by takes the same columns; rows without a value come last, and -n then means the first N.

    Lines fit the terminal, or 80 columns elsewhere: long commands, names and tags are cut.
    """
    history = open_history()
    selected = (
        history.runs(where, order=order)
        if order
        else history.runs(where)
        if where
        else history.runs()
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
    """Print a table of runs, with columns for names and tags only if a run has any; `wide` does not cut long texts."""
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
    facts: dict[str, Any] = output.plain(run)
    del facts["facts"], facts["end"]  # these are long, and `show --json` has them
    return {**facts, "seconds": seconds_taken(run)}


def seconds_taken(run: Run) -> float | None:
    """Return the seconds from the start of a run to its end, or None if no end was recorded."""
    return None if run.ended is None else run.ended - run.started


@click.command(cls=TakesRuns)
@click.argument("a", metavar="[A]", default="-2", type=without_prefix, shell_complete=complete_run)
@click.argument(
    "b", metavar="[B]", default="latest", type=without_prefix, shell_complete=complete_run
)
@click.option("--all", "every", is_flag=True, help="Also facts that are the same in both.")
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
    """Return the first digits of the git hash of the file `row` in run `side` (1 or 2), or "(no such file)"."""
    return row[side][:10] if row[side] else "(no such file)"


def _cut(text: str, max_length: int) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= max_length else text[: max_length - 1] + "…"


_RUN = click.argument("which", metavar="RUN", type=without_prefix, shell_complete=complete_run)


@click.command(cls=TakesRuns)
@_RUN
@click.argument("new", metavar="[NAME]", required=False)
@click.option("--remove", is_flag=True, help="Remove its name.")
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
@click.option("--remove", is_flag=True, help="Remove these tags.")
def tag(which: str, tags: tuple[str, ...], remove: bool) -> None:
    """Give a run tags, to find it again.

    `rearview runs --where "tag = 'baseline'"` lists the runs that have a tag.
    """
    history = open_history()
    run = history.untag(which, *tags) if remove else history.tag(which, *tags)
    output.out(
        f"{run.id} has the tags {', '.join(run.tags)}" if run.tags else f"{run.id} has no tags"
    )


@click.command(cls=TakesRuns)
@_RUN
@click.argument("text", metavar="[TEXT]...", nargs=-1)
@click.option("--remove", is_flag=True, help="Remove all notes.")
def note(which: str, text: tuple[str, ...], remove: bool) -> None:
    """Write a note about a run.

    Each note is a line after the ones before; `show` and the column `note` of the table `runs` have
    all of them. Without TEXT, print the notes.
    """
    history = open_history()
    if remove and text:
        raise click.UsageError("Give either a TEXT or --remove, not both.")
    if remove:
        output.out(f"{history.note(which, None).id} has no note now")
    elif text:
        output.out(f"noted about {history.note(which, ' '.join(text)).id}")
    else:
        run = history.run(which)
        output.out(run.note) if run.note else output.note(f"{run.id} has no note.")


@click.command(cls=TakesRuns)
@click.argument(
    "which",
    metavar="RUN...",
    nargs=-1,
    required=True,
    type=without_prefix,
    shell_complete=complete_run,
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--dry-run", "--dry", "dry_run", is_flag=True, help="Only show what would be removed."
)
@json_option
def rm(which: tuple[str, ...], yes: bool, dry_run: bool, as_json: bool) -> int | None:
    """Remove runs: records, checkpoints, replays and source.

    Data that other runs need stays, and so do the files that the run wrote into your project. The command refuses
    to remove a run that is running, or from which another run was started. On a terminal it asks first;
    elsewhere it needs --yes. To complete an interrupted removal, give the command again.
    """
    history = open_history()
    if not dry_run and not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(
                "There is no terminal to ask on. Say --yes to remove, or look first with --dry-run."
            )
        for line in _removal_lines(history.remove(*which, dry=True)):
            output.note(line)
        if not click.confirm("Remove this? It cannot be undone", err=True):
            output.note("Nothing was removed.")
            return 1
    removal = history.remove(*which, dry=dry_run)
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
    """Yield a line for each run that names the data to remove with it, and a last line with the space to free."""
    for run in removal.removed:
        yield (
            f"{run.run}: its records, {plural(run.checkpoints, 'checkpoint')}, "
            f"{plural(len(run.replays), 'replay')} and its source"
        )
    yield f"would free {size(removal.nbytes)}"


@click.command(cls=TakesRuns)
@click.argument(
    "words", metavar="[RUN] [NAME]...", nargs=-1, type=without_prefix, shell_complete=complete_run
)
@click.option("--printed", is_flag=True, help="The lines that it printed, with their points.")
@click.option(
    "--save",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write logged values to files in DIR: arrays, tensors, images, histograms; or the NAMEs.",
)
@json_option
def show(words: tuple[str, ...], printed: bool, folder: Path | None, as_json: bool) -> None:
    """Show one run: names, loops, checkpoints, cost, and whether it is exact.

    RUN is a name, an id or part of one, `latest` (the default), or -2 for the one before the newest.

    With --save, an array or tensor becomes an .npy file, an image or figure a .png, any other value
    a .txt or .json; the name of a file has run, point and name. NAMEs choose the values. The first word
    is a RUN if it is no logged name. An existing file with other content is never overwritten.
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
    history = open_history()
    report = history.show(which)
    if as_json:
        output.json_document(
            {**output.plain(report), "replays": list(map(_replay_as_json, report.replays))}
        )
    else:
        _show(report)
    print_damage(history)


def _save(words: tuple[str, ...], folder: Path, *, as_json: bool) -> None:
    history = open_history()
    which, names = "latest", words
    if words and words[0] not in history.names():
        which, names = words[0], words[1:]
        try:
            history.run(which)
        except RearviewError:
            # the first word is neither a run nor a logged name: `save_values` reports it as an unknown name
            which, names = (
                "latest",
                words,
            )
    with waiting("reading values"):
        saved = history.save_values(which, folder, names)
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
        output.note(f"Nothing to save: run {history.run(which).id} logged {nothing_logged}.")


def _printed(which: str, *, as_json: bool) -> None:
    lines = open_history().printed(which)
    if as_json:
        output.json_document(lines)
        return
    for line in lines:
        output.out(f"[{line.where}] {line.text}" if line.stream else f"({line.text})")


def _failure(run: Run) -> str:
    """Return a text that says by which exception and at which point a run failed, or '' if it did not fail."""
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
    took = f", took {duration(seconds_taken(run))}" if run.ended else ""
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
        f"\n{continuation.version[:12]} from {continuation.point or 'the end of its loop'} on"
        for continuation in run.continued
    ]


def _environment(report: RunReport) -> list[str]:
    """Return a line with the environment variables that replays restore, and a line with those that differ now.

    The second line has only variables that replays do not restore. A line without variables is left out.
    """
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
    """Return lines that describe the costs of recording; a cost without a description follows as `name: value`."""
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
    lines += [", ".join(parts) for parts in (waits, times, sizes, counts) if parts]
    because = costs.pop("skipped_because", {})
    lines += [f"skipped {plural(count, 'time')}: {reason}" for reason, count in because.items()]
    return lines + [f"{name}: {output.cell(value)}" for name, value in costs.items()]


def _replay(replay: Replay) -> str:
    """Return a line about one replay: time, names, verdict and, if it is not exact, the reason."""
    names = ", ".join(replay.names) or "as recorded"
    proof = replay.proof
    verdict = str(proof) if proof.verdict is not Verdict.EXACT else str(proof.verdict)
    verdict = f"redone from the start: {proof.why}" if proof.verdict is Verdict.REDONE else verdict
    from_start = " (from the start of the run)" if replay.redoes else ""
    return f"{moment(replay.started)}  {names}: {verdict}{from_start}"


def _replay_as_json(replay: Replay) -> dict[str, Any]:
    proof = replay.proof
    fields: dict[str, Any] = output.plain(replay)
    facts = {**fields.pop("start"), "report": fields.pop("report")}
    fields |= {"version": facts.pop("version"), "names": facts.pop("names"), "facts": facts}
    return {**fields, "verdict": proof.verdict, "why": proof.why, "redoes": replay.redoes or None}


@click.command(cls=TakesRuns)
@run_argument
@click.option("--get", metavar="PATH", help="Fetch this file.")
@click.option("--at", metavar="POINT", help="As it was at a checkpoint: epoch=3.")
@click.option(
    "-o", "--output", "destination", type=click.Path(path_type=Path), metavar="FILE",
    help="Where to put the fetched file; its own name in this folder by default.",
)  # fmt: skip
@json_option
def files(
    which: str, get: str | None, at: str | None, destination: Path | None, as_json: bool
) -> None:
    """List the files that a run wrote, and fetch them.

    A file is fetched from the project if it is as the run left it, else from the last checkpoint that
    holds it; --at takes an earlier checkpoint. An existing file is never overwritten.
    """
    history = open_history()
    if get is not None:
        _fetch(which, get, at, destination)
        return
    if at is not None or destination is not None:
        raise click.UsageError("--at and --output go with --get PATH: which file is to be fetched?")
    files_written = history.files(which)
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
