"""Who is saving now: one small file per save in flight, so that a sweep spares what it touches.

No lock: nobody waits for these files, and one left by a killed process is recognised as such.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from rearview.store.private import make_folder, open_file
from rearview.store.project import Project

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
