"""Run segments on a Ray cluster whose nodes see the project's folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rearview.errors import SiteError
from rearview.execute.executor import Task


@dataclass
class RayJob:
    """A task somewhere in the cluster."""

    task: Task
    ref: Any

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it still runs after `timeout` seconds.

        A task whose node was lost is started again by Ray; one that cannot be says -1.
        """
        import ray

        done, _ = ray.wait([self.ref], timeout=timeout)
        if not done:
            return None
        try:
            return int(ray.get(self.ref))
        except ray.exceptions.RayError:
            return -1

    def stop(self) -> None:
        """End it, now."""
        import ray

        ray.cancel(self.ref, force=True)


class Ray:
    """The cluster that RAY_ADDRESS names, or one on this machine.

    `gpus` is the share of an accelerator that each segment gets.
    """

    def __init__(self, slots: int | None = None, *, gpus: float = 0.0, retries: int = 3) -> None:
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
            address = os.environ.get("RAY_ADDRESS")
            ray.init(
                address=address,
                num_cpus=None if address else slots,
                include_dashboard=False,
                log_to_driver=False,
            )
        self._slots = slots
        self._run = ray.remote(
            num_cpus=1, num_gpus=gpus, max_retries=retries, retry_exceptions=False
        )(_executor())

    @property
    def slots(self) -> int:
        """How many can run at once now: nodes may join and leave."""
        import ray

        cluster = int(ray.cluster_resources().get("CPU", 1))
        return max(1, min(cluster, self._slots or cluster))

    def resize(self, slots: int) -> None:
        """Use that many slots from now on, if the cluster has them."""
        self._slots = max(1, slots)

    def start(self, task: Task, slot: int) -> RayJob:
        """Hand a task to the cluster."""
        del slot  # Ray chooses the place
        return RayJob(
            task,
            self._run.remote(
                list(task.command), dict(task.environment), str(task.folder), str(task.log)
            ),
        )

    def close(self) -> None:
        """Leave the cluster; one that was started for us ends."""
        import ray

        if self._own:
            ray.shutdown()


def _executor() -> Callable[[list[str], dict[str, str], str, str], int]:
    """Return what runs a task on the node that Ray chose.

    It is made here, inside, so that it travels by value: the node needs Ray, not us.
    """

    def execute(command: list[str], environment: dict[str, str], folder: str, log: str) -> int:
        import os
        import subprocess

        # accelerators are the ones that Ray gave
        given = {key: os.environ[key] for key in ("CUDA_VISIBLE_DEVICES",) if key in os.environ}
        with open(log, "wb") as output:  # noqa: PTH123
            return subprocess.call(
                command,
                cwd=folder,
                env={**environment, **given},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    return execute
