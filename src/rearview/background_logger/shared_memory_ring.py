"""Shared memory through which calls of a logger reach the logger process, which makes them.

One memory file contains a header and a ring of messages. The program appends messages, the logger process
reads them in order. The program writes over messages that were read before it uses new memory, so the ring stays small
while the logger process keeps up. After the program is killed, the memory exists until the logger process has read
it, so no call that had returned is lost.
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
"""Size in bytes of the header before the ring; it contains numbers of eight bytes each."""
HEAD, TAIL, ASLEEP, ATTENTION, ERRORS, ERRORS_READ, PID = range(7)
"""Indices of the numbers in the header: offset of the end of the messages; offset of the first unread message; whether
the logger process sleeps until it is woken; whether the program must check the other numbers (the process sleeps, or
has sent errors); number of errors; number of errors that the program has read; id of the logger process."""
JUMP = 2**64 - 1
"""Stored in place of a message's size to say that the next message is at the start of the ring."""
GAP = 64
"""Bytes that are kept free after each message, so that a `JUMP` always fits, and a full ring never looks empty."""
FIRST_LAP = 1 << 20
"""Bytes of the ring that are used at first; more memory is used only if the logger process falls behind."""
_FENCE = threading.Lock()
ORDERED = platform.machine().lower() in {"x86_64", "amd64", "i686"}
"""Whether other processes see writes to memory in the order in which this type of processor makes them."""


def fence() -> None:
    """Ensure that memory accesses before this call are complete before memory accesses after it begin.

    x86 processors keep this order anyway. On other processors, taking a lock twice enforces the order.
    """
    if not ORDERED:
        with _FENCE:
            pass
        with _FENCE:
            pass


class Ring:
    """The shared memory of one background logger, mapped into the program or into the logger process.

    `bound` is the number of bytes that unread messages may take. A single message that is larger
    has to wait until the ring is empty.
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
        """Offset at which the program continues at the start of the ring, if there is room."""
        self.limit = self.lap - GAP
        """Offset up to which the program may write without a call of `find_room`."""

    @classmethod
    def create(cls, bound: int) -> Ring:
        """Return a new ring for `bound` bytes of unread messages; raise MemoryError if it cannot be mapped.

        The memory has no file name, and is freed when the last process that maps it ends.
        """
        bound = max(bound, FIRST_LAP)
        fd = os.memfd_create("rearview-background", os.MFD_CLOEXEC)
        physical_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for size in (max(physical_memory, 2 * bound), 2 * bound, bound):
            try:
                os.ftruncate(fd, HEADER + size)
                return cls(fd, size, bound)
            except (OSError, ValueError, OverflowError):
                continue  # memory is limited (ulimit -v): try a ring in which only smaller calls fit
        os.close(fd)
        raise MemoryError(f"{bound} bytes of shared memory cannot be mapped")

    def find_room(self, nbytes: int) -> int | None:
        """Return an offset at which `nbytes` bytes can be written, or None if the logger process must read more first.

        This may write a `JUMP`, which tells the logger process to continue at the start of the ring.
        """
        nbytes += GAP
        head, tail = self.header[HEAD], self.header[TAIL]
        if (
            tail > head
        ):  # the program has continued at the start: unread messages are after the tail and before the head
            end = min(tail, self.bound)
            self.limit = end - GAP
            return head if head + nbytes <= end else None
        if head + nbytes <= self.lap:
            self.limit = self.lap - GAP
            return head
        # if the logger process keeps up, start again at offset 0, whose memory is in the processor's cache
        if nbytes <= min(tail, self.bound) and (
            4 * (head - tail) < self.lap or head + nbytes > self.bound
        ):
            self._jump(head)
            self.lap = min(self.lap, self.bound)
            self.limit = min(tail, self.bound) - GAP
            return 0
        if head + nbytes <= self.bound:
            self.lap = min(self.bound, max(2 * self.lap, head + nbytes))
            self.limit = self.lap - GAP
            return head
        if head == tail and nbytes <= self.size:  # the ring is empty: one message may use it all
            if head:
                self._jump(head)
                return None  # wait until the logger process has read the `JUMP`
            self.lap = max(self.bound, nbytes)
            self.limit = self.lap - GAP
            return 0
        return None

    def _jump(self, head: int) -> None:
        self.write_number(head, JUMP)
        fence()
        self.header[HEAD] = 0

    def write_number(self, offset: int, value: int) -> None:
        """Write `value` as eight bytes at `offset` of the ring."""
        self.bytes[offset : offset + 8] = value.to_bytes(8, "little")

    def read_number(self, offset: int) -> int:
        """Return the number that is stored as eight bytes at `offset` of the ring."""
        return int.from_bytes(self.bytes[offset : offset + 8], "little")

    def release(self, offset: int, size: int) -> None:
        """Return memory of a message that was read to the operating system, as far as it is beyond `bound`."""
        start = max(offset, self.bound) + -max(offset, self.bound) % mmap.PAGESIZE
        if offset + size > start:
            with contextlib.suppress(OSError, ValueError):
                self.memory.madvise(_REMOVE, HEADER + start, offset + size - start)

    def close(self) -> None:
        """Unmap the memory; a second call does nothing."""
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
    """Return `size` rounded up to 64 bytes, so that an array after these bytes is aligned.

    >>> aligned(1), aligned(64)
    (64, 64)
    """
    return size + -size % 64


def layout(payload: int, sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return (offset of each buffer in a message, size of the message) for a payload of `payload` bytes.

    A message consists of its size, the size of its payload, the payload, and buffers of the given `sizes`.

    >>> layout(10, [4, 100])
    ([64, 128], 256)
    """
    offset = aligned(16 + payload)
    offsets = []
    for size in sizes:
        offsets.append(offset)
        offset += aligned(size)
    return offsets, offset


def copy_into(ring: Ring, offset: int, data: Any) -> None:
    """Copy the contiguous buffer `data` to `offset` of the ring; release the interpreter lock for a large buffer."""
    view = memoryview(data)
    view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
    if view.nbytes < _LARGE or view.readonly:
        ring.bytes[offset : offset + view.nbytes] = view
        return
    target = ctypes.addressof(ctypes.c_char.from_buffer(ring.bytes, offset))
    source = ctypes.addressof(ctypes.c_char.from_buffer(view))
    ctypes.memmove(target, source, view.nbytes)


_LARGE = 1 << 20
