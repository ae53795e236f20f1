"""Inspect, save and restore parts of a cell process's state that a fork or a file of variables would lose.

This module runs inside the cell process and imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import io
import logging
import os
import random
import re
import signal
import stat
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any

_FORBID_FORK = {
    "polars": "polars keeps a thread pool",
    "jax": "JAX keeps threads",
    "tensorflow": "TensorFlow keeps threads",
    "ray": "Ray is connected",
    "pyspark": "Spark is connected",
    "cupy": "CuPy holds a device",
    "grpc": "gRPC keeps threads",
}
"""Module name -> reason why a process that has imported the module must not be forked."""
_SHARED = re.compile(r"^\S+ rw-s\S* \S+ \S+ \S+\s+(.*)$", re.MULTILINE)
"""Matches a line of `/proc/self/maps` about writable shared memory; the group is the name of the mapped file."""
_SEMAPHORE = "/dev/shm/sem."  # noqa: S108 - only compared with names
_OMP = re.compile(r"/lib(?:g|i|)omp[^/]*\.so[^/]*$")
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 4096, 16384, 1 << 18
_MNT_DETACH = 2


END_SECONDS = 1.0
"""Seconds to wait for threads to end: a worker pool may end its threads some time after returning its results."""


class CannotKeepState(Exception):  # noqa: N818 - it says what happened
    """Raised if the state of a process cannot be kept by a fork or stored in a file; the message says why."""


def end_idle_worker_pools() -> None:
    """End joblib's worker processes and tqdm's thread, which these libraries start again when they need them."""
    with contextlib.suppress(Exception):
        executor = sys.modules["joblib.externals.loky.reusable_executor"]._executor  # noqa: SLF001
        if executor is not None:
            executor.shutdown(wait=True)
    with contextlib.suppress(Exception):
        monitor = sys.modules["tqdm.std"].tqdm.monitor
        if monitor is not None:
            monitor.exit()


def reason_against_fork(own_socket: int, folder: str) -> str:
    """Return the reason why this process must not be forked, or '' if it may be forked.

    `own_socket` is the descriptor of the connection to the controlling process, `folder` the work folder.
    """
    threads = [each for each in threading.enumerate() if each is not threading.current_thread()]
    deadline = time.monotonic() + END_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            return f"thread {thread.name!r} is running"
    for name, why in _FORBID_FORK.items():
        if name in sys.modules:
            return why
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "PyTorch holds a CUDA device"
    children = ""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read().strip()
    if children:
        alive = [
            pid
            for pid in children.split()
            if _process_status(pid) not in {"Z", "X", ""} and not _is_tracker(pid)
        ]
        if alive:
            processes = "a process" if len(alive) == 1 else f"{len(alive)} processes"
            return f"it has started {processes} still running"
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:") and int(fd) != own_socket:
                return "it has an open network connection"
    return _shared_memory_reason() or _shared_file_reason(folder)


def _is_tracker(pid: str) -> bool:
    """Return True if `pid` is a resource tracker of `multiprocessing`, which parent and child of a fork may share."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" in file.read()
    except OSError:
        return False


def _shared_memory_reason() -> str:
    """Return a sentence about writable memory that a forked child would share with this process, or '' if none."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        for name in _SHARED.findall(file.read()):
            if not name.startswith(_SEMAPHORE):  # parent and child may share a semaphore
                return f"it shares memory: {name or 'without a name'}"
    return ""


def _shared_file_reason(folder: str) -> str:
    """Return a sentence about an open file that a forked child could not reopen safely, or '' if there is none."""
    own_files: set[int] = set()
    for file in gc.get_objects():
        if isinstance(file, io.FileIO):
            with contextlib.suppress(ValueError):
                own_files.add(file.fileno())
    for fd, target in _open_descriptors():
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                continue
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            writes = flags & os.O_ACCMODE != os.O_RDONLY
            if not _same_file(target, status):
                return f"it has a file open that was removed: {target}"
            if not target.startswith(folder + os.sep):
                if writes:
                    return f"it writes to a file outside the folder: {target}"
            elif writes and fd not in own_files:
                return f"a library has {target} open"
    return ""


def _open_descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                yield int(name), os.readlink(f"/proc/self/fd/{name}")


def _same_file(path: str, status: os.stat_result) -> bool:
    try:
        current_status = os.stat(path)
    except OSError:
        return False
    return (current_status.st_dev, current_status.st_ino) == (status.st_dev, status.st_ino)


def reason_against_storing(folder: str, namespace: dict[str, Any]) -> str:
    """Return a reason why storing the variables would not store the whole state, or '' if no reason is known."""
    root = logging.getLogger()
    if root.handlers:
        return "logging was set up, which a stored namespace does not hold"
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        shared = [name for name in _SHARED.findall(file.read()) if name.startswith(folder + os.sep)]
        if shared:
            return f"{shared[0]} is mapped into memory"
    for number in signal.valid_signals() - {signal.SIGINT}:
        with contextlib.suppress(ValueError, OSError):
            if isinstance(signal.getsignal(number), types.FunctionType):
                return f"it has a function for the signal {signal.Signals(number).name}"
    for module in list(sys.modules.values()):
        variables = getattr(module, "__dict__", None)
        label = getattr(module, "__name__", "")
        if variables is None or variables is namespace or label == "__main__":
            continue
        for name, value in list(variables.items()):
            if isinstance(value, types.FunctionType) and value.__globals__ is namespace:
                return f"the program has replaced {label}.{name}"
    return ""


def _process_status(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def pause_openmp() -> None:
    """End the threads of every OpenMP library in this process; the libraries start new threads when needed.

    If threads were running at a fork, the child would wait forever for them, because they exist only in the parent.
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


def use_thread_pools() -> None:
    """Compute with NumPy and PyTorch, to test their thread pools: if a forked child hangs here, its fork has failed."""
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


def list_open_files() -> list[tuple[int, str, int, int]]:
    """Return (descriptor, file path, flags of `open`, position in bytes) of every open regular file."""
    files = []
    for fd, path in _open_descriptors():
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.fstat(fd).st_mode) and not path.startswith("/memfd:"):
                with open(f"/proc/self/fdinfo/{fd}") as file:
                    fields = dict(line.split(":", 1) for line in file if ":" in line)
                flags = int(fields["flags"].strip(), 8)
                files.append((fd, path, flags, int(fields["pos"])))
    return files


def reopen(files: list[tuple[int, str, int, int]]) -> None:
    """Reopen `files`, as `list_open_files` returned them: a forked child shares file positions with its parent."""
    still_open = {fd for fd, _ in _open_descriptors()}
    for fd, path, flags, position in files:
        if fd not in still_open:
            continue
        fresh = os.open(path, flags & ~(os.O_CREAT | os.O_TRUNC | os.O_EXCL))
        os.lseek(fresh, position, os.SEEK_SET)
        os.dup2(fresh, fd, inheritable=False)
        os.close(fresh)


def mount_folder(folder: str, path: str) -> None:
    """Mount `folder` at `path`, so that only this process sees the mount; raise OSError if that fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.unshare(_CLONE_NEWNS)
    failed = failed or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    # the parent of this process may have mounted a folder at `path` that was removed since
    libc.umount2(path.encode(), _MNT_DETACH)
    failed = failed or libc.mount(folder.encode(), path.encode(), None, _MS_BIND, None)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)


def pickler(stream: Any, namespace: dict[str, Any]) -> Any:
    """Return a pickler that stores functions of the program with a reference to `namespace` as their globals."""
    import cloudpickle

    marker: dict[str, Any] = {"__name__": "__main__", "__rearview_namespace__": True}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: Any) -> str | None:
            return "namespace" if value is marker or value is namespace else None

    own_pickler = Pickler(stream, protocol=5)
    own_pickler.globals_ref[id(namespace)] = marker
    return own_pickler


def unpickler(stream: Any, namespace: dict[str, Any]) -> Any:
    """Return an unpickler for data that `pickler` wrote; functions get `namespace` as their globals."""
    import pickle

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            if pid != "namespace":
                raise pickle.UnpicklingError(f"unknown persistent id {pid!r}")
            return namespace

    return Unpickler(stream)


def random_states() -> dict[str, Any]:
    """Return library name -> random state, for Python's `random` and, if imported, NumPy and PyTorch (CPU)."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy is not None:
        states["numpy"] = numpy.get_state()
    if torch is not None:
        states["torch"] = torch.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the random states that `random_states` returned."""
    random.setstate(states["random"])
    if "numpy" in states:
        __import__("numpy").random.set_state(states["numpy"])
    if "torch" in states:
        __import__("torch").set_rng_state(states["torch"])


def process_settings(folder: str) -> dict[str, Any]:
    """Return environment variables, `sys.path`, current folder (relative to `folder`), umask and recursion limit."""
    mask = os.umask(0)
    os.umask(mask)
    return {
        "environment": dict(os.environ),
        "path": list(sys.path),
        "cwd": os.path.relpath(os.getcwd(), folder),
        "umask": mask,
        "recursion": sys.getrecursionlimit(),
    }


def apply_process_settings(settings: dict[str, Any], folder: str) -> None:
    """Apply the settings that `process_settings` returned."""
    os.environ.update(settings["environment"])
    sys.path[:] = settings["path"]
    os.chdir(os.path.join(folder, settings["cwd"]))
    os.umask(settings["umask"])
    sys.setrecursionlimit(settings["recursion"])


def module_state(module: types.ModuleType) -> dict[str, Any]:
    """Return the variables of a module of the project, and the attributes of functions and classes that it defines."""
    values: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("__") or isinstance(value, types.ModuleType):
            continue
        is_own = getattr(value, "__module__", None) == module.__name__
        if isinstance(value, types.FunctionType):
            if is_own:
                attributes[name] = (vars(value), value.__defaults__, value.__kwdefaults__)
        elif isinstance(value, type):
            if is_own:
                attributes[name] = {
                    key: data
                    for key, data in vars(value).items()
                    if not key.startswith("__") and not hasattr(data, "__get__")
                }
        else:
            values[name] = value
    return {"values": values, "inside": attributes}


def restore_module(module: types.ModuleType, state: dict[str, Any]) -> None:
    """Set the variables and attributes that `module_state` returned."""
    vars(module).update(state["values"])
    for name, data in state["inside"].items():
        owner = getattr(module, name, None)
        if isinstance(owner, types.FunctionType) and isinstance(data, tuple):
            vars(owner).update(data[0])
            owner.__defaults__, owner.__kwdefaults__ = data[1], data[2]
        elif isinstance(owner, type) and isinstance(data, dict):
            for key, value in data.items():
                # members of an enumeration cannot be set
                with contextlib.suppress(AttributeError, TypeError):
                    setattr(owner, key, value)


def library_settings() -> dict[str, Any]:
    """Return library -> global settings, for `warnings` and the imported ones of NumPy, PyTorch, pandas and others."""
    settings: dict[str, Any] = {"warnings": list(warnings.filters)}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    pandas, plotting = sys.modules.get("pandas"), sys.modules.get("matplotlib")
    sklearn = sys.modules.get("sklearn")
    if sklearn is not None:
        settings["sklearn"] = sklearn.get_config()
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
        if "sklearn" in settings:
            import sklearn

            sklearn.set_config(**settings["sklearn"])
    filters: Any = warnings.filters
    filters[:] = settings["warnings"]
    getattr(warnings, "_filters_mutated", lambda: None)()
