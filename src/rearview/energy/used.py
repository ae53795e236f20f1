"""What a process uses, written down while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rearview.energy.account import Account, Interval
from rearview.energy.meter import Meter


class Used:
    """Writes down the time and energy since it was made; a kill loses what came after the last note.

    `beat` may be called as often as one likes, from any thread; it does something once in `every`
    seconds. Time in which the machine slept is not time in which the process was on.
    """

    def __init__(
        self,
        account: Account,
        *,
        every: float = 60.0,
        meter: Callable[[], Meter] = Meter,
        clock: Callable[[], float] = time.time,
        slept: Callable[[], float] | None = None,
    ) -> None:
        self.account = account
        self._every, self._clock, self._slept = every, clock, slept or asleep
        self._meter = meter()
        self._lock = threading.Lock()
        self._noted, self._kwh, self._asleep = clock(), 0.0, self._slept()

    def beat(self) -> None:
        """Note what was used, if the last note is old enough."""
        if self._clock() - self._noted >= self._every:
            self.note()

    def note(self) -> None:
        """Write down what was used since the last note."""
        with self._lock:
            reading, now, asleep = self._meter.read(), self._clock(), self._slept()
            begin = min(self._noted + max(0.0, asleep - self._asleep), now)
            if now <= begin:
                return
            used = max(0.0, reading.kwh - self._kwh)
            self.account.on(Interval(begin, now, used, reading.how))
            self._noted, self._kwh, self._asleep = now, reading.kwh, asleep


def asleep() -> float:
    """Return the seconds this machine has slept since it was started; 0 where that is not told."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    if boot is None:
        return 0.0
    return time.clock_gettime(boot) - time.clock_gettime(time.CLOCK_MONOTONIC)
