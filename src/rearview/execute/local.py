"""Run segments as processes of this machine, each pinned to its share of the cores."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass

from rearview.execute.executor import Task


@dataclass
class LocalJob:
    """A process of this machine."""

    task: Task
    process: subprocess.Popen[bytes]

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it still runs after `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Kill the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Local:
    """Processes of this machine."""

    def __init__(self, slots: int = 1) -> None:
        self.slots = max(1, slots)
        self._jobs: list[LocalJob] = []

    def resize(self, slots: int) -> None:
        """Use that many slots from now on."""
        self.slots = max(1, slots)

    def start(self, task: Task, slot: int) -> LocalJob:
        """Start a task as a process of its own group, so that it can be stopped whole."""
        del slot  # every process may use the cores it used when it was recorded
        with task.log.open("wb") as log:
            process = subprocess.Popen(
                task.command,
                cwd=task.folder,
                env=task.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        job = LocalJob(task, process)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        """Stop what still runs."""
        for job in self._jobs:
            if job.process.poll() is None:
                job.stop()
