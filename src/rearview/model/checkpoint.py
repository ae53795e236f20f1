"""Checkpoints: a captured state on its way to disk (`Snapshot`), and a published one (`Checkpoint`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, Self

import msgspec

from rearview.model.run import Point


class Edge(StrEnum):
    """On which side of its point a checkpoint was taken."""

    START = "start"
    """Before the iteration that the point ends in."""
    END = "end"
    """After the loop of that iteration has ended."""


class LoopStep(NamedTuple):
    """One loop around a checkpoint, as a replay or resumed run identifies it."""

    loop: str
    """Id of the loop."""
    ordinal: int
    """How often the loop was entered before, within the same iteration of the loop around it."""
    iteration: int
    """Counted from 0."""


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a replay or resumed run needs to restore a checkpoint."""

    path: tuple[LoopStep, ...] = ()
    """Loops around it, outermost first; empty if it was not taken by the recorder."""
    anchored: int = 0
    """Iteration of the outermost loop at which the anchors were walked."""
    records: int = 0
    """Number of records that the run had written at that point."""
    seconds: float = 0.0
    """Computing time of the run until then."""
    outputs: dict[str, Any] = {}
    """Files, folders and links that the run had made or removed by then (`runtime.sandbox.outputs`)."""


@dataclass(frozen=True, slots=True)
class MissingPart:
    """A part of the state that could not be captured, so that the checkpoint is partial.

    Manifests and tables hold it as one text.

    >>> str(MissingPart("main.reader", "the position in this file is not known"))
    'main.reader: the position in this file is not known'
    """

    path: str
    """Path of the object in the program; empty in old manifests, which do not have it."""
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}" if self.path else self.why

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the value whose text a manifest holds.

        >>> MissingPart.parse("file: the position is not known (telling: off)")
        MissingPart(path='file', why='the position is not known (telling: off)')
        """
        path, colon, why = text.partition(": ")
        return cls(path, why) if colon else cls("", text)


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Where the bytes of one part are: in an object file, or in a slice of a pack."""

    oid: str
    """BLAKE3 hash of the content, hexadecimal."""
    nbytes: int
    pack: str | None = None
    """Name of the pack that holds it, or None if it has an object file."""
    offset: int = 0
    sum: str = field(default="", compare=False)
    """XXH3-128 of the content, hexadecimal, or empty; faster to check than `oid`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Named bytes on their way into a checkpoint.

    If `same_as` names where the same content was stored before, `data` is not read and nothing is
    written.
    """

    key: str
    data: Any
    """Any object with the buffer protocol, C-contiguous."""
    same_as: ObjectRef | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state captured at one point, on its way from the recorder to the writer to the store."""

    run: str
    seq: int
    """Order within the run."""
    point: Point
    edge: Edge
    skeleton: bytes = b""
    """Everything small, as `state.capture` wrote it."""
    buffers: Mapping[str, Any] = field(default_factory=dict)
    """Large memory by key: views of live memory, to be copied before the program changes it."""
    device: Mapping[str, Any] = field(default_factory=dict)
    """Tensors on accelerators by key; the writer copies them to the host."""
    meta: CheckpointMeta = field(default_factory=CheckpointMeta)
    missing: tuple[MissingPart, ...] = ()

    @property
    def id(self) -> str:
        """The id of the checkpoint that this becomes."""
        return f"{self.run}/{self.seq}"

    @property
    def complete(self) -> bool:
        """Whether the whole state was captured."""
        return not self.missing

    def without_buffers(self) -> Snapshot:
        """Return this without the views of live memory, which must not outlive their copy."""
        return replace(self, buffers={}, device={})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A published checkpoint: where in which run it was taken, and where its parts are."""

    id: str
    run: str
    seq: int
    """Order within the run."""
    point: Point
    edge: Edge
    parts: Mapping[str, ObjectRef]
    complete: bool = True
    missing: tuple[MissingPart, ...] = ()
    """Parts that could not be captured; empty if the checkpoint is complete."""
    meta: CheckpointMeta = field(default_factory=CheckpointMeta)
    time: float = 0.0
    stored: int = 0
    """Bytes that were new to the store when it was saved."""
    shrunk: int = 0
    """Bytes saved by compressing."""

    @property
    def nbytes(self) -> int:
        """Logical size of all parts."""
        return sum(ref.nbytes for ref in self.parts.values())
