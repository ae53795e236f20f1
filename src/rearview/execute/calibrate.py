"""Measure this machine in a process of its own: computing, and the disk a store is on.

`python -m rearview.execute.calibrate FOLDER` prints the measurement as one line of JSON.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rearview.store.hardware import gpus

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
    command = [sys.executable, "-P", "-m", "rearview.execute.calibrate", str(folder)]
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
