"""Whether a store was made here: only then is what is in it run or unpickled without being asked.

A store carries a random id in `identity.json`. Which stores were made here, or were trusted once, is
remembered outside of them, in the user's own folder for state::

    $XDG_STATE_HOME/rearview/stores/<key>.json     (~/.local/state/rearview/… if that is not set)

The key is a hash of the id, of the inode of the store's folder, and of the time at which that was made,
to the nanosecond. No archive and no copy brings these along, and nobody else can write there. So a
store that is renamed or moved on its disk stays trusted, and one that was copied, unpacked or cloned is
not, whatever is in it.
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

from rearview.durable_files import publish
from rearview.errors import DamagedError, StoreError
from rearview.model.checksum import add_check
from rearview.store.json_lines import encode, read_facts

FILE = "identity.json"
FORMAT = 2
"""Of `identity.json` and of what is remembered: facts with a checksum, as those of runs."""
VARIABLE = "REARVIEW_TRUST"
_ID = re.compile("[0-9a-f]{32}")
_RUNS = "runs"
_LINKED = "replays"
"""Folder of a store in which replays lay out trees, with links to their inputs."""
_EARLY, _LATE = 0.0, 30.0
"""Seconds from the making of a run's folder to the start that the run tells, at most."""
_STATX = struct.Struct("<I76xqI")
"""Of what `statx` returns: which fields are given, and the time of birth."""
_BIRTH = 0x800


@dataclass(frozen=True, slots=True)
class FolderIdentity:
    """What tells a folder from every copy of it."""

    path: str
    inode: int
    born: int
    """Nanoseconds since 1970; 0 where the file system does not tell."""

    @classmethod
    def of(cls, folder: Path) -> FolderIdentity:
        """Return the place of a folder that is there, following links to it."""
        real = os.path.realpath(folder)
        return cls(real, os.stat(real).st_ino, birth(Path(real)))  # noqa: PTH116

    def key(self, store: str) -> str:
        """Return the key of the store with the id `store` in this place, and in no other."""
        # where it is not known when the folder was made, it must stay where it is
        what = (store, str(self.inode), str(self.born), "" if self.born else self.path)
        return hashlib.sha256("\0".join(what).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def birth(folder: Path) -> int:
    """Return when a folder was made, in nanoseconds; 0 where the file system does not tell."""
    buffer = ctypes.create_string_buffer(256)
    try:
        call = ctypes.CDLL(None, use_errno=True).statx
    except (AttributeError, OSError):
        return 0
    if call(-100, os.fsencode(folder), 0, _BIRTH, buffer):
        return 0
    given, seconds, nanoseconds = _STATX.unpack_from(buffer)
    return seconds * 10**9 + nanoseconds if given & _BIRTH else 0


def begin(store: Path, layout: int) -> None:
    """Give a new store its id, and remember that it was made here, as far as that can be."""
    _write(store / FILE, {"format": FORMAT, "id": os.urandom(16).hex(), "layout": layout})
    with contextlib.suppress(StoreError):
        remember(store)


def note_layout(store: Path, layout: int) -> None:
    """Keep the format of the store beside its id too, where damage to either is seen."""
    facts = _identity(store)
    if facts is not None:
        _write(store / FILE, {**facts, "layout": layout})


def layout_of(store: Path) -> int | None:
    """Return the format of the store as it is kept beside its id; None if it is not."""
    number = (_identity(store) or {}).get("layout")
    return number if isinstance(number, int) else None


def remember(store: Path) -> Path:
    """Remember that the store is trusted where it is now; return where that is kept."""
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
            f"{store} does not say its format ({exc}), so it is not trusted. `rearview verify "
            "--repair` writes it anew.",
            slug="store-unreadable",
        ) from exc
    except OSError as exc:
        raise StoreError(
            f"That {store} is trusted cannot be kept in {exc.filename or 'your folder for state'}: "
            f"{exc.strerror or exc}. Set XDG_STATE_HOME to a folder that can be written, or "
            f"{VARIABLE}=1 for the commands that are to trust it.",
            slug="trust-unwritable",
        ) from exc
    return file


def is_trusted(store: Path, setting: str = "auto") -> bool:
    """Return True if what is in the store may be run.

    `setting` is that of the user: "yes", "no", or "auto" for stores that were made here.
    """
    if setting != "auto":
        return setting == "yes"
    if _is_of_this_job(store):
        return True
    facts = _identity(store)
    if facts is None:
        if (store / FILE).exists() or not _was_made_here(store):
            return False
        with contextlib.suppress(StoreError):  # so that it is known from now on
            remember(store)
        return True
    try:
        known = read_facts(_remembered(store, facts), FORMAT)
    except (OSError, StoreError):
        return False
    return bool(known.get("id") == facts["id"])


def check_trust(store: Path, setting: str, doing: str) -> None:
    """Refuse to run anything of a store that is not trusted."""
    if is_trusted(store, setting):
        return
    if setting == "no":
        raise StoreError(
            f"{doing} would run code and unpickle objects of {store}, and the setting trust forbids "
            f"that. Take `trust = false` out of its config.toml, or unset {VARIABLE}.",
            slug="untrusted",
        )
    raise StoreError(
        f"{doing} would run code and unpickle objects of {store}, which was not made here: it was "
        "copied or unpacked, or is that of another user or machine. If you know where it comes from, "
        f"say so once with `rearview trust`, or set {VARIABLE}=1 for one command.",
        slug="untrusted",
    )


def check_links(store: Path, setting: str = "auto") -> None:
    """Refuse a store that is not trusted and leads elsewhere, by a link or a device."""
    if is_trusted(store, setting):
        return
    for path in _odd(store):
        raise StoreError(
            f"{path} is a link or a device, and {store} was not made here: reading or clearing it "
            "could touch files that are none of the store's. Remove it; or, if you know where the "
            "store comes from, say so once with `rearview trust`.",
            slug="untrusted-link",
        )


def _odd(store: Path) -> Iterator[Path]:
    """Yield what in a store is neither a file nor a folder."""
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
    """Return True in the folder that HTCondor has made for a job, with the files it was sent with."""
    scratch = os.environ.get("_CONDOR_SCRATCH_DIR")
    return scratch is not None and Path(scratch).resolve() in store.resolve().parents


def _was_made_here(store: Path) -> bool:
    """Return True if a store without an id, from before there were any, was surely made here.

    Every run in it must have told this machine, and its folder must have been made when it started:
    that of a copy was made when it was copied.
    """
    try:
        about = store.stat()
        folders = [one for one in (store / _RUNS).iterdir() if (one / "run.json").is_file()]
        if about.st_uid != os.geteuid() or not folders:
            return False
        return all(_began_here(folder) for folder in folders)
    except (OSError, StoreError, TypeError, ValueError):
        return False


def _began_here(folder: Path) -> bool:
    facts = read_facts(folder / "run.json", FORMAT)
    born = birth(folder) / 1e9
    took = float(facts["started"]) - born if "started" in facts else float("inf")
    return bool(born) and facts.get("host") == socket.gethostname() and _EARLY <= took < _LATE


def _identity(store: Path) -> dict[str, Any] | None:
    try:
        if not stat.S_ISREG((store / FILE).lstat().st_mode):
            return None
        facts = read_facts(store / FILE, FORMAT)
    except (FileNotFoundError, DamagedError):
        return None
    return facts if _ID.fullmatch(str(facts.get("id", ""))) else None


def _remembered(store: Path, facts: Mapping[str, Any]) -> Path:
    """Return the file that is there if the store is trusted."""
    name = FolderIdentity.of(store).key(str(facts["id"]))
    home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111
    if not os.path.isabs(home):  # noqa: PTH117 - without a home there is none
        raise FileNotFoundError(2, "there is no home folder", "~/.local/state")
    return Path(home, "rearview", "stores", f"{name}.json")


def _write(file: Path, facts: Mapping[str, Any]) -> None:
    publish(file, add_check(encode(facts)), durable=False, opener=_open_for_owner)


def _open_for_owner(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
