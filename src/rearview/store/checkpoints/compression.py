"""The zstd format of compressed objects, and the policy that decides when compressing pays.

::

    0x184D2A50, 16                header of a zstd frame that readers skip, of 16 bytes (two u32):
    RVZSTD01                      magic, with the number of the format
    bytes of the content          u64
    a zstd frame                  the content; its window is at most 1 MB

All numbers are little endian; `zstd -dc` reads the file. The name of an object is the hash of its uncompressed
content. The policy decides from a sample of the object and the recent speed of the disk.
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
"""First bytes of the file of every compressed object. Content that begins with these bytes is always compressed."""
LEVEL = 1
"""Level of zstd: the fastest ordinary level, because training runs on the same processor."""
WINDOW_BITS = 20
"""Binary logarithm of the bytes in zstd's window, which bounds a reader's memory even for a malicious file."""
INPUT_CHUNK = 1 << 20
"""Bytes that are compressed at a time, or read at a time from a compressed file."""
OUTPUT_CHUNK = 128 << 10
"""Bytes of content that are decompressed at a time."""
SMALL_ENOUGH = 0.5
"""Objects that compress to this share of their size or less are always compressed, to save space."""
TOO_LARGE = 0.7
"""Objects that compress to more than this share are never compressed: for trained weights and moments of an
optimizer (0.92 to 0.96, in bfloat16 0.78), compressing costs processor time and saves little space."""
SAMPLE_PLACES = 16
"""Number of positions at which an object is sampled: several, because a buffer may be filled only in part."""
SAMPLE_BYTES = 1 << 10
"""Bytes sampled at each position."""
LEAST_TIMED_WRITE = 8 << 20
"""Writes of fewer bytes are not used to measure the disk: their time is mostly that of the sync."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024
"""Number of saves in which a buffer that did not compress is not sampled again: after its first failure, and at most."""


def zstd_library() -> ModuleType:
    """Return Python's own zstd module or, before Python 3.14, its backport; raise if it is not installed."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as exc:
        raise StoreError(
            f"Objects of this store are compressed, and {sys.executable} has no zstd to read them: "
            f"{exc}. Install Rearview with its dependencies: `pip install rearview`.",
            slug="zstd-missing",
        ) from exc
    module: ModuleType = zstd
    return module


def compressor() -> Any:
    """Return a zstd compressor with the level `LEVEL` and a window of 2**`WINDOW_BITS` bytes."""
    zstd = zstd_library()
    kind = zstd.CompressionParameter
    return zstd.ZstdCompressor(
        options={kind.compression_level: LEVEL, kind.window_log: WINDOW_BITS}
    )


class IncompressibleError(Exception):
    """An object compresses to more bytes than the caller of `compress` allows."""


def compress(view: memoryview, most: float) -> Iterator[memoryview]:
    """Yield, in pieces, the bytes of the compressed file of an object whose content is `view`.

    Raise `IncompressibleError` if the file would have more than `most` bytes. Compressing does not hold the
    interpreter lock.
    """
    yield memoryview(_HEAD.pack(*_KIND, len(view)))
    encoder, compressed_bytes = compressor(), 0
    for at in range(0, len(view), INPUT_CHUNK):
        piece = encoder.compress(view[at : at + INPUT_CHUNK])
        compressed_bytes += len(piece)
        if compressed_bytes > most:
            raise IncompressibleError
        yield memoryview(piece)
    yield memoryview(encoder.flush())


def content_size(fd: int) -> int | None:
    """Return the size of an object's uncompressed content in bytes, according to the header of its open file `fd`.

    Return None if the object is not compressed.
    """
    head = os.pread(fd, _HEAD.size, 0)
    if not head.startswith(MARK):
        return None
    if len(head) < _HEAD.size:
        raise OSError(0, "the file ends within its header")
    return int(_HEAD.unpack(head)[3])


def decompress(fd: int, nbytes: int) -> Iterator[bytes]:
    """Yield, in pieces, the content of the compressed object in the open file `fd`.

    Raise OSError if the file is damaged, or its content does not have `nbytes` bytes.

    Decompressing stops after `nbytes`, even if a malicious file would expand to more, and needs little memory.
    """
    zstd = zstd_library()
    decoder = zstd.ZstdDecompressor(
        options={zstd.DecompressionParameter.window_log_max: WINDOW_BITS}
    )
    at, remaining = _HEAD.size, nbytes
    while not decoder.eof:
        data = b""
        if decoder.needs_input:
            data = os.pread(fd, INPUT_CHUNK, at)
            at += len(data)
            if not data:
                raise OSError(
                    0, f"the file ends after {nbytes - remaining} of {nbytes} bytes of content"
                )
        try:
            piece: bytes = decoder.decompress(data, min(OUTPUT_CHUNK, remaining + 1))
        except zstd.ZstdError as exc:
            raise OSError(0, str(exc)) from exc
        remaining -= len(piece)
        if remaining < 0:
            raise OSError(0, f"it holds more than {nbytes} bytes of content")
        yield piece
    if remaining:
        raise OSError(0, f"it holds {nbytes - remaining} of {nbytes} bytes of content")
    if decoder.unused_data or os.pread(fd, 1, at):
        raise OSError(0, "there are more bytes after the end of its content")


@dataclass(frozen=True, slots=True)
class CompressionSample:
    """Sizes before and after compressing a sample of an object, and the time that this took."""

    nbytes: int
    compressed: int
    """Size of the compressed sample in bytes."""
    seconds: float
    """Processor seconds that compressing the sample took."""

    @property
    def share(self) -> float:
        """Size of the compressed sample divided by its original size."""
        return self.compressed / self.nbytes


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Recent speed of the disk of the store: bytes written and the seconds that this took; old writes count less.

    >>> DiskSpeed().after(100, 1.0).after(300, 1.0).speed
    233.33333333333334
    """

    nbytes: float = 0.0
    seconds: float = 0.0

    @property
    def speed(self) -> float | None:
        """Bytes per second, or None if nothing was written yet."""
        return self.nbytes / self.seconds if self.seconds else None

    def after(self, nbytes: int, seconds: float) -> DiskSpeed:
        """Return the speed with one more write of `nbytes` bytes; bytes and seconds of earlier writes are halved."""
        return DiskSpeed(self.nbytes / 2 + nbytes, self.seconds / 2 + seconds)


def compression_pays(sample: CompressionSample, disk: DiskSpeed) -> bool:
    """Return True if an object like `sample` should be compressed.

    Objects that compress well, such as zeros, are compressed to save space. Objects that hardly compress, such as
    trained weights, are never compressed, even if the disk is slow. Other objects are compressed if compressing
    and writing fewer bytes is faster than writing all bytes.

    >>> fast, slow = DiskSpeed(2e9, 1.0), DiskSpeed(5e7, 1.0)
    >>> zeros, floats, half = CompressionSample(100, 1, 1e-7), CompressionSample(100, 92, 2e-7), CompressionSample(100, 60, 2e-7)
    >>> [compression_pays(zeros, fast), compression_pays(floats, fast), compression_pays(half, fast)]
    [True, False, False]
    >>> [compression_pays(zeros, slow), compression_pays(floats, slow), compression_pays(half, slow)]
    [True, False, True]
    """
    if sample.share <= SMALL_ENOUGH:
        return True
    if sample.share > TOO_LARGE or disk.speed is None:
        return False
    return sample.seconds + sample.compressed / disk.speed < sample.nbytes / disk.speed


@dataclass(slots=True)
class _Pause:
    """A number of saves in which one buffer is not sampled: at first `length`, of which `remaining` are still to come."""

    length: int
    remaining: int


class CompressionPolicy:
    """Decides which buffers to compress in the saves of one process. Only one thread may use an instance at a time."""

    def __init__(self) -> None:
        self.disk = DiskSpeed()
        self._compressor: Any = compressor()
        self._pauses: dict[str, _Pause] = {}

    @classmethod
    def of(cls, compress: str) -> Self | None:
        """Return the policy for the setting `compress`, or None if nothing is to be compressed.

        The policy is also None if zstd is not installed: runs can be recorded without compression.
        """
        try:
            return None if compress == "never" else cls()
        except StoreError:
            return None

    def predicted_share(self, key: str, view: memoryview) -> float | None:
        """Return the expected compressed size of `view` divided by its size, or None if compressing does not pay.

        `key` identifies the buffer in all saves: a buffer that did not compress is not sampled in the next saves.
        """
        pause = self._pauses.get(key)
        if pause is not None and pause.remaining:
            pause.remaining -= 1
            return None
        sample = self.sample(view)
        if compression_pays(sample, self.disk):
            self._pauses.pop(key, None)
            return sample.share
        self.pause_sampling(key)
        return None

    def pause_sampling(self, key: str) -> None:
        """Record that the buffer `key` does not compress, so that it is not sampled in the next saves."""
        pause = self._pauses.get(key)
        length = FIRST_PAUSE if pause is None else min(2 * pause.length, LONGEST_PAUSE)
        self._pauses[key] = _Pause(length, length)

    def add_write(self, nbytes: int, seconds: float) -> None:
        """Update the speed of the disk by a write of `nbytes` bytes, which were on the device after `seconds`.

        Small writes are ignored.
        """
        if nbytes >= LEAST_TIMED_WRITE:
            self.disk = self.disk.after(nbytes, seconds)

    def sample(self, view: memoryview) -> CompressionSample:
        """Compress a sample of `view`; return the sizes of the sample and the processor time."""
        piece = min(SAMPLE_BYTES, len(view) // SAMPLE_PLACES)
        last = len(view) - piece
        began = time.thread_time()
        sampled = b"".join(
            view[at : at + piece]
            for at in (last * k // (SAMPLE_PLACES - 1) for k in range(SAMPLE_PLACES))
        )
        compressed = self._compressor.compress(sampled, self._compressor.FLUSH_FRAME)
        return CompressionSample(len(sampled), len(compressed), time.thread_time() - began)
