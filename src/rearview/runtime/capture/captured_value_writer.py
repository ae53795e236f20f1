"""Write captured values to separate files, so that a replay is never compared with them."""

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
"""Share of the run's time that capturing from one source may take."""
FREE = 0.05
"""Seconds of capturing that are always allowed."""


class CapturedRecords:
    """The captured values of one process: one records file per origin, created by its first value."""

    def __init__(self, folder: Path, run: str, *, put: Put | None = None, attempt: int = 0) -> None:
        self._folder, self._run, self._put, self._attempt = folder, run, put, attempt
        self._files: dict[Origin, RecordFile] = {}
        self._pid = os.getpid()
        self.names: dict[str, Origin] = {}
        """Names that have values, with their origin."""
        self.problems: dict[str, str] = {}
        """Why a source was switched off, by its name."""

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
        """Return the names that have values and the sources that failed, for the end of the run."""
        return {"names": dict(self.names), **({"problems": self.problems} if self.problems else {})}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class Allowance:
    """Keeps the CPU time that capturing takes within a share of the run's time.

    CPU time, because wall time on a shared machine includes the work of others. `FREE` seconds are
    always allowed.
    """

    def __init__(self) -> None:
        self._began = perf_counter()
        self._resumes = 0.0
        self.spent = 0.0
        """Seconds that capturing took."""
        self.left_out = 0
        """How often something was not captured because the time was used up."""

    @property
    def used_up(self) -> bool:
        """Whether there is no time to capture something now."""
        return perf_counter() < self._resumes

    def allows(self) -> bool:
        """Return True if there is time to capture something now; else count that it is left out."""
        if self.used_up:
            self.left_out += 1
            return False
        return True

    def add(self, began: float, *, counted: float = 0.0) -> None:
        """Count the CPU time of this thread since `began`, a reading of `thread_time`.

        `counted` seconds of it are counted already.
        """
        self.spent += thread_time() - began - counted
        if self.spent > FREE + SHARE * (perf_counter() - self._began):
            self._resumes = self._began + (self.spent - FREE) / SHARE
