"""New files, written past the page cache where the file system allows it.

Tell cheaply whether a file is the same as before.

Who may read the store: its owner, whatever the umask, or also its group (setting `shared`).

The mode of the `.rearview` folder says which. Every folder in it takes after the one that it lies in,
and every file after its folder, so that no part of the program has to be told.

New files, written past the page cache where the file system allows it.

A buffered write of a gigabyte is paid for twice: once into the page cache and once more when the
kernel writes it back, beside the training that then runs. Direct writes of aligned chunks go to
the device at its own speed and leave the cache to the training data.
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

from rearview.errors import StoreError

WHOLE = 16 << 20
"""Files up to this many bytes are hashed whole; of larger ones, both ends and the size."""


def fingerprint(path: Path) -> tuple[int, int, str]:
    """Return size, time of change and a hash of the content of a file."""
    import xxhash

    about = path.stat()
    if not stat.S_ISREG(about.st_mode):  # a device or a pipe may have no end
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        if about.st_size <= WHOLE:
            digest.update(file.read())
        else:
            digest.update(about.st_size.to_bytes(8, "little"))
            digest.update(file.read(WHOLE // 2))
            file.seek(-WHOLE // 2, 2)
            digest.update(file.read())
    return about.st_size, about.st_mtime_ns, digest.hexdigest()


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


ALIGN = 4096
"""Alignment of everything large on disk: a page, and no less than any device's block."""
CHUNK = 8 << 20
"""Bytes per system call: large enough for full speed, small enough to be interrupted."""
DIRECT_FROM = 1 << 20
"""Smaller files are written through the page cache: one call, no padding."""
PART = ".part-"
"""How the name of a file begins while it is being written."""

_VECTOR = 512
"""Pieces per system call: half of what Linux takes."""
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_spare: deque[mmap.mmap] = deque(maxlen=4)
"""Aligned chunks to reuse: first touch of fresh memory costs ten times the copy into it."""


class Sink:
    """A new file that takes bytes in order and appears under its name only when published.

    Until `publish` nothing stands at `path`; left early as a context, it leaves nothing behind.
    """

    def __init__(self, path: Path | str, *, size: int) -> None:
        # texts, not `Path`s: there are hundreds of files beside training, which shares the GIL
        self.path = os.fspath(path)
        self.folder = os.path.dirname(self.path) or "."  # noqa: PTH120
        self.temporary = f"{self.folder}/{PART}{os.getpid()}-{os.urandom(6).hex()}"
        self.position = 0
        """Bytes taken so far."""
        self._written = 0
        self._held = 0
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
            if not self._held and len(view) >= ALIGN:
                view = view[self._put(view[: min(len(view) & -ALIGN, CHUNK)]) :]
                continue
            chunk = self._chunk = self._chunk or _take()
            count = min(len(view), CHUNK - self._held)
            chunk[self._held : self._held + count] = view[:count]
            self._held += count
            view = view[count:]
            if self._held == CHUNK:
                self._flush()

    def gather(self, pieces: Sequence[memoryview | bytes]) -> None:
        """Append many small pieces; past the page cache in one copy, else in no copy of ours.

        The system copies them into the page cache without the interpreter lock, which training
        needs.
        """
        for first in range(0, len(pieces), _VECTOR):
            some = pieces[first : first + _VECTOR]
            done = 0
            if not self._direct and not self._held:
                done = os.pwritev(self._fd, some, self._written)
                self._written += done
                self.position += done
            if done < sum(map(len, some)):
                self.write(memoryview(b"".join(some))[done:])

    def pad(self, alignment: int) -> int:
        """Fill with zeros up to a multiple of `alignment`; return the position reached."""
        short = -self.position % alignment
        if short:
            self.write(memoryview(bytes(short)))
        return self.position

    def finish(self) -> None:
        """Hand every byte to the system. Nothing can be appended after."""
        self._flush()
        self._release()

    def sync(self) -> None:
        """Return when every byte of the finished file is on the device."""
        if self._fd >= 0:
            os.fsync(self._fd)
            self._close()

    def publish(self) -> None:
        """Make the finished file appear under its name, whole."""
        self._close()
        os.replace(self.temporary, self.path)  # noqa: PTH105

    def discard(self) -> None:
        """Remove what was written; does nothing after `publish`."""
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
                # some file systems make the file before they refuse the flag
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.temporary)  # noqa: PTH108
                self._direct = False
        return open_file(self.temporary, flags)

    def _put(self, view: memoryview) -> int:
        """Write whole blocks at the end of the file; return how many bytes went out."""
        try:
            written = os.pwrite(self._fd, view, self._written)
        except OSError as exc:
            if exc.errno != errno.EINVAL or not self._direct:
                raise
            written = self._refused(view)
        self._written += written
        return written

    def _refused(self, view: memoryview) -> int:
        """Write what the file system would not take directly: aligned, or else buffered."""
        if not self._held:
            chunk = self._chunk = self._chunk or _take()
            chunk[: len(view)] = view
            with contextlib.suppress(OSError), memoryview(chunk)[: len(view)] as aligned:
                return os.pwrite(self._fd, aligned, self._written)
        self._direct = False
        flags: int = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT)
        return os.pwrite(self._fd, view, self._written)

    def _flush(self) -> None:
        """Write what is held. A direct write covers whole blocks, so its tail is cut off after."""
        if not self._held or self._chunk is None:
            return
        length = self._held
        padded = length + (-length % ALIGN if self._direct else 0)
        end = self._written + length
        self._chunk[length:padded] = bytes(padded - length)
        with memoryview(self._chunk) as chunk:
            done = 0
            while done < padded:
                done += self._put(chunk[done:padded])
        if padded != length:
            os.ftruncate(self._fd, end)
        self._written = end
        self._held = 0

    def _release(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            _spare.append(chunk)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def sync_folder(folder: Path | str) -> None:
    """Return when the names in `folder` are on the device."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        # some network file systems cannot sync a folder and have no need to
        if exc.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(fd)


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a disk, or of a quota, that has no room left."""


def caused_by_full_disk(exc: BaseException | None) -> bool:
    """Return True if an exception, or one that led to it, says that the disk is full."""
    while exc is not None:
        if isinstance(exc, OSError) and exc.errno in FULL:
            return True
        exc = exc.__cause__ or exc.__context__
    return False


def unwritable(exc: OSError, what: str, store: Path) -> StoreError:
    """Return the error that tells the user why `what` could not be written, and what to do."""
    if exc.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return StoreError(
            f"{what} was not written: the disk of {store} is full ({exc.strerror}). What was "
            "saved before is intact. Free space with `rearview gc --budget 10GB`, or move the "
            "store to a larger disk.",
            slug="disk-full",
        )
    return StoreError(
        f"{what} was not written to {store}: {exc.strerror or exc}. What was saved before is "
        "intact. Make the folder writable, then try again.",
        slug="store-unwritable",
    )


def _take() -> mmap.mmap:
    try:
        return _spare.pop()
    except IndexError:
        # private: by default a mapping is shared with forked children, who have writes of their own
        return mmap.mmap(-1, CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
