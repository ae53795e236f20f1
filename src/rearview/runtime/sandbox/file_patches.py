"""Patch open, os, pathlib and shutil, so that the program in a replay uses the files that a `FileView` selects."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from rearview.runtime.sandbox.file_view import FileView, PathUse
from rearview.runtime.sandbox.program_inputs import listen
from rearview.state.code_lookup import PatchedBuiltin

_USES = {
    PathUse.READ: ("access", "statvfs"),
    PathUse.CHANGE: ("chmod", "utime", "truncate"),
    PathUse.MAKE: ("mkdir", "mkfifo"),
}
"""Use of a path -> functions of `os` whose only path is used in this way."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def install(view: FileView) -> None:
    """Patch the file functions of Python, so that the paths of the program are translated by `view`."""
    for use, names in _USES.items():
        for name in names:
            replace_builtin(os, name, functools.partial(_patch_path_function, view=view, use=use))
    follow = os.stat
    for name in ("stat", "lstat", "readlink"):
        replace_builtin(os, name, functools.partial(_patch_stat, view=view, follow=follow))
    replace_builtin(os, "chdir", functools.partial(_patch_chdir, view=view))
    for name in ("remove", "unlink", "rmdir"):
        replace_builtin(
            os, name, functools.partial(_patch_remove, view=view, folder=name == "rmdir")
        )
    for name in ("rename", "replace"):
        replace_builtin(os, name, functools.partial(_patch_rename, view=view))
    for name in ("link", "symlink"):
        replace_builtin(os, name, functools.partial(_patch_link, view=view))
    replace_builtin(os, "open", functools.partial(_patch_os_open, view=view))
    replace_builtin(os, "listdir", functools.partial(_patch_listdir, view=view))
    replace_builtin(os, "scandir", functools.partial(_patch_scandir, view=view))
    replace_builtin(os, "getcwd", lambda real: lambda: view.program_path(real()))
    replace_builtin(io, "open", functools.partial(_patch_open, view=view))
    # otherwise shutil would use file descriptors of folders, which the patches do not translate
    vars(shutil)["_use_fd_functions"] = False
    listen(functools.partial(_refuse_write, view), "open", "os.remove", "os.rename", "os.rmdir")


def replace_builtin(module: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace the builtin function `name` of `module` by `make(function)`, wherever the standard library has it.

    Do nothing if the module has no such function.
    """
    real = getattr(module, name, None)
    if real is None:
        return
    replacement = PatchedBuiltin(make(real), real)
    for supporting in (os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if real in supporting:
            # callers look up functions in these sets before they pass arguments such as `dir_fd`
            supporting.add(replacement)
    for owner in (module, sys.modules.get(real.__module__ or ""), builtins):
        if getattr(owner, name, None) is real:
            setattr(owner, name, replacement)
    # in Python 3.13, `Path.glob` uses the class `_StringGlobber`, which has its own references to functions
    globber = getattr(sys.modules.get("glob"), "_StringGlobber", None)
    if getattr(globber, name, None) is real:
        setattr(globber, name, staticmethod(replacement))


def _patch_path_function(real: Any, view: FileView, use: PathUse) -> Callable[..., Any]:
    """Return the function `real`, changed to translate its first argument, a path that is used for `use`."""

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            path = view.real(path, use)
        return real(path, *args, **kwargs)

    return call


def _patch_stat(real: Any, view: FileView, follow: Any) -> Callable[..., Any]:
    """Return `os.stat`, `os.lstat` or `os.readlink` (`real`), changed to translate the path.

    A folded folder (`FileView.folded`) appears as a folder, not as a link. `follow` is the unpatched `os.stat`.
    """
    name = real.__name__

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None:
            return real(path, *args, **kwargs)
        path = view.real(path)
        if view.folded and view.is_folded(path):
            if name == "readlink":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), view.program_path(path))
            return follow(path)
        return real(path, *args, **kwargs)

    return call


def _patch_chdir(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.chdir` (`real`), changed to translate the path."""

    def call(path: Any) -> None:
        path = view.real(path)
        if view.folded:
            # if the current folder were a link, relative paths would lead to the user's files
            view.unfold(path, itself=True)
        real(path)

    return call


def _patch_remove(real: Any, view: FileView, *, folder: bool) -> Callable[..., Any]:
    """Return `os.remove` or (with `folder`) `os.rmdir`, changed to hide the user's files and not to remove them."""

    def call(path: Any, *, dir_fd: int | None = None) -> None:
        target = path if dir_fd is not None else view.remove(path, folder=folder)
        if target is not None:
            real(target, dir_fd=dir_fd)

    return call


def _patch_rename(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.rename` or `os.replace` (`real`), changed to move a copy if the file is the user's."""

    def call(src: Any, dst: Any, **kwargs: Any) -> None:
        source, target = src, dst
        if all(folder is None for folder in kwargs.values()):
            source, target = view.rename(src), view.real(dst, PathUse.WRITE)
        try:
            real(source, target, **kwargs)
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            # the real paths are on different disks, although the paths of the run were on one: copy the file
            shutil.copy2(source, target)
            os.unlink(source)  # noqa: PTH108

    return call


def _patch_link(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.link` or `os.symlink` (`real`), changed to translate the path of the link to create."""
    symbolic = real.__name__ == "symlink"

    def call(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        # the target of a symbolic link is relative to the link, not to the current folder
        if not symbolic or Path(os.fsdecode(src)).is_absolute():
            src = view.real(src)
        real(src, view.real(dst, PathUse.MAKE), *args, **kwargs)

    return call


def _patch_os_open(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.open` (`real`), changed to translate the path."""

    def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            writes = PathUse.WRITE if flags & os.O_TRUNC else PathUse.CHANGE
            writes = PathUse.MAKE if flags & os.O_EXCL else writes
            path = view.real(path, writes if flags & _WRITES else PathUse.READ)
        return real(path, flags, *args, **kwargs)

    return call


def _patch_open(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `open` (`real`), changed to translate the path."""

    def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return real(view.real(file, use_of(mode)), mode, *args, **kwargs)

    return call


def use_of(mode: str) -> PathUse:
    """Return how a file that is opened with `mode` (such as "rb") is used: read, written or both."""
    if "w" in mode:
        return PathUse.WRITE
    if "x" in mode:
        return PathUse.MAKE
    return PathUse.CHANGE if "a" in mode or "+" in mode else PathUse.READ


def _patch_listdir(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.listdir` (`real`), changed to list a folder of the program, which may consist of two real folders."""

    def call(path: Any = ".") -> list[Any]:
        if path is None or isinstance(path, int | bytes):
            return list(real(view.real(path)))
        first, *further_sides = view.real_folders(path)
        names = dict.fromkeys(_visible(real(first), first, view))
        for side in further_sides:
            names |= dict.fromkeys(_visible(real(side), side, view))
        return list(names)

    return call


def _visible(names: list[str], side: str, view: FileView) -> Iterator[str]:
    """Yield those of `names`, which are in the real folder `side`, that are not hidden from the program."""
    return (name for name in names if not view.is_hidden(f"{side}{os.sep}{name}"))


def _patch_scandir(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.scandir` (`real`), changed to list a folder of the program, which may consist of two real folders."""

    def call(path: Any = ".") -> Any:
        if path is None or isinstance(path, int | bytes):
            return real(view.real(path))
        sides = view.real_folders(path)
        if len(sides) == 1 and not view.hidden_paths and not view.folded:
            return real(sides[0])
        return _Entries(real, sides, view)

    return call


class _FolderEntry:
    """Entry of `scandir` for a folded folder: the link on disk appears to the program as a folder."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name, self.path = entry.name, entry.path
        self._entry = entry

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return True: the program sees a folder."""
        return True

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return False: the program sees a folder."""
        return False

    def is_symlink(self) -> bool:
        """Return False: the program sees a folder, not the link."""
        return False

    def is_junction(self) -> bool:
        """Return False: the program sees a folder, not the link."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the status of the folder to which the link leads."""
        return self._entry.stat()

    def inode(self) -> int:
        """Return the inode number of the folder to which the link leads."""
        return self._entry.stat().st_ino


class _Entries:
    """The result of `scandir` for one folder of the program that consists of several real folders, `sides`."""

    def __init__(self, real: Any, sides: tuple[str, ...], view: FileView) -> None:
        by_name: dict[str, Any] = {}
        for side in sides:
            with real(side) as entries:
                for entry in entries:
                    if not view.is_hidden(f"{side}{os.sep}{entry.name}"):
                        by_name.setdefault(entry.name, entry)
        folded = view.folded_in(sides[0]) & by_name.keys()
        by_name |= {name: _FolderEntry(by_name[name]) for name in folded}
        self._remaining = iter(by_name.values())

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._remaining)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the iteration: no further entries are yielded."""
        self._remaining = iter(())


def _refuse_write(view: FileView, event: str, args: tuple[Any, ...]) -> None:
    """Raise PermissionError if an audit event shows that a function without a patch would change a user's file."""
    if event == "open":
        path, mode, flags = args
        writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
        paths = [path] if writes or (mode is None and int(flags or 0) & _WRITES) else []
    else:
        count = 2 if event == "os.rename" else 1
        paths = [_full_path(*pair) for pair in zip(args, args[count:], strict=False)]
    for path in paths:
        if isinstance(path, str) and view.is_protected(path):
            raise PermissionError(
                f"A replay does not change your files, and {path} is one of them. "
                "The outputs of a replay are under .rearview/replays."
            )


def _full_path(path: Any, folder_fd: int) -> Any:
    """Return the full path for `path`, which is relative to the open folder with the descriptor `folder_fd`.

    Return `path` itself if `folder_fd` is negative, or `path` is no string.
    """
    if folder_fd < 0 or not isinstance(path, str):
        return path
    return str(Path(f"/proc/self/fd/{folder_fd}").readlink() / path)
