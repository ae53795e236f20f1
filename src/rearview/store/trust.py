"""Decide which stores are trusted: the code in them is run, and their pickles are loaded, without asking the user.

A store has a random id in `identity.json`. Rearview remembers which stores were created on this machine or
trusted by the user, in files outside of the stores, in the user's own state folder::

    $XDG_STATE_HOME/rearview/stores/<key>.json     (~/.local/state/rearview/… if that is not set)

The key is a hash of the id, of the inode of the store's folder and of its creation time in nanoseconds. A copy or
an unpacked archive has another inode and creation time, and no other user can write to the state folder. So a store
is still trusted after it was renamed or moved on its disk. A store that was copied, unpacked or cloned is not trusted.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rearview.durable_files import add_check, publish
from rearview.errors import DamagedError, StoreError
from rearview.store.json_files import encode, read_facts

FILE = "identity.json"
FORMAT = 2
"""Format of `identity.json` and of the files in the state folder: JSON with a checksum, as the files of runs."""
VARIABLE = "REARVIEW_TRUST"
_ID = re.compile("[0-9a-f]{32}")
_RUNS = "runs"
_LINKED = "replays"
"""Folder of a store in which replays create work trees with links to their inputs."""
_EARLY, _LATE = 0.0, 30.0
"""Least and most seconds, in a store that was not copied, from the creation of a run's folder to the run's start."""
_STATX = struct.Struct("<I76xqI")
"""Fields that are read from the result of `statx`: its mask, and seconds and nanoseconds of the creation time."""
_BIRTH = 0x800


@dataclass(frozen=True, slots=True)
class FolderIdentity:
    """Path, inode and creation time of a folder, which distinguish the folder from every copy of it."""

    path: str
    inode: int
    born: int
    """Creation time in nanoseconds since 1970; 0 if the file system does not record it."""

    @classmethod
    def of(cls, folder: Path) -> FolderIdentity:
        """Return the identity of an existing folder; of a link, the identity of its target."""
        real = os.path.realpath(folder)
        return cls(real, os.stat(real).st_ino, creation_time(Path(real)))  # noqa: PTH116

    def key(self, store: str) -> str:
        """Return the key under which the store in this folder is remembered; `store` is the id of the store."""
        # without a creation time, the path is used, so that a store is not trusted after it was moved
        parts = (store, str(self.inode), str(self.born), "" if self.born else self.path)
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def creation_time(folder: Path) -> int:
    """Return the creation time of a folder in nanoseconds, or 0 if the file system does not record it."""
    buffer = ctypes.create_string_buffer(256)
    try:
        call = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return 0
    if call(-100, os.fsencode(folder), 0, _BIRTH, buffer):
        return 0
    mask, seconds, nanoseconds = _STATX.unpack_from(buffer)
    return seconds * 10**9 + nanoseconds if mask & _BIRTH else 0


def create_identity(store: Path, layout: int) -> None:
    """Give a new store an id, and remember that it was created here, if the state folder can be written.

    `layout` is the format of the store, which is stored next to the id.
    """
    _write(store / FILE, {"format": FORMAT, "id": os.urandom(16).hex(), "layout": layout})
    with contextlib.suppress(StoreError):
        remember(store)


def store_layout(store: Path, layout: int) -> None:
    """Write `layout`, the format of the store, next to its id, so that damage to the file `format` is detected."""
    facts = _identity(store)
    if facts is not None:
        _write(store / FILE, {**facts, "layout": layout})


def layout_of(store: Path) -> int | None:
    """Return the format of the store that is written next to its id, or None if no format is written there."""
    number = (_identity(store) or {}).get("layout")
    return number if isinstance(number, int) else None


def store_id(store: Path) -> str:
    """Return the id of a store, or "" if the store has no id yet or the file of the id is damaged."""
    return str((_identity(store) or {}).get("id", ""))


def remember(store: Path) -> Path:
    """Remember that the store in this folder is trusted; return the file in the state folder that says so."""
    facts = _identity(store)
    try:
        if facts is None:
            layout = int((store / "format").read_bytes())
            facts = {"format": FORMAT, "id": os.urandom(16).hex(), "layout": layout}
            _write(store / FILE, facts)
        file = _remembered(store, facts)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = os.path.realpath(store).encode("utf-8", "backslashreplace").decode()
        _write(file, {"format": FORMAT, "id": facts["id"], "path": path})
    except ValueError as exc:
        raise StoreError(
            f"The format of {store} cannot be read ({exc}), so it is not trusted. `rearview verify "
            "--repair` writes it again.",
            slug="store-unreadable",
        ) from exc
    except OSError as exc:
        raise StoreError(
            f"Rearview cannot remember in {exc.filename or 'your folder for state'} that {store} is "
            f"trusted: {exc.strerror or exc}. Set XDG_STATE_HOME to a folder that can be written, or "
            f"{VARIABLE}=1 for the commands that should trust it.",
            slug="trust-unwritable",
        ) from exc
    return file


def is_trusted(store: Path, setting: str = "auto") -> bool:
    """Return True if code of the store may be run, and its pickles may be loaded.

    `setting` is the setting `trust`: "yes", "no", or "auto" to trust the stores that are remembered.
    """
    if setting != "auto":
        return setting == "yes"
    if _is_of_this_job(store):
        return True
    facts = _identity(store)
    if facts is None:
        if (store / FILE).exists() or not _was_made_here(store):
            return False
        # remembered, so that the next check need not examine the runs
        with contextlib.suppress(StoreError):
            remember(store)
        return True
    try:
        remembered_facts = read_facts(_remembered(store, facts), FORMAT)
    except (OSError, StoreError):
        return False
    return bool(remembered_facts.get("id") == facts["id"])


def check_trust(store: Path, setting: str, doing: str) -> None:
    """Raise if the store is not trusted, as `is_trusted` says; `doing` names the refused action, for the message."""
    if is_trusted(store, setting):
        return
    if setting == "no":
        raise StoreError(
            f"{doing} would run code and unpickle objects of {store}, and the setting trust forbids "
            f"that. Take `trust = false` out of its config.toml, or unset {VARIABLE}.",
            slug="untrusted",
        )
    raise StoreError(
        f"{doing} would run code and unpickle objects of {store}, which was not created here: it was "
        "copied or unpacked, or belongs to another user or machine. If you know where it comes from, "
        f"trust it with `rearview trust`, or set {VARIABLE}=1 for one command.",
        slug="untrusted",
    )


def check_links(store: Path, setting: str = "auto") -> None:
    """Raise if an untrusted store contains a link or a device, through which files outside could be changed."""
    if is_trusted(store, setting):
        return
    for path in _special_entries(store):
        raise StoreError(
            f"{path} is a link or a device, and {store} was not created here: reading or clearing it "
            "could change files outside the store. Remove it; or, if you know where the store comes "
            "from, trust it with `rearview trust`.",
            slug="untrusted-link",
        )


def _special_entries(store: Path) -> Iterator[Path]:
    """Yield the entries of a store that are neither files nor folders, except in the work trees of replays."""
    todo = [os.fspath(store)]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.path != os.path.join(store, _LINKED):  # noqa: PTH118
                        todo.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)


def _is_of_this_job(store: Path) -> bool:
    """Return True if the store is in the folder that HTCondor created for this job."""
    scratch = os.environ.get("_CONDOR_SCRATCH_DIR")
    return scratch is not None and Path(scratch).resolve() in store.resolve().parents


def _was_made_here(store: Path) -> bool:
    """Return True if an old store without an id was certainly created here.

    Every run in the store must name this machine. The folder of every run must have been created when the run
    started: in a copy of the store, the folders were created later.
    """
    try:
        status = store.stat()
        folders = [
            folder for folder in (store / _RUNS).iterdir() if (folder / "run.json").is_file()
        ]
        if status.st_uid != os.geteuid() or not folders:
            return False
        return all(_began_here(folder) for folder in folders)
    except (OSError, StoreError, TypeError, ValueError):
        return False


def _began_here(folder: Path) -> bool:
    """Return True if the run in `folder` started on this machine within seconds after the folder was created."""
    facts = read_facts(folder / "run.json", FORMAT)
    born = creation_time(folder) / 1e9
    delay = float(facts["started"]) - born if "started" in facts else float("inf")
    return bool(born) and facts.get("host") == socket.gethostname() and _EARLY <= delay < _LATE


def _identity(store: Path) -> dict[str, Any] | None:
    """Return the fields of `identity.json` in a store, or None if the file does not exist or is damaged."""
    try:
        if not stat.S_ISREG((store / FILE).lstat().st_mode):
            return None
        facts = read_facts(store / FILE, FORMAT)
    except (FileNotFoundError, DamagedError):
        return None
    return facts if _ID.fullmatch(str(facts.get("id", ""))) else None


def _remembered(store: Path, facts: Mapping[str, Any]) -> Path:
    """Return the path of the file in the state folder whose existence means that the store is trusted.

    `facts` are the fields of the `identity.json` of the store.
    """
    name = FolderIdentity.of(store).key(str(facts["id"]))
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    if not os.path.isabs(home):  # noqa: PTH117 - there is no home folder
        raise FileNotFoundError(2, "there is no home folder", "~/.local/state")
    return Path(home, "rearview", "stores", f"{name}.json")


def _write(file: Path, facts: Mapping[str, Any]) -> None:
    publish(file, add_check(encode(facts)), durable=False, opener=_open_for_owner)


def _open_for_owner(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
