"""Where the state after a cell comes from: its code, what it read, and the cell before it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

Event = tuple[str, ...]
"""Something that a cell used: its kind (`file`, `environment`, `process`, …), a name, often a content hash."""
SIMILAR = 10.0
"""Factor within which cost and size of two cells count as similar."""
NOTICEABLE_SECONDS, NOTICEABLE_BYTES = 1.0, 64 << 20
"""Below these, seconds and bytes are similar whatever they are."""


@dataclass(frozen=True, slots=True)
class CellLineage:
    """One executed cell."""

    cell: int
    code: str
    """Hash of its code; formatting and comments do not count."""
    events: tuple[Event, ...]
    lineage: str
    """Hash of the lineage of the cell before, the code, and the events."""
    seconds: float
    size: int
    """Bytes of memory of the process after it (Pss); 0 where that is not known."""


def lineage_of(before: str, code: str, events: Sequence[Event]) -> str:
    """Return the lineage of a cell that runs `code` after `before` and takes in `events`.

    >>> lineage_of("", "a", []) == lineage_of("", "a", [])
    True
    >>> lineage_of("", "a", [("file", "x", "1")]) == lineage_of("", "a", [("file", "x", "2")])
    False
    """
    text: bytes = msgspec.json.encode([before, code, list(events)])
    return hashlib.sha256(text).hexdigest()[:32]


def same_state(first: CellLineage, second: CellLineage) -> bool:
    """Return True if two cells left the same state: the same lineage, at similar cost and size.

    >>> cell = CellLineage(1, "c", (), "g", 2.0, 0)
    >>> same_state(cell, CellLineage(2, "c", (), "g", 3.0, 0))
    True
    >>> same_state(cell, CellLineage(2, "c", (), "g", 300.0, 0))
    False
    """
    return (
        first.lineage == second.lineage
        and _similar(first.seconds, second.seconds, NOTICEABLE_SECONDS)
        and _similar(first.size, second.size, NOTICEABLE_BYTES)
    )


def _similar(a: float, b: float, noticeable: float) -> bool:
    low, high = sorted((a, b))
    return high <= noticeable or high <= SIMILAR * max(low, noticeable / SIMILAR)
