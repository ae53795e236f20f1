"""Shared memory through which the calls of a logger reach the process that owns the logger.

One memory file contains a header and a ring of messages. The program appends messages, the writer process
consumes them in order. Memory is touched on first use and reused afterwards, so the ring stays small while
the writer process keeps up. The memory outlives a killed program until the writer process has read it, so
no call that had returned is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import threading
from collections.abc import Sequence
from typing import Any

HEADER = 4096
"""Bytes before the ring: counters, eight bytes each."""
HEAD, TAIL, ASLEEP, ATTENTION, ERRORS, SEEN, PID = range(7)
"""Counters: end of published messages; begin of unread messages; whether the writer process sleeps until it
is woken; whether the program should check for that or for errors; errors so far; errors that the program
has read; id of the writer process."""
JUMP = 2**64 - 1
"""Instead of a message's size: continue at the start of the ring."""
GAP = 64
"""Bytes that stay free after every message, so that a jump always fits and a full ring is not taken
for empty.
"""
FIRST_LAP = 1 << 20
"""Bytes of the ring that are used before more memory is touched."""
_FENCE = threading.Lock()
ORDERED = platform.machine().lower() in {"x86_64", "amd64", "i686"}
"""Whether other processes see stores in the order in which this processor made them."""


def fence() -> None:
    """Keep memory accesses before this call before those after it.

    x86 keeps this order anyway; on other processors, taking a lock twice enforces it.
    """
    if not ORDERED:
        with _FENCE:
            pass
        with _FENCE:
            pass


class Ring:
    """The memory of one background writer, as either side sees it.

    `bound` is the number of bytes that waiting calls may take. A single call that is larger
    waits until the ring is empty.
    """

    def __init__(self, fd: int, size: int, bound: int) -> None:
        self.fd = fd
        self.bound = bound
        self.size = size
        self.memory = mmap.mmap(fd, HEADER + size, mmap.MAP_SHARED | _NORESERVE)
        whole = memoryview(self.memory)
        self.header = whole[:HEADER].cast("Q")
        self.bytes = whole[HEADER:]
        self.lap = min(FIRST_LAP, bound)
        self.limit = self.lap - GAP
        """The program may write up to here without reading the writer's counters."""

    @classmethod
    def create(cls, bound: int) -> Ring:
        """Return a new ring; its memory has no name and is gone with the last process that maps it."""
        bound = max(bound, FIRST_LAP)
        fd = os.memfd_create("rearview-background", os.MFD_CLOEXEC)
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for size in (max(most, 2 * bound), 2 * bound, bound):
            try:
                os.ftruncate(fd, HEADER + size)
                return cls(fd, size, bound)
            except (OSError, ValueError, OverflowError):
                continue  # the address space of the process is limited: single large calls get less room
        os.close(fd)
        raise MemoryError(f"{bound} bytes of shared memory cannot be mapped")

    def room(self, need: int) -> int | None:
        """Return where `need` bytes can be written; None until the writer process has read more messages.

        May publish a jump to the start of the ring.
        """
        need += GAP
        head, tail = self.header[HEAD], self.header[TAIL]
        if tail > head:  # unread messages: from the tail to the lap's end, and before the head
            end = min(tail, self.bound)
            self.limit = end - GAP
            return head if head + need <= end else None
        if head + need <= self.lap:
            self.limit = self.lap - GAP
            return head
        if need <= min(tail, self.bound) and (
            4 * (head - tail) < self.lap or head + need > self.bound
        ):  # the writer keeps up: warm memory is used again
            self._jump(head)
            self.lap = min(self.lap, self.bound)
            self.limit = min(tail, self.bound) - GAP
            return 0
        if head + need <= self.bound:
            self.lap = min(self.bound, max(2 * self.lap, head + need))
            self.limit = self.lap - GAP
            return head
        if head == tail and need <= self.size:  # empty: one large call may use all of it
            if head:
                self._jump(head)
                return None  # wait until the writer process has followed the jump
            self.lap = max(self.bound, need)
            self.limit = self.lap - GAP
            return 0
        return None

    def _jump(self, head: int) -> None:
        self.header_at(head, JUMP)
        fence()
        self.header[HEAD] = 0

    def header_at(self, place: int, value: int) -> None:
        """Write a number of eight bytes into the ring."""
        self.bytes[place : place + 8] = value.to_bytes(8, "little")

    def number_at(self, place: int) -> int:
        """Read a number of eight bytes from the ring."""
        return int.from_bytes(self.bytes[place : place + 8], "little")

    def give_back(self, place: int, size: int) -> None:
        """Release the memory of a message that was read, if it is beyond the bound."""
        start = max(place, self.bound) + -max(place, self.bound) % mmap.PAGESIZE
        if place + size > start:
            with contextlib.suppress(OSError, ValueError):
                self.memory.madvise(_REMOVE, HEADER + start, place + size - start)

    def close(self) -> None:
        """Unmap the memory; may be called twice."""
        with contextlib.suppress(BufferError, ValueError):
            self.header.release()
            self.bytes.release()
            self.memory.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
_REMOVE: int = getattr(mmap, "MADV_REMOVE", 9)


def aligned(size: int) -> int:
    """Return `size` rounded up so that arrays behind it are aligned.

    >>> aligned(1), aligned(64)
    (64, 64)
    """
    return size + -size % 64


def layout(payload: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where each buffer of a message begins, counted from the message, and its whole size.

    A message is its size, the size of its payload, the payload, then its buffers.

    >>> layout(10, [4, 100])
    ([64, 128], 256)
    """
    place = aligned(16 + payload)
    places = []
    for size in sizes:
        places.append(place)
        place += aligned(size)
    return places, place


def copy_into(ring: Ring, place: int, data: Any) -> None:
    """Copy the bytes of a contiguous buffer into the ring; large ones without the interpreter lock."""
    view = memoryview(data)
    view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    if view.nbytes < _LARGE or view.readonly:
        ring.bytes[place : place + view.nbytes] = view
        return
    target = ctypes.addressof(ctypes.c_char.from_buffer(ring.bytes, place))
    source = ctypes.addressof(ctypes.c_char.from_buffer(view))
    ctypes.memmove(target, source, view.nbytes)


_LARGE = 1 << 20
