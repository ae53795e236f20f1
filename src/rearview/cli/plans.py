"""A plan for people: what would run again, from where, for how long, and what would be cheaper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rearview.cli import show
from rearview.cli.formats import duration, plural, size
from rearview.model.point import name_of

if TYPE_CHECKING:
    from rearview.model import Plan, Segment
    from rearview.past import PlanReport, Refusal, Unproved

FEW = 3
"""Runs that are named one by one."""
SCREEN = 60
"""Segments that are listed; more are counted."""


def summary(plan: PlanReport) -> dict[str, Any]:
    """Return the numbers of a plan."""
    told: dict[str, Any] = {
        "nothing": plan.nothing,
        "missing": plan.missing.cells,
        "missing_about": plan.missing.about,
        "missing_at_least": plan.missing.least,
        "segments": len(plan.plan.segments),
        "runs": len({segment.run for segment in plan.plan.segments}),
        "seconds": plan.plan.seconds,
        "low": sum(segment.low for segment in plan.plan.segments),
        "high": sum(segment.high for segment in plan.plan.segments),
        "refusals": plan.refusals,
        "changed_inputs": plan.changed_inputs,
        "environment_differences": plan.environment_differences,
        "notes": plan.notes,
        "unproved": plan.unproved,
        "insertions": plan.insertions,
    }
    if plan.explained is not None:
        told |= {
            "bytes_written": plan.explained.nbytes_written,
            "bytes_read": plan.explained.nbytes_read,
            "workers": plan.explained.workers,
            "cheaper": plan.explained.cheaper,
        }
    return told


def show_plan_briefly(plan: PlanReport) -> None:
    """Say on stderr what will run."""
    if _remarks(plan, show.note):
        show.note(_sum(plan))


def show_plan(plan: PlanReport) -> None:
    """Print all there is to know about a plan before it runs."""
    if not _remarks(plan, show.out):
        return
    for one in plan.insertions:
        show.out(show.paint(f"goes into {_who(one.runs)}:", show.BOLD))
        show.diff(one.diff)
        show.out()
    segments = plan.plan.segments
    show.table(
        ["run", "operator", "iterations", "from", "predicted", "between"],
        [_row(segment) for segment in segments[:SCREEN]],
        right=[False, False, False, False, True, False],
    )
    if len(segments) > SCREEN:
        show.out(f"… and {plural(len(segments) - SCREEN, 'segment')} more")
    show.out()
    show.out(_sum(plan))
    told = plan.explained
    if told is None:
        return
    show.out(
        f"{plan.missing} to fill, about {size(told.nbytes_written)} to write, "
        f"{size(told.nbytes_read)} of checkpoints to read"
    )
    show.out(
        f"{duration(told.startup)} to start and set up, {duration(told.restoring)} to restore, "
        f"{duration(told.running)} to run"
        + (f" ({duration(told.wasted)} only to get there)" if told.wasted > 0.5 else "")
    )
    show.out()
    show.table(
        ["workers", "done after", "segments"],
        [[str(on.workers), duration(on.seconds), str(on.segments)] for on in told.workers],
        right=[True, True, True],
    )
    if told.cheaper:
        show.out()
    for one in told.cheaper:
        show.out(f"cheaper by {duration(one.saves)}: {one.text}")


def _remarks(plan: PlanReport, say: Callable[[str], None]) -> bool:
    """Say what has to be known first; return whether there is anything to run."""
    for changed in plan.changed_inputs:
        say(f"changed since: {changed}; the replay reads what is there now")
    for text in environment_lines(plan.environment_differences):
        say(text)
    for remark in plan.notes:
        say(f"note: {remark}")
    for text in refused(plan.refusals):
        say(text)
    for text in _unproved(plan.unproved):
        say(text)
    if plan.nothing:
        say("Nothing to run." if plan.refusals else "Nothing is missing.")
    return not plan.nothing


def environment_lines(differences: Sequence[str]) -> list[str]:
    """Return one line on environment variables that differ and are not restored, or none."""
    if not differences:
        return []
    return [f"environment, not restored: {'; '.join(differences)} (docs/environment.md)"]


def _unproved(found: Sequence[Unproved]) -> list[str]:
    """Return a line for each set of names of which values are there that cannot be proved."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for one in found:
        runs.setdefault(one.names, []).append(one.run)
    return [
        f"not proved: {', '.join(names)} of {_who(those)} is there, but was computed where the run "
        "recorded nothing to compare with; `--again` runs it again"
        for names, those in runs.items()
    ]


def _who(runs: Sequence[str]) -> str:
    return ", ".join(runs) if len(runs) <= FEW else f"{len(runs)} runs, such as {runs[-1]}"


def refused(refusals: Sequence[Refusal]) -> list[str]:
    """Return a line for each reason; one that several runs share is told once."""
    runs: dict[str, list[str]] = {}
    for refusal in refusals:
        reason = refusal.reason.replace(f"run {refusal.run}", "the run")
        runs.setdefault(reason, []).append(refusal.run)
    return [f"refused: {_who(found)}: {reason}" for reason, found in runs.items()]


def _sum(plan: PlanReport) -> str:
    segments = plan.plan.segments
    runs = len({segment.run for segment in segments})
    low, high = (sum(getattr(s, side) for s in segments) for side in ("low", "high"))
    span = f" ({duration(low)} to {duration(high)})" if high > low else ""
    return (
        f"{plural(len(segments), 'segment')} of {plural(runs, 'run')}, "
        f"about {duration(plan.plan.seconds)} of computing{span}"
    )


def _row(segment: Segment) -> list[str]:
    return [
        segment.run,
        segment.operator.value,
        _iterations(segment),
        segment.start or "the start",
        duration(segment.seconds),
        f"{duration(segment.low)} to {duration(segment.high)}",
    ]


def _iterations(segment: Segment) -> str:
    if segment.loop is None:
        return ""
    last = "" if segment.last is None else segment.last
    some = f" ({len(segment.only)} of them)" if segment.only is not None else ""
    inner = "".join(
        f"/{name_of(loop)}={first}:{'' if end is None else end}"
        for loop, first, end in segment.inner
    )
    return f"{name_of(segment.loop)}={segment.first}:{last}{some}{inner}"


def by_name(plan: Plan) -> Plan:
    """Return a plan in which loops go by what people call them."""
    return replace(
        plan,
        segments=tuple(
            replace(
                one,
                loop=None if one.loop is None else name_of(one.loop),
                inner=tuple((name_of(loop), first, last) for loop, first, last in one.inner),
            )
            for one in plan.segments
        ),
    )
