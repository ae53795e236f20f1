"""Translate the paths that a program in a replay uses to the real paths of its files.

Paths are part of a program's state: if the program saw the path of the replay's folder, every variable with a path
would differ from the recorded state. So the program sees the paths of its run ("program paths"), which are translated
to real paths when it uses a file. Files inside the project are in the scratch tree of the replay. Files outside the
project are never changed: the first write makes a copy in a folder of the replay, and the replay then uses the copy.
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
    """The purpose for which the program uses a path."""

    READ = enum.auto()
    WRITE = enum.auto()
    """Write a file whose previous content is not needed."""
    CHANGE = enum.auto()
    """Change a file whose previous content is needed."""
    MAKE = enum.auto()
    """Create a file or folder; fail if it exists."""
    RUN = enum.auto()
    """Run program source, with its probes."""


@dataclass(slots=True)
class FileView:
    """Maps paths of a program, with the recorded root of the project, to real paths in the folders of a replay.

    >>> FileView("/home/me/proj", "/scratch").real("/home/me/proj/out/a.txt")
    '/scratch/out/a.txt'
    >>> FileView("/home/me/proj", "/scratch").real("/home/me/proj/../data/a.txt")
    '/home/me/data/a.txt'
    """

    root: str
    scratch: str
    outside_copies: str = ""
    """Folder for copies of outside files that the replay writes; empty if it writes the files themselves."""
    unmapped: tuple[str, ...] = ()
    """Prefixes of outside paths that are not translated, such as caches."""
    installed: tuple[str, ...] = ()
    """Prefixes of paths inside the project that are not translated: Python environments."""
    temporary: tuple[str, ...] = ()
    """Prefixes of paths of temporary files. A path is not translated, unless it is hidden, or the replay has a copy of
    the file."""
    run_temporaries: frozenset[str] = frozenset()
    """Paths of temporary files and folders that the recorded run created."""
    texts: dict[str, str] = field(default_factory=dict)
    """Path of a probed source file in the scratch tree -> path of a file with the recorded text, without probes."""
    hidden_paths: set[str] = field(default_factory=set)
    """Paths outside the project that the program does not see, although they exist: it has removed them, or they did
    not exist in the run."""
    replay_temporaries: set[str] = field(default_factory=set)
    """Paths of temporary files and folders that the replay has created."""
    folded: set[str] = field(default_factory=set)
    """Paths of folded folders: links in the scratch tree to folders of the user. The program sees folders, not links.
    A link is replaced by a folder of links ("unfolded") before the program changes anything in it."""

    used_paths: set[str] | None = None
    """Program paths that have been used; None if they are not recorded."""
    changes: int = 0
    """Number of times that the program wrote, changed, created, removed or renamed something."""

    def take_over(self, source: FileView) -> None:
        """Copy all fields of `source` into this view."""
        for attribute in fields(self):
            setattr(self, attribute.name, getattr(source, attribute.name))

    def real(self, path: Any, use: PathUse = PathUse.READ) -> Any:
        """Return the real path for `path`, which the program uses for `use`; prepare a file that it will change."""
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
            # keep ".." if the path never leaves the project, because the folder before ".." may be a link
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
        """If the real path `plain` is a link in the scratch tree that is about to be written, replace it by a file."""
        if use not in {PathUse.WRITE, PathUse.CHANGE}:
            return
        if plain.startswith(self.scratch + os.sep):
            self._unfold_for(plain, use)
            _own(plain, copied=use is PathUse.CHANGE)
            self.texts.pop(plain, None)

    def _unfold_for(self, plain: str, use: PathUse) -> None:
        """Unfold the folders that contain the real path `plain`, if the program is about to change it."""
        if self.folded and use not in {PathUse.READ, PathUse.RUN}:
            self.unfold(plain)

    def is_inside(self, path: str) -> bool:
        """Return True if a program path is the project's folder or inside it."""
        return path.startswith(self.root + os.sep) or path == self.root

    def _is_own(self, path: str) -> bool:
        """Return True if `path` is a real path in one of the replay's folders, so that it needs no translation."""
        return f"{path}{os.sep}".startswith((self.outside_copies + os.sep, self.scratch + os.sep))

    def program_path(self, path: str) -> str:
        """Return the program path for the real path `path`."""
        for real, seeming_root in ((self.scratch, self.root), (self.outside_copies, "")):
            if real and (path == real or path.startswith(real + os.sep)):
                return (seeming_root + path[len(real) :]) or os.sep
        return path

    def real_folders(self, path: Any) -> tuple[str, ...]:
        """Return the one or two real folders that together are one folder of the program.

        Two folders are a folder outside the project and, first, the folder with the replay's copies of its files. A file
        in the first folder hides a file with the same name in the second.
        """
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
        """Return True if the outside path `plain`, or a folder that contains it, is in `hidden_paths`."""
        if not self.hidden_paths:
            return False
        while plain not in self.hidden_paths:
            above = os.path.dirname(plain)  # noqa: PTH120 - asked for every file: no objects
            if above == plain:
                return False
            plain = above
        return True

    def is_protected(self, path: str) -> bool:
        """Return True if the real path `path` is a file of the user, which a replay must not change."""
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
        """Hide the program path `path`; return the real path to remove, or None if no file has to be removed.

        `folder` says that the program removes a folder; raise OSError if the program sees files in it.
        """
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
            return real  # nothing to hide: the system call will raise the right error
        self.hidden_paths.add(plain)
        return real if real != plain else None

    def rename(self, source: Any) -> Any:
        """Hide the program path `source`; return the real path to rename: outside the project, the path of a copy."""
        self.changes += 1
        real = self.real(source)
        if self.folded:
            self.unfold(real, itself=True)
            while below := next(
                (folder for folder in self.folded if folder.startswith(_full(real) + os.sep)), ""
            ):
                self.unfold(below, itself=True)  # else the link leads to the old path
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
        """Return True if the real path `real` is a folded folder."""
        return bool(self.folded) and not isinstance(real, int) and _full(real) in self.folded

    def folded_in(self, real: str) -> set[str]:
        """Return the names of the folded folders directly in the real folder `real`."""
        start = _full(real) + os.sep
        names = (folder[len(start) :] for folder in self.folded if folder.startswith(start))
        return {name for name in names if os.sep not in name}

    def unfold(self, real: Any, *, itself: bool = False) -> None:
        """Unfold each folded folder that contains the real path `real`; with `itself`, also `real` itself.

        An unfolded folder contains a link to each file, and a folded folder for each subfolder, of the user's folder.
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
        """Return the program path for `real` if it is outside the project and translated; else None."""
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
        """Return True if the outside path `plain` exists as the program sees it."""
        if _mode(self.outside_copies + plain) is not None:
            return True
        return not self.is_hidden(plain) and _mode(plain) is not None

    def _is_free(self, plain: str, use: PathUse) -> bool:
        """Return True if the path `plain` of a temporary file can be used without translation.

        If the program creates a file that the run has also created, an existing file with this name is hidden first.
        """
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
        """Return the real path for the outside path `plain`; copy the file if the program is about to change it."""
        copy_path = self.outside_copies + plain
        hidden = self.is_hidden(plain)
        copied = _mode(copy_path) is not None
        if use in {PathUse.READ, PathUse.RUN} or (use is PathUse.MAKE and copied):
            return copy_path if hidden or copied else plain
        mode = None if hidden or copied else _mode(plain)
        if mode is not None:
            if use is PathUse.MAKE or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                return plain  # a folder or pipe, which is not copied, or a path that the program expects to be free
        above = os.path.dirname(plain)  # noqa: PTH120
        if self._is_there(above):
            os.makedirs(os.path.dirname(copy_path), exist_ok=True)  # noqa: PTH103, PTH120
            if use is PathUse.CHANGE and mode is not None:
                _copy(plain, copy_path)
        return copy_path

    def _settled(self, moved: str) -> str:
        """Return the real path `moved` with links to folders resolved, if it is in the scratch tree."""
        if not moved.startswith(self.scratch + os.sep):
            return moved
        above, name = os.path.split(moved)
        folder = resolved(above, below=self.scratch)
        if self.is_inside(folder) and not folder.startswith(self.scratch):
            folder = self.scratch + folder[len(self.root) :]
        return moved if folder == os.path.normpath(above) else f"{folder}{os.sep}{name}"


def resolved(path: str, below: str = "") -> str:
    """Return `path` with all links after the prefix `below` resolved; return it unchanged if it lacks the prefix.

    Like `os.path.realpath`, but with the unpatched file functions, because a replay patches the functions of `os`.
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
    """Return True if `relative`, a path below some root, does not leave the root at any "..".

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
    """Return the real path `path` as an absolute path; empty if it is not a path."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        return ""  # the system call raises the error
    return os.path.normpath(text if text[:1] == os.sep else f"{_getcwd()}{os.sep}{text}")


def _replace_by_links(link: str) -> None:
    """Replace `link`, which leads to a folder, by a folder with links to the content of that folder.

    Other processes of the replay may do the same at the same time.
    """
    source = _readlink(link)
    new = f"{link}.{os.getpid()}"
    _mkdir(new, 0o700)
    for name in _listdir(source):
        _symlink(f"{source}{os.sep}{name}", f"{new}{os.sep}{name}")
    try:
        _unlink(link)
        _rename(new, link)
    except OSError:  # another process has replaced the link
        shutil.rmtree(new, ignore_errors=True)


def _own(moved: str, *, copied: bool) -> None:
    """If `moved` is a link to a user's file, remove the link; if `copied`, put a copy of the file in its place."""
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
    """Return the `st_mode` of a path (of the link itself if it is one), or None if the path does not exist."""
    try:
        return _lstat(path).st_mode
    except (OSError, ValueError):
        return None
