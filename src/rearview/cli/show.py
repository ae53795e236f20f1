"""Commands about one run: show (its facts, names and replays), and files (the files that it wrote)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rearview.cli.options import (
    TakesRuns,
    complete_run,
    json_option,
    one_run,
    open_history,
    without_mark,
)
from rearview.cli.query import print_damage
from rearview.cli.runs import STATUS, seconds_taken
from rearview.cli.terminal import output
from rearview.cli.terminal.output import duration, moment, plain, plural, size
from rearview.cli.terminal.progress import waiting
from rearview.errors import RearviewError, UsageError
from rearview.model import Run, Verdict
from rearview.model.restored_environment import is_restored
from rearview.model.run import name_of

if TYPE_CHECKING:
    from rearview._history import Replay, RunReport

VARIABLES = 12
"""Environment variables that are named; more are counted."""


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
    past = open_history()
    report = past.show(which)
    if as_json:
        output.json_document(
            {**output.plain(report), "replays": list(map(_replay_as_json, report.replays))}
        )
    else:
        _show(report)
    print_damage(past)


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
    """Return the costs of recording in sentences; costs without a sentence follow as `name: value`."""
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
    """Return a line for one replay, with the reason if it is not exact."""
    names = ", ".join(replay.names) or "as recorded"
    proof = replay.proof
    verdict = str(proof) if proof.verdict is not Verdict.EXACT else str(proof.verdict)
    verdict = f"redone from the start: {proof.why}" if proof.verdict is Verdict.REDONE else verdict
    again = " (from the start of the run)" if replay.redoes else ""
    return f"{moment(replay.started)}  {names}: {verdict}{again}"


def _replay_as_json(replay: Replay) -> dict[str, Any]:
    proof = replay.proof
    about: dict[str, Any] = output.plain(replay)
    facts = {**about.pop("start"), "report": about.pop("report")}
    about |= {"version": facts.pop("version"), "names": facts.pop("names"), "facts": facts}
    return {**about, "verdict": proof.verdict, "why": proof.why, "redoes": replay.redoes or None}


@click.command(cls=TakesRuns)
@one_run
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
