"""How often to save: by steps, by seconds, or by the share of time that it may cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from rearview.errors import UsageError

UNITS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Pace:
    """What has happened so far in this process."""

    steps: int
    """Steps before this one."""
    since: float
    """Seconds since the last save, or since the first step if there was none."""
    computing: float
    """Seconds spent on anything but saving."""
    saving: float = 0.0
    """Seconds spent on saving."""
    cost: float = 0.0
    """Seconds that the next save is expected to take."""


class Stopwatch:
    """Keeps the times that a `Pace` is made of."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._born = self._last = clock()
        self._saving = self._cost = 0.0

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._born

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count what happens inside as saving."""
        begun = self._clock()
        try:
            yield
        finally:
            self._last = self._clock()
            self._cost = self._last - begun
            self._saving += self._cost

    def pace(self, steps: int) -> Pace:
        """Return what has happened up to now."""
        now = self._clock()
        computing = now - self._born - self._saving
        return Pace(steps, now - self._last, computing, self._saving, self._cost)


class Interval(Protocol):
    """Says whether a save is due."""

    def due(self, pace: Pace) -> bool:
        """Say whether to save now."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Every `every`-th step, the first one included.

    >>> [Steps(3).due(Pace(steps, 0.0, 0.0)) for steps in range(5)]
    [True, False, False, True, False]
    """

    every: int

    def due(self, pace: Pace) -> bool:
        """Say whether to save now."""
        return self.every > 0 and pace.steps % self.every == 0


@dataclass(frozen=True, slots=True)
class Seconds:
    """Once `every` seconds have passed since the last save."""

    every: float

    def due(self, pace: Pace) -> bool:
        """Say whether to save now."""
        return pace.since >= self.every


@dataclass(frozen=True, slots=True)
class Share:
    """As often as a share of computing time allows; the bound holds after every save.

    >>> Share(0.05).due(Pace(9, 50.0, computing=100.0, saving=4.0, cost=4.0))
    False
    """

    share: float

    def due(self, pace: Pace) -> bool:
        """Say whether to save now."""
        return pace.saving + pace.cost <= self.share * pace.computing


def interval(every: int | str | timedelta | Interval | None) -> Interval:
    """Return the interval that `every` means: 10 steps, "10min", "2%", None for never.

    >>> interval("10min"), interval("2%"), interval(7)
    (Seconds(every=600.0), Share(share=0.02), Steps(every=7))
    """
    if every is None:
        return Steps(0)
    if isinstance(every, int) and not isinstance(every, bool) and every >= 0:
        return Steps(every)
    if isinstance(every, timedelta):
        return Seconds(every.total_seconds())
    if isinstance(every, str):
        if found := re.fullmatch(r"\s*([0-9.]+)\s*%\s*", every):
            return Share(float(found[1]) / 100)
        return Seconds(seconds(every))
    if not isinstance(every, int | float) and hasattr(every, "due"):
        return every
    raise _unknown(every)


def seconds(text: str | float | timedelta) -> float:
    """Return the seconds of "90s", "10 min", "1h", 3600 or a timedelta."""
    if isinstance(text, timedelta):
        return text.total_seconds()
    if isinstance(text, int | float):
        return float(text)
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]+)\s*", text.lower())
    if not found or found[2] not in UNITS:
        raise _unknown(text)
    return float(found[1]) * UNITS[found[2]]


def _unknown(every: object) -> UsageError:
    return UsageError(
        f"{every!r} is no interval. Give a number of steps (10), a time ('10min', '90s', a "
        "timedelta), a share of the computing time ('2%'), or None to save on signals only.",
        slug="checkpointer-interval",
    )
