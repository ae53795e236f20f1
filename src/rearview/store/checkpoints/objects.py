"""Objects: bytes stored once, each in a file named by the hash of its content.

A `Batch` stores several objects at once: it writes all files, then syncs them, then renames them to their final
names. `HashAhead` hashes the next buffers on a thread while the caller writes the current buffer.
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
from rearview.store.checkpoints.compression import (
    MARK,
    CompressionPolicy,
    IncompressibleError,
    compress,
    content_size,
    decompress,
)
from rearview.store.create_files import Sink, write_error
from rearview.store.project import COMPRESSED, Project

READ_CHUNK = 1 << 20
"""Bytes that are read and then hashed at a time: few enough to be in the processor's cache when hashed."""
OID_DIGITS = 64
"""Number of hexadecimal digits of an oid."""
MOST_OPEN = 128
"""Files of a batch that are kept open until they are synced and closed together; a process may have 1024 open files."""
LARGEST_SHARE = 0.9
"""If an object compresses to more than this share of its size, it is stored uncompressed, even if its sample compressed better."""


def digest(data: Any) -> str:
    """Return the oid of `data`: its BLAKE3 hash. Large buffers are hashed without the GIL.

    >>> digest(b"")[:12]
    'af1349b9f5f9'
    """
    return blake3(data).hexdigest()


def reference_of(view: memoryview) -> ObjectRef:
    """Return the reference (oid, size and sum) of the object whose content is `view`."""
    return ObjectRef(digest(view), len(view), sum=xxhash.xxh3_128_hexdigest(view))


def as_bytes(buffer: Any) -> memoryview:
    """Return a view of the bytes of any contiguous buffer; the bytes are not copied."""
    view = buffer if type(buffer) is memoryview else memoryview(buffer)
    if view.format == "B" and view.ndim == 1:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


class Objects:
    """The objects of one project. Any number of processes may store and read objects at the same time."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._objects = os.fspath(project.objects)
        self._packs = os.fspath(project.packs)

    def path(self, oid: str) -> Path:
        """Return the path that the file of the object `oid` has, or would have."""
        return Path(self._objects, oid[:2], oid[2:])

    def pack_path(self, pack: str) -> Path:
        """Return the path that the file of the pack named `pack` has, or would have."""
        return Path(self._packs, f"{pack}.pack")

    def put(self, data: Any) -> ObjectRef:
        """Store `data` as an object and return its reference; when this returns, the bytes are on the device."""
        with Batch(self) as batch:
            ref = batch.put(data)
            batch.commit()
        return ref

    def get(self, ref: ObjectRef) -> bytearray:
        """Return the bytes of the object `ref`, checked against its hash."""
        fd = self._open(ref)
        try:
            available = os.fstat(fd).st_size - ref.offset if ref.pack is not None else _size(fd)
        except OSError as exc:
            raise self._damaged(ref, exc.strerror or str(exc)) from exc
        finally:
            os.close(fd)
        if available < ref.nbytes:  # checked before memory for `ref.nbytes` is allocated
            raise self._damaged(
                ref, f"the file ends after {max(available, 0)} of {ref.nbytes} bytes"
            )
        try:
            buffer = bytearray(ref.nbytes)
        except (MemoryError, OverflowError) as exc:
            raise self._damaged(ref, f"it claims to have {ref.nbytes} bytes") from exc
        self.read_into(ref, buffer)
        return buffer

    def read_into(self, ref: ObjectRef, buffer: Any) -> None:
        """Fill `buffer` with the bytes of the object `ref`, and check them; the sizes must be equal.

        The bytes are hashed and compared with `ref.sum` (XXH3) if it is set, else with the oid (BLAKE3). The sum
        detects damage equally well, in a seventh of the time.
        """
        view = as_bytes(buffer)
        if len(view) != ref.nbytes:
            raise StoreError(
                f"Object {ref.oid[:12]} has {ref.nbytes} bytes, the buffer {len(view)}: the program's "
                "state has a different shape than when it was saved.",
                slug="object-size",
            )
        self._checked(ref, view)

    def check(self, ref: ObjectRef) -> None:
        """Read the object `ref` and raise if the hash of its content is not `ref.oid`; needs little memory."""
        self._checked(replace(ref, sum=""), None)

    def ref(self, oid: str) -> ObjectRef:
        """Return the reference of the object `oid`, with the size of its content; raise if it has no file of its own."""
        fd = os.open(self.path(oid), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return ObjectRef(oid, _size(fd))
        finally:
            os.close(fd)

    def has(self, oid: str) -> bool:
        """Return True if the object `oid` has a file of its own; objects in packs have none."""
        return self.path(oid).exists()

    def touch(self, ref: ObjectRef) -> bool:
        """Mark the file of the object `ref` as in use; return True, or False if the file does not exist.

        The mark is the modification time, which is set to now. Then garbage collection does not remove the file.
        """
        try:
            os.utime(self.name(ref))
        except FileNotFoundError:
            return False
        except PermissionError:
            return self.file(ref).exists()
        return True

    def file(self, ref: ObjectRef) -> Path:
        """Return the file that holds the object `ref`: its own, or a pack."""
        return Path(self.name(ref))

    def name(self, ref: ObjectRef) -> str:
        """Return the path that `file` returns, but as a string: constructing a Path is too slow during a save."""
        if ref.pack is None:
            return f"{self._objects}/{ref.oid[:2]}/{ref.oid[2:]}"
        return f"{self._packs}/{ref.pack}.pack"

    def delete(self, oid: str) -> int:
        """Remove the file of the object `oid`; return the bytes freed on disk, 0 if the file does not exist."""
        path = self.path(oid)
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size

    def all(self) -> Iterator[str]:
        """Yield the oid of every object that has a file of its own."""
        for folder in _entries(self.project.objects):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(Path(folder.path)):
                oid = folder.name + entry.name
                if len(oid) == OID_DIGITS:
                    yield oid

    def packs(self) -> Iterator[str]:
        """Yield the name of every pack, such as `<run>/<seq>-1a2b3c4d`."""
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
                "Copy it from another copy of the store; `rearview verify` lists the checkpoints "
                "that need it.",
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
            actual = _read_checked(fd, ref, view)
        except OSError as exc:
            raise self._damaged(ref, exc.strerror or str(exc)) from exc
        finally:
            os.close(fd)
        if actual != (ref.sum or ref.oid):
            raise self._damaged(ref, f"its content has the hash {actual[:12]}")

    def _damaged(self, ref: ObjectRef, why: str) -> DamagedError:
        return DamagedError(
            f"Object {ref.oid[:12]} in {self.file(ref)} is damaged: {why}. `rearview verify "
            "--repair` moves it away and lists the checkpoints that are lost with it; replays then "
            "start from an earlier one.",
            slug="object-damaged",
        )


class Batch:
    """Objects that are stored together: `put` writes each one, `commit` syncs the files and gives them their names.

    If there is a `policy`, it decides which objects to compress. If the `with` block ends before `commit`, no object
    is stored.
    """

    def __init__(self, objects: Objects, policy: CompressionPolicy | None = None) -> None:
        self.objects = objects
        self.stored = 0
        """Bytes written to disk; objects that were stored already are not written again."""
        self.shrunk = 0
        """Bytes of disk space saved by compressing objects."""
        self._policy = policy
        self._compressed = False
        self._plain = 0
        self._seconds = 0.0
        """Seconds that writing uncompressed objects took."""
        self._open: list[Sink] = []
        self._names: set[str] = set()

    def put(self, data: Any, ref: ObjectRef | None = None, key: str = "") -> ObjectRef:
        """Store `data` as an object, unless the object exists already, and return its reference.

        The caller may pass this reference as `ref`, so that `data` is not hashed again. By `key`, the compression
        policy recognizes the buffer in the next save.
        """
        view = as_bytes(data)
        ref = ref or reference_of(view)
        if ref.oid in self._names:
            return ref
        with self.disk_errors(f"Object {ref.oid[:12]} ({ref.nbytes} bytes)"):
            if self.objects.touch(ref):
                return ref
            if not self._put_compressed(ref, view, key):
                began = time.perf_counter()
                with self.sink(self.objects.name(ref), size=len(view)) as sink:
                    sink.write(view)
                self._seconds += time.perf_counter() - began
                self._plain += len(view)
        self._names.add(ref.oid)
        return ref

    def _put_compressed(self, ref: ObjectRef, view: memoryview, key: str) -> bool:
        """Write `view` compressed and return True, or return False if compressing does not pay."""
        share, most = None, LARGEST_SHARE * len(view)
        if (
            view[: len(MARK)] == MARK
        ):  # a reader would take the uncompressed content for a compressed file
            share, most = 1.0, math.inf
        elif self._policy is not None:
            share = self._policy.predicted_share(key, view)
        if share is None:
            return False
        try:
            with self.sink(self.objects.name(ref), size=int(share * len(view))) as sink:
                for piece in compress(view, most):
                    sink.write(piece)
        except IncompressibleError:
            assert self._policy is not None
            self._policy.pause_sampling(key)
            return False
        self.shrunk += len(view) - sink.position
        self._compressed = True
        return True

    @contextlib.contextmanager
    def sink(self, path: Path | str, *, size: int) -> Iterator[Sink]:
        """Provide a new file to be written in the `with` block; `commit` gives it the name `path`."""
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
            for written in self._open[-MOST_OPEN:]:
                written.sync()

    def commit(self) -> None:
        """Sync every file, then give every file its name; until then, readers find none of the files."""
        with self.disk_errors(f"A batch of {len(self._open)} objects"):
            began = time.perf_counter()
            for sink in self._open:
                sink.sync()
            if self._policy is not None:
                self._policy.add_write(self._plain, self._seconds + time.perf_counter() - began)
            if self._compressed:
                self.objects.project.needs(COMPRESSED)
            for sink in self._open:
                sink.publish()
            for folder in {sink.folder for sink in self._open}:
                sync_folder(folder)
            self._open.clear()

    @contextlib.contextmanager
    def disk_errors(self, subject: str) -> Iterator[None]:
        """Convert an OSError of the `with` block to an error that says that `subject` was not written, and what to do."""
        try:
            yield
        except OSError as exc:
            raise write_error(exc, subject, self.objects.project.store) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for sink in self._open:
            sink.discard()
        self._open.clear()


class HashAhead:
    """A thread that hashes `views` in order while the caller writes; neither thread holds the interpreter lock."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.cpu = 0.0
        """Processor seconds that the thread used."""
        self._views = views
        self._position = 0
        self._stopped = False
        self._results: queue.SimpleQueue[ObjectRef | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def next(self) -> ObjectRef:
        """Return the reference of the next view, with its hash; the first call returns that of the first view."""
        view = self._views[self._position]
        self._position += 1
        if self._thread is None:
            return reference_of(view)
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def __enter__(self) -> Self:
        if len(self._views) > 1:
            thread = threading.Thread(target=self._work, name="rearview-hash", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return self  # the interpreter is ending and starts no threads: `next` hashes
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
                self._results.put(reference_of(view))
        except BaseException as exc:
            self._results.put(exc)
        self.cpu = time.thread_time() - began


def content_hash(file: Path) -> str:
    """Return the hash of the content of an object's file, compressed or not; raise OSError if the file is damaged."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _read_checked(fd, ObjectRef("", _size(fd)), None)
    finally:
        os.close(fd)


def _size(fd: int) -> int:
    """Return the size in bytes of the uncompressed content of the object in the open file `fd`."""
    claimed = content_size(fd)
    return os.fstat(fd).st_size if claimed is None else claimed


def _read_checked(fd: int, ref: ObjectRef, into: memoryview | None) -> str:
    """Read the object `ref` from an open file; return the hash of its content.

    The content is written to `into` unless this is None. The hash is XXH3-128, to be compared with `ref.sum`; or
    BLAKE3, to be compared with `ref.oid`, if `ref.sum` is empty.
    """
    hasher = xxhash.xxh3_128() if ref.sum else blake3()
    claimed = content_size(fd) if ref.pack is None else None
    if claimed is not None:
        if claimed != ref.nbytes:
            raise OSError(0, f"its header states {claimed} bytes, not {ref.nbytes}")
        return _read_compressed(fd, ref.nbytes, into, hasher)
    spare = memoryview(bytearray(min(READ_CHUNK, ref.nbytes))) if into is None else None
    at = 0
    while at < ref.nbytes:
        view = spare if into is None else into[at : at + READ_CHUNK]
        assert view is not None
        view = view[: ref.nbytes - at]
        count = os.preadv(fd, [view], ref.offset + at)
        if not count:
            raise OSError(0, f"the file ends after {at} of {ref.nbytes} bytes")
        hasher.update(view[:count])
        at += count
    return str(hasher.hexdigest())


def _read_compressed(fd: int, nbytes: int, into: memoryview | None, hasher: Any) -> str:
    """Read a compressed object with `nbytes` bytes of content from an open file; return the hash of its content.

    The content is written to `into` unless this is None; `hasher` computes the hash.
    """
    at = 0
    for piece in decompress(fd, nbytes):
        hasher.update(piece)
        if into is not None:
            into[at : at + len(piece)] = piece
            at += len(piece)
    return str(hasher.hexdigest())


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
