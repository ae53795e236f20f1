"""Run segments as processes of this machine, on cores and accelerators of their own.

A replay must compute with as many threads as the run did, because other counts give other bits, and
libraries count the cores that they may use. So a process is pinned to cores only if the run set its
number of threads and loaded no library that counts cores all the same.

Segments with the same leading imports are forked from one process that has imported them (`ForkServer`
in `runtime`); this module starts that process and talks to it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rearview.execute.executor import Job, Task
from rearview.model.plan import (
    VARIABLE,
    Control,
    ForkServerReady,
    ForkServerStart,
    ReapRequest,
    SpawnRequest,
)
from rearview.store.files import open_file
from rearview.store.machine import gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
COUNTERS = frozenset(
    {"jax", "jaxlib", "mxnet", "numba", "onnxruntime", "paddle", "polars", "tensorflow"}
)
"""Libraries whose pools have as many threads as the process may use cores, whatever OMP is told."""
_CPUS = Path("/sys/devices/system/cpu")


def threads_of(told: Mapping[str, str], loaded: Collection[str] = ()) -> int | None:
    """Return how many threads a run was told to use; None if not all libraries follow that.

    `loaded` names the libraries that the run had loaded.

    >>> threads_of({"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}, ["torch"])
    2
    >>> threads_of({"MKL_NUM_THREADS": "2"}), threads_of({"OMP_NUM_THREADS": "2,1"})
    (None, None)
    >>> threads_of({"OMP_NUM_THREADS": "1"}, ["jax", "numpy"]) is None
    True
    """
    counts = set(told.values())
    if "OMP_NUM_THREADS" not in told or len(counts) > 1 or not COUNTERS.isdisjoint(loaded):
        return None
    text = counts.pop()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def seen_of(hardware: Mapping[str, Any]) -> int:
    """Return how many accelerators a run saw.

    >>> seen_of({"gpus": ["A", "A"], "visible": None}), seen_of({"gpus": ["A"], "visible": ""})
    (2, 0)
    """
    visible = hardware.get("visible")
    if visible is None:
        return len(hardware.get("gpus") or ())
    return len([one for one in str(visible).split(",") if one.strip()])


def share_of_cores(slot: int, threads: int, cores: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the processors for a slot: `threads` whole cores, the slot's own as long as they last.

    `cores` lists the processors of each core. Empty: there are too few of them to pin anything.

    >>> cores = [[0, 4], [1, 5], [2, 6], [3, 7]]
    >>> sorted(share_of_cores(1, 2, cores)), sorted(share_of_cores(2, 2, cores))
    ([2, 3, 6, 7], [0, 1, 4, 5])
    >>> share_of_cores(0, 8, cores)
    frozenset()
    """
    groups = len(cores) // threads
    if groups == 0:
        return frozenset()
    first = slot % groups * threads
    return frozenset(one for core in cores[first : first + threads] for one in core)


def share_of_accelerators(slot: int, seen: int, there: Sequence[str]) -> str | None:
    """Return what CUDA_VISIBLE_DEVICES is for a slot: as many as the run saw; None: as it is.

    >>> share_of_accelerators(1, 1, "0123"), share_of_accelerators(1, 2, "0123")
    ('1', '2,3')
    >>> share_of_accelerators(1, 2, "01") is None
    True
    """
    groups = len(there) // seen if seen else 0
    if groups < 2:
        return None
    first = slot % groups * seen
    return ",".join(there[first : first + seen])


def cores() -> list[list[int]]:
    """Return the cores that we may use, each as the processors it shows itself as."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    mine = os.sched_getaffinity(0)
    found: dict[str, list[int]] = {}
    for one in sorted(mine):
        try:
            file = _CPUS / f"cpu{one}" / "topology" / "thread_siblings_list"
            key = file.read_text("ascii").strip()
        except OSError:
            key = str(one)
        found.setdefault(key, []).append(one)
    return list(found.values())


def accelerators(environment: Mapping[str, str]) -> list[str]:
    """Return the accelerators that can be shared out: those that are visible, if all are alike."""
    models = gpus()
    if len(set(models)) > 1:
        return []
    visible = environment.get(VISIBLE)
    if visible is None:
        return [str(k) for k in range(len(models))]
    return [one.strip() for one in visible.split(",") if one.strip()]


def environment_of(task: Task, slot: int) -> dict[str, str]:
    """Return the environment of a task on a slot: with the slot's accelerators, if it has any."""
    if not task.accelerators:
        return task.environment
    there = accelerators(task.environment)
    mine = share_of_accelerators(slot, task.accelerators, there)
    return task.environment if mine is None else {**task.environment, VISIBLE: mine}


def cores_for(task: Task, slot: int) -> frozenset[int]:
    """Return the processors that a task on a slot is pinned to; empty: it is not."""
    if task.threads is None or not hasattr(os, "sched_setaffinity"):
        return frozenset()
    return share_of_cores(slot, task.threads, cores())


def pin(pid: int, task: Task, slot: int) -> frozenset[int]:
    """Pin a process that has just been started to the cores of its slot; returns them.

    Its threads do not exist yet, and inherit it. One that is gone already is left alone.
    """
    mine = cores_for(task, slot)
    if mine:
        try:
            os.sched_setaffinity(pid, mine)
        except OSError:
            return frozenset()
    return mine


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


class ForkServerGone(Exception):  # noqa: N818 - it says what has happened
    """The nursery does nothing for us any more."""


class Silent(ForkServerGone):
    """It was asked for a segment and did not say whether there is one."""


@dataclass
class Parent:
    """One process that segments are forked from."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    begun: float = field(default_factory=time.monotonic)
    ready: ForkServerReady | None = None
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
                fork_server=ForkServerStart(its.fileno(), task.imports or ()),
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
        """Return True if it can be asked, after at most so many seconds; raises Gone."""
        if self.ended:
            raise ForkServerGone
        if self.ready is None:
            heard = select.poll()
            heard.register(self.channel, select.POLLIN)
            if heard.poll(seconds * 1000):
                self.ready = msgspec.json.decode(self._heard(), type=ForkServerReady)
            elif time.monotonic() - self.begun > PATIENCE:
                self.close()
                raise ForkServerGone
        return self.ready is not None

    def bear(self, task: Task, environment: dict[str, str], slot: int, waited: float) -> int:
        """Fork a child that becomes a segment; return its number."""
        born = SpawnRequest(
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
            raise ForkServerGone from None
        try:
            pid = int(self._heard())
        except ForkServerGone:
            raise Silent from None
        self.children += 1
        return pid

    def reap(self, pid: int) -> int | None:
        """Return the exit code of a child that has ended; None if nobody knows any more."""
        self.children -= 1
        try:
            self._send(ReapRequest(pid))
            return int(self._heard())
        except (OSError, ForkServerGone):
            return None

    def _send(self, request: SpawnRequest | ReapRequest) -> None:
        if self.ended:
            raise ForkServerGone
        self.channel.sendall(msgspec.json.encode(request))

    def _heard(self) -> bytes:
        try:
            data = self.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.close()
            raise ForkServerGone
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
        except ForkServerGone:
            self.plain = self.fresh()
        except ProcessLookupError:
            self.code = -signal.SIGKILL  # the nursery died, and so did it

    def _end(self) -> None:
        """Take in how it ended; if its nursery is gone, what it reported has to say."""
        code = self.nursery.reap(self.pid)
        self.code = -signal.SIGKILL if code is None else code
        os.close(self.handle)


def _is_over(handle: int, seconds: float | None) -> bool:
    """Return True if a process ends within so many seconds, as soon as it does."""
    ended = select.poll()
    ended.register(handle, select.POLLIN)
    return bool(ended.poll(None if seconds is None else seconds * 1000))


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
    """Return True if a child ends within so many seconds, as soon as it does."""
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
