"""Translate the paths that a program in a replay uses to the real paths of its files.

Paths are part of a program's state: if a replay saw the path of its own folder, every variable with a path would
differ from the recorded state. So the program sees its recorded paths, which are translated when it uses a file.
Files inside the project are in the scratch tree of the replay. Files outside the project are never changed: the first
write makes a copy in a folder of the replay, and the replay then uses the copy.
"""

from __future__ import annotations

import enum
import errno
import io
import os
import shutil
import stat
from dataclasses import dataclass, field, fields
from typing import Any

from rearview.store.project import FOLDER

_lstat, _stat, _getcwd, _readlink, _open = os.lstat, os.stat, os.getcwd, os.readlink, io.open
_listdir, _mkdir, _symlink, _unlink, _rename = (
    os.listdir,
    os.mkdir,
    os.symlink,
    os.unlink,
    os.rename,
)
_MOST_LINKS = 40


class PathUse(enum.Enum):
    """The purpose for which a path is used."""

    READ = enum.auto()
    WRITE = enum.auto()
    """Writing: the previous content does not matter."""
    CHANGE = enum.auto()
    """Changing: the previous content matters."""
    MAKE = enum.auto()
    """Creating: nothing of that name may exist."""
    RUN = enum.auto()
    """Running: program source, with its probes."""


@dataclass(slots=True)
class FileView:
    """Maps the recorded root of the project to the scratch tree of a replay.

    >>> FileView("/home/me/proj", "/scratch").real("/home/me/proj/out/a.txt")
    '/scratch/out/a.txt'
    >>> FileView("/home/me/proj", "/scratch").real("/home/me/proj/../data/a.txt")
    '/home/me/data/a.txt'
    """

    root: str
    scratch: str
    outside_copies: str = ""
    """Folder for copies of files outside the project that the replay writes; empty to write the files themselves."""
    unmapped: tuple[str, ...] = ()
    """Prefixes of paths that are not translated: the store, caches."""
    installed: tuple[str, ...] = ()
    """Prefixes of paths inside the project that are not translated either: a Python environment."""
    temporary: tuple[str, ...] = ()
    """Prefixes of paths of temporary files: not translated, unless the run or another replay of it has left a file of
    this name."""
    run_temporaries: frozenset[str] = frozenset()
    """Temporary files and folders that the run made."""
    texts: dict[str, str] = field(default_factory=dict)
    """By path of a probed file in the scratch tree: the path of its recorded text."""
    hidden_paths: set[str] = field(default_factory=set)
    """Files and folders outside the project that are hidden from the program: it has removed them, or they did not
    exist in the run."""
    replay_temporaries: set[str] = field(default_factory=set)
    """Temporary files and folders that the replay made."""
    folded: set[str] = field(default_factory=set)
    """Folded folders: links in the scratch tree to folders of the user. The program sees plain folders, and each link
    is replaced by a folder before the program writes into it."""

    used_paths: set[str] | None = None
    """Paths that the program has used, as the program sees them; None if they are not recorded."""
    changes: int = 0
    """How often the program used a path to write, change or create something."""

    def take_over(self, source: FileView) -> None:
        """Copy all fields of another view into this view."""
        for attribute in fields(self):
            setattr(self, attribute.name, getattr(source, attribute.name))

    def real(self, path: Any, use: PathUse = PathUse.READ) -> Any:
        """Return the real path for a path that the program uses."""
        if isinstance(path, int):
            return path
        try:
            text = os.fspath(path)
        except TypeError:
            return path
        if isinstance(text, bytes):
            return os.fsencode(self.real(os.fsdecode(text), use))
        if not text:
            return path
        full = text if text[0] == os.sep else f"{self.program_path(_getcwd())}{os.sep}{text}"
        plain = os.path.normpath(full) if ".." in text else full
        if self.used_paths is not None:
            self.used_paths.add(os.path.normpath(full))
            self.changes += use is not PathUse.READ and use is not PathUse.RUN
        if self.outside_copies and self._is_own(full):
            self._unfold_for(full, use)
            self._make_own(os.path.normpath(full), use)
            return path
        if self.is_inside(plain):
            if plain[len(self.root) :].startswith(f"{os.sep}{FOLDER}"):
                return path
            if plain.startswith(self.installed):
                return path if full is text and plain is full else plain
            # keep ".." in a path that stays inside the project: the folder before ".." may be a link
            stays = self.is_inside(full) and _stays(full[len(self.root) :])
            moved = self.scratch + (full if stays else plain)[len(self.root) :]
            self._unfold_for(moved, use)
            plain = self._settled(moved)
            if plain == self.scratch or plain.startswith(self.scratch + os.sep):
                self._make_own(plain, use)
                if use is PathUse.READ and plain in self.texts:
                    return self.texts[plain]
                return path if stays and text[0] != os.sep and plain == moved else plain
        if not self.outside_copies or plain.startswith(self.unmapped):
            return plain if text[0] != os.sep or ".." in text else path
        plain = os.path.normpath(plain)
        if plain.startswith(self.temporary) and self._is_free(plain, use):
            return plain if text[0] != os.sep or ".." in text else path
        return self._outside(plain, use)

    def _make_own(self, plain: str, use: PathUse) -> None:
        """Replace a link in the scratch tree by a file before the program writes to the path."""
        if use not in {PathUse.WRITE, PathUse.CHANGE}:
            return
        if plain.startswith(self.scratch + os.sep):
            self._unfold_for(plain, use)
            _own(plain, copied=use is PathUse.CHANGE)
            self.texts.pop(plain, None)

    def _unfold_for(self, plain: str, use: PathUse) -> None:
        """Unfold the folders around a path that the program is about to change."""
        if self.folded and use not in {PathUse.READ, PathUse.RUN}:
            self.unfold(plain)

    def is_inside(self, path: str) -> bool:
        """Return True if a path is below the project as the program sees it."""
        return path.startswith(self.root + os.sep) or path == self.root

    def _is_own(self, path: str) -> bool:
        """Return True if a path is already a real path of the replay."""
        return f"{path}{os.sep}".startswith((self.outside_copies + os.sep, self.scratch + os.sep))

    def program_path(self, path: str) -> str:
        """Return the path that the program sees for a real path."""
        for real, seeming_root in ((self.scratch, self.root), (self.outside_copies, "")):
            if real and (path == real or path.startswith(real + os.sep)):
                return (seeming_root + path[len(real) :]) or os.sep
        return path

    def real_folders(self, path: Any) -> tuple[str, ...]:
        """Return the real folders that together are one folder of the program; files in the first take precedence."""
        real = os.fspath(self.real(path))
        if self.outside_copies and _is_link(real):
            folder = "" if real[0] == os.sep else f"{_getcwd()}{os.sep}"
            real = self.real(resolved(folder + real))
        if self.outside_copies and real.startswith(self.outside_copies + os.sep):
            plain = real[len(self.outside_copies) :]
            if not self.is_hidden(plain) and _mode(plain) is not None and _mode(real) is not None:
                return real, plain
        return (real,)

    def is_hidden(self, plain: str) -> bool:
        """Return True if a path outside the project, or a folder that contains it, is hidden from the program."""
        if not self.hidden_paths:
            return False
        while plain not in self.hidden_paths:
            above = os.path.dirname(plain)  # noqa: PTH120 - asked for every file: no objects
            if above == plain:
                return False
            plain = above
        return True

    def is_protected(self, path: str) -> bool:
        """Return True if a real path is a file of the user, which a replay must not change."""
        full = path if path[:1] == os.sep else f"{_getcwd()}{os.sep}{path}"
        if full.startswith(self.scratch + os.sep):
            return any(full.startswith(folder + os.sep) for folder in self.folded)
        if self.is_inside(full):
            belongs = not full[len(self.root) :].startswith(f"{os.sep}{FOLDER}")
            return belongs and not full.startswith(self.installed)
        mode = _mode(full)
        is_plain_file = mode is None or stat.S_ISREG(mode) or stat.S_ISLNK(mode)
        return (
            bool(self.outside_copies)
            and is_plain_file
            and self._plain(full) == os.path.normpath(full)
        )

    def remove(self, path: Any, *, folder: bool) -> Any:
        """Hide a path from the program; return the real path to remove, or None if no file has to be removed."""
        self.changes += 1
        real = self.real(path)
        if self.folded:
            self.unfold(real, itself=True)
        plain = self._plain(real)
        if plain is None:
            return real
        mode = _mode(real)
        if folder and mode is not None and stat.S_ISDIR(mode):
            names = {name for side in self.real_folders(path) for name in os.listdir(side)}  # noqa: PTH208
            if any(self._is_there(f"{plain}{os.sep}{name}") for name in names):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), plain)
        elif folder or mode is None or stat.S_ISDIR(mode):
            return real  # the system call raises the right error
        self.hidden_paths.add(plain)
        return real if real != plain else None

    def rename(self, source: Any) -> Any:
        """Hide a path from the program; return the real path to rename: for a file outside the project, a copy."""
        self.changes += 1
        real = self.real(source)
        if self.folded:
            self.unfold(real, itself=True)
            while below := next(
                (folder for folder in self.folded if folder.startswith(_full(real) + os.sep)), ""
            ):
                self.unfold(below, itself=True)  # the link would lead to the old path
        plain = self._plain(real)
        if plain is None:
            return real
        if real == plain and os.path.isdir(plain):  # noqa: PTH112
            real = self.outside_copies + plain
            shutil.copytree(plain, real, symlinks=True)
        else:
            real = self.real(source, PathUse.CHANGE)
        self.hidden_paths.add(plain)
        return real

    def is_folded(self, real: Any) -> bool:
        """Return True if a real path is a folded folder."""
        return bool(self.folded) and not isinstance(real, int) and _full(real) in self.folded

    def folded_in(self, real: str) -> set[str]:
        """Return the names of the folded folders in a real folder."""
        start = _full(real) + os.sep
        names = (folder[len(start) :] for folder in self.folded if folder.startswith(start))
        return {name for name in names if os.sep not in name}

    def unfold(self, real: Any, *, itself: bool = False) -> None:
        """Replace the folded folders that contain a real path by folders; with `itself`, the path as well.

        Such a folder then contains a link to each file and a folded folder for each folder of the user's folder.
        """
        if isinstance(real, int):
            return
        path = _full(real)
        while around := next(
            (
                folder
                for folder in self.folded
                if path.startswith(folder + os.sep) or (itself and path == folder)
            ),
            None,
        ):
            self.folded.discard(around)
            if _is_link(around):
                _replace_by_links(around)
            for name in _listdir(around):
                below = f"{around}{os.sep}{name}"
                if _is_link(below) and stat.S_ISDIR(_stat(below).st_mode):
                    self.folded.add(below)

    def _plain(self, real: Any) -> str | None:
        """Return the program's path for a real path, or None if it is not a protected file outside the project."""
        if not self.outside_copies or not isinstance(real, str):
            return None
        if real.startswith(self.outside_copies + os.sep):
            return real[len(self.outside_copies) :]
        full = real if real[0] == os.sep else f"{_getcwd()}{os.sep}{real}"
        if full.startswith(self.temporary) and not self.is_hidden(full):
            return None
        if full.startswith((*self.unmapped, self.scratch + os.sep)) or self.is_inside(full):
            return None
        return os.path.normpath(full)

    def _is_there(self, plain: str) -> bool:
        """Return True if a path outside the project exists for the program."""
        if _mode(self.outside_copies + plain) is not None:
            return True
        return not self.is_hidden(plain) and _mode(plain) is not None

    def _is_free(self, plain: str, use: PathUse) -> bool:
        """Return True if the program can use a temporary path as it is, without a copy in another folder."""
        if (
            use is PathUse.MAKE
            and plain in self.run_temporaries
            and plain not in self.replay_temporaries
        ):
            if _mode(plain) is not None:
                self.hidden_paths.add(plain)
            self.replay_temporaries.add(plain)
        return not self.is_hidden(plain) and _mode(self.outside_copies + plain) is None

    def _outside(self, plain: str, use: PathUse) -> str:
        """Return the real path for a path outside the project; copy the file if the program changes it."""
        copy_path = self.outside_copies + plain
        hidden = self.is_hidden(plain)
        copied = _mode(copy_path) is not None
        if use in {PathUse.READ, PathUse.RUN} or (use is PathUse.MAKE and copied):
            return copy_path if hidden or copied else plain
        mode = None if hidden or copied else _mode(plain)
        if mode is not None:
            if use is PathUse.MAKE or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                return plain  # a folder, a pipe, or a path that must not exist
        above = os.path.dirname(plain)  # noqa: PTH120
        if self._is_there(above):
            os.makedirs(os.path.dirname(copy_path), exist_ok=True)  # noqa: PTH103, PTH120
            if use is PathUse.CHANGE and mode is not None:
                _copy(plain, copy_path)
        return copy_path

    def _settled(self, moved: str) -> str:
        """Return a path in the scratch tree with the links in its folders resolved."""
        if not moved.startswith(self.scratch + os.sep):
            return moved
        above, name = os.path.split(moved)
        folder = resolved(above, below=self.scratch)
        if self.is_inside(folder) and not folder.startswith(self.scratch):
            folder = self.scratch + folder[len(self.root) :]
        return moved if folder == os.path.normpath(above) else f"{folder}{os.sep}{name}"


def resolved(path: str, below: str = "") -> str:
    """Return a path with all links resolved, except in the part `below`, in which no link is looked for.

    Like `os.path.realpath`, but with the real file functions, because a replay patches those of `os`.
    """
    if not path.startswith(below + os.sep):
        return path
    prefix, links = below, 0
    todo = path[len(below) :].split("/")[::-1]
    while todo:
        name = todo.pop()
        candidate = f"{prefix}{os.sep}{name}"
        if name == "..":
            prefix = os.path.dirname(prefix)  # noqa: PTH120
        elif name in {"", "."}:
            continue
        elif links < _MOST_LINKS and _is_link(candidate):
            links += 1
            target = _readlink(candidate)
            prefix = "" if target.startswith(os.sep) else prefix
            todo.extend(target.split("/")[::-1])
        else:
            prefix = candidate
    return prefix or os.sep


def _stays(relative: str) -> bool:
    """Return True if a path relative to the root does not leave the root at any "..".

    >>> _stays("/a/../b"), _stays("/../proj/b")
    (True, False)
    """
    depth = 0
    for name in relative.split("/") if ".." in relative else ():
        depth += -1 if name == ".." else name not in {"", "."}
        if depth < 0:
            return False
    return True


def _full(path: Any) -> str:
    """Return a real path as a full path; empty if it is not a path."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        return ""  # the system raises the error
    return os.path.normpath(text if text[:1] == os.sep else f"{_getcwd()}{os.sep}{text}")


def _replace_by_links(link: str) -> None:
    """Replace a link to a folder by a folder of links to its content; other processes may do so at the same time."""
    source = _readlink(link)
    new = f"{link}.{os.getpid()}"
    _mkdir(new, 0o700)
    for name in _listdir(source):
        _symlink(f"{source}{os.sep}{name}", f"{new}{os.sep}{name}")
    try:
        _unlink(link)
        _rename(new, link)
    except OSError:  # another process has made the folder
        shutil.rmtree(new, ignore_errors=True)


def _own(moved: str, *, copied: bool) -> None:
    """Remove a link to a user's file from the scratch tree; if `copied`, put a copy of the file in its place."""
    mode = _mode(moved)
    if mode is None or not stat.S_ISLNK(mode) or os.path.isdir(moved):  # noqa: PTH112
        return
    source = resolved(moved)
    os.unlink(moved)  # noqa: PTH108
    if copied:
        _copy(source, moved)


def _copy(source: str, target: str) -> None:
    with _open(source, "rb") as old, _open(target, "wb") as new:
        shutil.copyfileobj(old, new, 1 << 20)
    os.chmod(target, stat.S_IMODE(_stat(source).st_mode) | stat.S_IWUSR)  # noqa: PTH101


def _is_link(path: str) -> bool:
    mode = _mode(path)
    return mode is not None and stat.S_ISLNK(mode)


def _mode(path: str) -> int | None:
    """Return the mode of a file, not following links, or None if the path does not exist."""
    try:
        return _lstat(path).st_mode
    except (OSError, ValueError):
        return None
