"""Local files that appear whole or not at all, and that survive a power cut.

Every room that writes files publishes them here, so that there is one answer to a kill at any instruction.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

Opener = Callable[[Path, int], int]
"""Opens a new file with these flags and returns its descriptor."""

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM}
"""Errors of file systems that cannot sync a folder, and of folders that may not be read."""


def publish(path: Path, data: bytes, *, durable: bool = True, opener: Opener | None = None) -> None:
    """Replace the file at `path` by `data` in one step; a kill leaves the old file or the new one.

    With `durable`, the bytes are on the device before the file gets its name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        fd = (opener or _open)(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def publish_file(temporary: Path, path: Path) -> None:
    """Rename a written file to `path`; when this returns, content and name are on the device."""
    fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path | str) -> None:
    """Return when the names in `folder` are on the device, if the file system can tell."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(fd)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o666)
