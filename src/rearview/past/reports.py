"""What history answers with: plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rearview.execute.replays import Outcome
from rearview.model import Checkpoint, Plan, Run
from rearview.past.segments import Prepared
from rearview.store.runs import Replay


@dataclass(frozen=True, slots=True)
class Refusal:
    """A run that cannot be answered, and why."""

    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class Unproved:
    """Values of a run that are there, and that nothing it recorded can be compared with."""

    run: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunReport:
    """All there is to say of one run."""

    run: Run
    names: dict[str, int]
    loops: list[tuple[str, int]]
    checkpoints: list[Checkpoint]
    partial: list[str]
    logical: int
    stored: int
    costs: dict[str, Any]
    replays: list[Replay]
    exact: str


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """What a backfill did."""

    outcomes: list[Outcome] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    seconds: float = 0.0
    recorded_seconds: float = 0.0
    """What the runs themselves took."""
    elsewhere: int = 0
    """Segments that another backfill filled meanwhile, wholly or in part."""

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
        reports = [outcome.report for outcome in self.outcomes]
        states = sum(report.states for report in reports)
        restored = sum(report.restored for report in reports)
        repeated = sum(report.repeated for report in reports)
        said = f"{restored} states restored, {states} states and {repeated} recorded values equal"
        if self.proved:
            rest = "; after the last of them there was nothing to compare with"
            return f"exact: {said}{rest * any(report.open for report in reports)}"
        for outcome in self.outcomes:
            report = outcome.report
            if outcome.proved:
                continue
            if report.error:
                return f"not proved: {outcome.run}: {report.error}"
            about = f"; {'; '.join(report.surroundings)}" if report.surroundings else ""
            if report.difference:
                return f"not exact: {report.difference} (run {outcome.run}){about}"
            if report.differing:
                return f"not exact: {', '.join(report.differing)} came out differently{about}"
            if report.open:
                return (
                    f"not proved: what run {outcome.run} computed there left nothing behind to "
                    f"compare with ({said})"
                )
        return f"not proved: nothing could be compared ({said})"


@dataclass(frozen=True, slots=True)
class Missing:
    """How many cells have no value.

    >>> print(Missing(12), Missing(12, about=True), Missing(1, least=True), sep="; ")
    12 cells; about 12 cells; at least 1 cell
    """

    cells: int
    about: bool = False
    """Inner loops were not counted all the way: they are taken to have gone on as they were."""
    least: bool = False
    """Some of the loops around a statement were never counted."""

    def __str__(self) -> str:
        words = ["at least"] * self.least + ["about"] * self.about
        return " ".join([*words, str(self.cells), "cell" if self.cells == 1 else "cells"])


@dataclass(frozen=True)
class PlanReport:
    """What a backfill would run, and what it would cost; nothing has run yet."""

    plan: Plan
    refusals: list[Refusal] = field(default_factory=list)
    missing: Missing = field(default_factory=lambda: Missing(0))
    """Cells without a value."""
    changed_inputs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is to be known besides: files that had other names, what makes predictions doubtful."""
    unproved: list[Unproved] = field(default_factory=list)
    """What is there already, is asked for, and cannot be proved."""
    explaining: Callable[[], Any] | None = field(default=None, repr=False)
    prepared: Mapping[str, Prepared] = field(default_factory=dict, repr=False)
    """Each run with what is wanted of it, for whoever carries the plan out."""

    @property
    def nothing(self) -> bool:
        """Whether there is nothing to run."""
        return not self.plan.segments

    @cached_property
    def explained(self) -> Any:
        """Predicted time for several numbers of workers, and what would make it cheaper.

        Found out when asked for: it takes planning anew several times.
        """
        return self.explaining() if self.explaining is not None else None
