"""What is known of one loop: how long it computes, what saving at its boundaries costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

RECENT = 0.3
"""Weight of the newest observation: states grow and machines get busy, so the past fades."""
PRIOR = 3
"""Iterations of either kind that it takes for what was measured to outweigh what was assumed."""
SHARED = 0.1
"""Share of background processor time assumed to be lost to training where a core was free for it:
memory and caches are shared still."""
CROWDED = 1.5
"""The same where none was free: threads of training wait for the one that had to go."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of the loop has ended."""

    seconds: float
    """Computing time, without the time that it waited for us."""
    depth: int = 0
    overlap: float = 0.0
    """Seconds of it during which a checkpoint was being written."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of this loop is durable."""

    blocking: float
    """Seconds that training waited, the walk over the state included, and what else it lost."""
    background: float = 0.0
    """Seconds that threads beside the training took."""
    cpu: float = 0.0
    """Processor seconds of those."""
    crowded: float = 1.0
    """Share of a core that training leaves too few for them: 0 when one was free."""
    slowed: float = 0.0
    """Share of such time that training loses, as its steps tell."""
    sure: float = 0.0
    """How much of the time they tell of: 1 is all."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint of this loop was loaded and restored."""

    seconds: float


Event = Iteration | Saved | Restored


@dataclass(frozen=True, slots=True)
class Site:
    """Statistics of one loop; n, k, C, M and R of the invariant."""

    n: int = 0
    """Iterations in this run."""
    k: int = 0
    """Checkpoints in this run."""
    computed: float = 0.0
    """Computing seconds in this run: n times the mean C."""
    save: float | None = None
    """M: recent mean of the slowdown that a save causes."""
    restores: float | None = None
    """R: recent mean of a restore."""
    alone: float = 0.0
    """Mean seconds of iterations with nothing in the background."""
    alone_count: int = 0
    beside: float = 0.0
    """Mean seconds of iterations beside a save."""
    beside_count: int = 0
    overlap: float = 0.0
    """Mean seconds of such iterations during which the save was under way."""

    def observe(self, event: Event) -> Site:
        """Return these statistics with one event more."""
        if isinstance(event, Iteration):
            return self._iterated(event)
        if isinstance(event, Saved):
            cost = event.blocking
            mean = _mix(self.save, cost)
            if self.k == 1:
                # the first of a run also stored what never changes, and tells little of the others
                mean = min(mean, cost)
            return replace(self, k=self.k + 1, save=mean)
        return replace(self, restores=_mix(self.restores, event.seconds))

    @property
    def seen(self) -> int:
        """Iterations of either kind that can be compared."""
        return min(self.alone_count, self.beside_count)

    def contention(self, event: Saved) -> float:
        """Return the seconds that training loses to the background part of a save.

        An honest estimate: steps beside a save are compared with steps alone; where a loop has
        none, its iterations are, per second of overlap. Until enough of both were seen, the
        processor time is assumed, and a small part of it where training left a core free.
        """
        found = event.cpu * (SHARED + (CROWDED - SHARED) * event.crowded)
        if self.seen and self.overlap > 0:
            rate = min(1.0, max(0.0, (self.beside - self.alone) / self.overlap))
            sure = self.seen / (self.seen + PRIOR)
            found = (1 - sure) * found + sure * rate * event.background
        return (1 - event.sure) * found + event.sure * event.slowed * event.background

    def facts(self) -> dict[str, Any]:
        """Return what holds for the next run as well, as plain values."""
        return {
            "save": self.save,
            "restores": self.restores,
            "alone": self.alone,
            "alone_count": min(self.alone_count, PRIOR),
            "beside": self.beside,
            "beside_count": min(self.beside_count, PRIOR),
            "overlap": self.overlap,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Site:
        """Return the site that `facts` tell of; what is not a number there is left out."""
        known = cls().facts()
        found: dict[str, Any] = {
            name: value
            for name, value in facts.items()
            if name in known and isinstance(value, int | float) and value >= 0
        }
        return cls(**found)

    def _iterated(self, event: Iteration) -> Site:
        grown = replace(self, n=self.n + 1, computed=self.computed + event.seconds)
        if not self.n:
            return grown  # the first iteration warms caches and tells little about the others
        if event.overlap > 0:
            count = self.beside_count + 1
            weight = max(RECENT, 1 / count)
            return replace(
                grown,
                beside=self.beside + weight * (event.seconds - self.beside),
                overlap=self.overlap + weight * (event.overlap - self.overlap),
                beside_count=count,
            )
        count = self.alone_count + 1
        weight = max(RECENT, 1 / count)
        return replace(
            grown, alone=self.alone + weight * (event.seconds - self.alone), alone_count=count
        )


def _mix(mean: float | None, value: float) -> float:
    return value if mean is None else (1 - RECENT) * mean + RECENT * value
