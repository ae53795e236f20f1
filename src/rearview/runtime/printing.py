"""Keep the lines that a program prints, with the point at which it prints them.

The streams stay the objects they are and get the same bytes; only `write` is looked at, as long as
that takes at most a hundredth of the time. A program that prints a million lines in a second keeps
the first few thousand of them, and a remark that there were more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from rearview.store.printed import FILE, FORMAT

SHARE = 0.01
"""Share of the time that looking at what is printed may take."""
COST = 4e-6
"""Seconds that a kept line takes, generously."""
FIRST = 2000
"""Lines that are always looked at."""
LARGEST = 8 << 20
"""Bytes kept of a run."""
LONGEST = 2000
"""Characters kept of a line."""
_EACH = 1.0
"""Seconds after which lines are written to the file, when the next one comes."""
_WORTH = 200
"""Lines that must fit for it to begin again."""

Place = Callable[[], tuple[tuple[str, ...], tuple[int, ...]]]


class Printing:
    """The lines of one run, on their way to a file."""

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
        self._streams: dict[int, Any] = {}

    def install(self) -> None:
        """Look at what is written to standard output and error from now on."""
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            if hasattr(stream, "__dict__") and "write" not in vars(stream):
                self._streams[number] = stream
        self._look()

    def _look(self) -> None:
        for number, stream in self._streams.items():
            vars(stream)["write"] = self._watched(number, stream.write)

    def remove(self) -> None:
        """Leave the streams alone."""
        for stream in self._streams.values():
            vars(stream).pop("write", None)

    def _watched(self, number: int, real: Callable[[str], int]) -> Callable[[str], int]:
        parts = self._parts[number]

        def write(text: str) -> int:
            count = real(text)
            parts.append(text)
            if "\n" in text or len(parts) > 1000:
                try:
                    self._lines(number)
                except Exception:
                    self.remove()  # the store is gone or full: others say so
                    self._streams = {}
            return count

        return write

    def _lines(self, number: int) -> None:
        """Keep the lines that are complete."""
        parts = self._parts[number]
        *lines, rest = "".join(parts).split("\n")
        parts[:] = [rest[-LONGEST:]] if rest else []
        loops, indices = self._place()
        for line in lines:
            shown = line.rpartition("\r")[2]  # what a progress bar has overwritten is not kept
            if shown:
                self._rows.append((loops, indices, number, shown[:LONGEST]))
        self._used += len(lines)
        now = perf_counter()
        if self._used >= self._limit and not self._afford(now, 1):
            self._rows.append({"dropped": "lines printed from here on came too fast to be kept"})
            self.remove()
            for kept in self._parts.values():
                kept.clear()
        if now - self._written > _EACH:
            self.flush()

    def _afford(self, now: float, count: int) -> bool:
        """Say whether `count` more lines fit into what may be spent by now."""
        self._limit = FIRST + int(SHARE * (now - self._begun) / COST)
        return self._used + count <= self._limit

    def turn(self) -> None:
        """Look again, if enough time has passed since it became too much."""
        stream = self._streams.get(1)
        if stream is None or self._size > LARGEST or "write" in vars(stream):
            return
        if self._afford(perf_counter(), _WORTH):
            self._look()

    def flush(self) -> None:
        """Bring what is kept to the file."""
        rows, self._rows = self._rows, []
        self._written = perf_counter()
        if not rows or os.getpid() != self._pid:
            return
        data = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        self._size += len(data)
        if self._size > LARGEST:
            self.remove()
            data += msgspec.json.encode({"dropped": f"only {LARGEST >> 20} MB are kept"}) + b"\n"
        fd = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Keep what stands in unfinished lines too, and stop."""
        if not self._streams:
            return
        self.remove()
        for number, parts in self._parts.items():
            if parts:
                parts.append("\n")
                self._lines(number)
        self.flush()
