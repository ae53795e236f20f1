"""Open files, restored to their position, and objects that cannot be captured, such as sockets."""

from __future__ import annotations

import gc
import io
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rearview.errors import StateError
from rearview.state.kinds import Capturing, Kind, PathStep, Restoring, WalkRules

UNKNOWN_POSITION = (None, None, None, None, None)
"""State of an open file whose position cannot be told, or need not be: a standard stream."""
_PLAIN = (io.BufferedWriter, io.BufferedRandom, io.BufferedReader, io.FileIO, io.BytesIO)


class BufferKind(Kind):
    """A StringIO or BytesIO: text or bytes, and the position."""

    name = "buffer"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return content and position of each, or None once closed."""
        return [None if o.closed else (o.getvalue(), o.tell()) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the content and seek."""
        if content is None:
            obj.close()
            return
        obj.seek(0)
        obj.truncate()
        obj.write(content[0])
        obj.seek(content[1])


class FileKind(Kind):
    """An open file: its position. Its content is not part of the state."""

    name = "file"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the position of each, or None once closed."""
        return [file_state(o, capturing) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Seek to the position; truncate a file that is being written there."""
        if content is None:
            obj.close()
        elif content[0] is not None:
            seek(obj, content[0])


class RowsKind(Kind):
    """A CSV writer, which may hold the only reference to its file."""

    name = "rows"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the file."""
        for held in gc.get_referents(obj):
            file = getattr(held, "__self__", None)
            if isinstance(file, io.IOBase):
                yield PathStep(".", "file", file)


ROWS = RowsKind()


def file_state(file: Any, capturing: Capturing) -> tuple[Any, ...] | None:
    """Return (position, path, mode, encoding, newline), or None for a closed file."""
    if file.closed:
        return None
    if is_standard(file):
        return UNKNOWN_POSITION
    try:
        if not _is_regular(file):
            if not file.writable():
                capturing.miss(file, "this is a pipe or device, which cannot be set back")
            return UNKNOWN_POSITION
        if file.writable() and transforms(file):
            capturing.miss(file, "this file is being compressed while it is written")
            return UNKNOWN_POSITION
        if file.writable():
            file.flush()  # the content on disk is saved up to the position
        position = file.tell()
    except (OSError, ValueError) as exc:
        capturing.miss(file, f"the position in this file is not known ({exc})")
        return UNKNOWN_POSITION
    path = getattr(file, "name", None)
    text = (getattr(file, "encoding", None), getattr(file, "errors", None))
    return position, path, getattr(file, "mode", None), *text


def transforms(file: Any) -> bool:
    """Return True for a file that transforms what it writes, such as gzip.

    Flushing it changes what it writes, and its internal buffer cannot be captured.
    """
    while isinstance(file, io.TextIOWrapper):
        file = file.buffer
    return not isinstance(file, _PLAIN)


def _is_regular(file: Any) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:
        # a buffer or an archive member counts as a file if it can seek
        return bool(file.seekable())


def is_standard(file: object) -> bool:
    """Return True if it is one of the standard streams of the process."""
    return any(
        file is stream or file is getattr(stream, "buffer", None)
        for stream in (
            sys.stdin,
            sys.stdout,
            sys.stderr,
            sys.__stdin__,
            sys.__stdout__,
            sys.__stderr__,
        )
    )


def seek(file: Any, position: int) -> None:
    """Set a file to a position as if everything before it had been written."""
    if file.writable():
        file.flush()
        if "a" not in str(getattr(file, "mode", "")):
            file.seek(position)
        file.truncate(position)
        if "a" in str(getattr(file, "mode", "")):
            file.seek(0, io.SEEK_END)
    else:
        file.seek(position)


def reopen(state: Sequence[Any]) -> Any:
    """Reopen a file that was opened after the walk, at its position."""
    position, path, mode, encoding, errors = state
    if not isinstance(path, (str, bytes)) or mode is None:
        raise StateError(
            f"The file {path!r} cannot be opened again: it has no path. "
            "Replay from the start of the loop.",
            slug="state-file",
        )
    again = str(mode).replace("w", "r+").replace("x", "r+").replace("++", "+")
    try:
        file = open(path, again, encoding=encoding, errors=errors)  # noqa: PTH123, SIM115
    except FileNotFoundError:
        if "r" in str(mode):
            raise
        file = open(path, mode, encoding=encoding, errors=errors)  # noqa: PTH123, SIM115
    seek(file, position)
    return file


def unkept_reason(obj: Any) -> str:
    """Return why an object cannot be captured."""
    return f"the state of a {type(obj).__name__} lies outside this process"


class UnkeptKind(Kind):
    """An object whose state is outside of the process: a socket, a database, a child process."""

    name = "unkept"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Report each."""
        for obj in objs:
            capturing.miss(obj, unkept_reason(obj))
        return None


class ArchiveKind(Kind):
    """An HDF5 file or an object in it: an input if it is only read, else not captured."""

    name = "archive"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Report those that are being written."""
        for obj in objs:
            # once closed it is false, and has no file any more
            if obj and getattr(obj.file, "mode", "") != "r":
                capturing.miss(obj, "this HDF5 file is being written")
        return None


class ThreadKind(Kind):
    """A thread, which may change the state at any time if it runs the user's own code."""

    name = "thread"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Report those that are alive and run code of the project."""
        for obj in objs:
            target = getattr(obj, "_target", None) or type(obj).run
            module = getattr(target, "__module__", None) or type(obj).__module__
            if obj.is_alive() and capturing.anchors.rules.project(module):
                capturing.miss(obj, f"the thread {obj.name} is running")
        return None


ARCHIVE = ArchiveKind()
THREAD = ThreadKind()
UNKEPT = UnkeptKind()


def stream_kind(obj: object) -> Kind | None:
    """Return the kind of a file or buffer, or None."""
    if isinstance(obj, (io.StringIO, io.BytesIO)):
        return BufferKind()
    if isinstance(obj, (io.TextIOWrapper, io.BufferedIOBase, io.FileIO)):
        return FileKind()
    return None
