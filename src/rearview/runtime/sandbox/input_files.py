"""Record which files a program reads, so that a replay can check whether they have changed.

Python calls audit hooks very often, for example at every `id()`. So Rearview has one hook for all its
listeners (`listen`), and the hook looks up the listeners of an event before it does anything else.
Files of the system, of installed libraries and in caches are not inputs.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from rearview.store.files import fingerprint
from rearview.store.project import FOLDER

Listener = Callable[[str, tuple[Any, ...]], None]
_listeners: dict[str, list[Listener]] = {}


class _OwnWork(threading.local):
    """Whether this thread is doing work of Rearview."""

    busy = False


_own = _OwnWork()


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Do not tell the listeners what this thread does meanwhile: it is Rearview's own work."""
    before, _own.busy = _own.busy, True
    try:
        yield
    finally:
        _own.busy = before


def listen(listener: Listener, *events: str) -> None:
    """Call `listener` with the name and arguments of these audit events, until the process ends."""
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
"""Environment variables with the cache folders of libraries."""
_CACHED = ("torchinductor_", "pymp-", f"ray{os.sep}", "joblib_", "matplotlib-", "dask", "wandb")
"""Start of names of temporary files that libraries share with other programs."""


def library_prefixes() -> tuple[str, ...]:
    """Return the folders of Python and its packages, and the system's."""
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.__file__).parent)}
    return (*(f"{folder.rstrip(os.sep)}{os.sep}" for folder in folders), *_SYSTEM)


def unrecorded_prefixes() -> tuple[str, ...]:
    """Return prefixes of paths whose files are neither saved with a run nor restored.

    They are shared with other programs, and a replay uses them as they are. Hidden folders in the
    user's home are among them: they hold settings and caches.
    """
    named = {os.environ[name] for name in _CACHES if os.environ.get(name)}
    home = os.path.expanduser("~")  # noqa: PTH111 - a path of text, for comparisons of text
    hidden = (f"{home.rstrip(os.sep)}{os.sep}.",) if home.strip(os.sep) else ()
    folders = [f"{os.path.abspath(folder)}{os.sep}" for folder in sorted(named)]  # noqa: PTH100
    shared = [f"{folder}{name}" for folder in temporary_prefixes() for name in _CACHED]
    return (*library_prefixes(), *folders, *hidden, *shared)


def temporary_prefixes() -> tuple[str, ...]:
    """Return the folders of temporary files."""
    named = [os.environ[name] for name in _TEMPORARY if os.environ.get(name)]
    folders = named or ["/tmp", "/var/tmp"]  # noqa: S108 - not to write there
    return tuple(f"{os.path.abspath(folder)}{os.sep}" for folder in folders)  # noqa: PTH100


MOST = 5000
"""Files recorded at most; a larger data set is not described file by file."""


class InputFiles:
    """The data files that this process opened for reading and did not write itself."""

    def __init__(self, started: float) -> None:
        self.active = True
        self._started = started
        """When the run started, in seconds since the epoch."""
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
        """Return size, time and hash of each file that was read, as they are now.

        Files that it `created` are not inputs: it wrote them before it read them. Nor are files
        that changed after it started: C code of the program may have written them, or a rename.
        """
        self.active = False
        facts: dict[str, list[Any]] = {}
        for name in self._read:
            path = os.path.realpath(name)
            skip = name in self._written or FOLDER in path or path.endswith((".py", ".pyc", ".so"))
            if skip or path in created or path.startswith(self._ignored):
                continue
            try:
                about = os.stat(path)  # noqa: PTH116 - a path of any spelling
                if stat.S_ISREG(about.st_mode) and about.st_ctime <= self._started:
                    facts[path] = list(fingerprint(Path(path)))
            except OSError:
                continue
        return facts
