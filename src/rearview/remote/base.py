"""The protocol of a remote: five methods, and the keys and results that they take and return."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rearview.errors import UsageError

HIDDEN = ".rv-"
"""Prefix of transfers in progress; listings hide them and keys must not begin so."""


@dataclass(frozen=True, slots=True)
class Stat:
    """One object at a remote."""

    key: str
    size: int
    checksum: str = ""
    """`kind:hex` as the remote states it (or as verified by `put` and `get`), or empty."""


@runtime_checkable
class Remote(Protocol):
    """Another place for bytes. Keys are relative paths with `/`.

    Every implementation promises:

    - after `put` returns, the remote holds exactly the bytes of `local`: size and checksum were
      compared there; until then `key` keeps its old content;
    - `get` changes `local` only if the whole object arrived;
    - both retry with growing pauses before they raise `RemoteError`.
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
    """Return `key`; raise if it would leave the remote's folder or be hidden in it.

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
