"""Let a replay believe it runs in the project's folder while it runs in a scratch copy.

Names of files are part of a program's state: a replay in another folder would differ in every
path it computed. So paths under the project keep their spelling and are redirected when they are
used; what the replay writes lands in the scratch tree and the user's files stay as they are.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rearview.runtime.audit import listen
from rearview.store.project import FOLDER

_ONE = (
    *("stat", "lstat", "access", "listdir", "scandir", "open", "mkdir", "rmdir", "remove"),
    *("unlink", "chmod", "utime", "truncate", "readlink", "chdir", "mkfifo", "statvfs"),
)
_TWO = ("rename", "replace", "link", "symlink")


@dataclass(frozen=True, slots=True)
class View:
    """Where the project seems to be, and where it is.

    >>> View("/home/me/proj", "/scratch").real("/home/me/proj/out/a.txt")
    '/scratch/out/a.txt'
    >>> View("/home/me/proj", "/scratch").real("/data/a.txt")
    '/data/a.txt'
    """

    root: str
    scratch: str

    def real(self, path: Any) -> Any:
        """Return the path to use for one the program names."""
        if isinstance(path, int):
            return path
        try:
            text = os.fspath(path)
        except TypeError:
            return path
        if isinstance(text, bytes):
            return os.fsencode(self.real(os.fsdecode(text)))
        if text != self.root and not text.startswith(self.root + os.sep):
            return path
        rest = text[len(self.root) :]
        if rest.startswith(f"{os.sep}{FOLDER}"):
            return path
        return self.scratch + rest

    def seeming(self, path: str) -> str:
        """Return how the program should see a path of the scratch tree."""
        if path == self.scratch or path.startswith(self.scratch + os.sep):
            return self.root + path[len(self.scratch) :]
        return path


def install(view: View) -> None:
    """Redirect the file functions that Python code uses."""
    for name in (*_ONE, *_TWO):
        real = getattr(os, name, None)
        if real is not None:
            setattr(os, name, _redirected(real, view, paths=2 if name in _TWO else 1))
    opened = _redirected(_own_copy(io.open, view), view, paths=1)
    builtins.open = opened
    io.open = opened
    here = os.getcwd
    os.getcwd = lambda: view.seeming(here())
    listen(functools.partial(_watch, view), "open")


def keep_outputs(pending: Callable[[], bool]) -> None:
    """Open files for writing without emptying them, while `pending` says so.

    A run that goes on sets itself up again before it is put where it stopped. What it had written
    until then must still be there: the files are cut to their recorded length afterwards.
    """
    real = io.open

    @functools.wraps(real)
    def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if pending() and ("w" in mode or "x" in mode) and not isinstance(file, int):
            if Path(file).is_file():
                mode = mode.replace("w", "r").replace("x", "r").replace("+", "") + "+"
        return real(file, mode, *args, **kwargs)

    builtins.open = call
    io.open = call


def _redirected(real: Callable[..., Any], view: View, *, paths: int) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        moved = tuple(view.real(arg) if i < paths else arg for i, arg in enumerate(args))
        for key in ("path", "file", "src", "dst"):
            if key in kwargs:
                kwargs[key] = view.real(kwargs[key])
        return real(*moved, **kwargs)

    return call


def _own_copy(real: Callable[..., Any], view: View) -> Callable[..., Any]:
    """Open a linked input for writing as a copy: the link leads to the user's file."""
    inside = view.scratch + os.sep
    link, read = os.path.islink, os.readlink

    @functools.wraps(real)
    def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if any(letter in mode for letter in "wa+") and not isinstance(file, int):
            path = os.path.abspath(os.fsdecode(file))  # noqa: PTH100 - the link itself
            if path.startswith(inside) and link(path):
                source = read(path)
                os.unlink(path)  # noqa: PTH108
                shutil.copyfile(source, path)
        return real(file, mode, *args, **kwargs)

    return call


def _watch(view: View, _event: str, args: tuple[Any, ...]) -> None:
    """Refuse a write into the user's tree that took another way than the functions above."""
    path, mode, flags = args
    if not isinstance(path, str):
        return
    writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
    writes = writes or (mode is None and bool(int(flags or 0) & (os.O_WRONLY | os.O_RDWR)))
    if writes and view.real(path) != path:
        raise PermissionError(
            f"A replay does not write into your files, and {path} is one of them. "
            "Its own outputs are kept under .rearview/replays."
        )
