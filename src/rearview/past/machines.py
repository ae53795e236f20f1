"""How fast the machines are that runs were recorded on, and the one that would replay them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname

import msgspec

from rearview.execute.calibrate import FORMAT, Measured, measure
from rearview.execute.places import threads_of
from rearview.model import Run
from rearview.plan.facts import Machine
from rearview.store.hardware import hardware, make_of
from rearview.store.private import make_folder
from rearview.store.project import publish

FRESH = 30 * 86_400.0
"""Seconds that a measurement counts: drivers, disks and cooling change."""
FRESH_BUSY = 86_400.0
"""The same for one that was taken while others used the machine."""
BUSY = 0.7
"""Processes per core from which on a machine is busy."""
WORTH = 60.0
"""Predicted seconds from which on a plan is worth a measurement of a second or two."""
_PARTLY = 0.3
"""Of a core: used by what runs beside the training, such as loaders and saving."""


def cores_of(run: Run) -> int:
    """Return how many cores a run kept busy; two replays on one core of each other's crawl.

    Threads that wait for one another spin, so a run that was told to use several uses them. One
    that was killed did not say what it used.
    """
    told = threads_of(run.facts.get("threads", {}))
    end = run.facts.get("end", {})
    if not end.get("cpu") or not end.get("seconds"):
        return told or 1
    used: int = max(1, math.ceil(end["cpu"] / end["seconds"] - _PARTLY))
    return min(used, told or used)


class _Kept(msgspec.Struct, frozen=True):
    measured: Measured
    time: float
    host: str = ""


@dataclass
class Machines:
    """The machines of one project, by what they are made of, as measured."""

    cache: Path
    """The measurements are kept in the store, so that machines that share it know each other."""
    _facts: dict[str, object] = field(default_factory=hardware)

    @property
    def name(self) -> str:
        """What the machine we are on is made of."""
        return make_of(self._facts)

    def here(self) -> Machine:
        """Return the machine we are on, as far as it is known; nothing is measured."""
        return self._known(self.name, gethostname())

    def of(self, run: Run) -> Machine:
        """Return the machine that a run was recorded on, as far as it is known."""
        facts = run.facts.get("hardware")
        if facts:
            return self._known(make_of(facts), run.host)
        # a run of before this was kept: its host is all there is
        return self.here() if run.host == gethostname() else Machine(f"host {run.host}")

    def due(self, now: float | None = None) -> bool:
        """Say whether the machine we are on was never measured, or too long ago."""
        kept = self._read(self.name)
        if kept is None:
            return True
        lasts = FRESH_BUSY if kept.measured.load > BUSY else FRESH
        return not 0 <= (time.time() if now is None else now) - kept.time < lasts

    def measure(self) -> Machine:
        """Return the machine we are on, measured now and remembered; about a second.

        Where it cannot be measured, predictions stay as doubtful as they were.
        """
        try:
            make_folder(self._folder)
            measured = measure(self._folder)
            if measured is not None:
                kept = _Kept(measured, time.time(), gethostname())
                publish(self._file(self.name), msgspec.json.encode(kept), durable=False)
        except OSError:
            pass
        return self.here()

    def unmeasured(self, runs: Iterable[Run]) -> list[str]:
        """Return a sentence on each machine of these runs whose speed is not known here."""
        here = self.here()
        strange = {
            run.host: machine
            for run in runs
            if (machine := self.of(run)).name != here.name
            and not set(machine.kernels) & set(here.kernels)
        }
        return [
            f"the machine {host} that recorded was never measured, so it is taken to be as fast as "
            "this one and the interval is wide; `rearview doctor` measures it, there"
            for host in sorted(strange)
        ]

    @property
    def _folder(self) -> Path:
        return self.cache / "machines"

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _read(self, name: str) -> _Kept | None:
        try:
            kept = msgspec.json.decode(self._file(name).read_bytes(), type=_Kept)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return kept if kept.measured.format == FORMAT else None

    def _known(self, name: str, host: str) -> Machine:
        kept = self._read(name)
        if kept is None:
            return Machine(name, host=host)
        found = kept.measured
        return Machine(name, found.kernels, found.read, found.write, host)
