"""A captured state on its way to disk (`Snapshot`), and a checkpoint that is stored (`Checkpoint`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self

import msgspec

from rearview.model.run import Point


class Edge(StrEnum):
    """The moment at which a state was captured, relative to the last step of its point."""

    START = "start"
    """Before the iteration that the last step of the point names."""
    END = "end"
    """After the end of the loop that the last step of the point names."""


class LoopStep(NamedTuple):
    """A loop that was running when a checkpoint was taken; a replay finds the loop again by these values."""

    loop: str
    """Id of the loop."""
    ordinal: int
    """How many times the loop had been entered before in the current iteration of the loop around it; 0 at the first
    entry."""
    iteration: int
    """Number of the loop's iteration, counted from 0."""


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a replay or resumed run needs to restore a checkpoint."""

    path: tuple[LoopStep, ...] = ()
    """The running loops, outermost first; empty if the recorder did not take the checkpoint."""
    anchored: int = 0
    """Iteration of the outermost loop in which the objects of the state (anchors) were numbered; see
    `state.object_numbers`."""
    records: int = 0
    """Number of records that the run had written before the checkpoint."""
    seconds: float = 0.0
    """Seconds that the run had computed before the checkpoint."""
    outputs: dict[str, Any] = {}
    """Files, folders and links that the run had made or removed before the checkpoint (`runtime.sandbox.outputs`)."""


@dataclass(frozen=True, slots=True)
class MissingPart:
    """A part of the state that could not be captured, so that the checkpoint is partial.

    Manifests and tables store this value as one text.

    >>> str(MissingPart("main.reader", "the position in this file is not known"))
    'main.reader: the position in this file is not known'
    """

    path: str
    """Path to the object from a variable of the program, such as `main.reader`; empty in old manifests."""
    why: str
    """Why the object could not be captured."""

    def __str__(self) -> str:
        return f"{self.path}: {self.why}" if self.path else self.why

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the `MissingPart` that a manifest stores as `text`.

        >>> MissingPart.parse("file: the position is not known (telling: off)")
        MissingPart(path='file', why='the position is not known (telling: off)')
        """
        path, colon, why = text.partition(": ")
        return cls(path, why) if colon else cls("", text)


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Where the bytes of one part of a checkpoint are: in an object file, or in a slice of a pack file."""

    oid: str
    """BLAKE3 hash of the content, hexadecimal."""
    nbytes: int
    pack: str | None = None
    """Name of the pack file that contains the bytes, or None if the bytes have an object file."""
    offset: int = 0
    """Position of the first byte in the pack file."""
    sum: str = field(default="", compare=False)
    """XXH3-128 hash of the content, hexadecimal, which is faster to check than `oid`; may be empty."""


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes that are to be saved as one part of a checkpoint.

    If `same_as` names where equal bytes are stored, `data` is not read and no bytes are written.
    """

    key: str
    """Name of the part in the checkpoint."""
    data: Any
    """An object with the buffer protocol, C-contiguous."""
    same_as: ObjectRef | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A captured state on its way from the recorder to the writer, which saves it as a checkpoint."""

    run: str
    """Id of the run."""
    seq: int
    """Number of the checkpoint in the run."""
    point: Point
    edge: Edge
    skeleton: bytes = b""
    """The state without the memory of large arrays and tensors, as `state.capture.capture` returned it."""
    buffers: Mapping[str, Any] = field(default_factory=dict)
    """Buffer key -> view of the memory of a large array or tensor. Copy the bytes before the program changes them."""
    device: Mapping[str, Any] = field(default_factory=dict)
    """Buffer key -> tensor on an accelerator, which the writer copies to the memory of the host."""
    meta: CheckpointMeta = field(default_factory=CheckpointMeta)
    missing: tuple[MissingPart, ...] = ()
    """Parts of the state that could not be captured."""

    @property
    def id(self) -> str:
        """Id of the checkpoint that the snapshot becomes."""
        return f"{self.run}/{self.seq}"

    @property
    def complete(self) -> bool:
        """Whether the whole state was captured."""
        return not self.missing

    def without_buffers(self) -> Snapshot:
        """Return a copy with empty `buffers` and `device`: once the bytes are copied, drop the views of live memory."""
        return replace(self, buffers={}, device={})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A stored checkpoint: the run and point at which it was taken, and where its parts are."""

    id: str
    run: str
    """Id of the run."""
    seq: int
    """Number of the checkpoint in the run."""
    point: Point
    edge: Edge
    parts: Mapping[str, ObjectRef]
    """Name of a part -> where the bytes of the part are stored."""
    complete: bool = True
    missing: tuple[MissingPart, ...] = ()
    """Parts of the state that could not be captured; empty if the checkpoint is complete."""
    meta: CheckpointMeta = field(default_factory=CheckpointMeta)
    time: float = 0.0
    """Unix time at which the checkpoint was saved."""
    stored: int = 0
    """Bytes that the checkpoint added to the store."""
    shrunk: int = 0
    """Bytes that compression saved: `stored` would be larger by this number without compression."""

    @property
    def nbytes(self) -> int:
        """Total bytes of all parts, before compression."""
        return sum(ref.nbytes for ref in self.parts.values())
