"""The size and checksums of a file: what both ends must agree on."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash

CHUNK = 4 << 20

CHECKSUM = "xxh128"
"""The kind that is ours: it detects damage at more than the speed of a disk."""


class Adler32:
    """zlib's adler32 in the shape of hashlib's objects; grid storage speaks it."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: bytes) -> None:
        """Take in more bytes."""
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        """Return eight hexadecimal digits."""
        return f"{self._value & 0xFFFFFFFF:08x}"


KINDS: dict[str, Callable[[], Any]] = {
    CHECKSUM: xxhash.xxh3_128,
    "adler32": Adler32,
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "sha256": hashlib.sha256,
}


def chunks(path: Path, offset: int = 0) -> Iterator[bytes]:
    """Yield the bytes of `path` from `offset` on."""
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while data := file.read(CHUNK):
            yield data


def checksum(path: Path, kind: str = CHECKSUM) -> str:
    """Return `kind:hex` for the file at `path`."""
    return checksum_of(chunks(path), kind)


def checksum_of(data: Iterable[bytes], kind: str = CHECKSUM) -> str:
    """Return `kind:hex` for bytes that arrive in pieces.

    >>> checksum_of([b"Wiki", b"pedia"], "adler32")
    'adler32:11e60398'
    """
    digest = KINDS[kind]()
    for piece in data:
        digest.update(piece)
    return f"{kind}:{digest.hexdigest()}"


def etag(path: Path, piece: int) -> str:
    """Return the tag an S3 server gives an object sent in parts of `piece` bytes."""
    digests = []
    with path.open("rb") as file:
        while True:
            digest = hashlib.md5(usedforsecurity=False)
            left = piece
            while left and (data := file.read(min(CHUNK, left))):
                digest.update(data)
                left -= len(data)
            if left == piece:
                break
            digests.append(digest.digest())
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    return f"{whole}-{len(digests)}"
