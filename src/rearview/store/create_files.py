"""Create files and folders of the store, with the right modes; write large files without the page cache.

**Modes.** The mode of the `.rearview` folder, not the umask, says whether only its owner may read the store,
or also its group (setting `shared`). Every folder in the store gets the mode of its parent folder, and every
file the mode of its folder, so that no other module has to know the setting.

**Large files.** A buffered write of a gigabyte costs twice: the copy into the page cache, and the write-back
of the kernel, which slows training. Direct writes of aligned chunks go to the device at its own speed and
leave the page cache to the training data.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rearview import durable_files
from rearview.errors import StoreError

OWNER, GROUP = 0o700, 0o2770
"""Modes of folders. `GROUP` has the set-group-id bit, so that new files in the folder get the folder's group."""
ALIGN = 4096
"""Alignment of large data on disk in bytes: a page, which is at least as large as a block of any device."""
CHUNK = 8 << 20
"""Most bytes written by one system call: enough for full speed, few enough that signals are handled soon."""
DIRECT_FROM = 1 << 20
"""Files of fewer bytes are written through the page cache, in one call and without padding."""
PART = ".part-"
"""Prefix of the name of a file that is being written."""

_VECTOR = 512
"""Most buffers that one `pwritev` call writes: half of what Linux allows."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_spare: deque[mmap.mmap] = deque(maxlen=4)
"""Aligned chunks to be reused: the first write to new memory takes ten times as long as later writes."""


def make_folder(path: Path | str) -> None:
    """Create a folder of the store and its parents, if they do not exist."""
    path = Path(path)
    missing_folders = []
    while not path.is_dir():
        missing_folders.append(path)
        path = path.parent
    mode = folder_mode(path)
    for folder in reversed(missing_folders):
        with contextlib.suppress(FileExistsError):
            make_new_folder(folder, mode)


def make_new_folder(folder: Path, mode: int | None = None) -> None:
    """Create a folder of the store; raise `FileExistsError` if it exists.

    If `mode` is None, the folder gets the mode of its parent folder.
    """
    mode = folder_mode(folder.parent) if mode is None else mode
    folder.mkdir(mode & 0o777)
    if stat.S_IMODE(folder.stat().st_mode) != mode:
        folder.chmod(mode)


def make_store_folder(path: Path, mode: int) -> None:
    """Create the folder of a store with the mode `mode`.

    If the folder exists with another mode and belongs to this user, the modes of all its content are changed.
    """
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
                    owner_bits = entry.stat().st_mode & 0o500 if name in files else 0
                    entry.chmod(mode if name in folders else owner_bits | _file_mode(mode))


def open_file(path: Path | str, flags: int) -> int:
    """Open a file of the store and return its descriptor; a new file gets the mode that its folder determines."""
    mode = _file_mode(folder_mode(os.path.dirname(path)))  # noqa: PTH120
    fd = os.open(path, flags | os.O_CLOEXEC, mode)
    if mode != 0o600 and flags & os.O_CREAT:
        # the umask may have removed the group's right to write to the new file
        facts = os.fstat(fd)
        if facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) != mode:
            os.fchmod(fd, mode)
    return fd


def publish(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace the content of a file of the store by `data` in one step, with the mode that its folder determines.

    With `durable`, the bytes are on the device when this returns.
    """
    durable_files.publish(path, data, durable=durable, opener=open_file)


def set_store_mode(path: Path | str) -> None:
    """Give a file of the store that another program created the mode that its folder determines."""
    Path(path).chmod(_file_mode(folder_mode(os.path.dirname(path))))  # noqa: PTH120


def folder_mode(folder: Path | str) -> int:
    """Return the mode that new folders in `folder` get: `GROUP` if its group may write to it, else `OWNER`."""
    return GROUP if os.stat(folder or ".").st_mode & 0o020 else OWNER  # noqa: PTH116


def _file_mode(folder: int) -> int:
    return 0o660 if folder == GROUP else 0o600


class Sink:
    """A new file that is written from its beginning to its end under a temporary name.

    Only `publish` gives it the name `path`. If a `with` block ends before `publish`, the file is removed.
    """

    def __init__(self, path: Path | str, *, size: int) -> None:
        # strings, not `Path`s: a save opens hundreds of files and shares the GIL with training
        self.path = os.fspath(path)
        self.folder = os.path.dirname(self.path) or "."  # noqa: PTH120
        self.temporary = f"{self.folder}/{PART}{os.getpid()}-{os.urandom(6).hex()}"
        self.position = 0
        """Bytes written so far."""
        self._written = 0
        self._buffered = 0
        """Bytes in the chunk that are not written yet."""
        self._chunk: mmap.mmap | None = None
        self._direct = bool(_DIRECT) and size >= DIRECT_FROM
        try:
            self._fd = self._open()
        except FileNotFoundError:
            make_folder(self.folder)
            self._fd = self._open()

    def write(self, view: memoryview) -> None:
        """Append the bytes of `view`."""
        self.position += len(view)
        while view:
            if not self._buffered and len(view) >= ALIGN:
                view = view[self._put(view[: min(len(view) & -ALIGN, CHUNK)]) :]
                continue
            chunk = self._chunk = self._chunk or _aligned_chunk()
            count = min(len(view), CHUNK - self._buffered)
            chunk[self._buffered : self._buffered + count] = view[:count]
            self._buffered += count
            view = view[count:]
            if self._buffered == CHUNK:
                self._flush()

    def write_many(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Append many small buffers.

        If the file is written through the page cache, the kernel copies the buffers there, without the
        interpreter lock, which training needs. Else the buffers are copied into one chunk first.
        """
        for first in range(0, len(buffers), _VECTOR):
            vector = buffers[first : first + _VECTOR]
            written = 0
            if not self._direct and not self._buffered:
                written = os.pwritev(self._fd, vector, self._written)
                self._written += written
                self.position += written
            if written < sum(map(len, vector)):
                self.write(memoryview(b"".join(vector))[written:])

    def pad(self, alignment: int) -> int:
        """Append zeros until the size of the file is a multiple of `alignment`; return this size."""
        padding = -self.position % alignment
        if padding:
            self.write(memoryview(bytes(padding)))
        return self.position

    def finish(self) -> None:
        """Pass the buffered bytes to the kernel. Nothing can be appended afterwards."""
        self._flush()
        self._release()

    def sync(self) -> None:
        """Wait until all bytes of the finished file are on the device."""
        if self._fd >= 0:
            os.fsync(self._fd)
            self._close()

    def publish(self) -> None:
        """Rename the finished file from its temporary name to `path`."""
        self._close()
        os.replace(self.temporary, self.path)  # noqa: PTH105

    def discard(self) -> None:
        """Close and remove the temporary file; after `publish`, there is none to remove."""
        self._release()
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            os.unlink(self.temporary)  # noqa: PTH108

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.discard()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if self._direct:
            try:
                return open_file(self.temporary, flags | _DIRECT)
            except OSError as exc:
                if exc.errno != errno.EINVAL:
                    raise
                # some file systems create the file, and then refuse the flag O_DIRECT
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.temporary)  # noqa: PTH108
                self._direct = False
        return open_file(self.temporary, flags)

    def _put(self, view: memoryview) -> int:
        """Write `view`, or its first bytes, at the end of the file; return the number of bytes written."""
        try:
            written = os.pwrite(self._fd, view, self._written)
        except OSError as exc:
            if exc.errno != errno.EINVAL or not self._direct:
                raise
            written = self._write_refused(view)
        self._written += written
        return written

    def _write_refused(self, view: memoryview) -> int:
        """Write `view` after the file system refused a direct write of it; return the number of bytes written.

        The bytes are copied to aligned memory and written directly, or else written through the page cache.
        """
        if not self._buffered:
            chunk = self._chunk = self._chunk or _aligned_chunk()
            chunk[: len(view)] = view
            with contextlib.suppress(OSError), memoryview(chunk)[: len(view)] as aligned:
                return os.pwrite(self._fd, aligned, self._written)
        self._direct = False
        flags: int = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT)
        return os.pwrite(self._fd, view, self._written)

    def _flush(self) -> None:
        """Write the bytes in the chunk.

        A direct write must consist of whole blocks: zeros are added, and then cut off from the end of the file.
        """
        if not self._buffered or self._chunk is None:
            return
        length = self._buffered
        padded = length + (-length % ALIGN if self._direct else 0)
        end = self._written + length
        self._chunk[length:padded] = bytes(padded - length)
        with memoryview(self._chunk) as chunk:
            written = 0
            while written < padded:
                written += self._put(chunk[written:padded])
        if padded != length:
            os.ftruncate(self._fd, end)
        self._written = end
        self._buffered = 0

    def _release(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            _spare.append(chunk)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _aligned_chunk() -> mmap.mmap:
    try:
        return _spare.pop()
    except IndexError:
        # MAP_PRIVATE: by default, forked children share the mapping and would write into this chunk
        return mmap.mmap(-1, CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers for a full disk and for an exhausted quota."""


def caused_by_full_disk(exc: BaseException | None) -> bool:
    """Return True if an exception, or a cause of the exception, says that the disk is full."""
    while exc is not None:
        if isinstance(exc, OSError) and exc.errno in FULL:
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def write_error(exc: OSError, subject: str, store: Path) -> StoreError:
    """Return an error that tells the user why `subject` was not written to the store, and what to do."""
    if exc.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return StoreError(
            f"{subject} was not written: the disk of {store} is full ({exc.strerror}). What was "
            "saved before is intact. Free space with `rearview gc --budget 10GB`, or move the "
            "store to a larger disk.",
            slug="disk-full",
        )
    return StoreError(
        f"{subject} was not written to {store}: {exc.strerror or exc}. What was saved before is "
        "intact. Make the folder writable, then try again.",
        slug="store-unwritable",
    )
