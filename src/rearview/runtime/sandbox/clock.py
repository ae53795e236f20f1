"""Record the times that a program reads from the clock, and return the recorded times in a replay.

Nearly every training script has a `t0 = time.time()`. If a replay read the present time, every state with such a
variable would differ from the recorded state. So each reading on the main thread is recorded, and a replay gets the
recorded readings in the same order; the number of readings so far is part of the state. `datetime.now()`,
`time.strftime()` and similar functions read the clock in C; patches let them use the recorded readings, too.
"""

from __future__ import annotations

import ctypes
import datetime as dt
import functools
import gc
import os
import struct
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from rearview.runtime.sandbox.entropy import (
    FRONT_END,
    after_import,
    called_by_tracker,
    is_standard,
    library_being_loaded,
)
from rearview.state.code_lookup import PatchedBuiltin
from rearview.state.displays_and_trackers import BARS
from rearview.store import recorded_inputs
from rearview.store.create_files import open_file
from rearview.store.recorded_inputs import read_clock, remove_clock, write_clock_check

FILE = recorded_inputs.CLOCK_FILE

ROOT = "$clock"
"""Name under which a state contains the number of clock readings."""
RULE = 2
"""Version of the rule that decides which clock readings are recorded, because they belong to the program. Rule 1, which
older runs have, also recorded readings by progress bars, and by libraries that were imported inside a loop."""
FLOATS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
WITH_DEFAULT_TIME = (("localtime", 0), ("gmtime", 0), ("ctime", 0), ("strftime", 1), ("asctime", 0))
"""(function of `time` that uses the current time if no time is passed, position of the argument for the time)."""
WAITERS = (
    *("queue", "selectors", "subprocess", "multiprocessing.connection", "multiprocessing.queues"),
    *("multiprocessing.synchronize", "multiprocessing.pool", "multiprocessing.managers"),
    *("multiprocessing.popen_fork", "concurrent.futures._base", "asyncio.base_events"),
)
"""Modules that get the real clock: while they wait for other threads, timing decides how often they read it."""
TIMERS = (
    *("jax.", "torch._dynamo.", "torch._inductor.", "torch._functorch.", "numba.", "triton."),
    *("joblib.", "loky.", "multiprocessing.", "concurrent.", "dask.", "distributed.", "ray."),
    *("IPython.", "ipykernel.", "jupyter_client.", "tornado.", "traitlets.", "zmq.", "pexpect."),
)
"""Prefixes of modules whose readings are not recorded, because a replay would read a different number of times: they
compile at another point if a replay starts in the middle, or wait for other processes or a front end."""
between_cells: list[Callable[[], bool]] = []
"""In a notebook kernel, one function that returns True if no cell is running, so that only the kernel reads the clock;
empty in a script."""
_TIMEIT = "<magic-timeit>"
"""File name that IPython gives to the code that `%timeit` compiles."""
_FLUSH = 512
"""Number of unwritten readings at which they are written to the file."""
_DEPRECATED = (
    "datetime.datetime.utcnow() is deprecated and scheduled for removal in a future version. Use "
    "timezone-aware objects to represent datetimes in UTC: datetime.datetime.now(datetime.UTC)."
)


class Clock:
    """Records the clock readings of a run, or repeats them in a replay."""

    def __init__(self, file: Path, *, replays: bool, rule: int = RULE) -> None:
        self.place = [0]
        """One number: how many readings there were so far. A list, so that a restored state can change it in place."""
        self._file = file
        self._rule = rule
        self._replays = replays
        self._recorded = read_clock(file) if replays else b""
        self._sum = crc32(self._recorded)
        self._unwritten: list[bytes] = []
        if not replays:
            remove_clock(file)  # written by an attempt that saved no checkpoint
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self.readers: set[str] = set()
        """In a replay: names of the modules that read the clock after all recorded readings were used up."""
        self.listeners: list[Callable[[str], None]] = []
        """At most one function, called at each reading outside imports with the name of the module that reads."""
        self.in_loop: Callable[[], bool] = lambda: False
        """Function that returns True if a loop of the program is running."""

    def follow(self, file: Path, rule: int) -> None:
        """Repeat the readings that another run recorded in `file` by `rule`; called after the fork server forked."""
        self._file, self._rule = file, rule
        self._recorded = read_clock(file)
        self._sum = crc32(self._recorded)
        self._pid = os.getpid()

    def _is_unrepeatable(self, frame: types.FrameType | None) -> bool:
        """Return True if the reading by `frame` is made by a progress bar, or during an import inside a loop.

        A progress bar reads the clock more or less often, depending on how fast it is redrawn. In a replay that starts in
        the middle, an import inside a loop comes at another point. Readings during imports before the first loop belong
        to the program, because it may compute with them.
        """
        while frame is not None and frame.f_globals is _OURS:
            frame = frame.f_back
        if frame is None:
            return False
        if _is_bar(str(frame.f_globals.get("__name__"))):
            return True
        return self.in_loop() and bool(library_being_loaded(frame))

    def install(self) -> None:
        """Patch the clock functions of `time` and `datetime`; Rearview's own modules keep the real functions."""
        patched = time  # `use_real_functions` below replaces the global name
        real = types.ModuleType("time")
        vars(real).update(vars(patched))
        patches_by_id: dict[int, Any] = {}
        for name in FLOATS:
            for function_name, form in ((name, "<d"), (f"{name}_ns", "<q")):
                plain = getattr(patched, function_name)
                setattr(patched, function_name, self._patched_reader(plain, struct.Struct(form)))
                patches_by_id[id(getattr(patched, function_name))] = plain
        for name, position in WITH_DEFAULT_TIME:
            plain = getattr(patched, name)
            setattr(
                patched, name, _with_default_time(plain, position, patched.time, real.localtime)
            )
            patches_by_id[id(getattr(patched, name))] = plain
        patch_datetime(patched.time_ns)

        def use_real_functions(module: types.ModuleType) -> None:
            """Replace the patched functions and `time` by the real ones in the global variables of `module`."""
            for name, value in list(vars(module).items()):
                if value is patched:
                    vars(module)[name] = real
                elif id(value) in patches_by_id:
                    vars(module)[name] = patches_by_id[id(value)]

        for name, module in list(sys.modules.items()):
            if name.startswith("rearview."):
                use_real_functions(module)
        for name in WAITERS:
            after_import(name, use_real_functions)

    def _patched_reader(self, real: Callable[[], Any], form: struct.Struct) -> Callable[[], Any]:
        """Return a function that records or repeats readings of the clock function `real`; `form` encodes a reading."""
        get_ident, place = threading.get_ident, self.place

        def read() -> Any:
            caller = sys._getframe(1)
            while caller.f_globals is _OURS and caller.f_back is not None:
                caller = caller.f_back
            if get_ident() != self._thread or _is_timer(str(caller.f_globals.get("__name__"))):
                return real()
            if between_cells and (between_cells[0]() or _for_front_end(caller)):
                return real()
            if called_by_tracker(caller) or (self._rule > 1 and self._is_unrepeatable(caller)):
                return real()
            if self.listeners and not library_being_loaded(caller):
                self.listeners[0](_reading_module(caller))
            at = place[0] * 8
            place[0] += 1
            if at + 8 <= len(self._recorded):
                return form.unpack_from(self._recorded, at)[0]
            now = real()
            if self._replays:
                self.readers.add(_reading_module(caller))
            else:
                self._unwritten.append(form.pack(now))
                if len(self._unwritten) >= _FLUSH:
                    self.flush()
            return now

        return PatchedBuiltin(read, real)

    def flush(self) -> None:
        """Append the readings that are not on disk yet to the file."""
        readings, self._unwritten = self._unwritten, []
        if readings and os.getpid() == self._pid:
            data = b"".join(readings)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            with open(open_file(self._file, flags), "ab") as file:  # noqa: PTH123
                file.write(data)
                size = file.tell()
            self._sum = crc32(data, self._sum)
            write_clock_check(self._file, size, self._sum)

    def start_recording(self) -> None:
        """Record new readings from now on: a resumed run has reached its checkpoint. Discard the unused old ones."""
        self._replays = False
        self._recorded = self._recorded[: self.place[0] * 8]
        self._file.write_bytes(self._recorded)
        self._sum = crc32(self._recorded)
        write_clock_check(self._file, len(self._recorded), self._sum)


def _reading_module(frame: types.FrameType | None) -> str:
    """Return the name of the module that reads the clock, directly or through Rearview's patches; empty if unknown.

    The name is `timeit` if `%timeit` measures a statement, which it does with code in the notebook's namespace.
    """
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    if frame is not None and frame.f_code.co_filename == _TIMEIT:
        return "timeit"
    return str(frame.f_globals.get("__name__")) if frame is not None else ""


def _for_front_end(frame: types.FrameType | None) -> bool:
    """Return True if a notebook's kernel reads the clock, directly or through the standard library (`logging`)."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not is_standard(name):
            return name.startswith(FRONT_END)
        frame = frame.f_back
    return False


_OURS = globals()


@functools.lru_cache(maxsize=1024)
def _is_bar(module: str) -> bool:
    return f"{module}.".startswith(BARS)


@functools.lru_cache(maxsize=1024)
def _is_timer(module: str) -> bool:
    return f"{module}.".startswith(TIMERS)


def _with_default_time(real: Any, position: int, now: Callable[[], float], local: Any) -> Any:
    """Return the function `real`, changed to use the time of `now` if the argument at `position` is not passed.

    `local` is the unpatched `time.localtime`.
    """

    def read(*args: Any) -> Any:
        has_time = len(args) > position and (args[position] is not None or parts)
        if has_time or len(args) < position:
            return real(*args)
        moment: Any = now()
        return real(*args[:position], local(moment) if parts else moment)

    parts = real.__name__ in {"strftime", "asctime"}

    return PatchedBuiltin(read, real)


def patch_datetime(now: Callable[[], int]) -> bool:
    """Let `datetime.now()` and `utcnow()` use the time that `now` returns, in nanoseconds; return True if that works.

    The type `datetime` itself is not replaced, so that `isinstance`, pickles and derived classes work as before. Only
    two entries of its dictionary are replaced, although Python forbids that for types written in C. If that is not
    possible, return False: a replay then does not repeat dates, and reports each variable with a date as different.
    """
    date = dt.datetime
    spaces = [
        referent for referent in gc.get_referents(date.__dict__) if isinstance(referent, dict)
    ]
    if len(spaces) != 1 or "utcnow" not in spaces[0]:
        return False
    real, from_seconds = date.now, date.fromtimestamp

    def at(cls: Any, tz: Any, *, utc: bool) -> Any:
        seconds, nanoseconds = divmod(now(), 1_000_000_000)
        moment = from_seconds(seconds, dt.UTC if utc else tz)
        moment = moment.replace(
            microsecond=nanoseconds // 1000, tzinfo=None if utc else moment.tzinfo
        )
        if cls is date:
            return moment
        clock = (moment.hour, moment.minute, moment.second, moment.microsecond, moment.tzinfo)
        return cls(moment.year, moment.month, moment.day, *clock, fold=moment.fold)

    def patched_now(cls: Any, tz: Any = None) -> Any:
        if tz is not None and not isinstance(tz, dt.tzinfo):
            return real(tz)  # raises the TypeError about the wrong argument
        return at(cls, tz, utc=False)

    def patched_utcnow(cls: Any) -> Any:
        if sys.version_info >= (3, 12):
            warnings.warn(_DEPRECATED, DeprecationWarning, stacklevel=2)
        return at(cls, None, utc=True)

    for name, replacement in (("now", patched_now), ("utcnow", patched_utcnow)):
        replacement.__name__, replacement.__qualname__ = name, f"datetime.{name}"
        replacement.__module__, replacement.__doc__ = "datetime", getattr(date, name).__doc__
        spaces[0][name] = classmethod(replacement)
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(date))
    return True
