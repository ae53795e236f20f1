"""The care every transfer takes: staged, compared at the far end, published, tried again."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from rearview.errors import RemoteError, UsageError
from rearview.remote import content
from rearview.remote.base import HIDDEN, Stat, check_key
from rearview.remote.retry import DiffersError, Retry

T = TypeVar("T")


class CarefulRemote(ABC):
    """A remote made of simple operations; the order they are called in gives the promises.

    A put goes to a staged name that is derived from the content, so that a later attempt finds
    and continues the same transfer, even from another process. Only after the far end agrees on
    size and checksum is it renamed to its key; until then the key keeps its old bytes.
    """

    name = "remote"

    def __init__(self, retry: Retry | None = None) -> None:
        self.retry = retry or Retry()

    # what an implementation says

    @abstractmethod
    def _send(self, local: Path, staged: str) -> None:
        """Bring `local` to `staged`, continuing what is there where that can be done."""

    @abstractmethod
    def _read(self, key: str, offset: int) -> Iterable[bytes]:
        """Yield the bytes of `key` from `offset` on."""

    @abstractmethod
    def _publish(self, staged: str, key: str) -> None:
        """Rename `staged` to `key`, replacing what is there; a good copy exists at every instant."""

    @abstractmethod
    def _size(self, key: str) -> int | None:
        """Return the size of `key`, or None if it is not there."""

    @abstractmethod
    def _keys(self, prefix: str) -> Iterable[str]:
        """Yield the keys that begin with `prefix`, hidden ones too."""

    @abstractmethod
    def _remove(self, key: str) -> None:
        """Remove `key` if it is there."""

    def _checksum(self, key: str) -> str:
        """Return `kind:hex` as the far end states it without sending the bytes, or nothing."""
        del key
        return ""

    def _agrees(self, stated: str, local: Path) -> bool:
        """Say whether the far end's checksum is that of `local`."""
        kind, _, _ = stated.partition(":")
        return kind in content.KINDS and content.checksum(local, kind) == stated

    # the protocol

    def put(self, local: Path, key: str) -> Stat:
        """Bring the file `local` to `key`, replacing in one step what was there."""
        check_key(key)
        local = Path(local)
        try:
            size, digest = local.stat().st_size, content.checksum(local)
        except OSError as exc:
            raise UsageError(
                f"{local} cannot be sent: {exc.strerror or exc}. Give a file that can be read.",
                slug="remote-local",
            ) from exc
        folder, _, name = key.rpartition("/")
        staged = f"{folder + '/' if folder else ''}{HIDDEN}{digest[-16:]}-{name}"

        def once() -> Stat:
            self._send(local, staged)
            self._compare(staged, local, size, digest)
            self._publish(staged, key)
            if (found := self._size(key)) != size:
                raise DiffersError(f"{key} has {found} bytes after the put; {size} were sent")
            return Stat(key, size, digest)

        try:
            return self.retry.call(f"Bringing {local} to {self}/{key}", once)
        except RemoteError:
            with contextlib.suppress(Exception):
                self._remove(staged)
            raise

    def get(self, key: str, local: Path) -> Stat:
        """Bring `key` to the file `local`, replacing in one step what was there."""
        check_key(key)
        local = Path(local)
        local.parent.mkdir(parents=True, exist_ok=True)
        parts: set[Path] = set()
        seen: set[str] = set()

        def once() -> Stat:
            size = self._size(key)
            if size is None:
                raise RemoteError(
                    f"{key} is not at {self}. See what is there before asking for it.",
                    slug="remote-missing",
                )
            stated = self._checksum(key)
            # only a stated checksum tells that the bytes of an earlier process belong to this one
            tag = f"{stated[-12:].replace(':', '-')}-{size}" if stated else f"{os.getpid()}-{size}"
            part = local.with_name(f"{HIDDEN}{tag}-{local.name}")
            parts.add(part)
            self._fetch(key, part, size)
            digest = content.checksum(part)
            if stated and not self._agrees(stated, part) and digest not in seen:
                # a checksum of a kind that we cannot compute is overruled by two equal readings
                seen.add(digest)
                part.unlink()
                raise DiffersError(f"{key} arrived with {digest}; the far end states {stated}")
            part.replace(local)
            return Stat(key, size, digest)

        try:
            return self.retry.call(f"Bringing {self}/{key} to {local}", once)
        except BaseException:
            for part in parts:
                if not self._checksum_quietly(key):
                    part.unlink(missing_ok=True)
            raise

    def stat(self, key: str) -> Stat | None:
        """Return what is known of `key`, or None if it is not there."""
        check_key(key)

        def once() -> Stat | None:
            size = self._size(key)
            return None if size is None else Stat(key, size, self._checksum(key))

        return self.retry.call(f"Asking {self} for {key}", once)

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """Return all keys that begin with `prefix`, sorted."""
        return tuple(key for key in self._all(prefix) if not _hidden(key))

    def delete(self, key: str) -> None:
        """Remove `key`; one that is not there is no error."""
        check_key(key)
        self.retry.call(f"Removing {key} from {self}", lambda: self._remove(key))

    def sweep(self, prefix: str = "") -> tuple[str, ...]:
        """Remove what killed transfers left under `prefix`; return what was removed.

        Only for a prefix that no other process sends to at this moment.
        """
        found = tuple(key for key in self._all(prefix) if _hidden(key))
        for key in found:
            self.retry.call(f"Removing {key} from {self}", lambda key=key: self._remove(key))  # type: ignore[misc]
        return found

    def __str__(self) -> str:
        return self.name

    # how

    def _all(self, prefix: str) -> Iterator[str]:
        what = f"Listing {self}/{prefix}"
        yield from sorted(self.retry.call(what, lambda: set(self._keys(prefix))))

    def _fetch(self, key: str, part: Path, size: int) -> None:
        """Bring `key` to `part`, continuing what is there."""
        have = part.stat().st_size if part.exists() else 0
        if have > size:
            part.unlink()
            have = 0
        with part.open("ab") as file:
            if have < size:
                for data in self._read(key, have):
                    file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if (have := part.stat().st_size) != size:
            if have > size:
                part.unlink()
            raise DiffersError(f"{have} bytes of {key} arrived; it has {size}")

    def _compare(self, staged: str, local: Path, size: int, digest: str) -> None:
        found = self._size(staged)
        if found == size:
            stated = self._checksum(staged)
            if stated and self._agrees(stated, local):
                return
            # no checksum, or one we cannot compute ourselves: read back what is there
            there = content.checksum_of(self._read(staged, 0) if size else ())
            if there == digest:
                return
            found_text = f"{there} ({size} bytes)"
        else:
            found_text = f"{found} bytes"
        self._remove(staged)
        raise DiffersError(f"the far end holds {found_text}; sent were {digest} ({size} bytes)")

    def _checksum_quietly(self, key: str) -> str:
        try:
            return self._checksum(key)
        except Exception:
            return ""


def _hidden(key: str) -> bool:
    return any(part.startswith(HIDDEN) for part in key.split("/"))
