"""Names of large buffers, found by a thread that runs ahead of the one that writes them.

Bytes at rest, each kept once under the name of its content.

Names of large buffers, found by a thread that runs ahead of the one that writes them.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import xxhash
from blake3 import blake3

from rearview.durable_files import sync_folder
from rearview.errors import DamagedError, StoreError
from rearview.model import ObjectRef
from rearview.store.checkpoints.compression import MARK, Bulky, Worth, grow, held, shrink
from rearview.store.files import Sink, unwritable
from rearview.store.project import COMPRESSED, Project

SIP = 1 << 20
"""Bytes that are read and checked at a time, so that they are checked while in the cache."""
OID = 64
"""Hexadecimal digits of an oid."""
MOST_OPEN = 128
"""Files of a batch that wait open for their sync; a process may have 1024."""
BULKY = 0.9
"""What shrinks less than to this share of itself, against what its sample said, is kept plain."""


def digest(data: Any) -> str:
    """Return the oid of `data`: its BLAKE3 hash. Large buffers are hashed without the GIL.

    >>> digest(b"")[:12]
    'af1349b9f5f9'
    """
    return blake3(data).hexdigest()


def named(view: memoryview) -> ObjectRef:
    """Return the reference of an object that holds `view`."""
    return ObjectRef(digest(view), len(view), sum=xxhash.xxh3_128_hexdigest(view))


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
        self._objects = os.fspath(project.objects)
        self._packs = os.fspath(project.packs)

    def path(self, oid: str) -> Path:
        """Return where the object `oid` stands, or would stand."""
        return Path(self._objects, oid[:2], oid[2:])

    def pack_path(self, pack: str) -> Path:
        """Return where the pack `pack` stands, or would stand."""
        return Path(self._packs, f"{pack}.pack")

    def put(self, data: Any) -> ObjectRef:
        """Store `data` and return its reference; when this returns, it is on the device."""
        with Batch(self) as batch:
            ref = batch.put(data)
            batch.commit()
        return ref

    def get(self, ref: ObjectRef) -> bytearray:
        """Return the bytes of `ref`, checked against its name."""
        fd = self._open(ref)
        try:
            there = os.fstat(fd).st_size - ref.offset if ref.pack is not None else _size(fd)
        except OSError as exc:
            raise self._damaged(ref, exc.strerror or str(exc)) from exc
        finally:
            os.close(fd)
        if there < ref.nbytes:  # before so much memory is asked for
            raise self._damaged(ref, f"the file ends after {max(there, 0)} of {ref.nbytes} bytes")
        try:
            buffer = bytearray(ref.nbytes)
        except (MemoryError, OverflowError) as exc:
            raise self._damaged(ref, f"it says that it has {ref.nbytes} bytes") from exc
        self.read_into(ref, buffer)
        return buffer

    def read_into(self, ref: ObjectRef, buffer: Any) -> None:
        """Fill `buffer`, which must have exactly the right size, and check what was read.

        By its sum, if there is one: that says as well as the name whether these are the bytes that
        were saved, and takes a seventh of the time.
        """
        view = plain(buffer)
        if len(view) != ref.nbytes:
            raise StoreError(
                f"A buffer of {len(view)} bytes cannot take object {ref.oid[:12]} of {ref.nbytes}. "
                "The state to restore has another shape than the one saved.",
                slug="object-size",
            )
        self._checked(ref, view)

    def check(self, ref: ObjectRef) -> None:
        """Read `ref` and raise if its name is not that of its content; takes one chunk of memory."""
        self._checked(replace(ref, sum=""), None)

    def ref(self, oid: str) -> ObjectRef:
        """Return the reference of the object `oid`, as its file tells how much it holds."""
        fd = os.open(self.path(oid), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return ObjectRef(oid, _size(fd))
        finally:
            os.close(fd)

    def has(self, oid: str) -> bool:
        """Say whether `oid` is stored as an object of its own."""
        return self.path(oid).exists()

    def touch(self, ref: ObjectRef) -> bool:
        """Say whether the file of `ref` is there, and mark it as in use now.

        The mark keeps a concurrent sweep from taking it for garbage.
        """
        try:
            os.utime(self.name(ref))
        except FileNotFoundError:
            return False
        except PermissionError:
            return self.file(ref).exists()
        return True

    def file(self, ref: ObjectRef) -> Path:
        """Return the file that holds `ref`."""
        return Path(self.name(ref))

    def name(self, ref: ObjectRef) -> str:
        """Return the same as text, for those who ask hundreds of times beside training."""
        if ref.pack is None:
            return f"{self._objects}/{ref.oid[:2]}/{ref.oid[2:]}"
        return f"{self._packs}/{ref.pack}.pack"

    def delete(self, oid: str) -> int:
        """Remove the object `oid` and return the bytes freed on disk; 0 if there is none."""
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
        path = self.name(ref)
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
        if found != (ref.sum or ref.oid):
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

    They are compressed where `worth` says that it pays. Left without `commit`, it leaves nothing
    behind.
    """

    def __init__(self, objects: Objects, worth: Worth | None = None) -> None:
        self.objects = objects
        self.stored = 0
        """Bytes newly written; what was there before counts nothing."""
        self.shrunk = 0
        """Bytes that were not, because what is in them was compressed."""
        self._worth = worth
        self._compressed = False
        self._plain = 0
        self._seconds = 0.0
        """How long writing the plain ones took, and syncing."""
        self._open: list[Sink] = []
        self._names: set[str] = set()

    def put(self, data: Any, ref: ObjectRef | None = None, key: str = "") -> ObjectRef:
        """Take `data`, whose reference is `ref` if that is known already; `key` names the buffer."""
        view = plain(data)
        ref = ref or named(view)
        if ref.oid in self._names:
            return ref
        with self.explained(f"Object {ref.oid[:12]} ({ref.nbytes} bytes)"):
            if self.objects.touch(ref):
                return ref
            if not self._shrink(ref, view, key):
                began = time.perf_counter()
                with self.sink(self.objects.name(ref), size=len(view)) as sink:
                    sink.write(view)
                self._seconds += time.perf_counter() - began
                self._plain += len(view)
        self._names.add(ref.oid)
        return ref

    def _shrink(self, ref: ObjectRef, view: memoryview, key: str) -> bool:
        """Write `view` compressed and say so, unless that does not pay."""
        share, most = None, BULKY * len(view)
        if view[: len(MARK)] == MARK:  # plain, it would be taken for compressed
            share, most = 1.0, math.inf
        elif self._worth is not None:
            share = self._worth.share(key, view)
        if share is None:
            return False
        try:
            with self.sink(self.objects.name(ref), size=int(share * len(view))) as sink:
                for piece in shrink(view, most):
                    sink.write(piece)
        except Bulky:
            assert self._worth is not None
            self._worth.refuse(key)
            return False
        self.shrunk += len(view) - sink.position
        self._compressed = True
        return True

    @contextlib.contextmanager
    def sink(self, path: Path | str, *, size: int) -> Iterator[Sink]:
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
            began = time.perf_counter()
            for sink in self._open:
                sink.sync()
            if self._worth is not None:
                self._worth.wrote(self._plain, self._seconds + time.perf_counter() - began)
            if self._compressed:
                self.objects.project.needs(COMPRESSED)
            for sink in self._open:
                sink.publish()
            for folder in {sink.folder for sink in self._open}:
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


def content(file: Path) -> str:
    """Return the hash of what an object's file holds, in whichever form; OSError if it is damaged."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read_checked(fd, ObjectRef("", _size(fd)), None)
    finally:
        os.close(fd)


def _size(fd: int) -> int:
    """Return the bytes of content that an object's file holds."""
    claimed = held(fd)
    return os.fstat(fd).st_size if claimed is None else claimed


def _read_checked(fd: int, ref: ObjectRef, into: memoryview | None) -> str:
    """Fill `into`, if given, and return what its sum should be, or its oid where there is no sum."""
    hasher = xxhash.xxh3_128() if ref.sum else blake3()
    claimed = held(fd) if ref.pack is None else None
    if claimed is not None:
        if claimed != ref.nbytes:
            raise OSError(0, f"it says that it holds {claimed} bytes, not {ref.nbytes}")
        return _grown(fd, ref.nbytes, into, hasher)
    spare = memoryview(bytearray(min(SIP, ref.nbytes))) if into is None else None
    at = 0
    while at < ref.nbytes:
        view = spare if into is None else into[at : at + SIP]
        assert view is not None
        view = view[: ref.nbytes - at]
        count = os.preadv(fd, [view], ref.offset + at)
        if not count:
            raise OSError(0, f"the file ends after {at} of {ref.nbytes} bytes")
        hasher.update(view[:count])
        at += count
    return str(hasher.hexdigest())


def _grown(fd: int, nbytes: int, into: memoryview | None, hasher: Any) -> str:
    """Do the same for what was compressed."""
    at = 0
    for piece in grow(fd, nbytes):
        hasher.update(piece)
        if into is not None:
            into[at : at + len(piece)] = piece
            at += len(piece)
    return str(hasher.hexdigest())


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


class Ahead:
    """References to `views`, in order. Hashing holds no interpreter lock, nor does writing."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.cpu = 0.0
        """Processor seconds that the thread has used."""
        self._views = views
        self._given = 0
        self._stopped = False
        self._found: queue.SimpleQueue[ObjectRef | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def next(self) -> ObjectRef:
        """Return the reference of the next buffer."""
        view = self._views[self._given]
        self._given += 1
        if self._thread is None:
            return named(view)
        found = self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def __enter__(self) -> Self:
        if len(self._views) > 1:
            thread = threading.Thread(target=self._work, name="rearview-hash", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return self  # the interpreter is ending: no new threads, hash in between
            self._thread = thread
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        began = time.thread_time()
        try:
            for view in self._views:
                if self._stopped:
                    break
                self._found.put(named(view))
        except BaseException as exc:
            self._found.put(exc)
        self.cpu = time.thread_time() - began
