"""The Ray executor: run segments on a cluster whose nodes may or may not see the project's folder.

`ray_node` is the code on the node, `ray_file_list` lists the files that a segment needs there, and
`ray_shipping` sends them and fetches the results.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from rearview.errors import SiteError
from rearview.execute import ray_node
from rearview.execute.executor import Job, Task
from rearview.execute.ray_file_list import known_file_of, segment_of
from rearview.execute.ray_shipping import Shipments, ShippedJob


@dataclass
class RayJob:
    """A task that runs somewhere in the cluster."""

    task: Task
    ref: Any
    shipments: Shipments
    shipped_job: ShippedJob | None = None
    """Runs the task instead, after its node turned out not to see the project."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it still runs after `timeout` seconds.

        The code is -1 if its node or worker was lost: the pool then starts the segment again.
        """
        import ray

        if self.shipped_job is not None:
            return self.shipped_job.wait(timeout)
        done, _ = ray.wait([self.ref], timeout=timeout)
        if not done:
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
        """Kill it at once: the process on the node dies with Ray's worker."""
        import ray

        if self.shipped_job is not None:
            self.shipped_job.stop()
        else:
            ray.cancel(self.ref, force=True)


class Ray:
    """The executor for the cluster that RAY_ADDRESS names, or for a new one on this machine.

    `gpus` is how many accelerators each segment gets; a fraction shares one. Ray itself retries nothing:
    a segment that runs again needs a new name, so that its records count once.
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
        """Raise if each segment is to get more accelerators than any node has: Ray would wait forever."""
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
        """How many segments can run at once; nodes may join and leave."""
        import ray

        resources = ray.cluster_resources()
        slots = int(resources.get("CPU", 1))
        if self._gpus:
            slots = min(slots, int(resources.get("GPU", 0.0) / self._gpus + 1e-9))
        return max(1, min(slots, self._slots or slots))

    def resize(self, slots: int) -> None:
        """Use that many slots from now on, if the cluster has them."""
        self._slots = max(1, slots)

    def start(self, task: Task, slot: int) -> Job:
        """Give a task to the cluster."""
        del slot  # Ray chooses the node
        if self._shipments.needed and segment_of(task) is not None:
            return ShippedJob(self._shipments, task)
        arguments = (list(task.command), dict(task.environment), str(task.folder), str(task.log))
        ref = self._run.remote(*arguments, bool(self._gpus), known_file_of(task))
        return RayJob(task, ref, self._shipments)

    def close(self) -> None:
        """Leave the cluster; shut it down if this object started it."""
        import ray

        self._shipments.close()
        if self._own:
            ray.shutdown()


def _join(slots: int | None) -> None:
    """Join the cluster that `RAY_ADDRESS` names or that runs on this machine; else start one."""
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
