"""Copy large buffers: by several threads while training waits, or late, after training has resumed.

Between a boundary and the next step of the optimizer, training only reads weights and the optimizer's moments, and
this time is mostly longer than a copy takes. A late copy uses this time: the memory pages are watched for writes,
training resumes, and a thread copies the buffers. If a page was written before its copy, the copy is thrown away.
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
"""Bytes that a thread copies at a time. At the end, all threads wait for the last one, at most for one such piece."""
ONE_THREAD_BELOW = 16 << 20
"""Fewer bytes are copied by one thread: starting more threads would take longer than the copy."""
MOST_THREADS = 4
"""Maximum number of threads that copy at once: with more threads, the memory is no faster."""
LATE_COPY_FROM = 128 << 20
"""Minimum number of bytes for which a late copy is worth its cost; fewer are copied in a few milliseconds."""
BATCH_BYTES = 64 << 20
"""Number of bytes that a late copy copies before it ends the watches over the copied pages."""
LATE_SLOWDOWN = 3.0
"""Duration of a late copy, by one thread, divided by the duration of a copy by several threads."""


class CopyRange(NamedTuple):
    """Memory to be copied: the addresses of the copy and of the source, and the number of bytes."""

    to: int
    source: int
    nbytes: int


def copy_in_parallel(ranges: Sequence[CopyRange]) -> None:
    """Copy all `ranges` with several threads, and return when all are copied; the caller keeps the memory alive."""
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
            pass  # use up the iterator: after a Ctrl-C, other threads must not copy memory that is freed soon
        for thread in threads:
            thread.join()


def _work(pieces: Iterator[CopyRange]) -> None:
    for to, source, nbytes in pieces:
        ctypes.memmove(to, source, nbytes)  # releases the interpreter lock


def _pieces(ranges: Sequence[CopyRange]) -> Iterator[CopyRange]:
    """Return an iterator over pieces of `ranges`, each of at most `PIECE_BYTES`.

    Several threads may draw from it at once: the iterator of a list is thread-safe.
    """
    return iter(
        [
            CopyRange(to + at, source + at, min(PIECE_BYTES, nbytes - at))
            for to, source, nbytes in ranges
            for at in range(0, nbytes, PIECE_BYTES)
        ]
    )


class OvertakenError(Exception):
    """Raised if the program wrote to memory before a late copy had copied it."""


@dataclass(frozen=True, slots=True)
class WatchedCopy:
    """Memory pages of one buffer that are to be copied late, and the watch over these pages."""

    range: CopyRange
    watch: PageWatch


class LateCopy:
    """Late copy of several buffers: one thread copies them after training has resumed.

    With `keep_watching`, all pages stay watched until `stop_watching`, because the next capture will
    ask whether they were written. Otherwise the watch over a page ends after its copy: the first write to a
    watched page costs more than the copy. `copies` is key of a buffer -> its pages.
    """

    def __init__(
        self, pages: Pages, copies: Mapping[str, WatchedCopy], *, keep_watching: bool
    ) -> None:
        self.copies = copies
        self.overtaken: set[str] = set()
        """Keys of buffers to which the program wrote before their copy; complete once `is_over` is True."""
        self.cpu = 0.0
        """Processor seconds that the copying thread used; 0 until it has ended."""
        self._pages = pages
        self._keep_watching = keep_watching
        self._lock = threading.Lock()
        self._copied: list[PageWatch] = []
        """Watches over copied pages, which `stop_watching` will return."""
        self._over = threading.Event()

    def begin(self) -> LateCopy:
        """Start the copying thread and return this object.

        The thread has normal priority: with a low one, training would write to buffers before they are copied.
        """
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
        """Wait until every buffer was copied, or was written before its copy."""
        self._over.wait()

    def stop_watching(self) -> list[PageWatch]:
        """Let the copying thread end the watch over each page that it copies from now on.

        Return the watches over pages that were copied before: the caller must end these.
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
    """Yield the ranges of `buffer` that are copied while training waits.

    These are all of `buffer` if `late` is None. Otherwise `late` is the late copy of its whole pages, and only the
    bytes before and after these pages are copied now.
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
    """Copy `range`; return False if its memory is no longer mapped, in which case `memmove` would crash."""
    at = 0
    while at < range.nbytes:
        size = min(BATCH_BYTES, range.nbytes - at)
        count = _fetch(range.to + at, size, [_Vector(range.source + at, size)])
        if count <= 0:
            return False
        at += count
    return True


def sample_memory(address: int, offsets: Sequence[int], nbytes: int) -> bytes:
    """Return `nbytes` bytes from `address` plus each of `offsets`, joined; empty if the memory is not mapped."""
    into = ctypes.create_string_buffer(len(offsets) * nbytes)
    source = [_Vector(address + offset, nbytes) for offset in offsets]
    return into.raw if _fetch(ctypes.addressof(into), len(into), source) == len(into) else b""


def _fetch(to: int, nbytes: int, source: Sequence[_Vector]) -> int:
    """Let the kernel copy `source` of this process's memory to the address `to`, where `nbytes` are free.

    Return the number of copied bytes, -1 on failure.
    """
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
    """Remembers for each buffer whether training wrote to it while a late copy ran or would have run.

    A wrong guess costs a checkpoint, so a buffer that was written once during that time is never copied late again.
    """

    def __init__(self) -> None:
        self._quiet: dict[str, bool] = {}

    def __contains__(self, key: str) -> bool:
        """Return True if `add` was called for the buffer `key`."""
        return key in self._quiet

    def is_quiet(self, key: str) -> bool:
        """Return True if the buffer `key` may be copied late: training has never written to it during a late copy."""
        return self._quiet.get(key, False)

    def add(self, key: str, *, quiet: bool) -> None:
        """Remember whether training left the buffer `key` unwritten (`quiet`) while a late copy ran or would have run."""
        self._quiet[key] = quiet and self._quiet.get(key, True)
