"""Run segments as processes of this machine, each in its own place where that changes nothing."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from functools import partial

from rearview.execute.executor import Job, Task
from rearview.execute.nursery import Key, Parent, SharedJob, key_of
from rearview.execute.places import environment_of, pin
from rearview.store.private import open_file

MOST = 4
"""Processes to fork segments from that are kept at once."""


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
        self._jobs: list[Job] = []
        self._nurseries: dict[Key, Parent] = {}

    def resize(self, slots: int) -> None:
        """Use that many slots from now on."""
        self.slots = max(1, slots)

    def start(self, task: Task, slot: int) -> Job:
        """Start a task as a process of its own group, so that it can be stopped whole."""
        environment = environment_of(task, slot)
        nursery = self._nursery(task, environment)
        job: Job
        if nursery is None:
            job = self._fresh(task, slot)
        else:
            fresh = partial(self._fresh, task, slot)
            job = SharedJob(task, nursery, environment, slot, fresh)
        self._jobs.append(job)
        return job

    def _fresh(self, task: Task, slot: int) -> LocalJob:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(open_file(task.log, flags), "wb") as log:  # noqa: PTH123
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
        return LocalJob(task, process)

    def _nursery(self, task: Task, environment: dict[str, str]) -> Parent | None:
        """Return the process that a task can be forked from, if there is to be one."""
        key = key_of(task, environment)
        if key is None:
            return None
        found = self._nurseries.pop(key, None)
        if found is None:
            alive = [(k, one) for k, one in self._nurseries.items() if not one.ended]
            idle = [(k, one) for k, one in alive if not one.children]
            if len(alive) >= MOST:
                if not idle:
                    return None
                self._nurseries.pop(idle[0][0]).close()
            try:
                found = Parent.start(task, environment)
            except OSError:
                return None
        self._nurseries[key] = found  # the last one used is the last one to be given up
        return None if found.ended else found

    def close(self) -> None:
        """Stop what still runs."""
        for job in self._jobs:
            if job.wait(0) is None:
                job.stop()
        for nursery in self._nurseries.values():
            nursery.close()
        self._nurseries.clear()
