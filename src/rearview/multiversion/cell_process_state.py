"""Save and restore the state of a cell process, for a fork or for a stored namespace.

It runs inside the cell process and imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import stat
import sys
import threading
import time
from typing import Any

_BAD_FORKS = {
    "polars": "polars keeps a thread pool",
    "jax": "JAX keeps threads",
    "tensorflow": "TensorFlow keeps threads",
    "ray": "Ray is connected",
    "pyspark": "Spark is connected",
    "cupy": "CuPy holds a device",
    "grpc": "gRPC keeps threads",
}
_OMP = re.compile(r"/lib(?:g|i|)omp[^/]*\.so[^/]*$")
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 4096, 16384, 1 << 18
_MNT_DETACH = 2


ENDING = 1.0
"""Seconds to wait for threads to end: worker pools end theirs after they have returned the results."""


class Refused(Exception):  # noqa: N818 - it says what happened
    """The state cannot be kept in this way."""


def forbids_fork(own_socket: int) -> str:
    """Return why this process must not be forked; '' if it may.

    `own_socket` is the connection to the engine.
    """
    threads = [each for each in threading.enumerate() if each is not threading.current_thread()]
    deadline = time.monotonic() + ENDING
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            return f"thread {thread.name!r} is running"
    for name, why in _BAD_FORKS.items():
        if name in sys.modules:
            return why
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "PyTorch holds a CUDA device"
    children = ""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().strip()
    if children:
        alive = [pid for pid in children.split() if _state(pid) not in {"Z", "X", ""}]
        if alive:
            processes = "a process" if len(alive) == 1 else f"{len(alive)} processes"
            return f"it has started {processes} still running"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:") and int(fd) != own_socket:
                return "it has an open network connection"
    return ""


def _state(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def pause_openmp() -> None:
    """End the threads of every OpenMP library in this process; they restart when needed.

    The child of a process with a live OpenMP pool would wait forever for threads that it does not have.
    """
    try:
        with open("/proc/self/maps") as file:
            libraries = {line.split(None, 5)[5].strip() for line in file if ".so" in line}
    except OSError:
        return
    for library in sorted(libraries):
        if _OMP.search(library):
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(library).omp_pause_resource_all(2)


def exercise() -> None:
    """Use the thread pools of numerical libraries once, so that a child that would hang in them hangs now."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        square = numpy.ones((160, 160))
        square @ square
    torch = sys.modules.get("torch")
    if torch is not None:
        with torch.no_grad():
            square = torch.ones(160, 160, dtype=torch.float32, device="cpu")
            (square @ square).sum()
            torch.ones(1 << 17).sum()


def open_files(folder: str) -> list[tuple[int, str, int, int]]:
    """Return (descriptor, path, flags, position) of the open files in the work folder."""
    files = []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd <= 2:
            continue
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")
            if path.startswith(folder + os.sep) and stat.S_ISREG(os.fstat(fd).st_mode):
                with open(f"/proc/self/fdinfo/{fd}") as file:
                    about = dict(line.split(":", 1) for line in file if ":" in line)
                flags = int(about["flags"].strip(), 8)
                files.append((fd, path, flags, int(about["pos"])))
    return files


def reopen(files: list[tuple[int, str, int, int]]) -> None:
    """Open files again by name, because a forked child shares file positions with its parent."""
    for fd, path, flags, position in files:
        fresh = os.open(path, flags & ~(os.O_CREAT | os.O_TRUNC | os.O_EXCL))
        os.lseek(fresh, position, os.SEEK_SET)
        os.dup2(fresh, fd, inheritable=False)
        os.close(fresh)


def mount_folder(folder: str, at: str) -> None:
    """Show `folder` at the path `at`, to this process only."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.unshare(_CLONE_NEWNS)
    failed = failed or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    # a parked parent may have mounted a folder there that no longer exists
    libc.umount2(at.encode(), _MNT_DETACH)
    failed = failed or libc.mount(folder.encode(), at.encode(), None, _MS_BIND, None)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), at)


def pickler(stream: Any, namespace: dict[str, Any]) -> Any:
    """Return a pickler whose functions keep the program's namespace as their globals."""
    import cloudpickle

    marker: dict[str, Any] = {"__name__": "__main__", "__rearview_namespace__": True}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> str | None:
            return "namespace" if value is marker or value is namespace else None

    own_pickler = Pickler(stream, protocol=5)
    own_pickler.globals_ref[id(namespace)] = marker
    return own_pickler


def unpickler(stream: Any, namespace: dict[str, Any]) -> Any:
    """Return an unpickler for files that `pickler` wrote."""
    import pickle

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            if pid != "namespace":
                raise pickle.UnpicklingError(f"unknown persistent id {pid!r}")
            return namespace

    return Unpickler(stream)


def random_states() -> dict[str, Any]:
    """Return the random states of Python, NumPy and PyTorch."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy is not None:
        states["numpy"] = numpy.get_state()
    if torch is not None:
        states["torch"] = torch.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the random states."""
    random.setstate(states["random"])
    if "numpy" in states:
        __import__("numpy").random.set_state(states["numpy"])
    if "torch" in states:
        __import__("torch").set_rng_state(states["torch"])


def library_settings() -> dict[str, Any]:
    """Return settings of libraries that are not part of the namespace."""
    settings: dict[str, Any] = {"environment": dict(os.environ)}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    pandas, plotting = sys.modules.get("pandas"), sys.modules.get("matplotlib")
    if numpy is not None:
        settings["numpy"] = (numpy.get_printoptions(), numpy.geterr())
    if torch is not None:
        settings["torch"] = (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
        )
    if pandas is not None:
        from pandas._config import config

        settings["pandas"] = _flat(config._global_config)  # noqa: SLF001
    if plotting is not None:
        settings["matplotlib"] = dict(plotting.rcParams.copy())
    return settings


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def apply_settings(settings: dict[str, Any]) -> None:
    """Apply the settings that `library_settings` returned."""
    import warnings

    os.environ.update(settings["environment"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "numpy" in settings:
            import numpy as np

            options, errors = settings["numpy"]
            np.set_printoptions(**options)
            np.seterr(**errors)
        if "torch" in settings:
            import torch

            dtype, threads, grad, deterministic = settings["torch"]
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.set_grad_enabled(grad)
            torch.use_deterministic_algorithms(deterministic)
        if "pandas" in settings:
            import pandas as pd

            for name, value in settings["pandas"].items():
                with contextlib.suppress(Exception):
                    if pd.get_option(name) != value:
                        pd.set_option(name, value)
        if "matplotlib" in settings:
            import matplotlib as mpl

            mpl.rcParams.update(settings["matplotlib"])
