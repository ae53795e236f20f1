"""Run segments on a Ray cluster, whether or not its nodes see the project's folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from rearview.errors import SiteError
from rearview.execute import ray_node
from rearview.execute.executor import Job, Task
from rearview.execute.ray_shipping import Carrier, Passage, segment_of, sign_of


@dataclass
class RayJob:
    """A task somewhere in the cluster."""

    task: Task
    ref: Any
    carrier: Carrier
    passage: Passage | None = None
    """How it travels, once a node was met that does not see the project."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it still runs after `timeout` seconds.

        One whose node or worker was lost says -1: whoever started it may start it elsewhere.
        """
        import ray

        if self.passage is not None:
            return self.passage.wait(timeout)
        done, _ = ray.wait([self.ref], timeout=timeout)
        if not done:
            return None
        try:
            code = ray.get(self.ref)
        except ray.exceptions.RayTaskError as exc:
            last = str(exc).strip().splitlines()[-1]
            raise SiteError(
                f"A node of the Ray cluster could not start the replay {self.task.id}: {last}. "
                f"Every node must have Python at {self.task.command[0]}, and the folder "
                f"{self.task.folder}; or leave out `--on ray`.",
                slug="ray-node",
            ) from exc
        except ray.exceptions.RayError:
            return -1
        if code is None:
            self.carrier.away = True
            self.passage = Passage(self.carrier, self.task)
            return None
        return int(code)

    def stop(self) -> None:
        """End it, now: the process on the node dies with Ray's worker there."""
        import ray

        if self.passage is not None:
            self.passage.stop()
        else:
            ray.cancel(self.ref, force=True)


class Ray:
    """The cluster that RAY_ADDRESS names, or one on this machine.

    `gpus` is the share of an accelerator that each segment gets. Ray itself starts nothing again:
    what runs anew needs a name of its own, so that its records count once.
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
        self._carrier = Carrier(gpus)
        self._check()
        self._run = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(ray_node.execute)

    def _check(self) -> None:
        """Refuse a share of accelerators that no node can give: Ray would wait for one forever."""
        import ray

        most = max((node["Resources"].get("GPU", 0.0) for node in ray.nodes()), default=0.0)
        if self._gpus > most:
            self.close()
            raise SiteError(
                f"Each segment is to get {self._gpus:g} accelerators, but no node of the Ray "
                f"cluster has more than {most:g}. Ask for fewer with `--gpus`.",
                slug="ray-gpus",
            )

    @property
    def slots(self) -> int:
        """How many can run at once now: nodes may join and leave."""
        import ray

        there = ray.cluster_resources()
        room = int(there.get("CPU", 1))
        if self._gpus:
            room = min(room, int(there.get("GPU", 0.0) / self._gpus + 1e-9))
        return max(1, min(room, self._slots or room))

    def resize(self, slots: int) -> None:
        """Use that many slots from now on, if the cluster has them."""
        self._slots = max(1, slots)

    def start(self, task: Task, slot: int) -> Job:
        """Hand a task to the cluster."""
        del slot  # Ray chooses the place
        if self._carrier.away and segment_of(task) is not None:
            return Passage(self._carrier, task)
        words = (list(task.command), dict(task.environment), str(task.folder), str(task.log))
        ref = self._run.remote(*words, bool(self._gpus), sign_of(task))
        return RayJob(task, ref, self._carrier)

    def close(self) -> None:
        """Leave the cluster; one that was started for us ends."""
        import ray

        self._carrier.close()
        if self._own:
            ray.shutdown()


def _join(slots: int | None) -> None:
    """Join the cluster that `RAY_ADDRESS` names or that runs here; else start one of our own."""
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
    cores = max(slots or 0, os.cpu_count() or 1)  # more workers may be asked for later
    ray.init(address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False)
