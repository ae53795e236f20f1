"""The code that runs on the nodes of a Ray cluster: it runs segments, and receives and removes files of the project.

Ray sends the source of this module to the node, because Rearview may not be installed there. Therefore the module
imports only the standard library and, inside its functions, Ray.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STORE = ".rearview"
OWNER_FILE = "carried"
"""File in a store that Rearview created on a node. It contains the identity of the store from which files are copied,
and the topmost parent folder that was created. Each backfill that uses the folder holds a shared lock on this file.
"""
_CLAIM_TRIES = 40
"""Most times that `FolderOwner.create` tries to claim the folder."""

CLEANER = """
import fcntl, os, shutil, sys, time
if os.fork():
    os._exit(0)
fd, root, top = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.stdin.buffer.read()
try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    os._exit(0)
def clear():
    store = os.path.join(root, ".rearview")
    for folder, spared in ((root, ".rearview"), (store, "carried")):
        for entry in list(os.scandir(folder)):
            if entry.name != spared:
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
    os.unlink(os.path.join(store, "carried"))
    os.rmdir(store)
for _ in range(100):
    try:
        clear()
        break
    except OSError:
        if not os.path.exists(root):
            break
        time.sleep(0.1)
while top and root.startswith(top):
    try:
        os.rmdir(root)
    except OSError:
        break
    root = os.path.dirname(root)
"""
"""Program that removes the project folder from a node as soon as its standard input ends: this is when the process
that started the program has ended. It retries, because other processes that write in the folder may end a little
later.
"""


class FolderOwner:
    """Ray actor that creates the project folder on one node, and removes it after the backfill."""

    def __init__(self) -> None:
        self._cleaner: subprocess.Popen[bytes] | None = None

    def create(self, root: str, store_id: str) -> str | None:
        """Create the folder `root` for files of the store with the identity `store_id`.

        Return None if the folder can be used, or the reason in words if not. A folder of the user is never touched:
        `root` must not exist, or be empty, or have been created by another backfill for the same store.
        """
        for _ in range(_CLAIM_TRIES):
            try:
                fd = _claim(Path(root), store_id)
            except FileNotFoundError:
                continue  # the last backfill that used the folder has just removed it
            except OSError as exc:
                return f"it cannot be created ({exc.strerror or exc})"
            if fd is None:
                time.sleep(0.05)
                continue
            with os.fdopen(fd, "rb") as file:
                owner = json.loads(file.read())
                if owner["home"] != store_id:
                    return "it is in use for the project of another machine"
                self._start_cleaner(fd, root, owner["top"])
            return None
        return "another folder is there"

    def ping(self) -> bool:
        """Return True; the call fails if this actor does not run any more."""
        return True

    def remove(self) -> None:
        """Remove the folder unless another backfill uses it, and wait until it is removed."""
        if self._cleaner is not None and self._cleaner.stdin and self._cleaner.stdout:
            self._cleaner.stdin.close()
            self._cleaner.stdout.read()
            self._cleaner.stdout.close()
            self._cleaner = None

    def _start_cleaner(self, fd: int, root: str, top: str) -> None:
        self._cleaner = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CLEANER, str(fd), root, top],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            start_new_session=True,
            cwd="/",
        )
        self._cleaner.wait()  # the started process ends at once; the child that it has forked outlives this process


def _claim(root: Path, store_id: str) -> int | None:
    """Claim the folder `root`: return a descriptor of its owner file with a shared lock on it.

    The folder and the file are created if needed. Return None if the folder was not created by Rearview, or its owner
    file cannot be locked yet. Raise OSError if the folder cannot be created.
    """
    created_folders = [folder for folder in (root, *root.parents) if not os.path.lexists(folder)]
    root.mkdir(parents=True, exist_ok=True)
    store = root / STORE
    try:
        store.mkdir()  # if several processes try to create the folder at once, only one succeeds
    except FileExistsError:
        return _share_lock(root, store / OWNER_FILE)
    if [entry.name for entry in root.iterdir()] != [STORE]:
        store.rmdir()
        return None
    new = store / f".{OWNER_FILE}"
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    fcntl.flock(fd, fcntl.LOCK_SH)
    os.write(
        fd,
        json.dumps(
            {"home": store_id, "top": str(created_folders[-1]) if created_folders else ""}
        ).encode(),
    )
    os.lseek(fd, 0, os.SEEK_SET)
    new.rename(store / OWNER_FILE)
    return fd


def _share_lock(root: Path, owner_file: Path) -> int | None:
    """Return a descriptor of `owner_file` with a shared lock on it, or None if the caller must try again.

    If no process holds a lock, the folder `root` was left behind, for example by a restart of the machine: empty it.
    """
    try:
        fd = os.open(owner_file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        fcntl.flock(fd, fcntl.LOCK_SH)
        if owner_file.exists() and os.path.samestat(os.fstat(fd), owner_file.stat()):
            return fd
    else:  # no process uses the folder any more
        for entry in root.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    os.close(fd)
    return None


FileStamp = tuple[int, int, int]
"""(size, modification time in nanoseconds, inode) of a file; at least one differs after the file was changed."""
SizedFile = tuple[str, int, int]
"""(path on the node, size in bytes, mode) of a file."""
_OID = 64
"""Number of characters in the hash of an object."""


def execute(
    command: list[str],
    environment: dict[str, str],
    folder: str,
    log: str,
    accelerated: bool,
    known_file: tuple[str, bytes] | None = None,
) -> int | None:
    """Run a command on this node; return its exit code, or None if the node does not see the project's folder.

    `known_file` is (path, content) of a file of the project: a different folder may be at the same path on the node.
    If `accelerated`, the command uses the accelerators that Ray has chosen.
    """
    if known_file is not None and not _sees_project(known_file):
        return None

    def die_with_the_worker() -> None:
        if libc is not None:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die when the parent process ends

    # the library is loaded before the fork, because the child of a process with threads must not load libraries
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    # if the task requested accelerators, Ray has set this variable to those that it has chosen
    variables_from_ray = [
        key for key in ("CUDA_VISIBLE_DEVICES",) if accelerated and key in os.environ
    ]
    with Path(log).open("wb") as output:
        return subprocess.call(
            command,
            cwd=folder,
            env={**environment, **{key: os.environ[key] for key in variables_from_ray}},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_the_worker,
        )


def _sees_project(known_file: tuple[str, bytes]) -> bool:
    """Return True if the file at the path in `known_file` exists on this node with the content in `known_file`.

    Return False if the file is in a folder that Rearview created on the node (`FolderOwner`).
    """
    path, content = Path(known_file[0]), known_file[1]
    store = next((folder for folder in path.parents if folder.name == STORE), path.parent)
    try:
        return path.read_bytes() == content and not (store / OWNER_FILE).exists()
    except OSError:
        return False


class SegmentWorker:
    """Ray actor that receives the files of one segment on a node, runs it, returns its results and cleans up."""

    def __init__(self) -> None:
        self._stamps_before: dict[str, FileStamp] = {}
        """Path -> stamp of each file in the folders of the replay before the task ran."""

    def inspect_node(self, known_file: tuple[str, bytes], paths: list[str]) -> dict[str, Any]:
        """Return facts about this node: `node` (its id), `host`, `sees_project`, and which of `paths` are `missing`.

        `known_file` is explained at `execute`.
        """
        import ray

        node = ray.get_runtime_context().get_node_id()
        missing_paths = [path for path in paths if not os.path.lexists(path)]
        return {
            "node": node,
            "host": os.uname().nodename,
            "sees_project": _sees_project(known_file),
            "missing": missing_paths,
        }

    def missing_files(self, entries: list[tuple[str, int, str | None]]) -> list[int]:
        """Return the indices of those `entries` (path, size, link target or None) that this node lacks."""
        return [k for k, entry in enumerate(entries) if not _is_present(*entry)]

    def write_chunks(self, chunks: list[tuple[str, int, int, int, str | None, int, Any]]) -> None:
        """Write chunks of files; a file gets its final name after its last chunk is written.

        Each chunk is (path, size of the file, mode, modification time, link target or None, position, data).
        """
        for name, size, mode, mtime, link, position, data in chunks:
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name[:200]}.{os.getpid()}")
            if link is not None:
                unfinished.symlink_to(link)
                unfinished.replace(path)
                continue
            with unfinished.open("r+b" if position else "wb") as file:
                file.seek(position)
                file.write(_content(data))
                written = file.tell()
            if written >= size:
                unfinished.chmod(stat.S_IMODE(mode))
                os.utime(unfinished, ns=(mtime, mtime))
                unfinished.replace(path)

    def run(
        self,
        command: list[str],
        environment: dict[str, str],
        folder: str,
        log: str,
        accelerated: bool,
        folders: list[str],
    ) -> int:
        """Run a command and return its exit code; before, remember the files in `folders` for `list_results`."""
        if any(Path(replay_folder) in Path(folder).parents for replay_folder in folders):
            Path(folder).mkdir(parents=True, exist_ok=True)
        self._stamps_before = _stamps(folders)
        code = execute(command, environment, folder, log, accelerated)
        assert code is not None
        return code

    def list_results(self, folders: list[str], store: str, run: str, replay: str) -> dict[str, Any]:
        """Return the results of `replay`: keys `files`, `links`, `records`, `deleted` and `objects`.

        Files are compared with those in `folders` before `run`. The objects are all objects in `store` on this node.
        """
        stamps = _stamps(folders)
        changed = [path for path, stamp in stamps.items() if self._stamps_before.get(path) != stamp]
        return {
            "files": _file_sizes(path for path in changed if stat.S_ISREG(os.lstat(path).st_mode)),
            "links": {p: str(Path(p).readlink()) for p in changed if Path(p).is_symlink()},
            "deleted": [path for path in self._stamps_before if path not in stamps],
            "records": _file_sizes(map(str, _record_files(store, run, replay))),
            "objects": [
                folder.name + file.name
                for folder in Path(store, "objects").glob("??")
                for file in folder.iterdir()
                if len(folder.name + file.name) == _OID
            ],
        }

    def file_sizes(self, paths: list[str]) -> list[SizedFile]:
        """Return (path, size, mode) of the files at `paths`."""
        return _file_sizes(iter(paths))

    def read_chunks(self, chunks: list[tuple[str, int, int]]) -> list[bytes]:
        """Return the bytes of each of `chunks`, which are (path, position, length)."""
        contents = []
        for path, position, length in chunks:
            with Path(path).open("rb") as file:
                file.seek(position)
                contents.append(file.read(length))
        return contents

    def remove_files(self, folders: list[str], store: str, run: str, replay: str) -> None:
        """Remove the record files of `replay` from `store`, and its `folders`, from this node."""
        for path in list(_record_files(store, run, replay)):
            path.unlink()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _content(data: Any) -> bytes:
    """Return the bytes of a chunk: `data` itself, or if it is a reference, the bytes from Ray's object store."""
    if isinstance(data, bytes):
        return data
    import ray

    content: bytes = ray.get(data)
    return content


def _is_present(path: str, size: int, link: str | None) -> bool:
    """Return True if this node has a file at `path` with the size `size`, or if `link` is given, a link to `link`."""
    try:
        if link is not None:
            return str(Path(path).readlink()) == link
        return Path(path).stat().st_size == size
    except OSError:
        return False


def _file_sizes(paths: Iterator[str]) -> list[SizedFile]:
    with_status = ((path, Path(path).stat()) for path in paths)
    return [(path, status.st_size, status.st_mode) for path, status in with_status]


def _stamps(folders: list[str]) -> dict[str, FileStamp]:
    """Return path -> stamp of every file and link below `folders`; links are not followed."""
    stamps = {}
    for top in folders:
        for folder, inner, names in os.walk(top):
            for name in (*names, *inner):
                path = Path(folder, name)
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    stamps[str(path)] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return stamps


def _record_files(store: str, run: str, replay: str) -> Iterator[Path]:
    """Yield the record files of `run` in `store` that the replay `replay` has written."""
    for path in sorted(Path(store, "runs", run).glob("records-*.jsonl")):
        with path.open("rb") as file:
            head = file.readline(1 << 20)
        with contextlib.suppress(ValueError):
            if json.loads(head).get("origin") == replay:
                yield path
