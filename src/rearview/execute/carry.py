"""Bring segments to nodes of a Ray cluster that do not see the project's folder, and back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rearview.errors import SiteError
from rearview.execute.cargo import Cargo, Entry, segment_of
from rearview.execute.carrier import CHUNK, Carrier
from rearview.execute.executor import Task
from rearview.execute.landing import Landing
from rearview.model import Report
from rearview.store.project import Project

TRIES = 3
"""How often a segment is packed anew whose files were replaced meanwhile: records get sealed."""


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
            if not self._stopped:
                ray.kill(self._place)

    def _travel(self) -> int:
        import ray

        sign = sign_of(self.task)
        assert sign is not None
        project, cargo = self.carrier.pack(self.task)
        outside = [self.task.command[0], *cargo.outside]
        if cargo.root not in self.task.folder.parents:
            outside.append(str(self.task.folder))
        look = self._ask("look", sign, outside)
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
        whole = False
        while True:
            cargo = self._lay_out(cargo, look, whole=whole)
            code = int(self._ask("run", *self._words(), where[0]))
            landing = Landing(project, cargo, lambda pieces: self._ask("read", pieces), CHUNK)
            try:
                found = self._ask("found", *where, *whose)
                new = [oid for oid in found["objects"] if not landing.objects.has(oid)]
                values = self._ask("sized", [str(landing.objects.path(oid)) for oid in new])
                landing.fetch(found, values)
                if not whole and cargo.spared and _differs(landing.files.get(self.task.report)):
                    whole = True  # what it differs from was not there to be looked at
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

    def _lay_out(self, cargo: Cargo, look: dict[str, Any], *, whole: bool) -> Cargo:
        """Lay out what is needed, `whole` with what was spared; return what that was."""
        for left in reversed(range(TRIES)):
            try:
                needed = (*cargo.shared, *cargo.spared) if whole else cargo.shared
                self._fill(cargo, needed, look)
                break
            except FileNotFoundError:
                if not left:
                    raise
                _, cargo = self.carrier.pack(self.task)
        return cargo

    def _fill(self, cargo: Cargo, needed: Sequence[Entry], look: dict[str, Any]) -> None:
        with self.carrier.node(look["node"]):
            told = [(one.path, one.size, one.link) for one in needed]
            self._bring(needed[k] for k in self._ask("lacks", told))
        self._bring(cargo.own)

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

        if self._stopped:  # the cluster may have been left, and is not to be joined again
            raise ray.exceptions.RayError
        return ray.get(getattr(self._place, method).remote(*args))

    def _check(self, keeper: Any, look: dict[str, Any]) -> None:
        """Take nothing for true that was done in a folder that may have been removed meanwhile."""
        import ray

        try:
            ray.get(keeper.there.remote())
        except ray.exceptions.RayError:
            self.carrier.forget(look, keeper)
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
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return said.retry or said.difference is not None
