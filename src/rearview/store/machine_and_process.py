"""The cores and accelerators of this machine, and whether a process that wrote to the store is still alive.

The identity of a process (host, boot, process namespace, number, start time) distinguishes a process from every other
process, also from later processes with its number. The kernel knows which processes of this machine are
alive. The last sign of life of a process on another machine is the modification time of its heartbeat file.
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
"""Positions of the state and start time of a process in /proc/PID/stat, from the field after the program's name."""
_LEAST_SILENCE = 60.0
"""Fewest seconds without a sign of life after which a process on another machine counts as dead."""
_LONG_SILENCE = 86_400.0
"""Seconds without a sign of life after which a process on another machine is certainly dead."""
_CPUINFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_FIRST_CORE = 4096
"""Bytes of /proc/cpuinfo to read: enough for the first core. Reading further cores takes time."""


def process_identity(pid: int | None = None) -> dict[str, Any]:
    """Return the identity of the process `pid` of this machine, by default of this process, as values for JSON."""
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
    """Return True if the process with the given identity (from `process_identity`) is alive.

    A process on another machine or in another container counts as alive if the file `heartbeat` changed less
    than a minute ago, or less than six heartbeat intervals (of `identity["heartbeat"]` seconds) ago.
    """
    alive = _known_to_kernel(identity)
    if alive is not None:
        return alive
    silent = _seconds_since_change(heartbeat)
    bound = max(_LEAST_SILENCE, 6 * float(identity.get("heartbeat", 10.0)))
    return silent is not None and silent < bound


def is_certainly_dead(identity: Mapping[str, Any], heartbeat: Path) -> bool:
    """Return True if the process with the given identity (from `process_identity`) is dead beyond doubt.

    A process on another machine or in another container counts as dead if the file `heartbeat` has not changed
    for a day.
    """
    alive = _known_to_kernel(identity)
    if alive is not None:
        return not alive
    silent = _seconds_since_change(heartbeat)
    return silent is not None and silent > _LONG_SILENCE


def _known_to_kernel(identity: Mapping[str, Any]) -> bool | None:
    """Return True if the kernel says that a process is alive, False if that it is dead.

    Return None if the kernel cannot know, because the process ran on another machine or in another container.
    """
    this_process = process_identity(0)
    if identity.get("host") != this_process["host"]:
        return None
    if identity.get("boot") != this_process["boot"]:
        return False  # the machine was restarted since the process ran
    if not this_process["boot"] or identity.get("space") != this_process["space"]:
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
    return text.rpartition(")")[
        2
    ].split()  # the name of the program, before these fields, may contain blanks and brackets


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    """Return the kernel's name of this process's pid namespace, or "" if it cannot be read.

    Containers on one machine have different namespaces, because they number their processes separately.
    """
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
    """Return the model name of each NVIDIA accelerator of this machine, according to the driver."""
    try:
        folders = sorted(_GPUS.iterdir())
    except OSError:
        return []
    return [_field(folder / "information", "Model") or "unknown" for folder in folders]


def hardware() -> dict[str, Any]:
    """Return the properties of this machine that determine how fast it computes, by name, as runs store them.

    `visible` is the value of CUDA_VISIBLE_DEVICES, or None if the variable is not set.
    """
    return {
        "cpu": _field(_CPUINFO, "model name") or platform.machine(),
        "cores": cores(),
        "gpus": gpus(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def hardware_id(facts: Mapping[str, Any]) -> str:
    """Return an id of the properties `facts` (from `hardware`) that is equal for machines with equal hardware.

    The id does not depend on the name of the host: a container gets a new name at each start, and of all equal
    nodes of a cluster only one has to be measured.

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
