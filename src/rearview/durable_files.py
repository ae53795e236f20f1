"""Write local files that appear whole or not at all and survive a power cut; and checksums that detect damaged JSON.

All other modules write files with these functions, so that a process may be killed at any instruction.

A checksum is the last field of a JSON object, or the last item of a JSON list: the CRC of all bytes before. A CRC
of 32 bits detects every error of one or two bits, and every burst of errors of up to 32 bits. Of longer bursts, it
misses one in four billion. Computing the checksum of a line of records takes a tenth of a microsecond.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

Opener = Callable[[Path, int], int]
"""A function (path, flags) that opens a new file as `os.open` does and returns its descriptor."""

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM}
"""Error numbers if the file system cannot sync folders, or if a folder may not be read."""


def publish(path: Path, data: bytes, *, durable: bool = True, opener: Opener | None = None) -> None:
    """Replace the content of the file at `path` by `data` in one step: a kill leaves the old file or the new file.

    With `durable`, the bytes are on the device before the new file gets its name. `opener` opens the new file.
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
    """Rename the file `temporary` to `path`; when this returns, content and name are on the device."""
    fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path | str) -> None:
    """Wait until the names of the files in `folder` are on the device, if the file system supports this."""
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


_FIELD = b',"c":'


def add_check(text: bytes) -> bytes:
    """Return `text`, a JSON object that is not empty, with its checksum as the last field, `c`.

    >>> add_check(b'{"loss":0.25}')
    b'{"loss":0.25,"c":2674730190}'
    >>> is_intact(add_check(b'{"loss":0.25}')), is_intact(b'{"loss":0.35,"c":2674730190}')
    (True, False)
    """
    body = text[:-1]
    return b'%b,"c":%d}' % (body, crc32(body))


def is_intact(text: bytes) -> bool | None:
    """Return True if the checksum of the JSON object `text` is correct, False if it is wrong, None if there is none."""
    at = text.rfind(_FIELD)
    if at < 0:
        return None
    return text[at:] == b"%b%d}" % (_FIELD, crc32(text[:at]))


def add_item(text: bytes) -> bytes:
    """Return `text`, a JSON list that is not empty, with its checksum as the last item.

    >>> is_intact_list(add_item(b'[1,2]')), is_intact_list(b'[1,3,3909607990]')
    (True, False)
    """
    body = text[:-1]
    return b"%b,%d]" % (body, crc32(body))


def is_intact_list(text: bytes) -> bool:
    """Return True if the last item of the JSON list `text` is its correct checksum."""
    body, comma, check = text.rpartition(b",")
    return bool(comma) and check == b"%d]" % crc32(body)
