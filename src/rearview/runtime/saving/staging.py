"""Staging memory: memory that is allocated once and reused for the copy of every checkpoint.

`Staging` leases ranges of one memory mapping; `Staged` holds the copies of one checkpoint in such a range.
A checkpoint is in flight from its copy until it is durable or its save has failed.

`Device` copies accelerator memory to the host while the computation continues: on a separate CUDA
stream, into pinned memory that is allocated once. The copy starts when the device has done the work queued so far,
and later work on the training's stream waits on the device for the copy. Therefore the training thread only
spends the time for queueing the copy. The writer thread waits for the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rearview.model import ObjectRef
from rearview.runtime.saving.late_copy import LateCopy

PAGE = 4096
SMALL = 16 << 20
"""Bytes of staging memory that small checkpoints in flight may take together, if the user has set no bound."""
MOST_IN_FLIGHT = 8
"""Maximum number of checkpoints in flight: a program waits for all of them when it ends."""
LARGEST_SPARE = 1 << 20
"""Maximum number of bytes that a checkpoint may take outside the mapping if the mapping is full."""
MOST_NEW_BYTES = 32 << 20
"""Maximum bytes of memory that a copy may use for the first time while training waits: first use is slow. If a copy
needs more, the memory is prepared on a background thread."""
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
_WARM_STEP = 2 << 20
"""Number of bytes that are written at a time while memory is prepared: one huge page."""


@dataclass(slots=True)
class Fetch:
    """Copies of tensors from accelerators that are under way; `wait` returns the bytes, valid until `Device.release`.

    `host` is key of a tensor -> its copy in pinned memory.
    """

    host: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Number of bytes that are being copied."""
        return sum(int(each.nbytes) for each in self.host.values())

    def wait(self) -> dict[str, memoryview]:
        """Wait until all copies are done, without holding a lock; return key -> bytes of the tensor."""
        for event in self.events:
            event.synchronize()
        return {key: memoryview(each.numpy()).cast("B") for key, each in self.host.items()}


class Device:
    """Copies tensors from accelerators, with pinned memory and one extra stream per device; one fetch at a time.

    `cuda` is `torch.cuda` (the default), or an object with the same functions for streams and events.
    """

    def __init__(self, cuda: Any = None, *, pin: bool = True) -> None:
        self._cuda = cuda
        self._pin = pin
        self._pinned: dict[str, Any] = {}
        self._streams: dict[Any, Any] = {}
        self.busy = False

    def fetch(self, tensors: Mapping[str, Any]) -> Fetch:
        """Queue a copy to the host of each of `tensors` (key -> contiguous tensor on any device); return the copies."""
        import torch

        cuda = self._cuda or torch.cuda
        fetch = Fetch()
        devices = {tensor.device for tensor in tensors.values()}
        for device in sorted(devices, key=str):
            current = cuda.current_stream(device)
            side = self._streams.get(device) or cuda.Stream(device)
            self._streams[device] = side
            side.wait_stream(current)  # the copy includes everything computed so far
            with cuda.stream(side):
                for key, tensor in tensors.items():
                    if tensor.device == device:
                        flat = tensor.detach().reshape(-1).view(torch.uint8)
                        host = self._host(key, flat)
                        host.copy_(flat, non_blocking=True)
                        fetch.host[key] = host
                event = cuda.Event()
                event.record(side)
            current.wait_event(event)  # later work on the device starts after the copy
            fetch.events.append(event)
        self.busy = True
        return fetch

    def release(self, fetch: Fetch) -> None:
        """Allow the next fetch to overwrite the pinned memory of `fetch`."""
        fetch.host.clear()
        self.busy = False

    def close(self) -> None:
        """Free the pinned memory."""
        self._pinned.clear()
        self._streams.clear()

    def _host(self, key: str, flat: Any) -> Any:
        import torch

        host = self._pinned.get(key)
        if host is None or host.nbytes != flat.nbytes:
            host = torch.empty(flat.nbytes, dtype=torch.uint8, pin_memory=self._pin)
            self._pinned[key] = host
        return host


@dataclass(slots=True)
class Staged:
    """The copies of one checkpoint's changed buffers in staging memory."""

    views: dict[str, memoryview] = field(default_factory=dict)
    """Key of a buffer -> its copy."""
    tiny: dict[str, int] = field(default_factory=dict)
    """Key of a tiny buffer -> its size in bytes; the copies of tiny buffers follow one another in `gathered`."""
    gathered: memoryview = field(default_factory=lambda: memoryview(b""))
    nbytes: int = 0
    shared: dict[str, Staged] = field(default_factory=dict)
    """Key of a buffer that equals its copy in an earlier checkpoint in flight -> copies of that checkpoint."""
    refs: Mapping[str, ObjectRef] | None = None
    """Key of a buffer -> reference to the stored copy; None before the save, or if the save failed."""
    late: LateCopy | None = None
    """Copies that are made after training has resumed; None if all are made at once."""
    trial: dict[str, int] = field(default_factory=dict)
    """Key -> address of each buffer that is tested after this copy: may it be copied late next time?"""
    trial_delay: float = 0.0
    """Seconds between the copy and the test of the buffers in `trial`."""

    def separate_tiny(self) -> None:
        """Move the tiny buffers from `gathered` to `views`, each with its own view; called on the writer thread."""
        at = 0
        for key, size in self.tiny.items():
            self.views[key] = self.gathered[at : at + size]
            at += size
        self.tiny = {}

    def release(self) -> None:
        """Release all views of the staging memory, so that it can be used again."""
        for view in (*self.views.values(), self.gathered):
            view.release()
        self.views = {}


@dataclass(frozen=True, slots=True)
class Lease:
    """A range of the staging memory that one checkpoint in flight uses."""

    start: int
    end: int
    view: memoryview
    spare: bool = False
    """Whether `view` is separate memory outside the mapping."""


class Staging:
    """One memory mapping whose ranges are leased in order, as in a ring buffer; together never more than `bound`.

    The address range is reserved once and costs nothing; a page costs memory from its first use
    until `trim` or `close`. The first use of a page is ten times slower than a copy. If the state grows, only the
    additional pages are used for the first time; with a new, larger mapping, all pages would be.
    """

    def __init__(self, bound: int = 0) -> None:
        self.bound = bound
        """Maximum bytes of all leases; 0: the larger of `SMALL` and the largest single request."""
        self.touched = 0
        """Number of bytes from the start of the mapping whose pages are in memory, because they were used before."""
        self._largest = 0
        self._map: mmap.mmap | None = None
        self._leases: deque[Lease] = deque()

    @property
    def limit(self) -> int:
        """Maximum number of bytes that may be leased at once."""
        return self.bound or max(self._largest, SMALL)

    @property
    def depth(self) -> int:
        """Number of checkpoints that could be in flight at once if each needed as many bytes as the largest so far."""
        return min(MOST_IN_FLIGHT, max(1, self.limit // self._largest)) if self._largest else 1

    def fits(self, need: int) -> bool:
        """Return True if `need` bytes are within the bound, so that they can be leased when nothing else is leased."""
        return not self.bound or need <= self.bound

    def take(self, need: int) -> Lease | None:
        """Return a lease of `need` bytes, or None if the other leases leave too little memory or the bound is lower."""
        need = max(PAGE, need + -need % PAGE)
        if not self.fits(need):
            return None
        if not self._leases:
            self._largest = max(self._largest, need)
            start = 0
        elif self._leases[-1].start >= self._leases[0].start:
            # the leased ranges are one block: there may be room after this block, and before it
            start = self._leases[-1].end
            if start + need > max(self.limit, need):
                start = 0
                if need > self._leases[0].start:
                    return None
        else:
            start = self._leases[-1].end
            if start + need > self._leases[0].start:
                return None
        memory = self.reserve(start + need)
        lease = Lease(start, start + need, memoryview(memory)[start : start + need])
        self._leases.append(lease)
        self.touched = max(self.touched, start + need)
        return lease

    def is_cold(self, need: int) -> bool:
        """Return True if a copy of `need` bytes would be slow, because too much of this memory was never used."""
        return need - self.touched > MOST_NEW_BYTES

    def take_spare(self, need: int) -> Lease | None:
        """Return a lease of `need` bytes outside the mapping, or None if `need` is too large.

        It is for a checkpoint that needs few bytes because most of its buffers equal those of one in flight.
        """
        return (
            Lease(0, need, memoryview(bytearray(need)), spare=True)
            if need <= LARGEST_SPARE
            else None
        )

    def release(self, lease: Lease) -> None:
        """End `lease`; its pages stay in memory for later leases."""
        lease.view.release()
        if not lease.spare:
            self._leases.remove(lease)

    def warm(self, nbytes: int) -> None:
        """Use the first `nbytes` of the mapping now, so that the first copy into them runs at full speed.

        The caller must take no lease until this returns, because zeros are written. Writing them costs page faults,
        for which the kernel locks only this mapping. `MADV_POPULATE_WRITE` would lock the whole address space, and
        training would wait whenever its allocator maps or unmaps memory.
        """
        nbytes = min(nbytes + -nbytes % PAGE, self.bound or nbytes + PAGE)
        if nbytes <= self.touched:
            return
        memory = self.reserve(nbytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for at in range(self.touched & -PAGE, nbytes, _WARM_STEP):
            size = min(_WARM_STEP, nbytes - at)
            ctypes.memset(base + at, 0, size)  # releases the interpreter lock
            self.touched = max(self.touched, at + size)

    def trim(self, keep: int) -> None:
        """Free the pages after the first `keep` bytes if they are more than half of the pages in memory."""
        keep += -keep % PAGE
        self._largest = min(self._largest, keep)
        keep = keep if self.bound else max(keep, SMALL)
        if self._map is not None and not self._leases and keep < self.touched // 2:
            self._map.madvise(mmap.MADV_DONTNEED, keep, self.touched - keep)
            self.touched = keep

    def close(self) -> None:
        """Free the mapping; may be called twice."""
        memory, self._map = self._map, None
        self._leases.clear()
        self.touched = 0
        if memory is not None:
            # a view that still exists keeps the mapping alive
            with contextlib.suppress(BufferError):
                memory.close()

    def forget(self) -> None:
        """Drop the mapping without using it; called in a forked child, which does not have this memory."""
        self._map = None
        self._leases = deque()

    def reserve(self, need: int) -> mmap.mmap:
        """Return the mapping, with at least `need` bytes; its pages cost no memory until they are used."""
        if self._map is not None and len(self._map) >= need:
            return self._map
        if self._leases:
            raise MemoryError(f"{need} bytes of staging memory are not available")
        self.close()
        preferred = self.bound or max(2 * need, _total_memory())
        for size in (preferred + -preferred % PAGE, need + -need % PAGE):
            try:
                self._map = mmap.mmap(
                    -1, max(size, need), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
                )
                break
            except (OSError, ValueError):
                continue  # the process may have an address-space limit: try exactly the required size
        else:
            raise MemoryError(f"{need} bytes of staging memory are not available")
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP"):
            with contextlib.suppress(OSError, AttributeError):
                self._map.madvise(getattr(mmap, advice))
        return self._map


def free_memory() -> int:
    """Return how many more bytes of memory this process could use within the machine and its control groups."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - before a copy
            kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvail"))
        available = kib << 10
    except (OSError, StopIteration, ValueError):
        available = _total_memory()
    return max(0, min([available, *_group_room()]))


def _group_room(
    root: str = "/sys/fs/cgroup", groups_file: str = "/proc/self/cgroup"
) -> Iterator[int]:
    """Yield, for each memory limit of this process's control groups, how many bytes remain until it is reached.

    Containers and batch systems set memory limits and kill a process that exceeds one. Both versions
    of control groups are read; a limit that cannot be read is ignored.
    """
    try:
        with open(groups_file, encoding="utf-8") as lines:  # noqa: PTH123 - before a copy
            groups = [line.rstrip("\n").split(":", 2)[1:] for line in lines]
    except (OSError, ValueError):
        return
    for controllers, path in groups:
        if not controllers:
            limit, used, base = "memory.max", "memory.current", root
        elif "memory" in controllers.split(","):
            limit, used, base = "memory.limit_in_bytes", "memory.usage_in_bytes", f"{root}/memory"
        else:
            continue
        names = [name for name in path.split("/") if name]
        for depth in range(len(names), -1, -1):
            folder = "/".join([base, *names[:depth]])
            with contextlib.suppress(OSError, ValueError):  # the file has "max", or is missing
                limit_bytes = int(Path(folder, limit).read_text())
                yield limit_bytes - int(Path(folder, used).read_text()) + _reclaimable(folder)


def _reclaimable(folder: str) -> int:
    """Return the bytes of cached files of the control group at `folder`, which the kernel frees before its limit."""
    try:
        lines = Path(folder, "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    words = (line.split() for line in lines)
    return next((int(word[1]) for word in words if word[0] == "inactive_file"), 0)


def _total_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
