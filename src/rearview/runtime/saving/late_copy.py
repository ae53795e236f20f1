"""Copy large buffers: by several threads while training waits, or late, after training has resumed.

Between a boundary and the next step of the optimizer, training only reads weights and moments, and this time is
mostly longer than a copy takes. A late copy uses this time: the pages are watched, training resumes, and a thread
copies the buffers. If a page was written before its copy, the copy is thrown away.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rearview.runtime.saving.dirty_pages import Pages, PageWatch
from rearview.store.machine_and_process import cores

PIECE_BYTES = 4 << 20
"""Bytes that a thread copies at a time: at the end, threads wait for the slowest one no longer than for these."""
ONE_THREAD_BELOW = 16 << 20
"""Bytes below which one thread copies everything: starting more threads takes longer."""
MOST_THREADS = 4
"""Threads that copy at once: more do not make memory faster."""
LATE_COPY_FROM = 128 << 20
"""Bytes from which a late copy is worth its cost; fewer are copied in a few milliseconds."""
BATCH_BYTES = 64 << 20
"""Bytes that a late copy copies before it ends the watches over their pages."""
LATE_SLOWDOWN = 3.0
"""Duration of a late copy by one thread, relative to a copy by several threads."""


class CopyRange(NamedTuple):
    """Memory to be copied: the addresses of the copy and of the source, and the number of bytes."""

    to: int
    source: int
    nbytes: int


def copy_in_parallel(ranges: Sequence[CopyRange]) -> None:
    """Copy all ranges before returning; the caller keeps the memory alive."""
    pieces = _pieces(ranges)
    threads = []
    if sum(each.nbytes for each in ranges) >= ONE_THREAD_BELOW:
        for _ in range(min(MOST_THREADS, cores()) - 1):
            thread = threading.Thread(
                target=_work, args=(pieces,), name="rearview-copy", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending, or no thread can be started
                break
            threads.append(thread)
    try:
        _work(pieces)
    finally:
        for _ in pieces:
            pass  # after Ctrl-C, drop the remaining pieces: the program may free the memory soon
        for thread in threads:
            thread.join()


def _work(pieces: Iterator[CopyRange]) -> None:
    for to, source, nbytes in pieces:
        ctypes.memmove(to, source, nbytes)  # releases the interpreter lock


def _pieces(ranges: Sequence[CopyRange]) -> Iterator[CopyRange]:
    """Return the ranges in pieces; several threads may draw from this iterator: a list's iterator is thread-safe."""
    return iter(
        [
            CopyRange(to + at, source + at, min(PIECE_BYTES, nbytes - at))
            for to, source, nbytes in ranges
            for at in range(0, nbytes, PIECE_BYTES)
        ]
    )


class OvertakenError(Exception):
    """The program wrote to memory before it was copied."""


@dataclass(frozen=True, slots=True)
class WatchedCopy:
    """Memory pages to be copied, and the watch over these pages."""

    range: CopyRange
    watch: PageWatch


class LateCopy:
    """Copies of several buffers that one thread makes after training has resumed.

    With `keep_watching`, all pages stay watched until `stop_watching`, because the next capture will
    ask whether they were written. Otherwise the watch over a page ends after its copy: the first write to a
    watched page costs more than the copy.
    """

    def __init__(
        self, pages: Pages, copies: Mapping[str, WatchedCopy], *, keep_watching: bool
    ) -> None:
        self.copies = copies
        self.overtaken: set[str] = set()
        """Keys of buffers that were written before they were copied; final once `is_over` is True."""
        self.cpu = 0.0
        """Processor seconds that the thread used; 0 until it has ended."""
        self._pages = pages
        self._keep_watching = keep_watching
        self._lock = threading.Lock()
        self._copied: list[PageWatch] = []
        """Watches over copied pages, to be returned by `stop_watching`."""
        self._over = threading.Event()

    def begin(self) -> LateCopy:
        """Start the copying thread with normal priority: training would overtake a slow copy."""
        thread = threading.Thread(target=self._run, name="rearview-copy", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, or no thread can be started
            self._run()
        return self

    @property
    def is_over(self) -> bool:
        """Whether every buffer was copied, or was written before its copy."""
        return self._over.is_set()

    @property
    def keep_watching(self) -> bool:
        """Whether pages stay watched after they are copied."""
        return self._keep_watching

    def wait(self) -> None:
        """Wait until all copies are over."""
        self._over.wait()

    def stop_watching(self) -> list[PageWatch]:
        """From now on, end the watch over a page after its copy; return the watches over pages copied before.

        The caller ends these.
        """
        with self._lock:
            self._keep_watching, copied, self._copied = False, self._copied, []
        return copied

    def _run(self) -> None:
        try:
            for batch in _batches(self.copies):
                for key, copy in batch.items():
                    if not copy_if_mapped(copy.range) or not self._pages.intact(copy.watch):
                        self.overtaken.add(key)
                with self._lock:
                    self._copied += [copy.watch for copy in batch.values()]
                    if not self._keep_watching:
                        self._pages.remove_protection(*self._copied)
                        self._copied = []
        except BaseException:
            self.overtaken.update(self.copies)
            raise
        finally:
            self.cpu = time.thread_time()
            self._over.set()


def _batches(copies: Mapping[str, WatchedCopy]) -> Iterator[dict[str, WatchedCopy]]:
    batch: dict[str, WatchedCopy] = {}
    for key, copy in copies.items():
        batch[key] = copy
        if sum(each.range.nbytes for each in batch.values()) >= BATCH_BYTES:
            yield batch
            batch = {}
    if batch:
        yield batch


def ranges_to_copy_now(buffer: CopyRange, late: WatchedCopy | None) -> Iterator[CopyRange]:
    """Yield the parts of a buffer that training waits for: all of it, or what is not in whole pages.

    `late` is the late copy of the whole pages, None if the buffer is not copied late.
    """
    if late is None:
        yield buffer
        return
    to, source, nbytes = buffer
    low, high = late.watch.low - source, late.watch.high - source
    yield CopyRange(to, source, low)
    yield CopyRange(to + high, source + high, nbytes - high)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def copy_if_mapped(range: CopyRange) -> bool:  # noqa: A002 - the word of this module
    """Copy memory; return False if it is no longer mapped, where `memmove` would crash."""
    at = 0
    while at < range.nbytes:
        size = min(BATCH_BYTES, range.nbytes - at)
        count = _fetch(range.to + at, size, [_Vector(range.source + at, size)])
        if count <= 0:
            return False
        at += count
    return True


def sample_memory(address: int, offsets: Sequence[int], nbytes: int) -> bytes:
    """Return the `nbytes` bytes at each offset from `address`, joined; empty if the memory is unmapped."""
    into = ctypes.create_string_buffer(len(offsets) * nbytes)
    source = [_Vector(address + offset, nbytes) for offset in offsets]
    return into.raw if _fetch(ctypes.addressof(into), len(into), source) == len(into) else b""


def _fetch(to: int, nbytes: int, source: Sequence[_Vector]) -> int:
    """Read this process's own memory through the kernel; return the number of bytes read, -1 on failure."""
    readv = _process_vm_readv()
    if readv is None:
        return -1
    into, vectors = _Vector(to, nbytes), (_Vector * len(source))(*source)
    return int(readv(os.getpid(), ctypes.byref(into), 1, vectors, len(source), 0))


@functools.cache
def _process_vm_readv() -> Any:
    """Return the C function `process_vm_readv`, or None if the system does not have it."""
    readv = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if readv is not None:
        readv.restype = ctypes.c_ssize_t
        vectors = (ctypes.POINTER(_Vector), ctypes.c_ulong)
        readv.argtypes = (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong)
    return readv


class WriteHistory:
    """Remembers which buffers training does not write to while a late copy runs.

    A wrong guess costs a checkpoint, so a buffer that was written once during a late copy is never trusted again.
    """

    def __init__(self) -> None:
        self._quiet: dict[str, bool] = {}

    def __contains__(self, key: str) -> bool:
        """Return True if the buffer was examined before."""
        return key in self._quiet

    def is_quiet(self, key: str) -> bool:
        """Return True if the buffer may be copied late."""
        return self._quiet.get(key, False)

    def add(self, key: str, *, quiet: bool) -> None:
        """Remember whether training left the buffer unwritten (`quiet`)."""
        self._quiet[key] = quiet and self._quiet.get(key, True)
