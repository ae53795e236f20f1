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

    Iterations `first <= i < last` of the outermost loop `loop` are wanted, or those listed in
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
    """Predicted."""
    low: float = 0.0
    high: float = 0.0
    only: tuple[int, ...] | None = None
    """Wanted iterations when there are gaps between them."""
    inner: tuple[tuple[str, int, int | None], ...] = ()
    """(loop, first, last): iterations of inner loops that are wanted; the rest only if they come
    before."""
    restores: tuple[tuple[int, str], ...] = ()
    """(iteration of `loop`, checkpoint to restore there) in order, the start included; between
    them the segment runs on."""
    tail: bool = False
    """What follows the loop is wanted too."""
    priority: float = 0.0
    """Smaller comes first."""
    nbytes: int = 0
    """Bytes of checkpoints to read."""


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
