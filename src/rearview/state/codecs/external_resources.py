"""Codecs of open files, which are restored to their position, and of objects whose state is outside the process.

Objects with state outside the process (sockets, running threads, HDF5 files that are being written) are only reported
as missing.
"""

from __future__ import annotations

import gc
import io
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rearview.errors import StateError
from rearview.state.codecs.base import Capturing, Kind, PathStep, Restoring, WalkRules

UNKNOWN_POSITION = (None, None, None, None, None)
"""State of an open file whose position is unknown, or is not needed (such as that of `sys.stdout`)."""
_UNTRANSFORMED = (io.BufferedWriter, io.BufferedRandom, io.BufferedReader, io.FileIO, io.BytesIO)


class BufferKind(Kind):
    """Codec of StringIO and BytesIO: captures the text or bytes, and the position."""

    name = "buffer"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (content, position) of each buffer, or None for a closed buffer."""
        return [None if o.closed else (o.getvalue(), o.tell()) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the content and move to the position, or close the buffer."""
        if content is None:
            obj.close()
            return
        obj.seek(0)
        obj.truncate()
        obj.write(content[0])
        obj.seek(content[1])


class FileKind(Kind):
    """Codec of open files: captures the position. The content of a file is not part of the state."""

    name = "file"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the state of each file (see `file_state`)."""
        return [file_state(o, capturing) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Move the file to its position, and truncate it there if it is open for writing; close it if it was closed."""
        if content is None:
            obj.close()
        elif content[0] is not None:
            seek(obj, content[0])


class CsvWriterKind(Kind):
    """Codec of CSV writers: the walk enters the file, to which the writer may have the only reference."""

    name = "rows"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to the file."""
        for referent in gc.get_referents(obj):
            file = getattr(referent, "__self__", None)
            if isinstance(file, io.IOBase):
                yield PathStep(".", "file", file)


CSV_WRITER = CsvWriterKind()


def file_state(file: Any, capturing: Capturing) -> tuple[Any, ...] | None:
    """Return (position, path, mode, encoding, errors) of an open file, or None for a closed file.

    `errors` is the way in which the file handles encoding errors. If the position is unknown, return
    `UNKNOWN_POSITION`.
    """
    if file.closed:
        return None
    if is_standard(file):
        return UNKNOWN_POSITION
    try:
        if not _is_regular(file):
            if not file.writable():
                capturing.report_missing(file, "this is a pipe or device, which cannot be rewound")
            return UNKNOWN_POSITION
        if file.writable() and transforms(file):
            capturing.report_missing(file, "this file is being compressed while it is written")
            return UNKNOWN_POSITION
        if file.writable():
            file.flush()  # so that the file on disk holds the content up to the position
        position = file.tell()
    except (OSError, ValueError) as exc:
        capturing.report_missing(file, f"the position in this file is not known ({exc})")
        return UNKNOWN_POSITION
    path = getattr(file, "name", None)
    text = (getattr(file, "encoding", None), getattr(file, "errors", None))
    return position, path, getattr(file, "mode", None), *text


def transforms(file: Any) -> bool:
    """Return True if a file changes the bytes written to it, as gzip does.

    Flushing such a file would change its output, and its internal buffer cannot be captured.
    """
    while isinstance(file, io.TextIOWrapper):
        file = file.buffer
    return not isinstance(file, _UNTRANSFORMED)


def _is_regular(file: Any) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:
        # an in-memory buffer or a member of an archive: a regular file if it can seek
        return bool(file.seekable())


def is_standard(file: object) -> bool:
    """Return True if `file` is one of the standard streams of the process."""
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
    """Move a file to `position`, and truncate the file there if it is open for writing."""
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
    """Return a file opened again at its position, from the state that `file_state` returned."""
    position, path, mode, encoding, errors = state
    if not isinstance(path, (str, bytes)) or mode is None:
        raise StateError(
            f"The file {path!r} cannot be opened again: it has no path. "
            "Replay from the start of the loop.",
            slug="state-file",
        )
    reopen_mode = str(mode).replace("w", "r+").replace("x", "r+").replace("++", "+")
    try:
        file = open(path, reopen_mode, encoding=encoding, errors=errors)  # noqa: PTH123, SIM115
    except FileNotFoundError:
        if "r" in str(mode):
            raise
        file = open(path, mode, encoding=encoding, errors=errors)  # noqa: PTH123, SIM115
    seek(file, position)
    return file


def outside_reason(obj: Any) -> str:
    """Return in words why `obj`, an object with state outside the process, cannot be captured."""
    return f"the state of a {type(obj).__name__} is outside this process"


class OutsideKind(Kind):
    """Codec of objects whose state is outside the process, such as sockets and database connections."""

    name = "unkept"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Report every object as missing."""
        for obj in objs:
            capturing.report_missing(obj, outside_reason(obj))
        return None


class Hdf5Kind(Kind):
    """Codec of HDF5 files and of objects in such files: reported as missing if the file is open for writing."""

    name = "archive"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Report each object whose file is open for writing."""
        for obj in objs:
            # a closed HDF5 file is false, and has no attribute `file`
            if obj and getattr(obj.file, "mode", "") != "r":
                capturing.report_missing(obj, "this HDF5 file is being written")
        return None


class ThreadKind(Kind):
    """Codec of threads: reports a running thread of the project, which may change the state at any time."""

    name = "thread"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Report each thread that is alive and runs code of the project."""
        for obj in objs:
            target = getattr(obj, "_target", None) or type(obj).run
            module = getattr(target, "__module__", None) or type(obj).__module__
            if obj.is_alive() and capturing.anchors.rules.project(module):
                capturing.report_missing(obj, f"the thread {obj.name} is running")
        return None


HDF5 = Hdf5Kind()
THREAD = ThreadKind()
OUTSIDE = OutsideKind()


def stream_kind(obj: object) -> Kind | None:
    """Return the codec of a file or buffer, or None for any other object."""
    if isinstance(obj, (io.StringIO, io.BytesIO)):
        return BufferKind()
    if isinstance(obj, (io.TextIOWrapper, io.BufferedIOBase, io.FileIO)):
        return FileKind()
    return None
