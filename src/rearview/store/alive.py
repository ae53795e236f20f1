"""Is the process of a run still alive? Asked of the machine, not believed from a file."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
