"""The executor that runs segments as processes of this machine.

Each process runs on the cores and accelerators of its slot (`cores_and_accelerators`). Segments that share their
leading imports, or more of their set-up, are forked from one process (`fork_server_client`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from rearview.execute.cores_and_accelerators import environment_of, pin
from rearview.execute.executor import Job, Task
from rearview.execute.fork_server_client import (
    ForkedJob,
    ForkServerClient,
    ForkServerKey,
    SetupServerClient,
    fork_server_key,
)
from rearview.store.files import open_file

MAX_FORK_SERVERS = 4
"""Fork servers that are kept at the same time."""
MAX_SETUPS = 8
"""Processes that are kept at the same time after they have run a set-up."""
MAX_ALIKE = 3
"""Set-up processes for one part of a set-up: the files that different runs found may differ."""


@dataclass
class LocalJob:
    """A task that runs as a process of this machine."""

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
    """Wait until a child process ends, for at most `seconds`; return True if it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):  # the system has no pidfds
        time.sleep(seconds)
        return False
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(pidfd)


class Local:
    """The executor that starts processes on this machine."""

    def __init__(self, slots: int = 1) -> None:
        self.slots = max(1, slots)
        self._jobs: list[Job] = []
        self._fork_servers: dict[ForkServerKey, ForkServerClient] = {}
        self._setups: list[tuple[tuple[ForkServerKey, str], SetupServerClient]] = []
        self._unlike: dict[str, list[ForkServerClient]] = {}
        """By task: set-up processes from which it cannot continue."""
        self.unshared: dict[str, tuple[str, bool]] = {}
        """By part of a set-up: why it was not shared to its end, and whether some of it was."""

    def resize(self, slots: int) -> None:
        """Use that many slots from now on."""
        self.slots = max(1, slots)

    def start(self, task: Task, slot: int) -> Job:
        """Start a task as a process group of its own, so that `stop` reaches all its processes."""
        environment = environment_of(task, slot)
        server = self._fork_server(task, environment)
        job: Job
        if server is None:
            job = self._start_fresh(task, slot)
        else:
            start_fresh = partial(self._start_fresh, task, slot)
            with_setup = self._setup_server(task, server, environment)
            job = ForkedJob(task, with_setup, environment, slot, start_fresh, self._next_server)
        self._jobs.append(job)
        return job

    def _start_fresh(self, task: Task, slot: int) -> LocalJob:
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

    def _fork_server(self, task: Task, environment: dict[str, str]) -> ForkServerClient | None:
        """Return the fork server for a task, started if needed; None if the task starts on its own."""
        key = fork_server_key(task, environment)
        if key is None:
            return None
        client = self._fork_servers.pop(key, None)
        if client is None:
            alive = [
                (other_key, other)
                for other_key, other in self._fork_servers.items()
                if not other.closed
            ]
            idle = [other_key for other_key, other in alive if not other.children]
            if len(alive) >= MAX_FORK_SERVERS:
                if not idle:
                    return None
                self._fork_servers.pop(idle[0]).close()
            try:
                client = ForkServerClient.start(task, environment)
            except OSError:
                return None
        # moved to the end: the least recently used is closed first
        self._fork_servers[key] = client
        return None if client.closed else client

    def _setup_server(
        self,
        task: Task,
        server: ForkServerClient,
        environment: dict[str, str],
        unlike: Collection[ForkServerClient] = (),
    ) -> ForkServerClient:
        """Return the process that has run as much as possible of the set-up of a task, or will.

        `unlike` are set-up processes from which the task cannot continue.
        """
        base = fork_server_key(task, environment)
        if base is None or task.shared_setup is None or environment is not task.environment:
            return server  # with accelerators of its own, it has an environment of its own
        for stage in task.stages:
            key = base, stage.key
            alike = [client for other, client in self._setups if other == key]
            usable = [
                client
                for client in alike
                if not client.closed and client not in unlike and client.parent is server
            ]
            if usable:
                server = usable[0]
                continue
            if any(client.closed for client in alike):
                break  # nothing can be shared from here on
            if len(alike) >= MAX_ALIKE or not self._make_room():
                break
            setup = SetupServerClient(parent=server, stage=stage, task=task.shared_setup())
            self._setups.append((key, setup))
            server = setup
        return server

    def _make_room(self) -> bool:
        """Return True if another set-up process may be started; end one that is idle if need be."""
        alive = [client for _, client in self._setups if not client.closed]
        if len(alive) < MAX_SETUPS:
            return True
        parents = {id(client.parent) for client in alive}
        idle = [
            client
            for client in alive
            if client.ready and not client.children and id(client) not in parents
        ]
        if idle:
            self._note_unshared()
            idle[0].close()
            self._setups = [each for each in self._setups if each[1] is not idle[0]]
        return bool(idle)

    def _next_server(self, task: Task, server: ForkServerClient) -> ForkServerClient:
        """Return the fork server for a task that cannot continue from the set-up process `server`."""
        unlike = self._unlike.setdefault(task.id, [])
        unlike.append(server)
        while isinstance(server, SetupServerClient):
            server = server.parent
        return self._setup_server(task, server, task.environment, unlike)

    def _note_unshared(self) -> None:
        for (_, key), client in self._setups:
            if client.left_out and client.ready is not None:
                self.unshared[key] = client.left_out, client.ready.usable

    def close(self) -> None:
        """Stop all running tasks and fork servers."""
        for job in self._jobs:
            if job.wait(0) is None:
                job.stop()
        self._note_unshared()
        for _, setup in reversed(self._setups):
            setup.close()
        self._setups.clear()
        for server in self._fork_servers.values():
            server.close()
        self._fork_servers.clear()
