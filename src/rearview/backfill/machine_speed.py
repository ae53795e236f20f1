"""Measure the speed of machines: of those that recorded runs, and of the machine that would replay them.

A machine is measured in a separate process: short computing kernels, and the disk of the store.
`python -m rearview.backfill.machine_speed FOLDER` prints the measurement as one line of JSON. The real
seconds of replays correct the predictions, too (`read_cost_corrections`).
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
from rearview.store.machine import gpus, hardware, hardware_id

FORMAT = 1
"""Number of the kernels: other kernels cannot be compared with these."""
TIMEOUT = 30.0
"""Seconds after which a measurement is abandoned; it usually takes about one."""
KERNEL_SECONDS = 0.25
"""Seconds for which each kernel is repeated; a kernel is short, so that some rounds are undisturbed."""
SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment for one thread: several that wait for each other would measure the machine's load."""
_CHUNK = 4 << 20
_DISK_SECONDS = 0.4
_DISK_BYTES = 256 << 20


class Measured(msgspec.Struct, frozen=True):
    """How fast a machine is."""

    kernels: dict[str, float]
    """Seconds of each kernel: `python`, and `numpy` and `cuda` where they are installed. Two machines
    are compared by the kernels that both have."""
    read: float
    """MB/s."""
    write: float
    load: float = 0.0
    """Other processes per core that were ready to run."""
    format: int = FORMAT


def measure(folder: Path) -> Measured | None:
    """Measure this machine and the disk of `folder` in a process; None if that fails."""
    command = [sys.executable, "-P", "-m", "rearview.backfill.machine_speed", str(folder)]
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, **SINGLE_THREADED},
            timeout=TIMEOUT,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=Measured)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def measure_in_process(folder: Path) -> Measured:
    """Measure this machine and the disk of `folder` in this process."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] / cores if hasattr(os, "getloadavg") else 0.0
    kernels = {"python": best(_python)}
    for name, make in (("numpy", _numpy), ("cuda", _cuda)):
        with contextlib.suppress(Exception):  # not installed, or does not work here
            kernel = make()
            kernel()
            kernels[name] = best(kernel)
    read, write = disk(folder)
    return Measured(kernels, read, write, load)


def best(kernel: Callable[[], object], seconds: float = KERNEL_SECONDS) -> float:
    """Return the seconds of the fastest round, which other processes disturbed least."""
    took, start = math.inf, time.perf_counter()
    while True:
        begun = time.perf_counter()
        kernel()
        ended = time.perf_counter()
        took = min(took, ended - begun)
        if ended - start > seconds:
            return took


def disk(folder: Path) -> tuple[float, float]:
    """Return MB/s of reading and writing files in `folder`, past the page cache."""
    file = folder / f".calibrate-{os.getpid()}"
    chunk = os.urandom(_CHUNK)  # random, because some file systems compress
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
        bytes_read, begun = 0, time.perf_counter()
        while data := os.read(fd, _CHUNK):
            bytes_read += len(data)
        read = bytes_read / max(time.perf_counter() - begun, 1e-9)
    finally:
        os.close(fd)
        file.unlink()
    return read / 1e6, write / 1e6


def _python() -> dict[int, float]:
    """Compute in plain Python: names, numbers, dictionaries, calls."""
    results: dict[int, float] = {}
    value = 0.5
    for k in range(6_000):
        value = abs(value * 3.9 * (1.0 - value))
        results[k & 1023] = results.get(k & 511, 0.0) + value
    return results


def _numpy() -> Callable[[], object]:
    """Return a kernel like training on a CPU: matrix products, and passes over memory."""
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
    """Return a kernel like training on a GPU."""
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
    """Return the corrections from earlier replays of this project on machines of this make."""
    try:
        data = _file(cache, machine).read_bytes()
        corrections = msgspec.json.decode(data, type=dict[str, CostCorrection])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return CostCorrections()
    return CostCorrections(corrections)


def save_cost_corrections(cache: Path, machine: str, corrections: CostCorrections) -> None:
    """Store the corrections; if the folder cannot be written, only predictions are worse."""
    data = {key: asdict(correction) for key, correction in corrections.by.items()}
    try:
        make_folder(cache)
        publish(_file(cache, machine), msgspec.json.encode(data), durable=False)
    except OSError:
        return


FRESH = 30 * 86_400.0
"""Seconds for which a measurement is valid: drivers, disks and cooling change."""
FRESH_BUSY = 86_400.0
"""Seconds for which a measurement is valid that was made while the machine was busy."""
BUSY = 0.7
"""Processes per core above which a machine counts as busy."""
WORTH_MEASURING = 60.0
"""A plan with more predicted seconds than this is worth a measurement of a second or two."""
_BACKGROUND_CORE = 0.3
"""Fraction of a core that background work of a training uses, such as loading and saving."""


def cores_of(run: Run) -> int:
    """Return how many cores a run kept busy: replays that share cores would slow each other down.

    A run that was killed did not record that; its thread settings count then.
    """
    threads = threads_of(run.facts.threads)
    if not run.end.cpu or not run.end.seconds:
        return threads or 1
    used: int = max(1, math.ceil(run.end.cpu / run.end.seconds - _BACKGROUND_CORE))
    return min(used, threads or used)


class _StoredMeasurement(msgspec.Struct, frozen=True):
    measured: Measured
    time: float
    host: str = ""


@dataclass
class Machines:
    """The machines that recorded or replay runs of one project, by their hardware."""

    cache: Path
    """Folder in the store, so that machines that share the store see each other's measurements."""
    _facts: dict[str, object] = field(default_factory=hardware)

    @property
    def name(self) -> str:
        """A name for the hardware of this machine."""
        return hardware_id(self._facts)

    def here(self) -> Machine:
        """Return this machine with its last measurement; nothing is measured now."""
        return self._stored(self.name, gethostname())

    def of(self, run: Run) -> Machine:
        """Return the machine that a run was recorded on, with its last measurement."""
        if run.facts.hardware:
            return self._stored(hardware_id(run.facts.hardware), run.host)
        # an older run recorded only its host
        return self.here() if run.host == gethostname() else Machine(f"host {run.host}")

    def due(self, now: float | None = None) -> bool:
        """Return True if this machine was never measured, or too long ago."""
        kept = self._read(self.name)
        if kept is None:
            return True
        lasts = FRESH_BUSY if kept.measured.load > BUSY else FRESH
        return not 0 <= (time.time() if now is None else now) - kept.time < lasts

    def measure(self) -> Machine:
        """Measure this machine, which takes about a second, store the result and return it.

        If that fails, predictions stay as uncertain as before.
        """
        try:
            make_folder(self._folder)
            measured = measure(self._folder)
            if measured is not None:
                kept = _StoredMeasurement(measured, time.time(), gethostname())
                publish(self._file(self.name), msgspec.json.encode(kept), durable=False)
        except OSError:
            pass
        return self.here()

    def unmeasured(self, runs: Iterable[Run]) -> list[str]:
        """Return a sentence for each machine of these runs that cannot be compared with this one."""
        this_machine = self.here()
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
            kept = msgspec.json.decode(self._file(name).read_bytes(), type=_StoredMeasurement)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return kept if kept.measured.format == FORMAT else None

    def _stored(self, name: str, host: str) -> Machine:
        kept = self._read(name)
        if kept is None:
            return Machine(name, host=host)
        measured = kept.measured
        return Machine(name, measured.kernels, measured.read, measured.write, host)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(measure_in_process(Path(sys.argv[1]))))
