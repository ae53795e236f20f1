"""What runs on a node of a Ray cluster. It travels by value: the node needs Ray, not us.

So this module uses the standard library alone, and Ray inside its functions.
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
from typing import Any

Mark = tuple[int, int, int]
MARK = "carried"
"""File in a store that was laid out on a node: who did, and what else it made. It is locked by
those who use it."""

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
    except FileNotFoundError:
        break
    except OSError:
        time.sleep(0.1)
while top and root.startswith(top):
    try:
        os.rmdir(root)
    except OSError:
        break
    root = os.path.dirname(root)
"""
"""Removes what was laid out, once whoever started it is gone, however that ended."""


def execute(
    command: list[str],
    environment: dict[str, str],
    folder: str,
    log: str,
    accelerated: bool,
    sign: tuple[str, bytes] | None = None,
) -> int | None:
    """Run a task on the node that Ray chose; return its exit code, None if it cannot be seen here.

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
    with open(log, "wb") as output:
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
    path, content = sign
    store = path.partition("/.rearview/")[0] + "/.rearview"
    try:
        with open(path, "rb") as file:
            return file.read() == content and not os.path.exists(f"{store}/{MARK}")
    except OSError:
        return False


class Keeper:
    """Holds the folder that was laid out on one node, for as long as its owner lives."""

    def __init__(self) -> None:
        self.cleaner: subprocess.Popen[bytes] | None = None

    def begin(self, root: str, home: str) -> str | None:
        """Make room at `root` for the store that `home` names; return why not, if not."""
        for _ in range(40):
            try:
                fd = self._claim(root, home)
            except FileNotFoundError:
                continue  # removed under our hands by whoever used it last
            except OSError as exc:
                return f"{root} cannot be made there ({exc.strerror or exc})"
            if fd is None:
                time.sleep(0.05)
                continue
            with os.fdopen(fd, "rb") as file:
                about = json.loads(file.read())
                if about["home"] != home:
                    return f"{root} is in use there for another machine's project"
                words = [sys.executable, "-I", "-S", "-c", CLEANER, str(fd), root, about["top"]]
                self.cleaner = subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=[fd],
                    start_new_session=True,
                    cwd="/",
                )
                self.cleaner.wait()  # its child lives on, and is nobody's
            return None
        return f"another folder stands at {root} there, which is not this project's"

    def _claim(self, root: str, home: str) -> int | None:
        """Return the locked mark of the folder; None if it is another's, or not made yet."""
        top = root
        while not os.path.lexists(os.path.dirname(top)):
            top = os.path.dirname(top)
        top = "" if os.path.lexists(root) else top
        os.makedirs(root, exist_ok=True)
        store = f"{root}/.rearview"
        mark = f"{store}/{MARK}"
        try:
            os.mkdir(store)  # of several who come at once, one makes it
        except FileExistsError:
            return self._share(mark)
        if os.listdir(root) != [".rearview"]:
            os.rmdir(store)
            return None
        fd = os.open(f"{mark}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.write(fd, json.dumps({"home": home, "top": top}).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        os.rename(f"{mark}.new", mark)
        return fd

    def _share(self, mark: str) -> int | None:
        try:
            fd = os.open(mark, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.path.exists(mark) and os.path.samestat(os.fstat(fd), os.stat(mark)):
                return fd
        else:  # its users died with the machine
            root = os.path.dirname(os.path.dirname(mark))
            for name in os.listdir(root):
                path = os.path.join(root, name)
                with contextlib.suppress(NotADirectoryError):
                    shutil.rmtree(path)
                    continue
                os.unlink(path)
        os.close(fd)
        return None

    def there(self) -> bool:
        """Say that we are."""
        return True

    def end(self) -> None:
        """Remove what was laid out, unless others use it; return when that is done."""
        if self.cleaner is not None and self.cleaner.stdin and self.cleaner.stdout:
            self.cleaner.stdin.close()
            self.cleaner.stdout.read()


class Aboard:
    """One segment's place on a node, from the first look to the last byte brought back."""

    def look(self, sign: tuple[str, bytes], outside: list[str], python: str) -> dict[str, Any]:
        """Say which node this is, whether it sees the project, and what else is not there."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        lost = [path for path in (python, *outside) if not os.path.exists(path)]
        return {"node": node, "host": os.uname().nodename, "seen": _seen(sign), "lost": lost}

    def lacks(self, entries: list[tuple[str, int, str | None]]) -> list[int]:
        """Return the numbers of those that are not there."""
        return [k for k, entry in enumerate(entries) if not _there(*entry)]

    def take(self, pieces: list[tuple[str, int, int, int, str | None, int, Any]]) -> None:
        """Lay out pieces of files; each appears under its name when its last one has come."""
        for path, size, mode, mtime, link, at, data in pieces:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            aside = os.path.join(
                os.path.dirname(path), f".{os.path.basename(path)[:200]}.{os.getpid()}"
            )
            if link is not None:
                os.symlink(link, aside)
                os.rename(aside, path)
                continue
            with open(aside, "r+b" if at else "wb") as file:
                file.seek(at)
                file.write(_content(data))
                done = file.tell()
            if done >= size:
                os.chmod(aside, stat.S_IMODE(mode))
                os.utime(aside, ns=(mtime, mtime))
                os.rename(aside, path)

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
        if folders and any(folder.startswith(one + os.sep) for one in folders):
            os.makedirs(folder, exist_ok=True)
        self.before = _marks(folders)
        code = execute(command, environment, folder, log, accelerated)
        assert code is not None
        return code

    def found(self, folders: list[str], store: str, run: str, replay: str) -> dict[str, Any]:
        """Return what the replay wrote: files, links, what it deleted, records, all objects."""
        now = _marks(folders)
        changed = [path for path, mark in now.items() if self.before.get(path) != mark]
        links = {path: os.readlink(path) for path in changed if os.path.islink(path)}
        files = [path for path in changed if stat.S_ISREG(os.lstat(path).st_mode)]
        records = list(_records(f"{store}/runs/{run}", replay))
        objects = []
        for folder, _, names in os.walk(f"{store}/objects"):
            short = os.path.basename(folder)
            objects += [short + name for name in names if len(short + name) == 64]
        return {
            "files": _sized(files),
            "links": links,
            "deleted": [path for path in self.before if path not in now],
            "records": _sized(records),
            "objects": objects,
        }

    def sized(self, paths: list[str]) -> list[tuple[str, int, int]]:
        """Return files with their size and mode."""
        return _sized(paths)

    def read(self, pieces: list[tuple[str, int, int]]) -> list[bytes]:
        """Return pieces of files: path, position and length each."""
        out = []
        for path, at, length in pieces:
            with open(path, "rb") as file:
                file.seek(at)
                out.append(file.read(length))
        return out

    def clear(self, folders: list[str], store: str, run: str, replay: str) -> None:
        """Remove what was this segment's alone."""
        for path in _records(f"{store}/runs/{run}", replay):
            os.unlink(path)
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
            return os.readlink(path) == link
        return os.stat(path).st_size == size
    except OSError:
        return False


def _sized(paths: list[str]) -> list[tuple[str, int, int]]:
    return [(path, os.stat(path).st_size, os.stat(path).st_mode) for path in paths]


def _marks(folders: list[str]) -> dict[str, Mark]:
    """Return what tells every file from a changed one."""
    out = {}
    for top in folders:
        for folder, inner, names in os.walk(top):
            for name in (*names, *inner):
                path = os.path.join(folder, name)
                about = os.lstat(path)
                if not stat.S_ISDIR(about.st_mode):
                    out[path] = (about.st_size, about.st_mtime_ns, about.st_ino)
    return out


def _records(folder: str, replay: str) -> list[str]:
    """Return the files that hold the records of a replay."""
    out = []
    for name in sorted(os.listdir(folder)):
        if name.startswith("records-") and name.endswith(".jsonl"):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                head = file.readline(1 << 20)
            with contextlib.suppress(ValueError):
                if json.loads(head).get("origin") == replay:
                    out.append(path)
    return out
