"""Save, list, load and delete the checkpoints of a project.

A save writes the parts of a checkpoint first and its manifest last, so a checkpoint exists only when all
of it does. While it runs, a small file (`save_in_flight`) tells garbage collection to spare objects that no
manifest names yet. The file holds the identity of the process, so that one left by a killed process is
recognised; no process ever waits for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from rearview.errors import DamagedError, StoreError, UsageError
from rearview.model import Checkpoint, ObjectRef, Part, Snapshot
from rearview.store.checkpoints.compression import CompressionPolicy
from rearview.store.checkpoints.manifest import (
    INLINE,
    LazyParts,
    ManifestBody,
    PackWriter,
    checkpoint_of,
    encode,
    seal,
    tabulate,
    unseal,
)
from rearview.store.checkpoints.objects import Batch, HashAhead, Objects, as_bytes, digest
from rearview.store.files import make_folder, open_file, write_error
from rearview.store.machine import is_certainly_dead, process_identity
from rearview.store.project import Project

READERS = 2
"""Threads that load parts: while one waits for the disk, the other hashes."""
OBJECT_FROM = 1 << 20
"""Parts of at least this many bytes are separate object files; smaller ones share a pack."""
DIRECT_PACK = 64 << 20
"""Packs of at least this many bytes bypass the page cache."""

_log = logging.getLogger("rearview")


class Checkpoints:
    """The checkpoints of one project. Any number of processes may save and load at once.

    `compression` decides which large parts to compress; without it none are.
    """

    def __init__(self, project: Project, compression: CompressionPolicy | None = None) -> None:
        self.project = project
        self.objects = Objects(project)
        self.hashing = 0.0
        """Processor seconds that saves have used to hash."""
        self._compression = compression
        self._read_before: dict[str, dict[tuple[str, int], Checkpoint]] = {}
        """Checkpoints already read: by run, then by name and inode of the manifest."""

    def save(self, snapshot: Snapshot, parts: Iterable[Part]) -> Checkpoint:
        """Save `parts` as the checkpoint that `snapshot` describes.

        When this returns, the checkpoint survives a power cut. Until then it does not exist, and
        nothing that existed before has changed. The buffers of `snapshot` are not read: `parts` are
        the copies of them.
        """
        body = ManifestBody(
            run=snapshot.run,
            seq=snapshot.seq,
            point=[(step.loop, step.index, step.value) for step in snapshot.point.steps],
            edge=snapshot.edge,
            time=time.time(),
            complete=snapshot.complete,
            missing=list(map(str, snapshot.missing)),
            meta=snapshot.meta,
        )
        try:
            with (
                save_in_flight(self.project),
                Batch(self.objects, self._compression) as batch,
            ):
                return self._save(batch, body, parts)
        except OSError as exc:
            raise write_error(exc, f"Checkpoint {snapshot.id}", self.project.store) from exc

    def of(self, run: str) -> list[Checkpoint]:
        """Return the checkpoints of `run`, oldest first."""
        folder = self.project.checkpoints / run
        try:
            with os.scandir(folder) as entries:
                # a manifest that was replaced has the same name and another inode
                names = sorted(
                    (entry.name, entry.inode()) for entry in entries if _is_manifest(entry.name)
                )
        except FileNotFoundError:
            return []
        read_before = self._read_before.setdefault(run, {})
        fresh: dict[tuple[str, int], Checkpoint] = {}
        for name in names:
            try:
                checkpoint = read_before.get(name) or self._read(folder / name[0])
            except DamagedError as exc:
                # one damaged checkpoint must not hide the others
                _log.warning("%s", exc)
                continue
            if checkpoint is not None:
                fresh[name] = checkpoint
        self._read_before[run] = fresh
        return sorted(fresh.values(), key=lambda checkpoint: checkpoint.seq)

    def runs(self) -> list[str]:
        """Return the runs that have checkpoints."""
        try:
            return sorted(entry.name for entry in os.scandir(self.project.checkpoints))
        except FileNotFoundError:
            return []

    def get(self, id: str) -> Checkpoint:  # noqa: A002 - the word of the model
        """Return the checkpoint `id`."""
        path = self._path(id)
        checkpoint = self._read(path)
        if checkpoint is None:
            last = ", ".join(checkpoint.id for checkpoint in self.of(id.rpartition("/")[0])[-5:])
            raise UsageError(
                f"There is no checkpoint {id!r} in {self.project.store}. "
                + (f"The last ones of this run are: {last}." if last else "The run has none."),
                slug="unknown-checkpoint",
            )
        return checkpoint

    def table(self, checkpoint: Checkpoint) -> ObjectRef | None:
        """Return the reference of the table of parts, if it is not in the manifest itself."""
        parts = checkpoint.parts
        return parts.table if isinstance(parts, LazyParts) else None

    def files(self, checkpoint: Checkpoint) -> set[Path]:
        """Return the files that hold the parts of a checkpoint, and the table of its parts."""
        table = self.table(checkpoint)
        refs = [*checkpoint.parts.values(), *([] if table is None else [table])]
        return {self.objects.file(ref) for ref in refs}

    def load(self, checkpoint: Checkpoint) -> LoadedCheckpoint:
        """Return the parts of `checkpoint`; each is read on access."""
        return LoadedCheckpoint(self.objects, checkpoint)

    def delete(self, id: str) -> None:  # noqa: A002 - the word of the model
        """Remove the checkpoint `id`; the next garbage collection frees what only it used."""
        self._path(id).unlink(missing_ok=True)

    def _save(self, batch: Batch, body: ManifestBody, parts: Iterable[Part]) -> Checkpoint:
        refs: dict[str, ObjectRef] = {}
        small: list[tuple[str, str, memoryview]] = []
        touched: set[str] = set()
        for part, view, ref in self._hashed(parts):
            if part.same_as is not None:
                refs[part.key] = self._reuse(part.same_as, touched)
            elif ref is not None:
                refs[part.key] = batch.put(view, ref, part.key)
            else:
                small.append((part.key, digest(view), view))
        body.shrunk = batch.shrunk
        body.count = len(refs) + len(small)
        if small or len(refs) > INLINE:
            self._pack(batch, body, refs, small)
        else:
            body.parts = tabulate(refs)
            body.nbytes = sum(ref.nbytes for ref in refs.values())
        body.stored = batch.stored
        manifest = seal(encode(body))
        # the manifest comes last in the batch, so that it gets its name last
        with batch.sink(self._path(f"{body.run}/{body.seq}"), size=0) as sink:
            sink.write(memoryview(manifest))
        batch.commit()
        return replace(checkpoint_of(body, self.objects.get), parts=refs)

    def _pack(
        self,
        batch: Batch,
        body: ManifestBody,
        refs: dict[str, ObjectRef],
        small: list[tuple[str, str, memoryview]],
    ) -> None:
        name = f"{body.run}/{body.seq:08d}-{os.urandom(4).hex()}"
        size = sum(len(view) for _, _, view in small)
        # through the page cache, the kernel copies small parts without the interpreter lock
        direct = size if size >= DIRECT_PACK else 0
        with batch.sink(self.objects.pack_path(name), size=direct) as sink:
            pack = PackWriter(name, sink)
            for key, oid, view in small:
                refs[key] = pack.add(oid, view)
            body.nbytes = sum(ref.nbytes for ref in refs.values())
            if len(refs) > INLINE:
                table = encode(tabulate(refs))
                ref = pack.add(digest(table), memoryview(table))
                body.table = (ref.oid, ref.nbytes, name, ref.offset)
            else:
                body.parts = tabulate(refs)
            body.stored = batch.stored + sink.position
            pack.close(encode(body))

    def _reuse(self, ref: ObjectRef, touched: set[str]) -> ObjectRef:
        """Return `ref` with its file marked as in use; raise if the file is gone."""
        file = ref.pack or ref.oid
        if file not in touched:
            if not self.objects.touch(ref):
                raise StoreError(
                    f"Object {ref.oid[:12]}, which this checkpoint shares with an earlier one, was "
                    f"removed from {self.project.store} during the save. The next checkpoint stores "
                    "it again.",
                    slug="object-missing",
                )
            touched.add(file)
        return ref

    def _hashed(self, parts: Iterable[Part]) -> Iterator[tuple[Part, memoryview, ObjectRef | None]]:
        """Yield each part with its bytes; large ones with their reference, hashed ahead on a thread."""
        listed = [(part, _view(part)) for part in parts]
        large = [view for _, view in listed if len(view) >= OBJECT_FROM]
        with HashAhead(large) as ahead:
            for part, view in listed:
                yield part, view, ahead.next() if len(view) >= OBJECT_FROM else None
        self.hashing += ahead.cpu

    def _path(self, id: str) -> Path:  # noqa: A002 - the word of the model
        run, _, seq = id.rpartition("/")
        if not run or not seq.isdecimal() or run.startswith((".", "/")):
            raise UsageError(
                f"{id!r} does not name a checkpoint. A checkpoint is <run>/<number>; "
                "`rearview show <run>` lists them.",
                slug="unknown-checkpoint",
            )
        return self.project.checkpoints / run / f"{int(seq):08d}.json"

    def _read(self, path: Path) -> Checkpoint | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise StoreError(
                f"The manifest {path} cannot be read: {exc.strerror or exc}. Make the store "
                "readable.",
                slug="store-unreadable",
            ) from exc
        name = f"{path.parent.name}/{path.stem.lstrip('0') or 0}"
        return check_owner(path, checkpoint_of(unseal(data, name), self.objects.get))


class LoadedCheckpoint(Mapping[str, memoryview]):
    """The parts of one checkpoint, each read and checked against its hash on access."""

    def __init__(self, objects: Objects, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._objects = objects

    def __getitem__(self, key: str) -> memoryview:
        """Return the bytes of part `key`, in new memory."""
        return memoryview(self._objects.get(self._ref(key)))

    def read_into(self, key: str, buffer: Any) -> None:
        """Fill `buffer` with part `key`, without another copy."""
        self._objects.read_into(self._ref(key), buffer)

    def fill(self, buffers: Mapping[str, Any]) -> None:
        """Fill each buffer with the part of its key, on several threads."""
        # largest first, so that the threads end at the same time
        work = sorted(buffers, key=lambda key: -self._ref(key).nbytes)
        if len(work) < 2:
            for key in work:
                self.read_into(key, buffers[key])
            return
        with ThreadPoolExecutor(READERS, "rearview-load") as pool:
            for _ in pool.map(lambda key: self.read_into(key, buffers[key]), work):
                pass

    def prefetch(self) -> None:
        """Ask the kernel to read the files into memory, while the program still sets up."""
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


def check_owner(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint`; raise if the manifest at `path` belongs to another checkpoint."""
    run, name = path.parent.name, path.stem
    if checkpoint.run == run and f"{checkpoint.seq:08d}" == name:
        return checkpoint
    raise DamagedError(
        f"The manifest {path} belongs to checkpoint {checkpoint.id}. `rearview verify --repair` moves "
        "it away.",
        slug="manifest-damaged",
    )


def _view(part: Part) -> memoryview:
    if part.same_as is not None:
        return memoryview(b"")
    return as_bytes(part.data)


def _is_manifest(name: str) -> bool:
    return name.endswith(".json") and not name.startswith(".")


@contextlib.contextmanager
def save_in_flight(project: Project) -> Iterator[None]:
    """Announce that this process puts objects that no manifest names yet."""
    path = project.writing / f"{os.getpid()}-{os.urandom(8).hex()}"
    try:
        fd = _create_announcement(path)
    except FileNotFoundError:
        make_folder(path.parent)
        fd = _create_announcement(path)
    try:
        os.write(fd, json.dumps(process_identity()).encode())
    finally:
        os.close(fd)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def earliest_start(project: Project, now: float) -> float:
    """Return when the oldest save in flight began, or `now`; remove the files of dead processes."""
    first = now
    try:
        paths = list(project.writing.iterdir())
    except FileNotFoundError:
        return first
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if _is_abandoned(path):
                path.unlink()
            else:
                first = min(first, path.stat().st_mtime)
    return first


def _create_announcement(path: Path) -> int:
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def _is_abandoned(path: Path) -> bool:
    try:
        identity = json.loads(path.read_bytes())
    except ValueError:
        identity = {}  # just created, cut off by a kill, or of an older Rearview: spared for a day
    return is_certainly_dead(identity, path)
