"""Room on a node for a project that it does not see, held as long as a backfill needs it.

Like `aboard`, this travels by value: it uses the standard library alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

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
