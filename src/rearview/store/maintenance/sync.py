"""Push a run with its checkpoints to a remote, and pull it into another store.

A pointer is a file that names the other files of a run. The pointer is sent last, so that the remote has
every file that it names.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rearview.config import Settings
from rearview.errors import DamagedError, RemoteError
from rearview.remote.base import Remote, check_key
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.create_files import make_folder, publish, set_store_mode
from rearview.store.project import FORMAT, Project
from rearview.store.runs import Runs
from rearview.store.versions.versions import Versions

_FOLDERS = frozenset(("runs", "checkpoints", "packs", "objects"))
"""Folders of a store that hold files of runs."""
_ATTEMPTS = 3
"""Most attempts to list and send the files, if a file is removed during the push."""


class Pointer(msgspec.Struct, frozen=True):
    """Content of a file at a remote that names the last run of one command, and the files of this run."""

    format: int
    """Format of the store from which the run was pushed."""
    run: str
    version: str
    files: tuple[str, ...]
    """Paths below `.rearview`, which are also keys at the remote. The source of the run is at `versions/<version>`."""


def command_key(target: str, args: Sequence[str]) -> str:
    """Return the key at a remote of the pointer to the last run of the command `target` with `args`.

    >>> command_key("train.py", ["--lr", "1"]) == command_key("train.py", ["--lr", "2"])
    False
    """
    text = "\0".join((target, *args))
    return f"commands/{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def push(
    project: Project, run: str, remote: Remote, key: str, pushed: dict[str, object] | None = None
) -> int:
    """Send to `remote` all files that are needed to resume `run`; return the number of bytes sent.

    The pointer is stored at `key`. This function may be called again while the run continues: it remembers in
    `pushed`, by path, the files that the remote has.
    """
    pushed = {} if pushed is None else pushed
    run_facts = Runs(project).get(run)
    version = run_facts.version
    for attempt in range(_ATTEMPTS):
        try:
            files = sorted({*_files_of_run(project, run), *_files_of_checkpoints(project, run)})
            sent = sum(_send(project, path, remote, pushed) for path in files)
            break
        except FileNotFoundError:  # a garbage collection removed a checkpoint since it was listed
            if attempt == _ATTEMPTS - 1:
                raise
    for source_version in {version, run_facts.source} - {"", *pushed}:
        if remote.stat(f"versions/{source_version}") is None:
            packed = msgspec.msgpack.encode(Versions(project, Settings()).packed(source_version))
            sent += _put(remote, f"versions/{source_version}", packed)
        pushed[source_version] = True
    pointer = Pointer(project.check(), run, version, tuple(files))
    return sent + _put(remote, key, msgspec.json.encode(pointer))


def _send(project: Project, path: str, remote: Remote, pushed: dict[str, object]) -> int:
    """Send the file `path` unless the remote has its current content, as `pushed` says; return the bytes sent."""
    local = project.store / path
    if not path.startswith("runs/"):  # objects and manifests never change
        if path in pushed:
            return 0
        size = 0 if remote.stat(path) is not None else remote.put(local, path).size
        pushed[path] = True
        return size
    facts = local.stat()
    size_and_time = (facts.st_size, facts.st_mtime_ns)
    if pushed.get(path) == size_and_time:
        return 0
    # send a copy: the run may append to the file while the remote compares its bytes with the file
    size = _put(remote, path, local.read_bytes())
    pushed[path] = size_and_time
    return size


def pending_runs(remote: Remote) -> dict[str, str]:
    """Return the runs at a remote that can be pulled, as a mapping: run id -> key of its pointer; the newest run is last."""
    runs = {}
    for key in remote.list("commands/"):
        pointer = msgspec.json.decode(_get(remote, key), type=Pointer)
        runs[pointer.run] = key
    return dict(sorted(runs.items()))


def pull(project: Project, remote: Remote, key: str) -> str | None:
    """Copy the last run of a command from a remote into the store.

    `key` is the key of the command's pointer. Return the id of the run, or None if the remote has no such pointer.
    """
    if remote.stat(key) is None:
        return None
    pointer = msgspec.json.decode(_get(remote, key), type=Pointer)
    if pointer.format > FORMAT:
        raise RemoteError(
            f"{key} has format {pointer.format}; this Rearview reads up to {FORMAT}. Upgrade with "
            "`pip install --upgrade rearview`.",
            slug="remote-newer",
        )
    _check_names(pointer, key)
    project.needs(pointer.format)
    # manifests last: a checkpoint must not be found before its objects
    for path in sorted(pointer.files, key=lambda path: path.startswith("checkpoints/")):
        check_key(path)
        local = project.store / path
        if local.exists() and not path.startswith("runs/"):
            continue
        make_folder(local.parent)
        remote.get(path, local)
        set_store_mode(local)
    if pointer.version:
        _adopt(project, remote, pointer.run, pointer.version)
        source = Runs(project).get(pointer.run).source
        if source != pointer.version:
            _adopt(project, remote, f"{pointer.run}-continued", source)
    return pointer.run


def _adopt(project: Project, remote: Remote, name: str, version: str) -> None:
    """Fetch `version` from a remote and store it for the run `name`; raise if what arrived has another hash."""
    packed = msgspec.msgpack.decode(
        _get(remote, f"versions/{version}"), type=dict[str, tuple[str, bytes]]
    )
    adopted = Versions(project, Settings()).adopt(name, packed)
    if adopted != version:
        raise DamagedError(
            f"The source of run {name} came as version {adopted[:12]}, not {version[:12]}. Push it "
            "again from where it ran.",
            slug="damaged",
        )


def _check_names(pointer: Pointer, key: str) -> None:
    """Raise if the pointer with this key names files outside the store's folders for files of runs."""
    for name in (*pointer.files, f"runs/{pointer.run}"):
        parts = name.split("/")
        if parts[0] not in _FOLDERS or len(parts) < 2 or any(p in {"", ".", ".."} for p in parts):
            raise RemoteError(
                f"{key} names {name!r}, which is not a file of a run. Rearview did not write it; do "
                "not trust that remote.",
                slug="remote-names",
            )


def _files_of_run(project: Project, run: str) -> Iterator[str]:
    for file in (project.runs / run).iterdir():
        if file.is_file() and not file.name.startswith(".") and file.name != "heartbeat":
            yield str(file.relative_to(project.store))


def _files_of_checkpoints(project: Project, run: str) -> Iterator[str]:
    store = Checkpoints(project)
    for checkpoint in store.of(run):
        yield f"checkpoints/{run}/{checkpoint.seq:08d}.json"
        for file in store.files(checkpoint):
            yield str(file.relative_to(project.store))


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
