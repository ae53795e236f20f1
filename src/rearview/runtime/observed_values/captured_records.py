"""Record files for values that the program did not log with Rearview ("captured records").

These files are separate from the other record files, because replays are not compared with captured records.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

from rearview.model.run import MARK, Origin
from rearview.store.records import RecordFile
from rearview.store.values_as_json import Put

SHARE = 0.005
"""Fraction of the run's time that recording from one source may take."""
FREE = 0.05
"""Seconds that recording from one source may take in any case."""


class CapturedRecords:
    """Writes the captured records of one process: one file for each origin, created for its first value."""

    def __init__(self, folder: Path, run: str, *, put: Put | None = None, attempt: int = 0) -> None:
        self._folder, self._run, self._put, self._attempt = folder, run, put, attempt
        self._files: dict[Origin, RecordFile] = {}
        self._pid = os.getpid()
        self.names: dict[str, Origin] = {}
        """Name of a recorded value -> its origin."""
        self.problems: dict[str, str] = {}
        """Name of a source of values -> error because of which nothing more is recorded from it."""

    def append(self, origin: Origin, prefix: bytes, items: Sequence[tuple[str, Any]]) -> None:
        """Add the (name, value) pairs `items` from `origin`, at the point that `prefix` encodes."""
        file = self._files.get(origin)
        if file is None:
            if os.getpid() != self._pid:
                return
            file = self._files[origin] = RecordFile(
                self._folder,
                self._run,
                origin=MARK + origin.value,
                put=self._put,
                attempt=self._attempt,
            )
        file.append(prefix, items)
        for name, _ in items:
            self.names.setdefault(name, origin)

    def facts(self) -> dict[str, Any]:
        """Return the names and origins of recorded values, and failed sources, to be stored at the end of the run."""
        return {"names": dict(self.names), **({"problems": self.problems} if self.problems else {})}

    def close(self) -> None:
        """Close all record files."""
        for file in self._files.values():
            file.close()


class Allowance:
    """Limits the CPU time of recording from one source: `FREE` seconds plus the fraction `SHARE` of the run's time.

    CPU time is counted, because wall time on a shared machine includes the work of other programs.
    """

    def __init__(self) -> None:
        self._began = perf_counter()
        self._resumes = 0.0
        self.spent = 0.0
        """CPU time, in seconds, that recording has taken."""
        self.left_out = 0
        """Number of times that recording was not allowed, because its time was used up."""

    @property
    def used_up(self) -> bool:
        """Whether the time for recording is used up at present."""
        return perf_counter() < self._resumes

    def allows(self) -> bool:
        """Return True if there is time to record now; else increase `left_out`."""
        if self.used_up:
            self.left_out += 1
            return False
        return True

    def add(self, began: float, *, counted: float = 0.0) -> None:
        """Add the CPU time of this thread since `began` (from `thread_time`), minus `counted` seconds already added."""
        self.spent += thread_time() - began - counted
        if self.spent > FREE + SHARE * (perf_counter() - self._began):
            self._resumes = self._began + (self.spent - FREE) / SHARE
