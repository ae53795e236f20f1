"""Checkpoints at rest: objects first, manifest last.

A checkpoint on its way back into memory, part by part.

Checkpoints at rest: objects first, manifest last.
"""

from __future__ import annotations

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
from rearview.store.checkpoints.compression import Worth
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
from rearview.store.checkpoints.objects import Ahead, Batch, Objects, digest, plain
from rearview.store.files import unwritable
from rearview.store.machine import writing
from rearview.store.project import Project

READERS = 2
"""Threads that read and check at once: while one waits for the disk the other hashes."""


class LoadedCheckpoint(Mapping[str, memoryview]):
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


OBJECT_FROM = 1 << 20
"""Parts of at least this many bytes are objects of their own; smaller ones share a pack."""


DIRECT_PACK = 64 << 20
"""Packs of at least this many bytes are written past the page cache."""

_log = logging.getLogger("rearview")


class Checkpoints:
    """The checkpoints of one project. Any number of processes may save and load at once.

    `worth` tells which large parts to compress; without it none are.
    """

    def __init__(self, project: Project, worth: Worth | None = None) -> None:
        self.project = project
        self.objects = Objects(project)
        self.hashing = 0.0
        """Processor seconds that hashing beside a save has used."""
        self._worth = worth
        self._known: dict[str, dict[tuple[str, int], Checkpoint]] = {}

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
            with writing(self.project), Batch(self.objects, self._worth) as batch:
                return self._save(batch, body, parts)
        except OSError as exc:
            raise unwritable(exc, f"Checkpoint {snapshot.id}", self.project.store) from exc

    def of(self, run: str) -> list[Checkpoint]:
        """Return the checkpoints of `run`, oldest first."""
        folder = self.project.checkpoints / run
        try:
            with os.scandir(folder) as found:
                # a manifest that was replaced has the same name and another inode
                names = sorted(
                    (entry.name, entry.inode()) for entry in found if _is_manifest(entry.name)
                )
        except FileNotFoundError:
            return []
        known = self._known.setdefault(run, {})
        fresh: dict[tuple[str, int], Checkpoint] = {}
        for name in names:
            try:
                checkpoint = known.get(name) or self._read(folder / name[0])
            except DamagedError as exc:
                # one damaged checkpoint must not hide the others
                _log.warning("%s", exc)
                continue
            if checkpoint is not None:
                fresh[name] = checkpoint
        self._known[run] = fresh
        return sorted(fresh.values(), key=lambda each: each.seq)

    def runs(self) -> list[str]:
        """Return the runs that have checkpoints."""
        try:
            return sorted(entry.name for entry in os.scandir(self.project.checkpoints))
        except FileNotFoundError:
            return []

    def get(self, id: str) -> Checkpoint:  # noqa: A002 - the word of the model
        """Return the checkpoint `id`."""
        path = self._path(id)
        found = self._read(path)
        if found is None:
            known = ", ".join(checkpoint.id for checkpoint in self.of(id.rpartition("/")[0])[-5:])
            raise UsageError(
                f"There is no checkpoint {id!r} in {self.project.store}. "
                + (f"The last ones of this run are: {known}." if known else "The run has none."),
                slug="unknown-checkpoint",
            )
        return found

    def table(self, checkpoint: Checkpoint) -> ObjectRef | None:
        """Return where the list of its parts is, when that is not in the manifest itself."""
        parts = checkpoint.parts
        return parts.table if isinstance(parts, LazyParts) else None

    def load(self, checkpoint: Checkpoint) -> LoadedCheckpoint:
        """Return the bytes of `checkpoint`, read part by part as they are asked for."""
        return LoadedCheckpoint(self.objects, checkpoint)

    def delete(self, id: str) -> None:  # noqa: A002 - the word of the model
        """Remove the checkpoint `id`; what only it used is freed by the next sweep."""
        self._path(id).unlink(missing_ok=True)

    def _save(self, batch: Batch, body: ManifestBody, parts: Iterable[Part]) -> Checkpoint:
        refs: dict[str, ObjectRef] = {}
        small: list[tuple[str, str, memoryview]] = []
        alive: set[str] = set()
        for part, view, ref in self._hashed(parts):
            if part.same_as is not None:
                refs[part.key] = self._reuse(part.same_as, alive)
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
        # last in the batch, so that it is named last; synced with the rest, once
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
        # the system copies what is small into its cache without the interpreter lock
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

    def _reuse(self, ref: ObjectRef, alive: set[str]) -> ObjectRef:
        """Return `ref` if what it names is still there, marked as in use."""
        file = ref.pack or ref.oid
        if file not in alive:
            if not self.objects.touch(ref):
                raise StoreError(
                    f"Object {ref.oid[:12]}, which this checkpoint shares with an earlier one, was "
                    f"removed from {self.project.store} meanwhile. The next checkpoint stores it "
                    "again.",
                    slug="object-missing",
                )
            alive.add(file)
        return ref

    def _hashed(self, parts: Iterable[Part]) -> Iterator[tuple[Part, memoryview, ObjectRef | None]]:
        """Yield each part with its bytes; large ones with a reference, found ahead of their writing."""
        listed = [(part, _view(part)) for part in parts]
        large = [view for _, view in listed if len(view) >= OBJECT_FROM]
        with Ahead(large) as ahead:
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
        return is_of(path, checkpoint_of(unseal(data, name), self.objects.get))


def is_of(path: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that was read from `path`, unless it belongs elsewhere."""
    run, name = path.parent.name, path.stem
    if checkpoint.run == run and f"{checkpoint.seq:08d}" == name:
        return checkpoint
    raise DamagedError(
        f"The manifest {path} is that of checkpoint {checkpoint.id}. `rearview verify --repair` sets "
        "it aside.",
        slug="manifest-damaged",
    )


def _view(part: Part) -> memoryview:
    if part.same_as is not None:
        return memoryview(b"")
    return plain(part.data)


def _is_manifest(name: str) -> bool:
    return name.endswith(".json") and not name.startswith(".")
