"""The executor that runs segments as processes of this machine.

Each process runs on the cores and accelerators of its slot (`cores_and_accelerators`). Segments whose programs begin
with the same imports are forked from a *fork server*, a process that has executed these imports
(`runtime/replay/fork_server.py`). A `ForkServerClient` starts a fork server and sends requests to it. Segments that
also share the statements after the imports are forked from a *set-up process*, which has run these statements
(`runtime/replay/setup_process.py`) and is itself forked from the fork server; its client is a `SetupServerClient`.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

import msgspec

from rearview.execute.cores_and_accelerators import cores_for, environment_of, pin
from rearview.execute.executor import Job, SetupStage, Task
from rearview.model.process_messages import (
    UNLIKE,
    VARIABLE,
    Control,
    ForkServerReady,
    ForkServerStart,
    ReapRequest,
    SpawnRequest,
)
from rearview.store.create_files import open_file

MAX_FORK_SERVERS = 4
"""Most fork servers that run at the same time."""
MAX_SETUPS = 8
"""Most set-up processes that run at the same time."""
MAX_PER_STAGE = 3
"""Most set-up processes that run the same statements. One is not enough if the runs found different files there."""

FORK_SERVER_SUPPORTED = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""Whether fork servers can be used: this system must report the end of processes that are not children of this one."""
_IMPORT_TIMEOUT = 300.0
"""Seconds within which a fork server must have finished its imports."""
_ANSWER_TIMEOUT = 30.0
"""Seconds within which a fork server must answer a request."""
_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables by which libraries bind threads to cores when they are loaded, so that tasks with one of these
variables cannot be forked after the imports and pinned to other cores.
"""

ForkServerKey = tuple[tuple[str, ...], tuple[str, ...], frozenset[tuple[str, str]]]
"""(command, import statements, environment variables); tasks in which all three are equal can share a fork server."""


@dataclass
class LocalJob:
    """A task that runs as a process of this machine."""

    task: Task
    process: subprocess.Popen[bytes]

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for at most `timeout` seconds; return the exit code of the task, or None if the task still runs."""
        if timeout is None:
            return self.process.wait()
        code = self.process.poll()
        if code is None and _ends_within(self.process.pid, timeout):
            code = self.process.wait()
        return code

    def stop(self) -> None:
        """Kill the process and all processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _ends_within(pid: int, seconds: float) -> bool:
    """Wait until the child process `pid` ends, for at most `seconds`; return True if it has surely ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):  # only Linux can wait for the end of a process with a timeout
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
        self._unusable: dict[str, list[ForkServerClient]] = {}
        """Id of a task -> set-up processes from which the task could not continue."""
        self.unshared: dict[str, tuple[str, bool]] = {}
        """Key of a `SetupStage` -> (why it was not shared to its end, whether its first statements can be shared)."""

    def resize(self, slots: int) -> None:
        """Change the number of slots; running tasks continue."""
        self.slots = max(1, slots)

    def start(self, task: Task, slot: int) -> Job:
        """Start `task` on the cores and accelerators of `slot`, forked from a fork server if possible.

        The process leads a new process group, so that `stop` can kill all its child processes.
        """
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
        """Start `task` as a new process, without a fork server."""
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
        """Return the fork server for `task`, started if needed, or None if the task needs a new process."""
        key = fork_server_key(task, environment)
        if key is None:
            return None
        client = self._fork_servers.pop(key, None)
        if client is None:
            alive = [item for item in self._fork_servers.items() if not item[1].closed]
            idle_keys = [alive_key for alive_key, server in alive if not server.children]
            if len(alive) >= MAX_FORK_SERVERS:
                if not idle_keys:
                    return None
                self._fork_servers.pop(idle_keys[0]).close()
            try:
                client = ForkServerClient.start(task, environment)
            except OSError:
                return None
        # the last item is the most recently used fork server; the first one is closed first
        self._fork_servers[key] = client
        return None if client.closed else client

    def _setup_server(
        self,
        task: Task,
        server: ForkServerClient,
        environment: dict[str, str],
        unusable: Collection[ForkServerClient] = (),
    ) -> ForkServerClient:
        """Return the process from which to fork `task`: the set-up process that runs most of its statements.

        The process is started if needed. Return the fork server `server` if no stage of the set-up can be shared.
        `unusable` are set-up processes from which the task could not continue.
        """
        base = fork_server_key(task, environment)
        if base is None or task.shared_setup is None or environment is not task.environment:
            return server  # the environment names the accelerators of the slot; set-up processes have no slot
        for stage in task.stages:
            key = base, stage.key
            of_stage = [client for client_key, client in self._setups if client_key == key]
            usable = [
                client
                for client in of_stage
                if not client.closed and client not in unusable and client.parent is server
            ]
            if usable:
                server = usable[0]
                continue
            if any(client.closed for client in of_stage):
                break  # this stage could not be shared before, so neither can this one nor later ones
            if len(of_stage) >= MAX_PER_STAGE or not self._make_room():
                break
            setup = SetupServerClient(parent=server, stage=stage, task=task.shared_setup())
            self._setups.append((key, setup))
            server = setup
        return server

    def _make_room(self) -> bool:
        """Return True if another set-up process may be started; if there are too many, try to end an idle one first."""
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
            self._record_unshared()
            idle[0].close()
            self._setups = [each for each in self._setups if each[1] is not idle[0]]
        return bool(idle)

    def _next_server(self, task: Task, server: ForkServerClient) -> ForkServerClient:
        """Return another set-up process or fork server for `task`, which could not continue from `server`."""
        unusable = self._unusable.setdefault(task.id, [])
        unusable.append(server)
        while isinstance(server, SetupServerClient):
            server = server.parent
        return self._setup_server(task, server, task.environment, unusable)

    def _record_unshared(self) -> None:
        """Record in `unshared` which stages of set-ups could not be shared to their end."""
        for (_, key), client in self._setups:
            if client.left_out and client.ready is not None:
                self.unshared[key] = client.left_out, client.ready.usable

    def close(self) -> None:
        """Stop all running tasks and fork servers."""
        for job in self._jobs:
            if job.wait(0) is None:
                job.stop()
        self._record_unshared()
        for _, setup in reversed(self._setups):
            setup.close()
        self._setups.clear()
        for server in self._fork_servers.values():
            server.close()
        self._fork_servers.clear()


def fork_server_key(task: Task, environment: dict[str, str]) -> ForkServerKey | None:
    """Return a key that is equal for tasks that can share a fork server, or None if `task` cannot use a fork server.

    `environment` are the environment variables with which the task would start.
    """
    if (
        task.imports is None
        or not FORK_SERVER_SUPPORTED
        or any(name in environment for name in _BINDING_VARIABLES)
    ):
        return None
    search = environment.get("PYTHONPATH")
    if search and not all(map(os.path.isabs, search.split(os.pathsep))):
        return None  # a relative path of PYTHONPATH means another folder in each task
    shared = {name: value for name, value in environment.items() if name != VARIABLE}
    return task.command, task.imports, frozenset(shared.items())


class ForkServerGone(Exception):  # noqa: N818 - it says what has happened
    """Raised if a fork server has ended, or the connection to it is broken."""


class ForkServerSilent(ForkServerGone):
    """Raised if a fork server does not answer a request to fork, so that a process may or may not have started."""


@dataclass
class ForkServerClient:
    """The connection to a running fork server: its process, and the socket over which it receives requests."""

    process: subprocess.Popen[bytes] | None
    channel: socket.socket
    started: float = field(default_factory=time.monotonic)
    ready: ForkServerReady | None = None
    """The message of the fork server that it is ready to fork; None until the message has arrived."""
    closed: bool = False
    children: int = 0
    """Number of processes forked from the fork server that have not been reaped (`reap`)."""

    @classmethod
    def start(cls, task: Task, environment: dict[str, str]) -> ForkServerClient:
        """Start a fork server that executes the imports of `task`, and return its client without waiting for them."""
        control = msgspec.json.decode(environment[VARIABLE], type=Control)
        own_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            server_control = Control(
                root=control.root,
                target="",
                lent=control.lent,
                fork_server=ForkServerStart(server_end.fileno(), task.imports or ()),
            )
            process = subprocess.Popen(
                task.command,
                cwd="/",
                env={**environment, VARIABLE: msgspec.json.encode(server_control).decode()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(server_end.fileno(),),
            )
        own_end.settimeout(_ANSWER_TIMEOUT)
        return cls(process, own_end)

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return True if the fork server is ready.

        Raise ForkServerGone if it will never be ready.
        """
        if self.closed:
            raise ForkServerGone
        if self.ready is None:
            poll = select.poll()
            poll.register(self.channel, select.POLLIN)
            if poll.poll(seconds * 1000):
                self.ready = msgspec.json.decode(self._receive(), type=ForkServerReady)
            elif time.monotonic() - self.started > _IMPORT_TIMEOUT:
                self.close()
                raise ForkServerGone
        return self.ready is not None

    def spawn(self, task: Task, environment: dict[str, str], slot: int, waited: float) -> int:
        """Let the fork server fork a process that runs `task` on `slot`; return the process id.

        `waited` is how many seconds the task has waited for the fork server. Raise ForkServerGone if the fork server
        has ended, or ForkServerSilent if it does not answer.
        """
        return self._request(
            SpawnRequest(
                environment=environment,
                folder=str(task.folder),
                log=str(task.log),
                module_folder=str(task.module_folder or task.folder),
                cores=tuple(sorted(cores_for(task, slot))),
                waited=waited,
            )
        )

    def spawn_setup(self, task: Task, stage: SetupStage, channel: socket.socket) -> int:
        """Let the fork server fork a set-up process, which runs `stage`; return its process id.

        Afterwards the set-up process receives requests over `channel`.
        """
        return self._request(
            SpawnRequest(
                environment=task.environment,
                folder=str(task.folder),
                log=str(task.log),
                module_folder=str(task.module_folder or task.folder),
                setup=stage.start,
            ),
            channel,
        )

    def _request(self, request: SpawnRequest, passed: socket.socket | None = None) -> int:
        try:
            self._send(request, passed)
        except (OSError, UnicodeError):  # the value of an environment variable may be invalid text
            self.close()
            raise ForkServerGone from None
        try:
            pid = int(self._receive())
        except ForkServerGone:
            raise ForkServerSilent from None
        self.children += 1
        return pid

    def reap(self, pid: int) -> int | None:
        """Return the exit code of the ended process `pid`, or None if the fork server does not answer."""
        self.children -= 1
        try:
            self._send(ReapRequest(pid))
            return int(self._receive())
        except (OSError, ForkServerGone):
            return None

    def _send(
        self, request: SpawnRequest | ReapRequest, passed: socket.socket | None = None
    ) -> None:
        if self.closed:
            raise ForkServerGone
        data = msgspec.json.encode(request)
        if passed is None:
            self.channel.sendall(data)
        else:
            socket.send_fds(self.channel, [data], [passed.fileno()])

    def _receive(self) -> bytes:
        try:
            data = self.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.close()
            raise ForkServerGone
        return data

    def close(self) -> None:
        """Kill the fork server; the processes forked from it continue."""
        self.closed = True
        self.channel.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@dataclass
class SetupServerClient(ForkServerClient):
    """A set-up process, and the socket over which it receives requests.

    The process is forked from `parent`, a fork server or another set-up process, as soon as `parent` is ready. It then
    runs the statements of `stage`.
    """

    process: subprocess.Popen[bytes] | None = None
    channel: socket.socket = field(default_factory=socket.socket)
    """The socket for requests; it is connected when the process is forked."""
    parent: ForkServerClient = field(kw_only=True)
    stage: SetupStage = field(kw_only=True)
    task: Task = field(kw_only=True)
    """A task in whose folder the statements run, separate from the folders of the segments."""
    pid: int = 0
    """Process id, or 0 before the process is forked."""
    left_out: str = ""
    """Why the process did not run all statements of `stage`; empty if it did."""

    def wait_until_ready(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return True if the statements of `stage` have run.

        Raise ForkServerGone if they cannot be shared, or the process has ended.
        """
        if self.closed:
            raise ForkServerGone
        if not self.pid:
            if not self.parent.wait_until_ready(seconds):
                return False
            self._fork()
            seconds = 0.0
        if self.ready is None:
            poll = select.poll()
            poll.register(self.channel, select.POLLIN)
            if poll.poll(seconds * 1000):
                self.ready = msgspec.json.decode(self._receive(), type=ForkServerReady)
                self.left_out = self.ready.left_out
                if not self.ready.usable:
                    self.close()
                    raise ForkServerGone
        return self.ready is not None

    def _fork(self) -> None:
        """Fork the set-up process from `parent`, and connect the socket."""
        self.channel.close()
        self.channel, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(_ANSWER_TIMEOUT)
        with server_end:
            try:
                self.pid = self.parent.spawn_setup(self.task, self.stage, server_end)
            except ForkServerGone:
                self.close()
                raise ForkServerGone from None

    def close(self) -> None:
        """End the set-up process and remove its folder; the segments that were forked from it continue."""
        if self.closed:
            return
        self.closed = True
        self.channel.close()  # the set-up process waits for requests, and ends when the socket is closed
        if self.pid and self.ready is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)  # the set-up process leads a process group
        shutil.rmtree(self.task.report.parent, ignore_errors=True)


@dataclass
class ForkedJob:
    """A task whose process is forked from `server` as soon as the server is ready."""

    task: Task
    server: ForkServerClient
    environment: dict[str, str]
    slot: int
    start_fresh: Callable[[], Job]
    """Function that starts the task as a new process; it is called if the fork server cannot be used."""
    next_server: Callable[[Task, ForkServerClient], ForkServerClient] | None = None
    """Function (task, set-up process from which the task could not continue) -> server to use instead of it."""
    created: float = field(default_factory=time.monotonic)
    pid: int = 0
    """Process id, or 0 before the process is forked."""
    pidfd: int = -1
    """File descriptor that stands for the process (`os.pidfd_open`) and shows when it has ended."""
    fresh_job: Job | None = None
    """The job that runs the task as a new process if the fork server could not be used; else None."""
    code: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for at most `timeout` seconds; return the exit code of the task, or None if the task still runs."""
        if timeout is None:
            while (code := self.wait(1.0)) is None:
                pass
            return code
        if self.code is None and self.fresh_job is None and not self.pid:
            self._fork(timeout)
            timeout = 0.0
        if self.fresh_job is not None:
            self.code = self.fresh_job.wait(timeout)
        elif self.pid and self.code is None and _has_ended(self.pidfd, timeout):
            self._store_exit_code()
            self._try_next_server()
        return self.code

    def stop(self) -> None:
        """Kill the process and all processes that it has started."""
        if self.fresh_job is not None:
            self.fresh_job.stop()
        elif self.pid and self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            _has_ended(self.pidfd, None)
            self._store_exit_code()
        elif self.code is None:
            self.code = -signal.SIGKILL  # the process was never started

    def _try_next_server(self) -> None:
        """If the task could not continue from the shared set-up, let `wait` fork it from another server."""
        if self.code == UNLIKE and self.next_server and not self.task.report.exists():
            self.server = self.next_server(self.task, self.server)
            self.pid, self.code = 0, None

    def _fork(self, seconds: float) -> None:
        """Fork the process if the server is ready within `seconds`.

        If the server has ended, use the server from which it was forked or, if there is none, start a new process.
        """
        try:
            if not self.server.wait_until_ready(seconds):
                return
            waited = time.monotonic() - self.created
            self.pid = self.server.spawn(self.task, self.environment, self.slot, waited)
            self.pidfd = os.pidfd_open(self.pid)
        except ForkServerSilent:
            # the process may be running: report it as killed, so that the segment runs again with another replay id
            self.code = -signal.SIGKILL
        except ForkServerGone:
            if isinstance(self.server, SetupServerClient):
                self.server = self.server.parent
            else:
                self.fresh_job = self.start_fresh()
        except ProcessLookupError:
            self.code = -signal.SIGKILL  # the process has ended together with its fork server

    def _store_exit_code(self) -> None:
        """Store the exit code in `code`, or that of a killed process if the fork server cannot tell the code."""
        code = self.server.reap(self.pid)
        self.code = -signal.SIGKILL if code is None else code
        os.close(self.pidfd)


def _has_ended(pidfd: int, seconds: float | None) -> bool:
    """Wait until a process ends, for at most `seconds` (None: without limit); return True if it has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))
