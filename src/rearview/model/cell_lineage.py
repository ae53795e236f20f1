"""Lineage of a cell: a hash of its code, its inputs, and the lineage of the cell before it.

Cells of two versions with equal lineage compute equal states, so that one execution serves both versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

Event = tuple[str, ...]
"""An input of a cell: its kind (`file`, `environment`, `process`, …), a name, and often a hash of the content."""
SIMILAR = 10.0
"""Two costs or sizes count as similar if the larger is at most this many times the smaller."""
NOTICEABLE_SECONDS, NOTICEABLE_BYTES = 1.0, 64 << 20
"""Two costs count as similar if both are at most this many seconds; two sizes, if both are at most this many bytes."""


@dataclass(frozen=True, slots=True)
class CellLineage:
    """A cell as it was executed: its lineage and its cost."""

    cell: int
    """Number of the cell in its version."""
    code: str
    """Hash of the cell's code without formatting and comments."""
    events: tuple[Event, ...]
    """Inputs that the cell used, in the order of use."""
    lineage: str
    """Hash of three parts: the lineage of the cell before this one, `code`, and `events`."""
    seconds: float
    """Seconds that executing the cell took."""
    size: int
    """Bytes of memory (proportional set size) of the process after the cell; 0 if unknown."""
    before: int = 0
    """Bytes of memory of the process before it executed its first cell."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variable name -> fingerprint of the variable's value after the cell. Fingerprints that take long to compute are
    left out."""


def lineage_of(before: str, code: str, events: Sequence[Event]) -> str:
    """Return the lineage of a cell with the code hash `code` and the inputs `events`, after a cell of lineage `before`.

    >>> lineage_of("", "a", []) == lineage_of("", "a", [])
    True
    >>> lineage_of("", "a", [("file", "x", "1")]) == lineage_of("", "a", [("file", "x", "2")])
    False
    """
    text: bytes = msgspec.json.encode([before, code, list(events)])
    return hashlib.sha256(text).hexdigest()[:32]


def same_state(first: CellLineage, second: CellLineage) -> bool:
    """Return True if two cells have equal lineage and `difference` finds no difference between the states after them.

    >>> cell = CellLineage(2, "c", (), "g", 3.0, 0)
    >>> same_state(cell, CellLineage(2, "c", (), "g", 4.0, 0))
    True
    >>> same_state(cell, CellLineage(2, "c", (), "g", 300.0, 0))
    False
    """
    return first.lineage == second.lineage and not difference(first, second)


def difference(first: CellLineage, second: CellLineage) -> str:
    """Return in words how the states after two cells with equal code differ; an empty text if they do not differ.

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
        ending = f" and {len(different) - 1} others have" if len(different) > 1 else " has"
        return f"{different[0]}{ending} another value"
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
