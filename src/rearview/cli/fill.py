"""Commands that run the past again: replay, backfill."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rearview.cli import show
from rearview.cli.formats import duration, plural
from rearview.cli.options import (
    TakesRuns,
    a_run,
    asked,
    at_option,
    complete_run,
    json_option,
    quiet_option,
    some_names,
    some_runs,
    span,
)
from rearview.cli.plans import (
    by_name,
    environment_lines,
    refused,
    show_plan,
    show_plan_briefly,
    summary,
)
from rearview.cli.progress import Bar, Lines, waiting
from rearview.cli.versions import names_programs, replay_programs, study_options
from rearview.model.proof import WITHHELD

if TYPE_CHECKING:
    from rearview.past import BackfillReport, Outcome

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
@click.option(
    "--gpus",
    type=click.FloatRange(0),
    metavar="SHARE",
    help="With --on ray: accelerators each segment gets, 0.5 for half of one.",
)
@click.option("--budget", type=span, metavar="TIME", help="Run no more than this takes: 10m.")
@click.option("--again", is_flag=True, help="Also run what is there and could not be proved.")
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
    gpus: float | None,
    budget: float | None,
    again: bool,
    explain: bool,
    yes: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """Fill columns for past runs from log statements added since.

    Write the log statement into the newest source, then name what it logs. Only what must run
    again does, from checkpoints, and each replay is proved against what was recorded. With --json
    each event is a line (docs/backfill.md). `rearview workers` adds and takes away workers while
    it runs. Exit code 0: filled and proved (or nothing was missing); 1: something was refused or
    is unproved, also of what was there before.
    """
    past = asked()
    chosen: dict[str, Any] = {
        "runs": list(which) or None,
        "where": where,
        "at": at,
        "workers": workers,
        "budget": budget,
        "again": again,
    }
    with waiting("planning", quiet=quiet):
        plan = past.plan(list(names), **chosen)
    if explain:
        if as_json:
            show.json_document({**summary(plan), "plan": by_name(plan.plan)})
        else:
            show_plan(plan)
        return 1 if plan.refusals and not plan.plan.segments else 0
    if as_json:
        show.json_line({"event": "planned", **summary(plan)})
    elif not quiet:
        show_plan_briefly(plan)
    if plan.nothing:
        if as_json:
            from rearview.past import BackfillReport

            show.json_line({"event": "done", **_verdict(BackfillReport(refusals=plan.refusals))})
        return 1 if plan.refusals or plan.unproved else 0
    if not yes and not agreed(plan.plan.seconds):
        show.note("Nothing was run.")
        return 1
    with Lines() if as_json else Bar(quiet=quiet) as watching:
        report = past.backfill(
            list(names), on=on, gpus=gpus, progress=watching, plan=plan, **chosen
        )
    if as_json:
        show.json_line({"event": "done", **_verdict(report)})
        return _code(report) or int(bool(plan.unproved))
    return finish(report, as_json=False) or int(bool(plan.unproved))


@click.command(cls=TakesRuns)
@click.argument(
    "words", metavar="[RUN or FILES]...", nargs=-1, type=a_run, shell_complete=complete_run
)
@at_option
@study_options
@quiet_option
@json_option
def replay(words: Sequence[str], at: str | None, quiet: bool, as_json: bool, **chosen: Any) -> int:
    """Run a past run again from its checkpoints and prove it exact.

    RUN is an id or part of one, `latest` (the default), or -2 for the one before the newest. The
    user's files are not touched. Exit code 0: exact; 1: it is not, and where it first differs.

    FILES are a package (study.rvz), or scripts and notebooks that are versions of one program: all
    of them are run as one tree, shared cells once, and their outputs compared with the recorded
    ones. The other options are for these.
    """
    if names_programs(words):
        return replay_programs(words, as_json=as_json, quiet=quiet, **chosen)
    if len(words) > 1:
        raise click.UsageError("Give one run, or the files of several versions.")
    which = words[0] if words else "latest"
    with Bar(quiet=quiet) as bar:
        report = asked().replay(which, at=at, progress=bar)
    if not as_json and not quiet:
        for text in environment_lines(report.environment_differences):
            show.note(text)
    return finish(report, as_json=as_json)


def agreed(seconds: float) -> bool:
    """Ask a person at a terminal whether something long may run; elsewhere it may."""
    if seconds < ASK_ABOVE or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    return click.confirm(f"That takes about {duration(seconds)}. Go on?", default=True, err=True)


def _code(report: BackfillReport) -> int:
    filled = not report.outcomes or (report.proved and bool(report.written or not report.unreached))
    return 0 if filled and not report.refusals else 1


def _verdict(report: BackfillReport) -> dict[str, Any]:
    """Return how a backfill ended; of its segments those that were not proved."""
    return {
        "exact": report.proved,
        "verdict": report.verdict,
        "redone": [
            {"run": one.run, "replay": one.replay, "why": one.redone} for one in report.redone
        ],
        "written": report.written,
        "seconds": report.seconds,
        "recorded_seconds": report.recorded_seconds,
        "speedup": report.speedup,
        "proof": report.proof,
        "segments": len(report.outcomes),
        "elsewhere": report.elsewhere,
        "never_reached": report.unreached,
        "unproved": [_told(outcome) for outcome in report.outcomes if not outcome.proved],
        "refusals": report.refusals,
        "environment_differences": report.environment_differences,
    }


def finish(report: BackfillReport, *, as_json: bool) -> int:
    """Print how it went and return the exit code."""
    code = _code(report)
    if as_json:
        all_of_it = [_told(outcome) for outcome in report.outcomes]
        show.json_document({**_verdict(report), "segments": all_of_it})
        return code
    for text in refused(report.refusals):
        show.out(text)
    for outcome in report.redone:
        show.out(
            f"{show.paint('redone from the start:', show.YELLOW)} {outcome.run}: the try from a "
            f"checkpoint did not do: {outcome.redone}"
        )
    for outcome in report.outcomes:
        if not outcome.proved:
            proof = outcome.proof
            label = show.paint(f"{proof.verdict}:", show.RED)
            show.out(f"{label} {outcome.run}: {proof.why}; its output is in {outcome.log}")
    if report.outcomes:
        show.out(
            f"{plural(report.written, 'record')} written in {duration(report.seconds)}"
            f"{_compared(report) if report.written else ''}"
        )
    for run in report.unreached:
        show.out(
            f"{show.paint('never reached:', show.YELLOW)} {run}: no value came, because the run did not "
            f"execute a statement that logs {' or '.join(report.names)}: it stands in a branch, or in a "
            "function, that was not entered"
        )
    withheld = sum(one.report.written for one in report.outcomes if one.proof.origin in WITHHELD)
    if withheld:
        show.out(
            f"{plural(withheld, 'record')} of what was written is not exact and is left out of "
            "tables; `rearview table --unproved` shows it"
        )
    if report.elsewhere:
        show.out(f"{plural(report.elsewhere, 'segment')} filled by another backfill meanwhile")
    show.out(show.paint(report.proof, show.YELLOW if code else show.GREEN))
    return code


def _compared(report: BackfillReport) -> str:
    took = duration(report.recorded_seconds)
    if report.speedup is not None and report.speedup >= 1.05:
        return f"; that is {report.speedup:.1f} times faster than the {took} of training"
    return f"; the training itself took {took}"


def _told(outcome: Outcome) -> dict[str, Any]:
    told = {name: getattr(outcome.report, name) for name in outcome.report.__struct_fields__}
    proof = outcome.proof
    head = {"run": outcome.run, "replay": outcome.replay, "proved": outcome.proved}
    head |= {"verdict": proof.verdict, "why": proof.why, "redone": outcome.redone or None}
    return {**head, **told, "log": outcome.log, "tree": outcome.tree}
