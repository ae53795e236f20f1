"""Bring a run with its checkpoints to a remote, and from there into another store.

Bytes first, the pointer last: whoever reads the pointer finds everything it needs.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rearview.config import Settings
from rearview.errors import DamagedError, RemoteError
from rearview.model import Checkpoint
from rearview.remote.base import Remote
from rearview.store.checkpoints import Checkpoints
from rearview.store.project import FORMAT, Project, publish
from rearview.store.runs import Runs
from rearview.store.versions import Versions


class Pointer(msgspec.Struct, frozen=True):
    """What a remote says of the last run of one command."""

    format: int
    """That of the store it came from."""
    run: str
    version: str
    files: tuple[str, ...]
    """Keys to fetch, which are paths below `.rearview`; the version is `versions/<version>`."""


def command_key(target: str, args: Sequence[str]) -> str:
    """Return the key under which the last run of a command is found.

    >>> command_key("train.py", ["--lr", "1"]) == command_key("train.py", ["--lr", "2"])
    False
    """
    text = "\0".join((target, *args))
    return f"commands/{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def push(project: Project, run: str, remote: Remote, key: str) -> int:
    """Bring everything that `run` needs to go on to `remote`; return the bytes that were new."""
    version = Runs(project).get(run).version
    files = sorted({*_of_run(project, run), *_of_checkpoints(project, run)})
    sent = 0
    for path in files:
        local = project.store / path
        fixed = not path.startswith("runs/")  # objects and manifests never change
        if fixed and remote.stat(path) is not None:
            continue
        sent += remote.put(local, path).size
    if version and remote.stat(f"versions/{version}") is None:
        packed = msgspec.msgpack.encode(Versions(project, Settings()).packed(version))
        sent += _put(remote, f"versions/{version}", packed)
    pointer = Pointer(project.check(), run, version, tuple(files))
    return sent + _put(remote, key, msgspec.json.encode(pointer))


def pull(project: Project, remote: Remote, key: str) -> str | None:
    """Bring the last run of a command into the store; return its id, None if there is none."""
    if remote.stat(key) is None:
        return None
    pointer = msgspec.json.decode(_get(remote, key), type=Pointer)
    if pointer.format > FORMAT:
        raise RemoteError(
            f"{key} has format {pointer.format}; this Rearview reads up to {FORMAT}. Upgrade with "
            "`pip install --upgrade rearview`.",
            slug="remote-newer",
        )
    project.needs(pointer.format)
    # manifests last: a checkpoint is there only when its objects are
    for path in sorted(pointer.files, key=lambda path: path.startswith("checkpoints/")):
        local = project.store / path
        if local.exists() and not path.startswith("runs/"):
            continue
        local.parent.mkdir(parents=True, exist_ok=True)
        remote.get(path, local)
    if pointer.version:
        packed = msgspec.msgpack.decode(
            _get(remote, f"versions/{pointer.version}"), type=dict[str, tuple[str, bytes]]
        )
        found = Versions(project, Settings()).adopt(pointer.run, packed)
        if found != pointer.version:
            raise DamagedError(
                f"The source of run {pointer.run} came as version {found[:12]}, not "
                f"{pointer.version[:12]}. Push it again from where it ran.",
                slug="damaged",
            )
    return pointer.run


def _of_run(project: Project, run: str) -> Iterator[str]:
    for file in (project.runs / run).iterdir():
        if file.is_file() and not file.name.startswith(".") and file.name != "heartbeat":
            yield str(file.relative_to(project.store))


def _of_checkpoints(project: Project, run: str) -> Iterator[str]:
    store = Checkpoints(project)
    for checkpoint in store.of(run):
        yield f"checkpoints/{run}/{checkpoint.seq:08d}.json"
        for file in files_of(store, checkpoint):
            yield str(file.relative_to(project.store))


def files_of(store: Checkpoints, checkpoint: Checkpoint) -> set[Path]:
    """Return the files that hold the parts of a checkpoint."""
    return {store.objects.file(ref) for ref in checkpoint.parts.values()}


def _put(remote: Remote, key: str, data: bytes) -> int:
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "data")
        publish(local, data, durable=False)
        return remote.put(local, key).size


def _get(remote: Remote, key: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder, "data")
        remote.get(key, local)
        return local.read_bytes()
