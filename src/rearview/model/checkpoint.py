"""Saved state at a point: a manifest naming objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from rearview.model.run import Point


class Edge(StrEnum):
    """Where a checkpoint was taken, relative to the loop that its point ends in."""

    START = "start"
    """Before the iteration that the point names."""
    END = "end"
    """After the loop has ended; the point names the last iteration."""


@dataclass(frozen=True, slots=True)
class MissingPart:
    """A part of the state that could not be captured, so that the checkpoint is partial.

    Manifests and tables hold it as one text.

    >>> str(MissingPart("main.reader", "the position in this file is not known"))
    'main.reader: the position in this file is not known'
    """

    path: str
    """How the program reaches the object; empty in old manifests that do not tell."""
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
    """Where the bytes of one part are: an object of its own, or a slice of a pack."""

    oid: str
    """BLAKE3 hash of the content, hexadecimal."""
    nbytes: int
    pack: str | None = None
    """Name of the pack that holds it, or None for an object file of its own."""
    offset: int = 0
    sum: str = field(default="", compare=False)
    """XXH3-128 of the content, hexadecimal, where it is known: checked sooner than the name."""


@dataclass(frozen=True, slots=True)
class Part:
    """Named bytes on their way into a checkpoint.

    `same_as` is the reference under which the very same content was stored before; then `data`
    is not looked at and nothing is written.
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
    meta: dict[str, Any] = field(default_factory=dict)
    """What restoring needs besides the state: JSON only."""
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
    """A published checkpoint: what it is of, and where its parts are."""

    id: str
    run: str
    seq: int
    """Order within the run."""
    point: Point
    edge: Edge
    parts: Mapping[str, ObjectRef]
    complete: bool = True
    missing: tuple[MissingPart, ...] = ()
    """What could not be captured; empty if the checkpoint is complete."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What the capturer needs to restore it: JSON only."""
    time: float = 0.0
    stored: int = 0
    """Bytes that were new to the store when it was saved."""
    shrunk: int = 0
    """Bytes by which compressing made that less."""

    @property
    def nbytes(self) -> int:
        """Logical size of all parts."""
        return sum(ref.nbytes for ref in self.parts.values())
