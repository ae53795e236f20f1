"""A checkpoint on its way back into memory, part by part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rearview.errors import UsageError
from rearview.model import Checkpoint, ObjectRef
from rearview.store.objects import Objects

READERS = 2
"""Threads that read and check at once: while one waits for the disk the other hashes."""


class Loaded(Mapping[str, memoryview]):
    """The parts of one checkpoint. Each is read, and checked against its hash, when asked for."""

    def __init__(self, objects: Objects, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._objects = objects

    def __getitem__(self, key: str) -> memoryview:
        """Return the bytes of part `key`, in memory of its own."""
        return memoryview(self._objects.get(self._ref(key)))

    def read_into(self, key: str, buffer: Any) -> None:
        """Fill `buffer` with part `key`; nothing else is copied."""
        self._objects.read_into(self._ref(key), buffer)

    def fill(self, buffers: Mapping[str, Any]) -> None:
        """Fill each buffer with the part of its key, several at once."""
        # largest first, so that the threads end together
        work = sorted(buffers, key=lambda key: -self._ref(key).nbytes)
        if len(work) < 2:
            for key in work:
                self.read_into(key, buffers[key])
            return
        with ThreadPoolExecutor(READERS, "rearview-load") as pool:
            for _ in pool.map(lambda key: self.read_into(key, buffers[key]), work):
                pass

    def prefetch(self) -> None:
        """Ask the system to bring the files into memory while set-up code still runs."""
        for path in {self._objects.file(ref) for ref in self.checkpoint.parts.values()}:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # reported when the part is read
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    def __contains__(self, key: object) -> bool:
        return key in self.checkpoint.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.parts)

    def __len__(self) -> int:
        return len(self.checkpoint.parts)

    def _ref(self, key: str) -> ObjectRef:
        try:
            return self.checkpoint.parts[key]
        except KeyError as exc:
            raise UsageError(
                f"Checkpoint {self.checkpoint.id} has no part {key!r}. It has "
                f"{', '.join(list(self.checkpoint.parts)[:8])}"
                f"{', …' if len(self.checkpoint.parts) > 8 else '.'}",
                slug="unknown-part",
            ) from exc
