"""Processes that segments with the same imports are forked from, as the executor sees them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from rearview.execute.executor import Job, Task
from rearview.execute.places import cores_for
from rearview.model.segment import VARIABLE, Birth, Control, Death, Nursery, Ready

OFFERED = sys.platform == "linux" and hasattr(os, "pidfd_open")
"""Whether this system can tell of the end of processes that are not our own children."""
PATIENCE = 300.0
"""Seconds in which the imports must be through."""
_ANSWER = 30.0
"""Seconds in which it must answer."""
_BOUND = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which libraries settle where threads run when they are loaded, not later."""

Key = tuple[tuple[str, ...], tuple[str, ...], frozenset[tuple[str, str]]]


def key_of(task: Task, environment: dict[str, str]) -> Key | None:
    """Return what the segments of one nursery have in common; None if this one shares nothing."""
    if task.imports is None or not OFFERED or any(name in environment for name in _BOUND):
        return None
    search = environment.get("PYTHONPATH")
    if search and not all(map(os.path.isabs, search.split(os.pathsep))):
        return None  # modules are looked for in its folder, which is its own
    rest = {name: value for name, value in environment.items() if name != VARIABLE}
    return task.command, task.imports, frozenset(rest.items())


class Gone(Exception):  # noqa: N818 - it says what has happened
    """The nursery does nothing for us any more."""


class Silent(Gone):
    """It was asked for a segment and did not say whether there is one."""


@dataclass
class Parent:
    """One process that segments are forked from."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    begun: float = field(default_factory=time.monotonic)
    ready: Ready | None = None
    ended: bool = False
    children: int = 0
    """How many are under way."""

    @classmethod
    def start(cls, task: Task, environment: dict[str, str]) -> Parent:
        """Start one for segments like `task`; it imports while we go on."""
        control = msgspec.json.decode(environment[VARIABLE], type=Control)
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            told = Control(
                root=control.root,
                target="",
                lent=control.lent,
                nursery=Nursery(its.fileno(), task.imports or ()),
            )
            process = subprocess.Popen(
                task.command,
                cwd="/",
                env={**environment, VARIABLE: msgspec.json.encode(told).decode()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(its.fileno(),),
            )
        ours.settimeout(_ANSWER)
        return cls(process, ours)

    def look(self, seconds: float) -> bool:
        """Say whether it can be asked, after at most so many seconds; raises Gone."""
        if self.ended:
            raise Gone
        if self.ready is None:
            heard = select.poll()
            heard.register(self.channel, select.POLLIN)
            if heard.poll(seconds * 1000):
                self.ready = msgspec.json.decode(self._heard(), type=Ready)
            elif time.monotonic() - self.begun > PATIENCE:
                self.close()
                raise Gone
        return self.ready is not None

    def bear(self, task: Task, environment: dict[str, str], slot: int, waited: float) -> int:
        """Fork a child that becomes a segment; return its number."""
        born = Birth(
            environment=environment,
            folder=str(task.folder),
            log=str(task.log),
            beside=str(task.beside or task.folder),
            cores=tuple(sorted(cores_for(task, slot))),
            waited=waited,
        )
        try:
            self._send(born)
        except (OSError, UnicodeError):  # a variable may be no text at all
            self.close()
            raise Gone from None
        try:
            pid = int(self._heard())
        except Gone:
            raise Silent from None
        self.children += 1
        return pid

    def reap(self, pid: int) -> int | None:
        """Return the exit code of a child that has ended; None if nobody knows any more."""
        self.children -= 1
        try:
            self._send(Death(pid))
            return int(self._heard())
        except (OSError, Gone):
            return None

    def _send(self, request: Birth | Death) -> None:
        if self.ended:
            raise Gone
        self.channel.sendall(msgspec.json.encode(request))

    def _heard(self) -> bytes:
        try:
            data = self.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.close()
            raise Gone
        return data

    def close(self) -> None:
        """End it; what was forked from it goes on."""
        self.ended = True
        self.channel.close()
        self.process.kill()
        self.process.wait()


@dataclass
class SharedJob:
    """A segment that is forked from a nursery, as soon as that is ready."""

    task: Task
    nursery: Parent
    environment: dict[str, str]
    slot: int
    fresh: Callable[[], Job]
    """Starts it the ordinary way, should the nursery be of no use."""
    begun: float = field(default_factory=time.monotonic)
    pid: int = 0
    handle: int = -1
    """By which the system tells of its end, and of no other process of that number."""
    plain: Job | None = None
    code: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it still runs after `timeout` seconds."""
        if timeout is None:
            while (code := self.wait(1.0)) is None:
                pass
            return code
        if self.code is None and self.plain is None and not self.pid:
            self._begin(timeout)
            timeout = 0.0
        if self.plain is not None:
            self.code = self.plain.wait(timeout)
        elif self.pid and self.code is None and _is_over(self.handle, timeout):
            self._end()
        return self.code

    def stop(self) -> None:
        """Kill the process and everything it started."""
        if self.plain is not None:
            self.plain.stop()
        elif self.pid and self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            _is_over(self.handle, None)
            self._end()
        elif self.code is None:
            self.code = -signal.SIGKILL  # it had not begun

    def _begin(self, seconds: float) -> None:
        """Have it forked, if the nursery is ready within so many seconds."""
        try:
            if not self.nursery.look(seconds):
                return
            waited = time.monotonic() - self.begun
            self.pid = self.nursery.bear(self.task, self.environment, self.slot, waited)
            self.handle = os.pidfd_open(self.pid)
        except Silent:
            # It may be running: whoever does its work must not write under the same name.
            self.code = -signal.SIGKILL
        except Gone:
            self.plain = self.fresh()
        except ProcessLookupError:
            self.code = -signal.SIGKILL  # the nursery died, and so did it

    def _end(self) -> None:
        """Take in how it ended; if its nursery is gone, what it reported has to say."""
        code = self.nursery.reap(self.pid)
        self.code = -signal.SIGKILL if code is None else code
        os.close(self.handle)


def _is_over(handle: int, seconds: float | None) -> bool:
    """Say whether a process ends within so many seconds, as soon as it does."""
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    return bool(ended.poll(None if seconds is None else seconds * 1000))
