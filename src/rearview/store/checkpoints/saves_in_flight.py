"""One small file per save in flight, so that garbage collection spares the objects it writes.

The objects of a save are on disk before the manifest that names them. The file says which process saves,
so that a file left by a killed process is recognised. There is no lock: nobody waits for these files.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from rearview.store.files import make_folder, open_file
from rearview.store.machine import is_certainly_dead, process_identity
from rearview.store.project import Project


@contextlib.contextmanager
def save_in_flight(project: Project) -> Iterator[None]:
    """Announce that this process puts objects that no manifest names yet."""
    path = project.writing / f"{os.getpid()}-{os.urandom(8).hex()}"
    try:
        fd = _create(path)
    except FileNotFoundError:
        make_folder(path.parent)
        fd = _create(path)
    try:
        os.write(fd, json.dumps(process_identity()).encode())
    finally:
        os.close(fd)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def earliest_start(project: Project, now: float) -> float:
    """Return when the oldest save in flight began, or `now`; remove the files of dead processes."""
    first = now
    try:
        paths = list(project.writing.iterdir())
    except FileNotFoundError:
        return first
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if _is_abandoned(path):
                path.unlink()
            else:
                first = min(first, path.stat().st_mtime)
    return first


def _create(path: Path) -> int:
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def _is_abandoned(path: Path) -> bool:
    try:
        identity = json.loads(path.read_bytes())
    except ValueError:
        identity = {}  # just created, or by a kill or an older Rearview: spared for a day
    return is_certainly_dead(identity, path)
