"""Small parts of one checkpoint in one file, so that 10^5 checkpoints do not make 10^7 files.

::

    RVPACK01                      8 bytes
    slice, slice, …               each at a multiple of 64, so that any dtype can be mapped
    body                          a copy of the manifest, from which it can be rebuilt
    footer                        offset and length of the body (two u64, little endian), its
                                  BLAKE3 hash, RVPACKED

Slices carry no header: the manifest says what stands where and under which hash.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from blake3 import blake3

from rearview.model import ObjectRef
from rearview.store.direct import Sink

MAGIC = b"RVPACK01"
END = b"RVPACKED"
SLICE = 64
"""Alignment of slices: a cache line, and more than any dtype asks for."""
GATHER = 1 << 20
"""Bytes of slices that are handed on at once."""
_ZEROS = bytes(SLICE)
_FOOTER = struct.Struct("<QQ32s8s")


class PackWriter:
    """Slices on their way into one pack; equal content within it is kept once."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self._sink = sink
        self._at = len(MAGIC)
        self._seen: dict[str, ObjectRef] = {}
        self._held: list[memoryview | bytes] = [MAGIC]
        self._pending = 0

    def add(self, oid: str, view: memoryview) -> ObjectRef:
        """Append `view`, whose hash is `oid`, and return where it stands."""
        ref = self._seen.get(oid)
        if ref is None:
            self._append(view)
            size = len(view)
            ref = self._seen[oid] = ObjectRef(oid, size, self.name, self._at - size)
        return ref

    def close(self, body: bytes) -> None:
        """End the pack with a copy of its checkpoint's manifest."""
        self._append(memoryview(body))
        check = blake3(body).digest()
        self._held.append(_FOOTER.pack(self._at - len(body), len(body), check, END))
        self._flush()

    def _append(self, view: memoryview) -> None:
        pad = -self._at % SLICE
        self._held += (_ZEROS[:pad], view)
        self._at += pad + len(view)
        self._pending += pad + len(view)
        if self._pending >= GATHER:
            self._flush()

    def _flush(self) -> None:
        self._sink.gather(self._held)
        self._held = []
        self._pending = 0


def body_of(path: Path) -> bytes | None:
    """Return the manifest kept in the pack at `path`, or None if the pack is not whole."""
    try:
        with path.open("rb") as file:
            file.seek(-_FOOTER.size, os.SEEK_END)
            at, length, check, end = _FOOTER.unpack(file.read(_FOOTER.size))
            if end != END or at + length + _FOOTER.size != file.tell():
                return None
            file.seek(at)
            body = file.read(length)
            return body if blake3(body).digest() == check else None
    except (OSError, struct.error):
        return None
