"""Memory that changed bytes are copied into while training waits: taken once, used again.

Accelerator memory on its way to the host, beside the computation.

The copy runs on a stream of its own into pinned memory that is allocated once. It starts when the
work queued so far is done, and later work on the training's stream waits for it on the device, so
the training thread itself pays only for queueing. The background thread waits for the bytes.

What was copied of one checkpoint, on its way to disk.

Memory that changed bytes are copied into while training waits: taken once, used again.
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


@dataclass(slots=True)
class Fetch:
    """Copies under way; `wait` returns their bytes, valid until `Device.release`."""

    host: dict[str, Any] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that are being copied."""
        return sum(int(each.nbytes) for each in self.host.values())

    def wait(self) -> dict[str, memoryview]:
        """Return the bytes of every tensor once all copies are done. Holds no lock meanwhile."""
        for event in self.events:
            event.synchronize()
        return {key: memoryview(each.numpy()).cast("B") for key, each in self.host.items()}


class Device:
    """Pinned memory and one side stream per device; one fetch at a time.

    `cuda` is `torch.cuda`, or anything that has its streams and events.
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
            side.wait_stream(current)  # everything computed so far is in the copy
            with cuda.stream(side):
                for key, tensor in tensors.items():
                    if tensor.device == device:
                        flat = tensor.detach().reshape(-1).view(torch.uint8)
                        host = self._host(key, flat)
                        host.copy_(flat, non_blocking=True)
                        fetch.host[key] = host
                event = cuda.Event()
                event.record(side)
            current.wait_event(event)  # nothing computed later is
            fetch.events.append(event)
        self.busy = True
        return fetch

    def release(self, fetch: Fetch) -> None:
        """Allow the pinned memory of `fetch` to be written again."""
        fetch.host.clear()
        self.busy = False

    def close(self) -> None:
        """Give the pinned memory back."""
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
    """Changed buffers, copied: tiny ones end to end, the others one by one."""

    views: dict[str, memoryview] = field(default_factory=dict)
    tiny: dict[str, int] = field(default_factory=dict)
    gathered: memoryview = field(default_factory=lambda: memoryview(b""))
    nbytes: int = 0
    lean: dict[str, Staged] = field(default_factory=dict)
    """Buffers that hold what an earlier checkpoint, still in flight, has copied."""
    refs: Mapping[str, ObjectRef] | None = None
    """Where the copies are stored; None until they are, or if they could not be."""
    late: LateCopy | None = None
    """Copies that are made after training has gone on."""
    curious: dict[str, int] = field(default_factory=dict)
    """Where buffers are of which nobody knows whether they could be copied late."""
    pause: float = 0.0
    """Seconds after which to look at those again."""

    def spread(self) -> None:
        """Give every tiny buffer its view; not done while training waits."""
        at = 0
        for key, size in self.tiny.items():
            self.views[key] = self.gathered[at : at + size]
            at += size
        self.tiny = {}

    def release(self) -> None:
        """Let go of the staging memory."""
        for view in (*self.views.values(), self.gathered):
            view.release()
        self.views = {}


PAGE = 4096
SMALL = 16 << 20
"""Without a bound, several small checkpoints may wait for the disk together in so many bytes."""
DEEPEST = 8
"""Checkpoints in flight at most: what a program waits for when it ends."""
SPARE = 1 << 20
"""What a checkpoint needs at most to be taken while memory for another is in use."""
COLD = 32 << 20
"""Bytes that may be touched for the first time while training waits; more is made ready beside it."""
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
_WARM_STEP = 2 << 20
"""Bytes touched at a time while memory is made ready: one huge page."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A stretch of staging memory that one checkpoint in flight holds."""

    start: int
    end: int
    view: memoryview
    spare: bool = False
    """It is none of the mapping."""


class Staging:
    """One mapping, handed out in order and never larger in memory than its bound.

    The address range is reserved once and costs nothing; a page of it costs memory from its first
    use until `trim` or `close`. So a state that grows touches only what it grew by, where a larger
    buffer would be paid for anew: first touch is ten times slower than the copy.
    """

    def __init__(self, bound: int = 0) -> None:
        self.bound = bound
        """Bytes; 0 lets it grow to the largest single request, or `SMALL`."""
        self.touched = 0
        """Bytes of it that are, or were made, present."""
        self._largest = 0
        self._map: mmap.mmap | None = None
        self._leases: deque[Lease] = deque()

    @property
    def limit(self) -> int:
        """Bytes that may be in use at once."""
        return self.bound or max(self._largest, SMALL)

    @property
    def depth(self) -> int:
        """Checkpoints like the largest so far that may be in flight at once."""
        return min(DEEPEST, max(1, self.limit // self._largest)) if self._largest else 1

    def fits(self, need: int) -> bool:
        """Say whether a request of `need` bytes could ever be met."""
        return not self.bound or need <= self.bound

    def take(self, need: int) -> Lease | None:
        """Return `need` bytes, or None while checkpoints in flight hold too much."""
        need = max(PAGE, need + -need % PAGE)
        if not self.fits(need):
            return None
        if not self._leases:
            self._largest = max(self._largest, need)
            start = 0
        elif self._leases[-1].start >= self._leases[0].start:
            # in use: one stretch; free: behind it, and before it
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

    def cold(self, need: int) -> bool:
        """Say whether `need` bytes would cost much more than their copy, for want of being touched."""
        return need - self.touched > COLD

    def spare(self, need: int) -> Lease | None:
        """Return a little memory of its own, for a checkpoint that leans on the one in flight."""
        return Lease(0, need, memoryview(bytearray(need)), spare=True) if need <= SPARE else None

    def release(self, lease: Lease) -> None:
        """Take back a lease; its memory stays warm for the next."""
        lease.view.release()
        if not lease.spare:
            self._leases.remove(lease)

    def warm(self, nbytes: int) -> None:
        """Make `nbytes` present now, so that the first copy into them runs at full speed.

        The caller takes no lease meanwhile: this writes zeros. Writing is on purpose: the kernel
        serves such a page fault under the lock of this one mapping, where `MADV_POPULATE_WRITE`
        holds the lock of the whole address space, and training waits for that lock whenever its
        allocator gets memory from the system or gives it back.
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
        """Give memory back to the system if no more than half of it, `keep` bytes, is needed."""
        keep += -keep % PAGE
        self._largest = min(self._largest, keep)
        keep = keep if self.bound else max(keep, SMALL)
        if self._map is not None and not self._leases and keep < self.touched // 2:
            self._map.madvise(mmap.MADV_DONTNEED, keep, self.touched - keep)
            self.touched = keep

    def close(self) -> None:
        """Give everything back; harmless twice."""
        memory, self._map = self._map, None
        self._leases.clear()
        self.touched = 0
        if memory is not None:
            # a view that somebody still holds keeps the mapping until it is gone
            with contextlib.suppress(BufferError):
                memory.close()

    def forget(self) -> None:
        """Drop the mapping without touching it: after a fork it is not in the child."""
        self._map = None
        self._leases = deque()

    def reserve(self, need: int) -> mmap.mmap:
        """Return the mapping, made if there is none of `need` bytes; costs no memory yet."""
        if self._map is not None and len(self._map) >= need:
            return self._map
        if self._leases:
            raise MemoryError(f"{need} bytes of staging memory are not to be had")
        self.close()
        wanted = self.bound or max(2 * need, _memory())
        for size in (wanted + -wanted % PAGE, need + -need % PAGE):
            try:
                self._map = mmap.mmap(
                    -1, max(size, need), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
                )
                break
            except (OSError, ValueError):
                continue  # an address-space limit: ask for exactly what is needed
        else:
            raise MemoryError(f"{need} bytes of staging memory are not to be had")
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP"):
            with contextlib.suppress(OSError, AttributeError):
                self._map.madvise(getattr(mmap, advice))
        return self._map


def free() -> int:
    """Return the bytes that this process could still use: of the machine, and of its control group."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - before a copy
            found = next(int(line.split()[1]) for line in lines if line.startswith("MemAvail"))
        left = found << 10
    except (OSError, StopIteration, ValueError):
        left = _memory()
    return max(0, min([left, *_group_room()]))


def _group_room(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> Iterator[int]:
    """Yield the bytes left below each memory limit of this process's control groups.

    Containers and batch systems set such limits; a process that exceeds one is killed. Both versions
    of control groups are read; a limit that cannot be read does not count.
    """
    try:
        with open(own, encoding="utf-8") as lines:  # noqa: PTH123 - before a copy
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
            with contextlib.suppress(OSError, ValueError):  # "max", or not there
                most = int(Path(folder, limit).read_text())
                yield most - int(Path(folder, used).read_text()) + _reclaimable(folder)


def _reclaimable(folder: str) -> int:
    """Return the bytes of cached files that the kernel gives back before a limit is reached."""
    try:
        lines = Path(folder, "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    words = (line.split() for line in lines)
    return next((int(word[1]) for word in words if word[0] == "inactive_file"), 0)


def _memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
