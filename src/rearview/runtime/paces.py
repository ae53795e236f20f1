"""How much slower training is while a checkpoint is being written, seen step by step.

An epoch beside a save and one alone are few, and differ by chance. Within one epoch there are many
steps of both kinds, so after the first save it is known what the second costs.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RECENT = 64
"""Steps of each kind that are remembered: the machine gets busy, the state grows."""
LEAST = 0.001
"""Seconds of a step below which its time tells little."""
PRIOR = 3
"""Steps that it takes for what they tell to outweigh what was assumed."""
OURS = 0.1
"""Share of a step above which it was spent on a checkpoint."""


@dataclass(slots=True)
class Steps:
    """Seconds per step of one loop."""

    alone: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    beside: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The same beside a save, with the seconds of it during which that was under way."""
    over: float = 0.0
    """Seconds of writing in all steps so far."""

    @property
    def seen(self) -> int:
        """Steps of either kind that can be compared."""
        return min(len(self.alone), len(self.beside))

    def lost(self) -> tuple[float, float]:
        """Return the seconds lost in the steps beside a save, and those of writing in them."""
        usual = _middle(self.alone)
        return sum(took - usual for took, _ in self.beside), sum(over for _, over in self.beside)


@dataclass(slots=True)
class Paces:
    """Steps of the loops just inside the outermost ones."""

    loops: dict[str, Steps] = field(default_factory=dict)
    _last: tuple[str, int, float, float, float] = ("", 0, 0.0, 0.0, 0.0)

    def step(self, loop: str, index: int, now: float, written: float, waited: float) -> None:
        """Count a step: iteration `index` of a loop begins `now`.

        `written` is for how long checkpoints have been written so far. A step in which the program
        has `waited` for us by more than a look at the clock is not its own.
        """
        before, self._last = self._last, (loop, index, now, written, waited)
        # the first step of a loop may wake the workers of a loader: it tells nothing
        if before[0] != loop or not 0 < before[1] < index:
            return
        lasted, ours = now - before[2], waited - before[4]
        if lasted < LEAST or ours > OURS * lasted:
            return
        steps = self.loops.setdefault(loop, Steps())
        count, over = index - before[1], written - before[3]
        steps.over += over
        if over > 0:
            steps.beside.append(((lasted - ours) / count, over / count))
        else:
            steps.alone.append((lasted - ours) / count)

    def slowed(self) -> tuple[float, float]:
        """Return the share of time beside a save that is lost, and how sure that is.

        Few steps tell little; and where most of the writing goes on beside something else, such as
        an evaluation, they tell little of that.
        """
        told = [steps for steps in self.loops.values() if steps.seen]
        losses = [steps.lost() for steps in told]
        over = sum(seconds for _, seconds in losses)
        share = sum(seconds for seconds, _ in losses) / over if over > 0 else 0.0
        seen, written = sum(steps.seen for steps in told), self._last[3]
        covered = sum(steps.over for steps in told) / written if written > 0 else 0.0
        return min(1.0, max(0.0, share)), min(1.0, covered) * seen / (seen + PRIOR)


def _middle(seconds: deque[float]) -> float:
    """Return the mean without the longest tenth, which is mostly not ours."""
    kept = sorted(seconds)[: max(1, len(seconds) - len(seconds) // 10)]
    return sum(kept) / len(kept) if kept else 0.0
