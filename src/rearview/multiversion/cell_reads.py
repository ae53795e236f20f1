"""Record inside a cell process which files a cell reads, and keep the author's files from being written.

Python's audit hook sees what Python opens and lists; inotify sees what code in C and child processes open.
Standard library only.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import site
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rearview.opened_files import WatchedFolders

Signature = tuple[int, int]
"""Size of a file, and time of its last change in nanoseconds."""
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod"), (0,)),
    **dict.fromkeys(("os.chown", "os.utime"), (0,)),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
}
"""Audit events that change files -> positions of the paths among their arguments."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Reads:
    """Records which files a cell reads, and copies inputs before they are overwritten."""

    def __init__(self) -> None:
        self.folder = ""
        """Work folder: what is read in it is named relative to it."""
        self.inputs = ""
        """Folder with the replay's copies of large files, to which links in the work folder lead."""
        self.home = ""
        """The author's own folder, which a cell must not write; empty if there is none."""
        self.seen: dict[str, None] = {}
        self.outside: dict[str, Signature] = {}
        """Files outside the work folder that this state depends on, as they were when they were read."""
        self.active = False
        self._watched: WatchedFolders | None = None
        self._by_import: set[str] = set()
        """Folders that Python listed to find modules."""
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
        """Watch the work folder; a forked process must not share the watch of its parent."""
        if self._watched is not None:
            self._watched.close()
        self._watched = None
        if sys.platform == "linux" and self.folder:
            self._watched = WatchedFolders()
            self._watched.watch_project(self.folder)
            if self.inputs:
                self._watched.watch(self.inputs)

    def begin(self, text: str, namespace: Mapping[str, object]) -> None:
        """Note that a cell is about to run."""
        if self._watched is not None:
            self._watched.drain()
            if self._watched.lost:  # copies of the folder were made since the last cell
                self.watch()
        if self._watched is not None:
            for path in _paths(text, namespace):
                self._watch_outside(path, self._watched)
            self._watched.drain()
        self.seen.clear()
        self._by_import.clear()
        self.active = True

    def end(self) -> dict[str, Any]:
        """Return the files that the cell read, and whether these are all."""
        self.active = False
        if self._watched is None:
            return {"reads": list(self.seen), "complete": False}
        links: dict[str, list[str]] | None = None
        for path in self._watched.drain():
            if path.startswith(self.folder + os.sep):
                if not _is_bytecode(path):
                    self.seen.setdefault(path[len(self.folder) + 1 :])
            elif self.inputs and path.startswith(self.inputs + os.sep):
                links = self._links() if links is None else links
                self.seen.update(dict.fromkeys(links.get(path, ())))
            else:
                self._note_outside(path)
        for folder in self._watched.listed - self._by_import:
            if folder == self.folder or folder.startswith(self.folder + os.sep):
                name = folder[len(self.folder) + 1 :]
                if not _is_bytecode(f"{name}{os.sep}"):
                    self.seen.setdefault(f"{name}/")
        return {"reads": list(self.seen), "complete": not self._watched.lost}

    def depends_on(self) -> dict[str, Signature]:
        """Return the files outside the work folder that the state of this process depends on."""
        files = dict(self.outside)
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and not file.startswith(self.folder + os.sep):
                signature = _signature(file)
                if signature is not None:
                    files.setdefault(file, signature)
        return files

    def _links(self) -> dict[str, list[str]]:
        """Return the links of the work folder by the input that they lead to."""
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
            if folder != os.sep and os.path.isdir(folder) and not self._is_known(full):
                watched.watch(folder)

    def _is_known(self, path: str) -> bool:
        """Return True for files of the replay itself, of the system and of installed packages."""
        scratch = os.path.dirname(os.path.dirname(self.folder))
        return path.startswith((scratch + os.sep, *self._system))

    def _note_outside(self, path: str) -> None:
        if not self._is_known(path) and not _is_bytecode(path):
            signature = _signature(path)
            if signature is not None:
                self.outside.setdefault(path, signature)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event == "open" or event in _CHANGES:
            try:
                refused = self._refused(event, args)
            except Exception:
                refused = ""
            if refused:
                raise PermissionError(
                    f"{refused} was not changed: a replay works in a copy of the folder. Name files "
                    "relative to it."
                )
        if event in {"open", "os.listdir", "os.scandir"}:
            with contextlib.suppress(Exception):  # a failure here must not stop the program
                self._note(event, args)

    def _refused(self, event: str, args: tuple[Any, ...]) -> str:
        """Return the path of the author's file that is about to be changed; '' if there is none."""
        if not self.home:
            return ""
        if event == "open":
            paths = [args[0]] if int(args[2] or 0) & _WRITES else []
        else:
            paths = [args[position] for position in _CHANGES[event]]
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                given = os.path.abspath(os.fsdecode(path))
                folder, name = os.path.split(given)
                full = os.path.join(os.path.realpath(folder), name)
                if full.startswith(self.home + os.sep) and not self._is_known(full):
                    return given
        return ""

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        path = args[0] if args and args[0] is not None else "."
        if isinstance(path, int):
            return
        # relative to the working folder, which may be below the work folder
        full = os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(path)))
        inside = full == self.folder or full.startswith(self.folder + os.sep)
        name = full[len(self.folder) + 1 :]
        if event != "open":
            if _called_by_import():
                self._by_import.add(full)
                if inside:
                    self.seen.setdefault(f"{name}/*.py" if name else "*.py")
            elif inside:
                self.seen.setdefault(f"{name}/" if name else "/")
            return
        flags = int(args[2] or 0)
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if not inside:
            if not writes:
                self._note_outside(full)
        elif not writes:
            if not name.endswith(".pyc"):
                self.seen.setdefault(name)
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
        about = os.stat(path)
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns


def _is_bytecode(path: str) -> bool:
    return f"{os.sep}__pycache__{os.sep}" in f"{os.sep}{path}" or path.endswith(".pyc")


def _called_by_import() -> bool:
    """Return True if Python itself lists a folder to find a module."""
    frame = sys._getframe(3)  # noqa: SLF001 - the one that listed
    for _ in range(4):
        if frame is None or frame.f_back is None:
            return False
        if str(frame.f_globals.get("__name__", "")).startswith(("importlib", "_frozen_importlib")):
            return True
        frame = frame.f_back
    return False


def _paths(text: str, namespace: Mapping[str, object]) -> Iterator[str]:
    """Yield the texts that a cell or a variable holds and that may be paths out of the work folder."""
    values: list[object] = list(namespace.values())
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        values += [n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)]
    for value in values:
        if isinstance(value, str | os.PathLike):
            path = os.fspath(value)
            if isinstance(path, str) and 1 < len(path) < 4096 and path.startswith(("/", "..", "~")):
                if "\n" not in path and "\0" not in path:
                    yield os.path.expanduser(path)
