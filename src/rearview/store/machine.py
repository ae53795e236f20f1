"""This machine: its cores and accelerators, and whether a process that wrote to the store still runs.

The identity of a process (host, boot, process namespace, number, start time) distinguishes it from every
other one, also from later ones with the same number. On its own machine the kernel knows whether it is
alive; for a process elsewhere, the time of change of its heartbeat file is its last sign of life.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STAT_STATE, _STAT_START = 0, 19
"""Fields of /proc/PID/stat, counted after the name of the program."""
_LEAST_SILENCE = 60.0
"""Seconds without a sign of life before a process on another machine counts as dead."""
_LONG_SILENCE = 86_400.0
"""Seconds without a sign of life before it is certainly dead."""
_CPUINFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_FIRST_CORE = 4096
"""Bytes of /proc/cpuinfo to read: they hold the first core, and reading on asks every core."""


def process_identity(pid: int | None = None) -> dict[str, Any]:
    """Return the identity of a process of this machine, by default of this process, as JSON keeps it."""
    pid = os.getpid() if pid is None else pid
    fields = _stat(pid)
    return {
        "host": socket.gethostname(),
        "pid": pid,
        "boot": _boot_id(),
        "space": _pid_namespace(),
        "born": int(fields[_STAT_START]) if fields else 0,
    }


def is_alive(identity: Mapping[str, Any], heartbeat: Path) -> bool:
    """Return True if the process with that identity lives.

    Of a process on another machine or in another container, True if the file `heartbeat` changed less
    than a minute, or six of its intervals (`identity["heartbeat"]` seconds), ago.
    """
    alive = _known_to_kernel(identity)
    if alive is not None:
        return alive
    silent = _seconds_since_change(heartbeat)
    bound = max(_LEAST_SILENCE, 6 * float(identity.get("heartbeat", 10.0)))
    return silent is not None and silent < bound


def is_certainly_dead(identity: Mapping[str, Any], heartbeat: Path) -> bool:
    """Return True if the process with that identity is dead beyond doubt.

    Of a process on another machine or in another container, True if the file `heartbeat` has not
    changed for a day.
    """
    alive = _known_to_kernel(identity)
    if alive is not None:
        return not alive
    silent = _seconds_since_change(heartbeat)
    return silent is not None and silent > _LONG_SILENCE


def _known_to_kernel(identity: Mapping[str, Any]) -> bool | None:
    """Return True if the kernel knows a process to be alive, False if dead, None if it cannot know."""
    own = process_identity(0)
    if identity.get("host") != own["host"]:
        return None
    if identity.get("boot") != own["boot"]:
        return False  # the machine was restarted since then
    if not own["boot"] or identity.get("space") != own["space"]:
        return None
    fields = _stat(int(identity.get("pid", 0)))
    return (
        fields is not None
        and fields[_STAT_STATE] not in {"Z", "X"}
        and int(fields[_STAT_START]) == identity.get("born")
    )


def _seconds_since_change(file: Path) -> float | None:
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return None


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name before it may hold anything


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    """Return the namespace of process numbers: containers on one machine number their own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


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
    """Return the facts that decide how fast this machine computes, as runs store them.

    `visible` is the value of CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    return {
        "cpu": _field(_CPUINFO, "model name") or platform.machine(),
        "cores": cores(),
        "gpus": gpus(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def hardware_id(facts: Mapping[str, Any]) -> str:
    """Return a name that all machines with the same hardware share.

    The host's name is not part of it: a container has a new one each time, and equal nodes of a cluster
    need to be measured once.

    >>> a = {"cpu": "x", "cores": 2, "gpus": [], "visible": None}
    >>> hardware_id(a) == hardware_id({**a, "visible": "0"})
    True
    >>> hardware_id(a) == hardware_id({**a, "cores": 4})
    False
    """
    text = f"{facts.get('cpu')}|{facts.get('cores')}|{sorted(facts.get('gpus') or [])}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _field(file: Path, name: str) -> str:
    try:
        with file.open("rb", buffering=0) as source:
            text = source.read(_FIRST_CORE).decode("utf-8", "replace")
    except OSError:
        return ""
    match = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
