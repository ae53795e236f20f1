"""Measure and store the speed of machines, to predict how long a run recorded on one machine takes on another.

Measured are a few short computations ("kernels") and the disk of the store, in a separate process:
`python -m rearview.backfill.machine_speed FOLDER` prints the measurement as one line of JSON. Predictions are also
corrected by the seconds that earlier replays really took (`read_cost_corrections`).
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

from rearview.execute.cores_and_accelerators import threads_of
from rearview.model import Run
from rearview.plan.cost import CostCorrection, CostCorrections
from rearview.plan.facts import Machine
from rearview.store.create_files import make_folder, publish
from rearview.store.machine_and_process import gpus, hardware, hardware_id

FORMAT = 1
"""Number of this set of test computations (kernels); measurements with different numbers cannot be compared."""
TIMEOUT = 30.0
"""Seconds after which a measurement is stopped; usually it takes about one second."""
KERNEL_SECONDS = 0.25
"""Seconds for which each kernel is repeated. One call is so short that other processes leave some calls undisturbed."""
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment variables that limit kernels to one thread. The time of several threads would depend on the load."""
_CHUNK = 4 << 20
"""Bytes that the measurement of the disk reads or writes in one call."""
_DISK_SECONDS = 0.4
"""Most seconds for which the measurement of the disk writes."""
_DISK_BYTES = 256 << 20
"""Most bytes that the measurement of the disk writes."""


class Measured(msgspec.Struct, frozen=True):
    """A measurement of how fast a machine computes, reads and writes."""

    kernels: dict[str, float]
    """Name of a test computation -> its seconds: `python`, and also `numpy` and `cuda` if they work on the machine.
    Two machines are compared by the computations that were measured on both.
    """
    read: float
    """Reading speed of the disk in MB/s."""
    write: float
    """Writing speed of the disk in MB/s."""
    load: float = 0.0
    """Load average of the last minute, divided by the number of cores, before the measurement."""
    format: int = FORMAT


def measure(folder: Path) -> Measured | None:
    """Measure this machine and the disk of `folder` in a new process; return None if that fails."""
    command = [sys.executable, "-P", "-m", "rearview.backfill.machine_speed", str(folder)]
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, **SINGLE_THREADED},
            timeout=TIMEOUT,
            check=True,
        )
        return msgspec.json.decode(process.stdout, type=Measured)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def measure_in_process(folder: Path) -> Measured:
    """Measure this machine and the disk of `folder` in this process, with the threads that its environment allows."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] / cores if hasattr(os, "getloadavg") else 0.0
    kernels = {"python": best(_python)}
    for name, make in (("numpy", _numpy), ("cuda", _cuda)):
        with contextlib.suppress(Exception):  # the library is not installed, or does not work
            kernel = make()
            kernel()
            kernels[name] = best(kernel)
    read, write = disk(folder)
    return Measured(kernels, read, write, load)


def best(kernel: Callable[[], object], seconds: float = KERNEL_SECONDS) -> float:
    """Repeat `kernel` for `seconds`; return the seconds of its fastest call, which other processes disturbed least."""
    fastest, start = math.inf, time.perf_counter()
    while True:
        round_start = time.perf_counter()
        kernel()
        round_end = time.perf_counter()
        fastest = min(fastest, round_end - round_start)
        if round_end - start > seconds:
            return fastest


def disk(folder: Path) -> tuple[float, float]:
    """Return (reading speed, writing speed) of the disk of `folder` in MB/s, not those of the page cache in memory."""
    file = folder / f".calibrate-{os.getpid()}"
    chunk = os.urandom(_CHUNK)  # random bytes, which file systems cannot compress
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        size, phase_start = 0, time.perf_counter()
        while size < _DISK_BYTES and time.perf_counter() - phase_start < _DISK_SECONDS:
            size += os.write(fd, chunk)
            os.fsync(fd)
        write = size / (time.perf_counter() - phase_start)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(fd, 0, os.SEEK_SET)
        bytes_read, phase_start = 0, time.perf_counter()
        while data := os.read(fd, _CHUNK):
            bytes_read += len(data)
        read = bytes_read / max(time.perf_counter() - phase_start, 1e-9)
    finally:
        os.close(fd)
        file.unlink()
    return read / 1e6, write / 1e6


def _python() -> dict[int, float]:
    """Run a short computation in plain Python: variables, numbers, dictionaries, calls."""
    results: dict[int, float] = {}
    value = 0.5
    for k in range(6_000):
        value = abs(value * 3.9 * (1.0 - value))
        results[k & 1023] = results.get(k & 511, 0.0) + value
    return results


def _numpy() -> Callable[[], object]:
    """Return a function whose computation resembles training on a CPU: matrix products, and passes over memory."""
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
    """Return a function whose computation resembles training on a GPU; raise if there is no GPU."""
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


def _file(cache: Path, machine: str) -> Path:
    return cache / f"corrections-{machine}.json"


def read_cost_corrections(cache: Path, machine: str) -> CostCorrections:
    """Return the stored corrections of predictions, for replays on machines with the hardware `machine`.

    Return no corrections if none are stored in the folder `cache`, or the file is damaged.
    """
    try:
        data = _file(cache, machine).read_bytes()
        corrections = msgspec.json.decode(data, type=dict[str, CostCorrection])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return CostCorrections()
    return CostCorrections(corrections)


def save_cost_corrections(cache: Path, machine: str, corrections: CostCorrections) -> None:
    """Store the corrections of predictions for replays on `machine` in the folder `cache`.

    If the folder cannot be written, the corrections are lost, and later predictions are less exact.
    """
    data = {key: asdict(correction) for key, correction in corrections.by.items()}
    try:
        make_folder(cache)
        publish(_file(cache, machine), msgspec.json.encode(data), durable=False)
    except OSError:
        return


FRESH = 30 * 86_400.0
"""Seconds for which a measurement is valid; after that, drivers, disks or cooling may have changed."""
FRESH_BUSY = 86_400.0
"""Seconds for which a measurement is valid if the machine was busy with other processes during the measurement."""
BUSY = 0.7
"""Value of `Measured.load` above which a machine counts as busy."""
WORTH_MEASURING = 60.0
"""Predicted seconds of a plan above which measuring the machine is worth the one or two seconds that it takes."""
_BACKGROUND_CORE = 0.3
"""Fraction of a core that background work of a training uses, such as loading and saving; it is not counted."""


def cores_of(run: Run) -> int:
    """Return how many cores a run kept busy. Replays that shared cores would slow each other down.

    A run that was killed did not record its CPU time: return the thread count that its environment set, or 1.
    """
    threads = threads_of(run.facts.threads)
    if not run.end.cpu or not run.end.seconds:
        return threads or 1
    used: int = max(1, math.ceil(run.end.cpu / run.end.seconds - _BACKGROUND_CORE))
    return min(used, threads or used)


class _StoredMeasurement(msgspec.Struct, frozen=True):
    measured: Measured
    time: float
    """Unix time of the measurement."""
    host: str = ""


@dataclass
class Machines:
    """Measures the speed of this machine, and stores measurements of all machines that use the store of a project."""

    cache: Path
    """Folder with the measurements; it is in the store, so that machines that share the store see all measurements."""
    _facts: dict[str, object] = field(default_factory=hardware)

    @property
    def name(self) -> str:
        """The name of this machine's hardware; machines with equal hardware have equal names."""
        return hardware_id(self._facts)

    def this_machine(self) -> Machine:
        """Return this machine with its stored measurement, if there is one; nothing is measured."""
        return self._stored(self.name, gethostname())

    def of(self, run: Run) -> Machine:
        """Return the machine that a run was recorded on, with its stored measurement, if there is one."""
        if run.facts.hardware:
            return self._stored(hardware_id(run.facts.hardware), run.host)
        # runs of older versions of Rearview recorded the host name but no hardware
        return self.this_machine() if run.host == gethostname() else Machine(f"host {run.host}")

    def due(self, now: float | None = None) -> bool:
        """Return True if this machine should be measured: it never was, or its measurement is too old.

        `now` is a Unix time, the present time by default.
        """
        last = self._read(self.name)
        if last is None:
            return True
        valid_seconds = FRESH_BUSY if last.measured.load > BUSY else FRESH
        return not 0 <= (time.time() if now is None else now) - last.time < valid_seconds

    def measure(self) -> Machine:
        """Measure this machine, store the measurement, and return the machine with it. This takes about a second.

        If measuring fails, return the machine with the measurement that was stored before, if there is one.
        """
        try:
            make_folder(self._folder)
            measured = measure(self._folder)
            if measured is not None:
                stored = _StoredMeasurement(measured, time.time(), gethostname())
                publish(self._file(self.name), msgspec.json.encode(stored), durable=False)
        except OSError:
            pass
        return self.this_machine()

    def unmeasured(self, runs: Iterable[Run]) -> list[str]:
        """Return a sentence for each machine that recorded one of `runs` and cannot be compared with this machine."""
        this_machine = self.this_machine()
        incomparable = {
            run.host: machine
            for run in runs
            if (machine := self.of(run)).name != this_machine.name
            and not set(machine.kernels) & set(this_machine.kernels)
        }
        return [
            f"the machine {host}, which recorded, was never measured, so it is assumed to be as fast as "
            "this one and the interval is wide; `rearview doctor` there measures it"
            for host in sorted(incomparable)
        ]

    @property
    def _folder(self) -> Path:
        return self.cache / "machines"

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _read(self, name: str) -> _StoredMeasurement | None:
        try:
            stored = msgspec.json.decode(self._file(name).read_bytes(), type=_StoredMeasurement)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return stored if stored.measured.format == FORMAT else None

    def _stored(self, name: str, host: str) -> Machine:
        stored = self._read(name)
        if stored is None:
            return Machine(name, host=host)
        measured = stored.measured
        return Machine(name, measured.kernels, measured.read, measured.write, host)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure_in_process(Path(sys.argv[1]))))
