"""Record inside a cell process which files a cell reads, and prevent cells from changing the author's files.

Python's audit hook reports the files and folders that Python code opens and lists; inotify reports the files
and folders that C code and child processes open. This module imports only the standard library and `opened_files`.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import site
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from rearview.opened_files import WatchedFolders, is_listed_by_import

Signature = tuple[int, int]
"""(size of a file in bytes, time of its last change in nanoseconds)."""
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod"), (0,)),
    **dict.fromkeys(("os.chown", "os.utime"), (0,)),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
}
"""Audit event of a call that changes files -> positions of the changed files' paths in the event's arguments."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class CellFileAccess:
    """Records which files a cell reads, and replaces a link in the work folder by a copy before a cell writes to it."""

    def __init__(self) -> None:
        self.folder = ""
        """Folder with the project's files in which cells run."""
        self.inputs_folder = ""
        """Folder with the replay's copies of the project's files; links in `folder` lead to the large files in it."""
        self.author_folder = ""
        """The author's own project folder, in which a cell must not change files; empty if there is no such folder."""
        self.read_names: dict[str, None] = {}
        """Paths, relative to `folder`, that the running cell has read, in order.

        A path of a listed folder ends with `/`, of a folder that Python searched for modules with `*.py`.
        """
        self.outside_files: dict[str, Signature] = {}
        """Path of a file outside `folder` that cells of this process have read -> size and time at the first read."""
        self.active = False
        """Whether a cell is running; only then are reads recorded."""
        self._watched: WatchedFolders | None = None
        self._listed_by_import: set[str] = set()
        """Folders that Python listed to find modules while the current cell was running."""
        self._system = tuple(
            f"{os.path.realpath(path)}{os.sep}"
            for path in (
                *(sys.prefix, sys.base_prefix, "/usr", "/lib", "/proc", "/sys", "/dev", "/etc"),
                *site.getsitepackages(),
                site.getusersitepackages(),
                *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))),
            )
        )
        sys.addaudithook(self._hook)

    def watch(self) -> None:
        """Watch `folder` by inotify; a forked process calls this again to get its own reports."""
        if self._watched is not None:
            self._watched.close()
        self._watched = None
        if sys.platform == "linux" and self.folder:
            self._watched = WatchedFolders()
            self._watched.watch_project(self.folder)
            if self.inputs_folder:
                self._watched.watch(self.inputs_folder)

    def begin(self, text: str, namespace: Mapping[str, object]) -> None:
        """Start to record the reads of the cell with the code `text`, which is about to run in `namespace`."""
        if self._watched is not None:
            self._watched.drain()
            if self._watched.lost:
                # inotify's queue has overflowed, because the work folder was copied since the last cell
                self.watch()
        if self._watched is not None:
            for path in _paths(text, namespace):
                self._watch_outside(path, self._watched)
            self._watched.drain()
        self.read_names.clear()
        self._listed_by_import.clear()
        self.active = True

    def end(self) -> dict[str, Any]:
        """Stop recording; return `reads` (as in `read_names`), and `complete`: whether the list is surely complete."""
        self.active = False
        if self._watched is None:
            return {"reads": list(self.read_names), "complete": False}
        links: dict[str, list[str]] | None = None
        for path in self._watched.drain():
            if path.startswith(self.folder + os.sep):
                if not _is_bytecode(path):
                    self.read_names.setdefault(path[len(self.folder) + 1 :])
            elif self.inputs_folder and path.startswith(self.inputs_folder + os.sep):
                links = self._links_by_input() if links is None else links
                self.read_names.update(dict.fromkeys(links.get(path, ())))
            else:
                self._record_outside(path)
        for folder in self._watched.listed - self._listed_by_import:
            if folder == self.folder or folder.startswith(self.folder + os.sep):
                name = folder[len(self.folder) + 1 :]
                if not _is_bytecode(f"{name}{os.sep}"):
                    self.read_names.setdefault(f"{name}/")
        return {"reads": list(self.read_names), "complete": not self._watched.lost}

    def depends_on(self) -> dict[str, Signature]:
        """Return path -> signature of the files outside `folder` on which the state depends: read files and modules."""
        files = dict(self.outside_files)
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not file.startswith(self.folder + os.sep):
                signature = _signature(file)
                if signature is not None:
                    files.setdefault(file, signature)
        return files

    def _links_by_input(self) -> dict[str, list[str]]:
        """Return target of a link -> paths, relative to `folder`, of the links in it to this target."""
        links: dict[str, list[str]] = {}
        for folder, _, names in os.walk(self.folder):
            for name in names:
                file = os.path.join(folder, name)
                if os.path.islink(file):
                    links.setdefault(os.readlink(file), []).append(file[len(self.folder) + 1 :])
        return links

    def _watch_outside(self, path: str, watched: WatchedFolders) -> None:
        with contextlib.suppress(OSError, ValueError):
            full = os.path.abspath(path)
            folder = full if os.path.isdir(full) else os.path.dirname(full)
            if folder != os.sep and os.path.isdir(folder) and not self._is_ignored(full):
                watched.watch(folder)

    def _is_ignored(self, path: str) -> bool:
        """Return True if `path` belongs to the replay, the system or an installed package, and so is no input."""
        scratch = os.path.dirname(os.path.dirname(self.folder))
        return path.startswith((scratch + os.sep, *self._system))

    def _record_outside(self, path: str) -> None:
        if not self._is_ignored(path) and not _is_bytecode(path):
            signature = _signature(path)
            if signature is not None:
                self.outside_files.setdefault(path, signature)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open" or event in _CHANGES:
            try:
                forbidden_path = self._forbidden_path(event, args)
            except Exception:
                forbidden_path = ""
            if forbidden_path:
                raise PermissionError(
                    f"{forbidden_path} was not changed: a replay works in a copy of the folder. Name files "
                    "relative to it."
                )
        if event in {"open", "os.listdir", "os.scandir"}:
            with contextlib.suppress(Exception):  # a failure here must not stop the program
                self._record(event, args, sys._getframe(1))  # noqa: SLF001

    def _forbidden_path(self, event: str, args: tuple[Any, ...]) -> str:
        """Return the path of the author's file that the call with this audit event would change, or '' if none."""
        if not self.author_folder:
            return ""
        if event == "open":
            paths = [args[0]] if int(args[2] or 0) & _WRITES else []
        else:
            paths = [args[position] for position in _CHANGES[event]]
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                absolute = os.path.abspath(os.fsdecode(path))
                folder, name = os.path.split(absolute)
                full = os.path.join(os.path.realpath(folder), name)
                if full.startswith(self.author_folder + os.sep) and not self._is_ignored(full):
                    return absolute
        return ""

    def _record(self, event: str, args: tuple[Any, ...], caller: FrameType) -> None:
        path = args[0] if args and args[0] is not None else "."
        if isinstance(path, int):
            return
        # a relative path is relative to the current folder, which may be a subfolder of the work folder
        full = os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(path)))
        is_inside = full == self.folder or full.startswith(self.folder + os.sep)
        name = full[len(self.folder) + 1 :]
        if event != "open":
            if is_listed_by_import(caller):
                self._listed_by_import.add(full)
                if is_inside:
                    self.read_names.setdefault(f"{name}/*.py" if name else "*.py")
            elif is_inside:
                self.read_names.setdefault(f"{name}/" if name else "/")
            return
        flags = int(args[2] or 0)
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if not is_inside:
            if not writes:
                self._record_outside(full)
        elif not writes:
            if not name.endswith(".pyc"):
                self.read_names.setdefault(name)
        elif os.path.islink(full):
            self.active = False
            try:
                target = os.path.realpath(full)
                os.unlink(full)
                if not flags & os.O_TRUNC and os.path.isfile(target):
                    shutil.copy2(target, full)
            finally:
                self.active = True


def _signature(path: str) -> Signature | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _is_bytecode(path: str) -> bool:
    return f"{os.sep}__pycache__{os.sep}" in f"{os.sep}{path}" or path.endswith(".pyc")


def _paths(text: str, namespace: Mapping[str, object]) -> Iterator[str]:
    """Yield the string literals in the code `text`, and the values of variables, that may be paths of outside files."""
    values: list[object] = list(namespace.values())
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        values += [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)]
    for value in values:
        if isinstance(value, str | os.PathLike):
            path = os.fspath(value)
            if isinstance(path, str) and 1 < len(path) < 4096 and path.startswith(("/", "..", "~")):
                if "\n" not in path and "\0" not in path:
                    yield os.path.expanduser(path)
