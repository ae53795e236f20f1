"""Translate the paths of a replay: from where the program believes a file to be, to where it is.

Paths are part of a program's state: a replay in another folder would differ in every path that it
computes. So the program sees its recorded paths, and they are translated when it uses a file. Files
inside the project are in the replay's scratch tree. Files outside are never changed: the first write
makes a copy in a folder of the replay, and the replay uses that copy from then on.
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
    elsewhere: str = ""
    """Folder for files that the replay writes outside the project; empty to write them in place."""
    spared: tuple[str, ...] = ()
    """Prefixes of paths that are used as they are: the store, caches."""
    installed: tuple[str, ...] = ()
    """Those prefixes that are inside the project but do not belong to it: a Python environment."""
    temporary: tuple[str, ...] = ()
    """Prefixes of paths that other replays of the run use too: used as they are, unless another
    replay or the run itself has left a file of that name."""
    drafts: frozenset[str] = frozenset()
    """Temporary files and folders that the run made."""
    texts: dict[str, str] = field(default_factory=dict)
    """By path in the scratch tree: the path of the recorded text of a probed file."""
    gone: set[str] = field(default_factory=set)
    """Files and folders outside that are hidden from the program: they did not exist in the run."""
    made_files: set[str] = field(default_factory=set)
    """Temporary files and folders that the replay made."""
    folded: set[str] = field(default_factory=set)
    """Folders of the scratch tree that are links to folders of the user; they look like folders, and become
    folders of the tree before anything in them is written."""

    used_paths: set[str] | None = None
    """Paths that the program has used, as it sees them; None if they are not noted."""
    changes: int = 0
    """How often the program used a path to write, change or create something."""

    def take_over(self, source: FileView) -> None:
        """Take over the fields of another view."""
        for attribute in fields(self):
            setattr(self, attribute.name, getattr(source, attribute.name))

    def real(self, path: Any, use: PathUse = PathUse.READ) -> Any:
        """Return the real path for a path of the program."""
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
        full = text if text[0] == os.sep else f"{self.seeming(_getcwd())}{os.sep}{text}"
        plain = os.path.normpath(full) if ".." in text else full
        if self.used_paths is not None:
            self.used_paths.add(os.path.normpath(full))
            self.changes += use is not PathUse.READ and use is not PathUse.RUN
        if self.elsewhere and self._is_own(full):
            self._unfold_for(full, use)
            self._make_own(os.path.normpath(full), use)
            return path
        if self.is_inside(plain):
            if plain[len(self.root) :].startswith(f"{os.sep}{FOLDER}"):
                return path
            if plain.startswith(self.installed):
                return path if full is text and plain is full else plain
            # keep the path unchanged if it stays inside: the folder before a ".." may be a link
            stays = self.is_inside(full) and _stays(full[len(self.root) :])
            moved = self.scratch + (full if stays else plain)[len(self.root) :]
            self._unfold_for(moved, use)
            plain = self._settled(moved)
            if plain == self.scratch or plain.startswith(self.scratch + os.sep):
                self._make_own(plain, use)
                if use is PathUse.READ and plain in self.texts:
                    return self.texts[plain]
                return path if stays and text[0] != os.sep and plain == moved else plain
        if not self.elsewhere or plain.startswith(self.spared):
            return plain if text[0] != os.sep or ".." in text else path
        plain = os.path.normpath(plain)
        if plain.startswith(self.temporary) and self._is_free(plain, use):
            return plain if text[0] != os.sep or ".." in text else path
        return self._outside(plain, use)

    def _make_own(self, plain: str, use: PathUse) -> None:
        """Replace a link in the scratch tree by a file before the program writes to it."""
        if use not in {PathUse.WRITE, PathUse.CHANGE}:
            return
        if plain.startswith(self.scratch + os.sep):
            self._unfold_for(plain, use)
            _own(plain, copied=use is PathUse.CHANGE)
            self.texts.pop(plain, None)

    def _unfold_for(self, plain: str, use: PathUse) -> None:
        if self.folded and use not in {PathUse.READ, PathUse.RUN}:
            self.unfold(plain)

    def is_inside(self, path: str) -> bool:
        """Return True if a path is below the project as the program sees it."""
        return path.startswith(self.root + os.sep) or path == self.root

    def _is_own(self, path: str) -> bool:
        return f"{path}{os.sep}".startswith((self.elsewhere + os.sep, self.scratch + os.sep))

    def seeming(self, path: str) -> str:
        """Return the program's path for a real path."""
        for real, seeming_root in ((self.scratch, self.root), (self.elsewhere, "")):
            if real and (path == real or path.startswith(real + os.sep)):
                return (seeming_root + path[len(real) :]) or os.sep
        return path

    def sides(self, path: Any) -> tuple[str, ...]:
        """Return the real folders that together are a folder of the program; the first has precedence."""
        real = os.fspath(self.real(path))
        if self.elsewhere and _is_link(real):
            folder = "" if real[0] == os.sep else f"{_getcwd()}{os.sep}"
            real = self.real(resolved(folder + real))
        if self.elsewhere and real.startswith(self.elsewhere + os.sep):
            plain = real[len(self.elsewhere) :]
            if not self.is_hidden(plain) and _mode(plain) is not None and _mode(real) is not None:
                return real, plain
        return (real,)

    def is_hidden(self, plain: str) -> bool:
        """Return True if a path outside the project must be hidden from the program."""
        if not self.gone:
            return False
        while plain not in self.gone:
            above = os.path.dirname(plain)  # noqa: PTH120 - asked for every file: no objects
            if above == plain:
                return False
            plain = above
        return True

    def guards(self, path: str) -> bool:
        """Return True if a real path is one of the user's files."""
        full = path if path[:1] == os.sep else f"{_getcwd()}{os.sep}{path}"
        if full.startswith(self.scratch + os.sep):
            return any(full.startswith(folder + os.sep) for folder in self.folded)
        if self.is_inside(full):
            own = not full[len(self.root) :].startswith(f"{os.sep}{FOLDER}")
            return own and not full.startswith(self.installed)
        mode = _mode(full)
        kind = mode is None or stat.S_ISREG(mode) or stat.S_ISLNK(mode)
        return bool(self.elsewhere) and kind and self._plain(full) == os.path.normpath(full)

    def remove(self, path: Any, *, folder: bool) -> Any:
        """Return the real path to remove; None if hiding it was enough."""
        self.changes += 1
        real = self.real(path)
        if self.folded:
            self.unfold(real, itself=True)
        plain = self._plain(real)
        if plain is None:
            return real
        mode = _mode(real)
        if folder and mode is not None and stat.S_ISDIR(mode):
            names = {name for side in self.sides(path) for name in os.listdir(side)}  # noqa: PTH208
            if any(self._is_there(f"{plain}{os.sep}{name}") for name in names):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), plain)
        elif folder or mode is None or stat.S_ISDIR(mode):
            return real  # the system call raises the right error
        self.gone.add(plain)
        return real if real != plain else None

    def rename(self, source: Any) -> Any:
        """Return the real path to rename: a copy if it is outside of the project."""
        self.changes += 1
        real = self.real(source)
        if self.folded:
            self.unfold(real, itself=True)
            while below := next(
                (folder for folder in self.folded if folder.startswith(_full(real) + os.sep)), ""
            ):
                self.unfold(below, itself=True)  # the link would lead to where it was
        plain = self._plain(real)
        if plain is None:
            return real
        if real == plain and os.path.isdir(plain):  # noqa: PTH112
            real = self.elsewhere + plain
            shutil.copytree(plain, real, symlinks=True)
        else:
            real = self.real(source, PathUse.CHANGE)
        self.gone.add(plain)
        return real

    def is_folded(self, real: Any) -> bool:
        """Return True if a real path is a link that the program sees as a folder."""
        return bool(self.folded) and not isinstance(real, int) and _full(real) in self.folded

    def folded_in(self, real: str) -> set[str]:
        """Return the names of the folded folders in a real folder."""
        start = _full(real) + os.sep
        names = (folder[len(start) :] for folder in self.folded if folder.startswith(start))
        return {name for name in names if os.sep not in name}

    def unfold(self, real: Any, *, itself: bool = False) -> None:
        """Make the folded folders around a real path, and `itself`, folders of the scratch tree.

        Each then holds a link for each file, and a folded folder for each folder.
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
        """Return the path of a guarded file outside the project, None for everything else."""
        if not self.elsewhere or not isinstance(real, str):
            return None
        if real.startswith(self.elsewhere + os.sep):
            return real[len(self.elsewhere) :]
        full = real if real[0] == os.sep else f"{_getcwd()}{os.sep}{real}"
        if full.startswith(self.temporary) and not self.is_hidden(full):
            return None
        if full.startswith((*self.spared, self.scratch + os.sep)) or self.is_inside(full):
            return None
        return os.path.normpath(full)

    def _is_there(self, plain: str) -> bool:
        if _mode(self.elsewhere + plain) is not None:
            return True
        return not self.is_hidden(plain) and _mode(plain) is not None

    def _is_free(self, plain: str, use: PathUse) -> bool:
        """Return True if a temporary file may have the name that it had in the run."""
        if use is PathUse.MAKE and plain in self.drafts and plain not in self.made_files:
            if _mode(plain) is not None:
                self.gone.add(plain)
            self.made_files.add(plain)
        return not self.is_hidden(plain) and _mode(self.elsewhere + plain) is None

    def _outside(self, plain: str, use: PathUse) -> str:
        kept = self.elsewhere + plain
        hidden = self.is_hidden(plain)
        copied = _mode(kept) is not None
        if use in {PathUse.READ, PathUse.RUN} or (use is PathUse.MAKE and copied):
            return kept if hidden or copied else plain
        mode = None if hidden or copied else _mode(plain)
        if mode is not None:
            if use is PathUse.MAKE or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                return plain  # a folder, a pipe, or a path that must not exist
        above = os.path.dirname(plain)  # noqa: PTH120
        if self._is_there(above):
            os.makedirs(os.path.dirname(kept), exist_ok=True)  # noqa: PTH103, PTH120
            if use is PathUse.CHANGE and mode is not None:
                _copy(plain, kept)
        return kept

    def _settled(self, moved: str) -> str:
        """Return the path in the scratch tree with the links among its folders resolved."""
        if not moved.startswith(self.scratch + os.sep):
            return moved
        above, name = os.path.split(moved)
        led = resolved(above, below=self.scratch)
        if self.is_inside(led) and not led.startswith(self.scratch):
            led = self.scratch + led[len(self.root) :]
        return moved if led == os.path.normpath(above) else f"{led}{os.sep}{name}"


def resolved(path: str, below: str = "") -> str:
    """Return a path without links; `below` and the folders above it have none.

    Like `os.path.realpath`, but with the real file functions: those of a replay are patched.
    """
    if not path.startswith(below + os.sep):
        return path
    done, links = below, 0
    todo = path[len(below) :].split("/")[::-1]
    while todo:
        name = todo.pop()
        candidate = f"{done}{os.sep}{name}"
        if name == "..":
            done = os.path.dirname(done)  # noqa: PTH120
        elif name in {"", "."}:
            continue
        elif links < _MOST_LINKS and _is_link(candidate):
            links += 1
            target = _readlink(candidate)
            done = "" if target.startswith(os.sep) else done
            todo.extend(target.split("/")[::-1])
        else:
            done = candidate
    return done or os.sep


def _stays(rest: str) -> bool:
    """Return True if a path from the root never goes above it on its way.

    >>> _stays("/a/../b"), _stays("/../proj/b")
    (True, False)
    """
    depth = 0
    for name in rest.split("/") if ".." in rest else ():
        depth += -1 if name == ".." else name not in {"", "."}
        if depth < 0:
            return False
    return True


def _full(path: Any) -> str:
    try:
        text = os.fsdecode(path)
    except TypeError:
        return ""  # the system raises the error
    return os.path.normpath(text if text[:1] == os.sep else f"{_getcwd()}{os.sep}{text}")


def _replace_by_links(link: str) -> None:
    """Replace a link to a folder by a folder of links; another process may do the same."""
    source = _readlink(link)
    new = f"{link}.{os.getpid()}"
    _mkdir(new, 0o700)
    for name in _listdir(source):
        _symlink(f"{source}{os.sep}{name}", f"{new}{os.sep}{name}")
    try:
        _unlink(link)
        _rename(new, link)
    except OSError:  # it is a folder now
        shutil.rmtree(new, ignore_errors=True)


def _own(moved: str, *, copied: bool) -> None:
    """Replace a link to a user's file in the scratch tree by a copy."""
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
    try:
        return _lstat(path).st_mode
    except (OSError, ValueError):
        return None
