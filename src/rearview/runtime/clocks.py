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

FILE = "clock.bin"
"""Readings of a run in its folder, eight bytes each."""
FLOATS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_FLUSH = 512
_time = time  # the name `time` of this module is exchanged too


class Clock:
    """The readings of one run."""

    def __init__(self, file: Path, *, replays: bool) -> None:
        self.place = [0]
        """How many readings were taken: part of the state, so it is a plain list."""
        self._file = file
        self._replays = replays
        self._kept = file.read_bytes() if replays and file.is_file() else b""
        self._fresh: list[bytes] = []
        self._thread = threading.get_ident()
        self._pid = os.getpid()

    def install(self) -> None:
        """Let the functions of `time` speak through this clock; our own code goes on with the real."""
        real = types.ModuleType("time")
        vars(real).update(vars(_time))
        for name, module in list(sys.modules.items()):
            if name.startswith("rearview.") and vars(module).get("time") is _time:
                vars(module)["time"] = real
        for name in FLOATS:
            for told, form in ((name, "<d"), (f"{name}_ns", "<q")):
                setattr(_time, told, self._reading(getattr(_time, told), struct.Struct(form)))

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
