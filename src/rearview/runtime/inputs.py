"""Notice which files a program reads, so that a replay can tell whether they have changed."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rearview.runtime.audit import listen
from rearview.runtime.foreign import libraries
from rearview.store.fingerprint import fingerprint
from rearview.store.project import FOLDER

MOST = 5000
"""Files noticed at the most; a data set of more is not described file by file."""


class Inputs:
    """The data files that this process opened for reading and did not write itself."""

    def __init__(self) -> None:
        self.active = True
        self._read: dict[str, None] = {}
        self._written: set[str] = set()
        self._pid = os.getpid()
        self._not = libraries()
        listen(self._notice, "open")

    def _notice(self, _event: str, args: tuple[Any, ...]) -> None:
        if not self.active or len(self._read) >= MOST:
            return
        path, mode, flags = args
        if type(path) is bytes:
            path = os.fsdecode(path)
        if type(path) is not str or path.startswith(self._not) or FOLDER in path:
            return
        if not path.startswith("/"):
            path = f"{os.getcwd()}/{path}"  # noqa: PTH109 - called for every open: no objects
        if mode in {"r", "rb"} or (mode is None and not int(flags or 0) & 3):
            self._read.setdefault(path)
        else:
            self._written.add(path)

    def facts(self, made: Collection[str] = ()) -> dict[str, list[Any]]:
        """Return size, time and hash of each file that was read, as they are now.

        Files that the run `made` are not inputs: it had written them before it read them.
        """
        self.active = False
        found: dict[str, list[Any]] = {}
        for name in self._read:
            path = os.path.realpath(name)
            skip = name in self._written or FOLDER in path or path.endswith((".py", ".pyc", ".so"))
            if skip or path in made or path.startswith(self._not):
                continue
            try:
                if os.path.isfile(path):  # noqa: PTH113 - a path of any spelling
                    found[path] = list(fingerprint(Path(path)))
            except OSError:
                continue
        return found
