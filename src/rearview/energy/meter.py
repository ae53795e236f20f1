"""How much energy was used: measured where the machine says, else a stated estimate."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RAPL = Path("/sys/class/powercap")
WATTS_PER_CORE = 10.0
"""Assumed power of one busy core with its share of memory, where nothing can be measured."""

JOULES = 3.6e6
"""Joules in one kWh."""


@dataclass(frozen=True, slots=True)
class Reading:
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

    def read(self) -> Reading:
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
            return Reading((joules + card_joules) / JOULES, f"{how} + NVML")
        return Reading(joules / JOULES, how)


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
