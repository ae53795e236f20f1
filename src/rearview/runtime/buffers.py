"""What a program has written and Python still holds back, found whoever holds the file.

A logger, a writer of rows or what was put in the place of `sys.stdout` may be the only one that
knows a file. What is on disk is kept with a checkpoint, so it has to be there.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rearview.runtime.state.streams import transforms

_KINDS = frozenset({io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom})
_SEARCHES = 20
"""Times that all objects are looked through for files that are not known yet."""


class Buffers:
    """The files that the program holds open for writing."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], list[weakref.ref[Any]]] = {}
        self._searches = 0

    def flush(self, ours: Callable[[str], bool]) -> None:
        """Write down what is held back of files whose paths are `ours`."""
        found = {number: path for number, path in open_for_writing() if ours(path)}
        fresh = {number for number, path in found.items() if (number, path) not in self._known}
        if fresh and self._searches < _SEARCHES:
            self._searches += 1
            for number in fresh:
                self._known[number, found[number]] = []
            for file in [each for each in gc.get_objects() if type(each) in _KINDS]:
                number = _number(file)
                if number in fresh:
                    self._known[number, found[number]].append(weakref.ref(file))
        for number, path in found.items():
            for known in self._known.get((number, path), ()):
                file = known()
                if file is not None and _number(file) == number:
                    with contextlib.suppress(OSError, ValueError):
                        if not transforms(file):
                            file.flush()


def open_for_writing() -> Iterator[tuple[int, str]]:
    """Yield number and path of each file that this process has open for writing."""
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else ():  # noqa: PTH208
        try:
            path = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - asked for every file
            if path[:1] == os.sep and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE:
                yield int(name), path
        except OSError:
            continue  # that of the listing itself, or closed meanwhile


def _number(file: Any) -> int:
    try:
        return int(file.fileno())
    except (OSError, ValueError):
        return -1
