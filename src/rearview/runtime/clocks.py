"""Make the clock repeatable: a replay is told the times that the run was told.

Nearly every training script keeps a `t0 = time.time()`. Were a replay told its own time, every
state that holds one would differ. So each reading of the main thread is kept, and a replay gets the
same readings in the same order; how many there were is part of the state.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rearview.runtime.entropy import after_import

FILE = "clock.bin"
"""Readings of a run in its folder, eight bytes each."""
FLOATS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
WAITERS = (
    *("queue", "selectors", "subprocess", "multiprocessing.connection", "multiprocessing.queues"),
    *("multiprocessing.synchronize", "multiprocessing.pool", "multiprocessing.managers"),
    *("multiprocessing.popen_fork", "concurrent.futures._base", "asyncio.base_events"),
)
"""Modules that look at the clock while they wait for others: how often is a matter of timing."""
_FLUSH = 512


class Clock:
    """The readings of one run."""

    def __init__(self, file: Path, *, replays: bool) -> None:
        self.place = [0]
        """How many readings were taken: part of the state, so it is a plain list."""
        self._file = file
        self._replays = replays
        self._kept = file.read_bytes() if replays and file.is_file() else b""
        self._fresh: list[bytes] = []
        if not replays:
            file.unlink(missing_ok=True)  # of an attempt that left nothing to go on from
        self._thread = threading.get_ident()
        self._pid = os.getpid()

    def install(self) -> None:
        """Let the functions of `time` speak through this clock; our own code goes on with the real."""
        patched = time  # the name is exchanged in this module too
        real = types.ModuleType("time")
        vars(real).update(vars(patched))
        told: dict[int, Any] = {}
        for name in FLOATS:
            for each, form in ((name, "<d"), (f"{name}_ns", "<q")):
                plain = getattr(patched, each)
                setattr(patched, each, self._reading(plain, struct.Struct(form)))
                told[id(getattr(patched, each))] = plain

        def spare(module: types.ModuleType) -> None:
            for name, value in list(vars(module).items()):
                if value is patched:
                    vars(module)[name] = real
                elif id(value) in told:
                    vars(module)[name] = told[id(value)]

        for name, module in list(sys.modules.items()):
            if name.startswith("rearview."):
                spare(module)
        for name in WAITERS:
            after_import(name, spare)

    def _reading(self, real: Callable[[], Any], form: struct.Struct) -> Callable[[], Any]:
        own, place = threading.get_ident, self.place

        def read() -> Any:
            if own() != self._thread:
                return real()
            at = place[0] * 8
            place[0] += 1
            if at + 8 <= len(self._kept):
                return form.unpack_from(self._kept, at)[0]
            now = real()
            if not self._replays:
                self._fresh.append(form.pack(now))
                if len(self._fresh) >= _FLUSH:
                    self.flush()
            return now

        read.__module__, read.__name__ = "time", real.__name__
        read.__qualname__ = real.__name__  # so that it is pickled as `time.time` is
        read.__doc__ = real.__doc__
        return read

    def flush(self) -> None:
        """Write the readings that are not on disk yet."""
        fresh, self._fresh = self._fresh, []
        if fresh and os.getpid() == self._pid:
            with open(self._file, "ab") as file:  # noqa: PTH123 - before a replay redirects it
                file.write(b"".join(fresh))

    def go_on(self) -> None:
        """Record from here: a run that was stopped has come to where it goes on."""
        self._replays = False
        self._kept = self._kept[: self.place[0] * 8]
        self._file.write_bytes(self._kept)
