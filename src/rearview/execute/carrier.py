"""What all segments of one backfill share that travel: what was put, and where room was made."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rearview.errors import SiteError
from rearview.execute import aboard, keeper
from rearview.execute.cargo import Cargo, Entry, home_of, pack, segment_of
from rearview.execute.executor import Task
from rearview.store.checkpoints import Checkpoints
from rearview.store.project import Project

CHUNK = 64 << 20
"""Bytes that travel at once."""
SMALL = 1 << 20
"""Files below this travel together, without a place of their own in Ray's store."""
KEPT = 16 * CHUNK
"""Bytes that stay in Ray's store for other nodes; older ones are put again when asked for."""


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

        for module in (aboard, keeper):
            ray.cloudpickle.register_pickle_by_value(module)
        self.gpus = gpus
        self.away = False
        """A node was met that does not see the project."""
        self.pieces = Pieces()
        self.lock = threading.Lock()
        self._nodes: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
        self._keepers: dict[str, Any] = {}
        self._stores: dict[Path, Checkpoints] = {}
        self._aboard = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=0)(aboard.Aboard)
        self._keeper = ray.remote(num_cpus=0, max_restarts=0)(keeper.Keeper)

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
                one = self._keeper.options(scheduling_strategy=there).remote()
                refusal = ray.get(one.begin.remote(str(project.root), home_of(project)))
                if refusal is not None:
                    ray.kill(one)
                    raise SiteError(
                        f"The node {look['host']} of the Ray cluster does not see {project.root}, "
                        f"and what a replay needs cannot be laid out there: {refusal}. Make that "
                        "path free and writable on the node, or share the folder with it.",
                        slug="ray-node",
                    )
                self._keepers[node] = one
            return self._keepers[node]

    def forget(self, look: dict[str, Any], lost: Any) -> None:
        """Let room be made anew on a node whose keeper was lost."""
        with self.node(look["node"]):
            if self._keepers.get(look["node"]) is lost:
                del self._keepers[look["node"]]

    def close(self) -> None:
        """Remove what was laid out on all nodes."""
        import ray

        for one in self._keepers.values():
            # one that went with its node was watched, and what is left is removed there
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                ray.get(one.end.remote(), timeout=60)
            ray.kill(one)
        self._keepers.clear()


def _read(entry: Entry, at: int) -> bytes:
    count = min(CHUNK, entry.size - at)
    with Path(entry.path).open("rb") as file:
        data = os.pread(file.fileno(), count, at)
    if len(data) < count:
        raise FileNotFoundError(entry.path)  # it was replaced by a shorter one
    return data
