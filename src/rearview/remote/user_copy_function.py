"""A remote that sends and fetches files with a function of the user: copy(source, destination)."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rearview.errors import RemoteError
from rearview.remote import base
from rearview.remote.base import DiffersError, Retry, Stat, check_key

FORMAT = 1


class FunctionRemote:
    """Stores objects in numbered slots `<target>.0`, `<target>.1`… with a copy function of the user.

    The copy function can neither list nor delete, so an index at the target holds the slot, size and checksum of
    each key. Two files hold versions of the index and are written in turn, so that one file is intact if the
    process is killed while it writes the other. A slot is used again only after its key is gone from the index.
    Every object that is sent is fetched again and compared.
    """

    def __init__(
        self,
        copy: Callable[..., Any],
        target: str | os.PathLike[str],
        *,
        kwargs: Mapping[str, Any] | None = None,
        retry: Retry | None = None,
    ) -> None:
        self.copy, self.target = copy, target
        self.kwargs = dict(kwargs or {})
        self.retry = retry or Retry()

    def __str__(self) -> str:
        return f"{getattr(self.copy, '__name__', 'function')}:{os.fspath(self.target)}"

    def put(self, local: Path, key: str) -> Stat:
        """Send the file `local` to `key`, replacing its old content in one step."""
        check_key(key)
        size, digest = Path(local).stat().st_size, base.checksum(Path(local))
        index = self._index()
        used = {entry[0] for entry in index["keys"].values()}
        slot = next(number for number in range(len(used) + 1) if number not in used)
        self._copy_out(Path(local), str(slot), digest)
        self._write_index(index, {**index["keys"], key: [slot, size, digest]})
        return Stat(key, size, digest)

    def get(self, key: str, local: Path) -> Stat:
        """Fetch `key` into the file `local`, replacing its old content in one step."""
        entry = self._index()["keys"].get(check_key(key))
        if entry is None:
            raise RemoteError(
                f"{key} does not exist at {self}. List its keys before you fetch one.",
                slug="remote-missing",
            )
        slot, size, digest = entry
        local = Path(local)
        local.parent.mkdir(parents=True, exist_ok=True)

        def attempt() -> None:
            with _scratch(local.parent) as folder:
                part = Path(folder, local.name)
                self.copy(self._target_of(str(slot)), part, **self.kwargs)
                if base.checksum(part) != digest:
                    raise DiffersError(f"{key} did not arrive as it was sent ({digest})")
                part.replace(local)

        self.retry.call(f"Fetching {self}/{key} to {local}", attempt)
        return Stat(key, size, digest)

    def stat(self, key: str) -> Stat | None:
        """Return size and checksum of `key`, or None if it does not exist."""
        entry = self._index()["keys"].get(check_key(key))
        return None if entry is None else Stat(key, entry[1], entry[2])

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """Return all keys that begin with `prefix`, sorted."""
        return tuple(sorted(key for key in self._index()["keys"] if key.startswith(prefix)))

    def delete(self, key: str) -> None:
        """Remove `key` from the index, if it exists; a later `put` may use its slot."""
        index = self._index()
        if check_key(key) in index["keys"]:
            self._write_index(index, {k: v for k, v in index["keys"].items() if k != key})

    def _target_of(self, suffix: str) -> Any:
        name = f"{os.fspath(self.target)}.{suffix}"
        return Path(name) if isinstance(self.target, os.PathLike) else name

    def _copy_out(self, local: Path, suffix: str, digest: str) -> None:
        def attempt() -> None:
            self.copy(local, self._target_of(suffix), **self.kwargs)
            with _scratch() as folder:
                returned_file = Path(folder, "back")
                self.copy(self._target_of(suffix), returned_file, **self.kwargs)
                if not returned_file.is_file():
                    raise DiffersError(
                        "the function brought nothing back when called with (target, path); it "
                        "must copy in both directions"
                    )
                if (received := base.checksum(returned_file)) != digest:
                    raise DiffersError(f"{digest} was sent and {received} came back")

        self.retry.call(f"Sending {local} to {self}.{suffix}", attempt)

    def _write_index(self, old: dict[str, Any], keys: dict[str, Any]) -> None:
        counter = old["counter"] + 1
        body = json.dumps({"format": FORMAT, "counter": counter, "keys": keys}, sort_keys=True)
        text = f"{base.checksum_of([body.encode()])}\n{body}".encode()
        with _scratch() as folder:
            file = Path(folder, "index")
            file.write_bytes(text)
            self._copy_out(file, f"index.{counter % 2}", base.checksum(file))

    def _index(self) -> dict[str, Any]:
        """Return the newest intact index, or an empty index if the target has none.

        Raise `RemoteError` if the index files cannot be fetched because the target cannot be reached.
        """
        indexes, failure = self._read_indexes()
        if failure is not None:
            self._check_reachable(failure)
            indexes, _ = self._read_indexes()
        return max(indexes, key=lambda index: index["counter"], default={"counter": 0, "keys": {}})

    def _read_indexes(self) -> tuple[tuple[dict[str, Any], ...], Exception | None]:
        indexes = []
        failure: Exception | None = None
        for number in (0, 1):
            try:
                text = self._fetch(f"index.{number}")
            except FileNotFoundError:
                continue
            except Exception as exc:
                failure = exc
                continue
            if text is not None and (index := _parse(text)) is not None:
                indexes.append(index)
        return tuple(indexes), failure

    def _fetch(self, suffix: str) -> bytes | None:
        with _scratch() as folder:
            file = Path(folder, "index")
            self.copy(self._target_of(suffix), file, **self.kwargs)
            return file.read_bytes() if file.is_file() else None

    def _check_reachable(self, failure: Exception) -> None:
        # fetching the index failed: it is missing, or the target cannot be reached. If a test object can be sent and
        # fetched, the target can be reached
        with _scratch() as folder:
            file = Path(folder, "test")
            file.write_bytes(b"rearview\n")
            try:
                self._copy_out(file, "probe", base.checksum(file))
            except RemoteError as exc:
                raise RemoteError(
                    f"The index of {self} cannot be read ({type(failure).__name__}: {failure}), and "
                    f"a test copy failed too. {exc}",
                    slug="remote-failed",
                ) from exc


def _parse(text: bytes) -> dict[str, Any] | None:
    digest, _, body = text.partition(b"\n")
    if base.checksum_of([body]).encode() != digest:
        return None
    index: dict[str, Any] = json.loads(body)
    return index


def _scratch(folder: Path | None = None) -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix=".rv-", dir=folder)
