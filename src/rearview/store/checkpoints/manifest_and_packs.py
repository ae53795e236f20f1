"""The formats of a checkpoint on disk: its manifest, and the pack of its small parts.

A part is one piece of the bytes of a checkpoint, such as its skeleton or one buffer. A manifest is one JSON
document, `{"format": 1, "check": …, "body": {…}}`; `check` is the hash of the body's bytes. If a checkpoint has
many parts, the table of its parts is in the pack, and the body only says where the table is. So manifests are
small, and many checkpoints can be listed quickly.

A pack holds the small parts of one checkpoint, so that not every small part is a file::

    RVPACK01                      8 bytes
    slice, slice, …               each at a multiple of 64, so that any dtype can be mapped
    body                          a copy of the manifest's body, to rebuild a damaged manifest
    footer                        offset and length of the body (two u64, little endian), its
                                  BLAKE3 hash, RVPACKED

Slices have no header: the manifest holds the offset and the hash of each slice.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from rearview.errors import DamagedError, StoreError
from rearview.model import Checkpoint, CheckpointMeta, Edge, MissingPart, ObjectRef, Point, Step
from rearview.store.checkpoints.objects import digest
from rearview.store.create_files import Sink

FORMAT = 1
INLINE = 32
"""Most parts that are listed in the manifest itself; if there are more, the table of parts is in the pack."""
PACK_MAGIC = b"RVPACK01"
PACK_END = b"RVPACKED"
SLICE = 64
"""Alignment of slices in bytes: a cache line, which is more than any dtype needs."""
GATHER = 1 << 20
"""Bytes of slices that are collected before they are written together."""
_ZEROS = bytes(SLICE)
_FOOTER = struct.Struct("<QQ32s8s")

_OID = re.compile("[0-9a-f]{64}")
_PACK = re.compile(r"[^/\0]+/[^/\0]+")
_LARGEST = 1 << 62

Row = tuple[str, str, int, int | None, int]
"""One part: key, oid, number of bytes, index of its pack in `packs` (None if it has an object file), offset in the file."""


class PartTable(msgspec.Struct, omit_defaults=True):
    """Table of the parts of one checkpoint: the file, offset and hash of each part."""

    packs: list[str]
    rows: list[Row]
    sums: dict[str, str] = {}
    """Oid of a part that is an object file -> XXH3-128 hash of its content."""


class ManifestBody(msgspec.Struct, omit_defaults=True):
    """The body of a manifest: the description of one checkpoint."""

    run: str
    seq: int
    point: list[tuple[str, int, int | float | str | None]]
    edge: Edge
    time: float
    nbytes: int = 0
    count: int = 0
    complete: bool = True
    missing: list[str] = []
    meta: CheckpointMeta = CheckpointMeta()
    stored: int = 0
    shrunk: int = 0
    parts: PartTable | None = None
    table: tuple[str, int, str, int] | None = None
    """Oid, number of bytes, pack and offset of the table of parts if it is in a pack; if None, `parts` is the table."""


class _ManifestFile(msgspec.Struct):
    format: int
    check: str
    body: msgspec.Raw


def encode(value: ManifestBody | PartTable) -> bytes:
    """Return the body of a manifest, or a table of parts, as JSON."""
    return msgspec.json.encode(value)


def seal(body: bytes) -> bytes:
    """Return the bytes of a manifest file: the body with its format and checksum."""
    return msgspec.json.encode(_ManifestFile(FORMAT, digest(body), msgspec.Raw(body)))


def unseal(data: bytes, name: str) -> ManifestBody:
    """Return the body in the bytes of a manifest file; raise if the file is damaged.

    `name` is the name of the checkpoint, for messages.
    """
    try:
        file = msgspec.json.decode(data, type=_ManifestFile)
        if file.format > FORMAT:
            raise StoreError(
                f"Checkpoint {name} has format {file.format}; this Rearview reads up to {FORMAT}. "
                "Upgrade with `pip install --upgrade rearview`.",
                slug="store-newer",
            )
        body = bytes(file.body)
        if digest(body) == file.check:
            decoded = msgspec.json.decode(body, type=ManifestBody)
            _check_file_names(decoded)
            return decoded
        why = "its checksum does not match"
    except (msgspec.MsgspecError, ValueError) as exc:
        why = str(exc)
    raise DamagedError(
        f"The manifest of checkpoint {name} is damaged: {why}. `rearview verify --repair` rebuilds "
        "it from the checkpoint's pack, or moves it away.",
        slug="manifest-damaged",
    )


def _check_file_names(body: ManifestBody) -> None:
    """Raise if `body` has oids or names of packs that could lead outside the store, or impossible sizes or offsets."""
    if body.table is not None:
        oid, nbytes, pack, offset = body.table
        _check_pack(pack)
        _check_part(oid, nbytes, offset, 0, 0)
    _parts(body.parts)


def _check_pack(name: str) -> None:
    if not _PACK.fullmatch(name) or ".." in name:
        raise ValueError(f"{name!r} is not the name of a pack")


def _check_part(oid: str, nbytes: int, offset: int, pack: int, packs: int) -> None:
    if not _OID.fullmatch(oid):
        raise ValueError(f"{oid!r} is not the name of an object")
    if not (0 <= nbytes < _LARGEST and 0 <= offset < _LARGEST and 0 <= pack <= packs):
        raise ValueError(f"object {oid[:12]} has an impossible size or offset")


def tabulate(parts: Mapping[str, ObjectRef]) -> PartTable:
    """Return the table of the parts of a checkpoint; `parts` has the reference of each part by key."""
    packs: dict[str, int] = {}
    rows: list[Row] = [
        (
            key,
            ref.oid,
            ref.nbytes,
            None if ref.pack is None else packs.setdefault(ref.pack, len(packs)),
            ref.offset,
        )
        for key, ref in parts.items()
    ]
    return PartTable(list(packs), rows, {ref.oid: ref.sum for ref in parts.values() if ref.sum})


def checkpoint_of(body: ManifestBody, read: Callable[[ObjectRef], bytes | bytearray]) -> Checkpoint:
    """Return the checkpoint that `body` describes.

    If the table of its parts is in a pack, `read` reads the table when a part is first accessed.
    """
    return Checkpoint(
        id=f"{body.run}/{body.seq}",
        run=body.run,
        seq=body.seq,
        point=Point(tuple(Step(*step) for step in body.point)),
        edge=body.edge,
        parts=LazyParts(body, read) if body.table is not None else _parts(body.parts),
        complete=body.complete,
        missing=tuple(map(MissingPart.parse, body.missing)),
        meta=body.meta,
        time=body.time,
        stored=body.stored,
        shrunk=body.shrunk,
    )


class LazyParts(Mapping[str, ObjectRef]):
    """Mapping from the key of each part of a checkpoint to its reference; the table of parts is read on first access."""

    def __init__(self, body: ManifestBody, read: Callable[[ObjectRef], bytes | bytearray]) -> None:
        assert body.table is not None
        self.table = ObjectRef(*body.table)
        """Reference of the table of parts."""
        self._count = body.count
        self._read = read
        self._parts: dict[str, ObjectRef] | None = None

    def __getitem__(self, key: str) -> ObjectRef:
        return self._load()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._load())

    def __len__(self) -> int:
        return self._count

    def _load(self) -> dict[str, ObjectRef]:
        if self._parts is None:
            data = self._read(self.table)
            try:
                self._parts = _parts(msgspec.json.decode(data, type=PartTable))
            except (msgspec.MsgspecError, ValueError, IndexError) as exc:
                raise DamagedError(
                    f"The table of parts {self.table.oid[:12]} is damaged: {exc}. `rearview verify "
                    "--repair` moves its checkpoint away.",
                    slug="manifest-damaged",
                ) from exc
        return self._parts


def _parts(table: PartTable | None) -> dict[str, ObjectRef]:
    if table is None:
        return {}
    packs, sums = table.packs, table.sums
    for name in packs:
        _check_pack(name)
    for _, oid, nbytes, pack, offset in table.rows:
        _check_part(oid, nbytes, offset, len(packs) if pack is None else pack, len(packs))
    return {
        key: ObjectRef(
            oid, nbytes, None if pack is None else packs[pack], offset, sums.get(oid, "")
        )
        for key, oid, nbytes, pack, offset in table.rows
    }


class PackWriter:
    """Writes the slices of one pack; a slice that equals an earlier slice is not written again."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.name = name
        self._sink = sink
        self._position = len(PACK_MAGIC)
        self._refs: dict[str, ObjectRef] = {}
        self._slices: list[memoryview | bytes] = [PACK_MAGIC]
        self._pending = 0

    def add(self, oid: str, view: memoryview) -> ObjectRef:
        """Append the slice `view`, whose hash is `oid`, and return its reference."""
        ref = self._refs.get(oid)
        if ref is None:
            self._append(view)
            size = len(view)
            ref = self._refs[oid] = ObjectRef(oid, size, self.name, self._position - size)
        return ref

    def close(self, body: bytes) -> None:
        """End the pack with `body`, a copy of the body of the checkpoint's manifest, and the footer."""
        self._append(memoryview(body))
        check = blake3(body).digest()
        self._slices.append(_FOOTER.pack(self._position - len(body), len(body), check, PACK_END))
        self._flush()

    def _append(self, view: memoryview) -> None:
        pad = -self._position % SLICE
        self._slices += (_ZEROS[:pad], view)
        self._position += pad + len(view)
        self._pending += pad + len(view)
        if self._pending >= GATHER:
            self._flush()

    def _flush(self) -> None:
        self._sink.write_many(self._slices)
        self._slices = []
        self._pending = 0


def pack_body(path: Path) -> bytes | None:
    """Return the copy of the manifest body at the end of the pack `path`, or None if the copy is damaged or missing."""
    try:
        with path.open("rb") as file:
            file.seek(-_FOOTER.size, os.SEEK_END)
            at, length, check, end = _FOOTER.unpack(file.read(_FOOTER.size))
            if end != PACK_END or at + length + _FOOTER.size != file.tell():
                return None
            file.seek(at)
            body = file.read(length)
            return body if blake3(body).digest() == check else None
    except (OSError, struct.error):
        return None
