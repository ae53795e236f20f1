"""Record the lines that a program prints, with the point at which it prints them.

`sys.stdout` and `sys.stderr` remain the same objects and get the same text; only their `write` is patched. Recording
takes at most a hundredth of the time: if a program prints a million lines in a second, only the first few thousand
are recorded, with a note that there were more.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

from rearview.store.create_files import open_file
from rearview.store.printed_lines import FILE, FORMAT, encode

SHARE = 0.01
"""Largest fraction of the time that recording printed lines may take."""
COST = 4e-6
"""Seconds that recording one line is assumed to take."""
FIRST = 2000
"""Number of lines that are recorded however fast they are printed."""
LARGEST = 8 << 20
"""Size in bytes of a run's file of lines at which recording ends."""
LONGEST = 2000
"""Length in characters to which a recorded line is cut."""
_WRITE_AFTER = 1.0
"""Seconds after the last write to the file at which the next printed line causes a write."""
_RESUME_FROM = 200
"""Number of further lines for which there must be time before recording resumes."""

Place = Callable[[], tuple[tuple[str, ...], tuple[int, ...]]]
"""Function that returns (ids of the running loops, index of the current iteration of each)."""


class PrintedLines:
    """Records the lines that a program prints, and writes them to a file."""

    def __init__(self, folder: Path = Path(), place: Place = lambda: ((), ())) -> None:
        self._file = folder / FILE
        self._place = place
        self._pid = os.getpid()
        self._begun = self._written = perf_counter()
        self._used = 0
        self._limit = FIRST
        self._size = self._file.stat().st_size if self._file.exists() else 0
        self._rows: list[Any] = [] if self._size else [{"format": FORMAT}]
        self._parts: dict[int, list[str]] = {1: [], 2: []}
        self._recording = False
        self._stopped = False
        """Whether recording has ended because of an error."""

    def install(self) -> None:
        """Record all text written to standard output and standard error from now on."""
        watch_streams()
        _Streams.printing = self
        self._recording = True

    def remove(self) -> None:
        """Stop recording; the streams remain patched."""
        self._recording = False

    def take(self, number: int, text: str) -> None:
        """Record text that was written to stream `number` (1: output, 2: error), unless recording is stopped."""
        if not self._recording:
            return
        parts = self._parts[number]
        parts.append(text)
        if "\n" in text or len(parts) > 1000:
            try:
                self._lines(number)
            except Exception:
                self.remove()  # the store was removed or the disk is full, which the recorder reports
                self._stopped = True

    def _lines(self, number: int) -> None:
        """Record the complete lines written to stream `number`; keep its unfinished last line for later."""
        parts = self._parts[number]
        *lines, unfinished = "".join(parts).split("\n")
        parts[:] = [unfinished[-LONGEST:]] if unfinished else []
        loops, indices = self._place()
        for line in lines:
            visible = line.rpartition("\r")[2]  # without text that a progress bar has overwritten
            if visible:
                self._rows.append((loops, indices, number, visible[:LONGEST]))
        self._used += len(lines)
        now = perf_counter()
        if self._used >= self._limit and not self._can_afford(now, 1):
            self._rows.append({"dropped": "lines printed from here on came too fast to be kept"})
            self.remove()
            for parts in self._parts.values():
                parts.clear()
        if now - self._written > _WRITE_AFTER:
            self.flush()

    def _can_afford(self, now: float, count: int) -> bool:
        """Return True if there is time, at the reading `now` of the clock, to record `count` more lines."""
        self._limit = FIRST + int(SHARE * (now - self._begun) / COST)
        return self._used + count <= self._limit

    def resume_if_affordable(self) -> None:
        """Resume recording that was stopped because lines came too fast, if enough time has passed since."""
        if self._recording or self._stopped or self._size > LARGEST:
            return
        if _Streams.printing is self and self._can_afford(perf_counter(), _RESUME_FROM):
            self._recording = True

    def flush(self) -> None:
        """Write the recorded lines to the file."""
        rows, self._rows = self._rows, []
        self._written = perf_counter()
        if not rows or os.getpid() != self._pid:
            return
        data = b"".join(encode(row) for row in rows)
        self._size += len(data)
        if self._size > LARGEST:
            self.remove()
            data += encode({"dropped": f"only {LARGEST >> 20} MB are kept"})
        fd = open_file(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Record the unfinished last lines, too, write everything to the file, and stop recording."""
        if _Streams.printing is not self or self._stopped:
            return
        self.remove()
        for number, parts in self._parts.items():
            if parts:
                parts.append("\n")
                self._lines(number)
        self.flush()


class _Streams:
    """Holds the current `PrintedLines`, and the unpatched `write` of stream 1 and 2, for `write_out` and `write_err`.

    These two are functions of the module, not methods: a program that refers to one of them, as progress bars do,
    then refers to the same name in every run and replay.
    """

    printing: PrintedLines | None = None
    real: ClassVar[dict[int, Callable[[str], int]]] = {}


def write_out(text: str) -> int:
    """Write `text` to standard output and record it; return the number of characters."""
    return _write(1, text)


def write_err(text: str) -> int:
    """Write `text` to standard error and record it; return the number of characters."""
    return _write(2, text)


def _write(number: int, text: str) -> int:
    count = _Streams.real[number](text)
    if _Streams.printing is not None:
        _Streams.printing.take(number, text)
    return count


def watch_streams() -> None:
    """Patch `write` of standard output and standard error; done in replays, too, so that states are equal."""
    for number, stream, write in ((1, sys.stdout, write_out), (2, sys.stderr, write_err)):
        if hasattr(stream, "__dict__") and "write" not in vars(stream):
            _Streams.real[number] = stream.write
            vars(stream)["write"] = write


def unwatch_streams() -> None:
    """Remove the patched `write` of standard output and standard error, and all references to the two streams.

    While the interpreter ends, finalizers may print after this module is gone. Python flushes their text only when it
    deletes the streams, and it can delete them only if nothing refers to them.
    """
    for number, name, write in ((1, "stdout", write_out), (2, "stderr", write_err)):
        stream = getattr(sys, name)
        if getattr(stream, "__dict__", {}).get("write") is write:
            del vars(stream)["write"]
            _Streams.real[number] = functools.partial(_write_by_name, name)


def _write_by_name(name: str, text: str) -> int:
    return int(getattr(sys, name).write(text))
