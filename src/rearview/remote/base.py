"""The protocol of a remote, which has five methods, and the base class of most remotes.

`VerifiedRemote` implements the protocol with a few simple operations of a subclass: it sends a file under a temporary
name, compares size and checksum at the remote, renames the file to its key, and tries again after failures. `Retry`
says how many attempts to make and how long to wait between attempts. `is_permanent` says after which errors to give
up at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import re
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import xxhash

from rearview.errors import RearviewError, RemoteError, UsageError

HIDDEN = ".rv-"
"""Prefix of the names of transfers in progress. `list` omits names with this prefix, and keys must not have it."""

CHUNK = 4 << 20
"""Number of bytes to read or write at once."""

CHECKSUM = "xxh128"
"""Default kind of checksum: it detects damage, and is computed faster than a disk reads."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Key, size and checksum of one object at a remote."""

    key: str
    size: int
    checksum: str = ""
    """Checksum as `kind:hex`. `put` and `get` compute it from the file; `stat` returns the remote's own checksum, or
    an empty text if the remote has none."""


@runtime_checkable
class Remote(Protocol):
    """A place where bytes are stored under keys. Keys are relative paths with `/`.

    Every implementation promises:

    - after `put` returns, the remote holds exactly the bytes of `local`: size and checksum at the
      remote were compared; until then `key` keeps its old content;
    - `get` changes `local` only if the whole object arrived;
    - `put` and `get` retry with growing pauses before they raise `RemoteError`.
    """

    def put(self, local: Path, key: str) -> Stat:
        """Send the file `local` to `key`, replacing its old content in one step."""

    def get(self, key: str, local: Path) -> Stat:
        """Fetch `key` into the file `local`, replacing its old content in one step."""

    def stat(self, key: str) -> Stat | None:
        """Return size and checksum of `key`, or None if it does not exist."""

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """Return all keys that begin with `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Remove `key`, if it exists."""


def check_key(key: str) -> str:
    """Return `key`; raise if it points outside the remote's folder or a part of it begins with `HIDDEN`.

    >>> check_key("objects/ab/cd")
    'objects/ab/cd'
    """
    parts = key.split("/")
    if not key or any(part in {"", ".", ".."} or part.startswith(HIDDEN) for part in parts):
        raise UsageError(
            f"{key!r} is not a key of a remote. A key is a relative path such as 'saves/12/model.pt', "
            f"without empty parts, '.', '..' or names that begin with {HIDDEN!r}.",
            slug="remote-key",
        )
    return key


def scheme_of(target: str) -> str:
    """Return the scheme of a URL, or an empty string for a plain path.

    >>> scheme_of("s3://bucket/x"), scheme_of("/data/x")
    ('s3', '')
    """
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)(?:\+[a-z0-9]+)?://|([a-z0-9]+)::", target)
    return (match.group(1) or match.group(2)).lower() if match else ""


class Adler32:
    """zlib's adler32, which grid storage uses, with the interface of hashlib."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: bytes) -> None:
        """Add bytes to the checksum."""
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        """Return the checksum as eight hexadecimal digits."""
        return f"{self._value & 0xFFFFFFFF:08x}"


CHECKSUM_KINDS: dict[str, Callable[[], Any]] = {
    CHECKSUM: xxhash.xxh3_128,
    "adler32": Adler32,
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "sha256": hashlib.sha256,
}


def chunks(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the bytes of the file `path` from `offset` on, in pieces of at most `CHUNK` bytes."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while data := file.read(CHUNK):
            yield data


def checksum(path: Path, kind: str = CHECKSUM) -> str:
    """Return the checksum of the file at `path`, in the form `kind:hex`."""
    return checksum_of(chunks(path), kind)


def checksum_of(data: Iterable[bytes], kind: str = CHECKSUM) -> str:
    """Return the checksum of the concatenated pieces of `data`, in the form `kind:hex`.

    >>> checksum_of([b"Wiki", b"pedia"], "adler32")
    'adler32:11e60398'
    """
    digest = CHECKSUM_KINDS[kind]()
    for piece in data:
        digest.update(piece)
    return f"{kind}:{digest.hexdigest()}"


def etag(path: Path, piece: int) -> str:
    """Return the ETag that an S3 server gives to the file at `path` if it is sent in parts of `piece` bytes."""
    digests = []
    with path.open("rb") as file:
        while True:
            digest = hashlib.md5(usedforsecurity=False)
            remaining = piece
            while remaining and (data := file.read(min(CHUNK, remaining))):
                digest.update(data)
                remaining -= len(data)
            if remaining == piece:
                break
            digests.append(digest.digest())
    whole_digest = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f"{whole_digest}-{len(digests)}"


T = TypeVar("T")

PERMANENT_ERRORS = (PermissionError, NotADirectoryError, IsADirectoryError, ImportError, TypeError)
"""Types of errors after which `Retry` makes no further attempt."""
PERMANENT_ERROR_NUMBERS = {errno.EROFS, errno.ENAMETOOLONG, errno.EDQUOT}
"""Numbers (errno) of operating system errors after which `Retry` makes no further attempt."""

# not the global generator: the training program must get the same random numbers with and without Rearview
_RANDOM = random.Random()  # noqa: S311  only varies pauses: need not be secure


class DiffersError(OSError):
    """The bytes that arrived differ from the bytes that were sent."""


@dataclass(frozen=True, slots=True)
class Retry:
    """How often to try an action again, and after which pauses: `first` seconds, then doubled up to `limit`.

    Each pause is shortened at random by a share of up to `spread`, so that many jobs do not retry at once.

    >>> list(Retry(attempts=4, first=1.0, limit=3.0, spread=0.0).pauses())
    [1.0, 2.0, 3.0]
    """

    attempts: int = 6
    first: float = 0.5
    limit: float = 30.0
    spread: float = 0.25
    patience: float = float("inf")
    """Seconds since the first attempt after which no further attempt begins."""
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each attempt after the first."""
        for number in range(self.attempts - 1):
            pause = min(self.limit, self.first * 2**number)
            yield pause * (1.0 - self.spread * _RANDOM.random())

    def call(self, doing: str, action: Callable[[], T]) -> T:
        """Call `action` until an attempt succeeds, and return its result; raise `RemoteError` if all attempts fail.

        No further attempt follows an error that is permanent. Rearview's own errors are raised unchanged. `doing`
        describes the action in the message of the error: "Sending a to b".
        """
        began = self.clock()
        pauses = self.pauses()
        attempts = 0
        while True:
            attempts += 1
            try:
                return action()
            except RearviewError:
                raise
            except Exception as exc:
                pause = next(pauses, None)
                out_of_time = self.clock() - began + (pause or 0.0) > self.patience
                if pause is None or out_of_time or is_permanent(exc):
                    raise RemoteError(
                        f"{doing} did not succeed after {attempts} "
                        f"{'attempt' if attempts == 1 else 'attempts'}: "
                        f"{type(exc).__name__}: {exc}. {remedy(exc)}",
                        slug="remote-failed",
                    ) from exc
            self.sleep(pause)


def is_permanent(exc: Exception) -> bool:
    """Return True if another attempt would fail too after `exc`, such as a lack of permission."""
    if isinstance(exc, OSError) and exc.errno in PERMANENT_ERROR_NUMBERS:
        return True
    return isinstance(exc, PERMANENT_ERRORS)


def remedy(exc: Exception) -> str:
    """Return a sentence that tells the user what to do about `exc`."""
    if isinstance(exc, PermissionError):
        return "Check the credentials and that the target may be written to."
    if isinstance(exc, ImportError):
        return (
            "Install the library for this kind of remote, for example `pip install 'rearview[s3]'`."
        )
    if isinstance(exc, DiffersError):
        return "The bytes change on the way or while they are sent; try another target."
    if isinstance(exc, OSError) and exc.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "Free some space there, or keep fewer checkpoints."
    return "Check that the target can be reached from here, then try again."


class VerifiedRemote(ABC):
    """A remote that keeps the promises of `Remote` with a few simple operations of a subclass.

    `put` sends the file to a temporary key (`staged`). This key is derived from the content of the file, so that
    a later attempt, even in another process, finds and continues the transfer. The file is renamed to its key
    only after size and checksum at the remote were compared; until then the key keeps its old bytes.
    """

    name = "remote"

    def __init__(self, retry: Retry | None = None) -> None:
        self.retry = retry or Retry()

    @abstractmethod
    def _send(self, local: Path, staged: str) -> None:
        """Send the file `local` to the key `staged`, continuing an interrupted transfer if possible."""

    @abstractmethod
    def _read(self, key: str, offset: int) -> Iterable[bytes]:
        """Yield the bytes of `key` from `offset` on."""

    @abstractmethod
    def _publish(self, staged: str, key: str) -> None:
        """Rename `staged` to `key`, replacing the old content; at every instant the old or new content is intact."""

    @abstractmethod
    def _size(self, key: str) -> int | None:
        """Return the size of `key`, or None if it does not exist."""

    @abstractmethod
    def _keys(self, prefix: str) -> Iterable[str]:
        """Yield the keys that begin with `prefix`, including the keys of transfers in progress."""

    @abstractmethod
    def _remove(self, key: str) -> None:
        """Remove `key`, if it exists."""

    def _checksum(self, key: str) -> str:
        """Return the checksum of `key` as `kind:hex` if the remote can tell it without sending the bytes, else ""."""
        del key
        return ""

    def _agrees(self, stated: str, local: Path) -> bool:
        """Return True if the file `local` has the checksum `stated` (`kind:hex`); False if the kind is unknown."""
        kind, _, _ = stated.partition(":")
        return kind in CHECKSUM_KINDS and checksum(local, kind) == stated

    def put(self, local: Path, key: str) -> Stat:
        """Send the file `local` to `key`, replacing its old content in one step."""
        check_key(key)
        local = Path(local)
        try:
            size, digest = local.stat().st_size, checksum(local)
        except OSError as exc:
            raise UsageError(
                f"{local} cannot be sent: {exc.strerror or exc}. Give a file that can be read.",
                slug="remote-local",
            ) from exc
        folder, _, name = key.rpartition("/")
        staged = f"{folder + '/' if folder else ''}{HIDDEN}{digest[-16:]}-{name}"

        def attempt() -> Stat:
            self._send(local, staged)
            self._compare(staged, local, size, digest)
            self._publish(staged, key)
            if (stat := self._size(key)) != size:
                raise DiffersError(f"{key} has {stat} bytes after the put; {size} were sent")
            return Stat(key, size, digest)

        try:
            return self.retry.call(f"Sending {local} to {self}/{key}", attempt)
        except RemoteError:
            with contextlib.suppress(Exception):
                self._remove(staged)
            raise

    def get(self, key: str, local: Path) -> Stat:
        """Fetch `key` into the file `local`, replacing its old content in one step."""
        check_key(key)
        local = Path(local)
        local.parent.mkdir(parents=True, exist_ok=True)
        parts: set[Path] = set()
        received_checksums: set[str] = set()

        def attempt() -> Stat:
            size = self._size(key)
            if size is None:
                raise RemoteError(
                    f"{key} does not exist at {self}. List its keys before you fetch one.",
                    slug="remote-missing",
                )
            stated = self._checksum(key)
            # if the remote tells no checksum, a part that an earlier process fetched may be of older content: do
            # not continue that part
            tag = f"{stated[-12:].replace(':', '-')}-{size}" if stated else f"{os.getpid()}-{size}"
            part = local.with_name(f"{HIDDEN}{tag}-{local.name}")
            parts.add(part)
            self._fetch(key, part, size)
            digest = checksum(part)
            if stated and not self._agrees(stated, part) and digest not in received_checksums:
                # the remote's checksum may be of an unknown kind: accept bytes that arrive equal twice
                received_checksums.add(digest)
                part.unlink()
                raise DiffersError(f"{key} arrived with {digest}; the remote states {stated}")
            part.replace(local)
            return Stat(key, size, digest)

        try:
            return self.retry.call(f"Fetching {self}/{key} to {local}", attempt)
        except BaseException:
            for part in parts:
                if not self._checksum_quietly(key):
                    part.unlink(missing_ok=True)
            raise

    def stat(self, key: str) -> Stat | None:
        """Return size and checksum of `key`, or None if it does not exist."""
        check_key(key)

        def attempt() -> Stat | None:
            size = self._size(key)
            return None if size is None else Stat(key, size, self._checksum(key))

        return self.retry.call(f"Asking {self} for {key}", attempt)

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """Return all keys that begin with `prefix`, sorted."""
        return tuple(key for key in self._all(prefix) if not _hidden(key))

    def delete(self, key: str) -> None:
        """Remove `key`, if it exists."""
        check_key(key)
        self.retry.call(f"Removing {key} from {self}", lambda: self._remove(key))

    def sweep(self, prefix: str = "") -> tuple[str, ...]:
        """Remove the incomplete objects that interrupted transfers left under `prefix`; return the removed keys.

        Call this only for a prefix to which no process is sending.
        """
        hidden_keys = tuple(key for key in self._all(prefix) if _hidden(key))
        for key in hidden_keys:
            self.retry.call(f"Removing {key} from {self}", lambda key=key: self._remove(key))  # type: ignore[misc]
        return hidden_keys

    def __str__(self) -> str:
        return self.name

    def _all(self, prefix: str) -> Iterator[str]:
        doing = f"Listing {self}/{prefix}"
        yield from sorted(self.retry.call(doing, lambda: set(self._keys(prefix))))

    def _fetch(self, key: str, part: Path, size: int) -> None:
        """Fetch `key`, which has `size` bytes, into the file `part`; continue after the bytes that `part` has."""
        received_size = part.stat().st_size if part.exists() else 0
        if received_size > size:
            part.unlink()
            received_size = 0
        with part.open("ab") as file:
            if received_size < size:
                for data in self._read(key, received_size):
                    file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if (received_size := part.stat().st_size) != size:
            if received_size > size:
                part.unlink()
            raise DiffersError(f"{received_size} bytes of {key} arrived; it has {size}")

    def _compare(self, staged: str, local: Path, size: int, digest: str) -> None:
        staged_size = self._size(staged)
        if staged_size == size:
            stated = self._checksum(staged)
            if stated and self._agrees(stated, local):
                return
            # the remote's checksum is missing, of an unknown kind or different: read the bytes back
            received = checksum_of(self._read(staged, 0) if size else ())
            if received == digest:
                return
            content = f"{received} ({size} bytes)"
        else:
            content = f"{staged_size} bytes"
        self._remove(staged)
        raise DiffersError(f"the remote holds {content}; {digest} ({size} bytes) was sent")

    def _checksum_quietly(self, key: str) -> str:
        try:
            return self._checksum(key)
        except Exception:
            return ""


def _hidden(key: str) -> bool:
    return any(part.startswith(HIDDEN) for part in key.split("/"))
