"""What history answers with: plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rearview.backfill.segments import Prepared
from rearview.execute.replay_jobs import ReplayOutcome
from rearview.model import Checkpoint, Plan, Run, Verdict
from rearview.model.environment import Environment
from rearview.model.proof import compared, worst
from rearview.store.checkpoints.gc import Freed
from rearview.store.removal import RunRemoval
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
class Insertion:
    """What a backfill puts into the source of some runs."""

    runs: tuple[str, ...]
    diff: str


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
    """How far its replays can be trusted: the verdict in words."""
    verdict: Verdict | None = None
    """The same as a value; None if it was not replayed."""
    environment: Environment | None = None
    """The environment variables that it read; None: it was recorded without them."""
    environment_differences: list[str] = field(default_factory=list)
    """Those that differ now and that a replay does not restore, a phrase each."""
    captured: dict[str, str] = field(default_factory=dict)
    """Names that it did not log with Rearview, and what their values were taken from."""


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """What a backfill did."""

    outcomes: list[ReplayOutcome] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    seconds: float = 0.0
    recorded_seconds: float = 0.0
    """What the runs themselves took."""
    elsewhere: int = 0
    """Segments that another backfill filled meanwhile, wholly or in part."""
    environment_differences: list[str] = field(default_factory=list)
    """Variables that the runs read, that differ now and were not restored, a phrase each."""
    names: tuple[str, ...] = ()
    """What was to be filled."""
    event_files: tuple[str, ...] = ()
    """Folders with event files of values that probes gave to TensorBoard."""

    @property
    def unreached(self) -> list[str]:
        """Runs in which no statement that logs one of the names was reached: no value came."""
        if not self.names or self.elsewhere:
            return []
        written: dict[str, int] = {}
        for outcome in self.outcomes:
            written[outcome.run] = written.get(outcome.run, 0) + outcome.report.written
        exact = {one.run for one in self.outcomes if one.proved}
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
        """What is known of all its replays; None if there was none."""
        decisive = worst(outcome.proof for outcome in self.outcomes)
        return decisive.verdict if decisive is not None else None

    @property
    def redone(self) -> list[ReplayOutcome]:
        """Outcomes of second tries, each with the reason why the first did not do."""
        return [outcome for outcome in self.outcomes if outcome.redone]


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
    environment_differences: list[str] = field(default_factory=list)
    """Variables that the runs read, that differ now and are not restored, a phrase each."""
    notes: list[str] = field(default_factory=list)
    """What is to be known besides: files that had other names, what makes predictions doubtful."""
    unproved: list[Unproved] = field(default_factory=list)
    """What is there already, is asked for, and cannot be proved."""
    explaining: Callable[[], Any] | None = field(default=None, repr=False)
    insertions: list[Insertion] = field(default_factory=list)
    """What is put into the source of the runs that run again, as a diff for each version."""
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


@dataclass(frozen=True)
class Removal:
    """What a removal of runs removed, or would remove."""

    runs: tuple[str, ...]
    """The runs, those whose removal had been interrupted before among them."""
    removed: list[RunRemoval]
    freed: Freed
    """Objects and packs that nothing needs any more."""

    @property
    def nbytes(self) -> int:
        """All bytes that it freed, or would free."""
        return self.freed.nbytes + sum(each.nbytes for each in self.removed)
