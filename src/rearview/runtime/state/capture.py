"""Capture: the state of the live object graph at an iteration boundary, without copying tensors."""

from __future__ import annotations

import gc
import io
import pickle
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rearview.errors import StateError
from rearview.runtime.state.anchors import Anchors
from rearview.runtime.state.randomness import read_global
from rearview.runtime.state.reading import Reading
from rearview.runtime.state.tensors import plain_access

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
    still: Collection[str] = ()
    """Keys of buffers that are not likely to change."""
    owners: Sequence[Any] = ()
    """What the buffers are views of: it lives as long as this."""


def capture(anchors: Anchors, roots: Mapping[str, object], *, rng: bool = True) -> Captured:
    """Return the state reachable from the anchors and the names in `roots`.

    `roots` holds the names bound now; a name that is absent will be unbound after restore. Nothing
    in the program changes, and one object that cannot be kept does not spoil the rest: it is named
    in `missing`.
    """
    collecting = gc.isenabled()
    # Thousands of short-lived tuples would set off collections that look at the whole program; they
    # are all gone when it goes on, so that not even one collection is due.
    gc.disable()
    try:
        with plain_access():
            return _capture(anchors, roots, rng=rng)
    finally:
        if collecting:
            gc.enable()


def _capture(anchors: Anchors, roots: Mapping[str, object], *, rng: bool) -> Captured:
    reading, stream = _read(anchors, roots, rng=rng)
    reading.release()
    blocks = reading.blocks
    anchors.block_keys = blocks.keys
    header = pickle.dumps(
        {
            "anchors": len(anchors),
            "classes": anchors.classes,
            "blocks": blocks.table,
            "outside": reading.oob,
        },
        protocol=5,
    )
    skeleton = b"".join((MAGIC, _LENGTH.pack(len(header)), header, *stream))
    return Captured(skeleton, blocks.buffers, reading.missing, blocks.still, blocks.owners)


def _read(
    anchors: Anchors, roots: Mapping[str, object], *, rng: bool
) -> tuple[Reading, tuple[bytes, bytes]]:
    state = read_global() if rng else None
    while True:
        reading = Reading(anchors, roots, careful=anchors.shares_arrays)
        body = (dict(roots), reading.contents(), reading.changed_classes(), state)
        try:
            stream = reading.dump(body)
        except Exception:
            reading = reading.again()
            body = (dict(roots), reading.contents(), reading.changed_classes(), state)
            stream = reading.dump(reading.prune(body))
        if anchors.shares_arrays or not reading.shared():
            return reading, stream
        anchors.shares_arrays = True


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
    header = _HeaderUnpickler(io.BytesIO(view[start : start + length])).load()
    return header, view[start + length :]


class _HeaderUnpickler(pickle.Unpickler):
    """Reads a header, in which there are only numbers, texts, bytes, lists, tuples and dicts."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Refuse every name: a header has none, so this one was made to run something."""
        raise StateError(
            f"The head of this state names {module}.{name}, which no Rearview writes: it is damaged, "
            "or made to run something. Nothing was run. Do not trust this store.",
            slug="state-format",
        )
