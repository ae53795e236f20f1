"""The protocol of a remote: five methods, and the keys and results that they take and return."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rearview.errors import UsageError

HIDDEN = ".rv-"
"""Names that begin so are transfers under way; no listing shows them and no key may use them."""


@dataclass(frozen=True, slots=True)
class Stat:
    """One object at a remote."""

    key: str
    size: int
    checksum: str = ""
    """`kind:hex` as the far end states it (or as verified by `put` and `get`), or empty."""


@runtime_checkable
class Remote(Protocol):
    """Another place for bytes. Keys are relative paths with `/`.

    What every implementation promises:

    - after `put` returns, the far end holds exactly the bytes of `local`: size and checksum
      were compared there; before that, `key` still holds what it held;
    - `get` leaves `local` as it was unless the whole object arrived;
    - both try again with growing pauses before they raise `RemoteError`.
    """

    def put(self, local: Path, key: str) -> Stat:
        """Bring the file `local` to `key`, replacing in one step what was there."""

    def get(self, key: str, local: Path) -> Stat:
        """Bring `key` to the file `local`, replacing in one step what was there."""

    def stat(self, key: str) -> Stat | None:
        """Return what is known of `key`, or None if it is not there."""

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """Return all keys that begin with `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Remove `key`; one that is not there is no error."""


def check_key(key: str) -> str:
    """Return `key` if it is one; refuse what would leave the remote's folder or hide in it.

    >>> check_key("objects/ab/cd")
    'objects/ab/cd'
    """
    parts = key.split("/")
    if not key or any(part in {"", ".", ".."} or part.startswith(HIDDEN) for part in parts):
        raise UsageError(
            f"{key!r} is no key of a remote. A key is a relative path such as 'saves/12/model.pt', "
            f"without empty parts, '.', '..' or names that begin with {HIDDEN!r}.",
            slug="remote-key",
        )
    return key


def scheme_of(target: str) -> str:
    """Return the scheme of a URL, or nothing for a plain path.

    >>> scheme_of("s3://bucket/x"), scheme_of("/data/x")
    ('s3', '')
    """
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)(?:\+[a-z0-9]+)?://|([a-z0-9]+)::", target)
    return (found.group(1) or found.group(2)).lower() if found else ""
