"""Commands that run the past again: replay, backfill."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from rearview.cli import show
from rearview.cli.formats import duration, plural
from rearview.cli.options import (
    TakesRuns,
    asked,
    at_option,
    json_option,
    one_run,
    quiet_option,
    some_names,
    some_runs,
    span,
)
from rearview.cli.progress import Bar, waiting

if TYPE_CHECKING:
    from rearview.model import Segment
    from rearview.past import BackfillReport, Outcome, PlanReport

ASK_ABOVE = 60.0
"""Predicted seconds above which a person at a terminal is asked first."""


@click.command(cls=TakesRuns)
@some_names(required=True)
@click.option("--where", metavar="SQL", help="Only runs or rows for which this holds: 'acc < 0.9'.")
@some_runs
@at_option
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Processes at once.")
@click.option(
    "--on",
    type=click.Choice(["local", "ray"]),
    default="local",
    help="What runs them: this machine, or a Ray cluster.",
)
@click.option("--budget", type=span, metavar="TIME", help="Run no more than this takes: 10m.")
@click.option("--explain", is_flag=True, help="Only show what would run again, and its cost.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask, however long it takes.")
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
    budget: float | None,
    explain: bool,
    yes: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Fill columns for past runs from log statements added since.

    Write the log statement into the newest source, then name what it logs. Only what must run
    again does, from checkpoints, and each replay is proved against what was recorded. Exit code
    0: filled and proved (or nothing was missing); 1: something was refused or is unproved.
    """
    past = asked()
    chosen: dict[str, Any] = {
        "runs": list(which) or None,
        "where": where,
        "at": at,
        "workers": workers,
        "budget": budget,
    }
    with waiting("planning", quiet=quiet):
        plan = past.plan(list(names), **chosen)
    if explain:
        if as_json:
            show.json_document({**_summary(plan), "plan": plan.plan})
        else:
            show_plan(plan)
        return 1 if plan.refusals and not plan.plan.segments else 0
    if not quiet and not as_json:
        show_plan(plan, to_stderr=True)
    if plan.nothing:
        if as_json:
            show.json_document({"written": 0, "segments": [], **_summary(plan)})
        return 1 if plan.refusals else 0
    if not yes and not agreed(plan.plan.seconds):
        show.note("Nothing was run.")
        return 1
    with Bar(quiet=quiet) as bar:
        report = past.backfill(list(names), on=on, progress=bar, **chosen)
    return finish(report, as_json=as_json)


@click.command(cls=TakesRuns)
@one_run
@at_option
@quiet_option
@json_option
def replay(which: str, at: str | None, quiet: bool, as_json: bool) -> int:
    """Run a past run again from its checkpoints and prove it exact.

    RUN is an id or part of one, `latest` (the default), or -2 for the one before the newest. The
    user's files are not touched. Exit code 0: exact; 1: it is not, and where it first differs.
    """
    with Bar(quiet=quiet) as bar:
        report = asked().replay(which, at=at, progress=bar)
    return finish(report, as_json=as_json)


def agreed(seconds: float) -> bool:
    """Ask a person at a terminal whether something long may run; elsewhere it may."""
    if seconds < ASK_ABOVE or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    return click.confirm(f"That takes about {duration(seconds)}. Go on?", default=True, err=True)


def show_plan(plan: PlanReport, *, to_stderr: bool = False) -> None:
    """Print what would run again and what it costs."""
    say = show.note if to_stderr else show.out
    for changed in plan.changed_inputs:
        say(f"changed since: {changed}; the replay reads what is there now")
    for refusal in plan.refusals:
        say(f"refused: {refusal.run}: {refusal.reason}")
    if plan.nothing:
        say("Nothing to run." if plan.refusals else "Nothing is missing.")
        return
    segments = plan.plan.segments
    runs = len({segment.run for segment in segments})
    low, high = (sum(getattr(s, side) for s in segments) for side in ("low", "high"))
    span = f" ({duration(low)} to {duration(high)})" if high > low else ""
    if not to_stderr:
        show.table(
            ["run", "operator", "iterations", "from", "predicted"],
            [
                [
                    s.run,
                    s.operator.value,
                    _iterations(s),
                    s.start or "the start",
                    duration(s.seconds),
                ]
                for s in segments
            ],
            right=[False, False, False, False, True],
        )
    say(
        f"{plural(len(segments), 'segment')} of {plural(runs, 'run')}, "
        f"about {duration(plan.plan.seconds)} of computing{span}"
    )


def _iterations(segment: Segment) -> str:
    if segment.loop is None:
        return ""
    last = "" if segment.last is None else segment.last
    return f"{segment.loop}={segment.first}:{last}"


def _summary(plan: PlanReport) -> dict[str, Any]:
    return {
        "nothing": plan.nothing,
        "missing": plan.missing,
        "seconds": plan.plan.seconds,
        "refusals": plan.refusals,
        "changed_inputs": plan.changed_inputs,
    }


def finish(report: BackfillReport, *, as_json: bool) -> int:
    """Print how it went and return the exit code."""
    code = 0 if not report.refusals and (report.proved or not report.outcomes) else 1
    if as_json:
        show.json_document(
            {
                "exact": report.proved,
                "written": report.written,
                "seconds": report.seconds,
                "recorded_seconds": report.recorded_seconds,
                "speedup": report.speedup,
                "proof": report.proof,
                "segments": [_told(outcome) for outcome in report.outcomes],
                "refusals": report.refusals,
            }
        )
        return code
    for refusal in report.refusals:
        show.out(f"refused: {refusal.run}: {refusal.reason}")
    for outcome in report.outcomes:
        if not outcome.proved:
            show.out(f"{show.paint('not exact:', show.RED)} {outcome.run}: {_why(outcome)}")
    if report.outcomes:
        show.out(
            f"{plural(report.written, 'record')} written in {duration(report.seconds)}; "
            f"{_compared(report)}"
        )
    show.out(show.paint(report.proof, show.YELLOW if code else show.GREEN))
    return code


def _compared(report: BackfillReport) -> str:
    took = duration(report.recorded_seconds)
    if report.speedup is not None and report.speedup >= 1.05:
        return f"that is {report.speedup:.1f} times faster than the {took} of training"
    return f"the training itself took {took}"


def _told(outcome: Outcome) -> dict[str, Any]:
    told = {name: getattr(outcome.report, name) for name in outcome.report.__struct_fields__}
    head = {"run": outcome.run, "replay": outcome.replay, "proved": outcome.proved}
    return {**head, **told, "log": outcome.log, "tree": outcome.tree}


def _why(outcome: Outcome) -> str:
    report = outcome.report
    first = report.error or report.difference or "nothing that was recorded could be compared"
    differing = f" (differing: {', '.join(report.differing)})" if report.differing else ""
    return f"{first}{differing}; its output is in {outcome.log}"
