"""The Ray executor: run segments on the nodes of a cluster, whether or not they see the project's folder.

`ray_node` is the code that runs on a node. If a node does not see the project's folder, the segment is a `ShippedJob`:
its files are sent to the node, and its results are fetched (`ray_files`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import SiteError
from rearview.execute import ray_files, ray_node
from rearview.execute.executor import Job, Task
from rearview.execute.ray_files import (
    ChunkCache,
    ShippedFile,
    ShippingList,
    StagedResults,
    known_file_of,
    list_files,
    segment_of,
    store_identity,
)
from rearview.model import ReplayReport
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project

MAX_LISTINGS = 3
"""Most times that the files of a segment are listed: if a file is replaced while it is sent, they are listed again."""


@dataclass
class RayJob:
    """A task that runs on a node of the cluster, which Ray chooses. It is tried first without sending any files."""

    task: Task
    ref: Any
    """Ray's reference to the exit code."""
    shipments: Shipments
    shipped_job: ShippedJob | None = None
    """The job that sends files and runs the task, if the first node did not see the project; else None."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for at most `timeout` seconds; return the exit code of the task, or None if the task still runs.

        The exit code is -1 if Ray lost the node or its process; the `Pool` then starts the segment again.
        """
        import ray

        if self.shipped_job is not None:
            return self.shipped_job.wait(timeout)
        ended, _ = ray.wait([self.ref], timeout=timeout)
        if not ended:
            return None
        try:
            code = ray.get(self.ref)
        except ray.exceptions.RayTaskError as exc:
            last = str(exc).strip().splitlines()[-1]
            raise SiteError(
                f"A node of the Ray cluster could not start the replay {self.task.id}: {last}. "
                f"Every node needs Python at {self.task.command[0]} and the folder "
                f"{self.task.folder}. Or leave out `--on ray`.",
                slug="ray-node",
            ) from exc
        except ray.exceptions.RayError:
            return -1
        if code is None:
            self.shipments.needed = True
            self.shipped_job = ShippedJob(self.shipments, self.task)
            return None
        return int(code)

    def stop(self) -> None:
        """Kill the task at once: Ray kills its own process on the node, and the process of the task dies with it."""
        import ray

        if self.shipped_job is not None:
            self.shipped_job.stop()
        else:
            ray.cancel(self.ref, force=True)


class Ray:
    """The executor for a Ray cluster: the cluster that RAY_ADDRESS names or that runs here, or a new one (`_join`).

    `gpus` is how many accelerators each segment gets; with a fraction, segments share an accelerator. Ray must not
    retry a segment: a segment that runs again needs a new replay id, so that its records count only once.
    """

    def __init__(self, slots: int | None = None, *, gpus: float = 0.0) -> None:
        try:
            import ray
        except ImportError as exc:
            raise SiteError(
                "Ray is not installed. Install it with `pip install rearview[ray]`, or leave out "
                "`--on ray`.",
                slug="no-ray",
            ) from exc
        self._own = not ray.is_initialized()
        if self._own:
            _join(slots)
        self._slots = slots
        self._gpus = gpus
        self._shipments = Shipments(gpus)
        self._check()
        self._run = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(ray_node.execute)

    def _check(self) -> None:
        """Raise if each segment needs more accelerators than any node has; Ray would wait forever for such a node."""
        import ray

        most_on_a_node = max(
            (node["Resources"].get("GPU", 0.0) for node in ray.nodes()), default=0.0
        )
        if self._gpus > most_on_a_node:
            self.close()
            raise SiteError(
                f"Each segment is to get {self._gpus:g} accelerators, but no node of the Ray "
                f"cluster has more than {most_on_a_node:g}. Ask for fewer with `--gpus`.",
                slug="ray-gpus",
            )

    @property
    def slots(self) -> int:
        """Number of segments that can run at once; it changes when nodes join or leave."""
        import ray

        resources = ray.cluster_resources()
        slots = int(resources.get("CPU", 1))
        if self._gpus:
            slots = min(slots, int(resources.get("GPU", 0.0) / self._gpus + 1e-9))
        return max(1, min(slots, self._slots or slots))

    def resize(self, slots: int) -> None:
        """Change the number of slots; it is limited by the cores and accelerators of the cluster."""
        self._slots = max(1, slots)

    def start(self, task: Task, slot: int) -> Job:
        """Start `task` on a node of the cluster, which Ray chooses."""
        del slot  # Ray chooses the node
        if self._shipments.needed and segment_of(task) is not None:
            return ShippedJob(self._shipments, task)
        arguments = (list(task.command), dict(task.environment), str(task.folder), str(task.log))
        ref = self._run.remote(*arguments, bool(self._gpus), known_file_of(task))
        return RayJob(task, ref, self._shipments)

    def close(self) -> None:
        """Remove the project folders from nodes; shut Ray down if this object initialized it."""
        import ray

        self._shipments.close()
        if self._own:
            ray.shutdown()


def _join(slots: int | None) -> None:
    """Join the cluster that `RAY_ADDRESS` names or that runs on this machine; if there is none, start one."""
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    if address != "local":
        try:
            ray.init(address=address or "auto", log_to_driver=False)
        except ConnectionError:
            if address:
                raise
        else:
            return
    # may be more than `slots`, because workers may be added later
    cores = max(slots or 0, os.cpu_count() or 1)
    ray.init(address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False)


class Shipments:
    """Resources that all shipped segments of a backfill share: cached chunks of files, and project folders on nodes."""

    def __init__(self, gpus: float) -> None:
        import ray

        ray.cloudpickle.register_pickle_by_value(ray_node)
        self.gpus = gpus
        self.needed = False
        """Whether a node did not see the project's folder, so that all further segments are shipped."""
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
        """Start a `SegmentWorker` for one segment on a node that Ray chooses, and return its actor.

        The actor reserves a core, and accelerators if requested.
        """
        return self._worker_class.remote()

    def list_files(self, task: Task) -> tuple[Project, ShippingList]:
        """Return (project of `task`, files that the task needs on a node)."""
        segment = segment_of(task)
        assert segment is not None
        root = segment.parents[3]
        with self.lock:
            checkpoints = self._checkpoints.setdefault(root, Checkpoints(Project(root)))
            return checkpoints.project, list_files(task, checkpoints)

    def lock_of_node(self, node: str) -> threading.RLock:
        """Return the lock of the node with the id `node`; hold it while writing files that several segments share."""
        with self.lock:
            return self._node_locks[node]

    def folder_owner(self, project: Project, node_facts: dict[str, Any]) -> Any:
        """Return the `FolderOwner` actor for the folder of `project` on a node; create actor and folder if needed.

        `node_facts` is the result of `SegmentWorker.inspect_node`. Raise if the folder cannot be created.
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
        """Forget the actor `owner`, which has died, so that the next segment on its node creates the folder again."""
        with self.lock_of_node(node_facts["node"]):
            if self._folder_owners.get(node_facts["node"]) is owner:
                del self._folder_owners[node_facts["node"]]

    def close(self) -> None:
        """Remove the project folders that were created on nodes, and end their actors."""
        import ray

        for owner in self._folder_owners.values():
            # if the actor has died, the cleaner process on its node removes the folder
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                ray.get(owner.remove.remote(), timeout=60)
            ray.kill(owner)
        self._folder_owners.clear()


class ShippedJob:
    """A task on a node that does not see the project's folder; a thread sends files, runs it and fetches results."""

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
        """Wait for at most `timeout` seconds; return the exit code of the task, or None if the task still runs."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._code

    def stop(self) -> None:
        """Kill the task at once. Its results are dropped unless they are in the store already."""
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
            self._code = -1  # Ray lost the node or the actor on it, or the job was stopped
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
                project,
                files_needed,
                lambda chunks: self._call("read_chunks", chunks),
                ray_files.CHUNK,
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
                    # run again, and send all files of checkpoints, to describe the difference
                    with_all = True
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
        """Send `files_needed` to the node; those in `only_if_different` are sent only if `with_all`.

        Return the list of files that were sent. It differs from `files_needed` if a file was replaced while it was
        sent, which happens when record files are sealed.
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
        self._send(files_needed.replay_files)

    def _send(self, entries: Iterable[ShippedFile]) -> None:
        """Send the files `entries` to the node, in messages of about CHUNK bytes."""
        batch: list[tuple[Any, ...]] = []
        size = 0
        for entry in entries:
            described = (entry.path, entry.size, entry.mode, entry.mtime, entry.link)
            for position in range(0, max(1, entry.size), ray_files.CHUNK):
                data = b"" if entry.link is not None else self.shipments.chunks.get(entry, position)
                batch.append((*described, position, data))
                size += min(ray_files.CHUNK, entry.size - position)
                if size >= ray_files.CHUNK:
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

        # after Ray was shut down, calling the actor would connect to the cluster again
        if self._stopped:
            raise ray.exceptions.RayError
        return ray.get(getattr(self._worker, method).remote(*args))

    def _check_owner(self, owner: Any, node_facts: dict[str, Any]) -> None:
        """Raise if the folder owner on the node has died: its cleaner may have removed the folder during the replay."""
        import ray

        try:
            ray.get(owner.ping.remote())
        except ray.exceptions.RayError:
            self.shipments.forget_owner(node_facts, owner)
            raise


def _differs(report: Path | None) -> bool:
    """Return True if the file `report` says that the replay differs from the run, or could not restore a checkpoint.

    Return False if there is no readable report.
    """
    if report is None:
        return False
    try:
        replay_report = msgspec.json.decode(report.read_bytes(), type=ReplayReport)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return replay_report.retry or replay_report.difference is not None
