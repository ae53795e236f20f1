"""Run segments as processes of this machine, each in its own place where that changes nothing."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
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
        if timeout is None:
            return self.process.wait()
        code = self.process.poll()
        if code is None and _ends_within(self.process.pid, timeout):
            code = self.process.wait()
        return code

    def stop(self) -> None:
        """Kill the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _ends_within(pid: int, seconds: float) -> bool:
    """Say whether a child ends within so many seconds, as soon as it does."""
    try:
        fd = os.pidfd_open(pid)
    except (AttributeError, OSError):  # not offered here
        time.sleep(seconds)
        return False
    try:
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        return bool(ended.poll(seconds * 1000))
    finally:
        os.close(fd)


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
