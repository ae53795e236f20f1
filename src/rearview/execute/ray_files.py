"""The files of a segment on a Ray node that does not see the project's folder: which to send, and which to fetch.

`list_files` lists the files to send: the scratch tree of the replay, its segment file, the inputs to which the tree
links, and the checkpoints that the replay may read. Files that several segments need are read once (`ChunkCache`).
Results are first copied into a staging folder, and moved into the store only when all of them have arrived
(`StagedResults`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import SiteError
from rearview.execute.executor import Task
from rearview.execute.ray_node import SizedFile
from rearview.execute.replay_jobs import recorded_texts
from rearview.model import (
    Checkpoint,
    Control,
    Edge,
    LoopStep,
    Origin,
    Run,
    SegmentFile,
)
from rearview.model.process_messages import VARIABLE, may_hold
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.objects import Objects, content_hash
from rearview.store.machine_and_process import process_identity
from rearview.store.project import Project
from rearview.store.runs import ACCOUNT, Runs

CHUNK = 64 << 20
"""Most bytes that are sent in one message."""
SENT_INLINE = 1 << 20
"""Files smaller than this many bytes are sent inside a message; larger ones go through Ray's object store."""
CACHE_BYTES = 16 * CHUNK
"""Most bytes that stay in Ray's object store for further nodes; the least recently used chunks are dropped first."""
_NO_END = 1 << 62
"""End of a range of iterations without upper bound; larger than any number of iterations."""


class CheckpointUse(Enum):
    """The way in which a replay uses a checkpoint; it decides which files of the checkpoint are sent."""

    RESTORED = "restored"
    """The replay may restore the checkpoint, and then reads every file of it."""
    COMPARED = "compared"
    """The replay compares its own state with the checkpoint; the content of a large object is read only if its hash
    differs.
    """
    ANCHORS = "anchors"
    """The replay only reads which objects existed when the loop was entered (the anchors)."""


@dataclass(frozen=True, slots=True)
class ReachableCheckpoint:
    """A checkpoint that a replay may read, and how the replay uses it."""

    checkpoint: Checkpoint
    use: CheckpointUse


def reachable_checkpoints(
    segment: SegmentFile, checkpoints: Sequence[Checkpoint]
) -> list[ReachableCheckpoint]:
    """Return those of `checkpoints` that a replay of `segment` may read, in the order in which they were saved.

    Checkpoints outside the iterations that the replay runs are left out. The replay must make the same decisions as
    with all checkpoints: where it starts, and up to which checkpoint it runs on to compare its state.
    """
    by_loop: dict[tuple[str, int], list[Checkpoint]] = {}
    reachable: list[ReachableCheckpoint] = []
    for checkpoint in checkpoints:
        if not checkpoint.meta.path:
            reachable.append(ReachableCheckpoint(checkpoint, CheckpointUse.RESTORED))
            continue
        loop, ordinal, _ = checkpoint.meta.path[0]
        by_loop.setdefault((loop, ordinal), []).append(checkpoint)
    for (loop, _), group in by_loop.items():
        reachable += _of_loop(segment, loop, group)
    return sorted(reachable, key=lambda entry: entry.checkpoint.seq)


def _of_loop(
    segment: SegmentFile, loop: str, group: Sequence[Checkpoint]
) -> Iterator[ReachableCheckpoint]:
    """Yield the checkpoints of `group` that a replay of `segment` may read, and how it uses each.

    The checkpoints in `group` are from one execution of the outermost loop `loop`; a run may execute it several times.
    """
    ranges = segment.ranges.get(loop) if loop == segment.main else None
    restored_iterations: set[int] = set()
    spans = [(0, _NO_END)]
    if ranges is not None and _may_contain_probe(segment, [loop]):
        start_iterations = sorted(
            _main_iteration(checkpoint)
            for checkpoint in group
            if checkpoint.complete
            and checkpoint.edge == Edge.START
            and len(checkpoint.meta.path) == 1
        )
        jumps = segment.jump and segment.levels >= 1
        spans = list(_iteration_spans(sorted(ranges), start_iterations, jumps=jumps))
        restored_iterations = {first for first, _ in spans} if jumps else set()
    anchored: dict[int, Checkpoint] = {}
    for checkpoint in sorted(group, key=lambda checkpoint: not checkpoint.complete):
        anchored.setdefault(checkpoint.meta.anchored, checkpoint)
    for checkpoint in group:
        after_loop = checkpoint.edge == Edge.END and len(checkpoint.meta.path) == 1
        if after_loop or any(first <= _main_iteration(checkpoint) <= last for first, last in spans):
            may_restore = checkpoint.complete and _may_restore(
                segment, checkpoint, restored_iterations
            )
            yield ReachableCheckpoint(
                checkpoint, CheckpointUse.RESTORED if may_restore else CheckpointUse.COMPARED
            )
        elif any(checkpoint is first for first in anchored.values()):
            yield ReachableCheckpoint(checkpoint, CheckpointUse.ANCHORS)


def _iteration_spans(
    ranges: Sequence[tuple[int, int]], starts: Sequence[int], *, jumps: bool
) -> Iterator[tuple[int, int]]:
    """Yield (first iteration that a replay runs, last iteration that it may reach) for each of `ranges` (first, end).

    A replay may run beyond its range up to the next checkpoint, to compare its state with the checkpoint. `starts` are
    the iterations at whose start a checkpoint was saved. With `jumps`, the replay restores the checkpoint nearest to
    the next range; without, it runs all iterations before the range.

    >>> list(_iteration_spans([(5, 7)], [0, 4, 6, 9, 12], jumps=True))
    [(4, 9)]
    >>> list(_iteration_spans([(5, 7)], [0, 4, 6, 9, 12], jumps=False))
    [(0, 9)]
    """
    reached = 0
    for first, last in ranges:
        nearest = max((start for start in starts if start <= first), default=0)
        run_from = max(reached, nearest) if jumps else reached
        yield run_from, min((start for start in starts if start >= last), default=_NO_END)
        reached = last


def _may_restore(
    segment: SegmentFile, checkpoint: Checkpoint, restored_iterations: set[int]
) -> bool:
    """Return True if a replay of `segment` may restore `checkpoint`; False if it only compares its state with it.

    `restored_iterations` are the iterations of the main loop at which the replay starts or continues.
    """
    path = checkpoint.meta.path
    loops = [step.loop for step in path]
    limited = len(path) == 2 and loops[0] == segment.main and loops[1] in segment.ranges
    if not segment.jump:
        return False
    if checkpoint.edge == Edge.START:
        if len(path) == 1:
            return _main_iteration(checkpoint) in restored_iterations
        return limited and len(path) <= segment.levels
    in_ranges = all(_is_requested(segment, path, level) for level in range(len(path) - 1))
    if not in_ranges or not _may_contain_probe(segment, loops):
        return True
    return segment.after if len(path) == 1 else limited


def _may_contain_probe(segment: SegmentFile, loops: Sequence[str]) -> bool:
    """Return True if a probe of `segment` may be inside the nested loops `loops`, outermost first."""
    return segment.everywhere or any(may_hold(chain, loops) for chain in segment.chains)


def _is_requested(segment: SegmentFile, path: Sequence[LoopStep], level: int) -> bool:
    """Return True if values are requested in the iteration `path[level]`; level 0 is the outermost loop of `path`."""
    if path[0].loop != segment.main or level > 1:
        return True
    ranges = segment.ranges.get(path[level].loop)
    index = path[level].iteration
    return ranges is None or any(first <= index < last for first, last in ranges)


def _main_iteration(checkpoint: Checkpoint) -> int:
    """Return the iteration of the outermost loop in which `checkpoint` was saved."""
    return checkpoint.meta.path[0].iteration


_ALWAYS_READ = ("roots", "skeleton", "anchors")
"""Keys in `Checkpoint.parts` whose content a replay reads whenever it compares its state with the checkpoint."""
_NEVER_READ = {"replays.jsonl", "heartbeat", ACCOUNT}
"""Names of files in the folder of a run that no replay of the run reads."""


@dataclass(frozen=True, slots=True)
class ShippedFile:
    """The path, size, mode and time of a file or link of the project; on the node, it must have the same."""

    path: str
    size: int
    mode: int
    mtime: int
    """Time of modification in nanoseconds."""
    link: str | None = None
    """Target if the path is a link; None if it is a file."""


@dataclass(frozen=True, slots=True)
class ShippingList:
    """All the files that one segment needs on a node."""

    root: Path
    run: str
    replay: str
    folders: tuple[Path, ...]
    """Folders that only the replay uses; every change in them is a result of the replay."""
    replay_files: tuple[ShippedFile, ...]
    """The scratch tree and the segment file of the replay."""
    shared: tuple[ShippedFile, ...]
    """Files that several segments may need: the run, its checkpoints, inputs to which the scratch tree links."""
    only_if_different: tuple[ShippedFile, ...]
    """Objects of checkpoints that the replay reads only if its state differs from the checkpoint."""
    outside_project: tuple[str, ...]
    """Paths of files outside the project that the run read; they are not sent, so the node must have them."""


def segment_of(task: Task) -> Path | None:
    """Return the path of the segment file of `task`, or None if the task replays no segment."""
    control = task.environment.get(VARIABLE)
    if control is None:
        return None
    segment = msgspec.json.decode(control, type=Control).segment
    return None if segment is None else Path(segment)


def store_identity(project: Project) -> str:
    """Return a text that identifies the store of `project`; it differs for stores at the same path of two machines."""
    status, machine = project.store.stat(), process_identity(0)
    return f"{machine['host']} {machine['boot']} {status.st_dev} {status.st_ino}"


def list_files(task: Task, checkpoints: Checkpoints) -> ShippingList:
    """Return the files that `task` needs on a node; `checkpoints` are those of the task's project."""
    project = checkpoints.project
    segment = segment_of(task)
    assert segment is not None
    segment_file = msgspec.json.decode(segment.read_bytes(), type=SegmentFile)
    run = Runs(project).get(segment_file.run)
    tree = Path(segment_file.tree)
    replay_files = [_entry(segment), *_tree(tree), *_tree(recorded_texts(tree))]
    linked = [
        Path(entry.link) for entry in replay_files if entry.link and entry.link.startswith(os.sep)
    ]
    shared = {file.path: file for file in _link_targets(project.root, linked)}
    checkpoint_files, only_if_different = _checkpoint_files(
        checkpoints, reachable_checkpoints(segment_file, checkpoints.of(run.id))
    )
    for path in (*_store_files(project, run), *checkpoint_files):
        shared[str(path)] = _entry(path)
    return ShippingList(
        root=project.root,
        run=run.id,
        replay=segment_file.replay,
        folders=tuple(dict.fromkeys((segment.parent, tree.parent))),
        replay_files=tuple(replay_files),
        shared=tuple(shared.values()),
        only_if_different=tuple(_entry(path) for path in only_if_different),
        outside_project=tuple(_inputs_outside(project.root, run)),
    )


def _store_files(project: Project, run: Run) -> Iterator[Path]:
    """Yield the paths of the files in the store that every replay of `run` reads, without checkpoints."""
    yield project.store / "format"
    if (project.store / "config.toml").is_file():
        yield project.store / "config.toml"
    for entry in sorted(os.scandir(project.runs / run.id), key=lambda entry: entry.name):
        if entry.name in _NEVER_READ or entry.name.startswith(".") or not entry.is_file():
            continue
        if entry.name.endswith(".jsonl") and entry.name.startswith("records-"):
            with Path(entry.path).open("rb") as file:
                head = file.readline(1 << 20)
            if origin_of(head) != Origin.RECORDED:
                continue  # records of another replay
        yield Path(entry.path)


def origin_of(first_line: bytes) -> str:
    """Return the origin of the records in a file: `Origin.RECORDED`, or the id of the replay that wrote them.

    `first_line` is the first line of the file. Return an empty text if it cannot be read.
    """
    try:
        return str(msgspec.json.decode(first_line).get("origin", ""))
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError):
        return ""


def _checkpoint_files(
    checkpoints: Checkpoints, reachable: Iterable[ReachableCheckpoint]
) -> tuple[list[Path], list[Path]]:
    """Return (files of `reachable` that a replay always reads, files that it reads only if it differs from the run)."""
    always: dict[Path, None] = {}
    if_different: dict[Path, None] = {}
    folder, objects = checkpoints.project.checkpoints, checkpoints.objects
    for entry in reachable:
        checkpoint = entry.checkpoint
        always[folder / checkpoint.run / f"{checkpoint.seq:08d}.json"] = None
        table = checkpoints.table(checkpoint)
        if table is not None:
            always[objects.file(table)] = None
        for key, ref in checkpoint.parts.items():
            read = entry.use is CheckpointUse.RESTORED or key in _ALWAYS_READ
            packed = ref.pack is not None and entry.use is CheckpointUse.COMPARED
            (always if read or packed else if_different)[objects.file(ref)] = None
    return list(always), [path for path in if_different if path not in always]


def _tree(tree: Path) -> Iterator[ShippedFile]:
    """Yield all files and links below the folder `tree`; links are not followed."""
    for folder, folders, names in os.walk(tree):
        for name in sorted(
            (*names, *(name for name in folders if Path(folder, name).is_symlink()))
        ):
            entry = _entry(Path(folder, name))
            if stat.S_ISREG(entry.mode) or entry.link is not None:
                yield entry


def _link_targets(root: Path, linked: Iterable[Path]) -> Iterator[ShippedFile]:
    """Yield the files of the project `root` at the paths `linked`, to which the scratch tree links.

    Of a folder, yield all files below it. Of a link, also yield the file to which it leads.
    """
    visited: set[Path] = set()
    remaining = list(linked)
    while remaining:
        path = remaining.pop()
        if path in visited or root not in path.parents or not os.path.lexists(path):
            continue
        visited.add(path)
        entry = _entry(path)
        if stat.S_ISDIR(entry.mode):
            yield from _tree(path)
            continue
        yield entry
        if entry.link is not None:  # the target of the link is itself a link, which the user made
            remaining.append(Path(os.path.normpath(path.parent / entry.link)))


def _entry(path: Path) -> ShippedFile:
    status = path.lstat()
    link = str(path.readlink()) if stat.S_ISLNK(status.st_mode) else None
    return ShippedFile(str(path), status.st_size, status.st_mode, status.st_mtime_ns, link)


def _inputs_outside(root: Path, run: Run) -> Iterator[str]:
    inputs = run.end.inputs
    for path in inputs:
        present_path = run.current_path(path, str(root))
        if root not in Path(present_path).parents:
            yield path


def known_file_of(task: Task) -> tuple[str, bytes] | None:
    """Return (path, content) of the segment file of `task`, or None if the task replays no segment.

    A node that has a file with this content at this path sees the project's folder.
    """
    segment = segment_of(task)
    return None if segment is None else (str(segment), segment.read_bytes())


@dataclass
class ChunkCache:
    """Puts chunks of files into Ray's object store, each only once, and keeps the most recently used ones there."""

    _refs: OrderedDict[tuple[str, int, int], tuple[Any, int]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _size: int = 0

    def get(self, entry: ShippedFile, position: int) -> Any:
        """Return the chunk of the file `entry` that begins at byte `position`.

        The result is the bytes if the file is small, else a reference to them in Ray's object store.
        """
        import ray

        if entry.size < SENT_INLINE:
            return _read(entry, position)
        key = (entry.path, entry.mtime, position)
        with self._lock:
            if key not in self._refs:
                data = _read(entry, position)
                self._refs[key] = (ray.put(data), len(data))
                self._size += len(data)
            self._refs.move_to_end(key)
            while self._size > CACHE_BYTES:
                _, (_, size) = self._refs.popitem(last=False)
                self._size -= size
            return self._refs[key][0]


def _read(entry: ShippedFile, position: int) -> bytes:
    count = min(CHUNK, entry.size - position)
    with Path(entry.path).open("rb") as file:
        data = os.pread(file.fileno(), count, position)
    if len(data) < count:
        raise FileNotFoundError(entry.path)  # after it was listed, a shorter file replaced it
    return data


ReadChunks = Callable[[list[tuple[str, int, int]]], list[bytes]]
"""Function that takes (path, position, length) of chunks of files on the node, and returns the bytes of each."""


@dataclass
class StagedResults:
    """Results of a replay, fetched from a node into a staging folder.

    Only `publish` changes the store. `close` removes the staging folder, with results that were not published.
    """

    project: Project
    shipping_list: ShippingList
    read: ReadChunks
    chunk: int

    def __post_init__(self) -> None:
        self.staging = self.shipping_list.folders[0] / ".results"
        self.objects = Objects(self.project)
        self.files: dict[Path, Path] = {}
        """Final path -> path in the staging folder, for each file that the replay wrote."""
        self.records: list[Path] = []
        self.values: dict[str, Path] = {}
        self.links: dict[Path, str] = {}
        self.deleted: list[Path] = []
        self._count = 0

    def fetch(self, node_results: dict[str, Any], values: Sequence[SizedFile]) -> None:
        """Fetch all results into the staging folder, chunk by chunk.

        `node_results` is the result of `SegmentWorker.list_results`, and `values` are the objects on the node that the
        store does not have yet. Raise if an object arrives damaged.
        """
        files = [
            (self._checked_path(path), (path, size, mode))
            for path, size, mode in node_results["files"]
        ]
        self.links = {
            self._checked_path(path): link for path, link in node_results["links"].items()
        }
        self.deleted = [self._checked_path(path) for path in node_results["deleted"]]
        self.staging.mkdir(parents=True, exist_ok=True)
        staged = self._stage([sized for _, sized in files])
        self.files = {target: file for (target, _), file in zip(files, staged, strict=True)}
        self.records = list(self._stage(node_results["records"]))
        for (path, _, _), file in zip(values, self._stage(values), strict=True):
            oid = "".join(Path(path).parts[-2:])
            if not _has_hash(file, oid):
                raise SiteError(
                    f"Object {oid[:12]}, which the replay {self.shipping_list.replay} logged, arrived "
                    "damaged from its node. Start the backfill again.",
                    slug="ray-node",
                )
            self.values[oid] = file

    def publish(self, last: Path) -> None:
        """Move the results to their final paths: first objects, at last the records that name them and the file `last`."""
        for oid, file in self.values.items():
            target = self.objects.path(oid)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
        for target in self.deleted:
            with contextlib.suppress(OSError):
                target.unlink()
        for target, link in self.links.items():
            _clear_target(target)
            target.symlink_to(link)
        for target in sorted(self.files, key=lambda target: target == last):
            if target == last:
                self._publish_records()
            _clear_target(target)
            self.files[target].replace(target)
        self._publish_records()

    def close(self) -> None:
        """Remove the staging folder."""
        shutil.rmtree(self.staging, ignore_errors=True)

    def _publish_records(self) -> None:
        folder = self.project.runs / self.shipping_list.run
        while self.records:
            file, n = self.records[0], 0
            # an earlier process of this machine with an equal process id may have used the first names
            while True:
                target = folder / f"records-{os.getpid()}-{n}.jsonl"
                n += 1
                if target.with_suffix(".parquet").exists():
                    continue
                with contextlib.suppress(FileExistsError):
                    target.touch(exist_ok=False)
                    break
            file.replace(target)
            self.records.pop(0)

    def _stage(self, files: Sequence[SizedFile]) -> list[Path]:
        """Fetch `files` from the node, chunk by chunk; return the path of each in the staging folder."""
        copies = []
        for _, _, mode in files:
            copies.append(self.staging / str(self._count))
            self._count += 1
            copies[-1].touch()
            copies[-1].chmod(stat.S_IMODE(mode) | stat.S_IWUSR)
        copy_of = {path: file for (path, _, _), file in zip(files, copies, strict=True)}
        for batch in _batches(files, self.chunk):
            for (path, _, _), data in zip(batch, self.read(batch), strict=True):
                with copy_of[path].open("ab") as file:
                    file.write(data)
        return copies

    def _checked_path(self, path: str) -> Path:
        """Return `path`, a result that the node reports; raise if it is outside the folders of the replay.

        A node may write only in these folders.
        """
        if (
            not any(folder in Path(path).parents for folder in self.shipping_list.folders)
            or ".." in Path(path).parts
        ):
            raise SiteError(
                f"A node returns {path} as a result of the replay {self.shipping_list.replay}, whose "
                f"folder is {self.shipping_list.folders[0]}. Do not trust that node.",
                slug="ray-node",
            )
        return Path(path)


def _has_hash(file: Path, oid: str) -> bool:
    """Return True if the content of `file` has the hash `oid`."""
    try:
        return content_hash(file) == oid
    except OSError:
        return False


def _clear_target(target: Path) -> None:
    """Prepare the path `target` for a new file: create its parent folder, and remove a folder or link at `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif target.is_symlink():
        target.unlink()


def _batches(files: Sequence[SizedFile], chunk: int) -> Iterator[list[tuple[str, int, int]]]:
    """Divide `files` into chunks (path, position, length), and yield lists of chunks of about `chunk` bytes in total.

    >>> list(_batches([("a", 5, 0), ("b", 2, 0), ("c", 0, 0)], 3))
    [[('a', 0, 3)], [('a', 3, 2), ('b', 0, 2)]]
    """
    batch: list[tuple[str, int, int]] = []
    size = 0
    for path, file_size, _ in files:
        for position in range(0, file_size, chunk):
            batch.append((path, position, min(chunk, file_size - position)))
            size += batch[-1][2]
            if size >= chunk:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
