"""A plan: ordered segments of runs to run again, with their cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Operator(StrEnum):
    """How a segment is replayed, which depends on where its probes are. Values are names of the FlorDB paper."""

    SETUP = "setup"
    """The probes are before the main loop: run the code before the loop (the set-up), and stop at the loop."""
    OUTER = "DP"
    """The probes are in the outer loop: skip its inner loops, and restore the state after each of these in every
    iteration."""
    AFTER = "DP*"
    """The probes are after the main loop: restore the last checkpoint of the loop, and continue."""
    INNER = "DPi"
    """The probes are in an inner loop: run the requested iterations from the nearest checkpoint."""
    FULL = "full"
    """No checkpoint makes the replay shorter: run the program from its start."""

    @property
    def in_words(self) -> str:
        """Where the probes are and which code runs, as a phrase for a table.

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

    Iterations `first <= i < last` of the outermost loop `loop` are requested, or the iterations listed in `only`.
    """

    run: str
    """Id of the run."""
    version: str
    """Version to execute: the version of the run, or a version made from it by adding probes."""
    operator: Operator
    loop: str | None = None
    first: int = 0
    last: int | None = None
    start: str | None = None
    """Id of the checkpoint to start from; None: the start of the program."""
    names: tuple[str, ...] = ()
    """Names that the probes log."""
    seconds: float = 0.0
    """Predicted seconds that the replay takes."""
    low: float = 0.0
    """Lower end of the range that probably contains the real seconds."""
    high: float = 0.0
    """Upper end of the range that probably contains the real seconds."""
    only: tuple[int, ...] | None = None
    """Requested iterations of `loop`, if there are gaps between them; else None."""
    inner: tuple[tuple[str, int, int | None], ...] = ()
    """(loop, first, after the last): requested iterations of an inner loop; None in the third place: to the end of the
    loop. Iterations before `first` run only to reach it.
    """
    restores: tuple[tuple[int, str], ...] = ()
    """(iteration of `loop`, id of the checkpoint to restore there), in order, including `start`; the segment computes
    the iterations between."""
    rerun: bool = False
    """Whether the segment runs from the start of the program and restores nothing, because that is as fast."""
    tail: bool = False
    """Whether values that are logged after the loop are requested, too."""
    priority: float = 0.0
    """Segments with smaller values run first."""
    nbytes: int = 0
    """Total bytes of the checkpoints that the segment restores."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Segments in the order in which to run them, and the runs that cannot be replayed."""

    segments: tuple[Segment, ...] = ()
    refusals: tuple[tuple[str, str], ...] = field(default=())
    """(run, reason) of every run that cannot be replayed."""

    @property
    def seconds(self) -> float:
        """Predicted seconds for all segments on one worker."""
        return sum(segment.seconds for segment in self.segments)
