"""How much slower training is while a checkpoint is being written, seen step by step.

An epoch beside a save and one alone are few, and differ by chance. Within one epoch there are many
steps of both kinds, so after the first save it is known what the second costs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RECENT = 64
"""Steps of each kind that are remembered: the machine gets busy, the state grows."""
OURS = 0.1
"""Share of a step above which it was spent on a checkpoint."""
LEAST = 0.001
"""Seconds of a step below which its time tells little."""


@dataclass(slots=True)
class Steps:
    """Seconds per step of one loop."""

    alone: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    beside: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def seen(self) -> int:
        """Steps of either kind that can be compared."""
        return min(len(self.alone), len(self.beside))

    @property
    def slowed(self) -> float:
        """Share of the time beside a save that is lost."""
        beside = _middle(self.beside)
        return max(0.0, 1 - _middle(self.alone) / beside) if beside > 0 else 0.0


@dataclass(slots=True)
class Paces:
    """Steps of the loops just inside the outermost ones."""

    loops: dict[str, Steps] = field(default_factory=dict)
    _last: tuple[str, int, float, int, float] = ("", 0, 0.0, 0, 0.0)

    def step(self, loop: str, index: int, now: float, writing: int, waited: float) -> None:
        """Count a step: iteration `index` of a loop begins `now`.

        `writing` counts how often writing has begun and ended: it is odd while it goes on. A step
        in which the program has `waited` for us by more than a look at the clock is not its own.
        """
        before, self._last = self._last, (loop, index, now, writing, waited)
        # the first of a loop also fetched its data, or woke the workers that do
        if before[0] != loop or not 0 < before[1] < index or before[3] != writing:
            return
        lasted, ours = now - before[2], waited - before[4]
        if lasted >= LEAST and ours < OURS * lasted:
            seconds = (lasted - ours) / (index - before[1])
            steps = self.loops.setdefault(loop, Steps())
            (steps.beside if writing % 2 else steps.alone).append(seconds)

    def slowed(self) -> tuple[float, int]:
        """Return the share of time beside a save that is lost, and how many steps tell so."""
        told = max(self.loops.values(), key=lambda steps: steps.seen, default=None)
        return (told.slowed, told.seen) if told is not None else (0.0, 0)


def _middle(seconds: deque[float]) -> float:
    """Return the mean without the longest tenth, which is mostly not ours."""
    kept = sorted(seconds)[: max(1, len(seconds) - len(seconds) // 10)]
    return sum(kept) / len(kept) if kept else 0.0
