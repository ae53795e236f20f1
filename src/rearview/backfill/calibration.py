"""How fast the machines are that runs were recorded on, and the one that would replay them.

Measure this machine in a process of its own: computing, and the disk a store is on.

`python -m rearview.backfill.calibration FOLDER` prints the measurement as one line of JSON.

Keep what past replays teach about cost, for the next plan.

How fast the machines are that runs were recorded on, and the one that would replay them.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from socket import gethostname

import msgspec

from rearview.execute.local import threads_of
from rearview.model import Run
from rearview.plan.cost import CostCorrection, CostCorrections
from rearview.plan.facts import Machine
from rearview.store.files import make_folder, publish
from rearview.store.machine import gpus, hardware, hardware_id

FORMAT = 1
"""Number of the kernels: other kernels cannot be compared with these."""
LONGEST = 30.0
"""Seconds after which a measurement is given up; about one is usual."""
SPELL = 0.25
"""Seconds that each kernel is repeated for; it is short, so that some rounds are undisturbed."""
ALONE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""One thread: several that wait for each other measure the load of the machine."""
_CHUNK = 4 << 20
_DISK_SECONDS = 0.4
_DISK_BYTES = 256 << 20


class Measured(msgspec.Struct, frozen=True):
    """How fast a machine is."""

    kernels: dict[str, float]
    """Seconds of each standard piece of computing: `python`, and `numpy` and `cuda` where there
    are such. Only those that two machines both have can be compared."""
    read: float
    """MB/s."""
    write: float
    load: float = 0.0
    """Processes that wanted to run per core, beside ours."""
    format: int = FORMAT


def measure(folder: Path) -> Measured | None:
    """Return how fast this machine and the disk of `folder` are; None if that cannot be told."""
    command = [sys.executable, "-P", "-m", "rearview.backfill.calibration", str(folder)]
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, **ALONE},
            timeout=LONGEST,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=Measured)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def measured_here(folder: Path) -> Measured:
    """Measure in this process."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] / cores if hasattr(os, "getloadavg") else 0.0
    kernels = {"python": best(_python)}
    for name, make in (("numpy", _numpy), ("cuda", _cuda)):
        with contextlib.suppress(Exception):  # it is not there, or does not work here
            kernel = make()
            kernel()
            kernels[name] = best(kernel)
    read, write = disk(folder)
    return Measured(kernels, read, write, load)


def best(kernel: Callable[[], object], spell: float = SPELL) -> float:
    """Return the seconds of the fastest round: what others take of the machine is no part of it."""
    took, start = math.inf, time.perf_counter()
    while True:
        begun = time.perf_counter()
        kernel()
        ended = time.perf_counter()
        took = min(took, ended - begun)
        if ended - start > spell:
            return took


def disk(folder: Path) -> tuple[float, float]:
    """Return MB/s of reading and writing files in `folder`, past the memory that hides the disk."""
    file = folder / f".calibrate-{os.getpid()}"
    chunk = os.urandom(_CHUNK)  # what compresses well would flatter some file systems
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        size, begun = 0, time.perf_counter()
        while size < _DISK_BYTES and time.perf_counter() - begun < _DISK_SECONDS:
            size += os.write(fd, chunk)
            os.fsync(fd)
        write = size / (time.perf_counter() - begun)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(fd, 0, os.SEEK_SET)
        got, begun = 0, time.perf_counter()
        while data := os.read(fd, _CHUNK):
            got += len(data)
        read = got / max(time.perf_counter() - begun, 1e-9)
    finally:
        os.close(fd)
        file.unlink()
    return read / 1e6, write / 1e6


def _python() -> dict[int, float]:
    """Compute as interpreters do: names, numbers, dictionaries, calls."""
    found: dict[int, float] = {}
    value = 0.5
    for k in range(6_000):
        value = abs(value * 3.9 * (1.0 - value))
        found[k & 1023] = found.get(k & 511, 0.0) + value
    return found


def _numpy() -> Callable[[], object]:
    """Compute as training on a processor does: products of matrices, and passes over memory."""
    import numpy as np

    draw = np.random.default_rng(0)
    a = draw.standard_normal((256, 256), dtype=np.float32)
    long = draw.standard_normal(1 << 18, dtype=np.float32)

    def kernel() -> object:
        out = a
        for _ in range(2):
            out = np.tanh(out @ a * 0.05)
        return out.sum() + (long * 0.9 + long * long).sum()

    return kernel


def _cuda() -> Callable[[], object]:
    """Compute as training on an accelerator does."""
    if not gpus():
        raise RuntimeError("no accelerator")
    import torch

    a = torch.randn(1024, 1024, device="cuda")

    def kernel() -> object:
        out = a
        for _ in range(20):
            out = torch.tanh(out @ a * 0.02)
        torch.cuda.synchronize()
        return out

    return kernel


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measured_here(Path(sys.argv[1]))))


def _file(cache: Path, machine: str) -> Path:
    return cache / f"corrections-{machine}.json"


def read_corrections(cache: Path, machine: str) -> CostCorrections:
    """Return what replays of this project on machines of this make have taught so far."""
    try:
        data = _file(cache, machine).read_bytes()
        found = msgspec.json.decode(data, type=dict[str, CostCorrection])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return CostCorrections()
    return CostCorrections(found)


def keep_corrections(cache: Path, machine: str, known: CostCorrections) -> None:
    """Keep it; a folder that cannot be written costs only better predictions."""
    data = {key: asdict(one) for key, one in known.by.items()}
    try:
        make_folder(cache)
        publish(_file(cache, machine), msgspec.json.encode(data), durable=False)
    except OSError:
        return


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
    told = threads_of(run.facts.threads)
    if not run.end.cpu or not run.end.seconds:
        return told or 1
    used: int = max(1, math.ceil(run.end.cpu / run.end.seconds - _PARTLY))
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
        return hardware_id(self._facts)

    def here(self) -> Machine:
        """Return the machine we are on, as far as it is known; nothing is measured."""
        return self._known(self.name, gethostname())

    def of(self, run: Run) -> Machine:
        """Return the machine that a run was recorded on, as far as it is known."""
        if run.facts.hardware:
            return self._known(hardware_id(run.facts.hardware), run.host)
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
