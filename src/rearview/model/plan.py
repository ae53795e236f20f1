"""A plan: ordered segments of runs to run again, with their cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Operator(StrEnum):
    """How a segment replays, by where its probes are. The values are the names that the FlorDB paper uses."""

    SETUP = "setup"
    """Before the main loop: run the set-up, stop at the loop."""
    OUTER = "DP"
    """In the outer loop: skip the inner work, restore each iteration."""
    AFTER = "DP*"
    """After the loop: restore its last checkpoint, continue."""
    INNER = "DPi"
    """In an inner loop: run chosen iterations from the nearest checkpoint."""
    FULL = "full"
    """No checkpoint helps: run from the start."""

    @property
    def in_words(self) -> str:
        """Where the probes are, and what that saves, for a table.

        >>> Operator("DPi").in_words
        'inner loop: only the chosen iterations run'
        """
        return _OPERATORS_IN_WORDS[self]


_OPERATORS_IN_WORDS = {
    Operator.SETUP: "before the loops: only the set-up runs",
    Operator.OUTER: "outer loop: inner work is skipped where saved",
    Operator.AFTER: "after the loop: its last state is restored",
    Operator.INNER: "inner loop: only the chosen iterations run",
    Operator.FULL: "whole run: it runs from its start to its end",
}


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of one run to run again, in one process.

    Iterations `first <= i < last` of the outermost loop `loop` are requested, or those listed in
    `only`; `start` names the checkpoint to begin from (None: from the start of the program).
    """

    run: str
    version: str
    """Version to execute: the run's own, or one derived from it by probes."""
    operator: Operator
    loop: str | None = None
    first: int = 0
    last: int | None = None
    start: str | None = None
    names: tuple[str, ...] = ()
    seconds: float = 0.0
    """Predicted seconds."""
    low: float = 0.0
    high: float = 0.0
    only: tuple[int, ...] | None = None
    """Requested iterations, if there are gaps between them."""
    inner: tuple[tuple[str, int, int | None], ...] = ()
    """(loop, first, last): requested iterations of inner loops; earlier ones run only to reach them."""
    restores: tuple[tuple[int, str], ...] = ()
    """(iteration of `loop`, checkpoint to restore there), in order, including the start; in between the
    segment computes."""
    rerun: bool = False
    """Whether it runs from the start of the program and restores nothing, because that is as fast."""
    tail: bool = False
    """Whether values after the loop are requested, too."""
    priority: float = 0.0
    """Segments with smaller values run first."""
    nbytes: int = 0
    """Bytes of checkpoints to read."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Ordered segments with their cost, and refused runs with reasons."""

    segments: tuple[Segment, ...] = ()
    refusals: tuple[tuple[str, str], ...] = field(default=())
    """(run, reason) of every run that cannot be replayed."""

    @property
    def seconds(self) -> float:
        """Predicted computing time of all segments on one worker."""
        return sum(segment.seconds for segment in self.segments)
