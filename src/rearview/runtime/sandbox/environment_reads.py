"""Record which environment variables a program reads, so that a replay starts with the same values.

`os.environ` encodes each name that is looked up, by a function that it holds. This module replaces
that function: then the traceback of a missing variable has no frame of Rearview. The replacement must
not refer to objects of Rearview, because `os.environ` may be part of the program's state.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from rearview.model.restored_environment import (
    Environment,
    VariableClass,
    class_of,
    is_of_session,
    is_read_by_libraries,
    is_restored,
)
from rearview.runtime.sandbox.entropy import after_import
from rearview.runtime.sandbox.input_files import listen
from rearview.store.recorded_inputs import append_environment, read_environment

_FORWARDING = frozenset(
    {
        *("os", "collections.abc", "subprocess", "posixpath", "pathlib", "tempfile", "shutil"),
        *(__name__, "rearview.runtime.sandbox.input_files"),
    }
)
"""Modules that read a variable on behalf of their caller."""
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
"""Audit events of a process that is started; the last argument is its environment, if it has its own."""


_reading: list[EnvironmentReads] = []
_encode: Any = os.environ.encodekey
_encode_bytes: Any = os.environb.encodekey


def _encode_noted(key: Any) -> Any:
    if type(key) is str and _reading:
        _reading[0].note(key, sys._getframe(1))
    return _encode(key)


def _encode_bytes_noted(key: Any) -> Any:
    if type(key) is bytes and _reading:
        _reading[0].note(os.fsdecode(key), sys._getframe(1))
    return _encode_bytes(key)


def _patch_lookups() -> None:
    os.environ.encodekey = _encode_noted
    os.environb.encodekey = _encode_bytes_noted


def names_read() -> set[str]:
    """Return the variables that this process has read so far."""
    return set(_reading[0]._noted) if _reading else set()


def patch_as_recorded(folder: Path) -> None:
    """Patch `os.environ` as the recording did: it is part of the state of a program that refers to it."""
    if read_environment(folder) is not None:
        _patch_lookups()


class EnvironmentReads:
    """The variables that this process reads, written to the folder of its run at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start = dict(os.environ)
        """The environment that the program was started with."""
        recorded = read_environment(folder)
        self._noted = {*recorded.values, *recorded.secrets} if recorded is not None else set()
        self._whole = recorded is not None and recorded.whole
        if recorded is None:
            self._write([name for name in self._start if is_read_by_libraries(name)], always=True)

    def install(self) -> None:
        """Record reads from now on."""
        _patch_lookups()
        _reading.append(self)
        self._watch_listing(type(os.environ))
        listen(self._started, *_STARTS)
        after_import("multiprocessing.util", self._watch_spawn)

    def read_all(self) -> None:
        """Record every variable as read."""
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

    def note(self, name: str, frame: FrameType) -> None:
        """Record that a frame looks up a variable."""
        if name not in self._noted and not _called_by_rearview(frame):
            if is_of_session(name):
                self._noted.add(name)
            else:
                self._write([name])

    def _write(self, names: list[str], *, always: bool = False, whole: bool = False) -> None:
        values: dict[str, str | None] = {}
        secrets: dict[str, bool] = {}
        for name in names:
            value = self._start.get(name)
            if name in self._noted or is_of_session(name) or self._is_implied(name, value):
                continue
            if class_of(name, value) is VariableClass.SECRET:
                secrets[name] = value is not None
            else:
                values[name] = value
        self._noted.update(names)
        if not (values or secrets or always):
            return
        with contextlib.suppress(OSError):  # the store was removed; the recorder reports that
            append_environment(self._folder, Environment(values, secrets, whole))

    def _is_implied(self, name: str, value: str | None) -> bool:
        """Return True if no line is needed: readers assume that the variable was not set."""
        return value is None and (self._whole or is_read_by_libraries(name)) and is_restored(name)

    def _started(self, event: str, args: tuple[Any, ...]) -> None:
        own = event != "os.system" and args[-1] is not None
        if not self._whole and not own and not _called_by_rearview(sys._getframe(1)):
            self.read_all()

    def _watch_spawn(self, util: ModuleType) -> None:
        real = util.spawnv_passfds

        @functools.wraps(real)
        def spawnv_passfds(*args: Any, **kwargs: Any) -> Any:
            self.read_all()
            return real(*args, **kwargs)

        vars(util)["spawnv_passfds"] = spawnv_passfds


def _called_by_rearview(frame: FrameType | None) -> bool:
    """Return True if Rearview itself reads a variable, not the program or its libraries."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in _FORWARDING:
            return name.startswith("rearview.")
        frame = frame.f_back
    return True
