"""Watch folders by inotify: report which files any code opens and writes there, also C code and child processes.

Only the standard library is used: the process that runs the cells of a study package (`rearview.multiversion`)
imports this module on machines where Rearview is not installed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from types import FrameType
from typing import Any

MOST_FOLDERS = 2000
"""Most folders that one `WatchedFolders` watches."""
_SKIPPED = {"__pycache__", "node_modules", "venv"}
_OPEN, _MODIFY, _CLOSE_WRITE, _CLOSE_READ = 0x20, 0x2, 0x8, 0x10
_CREATE, _MOVED_TO, _MOVE_SELF, _IGNORED, _IS_DIR, _OVERFLOW = (
    *(0x100, 0x80, 0x800, 0x8000, 0x40000000, 0x4000),
)
_REPORTED = _OPEN | _MODIFY | _CLOSE_WRITE | _CLOSE_READ | _CREATE | _MOVED_TO | _MOVE_SELF
_SQLITE, _DUCKDB = b"SQLite format 3", b"DUCK"
_HEADER = struct.Struct("iIII")


class WatchedFolders:
    """Folders in which inotify reports the files that any process opens and writes."""

    def __init__(self) -> None:
        self.lost = ""
        """Reason why reports may be incomplete, in words; empty if the reports are complete."""
        self.written: set[str] = set()
        """Paths of files that were written between the last two calls of `drain`."""
        self.read_first: set[str] = set()
        """Paths of files that were first read and then modified between the last two calls of `drain`."""
        self.listed: set[str] = set()
        """Folders that were listed between the last two calls of `drain`."""
        self.dropped = False
        """Whether a watched folder was removed or moved; the caller of `drain` sets this to False again."""
        self._folders: dict[int, str] = {}
        self._watched: set[str] = set()
        self._root = ""
        """Folder of the project: new folders below this folder are watched, too."""
        libc = ctypes.CDLL(None, use_errno=True)
        self._add: Any = getattr(libc, "inotify_add_watch", None)
        start: Any = getattr(libc, "inotify_init1", None)
        self._fd = start(os.O_NONBLOCK | os.O_CLOEXEC) if start is not None else -1
        if self._fd < 0:
            self.lost = "this system does not report which files are opened"

    def watch(self, folder: str) -> None:
        """Watch the files in `folder`, but not those in its subfolders."""
        if folder in self._watched or self._fd < 0:
            return
        if len(self._watched) >= MOST_FOLDERS:
            self.lost = f"more than {MOST_FOLDERS} folders hold files"
            return
        number = self._add(self._fd, os.fsencode(folder), _REPORTED)
        if number >= 0:
            self._watched.add(folder)
            self._folders[number] = folder
        elif ctypes.get_errno() == errno.ENOSPC:
            self.lost = "this system watches no more folders"

    def close(self) -> None:
        """Stop watching."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def watch_project(self, root: str) -> None:
        """Watch the folder `root` and all folders below it, also folders that are created later."""
        self._root = root
        self._watch_below(root)

    def _watch_below(self, top: str) -> None:
        """Watch the folder `top` and all folders below it, except caches, virtual environments and hidden folders."""
        for folder, names, _ in os.walk(top):
            names[:] = [name for name in names if _may_hold_inputs(name)]
            self.watch(folder)
            if self.lost:
                return

    def drain(self) -> list[str]:
        """Return the paths of files that were opened but not written since the last call, sorted.

        The attributes `written`, `read_first` and `listed` are set to the other files and folders since then.
        """
        opened: set[str] = set()
        self.listed = set()
        new_folders: list[str] = []
        changes = FileChanges()
        for number, mask, name in self._reports():
            if mask & _OVERFLOW:
                self.lost = "more files were opened than the system remembers"
                continue
            folder = self._folders.get(number)
            if folder is None:
                continue
            path = f"{folder}{os.sep}{name}"
            if mask & (_IGNORED | _MOVE_SELF):
                self._drop(number)
                # a new folder may have the name of the folder that was moved or removed
                new_folders.append(folder)
            elif mask & _IS_DIR:
                if mask & _OPEN:
                    self.listed.add(path if name else folder)
                if mask & (_CREATE | _MOVED_TO) and self._follows(folder, name):
                    new_folders.append(path)
            elif mask & _OPEN:
                opened.add(path)
            else:
                changes.add(path, mask)
        for folder in new_folders:
            if os.path.isdir(folder):  # noqa: PTH112 - text
                self._watch_below(folder)
        self.written, self.read_first = changes.written, changes.read_first()
        return sorted(opened - self.written)

    def _reports(self) -> Iterator[tuple[int, int, str]]:
        """Yield (number of a watched folder, bits that say what happened, file name) for each report of inotify."""
        while self._fd >= 0:
            try:
                data = os.read(self._fd, 1 << 20)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                number, mask, _, size = _HEADER.unpack_from(data, at)
                name = data[at + _HEADER.size : at + _HEADER.size + size]
                at += _HEADER.size + size
                yield number, mask, os.fsdecode(name.rstrip(b"\0"))

    def _drop(self, number: int) -> None:
        """Stop watching the folder with this number, which was removed or moved, and the folders below it."""
        dropped = self._folders[number]
        self._folders = {
            each: folder
            for each, folder in self._folders.items()
            if folder != dropped and not folder.startswith(f"{dropped}{os.sep}")
        }
        self._watched = set(self._folders.values())
        self.dropped = True

    def _follows(self, folder: str, name: str) -> bool:
        """Return True if the new folder `name` in `folder` is to be watched: it is in the project and may hold inputs."""
        inside = folder == self._root or folder.startswith(f"{self._root}{os.sep}")
        return bool(self._root) and inside and _may_hold_inputs(name)


class FileChanges:
    """Collects reports of inotify in their order, to find files that were written, and files that were read first."""

    def __init__(self) -> None:
        self.written: set[str] = set()
        self._modified: set[str] = set()
        self._new: set[str] = set()
        """Files that were created, or replaced by another file."""
        self._read: set[str] = set()
        """Files that a reader closed before the files were modified."""

    def add(self, path: str, mask: int) -> None:
        """Add one report of inotify about the file `path`; the bits in `mask` say what happened to the file."""
        if mask & (_CREATE | _MOVED_TO):
            self._new.add(path)
            if mask & _MOVED_TO:
                self.written.add(path)
        elif mask & _CLOSE_READ:
            if path not in self._modified:
                self._read.add(path)
        else:
            if mask & _MODIFY:
                self._modified.add(path)
            self.written.add(path)

    def read_first(self) -> set[str]:
        """Return the files that were first read and then modified."""
        return (self._modified & self._read) - self._new


def is_listed_by_import(caller: FrameType | None) -> bool:
    """Return True if `caller`, the frame that lists a folder, runs because Python searches for a module to import."""
    frame = caller
    for _ in range(4):
        if frame is None or frame.f_back is None:
            return False
        if str(frame.f_globals.get("__name__", "")).startswith(("importlib", "_frozen_importlib")):
            return True
        frame = frame.f_back
    return False


def is_database(path: str) -> bool:
    """Return True if a file belongs to a database of SQLite or DuckDB, to which programs add rows."""
    if path.endswith(("-journal", "-wal", ".wal")):
        return True
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - text
            head = file.read(16)
    except OSError:
        return False
    return head.startswith(_SQLITE) or head[8:12] == _DUCKDB


def _may_hold_inputs(name: str) -> bool:
    """Return True unless `name` is that of a cache, of an environment with installed packages, or of a hidden folder."""
    return name not in _SKIPPED and not name.startswith(".")
