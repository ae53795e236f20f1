"""Reports of a plan and of a backfill: what would run, what ran, and whether it was exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

from rearview.backfill.find_statements import StatementSources
from rearview.backfill.prepare_run import PreparedRun
from rearview.backfill.setup_sharing import SharedStages
from rearview.execute.replay_jobs import ReplayOutcome
from rearview.model import Plan, Verdict
from rearview.model.proof import compared, worst
from rearview.model.wording import plural

SHOWN = 30
"""Segments and refusals that a notebook shows; more are counted."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A run for which the question cannot be answered, and why."""

    run: str
    reason: str
    general_reason: str = ""
    """The reason without the id of the run: equal for all runs that have the same problem."""


@dataclass(frozen=True, slots=True)
class Unproved:
    """Names of a run with values that cannot be proved: the run recorded nothing to compare with."""

    run: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Insertion:
    """The statements that a backfill inserts into the source of some runs, as a diff."""

    runs: tuple[str, ...]
    diff: str


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """The outcome of a backfill."""

    outcomes: list[ReplayOutcome] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    seconds: float = 0.0
    recorded_seconds: float = 0.0
    """Seconds that the runs themselves took."""
    elsewhere: int = 0
    """Segments that another backfill filled at the same time, wholly or in part."""
    environment_differences: list[str] = field(default_factory=list)
    """A phrase for each variable that the runs read and that differs now and was not restored."""
    names: tuple[str, ...] = ()
    """The names that were to get values."""
    replaced: tuple[str, ...] = ()
    """Sentences on statements that a replay disproved at one place and that were moved to another."""
    event_files: tuple[str, ...] = ()
    """Folders with event files of values that probes gave to TensorBoard."""

    @property
    def unreached(self) -> list[str]:
        """Exactly replayed runs that did not execute any statement that logs one of the names."""
        if not self.names or self.elsewhere:
            return []
        written: dict[str, int] = {}
        for outcome in self.outcomes:
            written[outcome.run] = written.get(outcome.run, 0) + outcome.report.written
        exact = {outcome.run for outcome in self.outcomes if outcome.proved}
        return [run for run, count in written.items() if not count and run in exact]

    @property
    def written(self) -> int:
        """New records."""
        return sum(outcome.report.written for outcome in self.outcomes)

    @property
    def proved(self) -> bool:
        """Whether every replay was exact."""
        return bool(self.outcomes) and all(outcome.proved for outcome in self.outcomes)

    @property
    def speedup(self) -> float | None:
        """How many times faster this was than running everything again."""
        if not self.outcomes or self.elsewhere or self.seconds <= 0:
            return None
        return self.recorded_seconds / self.seconds

    @property
    def proof(self) -> str:
        """One line that says how far the answer can be trusted."""
        if not self.outcomes:
            return "nothing was replayed" + " here" * bool(self.elsewhere)
        decisive = worst(outcome.proof for outcome in self.outcomes)
        if decisive is None or decisive.verdict is Verdict.EXACT:
            return f"exact: {compared(outcome.report for outcome in self.outcomes)}"
        run = next(outcome.run for outcome in self.outcomes if outcome.proof == decisive)
        return f"{decisive.verdict}: run {run}: {decisive.why}"

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict of its replays; None if there was no replay."""
        decisive = worst(outcome.proof for outcome in self.outcomes)
        return decisive.verdict if decisive is not None else None

    @property
    def redone(self) -> list[ReplayOutcome]:
        """Outcomes of segments that ran twice; `redone` says why the first try was not enough."""
        return [outcome for outcome in self.outcomes if outcome.redone]


@dataclass(frozen=True, slots=True)
class MissingCells:
    """How many cells lack a value.

    >>> print(MissingCells(12), MissingCells(12, approximate=True), MissingCells(1, at_least=True), sep="; ")
    12 cells; about 12 cells; at least 1 cell
    """

    cells: int
    approximate: bool = False
    """Inner loops were not counted to the end: the rest is extrapolated."""
    at_least: bool = False
    """Some of the loops around a statement were never counted."""

    def __str__(self) -> str:
        words = ["at least"] * self.at_least + ["about"] * self.approximate
        return " ".join([*words, str(self.cells), "cell" if self.cells == 1 else "cells"])


@dataclass(frozen=True)
class PlanReport:
    """The segments that a backfill would run, and their cost, before anything runs."""

    plan: Plan
    refusals: list[Refusal] = field(default_factory=list)
    missing: MissingCells = field(default_factory=lambda: MissingCells(0))
    """Cells without a value."""
    changed_inputs: list[str] = field(default_factory=list)
    environment_differences: list[str] = field(default_factory=list)
    """A phrase for each variable that the runs read and that differs now and is not restored."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what else the user should know: renamed files, what makes predictions doubtful."""
    unproved: list[Unproved] = field(default_factory=list)
    """Requested values that exist already and cannot be proved."""
    explaining: Callable[[], Any] | None = field(default=None, repr=False)
    """Computes `explained`."""
    insertions: list[Insertion] = field(default_factory=list)
    """The statements that are inserted into the source of the runs, as a diff for each version."""
    prepared: Mapping[str, PreparedRun] = field(default_factory=dict, repr=False)
    """By run, the request that the plan was made from; running the plan needs it."""
    statements: StatementSources | None = field(default=None, repr=False)
    """The sources of statements, and their places in each version."""
    shared: SharedStages = field(default_factory=lambda: SharedStages({}), repr=False)
    """The parts of their set-up that segments share, and why others are not shared."""

    def _repr_html_(self) -> str:
        """Return the plan as HTML, for notebooks."""
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
        more = f"<p>… and {len(segments) - SHOWN} more</p>" if len(segments) > SHOWN else ""
        refused = "".join(
            f"<li>{escape(refusal.run)}: {escape(refusal.reason)}</li>"
            for refusal in self.refusals[:SHOWN]
        )
        names = ("run", "statement in", "iterations", "from", "predicted")
        titles = "".join(f"<th>{name}</th>" for name in names)
        table = f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>" * bool(rows)
        return head + table + more + (f"<p>refused:</p><ul>{refused}</ul>" if refused else "")

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to run."""
        return not self.plan.segments

    @cached_property
    def explained(self) -> Any:
        """Predicted time for several numbers of workers, and what would make it cheaper.

        Computed on first use, because it makes several plans.
        """
        return self.explaining() if self.explaining is not None else None
