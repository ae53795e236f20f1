"""Run segments as processes of this machine, each in its own place where that changes nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass

from rearview.execute.executor import Task
from rearview.execute.places import environment_of, pin


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
        with task.log.open("wb") as log:
            process = subprocess.Popen(
                task.command,
                cwd=task.folder,
                env=environment_of(task, slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        pin(process.pid, task, slot)
        job = LocalJob(task, process)
        self._jobs.append(job)
        return job

    def close(self) -> None:
        """Stop what still runs."""
        for job in self._jobs:
            if job.process.poll() is None:
                job.stop()
