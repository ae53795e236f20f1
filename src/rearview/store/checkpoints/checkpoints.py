"""Save, list, load and delete the checkpoints of a project, and find in them the files that a run wrote.

A part is one piece of the bytes of a checkpoint, such as its skeleton or one buffer. A save writes the parts of a
checkpoint first and its manifest last, so that a checkpoint exists only if all its parts do. During a save, which
is then "in flight", a small file (`save_in_flight`) tells garbage collection to spare objects that no
manifest names yet. The small file holds the identity of the process that saves, so that garbage collection can
tell if the process was killed. No process ever waits for another one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rearview.errors import DamagedError, StoreError, UsageError
from rearview.model import Checkpoint, ObjectRef, Part, Run, Snapshot
from rearview.store.checkpoints.compression import CompressionPolicy
from rearview.store.checkpoints.manifest_and_packs import (
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
from rearview.store.create_files import make_folder, open_file, write_error
from rearview.store.json_files import read_lines
from rearview.store.machine_and_process import is_certainly_dead, process_identity
from rearview.store.project import Project
from rearview.store.runs import ABSENT, TRACES, TRACES_FORMAT, Runs

READERS = 2
"""Number of threads that load parts: while one thread waits for the disk, the other thread hashes."""
OBJECT_FROM = 1 << 20
"""Parts of at least this many bytes are stored as object files; smaller parts share a pack."""
DIRECT_PACK = 64 << 20
"""Packs of at least this many bytes are written directly to the disk, without the page cache."""

_log = logging.getLogger("rearview")


class Checkpoints:
    """The checkpoints of one project. Any number of processes may save and load checkpoints at once.

    `compression` decides which large parts to compress. If it is None, no part is compressed.
    """

    def __init__(self, project: Project, compression: CompressionPolicy | None = None) -> None:
        self.project = project
        self.objects = Objects(project)
        self.hashing = 0.0
        """Processor seconds that all saves by this object have used to hash large parts."""
        self._compression = compression
        self._read_before: dict[str, dict[tuple[str, int], Checkpoint]] = {}
        """Run -> (name, inode) of a manifest -> checkpoint that was read from this manifest before."""

    def save(self, snapshot: Snapshot, parts: Iterable[Part]) -> Checkpoint:
        """Save `parts` as the checkpoint that `snapshot` describes.

        When this returns, the checkpoint survives a power cut. Until then, readers do not find the checkpoint.
        Earlier checkpoints are never changed. The buffers of `snapshot` are not read, because `parts` are copies
        of these buffers.
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
                # a repaired manifest has the same name as before, but another inode
                names = sorted(
                    (entry.name, entry.inode()) for entry in entries if _is_manifest(entry.name)
                )
        except FileNotFoundError:
            return []
        read_before = self._read_before.setdefault(run, {})
        checkpoints: dict[tuple[str, int], Checkpoint] = {}
        for name in names:
            try:
                checkpoint = read_before.get(name) or self._read(folder / name[0])
            except DamagedError as exc:
                # one damaged checkpoint must not hide the others
                _log.warning("%s", exc)
                continue
            if checkpoint is not None:
                checkpoints[name] = checkpoint
        self._read_before[run] = checkpoints
        return sorted(checkpoints.values(), key=lambda checkpoint: checkpoint.seq)

    def runs(self) -> list[str]:
        """Return the ids of the runs that have checkpoints."""
        try:
            return sorted(entry.name for entry in os.scandir(self.project.checkpoints))
        except FileNotFoundError:
            return []

    def get(self, id: str) -> Checkpoint:  # noqa: A002 - the word of the model
        """Return the checkpoint `id`; raise if it does not exist or is damaged."""
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
        """Return the reference of the table of parts of a checkpoint, or None if the table is in its manifest."""
        parts = checkpoint.parts
        return parts.table if isinstance(parts, LazyParts) else None

    def files(self, checkpoint: Checkpoint) -> set[Path]:
        """Return the paths of the object files and packs that hold the parts of a checkpoint and the table of its parts."""
        table = self.table(checkpoint)
        refs = [*checkpoint.parts.values(), *([] if table is None else [table])]
        return {self.objects.file(ref) for ref in refs}

    def load(self, checkpoint: Checkpoint) -> LoadedCheckpoint:
        """Return the parts of `checkpoint` by key, as a mapping that reads a part when the part is accessed."""
        return LoadedCheckpoint(self.objects, checkpoint)

    def delete(self, id: str) -> None:  # noqa: A002 - the word of the model
        """Remove the checkpoint `id`; the next garbage collection removes the files that no other checkpoint uses."""
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
        # the manifest is the last file of the batch, so that it is the last to get its name
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
        # written through the page cache, small parts are copied by the kernel without the interpreter lock
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
        """Mark the file of `ref` as in use, so that garbage collection spares it, and return `ref`.

        Raise if the file does not exist. `touched` has the names of files that this save has marked already.
        """
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
        """Yield (part, bytes, reference) for each of the `parts`; the reference is None if the part is small.

        Large parts are hashed on a thread, while the caller writes the previous part.
        """
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
    """A mapping of the parts of one checkpoint; a part is read, and checked against its hash, when it is accessed."""

    def __init__(self, objects: Objects, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._objects = objects

    def __getitem__(self, key: str) -> memoryview:
        """Return the bytes of the part `key`, in new memory."""
        return memoryview(self._objects.get(self._ref(key)))

    def read_into(self, key: str, buffer: Any) -> None:
        """Fill `buffer` with the bytes of the part `key`, without another copy in memory."""
        self._objects.read_into(self._ref(key), buffer)

    def fill(self, buffers: Mapping[str, Any]) -> None:
        """Fill each of the `buffers` with the bytes of the part that is its key, on several threads."""
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
        """Ask the kernel to read the files of all parts into memory, before the program needs them."""
        for path in {self._objects.file(ref) for ref in self.checkpoint.parts.values()}:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue  # the error is reported when the part is read
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
    """Announce by a file, during the `with` block, that this process stores objects that no manifest names yet."""
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
    """Return the time at which the oldest save in flight began, or `now` if no save is in flight.

    Announcements (files of `save_in_flight`) of dead processes are removed.
    """
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
        # the file was just created, cut off by a kill, or written by an older Rearview: it counts for a day
        identity = {}
    return is_certainly_dead(identity, path)


FILE_PART = "file:"
"""First characters of the key of a part that holds a file which the run wrote; the path of the file follows."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file that a run wrote."""

    path: str
    """Path relative to the root of the project, or absolute if the file is outside of the project."""
    made: bool
    """Whether the run created the file."""
    nbytes: int | None
    """Current size of the file in bytes, or None if it does not exist."""
    in_place: bool
    """Whether the file exists and has not changed since the run ended."""
    kept_at: str | None
    """Point of the last checkpoint of the run, if this checkpoint holds the content of the file, else None."""


def written_files(run: Run, root: Path, runs: Runs, checkpoints: Checkpoints) -> list[RunFile]:
    """Return the files that a run wrote, in the order of the first write to each."""
    written: dict[str, bool] = {}
    for line in read_lines(runs.folder(run.id) / TRACES, TRACES_FORMAT):
        if "path" in line:
            written.setdefault(str(line["path"]), line.get("was") == ABSENT)
    last = checkpoints.of(run.id)[-1:]
    files = []
    for path, is_new in written.items():
        size, in_place = _in_project(run, root / path)
        kept_at = next(
            (_point_of(checkpoint) for checkpoint in last if FILE_PART + path in checkpoint.parts),
            None,
        )
        files.append(RunFile(path, is_new, size, in_place, kept_at))
    return files


def written_content(
    run: Run, path: str, root: Path, checkpoints: Checkpoints, at: str | None = None
) -> tuple[bytes, str]:
    """Return (content of the file `path` that a run wrote, phrase that says where the content comes from).

    If the point `at` is given, the content is read from the checkpoint at this point. Else it is read from the
    project if the file has not changed since the run, or from the last checkpoint that holds the file.
    """
    if at is None and _in_project(run, root / path)[1]:
        return (root / path).read_bytes(), "as the run left it"
    holding = [
        checkpoint for checkpoint in checkpoints.of(run.id) if FILE_PART + path in checkpoint.parts
    ]
    matching = [checkpoint for checkpoint in holding if at is None or _point_of(checkpoint) == at]
    if not matching:
        raise UsageError(f"{_missing_message(run, path, at)} {_remedy(holding)}", slug="no-file")
    data = bytes(checkpoints.load(matching[-1])[FILE_PART + path])
    return data, f"as it was at {_point_of(matching[-1])}"


def _missing_message(run: Run, path: str, at: str | None) -> str:
    if at is not None:
        return f"No checkpoint of run {run.id} holds {path} at {at}."
    return (
        f"What run {run.id} wrote to {path} is not stored: the file was removed or changed since, and no "
        "checkpoint holds it."
    )


def _remedy(holding: Sequence[Checkpoint]) -> str:
    points = list(dict.fromkeys(map(_point_of, holding)))
    if points:
        return f"Checkpoints hold it at {', '.join(points[-6:])}."
    return "Run the program again to create it: `rearview run`."


def _point_of(checkpoint: Checkpoint) -> str:
    return str(checkpoint.point) or "the end"


def _in_project(run: Run, file: Path) -> tuple[int | None, bool]:
    """Return (size of a file, whether the run was the last to write to it); the size is None if there is no file."""
    try:
        status = file.stat()
    except OSError:
        return None, False
    ended = run.ended if run.ended is not None else float("inf")
    # file times lag behind the clock a little
    written_by_run = run.started - 1 <= status.st_mtime <= ended
    return status.st_size, written_by_run and file.is_file()
