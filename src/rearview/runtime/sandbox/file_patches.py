"""Patch open, os, pathlib and shutil, so that a replay uses the files of its file view."""

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
"""Functions of `os` that use one path, by how they use it."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def install(view: FileView) -> None:
    """Redirect the file functions that Python code uses."""
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
    # with file descriptors of folders, shutil would bypass the patches above
    vars(shutil)["_use_fd_functions"] = False
    listen(functools.partial(_refuse_write, view), "open", "os.remove", "os.rename", "os.rmdir")


def replace_builtin(module: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a builtin function by the result of `make(function)`, in every module that has it."""
    real = getattr(module, name, None)
    if real is None:
        return
    replacement = PatchedBuiltin(make(real), real)
    for supporting in (os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if real in supporting:
            # callers look into these sets before they pass `dir_fd` or similar arguments
            supporting.add(replacement)
    for owner in (module, sys.modules.get(real.__module__ or ""), builtins):
        if getattr(owner, name, None) is real:
            setattr(owner, name, replacement)
    # `Path.glob` of Python 3.13 reads folders with a class that has its own references to these functions
    globber = getattr(sys.modules.get("glob"), "_StringGlobber", None)
    if getattr(globber, name, None) is real:
        setattr(globber, name, staticmethod(replacement))


def _patch_path_function(real: Any, view: FileView, use: PathUse) -> Callable[..., Any]:
    """Return `real`, changed to use the real path for the path that the program passes."""

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            path = view.real(path, use)
        return real(path, *args, **kwargs)

    return call


def _patch_stat(real: Any, view: FileView, follow: Any) -> Callable[..., Any]:
    """Return `real`, which reads the status of a path, changed to show a folded folder as a folder and not as a link.

    `follow` is the real `os.stat`.
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
    """Return `os.chdir`, changed to enter the real folder."""

    def call(path: Any) -> None:
        path = view.real(path)
        if view.folded:
            # in a folder that is a link, names without a folder would lead to the user's files
            view.unfold(path, itself=True)
        real(path)

    return call


def _patch_remove(real: Any, view: FileView, *, folder: bool) -> Callable[..., Any]:
    """Return `os.remove` or `os.rmdir` (`folder`), changed to hide files of the user and not to remove them."""

    def call(path: Any, *, dir_fd: int | None = None) -> None:
        target = path if dir_fd is not None else view.remove(path, folder=folder)
        if target is not None:
            real(target, dir_fd=dir_fd)

    return call


def _patch_rename(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.rename` or `os.replace`, changed to move a copy of a file of the user."""

    def call(src: Any, dst: Any, **kwargs: Any) -> None:
        source, target = src, dst
        if all(folder is None for folder in kwargs.values()):
            source, target = view.rename(src), view.real(dst, PathUse.WRITE)
        try:
            real(source, target, **kwargs)
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            # the paths are on different disks, although they were on one disk in the run: copy the file
            shutil.copy2(source, target)
            os.unlink(source)  # noqa: PTH108

    return call


def _patch_link(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.link` or `os.symlink`, changed to create the link at the real path."""
    symbolic = real.__name__ == "symlink"

    def call(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        # the target of a symbolic link is relative to the link, not to the current folder
        if not symbolic or Path(os.fsdecode(src)).is_absolute():
            src = view.real(src)
        real(src, view.real(dst, PathUse.MAKE), *args, **kwargs)

    return call


def _patch_os_open(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.open`, changed to open the real path."""

    def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            writes = PathUse.WRITE if flags & os.O_TRUNC else PathUse.CHANGE
            writes = PathUse.MAKE if flags & os.O_EXCL else writes
            path = view.real(path, writes if flags & _WRITES else PathUse.READ)
        return real(path, flags, *args, **kwargs)

    return call


def _patch_open(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `open`, changed to open the real path."""

    def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return real(view.real(file, use_of(mode)), mode, *args, **kwargs)

    return call


def use_of(mode: str) -> PathUse:
    """Return the use of a file that is opened with a mode such as "rb"."""
    if "w" in mode:
        return PathUse.WRITE
    if "x" in mode:
        return PathUse.MAKE
    return PathUse.CHANGE if "a" in mode or "+" in mode else PathUse.READ


def _patch_listdir(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.listdir`, changed to list all real folders of a folder."""

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
    """Return the names in a folder that are not hidden from the program."""
    return (name for name in names if not view.is_hidden(f"{side}{os.sep}{name}"))


def _patch_scandir(real: Any, view: FileView) -> Callable[..., Any]:
    """Return `os.scandir`, changed to list all real folders of a folder."""

    def call(path: Any = ".") -> Any:
        if path is None or isinstance(path, int | bytes):
            return real(view.real(path))
        sides = view.real_folders(path)
        if len(sides) == 1 and not view.hidden_paths and not view.folded:
            return real(sides[0])
        return _Entries(real, sides, view)

    return call


class _FolderEntry:
    """Entry of `scandir` for a folded folder: a link on disk, which the program sees as a plain folder."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name, self.path = entry.name, entry.path
        self._entry = entry

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return True."""
        return True

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return False."""
        return False

    def is_symlink(self) -> bool:
        """Return False."""
        return False

    def is_junction(self) -> bool:
        """Return False."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the status of the folder."""
        return self._entry.stat()

    def inode(self) -> int:
        """Return the inode number of the folder."""
        return self._entry.stat().st_ino


class _Entries:
    """The result of `scandir` for real folders that together are one folder of the program."""

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
        """Yield no further entries."""
        self._remaining = iter(())


def _refuse_write(view: FileView, event: str, args: tuple[Any, ...]) -> None:
    """Raise PermissionError if the program changes one of the user's files by a way that is not patched."""
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
    """Return the full path of a file that is named relative to an open folder."""
    if folder_fd < 0 or not isinstance(path, str):
        return path
    return str(Path(f"/proc/self/fd/{folder_fd}").readlink() / path)
