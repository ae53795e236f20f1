"""Who is saving now: one small file per save in flight, so that a sweep spares what it touches.

Is the process of a run still alive? Asked of the machine, not believed from a file.

What a machine is made of, as far as its speed goes; read in well under a millisecond.

Who is saving now: one small file per save in flight, so that a sweep spares what it touches.

No lock: nobody waits for these files, and one left by a killed process is recognised as such.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rearview.store.files import make_folder, open_file
from rearview.store.project import Project

_STAT_STATE, _STAT_START = 0, 19
"""Fields of /proc/<pid>/stat, counted after the name of the program."""


def identity(pid: int | None = None) -> dict[str, Any]:
    """Return what tells a process from every other, later ones with its number included."""
    pid = os.getpid() if pid is None else pid
    fields = _stat(pid)
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "boot": _boot(),
        "space": _space(),
        "born": int(fields[_STAT_START]) if fields else 0,
    }


def gone(facts: Mapping[str, Any], heartbeat: Path) -> bool:
    """Say whether the process with that identity is dead beyond doubt.

    Of another machine that is never quite known; there, a day without a sign of life is enough.
    """
    here = identity(0)
    if facts.get("host") == here["host"] and here["boot"]:
        if facts.get("boot") != here["boot"]:
            return True
        if facts.get("space") == here["space"]:
            return not alive(facts, heartbeat)
    try:
        return time.time() - heartbeat.stat().st_mtime > 86_400
    except OSError:
        return False


def alive(facts: Mapping[str, Any], heartbeat: Path) -> bool:
    """Say whether the process with that identity lives.

    On its own machine the kernel knows. For another machine or container only the heartbeat
    can tell: it must be younger than six of its intervals (a minute at least).
    """
    here = identity(0)
    if all(facts.get(key) == here[key] for key in ("host", "boot", "space")) and here["boot"]:
        fields = _stat(int(facts.get("pid", 0)))
        return (
            fields is not None
            and fields[_STAT_STATE] not in {"Z", "X"}
            and int(fields[_STAT_START]) == facts.get("born")
        )
    if facts.get("host") == here["host"] and facts.get("boot") != here["boot"]:
        return False  # the machine was started anew since
    try:
        age = time.time() - heartbeat.stat().st_mtime
    except OSError:
        return False
    return age < max(60.0, 6 * float(facts.get("heartbeat", 10.0)))


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name before it may hold anything


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _space() -> str:
    """Name the process number space: containers on one machine number their own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


_CPUINFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_FIRST = 4096
"""Bytes of /proc/cpuinfo that hold the first core: the kernel asks each core for the rest."""


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[str]:
    """Return the models of the accelerators of this machine, as the driver lists them."""
    try:
        folders = sorted(_GPUS.iterdir())
    except OSError:
        return []
    return [_field(folder / "information", "Model") or "unknown" for folder in folders]


def hardware() -> dict[str, Any]:
    """Return what decides how fast this machine computes, as runs keep it.

    `visible` is what CUDA_VISIBLE_DEVICES lets the program see, None without a bound.
    """
    return {
        "cpu": _field(_CPUINFO, "model name") or platform.machine(),
        "cores": cores(),
        "gpus": gpus(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def make_of(facts: Mapping[str, Any]) -> str:
    """Return a name for all machines that are made of the same.

    The host's name is no part of it: a container has a new one each time, and the nodes of a
    cluster that are alike need to be measured once.

    >>> a = {"cpu": "x", "cores": 2, "gpus": [], "visible": None}
    >>> make_of(a) == make_of({**a, "visible": "0"}), make_of(a) == make_of({**a, "cores": 4})
    (True, False)
    """
    made = f"{facts.get('cpu')}|{facts.get('cores')}|{sorted(facts.get('gpus') or [])}"
    return hashlib.sha256(made.encode()).hexdigest()[:12]


def _field(file: Path, name: str) -> str:
    try:
        with file.open("rb", buffering=0) as source:
            text = source.read(_FIRST).decode("utf-8", "replace")
    except OSError:
        return ""
    found = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


FOREIGN = 86_400.0
"""Seconds after which a save on another machine is taken for dead."""


@contextlib.contextmanager
def writing(project: Project) -> Iterator[None]:
    """Make it known that objects are being put which no manifest names yet."""
    name = f"{_place()}-{os.getpid()}-{_born(os.getpid())}-{os.urandom(4).hex()}"
    path = project.writing / name
    try:
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileNotFoundError:
        make_folder(path.parent)
        fd = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.close(fd)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def earliest(project: Project, now: float) -> float:
    """Return when the oldest save in flight began, or `now`; forget those of dead processes."""
    first = now
    try:
        found = list(project.writing.iterdir())
    except FileNotFoundError:
        return first
    for path in found:
        with contextlib.suppress(FileNotFoundError):
            began = path.stat().st_mtime
            if _alive(path.name, now - began):
                first = min(first, began)
            else:
                path.unlink()
    return first


def _alive(name: str, age: float) -> bool:
    try:
        place, pid, born, _ = name.rsplit("-", 3)
    except ValueError:
        return False
    if place != _place():
        return age < FOREIGN
    return bool(born) and _born(int(pid)) == born


def _place() -> str:
    """Return what makes process numbers comparable: this machine and its process namespace."""
    try:
        space = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        space = "0"
    return f"{socket.gethostname()}-{space}".replace("/", "_")


def _born(pid: int) -> str:
    """Return the start of process `pid` in clock ticks: numbers are reused, starts are not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return ""
    return stat.rsplit(")", 1)[1].split()[19]
