"""Saved state at a point: a manifest naming objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rearview.model.run import Point


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
class Checkpoint:
    """A published checkpoint: what it is of, and where its parts are."""

    id: str
    run: str
    seq: int
    """Order within the run."""
    point: Point
    edge: str
    """`"start"`: before the iteration `point` ends in; `"end"`: after that loop has ended."""
    parts: Mapping[str, ObjectRef]
    complete: bool = True
    missing: tuple[str, ...] = ()
    """Why it is partial, one reason each; empty when complete."""
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
