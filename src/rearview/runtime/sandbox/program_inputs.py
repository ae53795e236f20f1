"""Record which files and environment variables a program reads, so that a replay has the same inputs.

Files: a replay checks whether the recorded files have changed since. Python calls audit hooks very often, for example
at every `id()`. So Rearview has one hook for all its listeners (`listen`), and the hook looks up the listeners of an
event before it does anything else. Files of the system, of installed libraries and in caches are not inputs.

Environment variables: a replay starts with the recorded values. `os.environ` calls its function `encodekey` for each
name that is looked up. This module replaces `encodekey`, not `os.environ`, so that the traceback of a missing
variable has no frame of Rearview. The replacement must not refer to objects of Rearview, because `os.environ` may be
part of the program's state.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from rearview.model.program_environment_variables import (
    Environment,
    VariableClass,
    class_of,
    is_of_session,
    is_read_by_libraries,
    is_restored,
)
from rearview.runtime.sandbox.entropy import after_import
from rearview.store.project import FOLDER
from rearview.store.recorded_inputs import append_environment, fingerprint, read_environment

Listener = Callable[[str, tuple[Any, ...]], None]
_listeners: dict[str, list[Listener]] = {}


class _OwnWork(threading.local):
    """`busy` says, for each thread, whether it runs code of Rearview, whose inputs are not the program's."""

    busy = False


_own = _OwnWork()


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """While the body runs, call no listeners for audit events of this thread, because Rearview itself causes them."""
    before, _own.busy = _own.busy, True
    try:
        yield
    finally:
        _own.busy = before


def listen(listener: Listener, *events: str) -> None:
    """Call `listener` with (name, arguments) at each audit event in `events`, until the process ends."""
    if not _listeners:
        sys.addaudithook(_call_listeners)
    for event in events:
        _listeners.setdefault(event, []).append(listener)


def _call_listeners(
    event: str,
    args: tuple[Any, ...],
    listening: Callable[[str], list[Listener] | None] = _listeners.get,
) -> None:
    listeners = listening(event)
    if listeners is not None and not _own.busy:
        for listener in listeners:
            listener(event, args)


_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/run/")
_TEMPORARY = ("TMPDIR", "TEMP", "TMP")
_CACHES = (
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "KERAS_HOME"),
    *("MPLCONFIGDIR", "PYTHONPYCACHEPREFIX"),
)
"""Environment variables whose values are cache folders of libraries."""
_CACHED = ("torchinductor_", "pymp-", f"ray{os.sep}", "joblib_", "matplotlib-", "dask", "wandb")
"""Prefixes of names of temporary files that libraries share with other programs."""


def library_prefixes() -> tuple[str, ...]:
    """Return the folders of Python, of installed packages and of the system, each with a slash at its end."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.__file__).parent)}
    # packages of another environment on which this environment is based
    folders |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    return (*(f"{folder.rstrip(os.sep)}{os.sep}" for folder in folders), *_SYSTEM)


def unrecorded_prefixes() -> tuple[str, ...]:
    """Return prefixes of paths whose files are neither saved with a run nor restored.

    Other programs share these files, and a replay uses their present content. Hidden folders in the user's home folder
    are included, because they contain settings and caches.
    """
    cache_folders = {os.environ[name] for name in _CACHES if os.environ.get(name)}
    user_folder = os.path.expanduser("~")  # noqa: PTH111 - text, to be compared with text
    hidden = (f"{user_folder.rstrip(os.sep)}{os.sep}.",) if user_folder.strip(os.sep) else ()
    folders = [f"{os.path.abspath(folder)}{os.sep}" for folder in sorted(cache_folders)]  # noqa: PTH100
    shared = [f"{folder}{name}" for folder in temporary_prefixes() for name in _CACHED]
    return (*library_prefixes(), *folders, *hidden, *shared)


def temporary_prefixes() -> tuple[str, ...]:
    """Return the folders of temporary files, each with a slash at its end."""
    from_environment = [os.environ[name] for name in _TEMPORARY if os.environ.get(name)]
    folders = from_environment or ["/tmp", "/var/tmp"]  # noqa: S108 - nothing is written to them
    return tuple(f"{os.path.abspath(folder)}{os.sep}" for folder in folders)  # noqa: PTH100


MOST = 5000
"""Number of read files after which no further files, such as those of a large data set, are recorded."""


class InputFiles:
    """Records the data files that this process opens for reading and has not written itself."""

    def __init__(self, started: float) -> None:
        self.active = True
        self._started = started
        """Time at which the run started, in seconds since 1970."""
        self._read: dict[str, None] = {}
        self._written: set[str] = set()
        self._pid = os.getpid()
        self._ignored = library_prefixes()
        listen(self._notice, "open")

    def _notice(self, _event: str, args: tuple[Any, ...]) -> None:
        if not self.active or len(self._read) >= MOST:
            return
        path, mode, flags = args
        if type(path) is bytes:
            path = os.fsdecode(path)
        if type(path) is not str or path.startswith(self._ignored) or FOLDER in path:
            return
        if not path.startswith("/"):
            path = f"{os.getcwd()}/{path}"  # noqa: PTH109 - called for every open: no objects
        if mode in {"r", "rb"} or (mode is None and not int(flags or 0) & 3):
            self._read.setdefault(path)
        else:
            self._written.add(path)

    def facts(self, created: Collection[str] = ()) -> dict[str, list[Any]]:
        """Return path -> [size, time, hash] at present, for each file that was read; stop recording.

        Files in `created`, which the program created itself, are no inputs. Files that changed after the run started
        are left out, too: C code of the program, or a rename, may have changed them.
        """
        self.active = False
        facts: dict[str, list[Any]] = {}
        for name in self._read:
            path = os.path.realpath(name)
            skip = name in self._written or FOLDER in path or path.endswith((".py", ".pyc", ".so"))
            if skip or path in created or path.startswith(self._ignored):
                continue
            try:
                status = os.stat(path)  # noqa: PTH116 - a path of any spelling
                if stat.S_ISREG(status.st_mode) and status.st_ctime <= self._started:
                    facts[path] = list(fingerprint(Path(path)))
            except OSError:
                continue
        return facts


_FORWARDING = frozenset(
    {
        *("os", "collections.abc", "subprocess", "posixpath", "pathlib", "tempfile", "shutil"),
        __name__,
    }
)
"""Modules that read environment variables on behalf of their caller."""
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
"""Audit events of starting a process; except for `os.system`, the last argument is its environment, or None."""


_reading: list[EnvironmentReads] = []
"""At most one object, which records the reads of environment variables in this process."""
_encode: Any = os.environ.encodekey
_encode_bytes: Any = os.environb.encodekey


def _encode_noted(key: Any) -> Any:
    if type(key) is str and _reading:
        _reading[0].record(key, sys._getframe(1))
    return _encode(key)


def _encode_bytes_noted(key: Any) -> Any:
    if type(key) is bytes and _reading:
        _reading[0].record(os.fsdecode(key), sys._getframe(1))
    return _encode_bytes(key)


def _patch_lookups() -> None:
    os.environ.encodekey = _encode_noted
    os.environb.encodekey = _encode_bytes_noted


def names_read() -> set[str]:
    """Return the names of the environment variables that the program has read so far; empty if not recorded."""
    return set(_reading[0]._recorded_names) if _reading else set()


def patch_as_recorded(folder: Path) -> None:
    """Patch `os.environ` if the run in `folder` did so: saved states may contain the patched `os.environ`."""
    if read_environment(folder) is not None:
        _patch_lookups()


class EnvironmentReads:
    """Records the environment variables that the program reads, each at once, in the folder of the run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start = dict(os.environ)
        """Environment variables with which the program was started."""
        recorded = read_environment(folder)
        self._recorded_names = (
            {*recorded.values, *recorded.secrets} if recorded is not None else set()
        )
        self._whole = recorded is not None and recorded.whole
        if recorded is None:
            self._write([name for name in self._start if is_read_by_libraries(name)], always=True)

    def install(self) -> None:
        """Record reads of environment variables from now on."""
        _patch_lookups()
        _reading.append(self)
        self._watch_listing(type(os.environ))
        listen(self._process_started, *_STARTS)
        after_import("multiprocessing.util", self._watch_spawn)

    def read_all(self) -> None:
        """Record all environment variables as read, because the program has listed or passed on all of them."""
        if not self._whole:
            self._whole = True
            names = [name for name in self._start if class_of(name) is not VariableClass.TODAY]
            self._write(names, always=True, whole=True)

    def _watch_listing(self, mapping: Any) -> None:
        real = mapping.__iter__

        @functools.wraps(real)
        def iterate(environ: Any) -> Any:
            if not self._whole and not _called_by_rearview(sys._getframe(1)):
                self.read_all()
            return real(environ)

        mapping.__iter__ = iterate

    def record(self, name: str, frame: FrameType) -> None:
        """Record that `frame` reads the environment variable `name`, unless Rearview itself does."""
        if name not in self._recorded_names and not _called_by_rearview(frame):
            if is_of_session(name):
                self._recorded_names.add(name)
            else:
                self._write([name])

    def _write(self, names: list[str], *, always: bool = False, whole: bool = False) -> None:
        values: dict[str, str | None] = {}
        secrets: dict[str, bool] = {}
        for name in names:
            value = self._start.get(name)
            if name in self._recorded_names or is_of_session(name) or self._is_implied(name, value):
                continue
            if class_of(name, value) is VariableClass.SECRET:
                secrets[name] = value is not None
            else:
                values[name] = value
        self._recorded_names.update(names)
        if not (values or secrets or always):
            return
        with contextlib.suppress(OSError):  # the store was removed; the recorder reports that
            append_environment(self._folder, Environment(values, secrets, whole))

    def _is_implied(self, name: str, value: str | None) -> bool:
        """Return True if a variable that was not set need not be written, because a missing line says so already."""
        return value is None and (self._whole or is_read_by_libraries(name)) and is_restored(name)

    def _process_started(self, event: str, args: tuple[Any, ...]) -> None:
        """Record all environment variables as read if the program starts a process that inherits them."""
        has_own_environment = event != "os.system" and args[-1] is not None
        if (
            not self._whole
            and not has_own_environment
            and not _called_by_rearview(sys._getframe(1))
        ):
            self.read_all()

    def _watch_spawn(self, util: ModuleType) -> None:
        real = util.spawnv_passfds

        @functools.wraps(real)
        def spawnv_passfds(*args: Any, **kwargs: Any) -> Any:
            self.read_all()
            return real(*args, **kwargs)

        vars(util)["spawnv_passfds"] = spawnv_passfds


def _called_by_rearview(frame: FrameType | None) -> bool:
    """Return True if `frame` runs for Rearview itself, not for the program or one of its libraries."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in _FORWARDING:
            return name.startswith("rearview.")
        frame = frame.f_back
    return True
