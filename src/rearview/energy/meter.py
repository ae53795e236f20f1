"""Energy used by a run, measured by counters of the machine or else estimated, and the report about it.

A run appends the intervals in which it ran, and the energy it used, to its account file. The report compares the
CO2 of the run with the CO2 of a run without waiting.
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

from rearview.durable_files import add_check, is_intact
from rearview.energy.grid import Forecast, GridSample

FORMAT = 2
"""Format of account files: from 2 on, every line has a checksum."""
_GAP = 0.001
"""Most seconds that rounding puts between the end of an interval and the start of the next."""


@dataclass(frozen=True, slots=True)
class RunInterval:
    """A time interval in which the run computed."""

    begin: float
    end: float
    kwh: float
    how: str


@dataclass(frozen=True, slots=True)
class EnergyReport:
    """The energy and CO2 of a run, and the CO2 that it would have caused without waiting."""

    intervals: tuple[RunInterval, ...]
    kwh: float
    how: tuple[str, ...]
    grams: float | None
    """Grams of CO2 of the run, or None if the state of the grid is not known."""
    grams_at_once: float | None
    """Grams of CO2 if the run had started when it was requested and never paused, or None if not known."""
    attribution: tuple[str, ...] = ()
    requested: float | None = None
    """Time at which the run was requested, or None if that was not recorded."""

    @property
    def seconds(self) -> float:
        """Seconds for which the run computed."""
        return sum(interval.end - interval.begin for interval in self.intervals)

    @property
    def joined_intervals(self) -> tuple[RunInterval, ...]:
        """The intervals, with adjacent intervals joined."""
        joined: list[RunInterval] = []
        for interval in self.intervals:
            last = joined[-1] if joined else None
            if last is not None and interval.begin - last.end < _GAP and interval.how == last.how:
                joined[-1] = RunInterval(
                    last.begin, interval.end, last.kwh + interval.kwh, interval.how
                )
            else:
                joined.append(interval)
        return tuple(joined)

    @property
    def saved(self) -> float | None:
        """Grams of CO2 saved by waiting, negative if waiting was worse; None if not known."""
        if self.grams is None or self.grams_at_once is None:
            return None
        return self.grams_at_once - self.grams


class Account:
    """The file to which a run appends the intervals in which it computed, one line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._recorded_samples: dict[float, GridSample] = {}

    def note_request(self, time: float) -> None:
        """Record when the run was requested; if called again, the first time counts."""
        self._append({"asked": time})

    def on(self, interval: RunInterval) -> None:
        """Record an interval in which the run computed."""
        self._append({"on": asdict(interval)})

    def grid(self, outlook: Forecast) -> None:
        """Record the state of the grid for the report, without samples that did not change."""
        changed_samples = [
            sample
            for sample in outlook.samples
            if self._recorded_samples.get(sample.start) != sample
        ]
        self._recorded_samples |= {sample.start: sample for sample in changed_samples}
        if not changed_samples:
            return
        samples = [(s.start, s.share, s.light, s.grams) for s in changed_samples]
        self._append(
            {"grid": samples, "source": outlook.source, "attribution": outlook.attribution}
        )

    def report(self, measured: Forecast | None = None) -> EnergyReport:
        """Return the report of all recorded intervals; a last line that was cut off is ignored.

        `measured` is the state of the grid as it was measured later; it replaces the recorded forecasts.
        """
        requested: float | None = None
        intervals: list[RunInterval] = []
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
            if "asked" in row and requested is None:
                requested = row["asked"]
            if "on" in row:
                intervals.append(RunInterval(**row["on"]))
            if "grid" in row:
                # a later forecast of the same time is more precise
                samples |= {values[0]: GridSample(*values) for values in row["grid"]}
                sources[row["source"]] = row["attribution"]
        self._recorded_samples = dict(samples)
        if measured is not None and measured.samples:
            first, last = measured.samples[0].start, measured.end
            samples = {t: s for t, s in samples.items() if not first <= t < last}
            samples |= {sample.start: sample for sample in measured.samples}
            sources[measured.source] = measured.attribution
        outlook = Forecast.of(", ".join(sources), "", samples.values(), fetched=0.0)
        return report(intervals, outlook, requested=requested, attribution=tuple(sources.values()))

    def _append(self, row: dict[str, object]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = add_check(json.dumps({"format": FORMAT, **row}).encode()) + b"\n"
        # the group may write the file if it may write the folder
        mode = 0o660 if self.path.parent.stat().st_mode & 0o020 else 0o600
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
        try:
            if mode != 0o600 and os.fstat(fd).st_uid == os.geteuid():
                os.fchmod(fd, mode)
            os.write(fd, line)
        finally:
            os.close(fd)


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line, or None if the line is cut off or damaged. Format 1 has no checksums."""
    intact = is_intact(line)
    try:
        row = json.loads(line) if intact is not False else None
    except ValueError:
        return None
    if not isinstance(row, dict) or (intact is None and row.get("format") != 1):
        return None
    return row


def report(
    intervals: Sequence[RunInterval],
    outlook: Forecast,
    *,
    requested: float | None = None,
    attribution: tuple[str, ...] = (),
) -> EnergyReport:
    """Return the report of a run that computed in `intervals`, with the grid as in `outlook`.

    >>> grid = Forecast.of("x", "", [GridSample(0, grams=400.0), GridSample(3600, grams=100.0)], fetched=0)
    >>> ran = [RunInterval(3600, 7200, kwh=2.0, how="RAPL")]
    >>> report(ran, grid, requested=0.0).saved
    600.0
    """
    ordered = sorted(intervals, key=lambda interval: interval.begin)
    kwh = sum(interval.kwh for interval in ordered)
    seconds = sum(interval.end - interval.begin for interval in ordered)
    intensities = [_mean(outlook, interval.begin, interval.end) for interval in ordered]
    grams = None
    if ordered and all(intensity is not None for intensity in intensities):
        grams = sum(
            interval.kwh * (intensity or 0.0)
            for interval, intensity in zip(ordered, intensities, strict=True)
        )
    at_once = None
    if ordered:
        begin = ordered[0].begin if requested is None else requested
        mean = _mean(outlook, begin, begin + seconds)
        at_once = None if mean is None else kwh * mean
    how = tuple(dict.fromkeys(interval.how for interval in ordered))
    return EnergyReport(tuple(ordered), kwh, how, grams, at_once, attribution, requested)


def _mean(outlook: Forecast, begin: float, end: float) -> float | None:
    """Return the mean grams of CO2 per kWh from `begin` to `end`, or None if they are not known throughout."""
    if end <= begin:
        sample = outlook.at(begin)
        return None if sample is None else sample.intensity
    total = covered_seconds = 0.0
    for index, sample in enumerate(outlook.samples):
        length = min(end, outlook.end_of(index)) - max(begin, sample.start)
        if length > 0:
            total += length * (sample.intensity or 0.0)
            covered_seconds += length
    return total / covered_seconds if covered_seconds >= (end - begin) * 0.999 else None


RAPL = Path("/sys/class/powercap")
WATTS_PER_CORE = 10.0
"""Assumed power of one busy core with its share of memory, if nothing can be measured."""

JOULES_PER_KWH = 3.6e6
"""Joules in one kWh."""


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """Energy since the meter was started."""

    kwh: float
    how: str
    """`RAPL`, `RAPL + NVML`, or the estimate in words."""


class Meter:
    """Reads the energy counters of the processor (RAPL) and of NVIDIA cards (NVML).

    The counters are those of the whole machine, with all its users.
    """

    def __init__(
        self,
        *,
        watts_per_core: float = WATTS_PER_CORE,
        rapl: Path = RAPL,
        cpu_seconds: Callable[[], float] | None = None,
        cards: Callable[[], float | None] | None = None,
    ) -> None:
        self._watts, self._cpu_seconds = watts_per_core, cpu_seconds or process_cpu_seconds
        self._zones = [_Zone(path) for path in _packages(rapl)]
        self._cards = cards or _nvml
        self._cards_at_start = self._cards()
        self._cpu_at_start = self._cpu_seconds()

    def read(self) -> EnergyReading:
        """Return the energy used since this meter was made. Call this at least hourly, because counters wrap."""
        cards = self._cards()
        card_joules = None
        if cards is not None and self._cards_at_start is not None:
            card_joules = max(0.0, cards - self._cards_at_start)
        if self._zones:
            joules, how = sum(zone.read() for zone in self._zones), "RAPL"
        else:
            joules = max(0.0, self._cpu_seconds() - self._cpu_at_start) * self._watts
            how = f"estimate: {self._watts:g} W per busy core"
        if card_joules is not None:
            return EnergyReading((joules + card_joules) / JOULES_PER_KWH, f"{how} + NVML")
        return EnergyReading(joules / JOULES_PER_KWH, how)


def process_cpu_seconds(pid: int | None = None) -> float:
    """Return the processor seconds of a process (by default this one) and all its descendants.

    The workers of a data loader live as long as the training; the kernel adds their time to the parent
    only when they end.
    """
    process_id = os.getpid() if pid is None else pid
    if pid is None:
        total = sum(os.times()[:4])
    else:
        try:
            # after the name in brackets, 11 to 14 are user and system time of the process and of its ended children
            fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
            total = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return 0.0
    try:
        threads = Path(f"/proc/{process_id}/task").iterdir()
        child_ids = [(thread / "children").read_text().split() for thread in threads]
    except OSError:  # not Linux, or the process has just ended
        return total
    return total + sum(
        process_cpu_seconds(int(child)) for children in child_ids for child in children
    )


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
    """Return the folders of the processor packages whose counters can be read.

    The counter of a package includes those of its parts, such as cores.
    """
    zones = []
    for folder in sorted(rapl.glob("intel-rapl:*")):
        if folder.name.count(":") != 1:
            continue
        try:
            int((folder / "energy_uj").read_text())
            int((folder / "max_energy_range_uj").read_text())
        except (OSError, ValueError):  # on many machines only root can read the counters
            continue
        zones.append(folder)
    return zones


def _nvml() -> float | None:
    """Return the joules that all NVIDIA cards used since the driver was loaded, or None."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        return float(sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))) / 1e3
    except Exception:  # no card, no driver, no permission
        return None


class EnergyLog:
    """Writes the time and energy that this process uses to an account, as one interval per call of `note`.

    `beat` may be called often, from any thread, and writes once in `every` seconds, so that a kill loses only
    the last seconds. Time in which the machine was suspended does not count.
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
        self._every, self._clock, self._slept = every, clock, slept or seconds_suspended
        self._meter = meter()
        self._lock = threading.Lock()
        self._noted_at, self._kwh, self._suspended = clock(), 0.0, self._slept()

    def beat(self) -> None:
        """Call `note` if the last call was `every` seconds ago."""
        if self._clock() - self._noted_at >= self._every:
            self.note()

    def note(self) -> None:
        """Write the time and energy since the last call to the account."""
        with self._lock:
            reading, now, suspended = self._meter.read(), self._clock(), self._slept()
            begin = min(self._noted_at + max(0.0, suspended - self._suspended), now)
            if now <= begin:
                return
            used = max(0.0, reading.kwh - self._kwh)
            self.account.on(RunInterval(begin, now, used, reading.how))
            self._noted_at, self._kwh, self._suspended = now, reading.kwh, suspended


def seconds_suspended() -> float:
    """Return the seconds that this machine was suspended since its start; 0 if unknown."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    if boot is None:
        return 0.0
    return time.clock_gettime(boot) - time.clock_gettime(time.CLOCK_MONOTONIC)
