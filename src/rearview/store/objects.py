"""Bytes at rest, each kept once under the name of its content."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from blake3 import blake3

from rearview.errors import DamagedError, StoreError
from rearview.model import ObjectRef
from rearview.store.direct import CHUNK, Sink, sync_folder, unwritable
from rearview.store.project import Project

OID = 64
"""Hexadecimal digits of an oid."""
MOST_OPEN = 128
"""Files of a batch that wait open for their sync; a process may have 1024."""


def digest(data: Any) -> str:
    """Return the oid of `data`: its BLAKE3 hash. Large buffers are hashed without the GIL.

    >>> digest(b"")[:12]
    'af1349b9f5f9'
    """
    return blake3(data).hexdigest()


def plain(buffer: Any) -> memoryview:
    """Return the bytes of any contiguous buffer."""
    view = buffer if type(buffer) is memoryview else memoryview(buffer)
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


class Objects:
    """The objects of one project. Any number of processes may put and get at once."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._places = f"{project.objects}{os.sep}", f"{project.packs}{os.sep}"

    def path(self, oid: str) -> Path:
        """Return where the object `oid` stands, or would stand."""
        return self.project.objects / oid[:2] / oid[2:]

    def pack_path(self, pack: str) -> Path:
        """Return where the pack `pack` stands, or would stand."""
        return self.project.packs / f"{pack}.pack"

    def put(self, data: Any) -> ObjectRef:
        """Store `data` and return its reference; when this returns, it is on the device."""
        with Batch(self) as batch:
            ref = batch.put(data)
            batch.commit()
        return ref

    def get(self, ref: ObjectRef) -> bytearray:
        """Return the bytes of `ref`, checked against its name."""
        buffer = bytearray(ref.nbytes)
        self.read_into(ref, buffer)
        return buffer

    def read_into(self, ref: ObjectRef, buffer: Any) -> None:
        """Fill `buffer`, which must have exactly the right size, and check what was read."""
        view = plain(buffer)
        if len(view) != ref.nbytes:
            raise StoreError(
                f"A buffer of {len(view)} bytes cannot take object {ref.oid[:12]} of {ref.nbytes}. "
                "The state to restore has another shape than the one saved.",
                slug="object-size",
            )
        self._checked(ref, view)

    def check(self, ref: ObjectRef) -> None:
        """Read `ref` and raise if it is damaged; takes one chunk of memory, whatever its size."""
        self._checked(ref, None)

    def has(self, oid: str) -> bool:
        """Say whether `oid` is stored as an object of its own."""
        return self.path(oid).exists()

    def touch(self, ref: ObjectRef) -> bool:
        """Say whether the file of `ref` is there, and mark it as in use now.

        The mark keeps a concurrent sweep from taking it for garbage.
        """
        try:
            os.utime(self.file(ref))
        except FileNotFoundError:
            return False
        except PermissionError:
            return self.file(ref).exists()
        return True

    def file(self, ref: ObjectRef) -> Path:
        """Return the file that holds `ref`."""
        return self.path(ref.oid) if ref.pack is None else self.pack_path(ref.pack)

    def delete(self, oid: str) -> int:
        """Remove the object `oid` and return the bytes freed; 0 if there is none."""
        path = self.path(oid)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size

    def all(self) -> Iterator[str]:
        """Yield the oid of every object file."""
        for folder in _entries(self.project.objects):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(Path(folder.path)):
                oid = folder.name + entry.name
                if len(oid) == OID:
                    yield oid

    def packs(self) -> Iterator[str]:
        """Yield the name of every pack."""
        for folder in _entries(self.project.packs):
            if folder.is_dir(follow_symlinks=False):
                for entry in _entries(Path(folder.path)):
                    if entry.name.endswith(".pack") and not entry.name.startswith("."):
                        yield f"{folder.name}/{entry.name.removesuffix('.pack')}"

    def _open(self, ref: ObjectRef) -> int:
        objects, packs = self._places
        # as `file` has it, without the cost of making it: a replay opens thousands
        oid, pack = ref.oid, ref.pack
        path = f"{objects}{oid[:2]}{os.sep}{oid[2:]}" if pack is None else f"{packs}{pack}.pack"
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise DamagedError(
                f"Object {ref.oid[:12]} is not in {self.project.store}: {Path(path).name} is missing. "
                "Bring it from another copy of the store, or see what it takes with it with "
                "`rearview verify`.",
                slug="object-missing",
            ) from exc
        except OSError as exc:
            raise StoreError(
                f"Object {ref.oid[:12]} cannot be read from {path}: {exc.strerror or exc}. Make "
                "the store readable.",
                slug="store-unreadable",
            ) from exc

    def _checked(self, ref: ObjectRef, view: memoryview | None) -> None:
        fd = self._open(ref)
        try:
            found = _read_checked(fd, ref, view)
        except OSError as exc:
            raise self._damaged(ref, exc.strerror or str(exc)) from exc
        finally:
            os.close(fd)
        if found != ref.oid:
            raise self._damaged(ref, f"its content has the hash {found[:12]}")

    def _damaged(self, ref: ObjectRef, why: str) -> DamagedError:
        return DamagedError(
            f"Object {ref.oid[:12]} in {self.file(ref)} is damaged: {why}. `rearview verify "
            "--repair` sets it aside and says which checkpoints are lost with it; replays then "
            "start from an earlier one.",
            slug="object-damaged",
        )


class Batch:
    """Objects that become durable together: written one by one, synced and named at the end.

    Left without `commit`, it leaves nothing behind.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.stored = 0
        """Bytes newly written; what was there before counts nothing."""
        self._open: list[Sink] = []
        self._names: set[str] = set()

    def put(self, data: Any, oid: str | None = None) -> ObjectRef:
        """Take `data`, whose hash is `oid` if that is known already."""
        view = plain(data)
        ref = ObjectRef(oid or digest(view), len(view))
        with self.explained(f"Object {ref.oid[:12]} ({ref.nbytes} bytes)"):
            if ref.oid in self._names or self.objects.touch(ref):
                return ref
            with self.sink(self.objects.path(ref.oid), size=len(view)) as sink:
                sink.write(view)
        self._names.add(ref.oid)
        return ref

    @contextlib.contextmanager
    def sink(self, path: Path, *, size: int) -> Iterator[Sink]:
        """Open a new file that is published with the batch."""
        sink = Sink(path, size=size)
        try:
            yield sink
            sink.finish()
        except BaseException:
            sink.discard()
            raise
        self._open.append(sink)
        self.stored += sink.position
        if len(self._open) % MOST_OPEN == 0:
            for full in self._open[-MOST_OPEN:]:
                full.sync()

    def commit(self) -> None:
        """Sync and name everything taken; only then does any of it exist."""
        with self.explained(f"A batch of {len(self._open)} objects"):
            for sink in self._open:
                sink.sync()
            for sink in self._open:
                sink.publish()
            for folder in {sink.path.parent for sink in self._open}:
                sync_folder(folder)
            self._open.clear()

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn a failure of the disk into an error that says what to do."""
        try:
            yield
        except OSError as exc:
            raise unwritable(exc, what, self.objects.project.store) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for sink in self._open:
            sink.discard()
        self._open.clear()


def _read_checked(fd: int, ref: ObjectRef, into: memoryview | None) -> str:
    """Fill `into`, if given, and return the hash, taken from each chunk while it is in the cache."""
    hasher = blake3()
    spare = memoryview(bytearray(min(CHUNK, ref.nbytes))) if into is None else None
    at = 0
    while at < ref.nbytes:
        view = spare if into is None else into[at : at + CHUNK]
        assert view is not None
        view = view[: ref.nbytes - at]
        count = os.preadv(fd, [view], ref.offset + at)
        if not count:
            raise OSError(0, f"the file ends after {at} of {ref.nbytes} bytes")
        hasher.update(view[:count])
        at += count
    return hasher.hexdigest()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
