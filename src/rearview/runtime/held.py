"""Which memory is known to hold which object: what stays the same is neither read nor hashed again.

A data set in memory is part of every checkpoint of a run, and the same in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rearview.runtime.pages import TRACK_FROM, Pages, Watch, address_of


class How(Enum):
    """How memory came to be known."""

    READ = "read"
    """It was filled from the store."""
    HASHED = "hashed"
    """It was found to hold what was recorded."""


@dataclass(slots=True)
class _Known:
    nbytes: int
    oid: str
    ways: tuple[How, ...]
    watch: Watch | None


@dataclass(slots=True)
class Held:
    """Memory of this process by the objects it holds, as long as nobody writes to it."""

    pages: Pages = field(default_factory=Pages)
    known: dict[int, _Known] = field(default_factory=dict)

    def holds(self, view: memoryview, oid: str) -> bool:
        """Say whether `view` surely holds the object `oid`."""
        if len(view) < TRACK_FROM or not self.known:
            return False
        known = self.known.get(address_of(view))
        if known is None or known.watch is None or (known.oid, known.nbytes) != (oid, len(view)):
            return False
        return self.pages.unwritten(known.watch, view)

    def note(self, view: memoryview, oid: str, how: How) -> None:
        """Take in that `view` was just found, or made, to hold `oid`.

        It is watched once the same was done for nothing: read or hashed a second time. Most memory
        changes each time, and to watch it costs more than to read it. That it is hashed after it
        was read says nothing: so is all that is restored and compared a moment later.
        """
        if len(view) < TRACK_FROM or not self.pages.available:
            return
        address = address_of(view)
        known = self.known.get(address)
        if known is not None and known.watch is not None:
            self.pages.forget(known.watch)
        same = known is not None and (known.oid, known.nbytes) == (oid, len(view))
        ways = known.ways if known is not None and same else ()
        watch = self.pages.watch(view) if how in ways else None
        self.known[address] = _Known(len(view), oid, ways if how in ways else (*ways, how), watch)
