"""Files for values that the program did not log with Rearview: separate, because no replay is compared with them."""

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
"""Share of the run's time that recording from one source may take."""
FREE = 0.05
"""Seconds of recording that are always allowed."""


class CapturedRecords:
    """The captured records of one process: one file for each origin, created for its first value."""

    def __init__(self, folder: Path, run: str, *, put: Put | None = None, attempt: int = 0) -> None:
        self._folder, self._run, self._put, self._attempt = folder, run, put, attempt
        self._files: dict[Origin, RecordFile] = {}
        self._pid = os.getpid()
        self.names: dict[str, Origin] = {}
        """Names of recorded values, each with its origin."""
        self.problems: dict[str, str] = {}
        """By name of a source: the error that switched it off."""

    def append(self, origin: Origin, prefix: bytes, items: Sequence[tuple[str, Any]]) -> None:
        """Add values at the point that `prefix` encodes."""
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
        """Return the recorded names and the sources that failed, to be stored with the end of the run."""
        return {"names": dict(self.names), **({"problems": self.problems} if self.problems else {})}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class Allowance:
    """Limits the CPU time of recording from one source to a share of the run's time.

    CPU time is counted, because wall time on a shared machine includes the work of other programs. `FREE` seconds
    are always allowed.
    """

    def __init__(self) -> None:
        self._began = perf_counter()
        self._resumes = 0.0
        self.spent = 0.0
        """Seconds of CPU time that recording took."""
        self.left_out = 0
        """How often a value was not recorded because the time was used up."""

    @property
    def used_up(self) -> bool:
        """Whether there is no time to record a value now."""
        return perf_counter() < self._resumes

    def allows(self) -> bool:
        """Return True if there is time to record a value now; else count a value that is left out."""
        if self.used_up:
            self.left_out += 1
            return False
        return True

    def add(self, began: float, *, counted: float = 0.0) -> None:
        """Count the CPU time of this thread since `began`, a reading of `thread_time`, except `counted` seconds."""
        self.spent += thread_time() - began - counted
        if self.spent > FREE + SHARE * (perf_counter() - self._began):
            self._resumes = self._began + (self.spent - FREE) / SHARE
