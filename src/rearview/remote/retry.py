"""Trying again: how often, how long to wait, and when there is no point."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from rearview.errors import RearviewError, RemoteError

T = TypeVar("T")

HOPELESS = (PermissionError, NotADirectoryError, IsADirectoryError, ImportError, TypeError)
HOPELESS_NUMBERS = {errno.EROFS, errno.ENAMETOOLONG, errno.EDQUOT}

# a generator of our own: the program that trains must draw the same numbers with and without us
_SPREAD = random.Random()  # noqa: S311  spreads pauses, protects nothing


class DiffersError(OSError):
    """What arrived is not what was sent."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Pauses that double, each shortened by up to `spread` so that many jobs do not knock at once.

    >>> list(Retry(attempts=4, first=1.0, limit=3.0, spread=0.0).pauses())
    [1.0, 2.0, 3.0]
    """

    attempts: int = 6
    first: float = 0.5
    limit: float = 30.0
    spread: float = 0.25
    patience: float = float("inf")
    """Seconds after which no new attempt is begun."""
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each further attempt."""
        for number in range(self.attempts - 1):
            pause = min(self.limit, self.first * 2**number)
            yield pause * (1.0 - self.spread * _SPREAD.random())

    def call(self, what: str, action: Callable[[], T]) -> T:
        """Return what `action` returns, or raise `RemoteError` once trying again is no use."""
        begun = self.clock()
        pauses = self.pauses()
        tried = 0
        while True:
            tried += 1
            try:
                return action()
            except RearviewError:
                raise
            except Exception as exc:
                pause = next(pauses, None)
                late = self.clock() - begun + (pause or 0.0) > self.patience
                if pause is None or late or hopeless(exc):
                    raise RemoteError(
                        f"{what} did not succeed after {tried} "
                        f"{'attempt' if tried == 1 else 'attempts'}: "
                        f"{type(exc).__name__}: {exc}. {remedy(exc)}",
                        slug="remote-failed",
                    ) from exc
            self.sleep(pause)


def hopeless(exc: Exception) -> bool:
    """Say whether the same attempt would fail the same way."""
    if isinstance(exc, OSError) and exc.errno in HOPELESS_NUMBERS:
        return True
    return isinstance(exc, HOPELESS)


def remedy(exc: Exception) -> str:
    """Return what the user can do about `exc`."""
    if isinstance(exc, PermissionError):
        return "Check the credentials and that the target may be written to."
    if isinstance(exc, ImportError):
        return "Install what this kind of remote needs, e.g. `pip install 'rearview[s3]'`."
    if isinstance(exc, DiffersError):
        return "The bytes change on the way or while they are sent; try another target."
    if isinstance(exc, OSError) and exc.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "Free some space there, or keep fewer checkpoints."
    return "Check that the target can be reached from here, then try again."
