"""Bring segments to nodes of a Ray cluster that do not see the project's folder, and back."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import SiteError
from rearview.execute import aboard
from rearview.execute.cargo import Cargo, Entry, home_of, pack, segment_of
from rearview.execute.executor import Task
from rearview.execute.landing import Landing
from rearview.model import Report
from rearview.store.checkpoints import Checkpoints
from rearview.store.project import Project

CHUNK = 64 << 20
"""Bytes that travel at once."""
SMALL = 1 << 20
"""Files below this travel together, without a place of their own in Ray's store."""
KEPT = 16 * CHUNK
"""Bytes that stay in Ray's store for other nodes; older ones are put again when asked for."""
TRIES = 3
"""How often a segment is packed anew whose files were replaced meanwhile: records get sealed."""


@dataclass
class Pieces:
    """Parts of files in Ray's object store, each put there once while it is remembered."""

    _refs: OrderedDict[tuple[str, int, int], tuple[Any, int]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _size: int = 0

    def get(self, entry: Entry, at: int) -> Any:
        """Return a part of a file: its bytes if they are few, else where Ray keeps them."""
        import ray

        if entry.size < SMALL:
            return _read(entry, at)
        key = (entry.path, entry.mtime, at)
        with self._lock:
            if key not in self._refs:
                data = _read(entry, at)
                self._refs[key] = (ray.put(data), len(data))
                self._size += len(data)
            self._refs.move_to_end(key)
            while self._size > KEPT:
                _, (_, size) = self._refs.popitem(last=False)
                self._size -= size
            return self._refs[key][0]


class Carrier:
    """What all segments of one backfill share: what was put, and where room was made."""

    def __init__(self, gpus: float) -> None:
        import ray

        self.gpus = gpus
        self.away = False
        """A node was met that does not see the project."""
        self.pieces = Pieces()
        self.lock = threading.Lock()
        self._nodes: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._keepers: dict[str, Any] = {}
        self._stores: dict[Path, Checkpoints] = {}
        self._aboard = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(aboard.Aboard)
        self._keeper = ray.remote(num_cpus=0, max_restarts=0)(aboard.Keeper)

    def place(self) -> Any:
        """Return a place for one segment, wherever Ray has room; it holds its share there."""
        return self._aboard.remote()

    def pack(self, task: Task) -> tuple[Project, Cargo]:
        """Return what a task needs, and whose it is."""
        segment = segment_of(task)
        assert segment is not None
        root = segment.parents[3]
        with self.lock:
            store = self._stores.setdefault(root, Checkpoints(Project(root)))
            return store.project, pack(task, store)

    def node(self, name: str) -> threading.RLock:
        """Return what is held while things are laid out that segments on a node share."""
        with self.lock:
            return self._nodes[name]

    def keep(self, project: Project, look: dict[str, Any]) -> Any:
        """Return who holds the folder on a node, making room for it there if nobody does yet."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = look["node"]
        with self.node(node):
            if node not in self._keepers:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                keeper = self._keeper.options(scheduling_strategy=there).remote()
                refusal = ray.get(keeper.begin.remote(str(project.root), home_of(project)))
                if refusal is not None:
                    ray.kill(keeper)
                    raise SiteError(
                        f"The node {look['host']} of the Ray cluster does not see {project.root}, "
                        f"and what a replay needs cannot be laid out there: {refusal}. Make that "
                        "path free and writable on the node, or share the folder with it.",
                        slug="ray-node",
                    )
                self._keepers[node] = keeper
            return self._keepers[node]

    def forget(self, look: dict[str, Any]) -> None:
        """Let room be made anew on a node whose keeper was lost."""
        with self.node(look["node"]):
            self._keepers.pop(look["node"], None)

    def close(self) -> None:
        """Remove what was laid out on all nodes."""
        import ray

        for keeper in self._keepers.values():
            try:
                ray.get(keeper.end.remote(), timeout=60)
            except (ray.exceptions.RayError, TimeoutError):
                pass  # it went with its node; what watched it removes what is left
            ray.kill(keeper)
        self._keepers.clear()


class Passage:
    """One segment on its way to a node, there, and back."""

    def __init__(self, carrier: Carrier, task: Task) -> None:
        self.carrier = carrier
        self.task = task
        self._place: Any = carrier.place()
        self._stopped = False
        self._lock = threading.Lock()
        self._code: int | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._go, name=f"rearview-{task.id}", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it is still under way after `timeout` seconds."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._code

    def stop(self) -> None:
        """End it, now. What has not landed by then never does."""
        import ray

        with self._lock:
            self._stopped = True
        ray.kill(self._place)
        self._thread.join(10.0)

    def _go(self) -> None:
        import ray

        try:
            self._code = self._travel()
        except ray.exceptions.RayTaskError as exc:
            last = str(exc).strip().splitlines()[-1]
            self._error = SiteError(
                f"A node of the Ray cluster could not run the replay {self.task.id}: {last}. See "
                "that the node has room on its disk; or share the project's folder with it.",
                slug="ray-node",
            )
        except ray.exceptions.RayError:
            self._code = -1  # its worker or node was lost, or it was stopped
        except BaseException as exc:
            self._error = exc
        finally:
            ray.kill(self._place)

    def _travel(self) -> int:
        import ray

        sign = sign_of(self.task)
        assert sign is not None
        project, cargo = self.carrier.pack(self.task)
        look = self._ask("look", sign, list(cargo.outside), self.task.command[0])
        if look["seen"]:
            return int(self._ask("run", *self._words(), []))
        if look["lost"]:
            raise SiteError(
                f"The node {look['host']} of the Ray cluster has no {look['lost'][0]}, which the "
                f"run {cargo.run} needs and which lies outside the project {cargo.root}. What lies "
                "outside does not travel: bring it to the node, or share it.",
                slug="ray-node",
            )
        keeper = self.carrier.keep(project, look)
        try:
            return self._replay(project, cargo, look, keeper)
        except ray.exceptions.RayError:
            self._check(keeper, look)
            raise

    def _replay(self, project: Project, cargo: Cargo, look: dict[str, Any], keeper: Any) -> int:
        where = ([str(folder) for folder in cargo.folders], str(project.store))
        whose = (cargo.run, cargo.replay)
        needed: Sequence[Entry] = cargo.shared
        while True:
            cargo = self._lay_out(cargo, needed, look)
            code = int(self._ask("run", *self._words(), where[0]))
            landing = Landing(project, cargo, lambda pieces: self._ask("read", pieces), CHUNK)
            try:
                found = self._ask("found", *where, *whose)
                new = [oid for oid in found["objects"] if not landing.objects.has(oid)]
                values = self._ask("sized", [str(landing.objects.path(oid)) for oid in new])
                landing.fetch(found, values)
                report = landing.files.get(self.task.report)
                if needed is cargo.shared and cargo.spared and _differs(report):
                    # what it differs from was not there to be looked at
                    needed = (*cargo.shared, *cargo.spared)
                    self._ask("clear", *where, *whose)
                    continue
                self._check(keeper, look)
                with self._lock:
                    if self._stopped:
                        return -1
                    landing.publish(self.task.report)
            finally:
                landing.close()
            self._ask("clear", *where, *whose)
            return code

    def _lay_out(self, cargo: Cargo, needed: Sequence[Entry], look: dict[str, Any]) -> Cargo:
        everything = needed is not cargo.shared
        for left in reversed(range(TRIES)):
            try:
                with self.carrier.node(look["node"]):
                    told = [(one.path, one.size, one.link) for one in needed]
                    self._bring(needed[k] for k in self._ask("lacks", told))
                self._bring(cargo.own)
                return cargo
            except FileNotFoundError:
                if not left:
                    raise
                _, cargo = self.carrier.pack(self.task)
                needed = (*cargo.shared, *cargo.spared) if everything else cargo.shared
        raise AssertionError

    def _bring(self, entries: Iterable[Entry]) -> None:
        """Lay entries out on the node, so many bytes at a time."""
        batch: list[tuple[Any, ...]] = []
        size = 0
        for one in entries:
            about = (one.path, one.size, one.mode, one.mtime, one.link)
            for at in range(0, max(1, one.size), CHUNK):
                data = b"" if one.link is not None else self.carrier.pieces.get(one, at)
                batch.append((*about, at, data))
                size += min(CHUNK, one.size - at)
                if size >= CHUNK:
                    self._ask("take", batch)
                    batch, size = [], 0
        if batch:
            self._ask("take", batch)

    def _words(self) -> tuple[Any, ...]:
        task = self.task
        where = (str(task.folder), str(task.log))
        return (list(task.command), dict(task.environment), *where, bool(self.carrier.gpus))

    def _ask(self, method: str, *args: Any) -> Any:
        import ray

        return ray.get(getattr(self._place, method).remote(*args))

    def _check(self, keeper: Any, look: dict[str, Any]) -> None:
        """Take nothing for true that was done in a folder that may have been removed meanwhile."""
        import ray

        try:
            ray.get(keeper.there.remote())
        except ray.exceptions.RayError:
            self.carrier.forget(look)
            raise


def sign_of(task: Task) -> tuple[str, bytes] | None:
    """Return the file by which a node shows that it sees the project; None if it need not."""
    segment = segment_of(task)
    return None if segment is None else (str(segment), segment.read_bytes())


def _differs(report: Path | None) -> bool:
    """Say whether a replay found a difference, or something that it could not restore."""
    if report is None:
        return False
    try:
        said = msgspec.json.decode(report.read_bytes(), type=Report)
    except msgspec.DecodeError:
        return False
    return said.retry or said.difference is not None


def _read(entry: Entry, at: int) -> bytes:
    count = min(CHUNK, entry.size - at)
    with Path(entry.path).open("rb") as file:
        data = os.pread(file.fileno(), count, at)
    if len(data) < count:
        raise FileNotFoundError(entry.path)  # it was replaced by a shorter one
    return data
