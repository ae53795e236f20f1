"""Commands that replay past runs: backfill, replay; and workers, which changes the workers of a running backfill."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from rearview.cli.options import (
    TakesRuns,
    at_option,
    complete_run,
    json_option,
    names_argument,
    open_history,
    quiet_option,
    runs_option,
    span,
    sure_option,
    without_prefix,
)
from rearview.cli.studies import replay_programs, study_options
from rearview.cli.terminal import output
from rearview.cli.terminal.output import duration, moment, plural, size
from rearview.cli.terminal.progress import Bar, Lines, waiting
from rearview.errors import UsageError
from rearview.model.proof import WITHHELD
from rearview.model.run import name_of

if TYPE_CHECKING:
    from rearview._history import (
        BackfillReport,
        BackfillStatus,
        PlanReport,
        Refusal,
        ReplayOutcome,
        Unproved,
    )
    from rearview.model import Plan, Segment

ASK_ABOVE = 60.0
"""If a plan is predicted to take more than this many seconds, the user is asked before it runs."""
FEW_RUNS = 3
"""Maximum number of runs that one printed line names; for more runs, the line gives their number."""
MAX_SEGMENTS = 60
"""Maximum number of segments that are listed; a last line gives the number of further segments."""
_INTERRUPTED = "Interrupted. All filled values are kept: the same command fills the rest, and runs nothing twice."
_REPLAY_INTERRUPTED = "Interrupted. Nothing was changed: the same command replays the run again."


@click.command(cls=TakesRuns)
@names_argument(required=False)
@click.option("--where", metavar="SQL", help="Only runs or rows for which this holds: 'acc < 0.9'.")
@runs_option
@at_option
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Processes at once.")
@click.option(
    "--on",
    type=click.Choice(["local", "ray"]),
    default="local",
    help="Where to run them: this machine, or a Ray cluster.",
)
@click.option(
    "--gpus",
    type=click.FloatRange(0),
    metavar="SHARE",
    help="With --on ray: accelerators each segment gets, 0.5 for half of one.",
)
@click.option(
    "--budget", type=span, metavar="TIME", help="Run only segments that end within this time: 10m."
)
@click.option("--again", is_flag=True, help="Also run again values that are unproved.")
@sure_option
@click.option("--explain", is_flag=True, help="Only show what would run again, and its cost.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, even if it takes long.")
@quiet_option
@json_option
def backfill(
    *,
    names: tuple[str, ...],
    where: str | None,
    which: tuple[str, ...],
    at: str | None,
    workers: int | None,
    on: str,
    gpus: float | None,
    budget: float | None,
    again: bool,
    sure: float | None,
    explain: bool,
    yes: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Fill columns for past runs from log statements added since.

    Write the log statement into the newest source, then give the names that it logs. A name that only a
    past version logs is filled, too, from the newest statement that logged it. Rearview runs only the
    necessary parts again, from checkpoints, and compares each replay with the recording. With --json
    each event is a line (docs/backfill.md). `rearview workers` changes the number of workers of a
    running backfill. Exit code 0: filled and proved (or nothing was missing); 1: something was refused
    or is unproved, including values of earlier backfills.
    """
    from rearview._history import BackfillReport, Question

    history = open_history()
    if not names:
        raise _names_needed(history.empty(history.names()))
    question = Question(
        names,
        runs=which or None,
        where=where,
        at=at,
        workers=workers,
        budget=budget,
        on=on,
        gpus=gpus,
        again=again,
        sure=sure,
    )
    with waiting("planning", quiet=quiet):
        plan = history.plan(question)
    if explain:
        if as_json:
            output.json_document({**summary(plan), "plan": by_name(plan.plan)})
        else:
            show_plan(plan)
        return 1 if plan.refusals and not plan.plan.segments else 0
    if as_json:
        output.json_line({"event": "planned", **summary(plan)})
    elif not quiet:
        show_plan_briefly(plan)
    if plan.nothing:
        if as_json:
            output.json_line({"event": "done", **_verdict(BackfillReport(refusals=plan.refusals))})
        return 1 if plan.refusals or plan.unproved else 0
    if not yes and not ask_to_run(plan.plan.seconds):
        output.note("Nothing was run.")
        return 1
    try:
        with Lines() if as_json else Bar(quiet=quiet) as watching:
            report = history.backfill(question, progress=watching, plan=plan)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_INTERRUPTED) from None
    if as_json:
        output.json_line({"event": "done", **_verdict(report)})
        return _code(report) or int(bool(plan.unproved))
    shown = () if quiet else plan.refusals
    return print_outcome(report, as_json=False, shown=shown) or int(bool(plan.unproved))


def _names_needed(unfilled: list[str]) -> UsageError:
    """Return the error for a backfill without names; it lists the names that can be filled."""
    if unfilled:
        text = f"Give the names to fill: `rearview backfill {' '.join(unfilled)}`."
    else:
        text = (
            "Give the names to fill. Everything that the newest source logs has values: add a "
            'statement such as rearview.log("grad_norm", value), then `rearview backfill grad_norm`.'
        )
    return UsageError(text, slug="no-names")


@click.command(cls=TakesRuns)
@click.argument(
    "words", metavar="[RUN or FILES]...", nargs=-1, type=without_prefix, shell_complete=complete_run
)
@at_option
@study_options
@quiet_option
@json_option
def replay(
    words: Sequence[str], at: str | None, quiet: bool, as_json: bool, **study_choices: Any
) -> int:
    """Run a past run again from its checkpoints and prove it exact.

    RUN is an id or part of one, `latest` (the default), or -2 for the one before the newest. The
    user's files are not touched. Exit code 0: exact; 1: it is not, and where it first differs.

    FILES are a package (study.rvz), or scripts and notebooks that are versions of one program: all
    of them are run as one tree, shared cells once, and their outputs compared with the recorded
    ones. The other options are for these.
    """
    from rearview.multiversion.study_sources import names_programs

    if words and names_programs(words):
        return replay_programs(words, as_json=as_json, quiet=quiet, **study_choices)
    if len(words) > 1:
        raise click.UsageError("Give one run, or the files of several versions.")
    which = words[0] if words else "latest"
    try:
        with Bar(quiet=quiet) as bar:
            report = open_history().replay(which, at=at, progress=bar)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_REPLAY_INTERRUPTED) from None
    if not as_json and not quiet:
        for text in environment_lines(report.environment_differences):
            output.note(text)
    return print_outcome(report, as_json=as_json)


def ask_to_run(seconds: float) -> bool:
    """Return True if a plan of `seconds` may run. Ask the user if it takes long and there is a terminal."""
    if seconds < ASK_ABOVE or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    return click.confirm(f"That takes about {duration(seconds)}. Go on?", default=True, err=True)


def _code(report: BackfillReport) -> int:
    filled = not report.outcomes or (report.proved and bool(report.written or not report.unreached))
    return 0 if filled and not report.refusals else 1


def _verdict(report: BackfillReport) -> dict[str, Any]:
    """Return the outcome of a backfill as values for JSON, with those segments that are not proved."""
    return {
        "exact": report.proved,
        "verdict": report.verdict,
        "redone": [
            {"run": outcome.run, "replay": outcome.replay, "why": outcome.redone}
            for outcome in report.redone
        ],
        "written": report.written,
        "seconds": report.seconds,
        "recorded_seconds": report.recorded_seconds,
        "speedup": report.speedup,
        "proof": report.proof,
        "segments": len(report.outcomes),
        "elsewhere": report.elsewhere,
        "never_reached": report.unreached,
        "unproved": [
            _outcome_as_json(outcome) for outcome in report.outcomes if not outcome.proved
        ],
        "moved": list(report.replaced),
        "refusals": _refusals_as_json(report.refusals),
        "environment_differences": report.environment_differences,
    }


def print_outcome(report: BackfillReport, *, as_json: bool, shown: Sequence[Refusal] = ()) -> int:
    """Print the outcome of a backfill and return the exit code; refusals in `shown` are not printed again."""
    code = _code(report)
    if as_json:
        segments = [_outcome_as_json(outcome) for outcome in report.outcomes]
        output.json_document({**_verdict(report), "segments": segments})
        return code
    for text in refusal_lines([refusal for refusal in report.refusals if refusal not in shown]):
        output.out(text)
    for text in _doubts(report.outcomes, report.redone):
        output.out(text)
    for sentence in report.replaced:
        output.out(f"{output.paint('moved:', output.YELLOW)} {sentence}")
    if report.outcomes:
        output.out(
            f"{plural(report.written, 'record')} written in {duration(report.seconds)}"
            f"{_compared(report) if report.written else ''}"
        )
    for folder in report.event_files:
        output.out(f"event files for TensorBoard: {folder}")
    if report.unreached:
        output.out(
            f"{output.paint('never reached:', output.YELLOW)} {_runs_in_words(report.unreached)}: no value came, because "
            f"no statement that logs {' or '.join(report.names)} was executed: it is in a branch or a function "
            "that was not entered. Put it where the run passes"
        )
    withheld = sum(
        outcome.report.written for outcome in report.outcomes if outcome.proof.origin in WITHHELD
    )
    if withheld:
        output.out(
            f"left out of tables, because not exact: {plural(withheld, 'record')}; `rearview table "
            "--unproved` shows them"
        )
    if report.elsewhere:
        output.out(f"{plural(report.elsewhere, 'segment')} filled by another backfill meanwhile")
    doubtful = sum(not outcome.proved for outcome in report.outcomes)
    proof = report.proof
    if doubtful:  # the reasons were printed above
        proof = (
            f"{report.verdict}: {doubtful} of {plural(len(report.outcomes), 'segment')} not proved"
        )
    output.out(output.paint(proof, output.YELLOW if code else output.GREEN))
    return code


def _doubts(outcomes: Sequence[ReplayOutcome], redone: Sequence[ReplayOutcome]) -> list[str]:
    """Return lines that say why segments were not proved or ran again: one line per reason, with all its runs."""
    lines: dict[tuple[str, str, str], list[ReplayOutcome]] = {}
    for outcome in outcomes:
        if not outcome.proved:
            key = (f"{outcome.proof.verdict}:", output.RED, outcome.proof.why)
            lines.setdefault(key, []).append(outcome)
    shown_reasons = {
        (outcome.run, why) for (_, _, why), doubtful in lines.items() for outcome in doubtful
    }
    for outcome in redone:
        if (outcome.run, outcome.redone) not in shown_reasons:
            why = f"the replay from a checkpoint failed: {outcome.redone}"
            lines.setdefault(("redone from the start:", output.YELLOW, why), []).append(outcome)
    return [
        f"{output.paint(label, color)} {_runs_in_words([outcome.run for outcome in doubtful])}: {why}"
        + (f"; its output is in {doubtful[-1].log}" if color == output.RED else "")
        for (label, color, why), doubtful in lines.items()
    ]


def _compared(report: BackfillReport) -> str:
    took = duration(report.recorded_seconds)
    if report.speedup is not None and report.speedup >= 1.05:
        return f"; that is {report.speedup:.1f} times faster than the {took} of training"
    return f"; the training itself took {took}"


def _outcome_as_json(outcome: ReplayOutcome) -> dict[str, Any]:
    report = {name: getattr(outcome.report, name) for name in outcome.report.__struct_fields__}
    proof = outcome.proof
    head = {"run": outcome.run, "replay": outcome.replay, "proved": outcome.proved}
    head |= {"verdict": proof.verdict, "why": proof.why, "redone": outcome.redone or None}
    return {**head, **report, "log": outcome.log, "tree": outcome.tree}


def summary(plan: PlanReport) -> dict[str, Any]:
    """Return the numbers and remarks of a plan as values for JSON, without its list of segments."""
    numbers: dict[str, Any] = {
        "nothing": plan.nothing,
        "missing": plan.missing.cells,
        "missing_about": plan.missing.approximate,
        "missing_at_least": plan.missing.at_least,
        "segments": len(plan.plan.segments),
        "runs": len({segment.run for segment in plan.plan.segments}),
        "seconds": plan.plan.seconds,
        "low": sum(segment.low for segment in plan.plan.segments),
        "high": sum(segment.high for segment in plan.plan.segments),
        "refusals": _refusals_as_json(plan.refusals),
        "changed_inputs": plan.changed_inputs,
        "environment_differences": plan.environment_differences,
        "notes": plan.notes,
        "unproved": plan.unproved,
        "insertions": plan.insertions,
        "shared_setup": list(plan.shared.sentences),
    }
    if plan.explained is not None:
        numbers |= {
            "bytes_written": plan.explained.nbytes_written,
            "bytes_read": plan.explained.nbytes_read,
            "workers": plan.explained.workers,
            "cheaper": plan.explained.cheaper,
        }
    return numbers


def show_plan_briefly(plan: PlanReport) -> None:
    """Print on stderr the remarks on a plan and, if it has segments, a line with its cost."""
    if _remarks(plan, output.note):
        output.note(_cost_line(plan))


def show_plan(plan: PlanReport) -> None:
    """Print a plan in detail: the statements that it inserts into versions, its segments and costs."""
    if not _remarks(plan, output.out):
        return
    for insertion in plan.insertions:
        output.out(output.paint(f"goes into {_runs_in_words(insertion.runs)}:", output.BOLD))
        output.diff(insertion.diff)
        output.out()
    segments = plan.plan.segments
    output.table(
        ["run", "statement in", "iterations", "from", "predicted", "between"],
        [_segment_row(segment) for segment in segments[:MAX_SEGMENTS]],
        right=[False, False, False, False, True, False],
    )
    if len(segments) > MAX_SEGMENTS:
        output.out(f"… and {plural(len(segments) - MAX_SEGMENTS, 'segment')} more")
    for operator in dict.fromkeys(segment.operator for segment in segments):
        output.out(output.paint(operator.in_words, output.DIM))
    output.out()
    output.out(_cost_line(plan))
    explained = plan.explained
    if explained is None:
        return
    output.out(
        f"{plan.missing} to fill, about {size(explained.nbytes_written)} to write, "
        f"{size(explained.nbytes_read)} of checkpoints to read"
    )
    output.out(
        f"{duration(explained.startup)} to start and set up, {duration(explained.restoring)} to restore, "
        f"{duration(explained.running)} to run"
        + (f" ({duration(explained.wasted)} only to get there)" if explained.wasted > 0.5 else "")
    )
    for sentence in plan.shared.sentences:
        output.out(sentence)
    output.out()
    output.table(
        ["workers", "done after", "segments"],
        [[str(on.workers), duration(on.seconds), str(on.segments)] for on in explained.workers],
        right=[True, True, True],
    )
    if explained.cheaper:
        output.out()
    for option in explained.cheaper:
        output.out(f"cheaper by {duration(option.saves)}: {option.text}")


def _remarks(plan: PlanReport, say: Callable[[str], None]) -> bool:
    """Print the warnings, notes and refusals of a plan with `say`; return True if the plan has segments to run."""
    if changed := plan.changed_inputs:
        more = f" (and {plural(len(changed) - 1, 'more file')})" if len(changed) > 1 else ""
        say(f"changed since: {changed[0]}{more}; the replay reads the present content")
    for text in environment_lines(plan.environment_differences):
        say(text)
    for remark in plan.notes:
        say(f"note: {remark}")
    for text in refusal_lines(plan.refusals):
        say(text)
    for text in _unproved(plan.unproved):
        say(text)
    if plan.nothing:
        say("Nothing to run." if plan.refusals else "Nothing is missing.")
    return not plan.nothing


def environment_lines(differences: Sequence[str]) -> list[str]:
    """Return one line with all `differences` of environment variables, or no line if there are none.

    `differences` has a phrase for each variable that has another value now and that a replay does not restore.
    """
    if not differences:
        return []
    return [f"environment, not restored: {'; '.join(differences)} (docs/environment.md)"]


def _unproved(unproved: Sequence[Unproved]) -> list[str]:
    """Return a line for each set of names with values that cannot be proved; the line lists their runs."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for values in unproved:
        runs.setdefault(values.names, []).append(values.run)
    return [
        f"not proved: {', '.join(names)} of {_runs_in_words(run_ids)} has values, but they were computed where "
        "the run recorded nothing to compare with; `--again` runs it again"
        for names, run_ids in runs.items()
    ]


def _runs_in_words(runs: Sequence[str]) -> str:
    return ", ".join(runs) if len(runs) <= FEW_RUNS else f"{len(runs)} runs, such as {runs[-1]}"


def refusal_lines(refusals: Sequence[Refusal]) -> list[str]:
    """Return lines that say why runs were refused: one line per reason, with all its runs."""
    runs: dict[str, list[str]] = {}
    for refusal in refusals:
        reason = refusal.general_reason or refusal.reason
        runs.setdefault(reason, []).append(refusal.run)
    return [f"refused: {_runs_in_words(run_ids)}: {reason}" for reason, run_ids in runs.items()]


def _refusals_as_json(refusals: Sequence[Refusal]) -> list[dict[str, str]]:
    return [{"run": refusal.run, "reason": refusal.reason} for refusal in refusals]


def _cost_line(plan: PlanReport) -> str:
    segments = plan.plan.segments
    runs = len({segment.run for segment in segments})
    low, high = (sum(getattr(s, side) for s in segments) for side in ("low", "high"))
    span = f" ({duration(low)} to {duration(high)})" if high > low else ""
    return (
        f"{plural(len(segments), 'segment')} of {plural(runs, 'run')}, "
        f"about {duration(plan.plan.seconds)} of computing{span}"
    )


def _segment_row(segment: Segment) -> list[str]:
    return [
        segment.run,
        segment.operator.in_words.partition(":")[0],
        _iterations(segment),
        segment.start or "the start",
        duration(segment.seconds),
        f"{duration(segment.low)} to {duration(segment.high)}",
    ]


def _iterations(segment: Segment) -> str:
    if segment.loop is None:
        return ""
    last = "" if segment.last is None else segment.last
    share = f" ({len(segment.only)} of them)" if segment.only is not None else ""
    inner = "".join(
        f"/{name_of(loop)}={first}:{'' if end is None else end}"
        for loop, first, end in segment.inner
    )
    return f"{name_of(segment.loop)}={segment.first}:{last}{share}{inner}"


def by_name(plan: Plan) -> Plan:
    """Return `plan` with each loop id replaced by the name of the loop."""
    return replace(
        plan,
        segments=tuple(
            replace(
                segment,
                loop=None if segment.loop is None else name_of(segment.loop),
                inner=tuple((name_of(loop), first, last) for loop, first, last in segment.inner),
            )
            for segment in plan.segments
        ),
    )


@click.command()
@click.argument("count", metavar="[N]", type=click.IntRange(1), required=False)
@click.option("--of", "which", metavar="ID", help="Which backfill, if there are several.")
@json_option
def workers(count: int | None, which: str | None, as_json: bool) -> int:
    """Show backfills under way and their workers, or give them N workers from now on.

    New workers start at once. A worker that is taken away ends its segment if that is nearly done;
    otherwise another worker runs the segment. Exit code 1: no backfill is under way.
    """
    history = open_history()
    if count is not None:
        changed = history.set_workers(count, of=which)
        if not as_json:
            names = ", ".join(changed.names)
            output.out(f"{changed.id} ({names}): {plural(count, 'worker')} from now on")
            return 0
    running = [
        status for status in history.running_backfills() if which is None or which in status.id
    ]
    if as_json:
        output.json_document([_status_as_json(status) for status in running])
    elif running:
        output.table(
            ["backfill", "fills", "started", "workers", "busy", "segments", "left"],
            [_status_row(status) for status in running],
            right=[False, False, False, True, True, True, True],
        )
    else:
        output.note("No backfill is running here.")
    return 0 if running else 1


def _status_as_json(status: BackfillStatus) -> dict[str, object]:
    hidden = {"format", "heartbeat"}
    return {name: getattr(status, name) for name in status.__struct_fields__ if name not in hidden}


def _status_row(status: BackfillStatus) -> list[str]:
    return [
        status.id,
        ", ".join(status.names) or "a replay",
        moment(status.started),
        str(status.workers),
        str(status.busy),
        f"{status.ended} of {status.segments}",
        duration(status.left),
    ]
