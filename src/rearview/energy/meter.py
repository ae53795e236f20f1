"""What a process uses, written down while it runs.

When a run was on, what it used, and what waiting saved.

How much energy was used: measured where the machine says, else a stated estimate.

What a process uses, written down while it runs.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rearview.energy.grid import Forecast, GridSample
from rearview.model.checksum import add_check, is_intact

FORMAT = 2
"""From 2 on, every line carries a checksum."""
_GAP = 0.001
"""Seconds between two notes of one execution: none, but for rounding."""


@dataclass(frozen=True, slots=True)
class OnTime:
    """A stretch of time in which the run was on."""

    begin: float
    end: float
    kwh: float
    how: str


@dataclass(frozen=True, slots=True)
class EnergyReport:
    """What a run used, and what it would have used had it run at once."""

    intervals: tuple[OnTime, ...]
    kwh: float
    how: tuple[str, ...]
    grams: float | None
    """CO2 of the hours it ran in; None where the grid's state is not known."""
    grams_at_once: float | None
    """CO2 of as many hours, one after the other, from when the run was asked for."""
    attribution: tuple[str, ...] = ()
    asked: float | None = None
    """When it was asked for, if that was noted."""

    @property
    def seconds(self) -> float:
        """How long it was on."""
        return sum(one.end - one.begin for one in self.intervals)

    @property
    def stretches(self) -> tuple[OnTime, ...]:
        """The intervals, those that follow one another without a gap joined."""
        joined: list[OnTime] = []
        for one in self.intervals:
            last = joined[-1] if joined else None
            if last is not None and one.begin - last.end < _GAP and one.how == last.how:
                joined[-1] = OnTime(last.begin, one.end, last.kwh + one.kwh, one.how)
            else:
                joined.append(one)
        return tuple(joined)

    @property
    def saved(self) -> float | None:
        """Grams saved; negative if waiting was the worse choice."""
        if self.grams is None or self.grams_at_once is None:
            return None
        return self.grams_at_once - self.grams


class Account:
    """The file in which a run writes down when it was on; one line each, never rewritten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[float, GridSample] = {}

    def asked(self, time: float) -> None:
        """Note when the run was asked for; the first time counts."""
        self._append({"asked": time})

    def on(self, interval: OnTime) -> None:
        """Note a stretch in which it ran."""
        self._append({"on": asdict(interval)})

    def grid(self, outlook: Forecast) -> None:
        """Note what was known of the grid, for the report; what has not changed is left out."""
        fresh = [one for one in outlook.samples if self._known.get(one.start) != one]
        self._known |= {one.start: one for one in fresh}
        if not fresh:
            return
        samples = [(s.start, s.share, s.light, s.grams) for s in fresh]
        self._append(
            {"grid": samples, "source": outlook.source, "attribution": outlook.attribution}
        )

    def report(self, measured: Forecast | None = None) -> EnergyReport:
        """Return the account of all that was noted; a torn last line is left out.

        What was `measured` of the grid since is better than what was known at the time.
        """
        asked: float | None = None
        intervals: list[OnTime] = []
        samples: dict[float, GridSample] = {}
        sources: dict[str, str] = {}
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            lines = []
        for line in lines:
            row = _row(line)
            if row is None:
                continue
            if "asked" in row and asked is None:
                asked = row["asked"]
            if "on" in row:
                intervals.append(OnTime(**row["on"]))
            if "grid" in row:
                # a later answer knows better
                samples |= {values[0]: GridSample(*values) for values in row["grid"]}
                sources[row["source"]] = row["attribution"]
        self._known = dict(samples)
        if measured is not None and measured.samples:
            first, last = measured.samples[0].start, measured.end
            samples = {t: s for t, s in samples.items() if not first <= t < last}
            samples |= {one.start: one for one in measured.samples}
            sources[measured.source] = measured.attribution
        outlook = Forecast.of(", ".join(sources), "", samples.values(), fetched=0.0)
        return report(intervals, outlook, asked=asked, attribution=tuple(sources.values()))

    def _append(self, row: dict[str, object]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = add_check(json.dumps({"format": FORMAT, **row}).encode()) + b"\n"
        # for whom the folder is: its owner, or also its group
        mode = 0o660 if self.path.parent.stat().st_mode & 0o020 else 0o600
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
        if mode != 0o600 and os.fstat(fd).st_uid == os.geteuid():
            os.fchmod(fd, mode)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


def _row(line: bytes) -> dict[str, Any] | None:
    """Return what a line says; None if it was cut off or is damaged. Format 1 has no checksums."""
    intact = is_intact(line)
    try:
        row = json.loads(line) if intact is not False else None
    except ValueError:
        return None
    if not isinstance(row, dict) or (intact is None and row.get("format") != 1):
        return None
    return row


def report(
    intervals: Sequence[OnTime],
    outlook: Forecast,
    *,
    asked: float | None = None,
    attribution: tuple[str, ...] = (),
) -> EnergyReport:
    """Return what the run used in `intervals`, by the grid that `outlook` describes.

    >>> grid = Forecast.of("x", "", [GridSample(0, grams=400.0), GridSample(3600, grams=100.0)], fetched=0)
    >>> ran = [OnTime(3600, 7200, kwh=2.0, how="RAPL")]
    >>> report(ran, grid, asked=0.0).saved
    600.0
    """
    ordered = sorted(intervals, key=lambda one: one.begin)
    kwh = sum(one.kwh for one in ordered)
    seconds = sum(one.end - one.begin for one in ordered)
    parts = [_mean(outlook, one.begin, one.end) for one in ordered]
    grams = None
    if ordered and all(part is not None for part in parts):
        grams = sum(one.kwh * (part or 0.0) for one, part in zip(ordered, parts, strict=True))
    at_once = None
    if ordered:
        begin = ordered[0].begin if asked is None else asked
        mean = _mean(outlook, begin, begin + seconds)
        at_once = None if mean is None else kwh * mean
    how = tuple(dict.fromkeys(one.how for one in ordered))
    return EnergyReport(tuple(ordered), kwh, how, grams, at_once, attribution, asked)


def _mean(outlook: Forecast, begin: float, end: float) -> float | None:
    """Return the mean intensity from `begin` to `end`, or None if part of it is not known."""
    if end <= begin:
        sample = outlook.at(begin)
        return None if sample is None else sample.intensity
    total = covered = 0.0
    for index, sample in enumerate(outlook.samples):
        length = min(end, outlook.end_of(index)) - max(begin, sample.start)
        if length > 0:
            total += length * (sample.intensity or 0.0)
            covered += length
    return total / covered if covered >= (end - begin) * 0.999 else None


RAPL = Path("/sys/class/powercap")
WATTS_PER_CORE = 10.0
"""Assumed power of one busy core with its share of memory, where nothing can be measured."""

JOULES = 3.6e6
"""Joules in one kWh."""


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """Energy since the meter was started."""

    kwh: float
    how: str
    """`RAPL`, `RAPL + NVML`, or the estimate in words."""


class Meter:
    """Reads the processor's counters (RAPL) and those of NVIDIA cards (NVML).

    Counters are of the whole machine: on a shared one they include what others do.
    """

    def __init__(
        self,
        *,
        watts_per_core: float = WATTS_PER_CORE,
        rapl: Path = RAPL,
        cpu_seconds: Callable[[], float] | None = None,
        cards: Callable[[], float | None] | None = None,
    ) -> None:
        self._watts, self._cpu_seconds = watts_per_core, cpu_seconds or busy
        self._zones = [_Zone(path) for path in _packages(rapl)]
        self._cards = cards or _nvml
        self._cards_begun = self._cards()
        self._cpu_begun = self._cpu_seconds()

    def read(self) -> EnergyReading:
        """Return the energy used since the start. Call it at least hourly: counters wrap."""
        cards = self._cards()
        card_joules = None
        if cards is not None and self._cards_begun is not None:
            card_joules = max(0.0, cards - self._cards_begun)
        if self._zones:
            joules, how = sum(zone.read() for zone in self._zones), "RAPL"
        else:
            joules = max(0.0, self._cpu_seconds() - self._cpu_begun) * self._watts
            how = f"estimate: {self._watts:g} W per busy core"
        if card_joules is not None:
            return EnergyReading((joules + card_joules) / JOULES, f"{how} + NVML")
        return EnergyReading(joules / JOULES, how)


def busy(pid: int | None = None) -> float:
    """Return the processor seconds of a process (this one) and all below it, ended or running.

    A data loader's workers live as long as the training; the system's own sums would leave them
    out until they end.
    """
    own = os.getpid() if pid is None else pid
    if pid is None:
        total = sum(os.times()[:4])
    else:
        try:
            # the name, in brackets, may hold anything; user, system, and both of waited-for children
            fields = Path(f"/proc/{own}/stat").read_text().rpartition(")")[2].split()
            total = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return 0.0
    try:
        threads = Path(f"/proc/{own}/task").iterdir()
        below = [(one / "children").read_text().split() for one in threads]
    except OSError:  # not Linux, or it has just ended
        return total
    return total + sum(busy(int(child)) for children in below for child in children)


class _Zone:
    """One processor package; its counter starts again at zero when it is full."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "energy_uj"
        self.range = int((folder / "max_energy_range_uj").read_text())
        self.last = int(self.file.read_text())
        self.total = 0

    def read(self) -> float:
        try:
            now = int(self.file.read_text())
        except (OSError, ValueError):
            return self.total / 1e6
        self.total += (now - self.last) % (self.range + 1)
        self.last = now
        return self.total / 1e6


def _packages(rapl: Path) -> list[Path]:
    """Return the readable zones of whole packages; their parts are counted in them."""
    found = []
    for folder in sorted(rapl.glob("intel-rapl:*")):
        if folder.name.count(":") != 1:
            continue
        try:
            int((folder / "energy_uj").read_text())
            int((folder / "max_energy_range_uj").read_text())
        except (OSError, ValueError):  # readable by root only on many machines
            continue
        found.append(folder)
    return found


def _nvml() -> float | None:
    """Return the joules all NVIDIA cards have used since the driver was loaded, or None."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        return float(sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))) / 1e3
    except Exception:  # no card, no driver, no permission
        return None


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
            self.account.on(OnTime(begin, now, used, reading.how))
            self._noted, self._kwh, self._asleep = now, reading.kwh, asleep


def asleep() -> float:
    """Return the seconds this machine has slept since it was started; 0 where that is not told."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    if boot is None:
        return 0.0
    return time.clock_gettime(boot) - time.clock_gettime(time.CLOCK_MONOTONIC)
