"""The code that runs on a node of a Ray cluster: it starts segments and holds the project's files there.

Ray sends this module to the node by value, because the node may have Ray and not Rearview. So it imports
the standard library only, and Ray inside its functions.
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
MARK = "carried"
"""File in a store that was laid out: for whom, and which folders were made above it. Each backfill
that uses the store keeps a shared lock on it."""
_TRIES = 40

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
"""Removes what was laid out once whoever started it is gone, however that came: its input ends.
What still writes there then is being killed, so it tries for a while."""


class Keeper:
    """Holds the folder that was laid out on one node."""

    def __init__(self) -> None:
        self._cleaner: subprocess.Popen[bytes] | None = None

    def begin(self, root: str, home: str) -> str | None:
        """Make room at `root` for the store that `home` names; return why not, if not.

        A folder of somebody's is never touched: `root` is free, or empty, or was laid out by one
        of us for the same store.
        """
        for _ in range(_TRIES):
            try:
                fd = _claim(Path(root), home)
            except FileNotFoundError:
                continue  # removed under our hands by whoever used it last
            except OSError as exc:
                return f"it cannot be made ({exc.strerror or exc})"
            if fd is None:
                time.sleep(0.05)
                continue
            with os.fdopen(fd, "rb") as file:
                about = json.loads(file.read())
                if about["home"] != home:
                    return "it is in use for the project of another machine"
                self._watch(fd, root, about["top"])
            return None
        return "something else stands there"

    def there(self) -> bool:
        """Say that we are."""
        return True

    def end(self) -> None:
        """Remove what was laid out, unless others use it; return when that is done."""
        if self._cleaner is not None and self._cleaner.stdin and self._cleaner.stdout:
            self._cleaner.stdin.close()
            self._cleaner.stdout.read()
            self._cleaner.stdout.close()
            self._cleaner = None

    def _watch(self, fd: int, root: str, top: str) -> None:
        self._cleaner = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CLEANER, str(fd), root, top],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            start_new_session=True,
            cwd="/",
        )
        self._cleaner.wait()  # its child goes on, and is not killed with us


def _claim(root: Path, home: str) -> int | None:
    """Return the locked mark of the folder; None if it is not ours, or not made yet."""
    made = [folder for folder in (root, *root.parents) if not os.path.lexists(folder)]
    root.mkdir(parents=True, exist_ok=True)
    store = root / STORE
    try:
        store.mkdir()  # of several who come at once, one makes it
    except FileExistsError:
        return _share(root, store / MARK)
    if [entry.name for entry in root.iterdir()] != [STORE]:
        store.rmdir()
        return None
    new = store / f".{MARK}"
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    fcntl.flock(fd, fcntl.LOCK_SH)
    os.write(fd, json.dumps({"home": home, "top": str(made[-1]) if made else ""}).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    new.rename(store / MARK)
    return fd


def _share(root: Path, mark: Path) -> int | None:
    try:
        fd = os.open(mark, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        fcntl.flock(fd, fcntl.LOCK_SH)
        if mark.exists() and os.path.samestat(os.fstat(fd), mark.stat()):
            return fd
    else:  # its users went with the machine
        for entry in root.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    os.close(fd)
    return None


Mark = tuple[int, int, int]
Sized = tuple[str, int, int]
"""Path, size and mode of a file."""
_OID = 64


def execute(
    command: list[str],
    environment: dict[str, str],
    folder: str,
    log: str,
    accelerated: bool,
    sign: tuple[str, bytes] | None = None,
) -> int | None:
    """Run a task on the node that Ray chose; return its exit code, None if it is not seen there.

    `sign` is a file of the project with its content: a folder of the same name may be another.
    """
    if sign is not None and not _seen(sign):
        return None

    def die_with_the_worker() -> None:
        if libc is not None:
            libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    # found before the fork: a child of many threads must not load libraries
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    # accelerators are the ones that Ray gave, if it was to give any
    given = [key for key in ("CUDA_VISIBLE_DEVICES",) if accelerated and key in os.environ]
    with Path(log).open("wb") as output:
        return subprocess.call(
            command,
            cwd=folder,
            env={**environment, **{key: os.environ[key] for key in given}},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_the_worker,
        )


def _seen(sign: tuple[str, bytes]) -> bool:
    path, content = Path(sign[0]), sign[1]
    store = next((folder for folder in path.parents if folder.name == STORE), path.parent)
    try:
        return path.read_bytes() == content and not (store / MARK).exists()
    except OSError:
        return False


class Aboard:
    """One segment's place on a node, from the first look to the last byte brought back."""

    def __init__(self) -> None:
        self._before: dict[str, Mark] = {}

    def look(self, sign: tuple[str, bytes], outside: list[str]) -> dict[str, Any]:
        """Say which node this is, whether it sees the project, and what else is not there."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        lost = [path for path in outside if not os.path.lexists(path)]
        return {"node": node, "host": os.uname().nodename, "seen": _seen(sign), "lost": lost}

    def lacks(self, entries: list[tuple[str, int, str | None]]) -> list[int]:
        """Return the numbers of those that are not there."""
        return [k for k, entry in enumerate(entries) if not _there(*entry)]

    def take(self, pieces: list[tuple[str, int, int, int, str | None, int, Any]]) -> None:
        """Lay out pieces of files; each appears under its name when its last one has come."""
        for name, size, mode, mtime, link, at, data in pieces:
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".{path.name[:200]}.{os.getpid()}")
            if link is not None:
                aside.symlink_to(link)
                aside.replace(path)
                continue
            with aside.open("r+b" if at else "wb") as file:
                file.seek(at)
                file.write(_content(data))
                done = file.tell()
            if done >= size:
                aside.chmod(stat.S_IMODE(mode))
                os.utime(aside, ns=(mtime, mtime))
                aside.replace(path)

    def run(
        self,
        command: list[str],
        environment: dict[str, str],
        folder: str,
        log: str,
        accelerated: bool,
        folders: list[str],
    ) -> int:
        """Run the task, remembering what stood in its `folders`; return its exit code."""
        if any(Path(one) in Path(folder).parents for one in folders):
            Path(folder).mkdir(parents=True, exist_ok=True)
        self._before = _marks(folders)
        code = execute(command, environment, folder, log, accelerated)
        assert code is not None
        return code

    def found(self, folders: list[str], store: str, run: str, replay: str) -> dict[str, Any]:
        """Return what the replay wrote: files, links, what it deleted, records; and all objects."""
        now = _marks(folders)
        changed = [path for path, mark in now.items() if self._before.get(path) != mark]
        return {
            "files": _sized(path for path in changed if stat.S_ISREG(os.lstat(path).st_mode)),
            "links": {p: str(Path(p).readlink()) for p in changed if Path(p).is_symlink()},
            "deleted": [path for path in self._before if path not in now],
            "records": _sized(map(str, _records(store, run, replay))),
            "objects": [
                folder.name + file.name
                for folder in Path(store, "objects").glob("??")
                for file in folder.iterdir()
                if len(folder.name + file.name) == _OID
            ],
        }

    def sized(self, paths: list[str]) -> list[Sized]:
        """Return files with their size and mode."""
        return _sized(iter(paths))

    def read(self, pieces: list[tuple[str, int, int]]) -> list[bytes]:
        """Return pieces of files: path, position and length each."""
        out = []
        for path, at, length in pieces:
            with Path(path).open("rb") as file:
                file.seek(at)
                out.append(file.read(length))
        return out

    def clear(self, folders: list[str], store: str, run: str, replay: str) -> None:
        """Remove what was this segment's alone."""
        for path in list(_records(store, run, replay)):
            path.unlink()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _content(data: Any) -> bytes:
    """Return bytes, fetched from Ray's store if that is where they are."""
    if isinstance(data, bytes):
        return data
    import ray

    content: bytes = ray.get(data)
    return content


def _there(path: str, size: int, link: str | None) -> bool:
    try:
        if link is not None:
            return str(Path(path).readlink()) == link
        return Path(path).stat().st_size == size
    except OSError:
        return False


def _sized(paths: Iterator[str]) -> list[Sized]:
    found = ((path, Path(path).stat()) for path in paths)
    return [(path, about.st_size, about.st_mode) for path, about in found]


def _marks(folders: list[str]) -> dict[str, Mark]:
    """Return what tells every file from a changed one."""
    out = {}
    for top in folders:
        for folder, inner, names in os.walk(top):
            for name in (*names, *inner):
                path = Path(folder, name)
                about = path.lstat()
                if not stat.S_ISDIR(about.st_mode):
                    out[str(path)] = (about.st_size, about.st_mtime_ns, about.st_ino)
    return out


def _records(store: str, run: str, replay: str) -> Iterator[Path]:
    """Yield the files that hold the records of a replay."""
    for path in sorted(Path(store, "runs", run).glob("records-*.jsonl")):
        with path.open("rb") as file:
            head = file.readline(1 << 20)
        with contextlib.suppress(ValueError):
            if json.loads(head).get("origin") == replay:
                yield path
