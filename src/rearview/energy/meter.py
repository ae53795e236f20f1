"""Energy used by a run, from counters of the machine or else estimated, and the report about the energy.

A run appends to its account file the intervals in which it ran, with the energy that it used. The report compares
the CO2 of the run with the CO2 that the run would have caused without waiting for green power.
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
"""Number of the format of account files; from format 2 on, every line has a checksum."""
_GAP = 0.001
"""Intervals that are fewer seconds apart count as adjacent: rounding may separate them."""


@dataclass(frozen=True, slots=True)
class RunInterval:
    """A time interval in which the run computed, the energy used, and `how` the energy was measured."""

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
    """Time at which the user asked to start the run (seconds since 1970), or None if not recorded."""

    @property
    def seconds(self) -> float:
        """Total number of seconds for which the run computed."""
        return sum(interval.end - interval.begin for interval in self.intervals)

    @property
    def joined_intervals(self) -> tuple[RunInterval, ...]:
        """The intervals of the run; adjacent intervals measured in the same way are joined into one."""
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
    """The file of a run with the intervals in which it computed, and the grid data; one line is added at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._recorded_samples: dict[float, GridSample] = {}

    def note_request(self, time: float) -> None:
        """Record the time at which the user asked to start the run; if called again, the first `time` counts."""
        self._append({"asked": time})

    def on(self, interval: RunInterval) -> None:
        """Append an interval in which the run computed to the account file."""
        self._append({"on": asdict(interval)})

    def grid(self, outlook: Forecast) -> None:
        """Record those samples of `outlook` that are new or changed since they were last recorded."""
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
        """Return the report of all recorded intervals; damaged or incomplete lines of the file are ignored.

        `measured` has samples of the grid that were measured after the run. In the time that these samples cover,
        they replace the recorded forecasts.
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
                # a later line replaces an earlier forecast of the same time: it is more precise
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
        # the file's group may write the file if the folder's group may write the folder
        mode = 0o660 if self.path.parent.stat().st_mode & 0o020 else 0o600
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
        try:
            if mode != 0o600 and os.fstat(fd).st_uid == os.geteuid():
                os.fchmod(fd, mode)
            os.write(fd, line)
        finally:
            os.close(fd)


def _row(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line of an account file, or None if the line is cut off or damaged.

    Lines of format 1 have no checksum.
    """
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
    """Return the report of a run that computed in `intervals`, with the CO2 per kWh of the samples in `outlook`.

    `requested` is the time at which the user asked to start the run; if None, the start of the first interval.

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
    """Return the mean grams of CO2 per kWh from `begin` to `end`, or None if samples do not cover all that time."""
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
"""Assumed watts of one busy core with its share of memory, for processors whose counters cannot be read."""

JOULES_PER_KWH = 3.6e6
"""Number of joules in one kWh."""


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """Energy used since a meter was made, and `how` it was measured."""

    kwh: float
    how: str
    """`RAPL` or a description of the estimate, followed by ` + NVML` if the cards were measured."""


class Meter:
    """Reads the energy counters of the processors (RAPL) and of NVIDIA cards (NVML).

    The counters count the energy of the whole machine, with all its users. If the processors have no readable
    counters, their energy is estimated from the processor time of this process and its descendants.
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

    Child processes are added up one by one, because the kernel adds the time of a child to its parent only when
    the child ends, and the workers of a data loader live as long as the training.
    """
    process_id = os.getpid() if pid is None else pid
    if pid is None:
        total = sum(os.times()[:4])
    else:
        try:
            # fields 11 to 14 after the name in brackets: user and system time of the process, then of its ended
            # children
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
    """The energy counter of one processor package (socket); it starts again at zero when it is full."""

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
    """Return the folders in `rapl` of the processor packages (sockets) whose counters can be read.

    Folders of parts of a package, such as its cores, are left out: the package's counter includes their energy.
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
    """Return the joules that all NVIDIA cards used since the driver was loaded, or None if they cannot be read."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        return float(sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))) / 1e3
    except Exception:  # no card, no driver, no permission
        return None


class EnergyLog:
    """Writes the time and energy that this process uses to an account, as one interval per call of `note`.

    `beat` may be called often, from any thread, and writes once in `every` seconds, so that a process that is
    killed loses at most the last `every` seconds. Time in which the machine was suspended does not count.
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
        """Call `note` if at least `every` seconds have passed since its last call."""
        if self._clock() - self._noted_at >= self._every:
            self.note()

    def note(self) -> None:
        """Write to the account the time and energy since the last call, or since this log was made."""
        with self._lock:
            reading, now, suspended = self._meter.read(), self._clock(), self._slept()
            begin = min(self._noted_at + max(0.0, suspended - self._suspended), now)
            if now <= begin:
                return
            used = max(0.0, reading.kwh - self._kwh)
            self.account.on(RunInterval(begin, now, used, reading.how))
            self._noted_at, self._kwh, self._suspended = now, reading.kwh, suspended


def seconds_suspended() -> float:
    """Return the number of seconds for which this machine was suspended since its start; 0 if not known."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    if boot is None:
        return 0.0
    return time.clock_gettime(boot) - time.clock_gettime(time.CLOCK_MONOTONIC)
