"""Where in a run: a stack of loop iterations, outermost first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Value = int | str | float | None
CELL = "cell"
"""Outermost step of the points of a notebook."""
NAMED = "loop:"
"""How the id of a loop begins that the program names itself, by `rearview.loop`."""


def name_of(loop: str) -> str:
    """Return the name of a loop, given its id.

    >>> name_of("train.py:fit:0:epoch"), name_of("loop:my:loop"), name_of("epoch")
    ('epoch', 'my:loop', 'epoch')
    """
    return loop.removeprefix(NAMED) if loop.startswith(NAMED) else loop.rpartition(":")[2]


def columns_of(loops: Iterable[str]) -> list[str]:
    """Return what people tell the loops of a stack apart by, given their ids or names.

    A loop inside one of the same name is numbered, as the columns of a table are.

    >>> columns_of(["a.py:f:0:i", "a.py:f:1:j", "a.py:g:0:i"])
    ['i', 'j', 'i_2']
    """
    out: list[str] = []
    for loop in map(name_of, loops):
        seen = sum(other == loop or other.rpartition("_")[0] == loop for other in out)
        out.append(f"{loop}_{seen + 1}" if seen else loop)
    return out


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
