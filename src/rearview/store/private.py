"""Who may read the store: its owner, whatever the umask, or also its group (setting `shared`).

The mode of the `.rearview` folder says which. Every folder in it takes after the one that it lies in,
and every file after its folder, so that no part of the program has to be told.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

OWNER, GROUP = 0o700, 0o2770
"""Modes of folders. The group's has the bit that hands the group on to what is made inside."""


def make_folder(path: Path | str) -> None:
    """Make a folder of the store and those above it, if they are not there."""
    path = Path(path)
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    mode = folder_mode(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            make_new_folder(folder, mode)


def make_new_folder(folder: Path, mode: int | None = None) -> None:
    """Make a folder of the store; raise `FileExistsError` if it is there."""
    mode = folder_mode(folder.parent) if mode is None else mode
    folder.mkdir(mode & 0o777)
    if stat.S_IMODE(folder.stat().st_mode) != mode:
        folder.chmod(mode)


def make_top(path: Path, mode: int) -> None:
    """Make the store's own folder with that mode; one that is there is changed with all it holds."""
    path.mkdir(parents=True, exist_ok=True)
    facts = path.stat()
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) == mode:
        return
    path.chmod(mode)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            entry = Path(folder, name)
            with contextlib.suppress(OSError):
                if not entry.is_symlink():
                    keeps = entry.stat().st_mode & 0o500 if name in files else 0
                    entry.chmod(mode if name in folders else keeps | _file_mode(mode))


def open_file(path: Path | str, flags: int) -> int:
    """Open a file of the store, which is made for whom its folder is; return its descriptor."""
    mode = _file_mode(folder_mode(os.path.dirname(path)))  # noqa: PTH120
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    if mode != 0o600 and flags & os.O_CREAT:
        facts = os.fstat(fd)  # the umask may have taken the group's right to write
        if facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) != mode:
            os.fchmod(fd, mode)
    return fd


def close_to_others(path: Path | str) -> None:
    """Give a file that another program made in the store the mode that it has there."""
    Path(path).chmod(_file_mode(folder_mode(os.path.dirname(path))))  # noqa: PTH120


def folder_mode(folder: Path | str) -> int:
    """Return the mode of folders made in `folder`."""
    return GROUP if os.stat(folder or ".").st_mode & 0o020 else OWNER  # noqa: PTH116


def _file_mode(folder: int) -> int:
    return 0o660 if folder == GROUP else 0o600
