"""Where in a run: a stack of loop iterations, outermost first."""

from __future__ import annotations

from dataclasses import dataclass

Value = int | str | float | None


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of one loop.

    `index` counts from 0 and orders; `value` is what the loop's target held, when that is a
    plain number or string other than the index. People mean the value, programs the index.
    """

    loop: str
    index: int
    value: Value = None

    @property
    def shown(self) -> int | str | float:
        """The value people know this iteration by."""
        return self.index if self.value is None else self.value

    def __str__(self) -> str:
        return f"{self.loop}={self.shown}"


@dataclass(frozen=True, slots=True)
class Point:
    """A place in a run; the empty point is outside all loops.

    >>> str(Point((Step("epoch", 3), Step("step", 20))))
    'epoch=3/step=20'
    """

    steps: tuple[Step, ...] = ()

    def __str__(self) -> str:
        return "/".join(map(str, self.steps))

    @property
    def loops(self) -> tuple[str, ...]:
        """Names of the loops, outermost first."""
        return tuple(step.loop for step in self.steps)

    @property
    def indices(self) -> tuple[int, ...]:
        """Iteration numbers, outermost first; orders points of the same loops."""
        return tuple(step.index for step in self.steps)
