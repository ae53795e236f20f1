"""What has to run again, in which order, at what cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Operator(StrEnum):
    """How a segment replays, by where its probes stand."""

    SETUP = "setup"
    """Before the main loop: run the set-up, stop at the loop."""
    OUTER = "DP"
    """In the outer loop: skip the inner work, restore each iteration."""
    AFTER = "DP*"
    """After the loop: restore its last checkpoint, run on."""
    INNER = "DPi"
    """In an inner loop: run chosen iterations from the nearest checkpoint."""
    FULL = "full"
    """No checkpoint helps: run from the start."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one run to run again, in one process.

    Iterations `first <= i < last` of the outermost loop `loop` are wanted; `start` names the
    checkpoint to begin from (None: from the start of the program).
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
    """Predicted."""
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Ordered segments with their cost and what is refused, with reasons."""

    segments: tuple[Segment, ...] = ()
    refusals: tuple[tuple[str, str], ...] = field(default=())
    """(run, reason) for every run that cannot be answered."""

    @property
    def seconds(self) -> float:
        """Predicted computing time of all segments on one worker."""
        return sum(segment.seconds for segment in self.segments)
