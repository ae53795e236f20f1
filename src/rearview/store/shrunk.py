"""Objects kept compressed: how they stand on disk.

::

    0x184D2A50, 16                a zstd frame that readers skip, of 16 bytes (two u32):
    RVZSTD01                      what this is, with the number of the form
    bytes of the content          u64
    a zstd frame                  the content; its window is at most 1 MB

All little endian; `zstd -dc` reads it. Its name is the hash of the content, as that of a plain one.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from rearview.errors import StoreError

_HEAD = struct.Struct("<II8sQ")
_KIND = (0x184D2A50, 16, b"RVZSTD01")
MARK = _HEAD.pack(*_KIND, 0)[:-8]
"""How a compressed object begins, and no other: plain content that does is compressed, too."""
LEVEL = 1
"""The fastest of the ordinary levels: training runs on the same processor."""
WINDOW = 20
"""Bits of the window: the memory that a reader needs, whatever the file says."""
PIECE = 1 << 20
"""Bytes that are compressed, or read, at once."""
STEP = 128 << 10
"""Bytes of content that come back at once."""


def library() -> ModuleType:
    """Return Python's own zstd, or the same from elsewhere for a Python that has none."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as exc:
        raise StoreError(
            f"Objects of this store are compressed, and {sys.executable} has no zstd to read them: "
            f"{exc}. Install Rearview with what it needs: `pip install rearview`.",
            slug="zstd-missing",
        ) from exc
    found: ModuleType = zstd
    return found


def compressor() -> Any:
    """Return what compresses as objects are compressed."""
    zstd = library()
    kind = zstd.CompressionParameter
    return zstd.ZstdCompressor(options={kind.compression_level: LEVEL, kind.window_log: WINDOW})


class Bulky(Exception):  # noqa: N818 - nothing went wrong
    """Compressed, an object is hardly smaller."""


def shrink(view: memoryview, most: float) -> Iterator[memoryview]:
    """Yield the file of an object that holds `view`, piece by piece, up to about `most` bytes.

    Raise `Bulky` if that is not enough. Compressing holds no interpreter lock.
    """
    yield memoryview(_HEAD.pack(*_KIND, len(view)))
    encoder, done = compressor(), 0
    for at in range(0, len(view), PIECE):
        piece = encoder.compress(view[at : at + PIECE])
        done += len(piece)
        if done > most:
            raise Bulky
        yield memoryview(piece)
    yield memoryview(encoder.flush())


def held(fd: int) -> int | None:
    """Return the bytes of content that a compressed object says it holds; None for a plain one."""
    head = os.pread(fd, _HEAD.size, 0)
    if not head.startswith(MARK):
        return None
    if len(head) < _HEAD.size:
        raise OSError(0, "the file ends within its head")
    return int(_HEAD.unpack(head)[3])


def grow(fd: int, nbytes: int) -> Iterator[bytes]:
    """Yield the `nbytes` of content of a compressed object in order; OSError if they are others.

    However much the file would grow to, no more than that comes, and little memory is used.
    """
    zstd = library()
    decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW})
    at, left = _HEAD.size, nbytes
    while not decoder.eof:
        data = b""
        if decoder.needs_input:
            data = os.pread(fd, PIECE, at)
            at += len(data)
            if not data:
                raise OSError(
                    0, f"the file ends after {nbytes - left} of {nbytes} bytes of content"
                )
        try:
            piece: bytes = decoder.decompress(data, min(STEP, left + 1))
        except zstd.ZstdError as exc:
            raise OSError(0, str(exc)) from exc
        left -= len(piece)
        if left < 0:
            raise OSError(0, f"it holds more than {nbytes} bytes of content")
        yield piece
    if left:
        raise OSError(0, f"it holds {nbytes - left} of {nbytes} bytes of content")
    if decoder.unused_data or os.pread(fd, 1, at):
        raise OSError(0, "it goes on after the end of its content")
