"""Whether compressing an object pays: told by a sample of it, and by the disk as it was of late.

Objects kept compressed: how they stand on disk.

::

    0x184D2A50, 16                a zstd frame that readers skip, of 16 bytes (two u32):
    RVZSTD01                      what this is, with the number of the form
    bytes of the content          u64
    a zstd frame                  the content; its window is at most 1 MB

All little endian; `zstd -dc` reads it. Its name is the hash of the content, as that of a plain one.

Whether compressing an object pays: told by a sample of it, and by the disk as it was of late.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

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


SPACE = 0.5
"""What shrinks to this share of itself is compressed for the space alone."""
NOTICEABLE = 0.7
"""What stays above this share is never compressed: trained weights and moments (0.92 to 0.96, in
bfloat16 0.78) cost processor time that training wants, and give next to nothing back."""
PLACES = 16
"""Places of an object that are sampled: it may be filled from one end."""
SAMPLE = 1 << 10
"""Bytes from each place."""
TELLING = 8 << 20
"""Writes of fewer bytes tell how long a sync takes, not how fast the disk is."""
FIRST, LONGEST = 16, 1024
"""How often a buffer that does not shrink is passed over before it is sampled again: at first, and
after it was found so time and again."""


@dataclass(frozen=True, slots=True)
class CompressionSample:
    """What compressing some of an object came to."""

    nbytes: int
    shrunk: int
    """Bytes that were left of them."""
    seconds: float
    """Processor seconds that it took."""

    @property
    def share(self) -> float:
        """What is left of each byte."""
        return self.shrunk / self.nbytes


@dataclass(frozen=True, slots=True)
class Disk:
    """How fast the disk of the store took what was written to it.

    >>> Disk().after(100, 1.0).after(300, 1.0).speed
    233.33333333333334
    """

    nbytes: float = 0.0
    seconds: float = 0.0

    @property
    def speed(self) -> float | None:
        """Bytes a second; None before anything was written."""
        return self.nbytes / self.seconds if self.seconds else None

    def after(self, nbytes: int, seconds: float) -> Disk:
        """Return what is known after one more write; each earlier one counts half as much."""
        return Disk(self.nbytes / 2 + nbytes, self.seconds / 2 + seconds)


def pays(sample: CompressionSample, disk: Disk) -> bool:
    """Say whether an object like `sample` is to be compressed.

    Zeros are, for their space; dense floats are not, however slow the disk; what lies between is
    where compressing it and writing less is the faster way.

    >>> fast, slow = Disk(2e9, 1.0), Disk(5e7, 1.0)
    >>> zeros, floats, half = CompressionSample(100, 1, 1e-7), CompressionSample(100, 92, 2e-7), CompressionSample(100, 60, 2e-7)
    >>> [pays(zeros, fast), pays(floats, fast), pays(half, fast)]
    [True, False, False]
    >>> [pays(zeros, slow), pays(floats, slow), pays(half, slow)]
    [True, False, True]
    """
    if sample.share <= SPACE:
        return True
    if sample.share > NOTICEABLE or disk.speed is None:
        return False
    return sample.seconds + sample.shrunk / disk.speed < sample.nbytes / disk.speed


@dataclass(slots=True)
class _Pause:
    length: int
    left: int


class Worth:
    """What one process has learnt of its buffers and its disk. Used by one thread at a time."""

    def __init__(self) -> None:
        self.disk = Disk()
        self._compressor: Any = compressor()
        self._pauses: dict[str, _Pause] = {}

    @classmethod
    def of(cls, compress: str) -> Self | None:
        """Return it for the setting of that name; None if nothing is to be compressed.

        So too where the library is not installed: a run is recorded all the same.
        """
        try:
            return None if compress == "never" else cls()
        except StoreError:
            return None

    def share(self, key: str, view: memoryview) -> float | None:
        """Return to what share of it `view` will shrink, if compressing pays; else None.

        `key` is the name of the buffer: one that did not shrink is mostly passed over.
        """
        pause = self._pauses.get(key)
        if pause is not None and pause.left:
            pause.left -= 1
            return None
        sample = self.sample(view)
        if pays(sample, self.disk):
            self._pauses.pop(key, None)
            return sample.share
        self.refuse(key)
        return None

    def refuse(self, key: str) -> None:
        """Take note that the buffer does not shrink."""
        known = self._pauses.get(key)
        length = FIRST if known is None else min(2 * known.length, LONGEST)
        self._pauses[key] = _Pause(length, length)

    def wrote(self, nbytes: int, seconds: float) -> None:
        """Take note of a write, from its first byte until it was on the device."""
        if nbytes >= TELLING:
            self.disk = self.disk.after(nbytes, seconds)

    def sample(self, view: memoryview) -> CompressionSample:
        """Return what compressing a little of `view` comes to."""
        piece = min(SAMPLE, len(view) // PLACES)
        last = len(view) - piece
        began = time.thread_time()
        some = b"".join(
            view[at : at + piece] for at in (last * k // (PLACES - 1) for k in range(PLACES))
        )
        shrunk = self._compressor.compress(some, self._compressor.FLUSH_FRAME)
        return CompressionSample(len(some), len(shrunk), time.thread_time() - began)
