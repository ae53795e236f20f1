"""Staging memory: allocated once, reused for the copy of every checkpoint.

`Staging` leases parts of one memory mapping; `Staged` holds the copies of one checkpoint in such a part.

`Device` copies accelerator memory to the host while the computation continues: on a stream of its
own, into pinned memory that is allocated once. The copy starts when the device has done the work queued so far,
and later work on the training's stream waits on the device for the copy, so that the training thread only
pays for queueing. The writer thread waits for the bytes.
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
"""Bytes that small checkpoints waiting for the disk may take together, if the user has set no bound."""
MOST_IN_FLIGHT = 8
"""Most checkpoints in flight: a program waits for all of them when it ends."""
LARGEST_SPARE = 1 << 20
"""Most bytes that a checkpoint may take outside the mapping, if the mapping is full."""
MOST_NEW_BYTES = 32 << 20
"""Bytes of new memory that may be used for the first time while training waits; more are prepared before."""
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
_WARM_STEP = 2 << 20
"""Bytes touched at a time while memory is prepared: one huge page."""


@dataclass(slots=True)
class Fetch:
    """Running copies of tensors from accelerators; `wait` returns the bytes, valid until `Device.release`."""

    host: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that are being copied."""
        return sum(int(each.nbytes) for each in self.host.values())

    def wait(self) -> dict[str, memoryview]:
        """Wait until all copies are done and return the bytes of every tensor; holds no lock while waiting."""
        for event in self.events:
            event.synchronize()
        return {key: memoryview(each.numpy()).cast("B") for key, each in self.host.items()}


class Device:
    """Copies tensors from accelerators, with pinned memory and one extra stream per device; one fetch at a time.

    `cuda` is `torch.cuda`, or an object with the same streams and events.
    """

    def __init__(self, cuda: Any = None, *, pin: bool = True) -> None:
        self._cuda = cuda
        self._pin = pin
        self._pinned: dict[str, Any] = {}
        self._streams: dict[Any, Any] = {}
        self.busy = False

    def fetch(self, tensors: Mapping[str, Any]) -> Fetch:
        """Queue a copy of each tensor (contiguous, on any device) to the host."""
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
            current.wait_event(event)  # the copy includes nothing computed later
            fetch.events.append(event)
        self.busy = True
        return fetch

    def release(self, fetch: Fetch) -> None:
        """Allow the pinned memory of `fetch` to be written again."""
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
    """The copies, by key of the buffer."""
    tiny: dict[str, int] = field(default_factory=dict)
    """By key: sizes of the tiny buffers, whose copies follow one another in `gathered`."""
    gathered: memoryview = field(default_factory=lambda: memoryview(b""))
    nbytes: int = 0
    shared: dict[str, Staged] = field(default_factory=dict)
    """By key: copies of an earlier checkpoint, not durable yet, that equal buffers of this one."""
    refs: Mapping[str, ObjectRef] | None = None
    """Where the copies are stored; None before the save, or if the save failed."""
    late: LateCopy | None = None
    """Copies that are made after training has resumed; None if all are made at once."""
    trial: dict[str, int] = field(default_factory=dict)
    """By key: addresses of buffers that are tested now, to see whether they may be copied late next time."""
    trial_delay: float = 0.0
    """Seconds between the copy and this test."""

    def separate_tiny(self) -> None:
        """Give every tiny buffer its own view; called on the writer thread."""
        at = 0
        for key, size in self.tiny.items():
            self.views[key] = self.gathered[at : at + size]
            at += size
        self.tiny = {}

    def release(self) -> None:
        """Release the views of the staging memory."""
        for view in (*self.views.values(), self.gathered):
            view.release()
        self.views = {}


@dataclass(frozen=True, slots=True)
class Lease:
    """A part of the staging memory, for one checkpoint in flight."""

    start: int
    end: int
    view: memoryview
    spare: bool = False
    """Whether this is separate memory, outside the mapping."""


class Staging:
    """One memory mapping, leased in order like a ring; the leases together never exceed the bound.

    The address range is reserved once and costs nothing; a page costs memory from its first use
    until `trim` or `close`. A state that grows uses only the additional pages for the first time; with a new,
    larger buffer, it would use all pages for the first time, which is ten times slower than the copy.
    """

    def __init__(self, bound: int = 0) -> None:
        self.bound = bound
        """Bytes; if 0, the used memory may grow to the largest single request, or to `SMALL` if that is more."""
        self.touched = 0
        """Bytes from the start of the mapping that were used before, so that their pages are in memory."""
        self._largest = 0
        self._map: mmap.mmap | None = None
        self._leases: deque[Lease] = deque()

    @property
    def limit(self) -> int:
        """Bytes that may be in use at once."""
        return self.bound or max(self._largest, SMALL)

    @property
    def depth(self) -> int:
        """Number of checkpoints that may be in flight at once, if all had the largest size so far."""
        return min(MOST_IN_FLIGHT, max(1, self.limit // self._largest)) if self._largest else 1

    def fits(self, need: int) -> bool:
        """Return True if a request of `need` bytes could ever be met."""
        return not self.bound or need <= self.bound

    def take(self, need: int) -> Lease | None:
        """Return a lease of `need` bytes, or None if the checkpoints in flight leave too little."""
        need = max(PAGE, need + -need % PAGE)
        if not self.fits(need):
            return None
        if not self._leases:
            self._largest = max(self._largest, need)
            start = 0
        elif self._leases[-1].start >= self._leases[0].start:
            # the leases are one block: there is room after this block, and before it
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
        """Return True if a copy of `need` bytes would be slow, as too many of these bytes were never used."""
        return need - self.touched > MOST_NEW_BYTES

    def take_spare(self, need: int) -> Lease | None:
        """Return a lease outside the mapping if `need` is small: most of the checkpoint equals one in flight."""
        return (
            Lease(0, need, memoryview(bytearray(need)), spare=True)
            if need <= LARGEST_SPARE
            else None
        )

    def release(self, lease: Lease) -> None:
        """End a lease; its pages stay in memory for the next one."""
        lease.view.release()
        if not lease.spare:
            self._leases.remove(lease)

    def warm(self, nbytes: int) -> None:
        """Use the first `nbytes` of the mapping now, so that the first copy into them runs at full speed.

        The caller must take no lease until this returns: zeros are written. For each page fault
        the kernel takes the lock of this one mapping. `MADV_POPULATE_WRITE` would hold the lock of
        the whole address space, and training would wait whenever its allocator maps or unmaps memory.
        """
        nbytes = min(nbytes + -nbytes % PAGE, self.bound or nbytes + PAGE)
        if nbytes <= self.touched:
            return
        memory = self.reserve(nbytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for at in range(self.touched & -PAGE, nbytes, _WARM_STEP):
            size = min(_WARM_STEP, nbytes - at)
            ctypes.memset(base + at, 0, size)  # without the interpreter lock
            self.touched = max(self.touched, at + size)

    def trim(self, keep: int) -> None:
        """Free the memory after the first `keep` bytes if this is more than half of the memory in use."""
        keep += -keep % PAGE
        self._largest = min(self._largest, keep)
        keep = keep if self.bound else max(keep, SMALL)
        if self._map is not None and not self._leases and keep < self.touched // 2:
            self._map.madvise(mmap.MADV_DONTNEED, keep, self.touched - keep)
            self.touched = keep

    def close(self) -> None:
        """Free everything; may be called twice."""
        memory, self._map = self._map, None
        self._leases.clear()
        self.touched = 0
        if memory is not None:
            # a view that still exists keeps the mapping alive
            with contextlib.suppress(BufferError):
                memory.close()

    def forget(self) -> None:
        """In a forked child, drop the mapping without using it: the child does not have this memory."""
        self._map = None
        self._leases = deque()

    def reserve(self, need: int) -> mmap.mmap:
        """Return a mapping of at least `need` bytes; costs no memory yet."""
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
                continue  # an address-space limit: try exactly the required size
        else:
            raise MemoryError(f"{need} bytes of staging memory are not available")
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP"):
            with contextlib.suppress(OSError, AttributeError):
                self._map.madvise(getattr(mmap, advice))
        return self._map


def free_memory() -> int:
    """Return how many more bytes this process could use, by the machine and by its control groups."""
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
    """Yield, for each memory limit of this process's control groups, the bytes left until it is reached.

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
            with contextlib.suppress(OSError, ValueError):  # "max", or no file
                limit_bytes = int(Path(folder, limit).read_text())
                yield limit_bytes - int(Path(folder, used).read_text()) + _reclaimable(folder)


def _reclaimable(folder: str) -> int:
    """Return the bytes of cached files that the kernel frees before a limit is reached."""
    try:
        lines = Path(folder, "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    words = (line.split() for line in lines)
    return next((int(word[1]) for word in words if word[0] == "inactive_file"), 0)


def _total_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
