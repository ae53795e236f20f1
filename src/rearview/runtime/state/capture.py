"""Capture: the state of the live object graph at an iteration boundary, without copying tensors."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rearview.errors import StateError
from rearview.runtime.state.anchors import Anchors
from rearview.runtime.state.randomness import read_global
from rearview.runtime.state.reading import Reading

MAGIC = b"RVSTATE1"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Captured:
    """State at a boundary: everything small in `skeleton`, big memory in `buffers`.

    The buffers are views of live memory: copy them before the program goes on.
    """

    skeleton: bytes
    buffers: dict[str, Any]
    missing: list[str]
    """Why the capture is partial: where and what, one reason each; empty when complete."""
    owners: list[object] = field(repr=False)
    """Keeps the memory under `buffers` alive."""


def capture(anchors: Anchors, roots: Mapping[str, object], *, rng: bool = True) -> Captured:
    """Return the state reachable from the anchors and the names in `roots`.

    `roots` holds the names bound now; a name that is absent will be unbound after restore. Nothing
    in the program changes, and one object that cannot be kept does not spoil the rest: it is named
    in `missing`.
    """
    reading = Reading(anchors, roots)
    contents = reading.contents()
    classes = reading.changed_classes()
    body = (dict(roots), contents, classes, read_global() if rng else None)
    stream = reading.dump(body)
    blocks = reading.blocks
    anchors.block_keys = blocks.keys
    header = pickle.dumps(
        {
            "anchors": len(anchors),
            "blocks": [tuple(block) for block in blocks.table],
            "outside": reading.oob,
        },
        protocol=5,
    )
    skeleton = b"".join((MAGIC, _LENGTH.pack(len(header)), header, stream))
    return Captured(skeleton, blocks.buffers, reading.missing, blocks.owners)


def split(skeleton: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header of a skeleton and the stream behind it."""
    view = memoryview(skeleton)
    start = len(MAGIC) + _LENGTH.size
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise StateError(
            f"These bytes are not a state this Rearview can read (they begin with "
            f"{bytes(view[:8])!r}). Use the version that recorded the run.",
            slug="state-format",
        )
    (length,) = _LENGTH.unpack(view[len(MAGIC) : start])
    return pickle.loads(view[start : start + length]), view[start + length :]
