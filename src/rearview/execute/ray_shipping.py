"""Ship segments to Ray nodes that do not see the project's folder, and fetch their results.

`ray_file_list` lists the files that a segment needs on the node. Files that several segments share are sent once. The
results are first copied into a staging folder, and published in the store only when all of them are there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import SiteError
from rearview.execute import ray_node
from rearview.execute.executor import Task
from rearview.execute.ray_file_list import (
    ShippedFile,
    ShippingList,
    known_file_of,
    list_files,
    segment_of,
    store_identity,
)
from rearview.execute.ray_node import SizedFile
from rearview.model import (
    ReplayReport,
)
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.objects import Objects, content_hash
from rearview.store.project import Project

CHUNK = 64 << 20
"""Bytes that are sent in one message."""
SENT_INLINE = 1 << 20
"""Files smaller than this many bytes are sent inside a message, not through Ray's object store."""
CACHE_BYTES = 16 * CHUNK
"""Bytes that stay in Ray's object store for other nodes; the least recently used go first."""


@dataclass
class ChunkCache:
    """Chunks of files in Ray's object store: each is put there once and remembered for a while."""

    _refs: OrderedDict[tuple[str, int, int], tuple[Any, int]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _size: int = 0

    def get(self, entry: ShippedFile, position: int) -> Any:
        """Return a chunk of a file: its bytes if the file is small, else a reference to Ray's store."""
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


class Shipments:
    """State shared by all segments that one backfill ships: cached chunks and prepared nodes."""

    def __init__(self, gpus: float) -> None:
        import ray

        ray.cloudpickle.register_pickle_by_value(ray_node)
        self.gpus = gpus
        self.needed = False
        """Whether a node was found that does not see the project."""
        self.chunks = ChunkCache()
        self.lock = threading.Lock()
        self._node_locks: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._folder_owners: dict[str, Any] = {}
        self._checkpoints: dict[Path, Checkpoints] = {}
        self._worker_class = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(
            ray_node.SegmentWorker
        )
        self._owner_class = ray.remote(num_cpus=0, max_restarts=0)(ray_node.FolderOwner)

    def start_worker(self) -> Any:
        """Start an actor for one segment on a node that Ray chooses; it holds the resources there."""
        return self._worker_class.remote()

    def list_files(self, task: Task) -> tuple[Project, ShippingList]:
        """Return the project of a task and the files that the task needs."""
        segment = segment_of(task)
        assert segment is not None
        root = segment.parents[3]
        with self.lock:
            checkpoints = self._checkpoints.setdefault(root, Checkpoints(Project(root)))
            return checkpoints.project, list_files(task, checkpoints)

    def lock_of_node(self, node: str) -> threading.RLock:
        """Return the lock to hold while files are written that several segments on a node share."""
        with self.lock:
            return self._node_locks[node]

    def folder_owner(self, project: Project, node_facts: dict[str, Any]) -> Any:
        """Return the actor that owns the project folder on a node; create both if needed.

        `node_facts` are what `SegmentWorker.inspect_node` returned.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = node_facts["node"]
        with self.lock_of_node(node):
            if node not in self._folder_owners:
                on_node = NodeAffinitySchedulingStrategy(node, soft=False)
                owner = self._owner_class.options(scheduling_strategy=on_node).remote()
                refusal = ray.get(owner.create.remote(str(project.root), store_identity(project)))
                if refusal is not None:
                    ray.kill(owner)
                    raise SiteError(
                        f"The node {node_facts['host']} of the Ray cluster does not see {project.root}, "
                        f"and the files of a replay cannot be put there: {refusal}. Make that "
                        "path free and writable on the node, or share the folder with it.",
                        slug="ray-node",
                    )
                self._folder_owners[node] = owner
            return self._folder_owners[node]

    def forget_owner(self, node_facts: dict[str, Any], owner: Any) -> None:
        """Let the next segment prepare a node again whose folder owner was lost."""
        with self.lock_of_node(node_facts["node"]):
            if self._folder_owners.get(node_facts["node"]) is owner:
                del self._folder_owners[node_facts["node"]]

    def close(self) -> None:
        """Remove the project folders that were created on nodes."""
        import ray

        for owner in self._folder_owners.values():
            # if the node or the actor is gone, the cleaner process there removes the folder
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                ray.get(owner.remove.remote(), timeout=60)
            ray.kill(owner)
        self._folder_owners.clear()


def _read(entry: ShippedFile, position: int) -> bytes:
    count = min(CHUNK, entry.size - position)
    with Path(entry.path).open("rb") as file:
        data = os.pread(file.fileno(), count, position)
    if len(data) < count:
        raise FileNotFoundError(entry.path)  # a shorter file has replaced it
    return data


ReadChunks = Callable[[list[tuple[str, int, int]]], list[bytes]]
"""Returns chunks of files on the node, each given by path, position and length."""


@dataclass
class StagedResults:
    """Results of a replay, fetched from a node into a staging folder.

    The store changes only in `publish`. Without it, `close` removes everything.
    """

    project: Project
    shipping_list: ShippingList
    read: ReadChunks
    chunk: int

    def __post_init__(self) -> None:
        self.staging = self.shipping_list.folders[0] / ".results"
        self.objects = Objects(self.project)
        self.files: dict[Path, Path] = {}
        """Final path -> path in the staging folder."""
        self.records: list[Path] = []
        self.values: dict[str, Path] = {}
        self.links: dict[Path, str] = {}
        self.deleted: list[Path] = []
        self._count = 0

    def fetch(self, node_results: dict[str, Any], values: Sequence[SizedFile]) -> None:
        """Fetch all results, chunk by chunk; `values` are the objects that the store does not have yet."""
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
        """Move everything into place: objects before the records that name them, the file `last` last."""
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
            while True:  # a process of this machine may have had the same id
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
        """Return local copies of files of the node, fetched chunk by chunk."""
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
        """Return `path`; raise if it is outside the replay's own folders, where a node may not write."""
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
    """Create the parent folder of `target`, and remove a folder or link that is in its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif target.is_symlink():
        target.unlink()


def _batches(files: Sequence[SizedFile], chunk: int) -> Iterator[list[tuple[str, int, int]]]:
    """Yield chunks (path, position, length) of files, in groups of about `chunk` bytes.

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


MAX_LISTINGS = 3
"""How often the files of a segment are listed again because one was replaced while being sent."""


class ShippedJob:
    """One segment that runs on a node without the project: ship its files, run it, fetch its results."""

    def __init__(self, shipments: Shipments, task: Task) -> None:
        self.shipments = shipments
        self.task = task
        self._worker: Any = shipments.start_worker()
        self._stopped = False
        self._lock = threading.Lock()
        self._code: int | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run_in_thread, name=f"rearview-{task.id}", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it has not ended after `timeout` seconds."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._code

    def stop(self) -> None:
        """Kill it at once. Results that are not published yet never will be."""
        import ray

        with self._lock:
            self._stopped = True
        ray.kill(self._worker)
        self._thread.join(10.0)

    def _run_in_thread(self) -> None:
        import ray

        try:
            self._code = self._ship_and_run()
        except ray.exceptions.RayTaskError as exc:
            last = str(exc).strip().splitlines()[-1]
            self._error = SiteError(
                f"A node of the Ray cluster could not run the replay {self.task.id}: {last}. "
                "Check that its disk has free space, or share the project's folder with it.",
                slug="ray-node",
            )
        except ray.exceptions.RayError:
            self._code = -1  # the worker or its node was lost, or the job was stopped
        except BaseException as exc:
            self._error = exc
        finally:
            if not self._stopped:
                ray.kill(self._worker)

    def _ship_and_run(self) -> int:
        import ray

        known_file = known_file_of(self.task)
        assert known_file is not None
        project, files_needed = self.shipments.list_files(self.task)
        needed_paths = [self.task.command[0], *files_needed.outside_project]
        if files_needed.root not in self.task.folder.parents:
            needed_paths.append(str(self.task.folder))
        node_facts = self._call("inspect_node", known_file, needed_paths)
        if node_facts["sees_project"]:
            return int(self._call("run", *self._run_arguments(), []))
        if node_facts["missing"]:
            raise SiteError(
                f"The node {node_facts['host']} of the Ray cluster has no {node_facts['missing'][0]}, "
                f"which the run {files_needed.run} needs and which is outside the project "
                f"{files_needed.root}. Only files of the project are sent: copy it to the node.",
                slug="ray-node",
            )
        owner = self.shipments.folder_owner(project, node_facts)
        try:
            return self._replay_on_node(project, files_needed, node_facts, owner)
        except ray.exceptions.RayError:
            self._check_owner(owner, node_facts)
            raise

    def _replay_on_node(
        self, project: Project, files_needed: ShippingList, node_facts: dict[str, Any], owner: Any
    ) -> int:
        folders_and_store = ([str(folder) for folder in files_needed.folders], str(project.store))
        run_and_replay = (files_needed.run, files_needed.replay)
        with_all = False
        while True:
            files_needed = self._send_files(files_needed, node_facts, with_all=with_all)
            code = int(self._call("run", *self._run_arguments(), folders_and_store[0]))
            results = StagedResults(
                project, files_needed, lambda chunks: self._call("read_chunks", chunks), CHUNK
            )
            try:
                node_results = self._call("list_results", *folders_and_store, *run_and_replay)
                new = [oid for oid in node_results["objects"] if not results.objects.has(oid)]
                values = self._call("file_sizes", [str(results.objects.path(oid)) for oid in new])
                results.fetch(node_results, values)
                if (
                    not with_all
                    and files_needed.only_if_different
                    and _differs(results.files.get(self.task.report))
                ):
                    with_all = True  # run again with the checkpoint parts that it differs from
                    self._call("remove_files", *folders_and_store, *run_and_replay)
                    continue
                self._check_owner(owner, node_facts)
                with self._lock:
                    if self._stopped:
                        return -1
                    results.publish(self.task.report)
            finally:
                results.close()
            self._call("remove_files", *folders_and_store, *run_and_replay)
            return code

    def _send_files(
        self, files_needed: ShippingList, node_facts: dict[str, Any], *, with_all: bool
    ) -> ShippingList:
        """Send the files that are needed, and if `with_all` also those that only a difference needs.

        Return the list of files; it is made again if a file was replaced in the meantime: records get sealed.
        """
        for tries_left in reversed(range(MAX_LISTINGS)):
            try:
                shared = (
                    (*files_needed.shared, *files_needed.only_if_different)
                    if with_all
                    else files_needed.shared
                )
                self._send_missing(files_needed, shared, node_facts)
                break
            except FileNotFoundError:
                if not tries_left:
                    raise
                _, files_needed = self.shipments.list_files(self.task)
        return files_needed

    def _send_missing(
        self, files_needed: ShippingList, shared: Sequence[ShippedFile], node_facts: dict[str, Any]
    ) -> None:
        with self.shipments.lock_of_node(node_facts["node"]):
            shared_files = [(entry.path, entry.size, entry.link) for entry in shared]
            self._send(shared[k] for k in self._call("missing_files", shared_files))
        self._send(files_needed.own)

    def _send(self, entries: Iterable[ShippedFile]) -> None:
        """Write files to the node, about CHUNK bytes per message."""
        batch: list[tuple[Any, ...]] = []
        size = 0
        for entry in entries:
            described = (entry.path, entry.size, entry.mode, entry.mtime, entry.link)
            for position in range(0, max(1, entry.size), CHUNK):
                data = b"" if entry.link is not None else self.shipments.chunks.get(entry, position)
                batch.append((*described, position, data))
                size += min(CHUNK, entry.size - position)
                if size >= CHUNK:
                    self._call("write_chunks", batch)
                    batch, size = [], 0
        if batch:
            self._call("write_chunks", batch)

    def _run_arguments(self) -> tuple[Any, ...]:
        task = self.task
        folder_and_log = (str(task.folder), str(task.log))
        return (
            list(task.command),
            dict(task.environment),
            *folder_and_log,
            bool(self.shipments.gpus),
        )

    def _call(self, method: str, *args: Any) -> Any:
        import ray

        if self._stopped:  # a call would join the cluster again
            raise ray.exceptions.RayError
        return ray.get(getattr(self._worker, method).remote(*args))

    def _check_owner(self, owner: Any, node_facts: dict[str, Any]) -> None:
        """Raise if the folder owner on the node is gone: it may have removed the folder during the replay."""
        import ray

        try:
            ray.get(owner.ping.remote())
        except ray.exceptions.RayError:
            self.shipments.forget_owner(node_facts, owner)
            raise


def _differs(report: Path | None) -> bool:
    """Return True if a report says that the replay differs, or could not restore something."""
    if report is None:
        return False
    try:
        replay_report = msgspec.json.decode(report.read_bytes(), type=ReplayReport)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return replay_report.retry or replay_report.difference is not None
