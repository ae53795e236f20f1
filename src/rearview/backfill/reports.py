"""Reports of a plan and of a backfill: what would run, what ran, and whether it was exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

from rearview.backfill.examine_run import PreparedRun
from rearview.backfill.find_statements import StatementSources
from rearview.backfill.setup_sharing import SharedStages
from rearview.execute.replay_jobs import ReplayOutcome
from rearview.model import Plan, Verdict
from rearview.model.proof import compared, worst
from rearview.model.wording import plural

SHOWN = 30
"""Most segments, and most refusals, that a plan lists in a notebook."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A run whose missing values cannot be filled, and the reason."""

    run: str
    reason: str
    general_reason: str = ""
    """`reason` without the id of the run, so that refusals of several runs with one problem can be shown as one."""


@dataclass(frozen=True, slots=True)
class Unproved:
    """Names of a run whose values cannot be proved, because the run recorded nothing to compare them with."""

    run: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Insertion:
    """The statements that a backfill inserts into the source of `runs`, as a diff."""

    runs: tuple[str, ...]
    diff: str


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """The result of a backfill: the outcome of each replay, and the runs that could not be replayed."""

    outcomes: list[ReplayOutcome] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    seconds: float = 0.0
    recorded_seconds: float = 0.0
    """Seconds that the replayed runs took when they were recorded, all together."""
    elsewhere: int = 0
    """Number of segments that another backfill filled at the same time, wholly or in part."""
    environment_differences: list[str] = field(default_factory=list)
    """A phrase for each environment variable that runs read with another value than replays did."""
    names: tuple[str, ...] = ()
    """The names whose values were requested."""
    replaced: tuple[str, ...] = ()
    """Sentences about inserted statements that failed at one line and were moved to another line."""
    event_files: tuple[str, ...] = ()
    """Folders with TensorBoard event files, which contain the values that probes passed to TensorBoard."""

    @property
    def unreached(self) -> list[str]:
        """Ids of runs with an exact replay in which no statement logged any of `names`, so that no value was filled."""
        if not self.names or self.elsewhere:
            return []
        written: dict[str, int] = {}
        for outcome in self.outcomes:
            written[outcome.run] = written.get(outcome.run, 0) + outcome.report.written
        exact = {outcome.run for outcome in self.outcomes if outcome.proved}
        return [run for run, count in written.items() if not count and run in exact]

    @property
    def written(self) -> int:
        """Number of records that the replays added."""
        return sum(outcome.report.written for outcome in self.outcomes)

    @property
    def proved(self) -> bool:
        """Whether every replay was exact; False if there was no replay."""
        return bool(self.outcomes) and all(outcome.proved for outcome in self.outcomes)

    @property
    def speedup(self) -> float | None:
        """Recorded seconds of the replayed runs divided by the seconds of the backfill.

        None if nothing was replayed, or if another backfill did a part of the work.
        """
        if not self.outcomes or self.elsewhere or self.seconds <= 0:
            return None
        return self.recorded_seconds / self.seconds

    @property
    def proof(self) -> str:
        """A line for the user that says whether all replays were exact or, if not, which run differed and why."""
        if not self.outcomes:
            return "nothing was replayed" + " here" * bool(self.elsewhere)
        decisive = worst(outcome.proof for outcome in self.outcomes)
        if decisive is None or decisive.verdict is Verdict.EXACT:
            return f"exact: {compared(outcome.report for outcome in self.outcomes)}"
        run = next(outcome.run for outcome in self.outcomes if outcome.proof == decisive)
        return f"{decisive.verdict}: run {run}: {decisive.why}"

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict of all replays, or None if there was no replay."""
        decisive = worst(outcome.proof for outcome in self.outcomes)
        return decisive.verdict if decisive is not None else None

    @property
    def redone(self) -> list[ReplayOutcome]:
        """The outcomes of segments that ran twice; `ReplayOutcome.redone` says why."""
        return [outcome for outcome in self.outcomes if outcome.redone]


@dataclass(frozen=True, slots=True)
class MissingCells:
    """The number of missing values; a cell is one value of one name at one point of a run.

    >>> print(MissingCells(12), MissingCells(12, approximate=True), MissingCells(1, at_least=True), sep="; ")
    12 cells; about 12 cells; at least 1 cell
    """

    cells: int
    approximate: bool = False
    """Whether `cells` is partly a guess, because the run did not count all iterations of an inner loop."""
    at_least: bool = False
    """Whether there may be more cells, because the run counted no iterations of a loop around a log statement."""

    def __str__(self) -> str:
        words = ["at least"] * self.at_least + ["about"] * self.approximate
        return " ".join([*words, str(self.cells), "cell" if self.cells == 1 else "cells"])


@dataclass(frozen=True)
class PlanReport:
    """The segments that a backfill would run, and their cost, before anything runs."""

    plan: Plan
    refusals: list[Refusal] = field(default_factory=list)
    missing: MissingCells = field(default_factory=lambda: MissingCells(0))
    """The number of missing values that the plan fills."""
    changed_inputs: list[str] = field(default_factory=list)
    """A sentence for each input file that changed after runs read it."""
    environment_differences: list[str] = field(default_factory=list)
    """A phrase for each environment variable that runs read with another value than replays will."""
    notes: list[str] = field(default_factory=list)
    """Further sentences for the user, such as about renamed files, or why predictions are uncertain."""
    unproved: list[Unproved] = field(default_factory=list)
    """Runs with requested values that earlier replays filled and that can never be proved."""
    explaining: Callable[[], Any] | None = field(default=None, repr=False)
    """Function that returns the value of `explained`; None if the plan cannot be explained."""
    insertions: list[Insertion] = field(default_factory=list)
    """The statements that are inserted into the source of the runs, as diffs; equal diffs are listed once."""
    prepared: Mapping[str, PreparedRun] = field(default_factory=dict, repr=False)
    """Id of a run -> the prepared run from which the plan was made; needed to run the plan."""
    statements: StatementSources | None = field(default=None, repr=False)
    """The statements that log the requested names, and the lines at which they are inserted in each version."""
    shared: SharedStages = field(default_factory=lambda: SharedStages({}), repr=False)
    """Statements before the main loop that run once for several segments, and why others run once for each segment."""

    def _repr_html_(self) -> str:
        """Return the plan as HTML, which notebooks display."""
        segments = self.plan.segments
        head = (
            f"<p>{escape(str(self.missing))} to fill: {plural(len(segments), 'segment')} of "
            f"{plural(len({segment.run for segment in segments}), 'run')}, about {self.plan.seconds:.1f} s of "
            "computing</p>"
        )
        rows = "".join(
            f"<tr><td>{escape(segment.run)}</td><td>{segment.operator.in_words}</td><td>{segment.first}:"
            f"{'' if segment.last is None else segment.last}</td><td>{escape(segment.start or 'the start')}</td>"
            f"<td>{segment.seconds:.2f} s</td></tr>"
            for segment in segments[:SHOWN]
        )
        omitted = f"<p>… and {len(segments) - SHOWN} more</p>" if len(segments) > SHOWN else ""
        refused = "".join(
            f"<li>{escape(refusal.run)}: {escape(refusal.reason)}</li>"
            for refusal in self.refusals[:SHOWN]
        )
        names = ("run", "statement in", "iterations", "from", "predicted")
        titles = "".join(f"<th>{name}</th>" for name in names)
        table = f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>" * bool(rows)
        return head + table + omitted + (f"<p>refused:</p><ul>{refused}</ul>" if refused else "")

    @property
    def nothing(self) -> bool:
        """Whether the plan has no segments."""
        return not self.plan.segments

    @cached_property
    def explained(self) -> Any:
        """Cost of the plan for several numbers of workers, and cheaper questions (a `plan.explain_cost.Explanation`).

        It is computed on first use, because that takes several other plans. None if `explaining` is None.
        """
        return self.explaining() if self.explaining is not None else None
