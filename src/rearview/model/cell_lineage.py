"""The lineage of the state after a cell: a hash of its code, its inputs, and the cell before it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

Event = tuple[str, ...]
"""Something that a cell used: its kind (`file`, `environment`, `process`, …), a name, often a content hash."""
SIMILAR = 10.0
"""Factor within which cost and size of two cells count as similar."""
NOTICEABLE_SECONDS, NOTICEABLE_BYTES = 1.0, 64 << 20
"""Costs and sizes up to these count as similar."""


@dataclass(frozen=True, slots=True)
class CellLineage:
    """One executed cell."""

    cell: int
    code: str
    """Hash of its code without formatting and comments."""
    events: tuple[Event, ...]
    lineage: str
    """Hash of the lineage of the cell before, the code, and the events."""
    seconds: float
    size: int
    """Bytes of memory of the process after the cell (Pss); 0 if they are not known."""
    before: int = 0
    """Bytes of memory of the process before its first cell."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Fingerprints of the variables after the cell; those that take long to compute are missing."""


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

    >>> cell = CellLineage(2, "c", (), "g", 3.0, 0)
    >>> same_state(cell, CellLineage(2, "c", (), "g", 4.0, 0))
    True
    >>> same_state(cell, CellLineage(2, "c", (), "g", 300.0, 0))
    False
    """
    return first.lineage == second.lineage and not difference(first, second)


def difference(first: CellLineage, second: CellLineage) -> str:
    """Return why the states after two cells with the same code are not the same; empty if they are.

    >>> first = CellLineage(2, "c", (), "g", 3.0, 0, variables={"x": "1", "y": "5"})
    >>> difference(first, CellLineage(2, "c", (), "g", 3.0, 0, variables={"x": "2"}))
    'x has another value'
    """
    if first.events != second.events:
        return _event_difference(first.events, second.events)
    different = sorted(
        name
        for name, value in first.variables.items()
        if second.variables.get(name, value) != value
    )
    if different:
        more = f" and {len(different) - 1} others have" if len(different) > 1 else " has"
        return f"{different[0]}{more} another value"
    if not _similar(first.seconds, second.seconds, NOTICEABLE_SECONDS):
        return f"it took {first.seconds:.3g} s and {second.seconds:.3g} s"
    if not _similar(first.size, second.size, NOTICEABLE_BYTES):
        return f"it left {first.size / 1e6:.3g} MB and {second.size / 1e6:.3g} MB"
    return ""


def _event_difference(first: Sequence[Event], second: Sequence[Event]) -> str:
    for event in (*first, *second):
        if (event in first) != (event in second):
            kind, name = event[0], " ".join(event[1:2])
            return f"the input differs: {kind} {name}".rstrip()
    return "its inputs came in another order"


def _similar(a: float, b: float, noticeable: float) -> bool:
    low, high = sorted((a, b))
    return high <= noticeable or high <= SIMILAR * max(low, noticeable / SIMILAR)
