"""Go on with a run that stopped: set up again, jump to its last checkpoint, record from there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import FrameType
from typing import Any

from rearview.errors import RearviewError, StateError
from rearview.model import Checkpoint
from rearview.runtime.jumps import END, Jumps
from rearview.runtime.loops import Entry
from rearview.runtime.mending import Mending
from rearview.runtime.observers import unobserved
from rearview.runtime.recorder import Recorder


def last_usable(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the newest complete checkpoint among these.

    Any can be reached: loops around it are entered at the nearest checkpoint of their own, and
    what lies between runs again, skipping inner loops whose end was saved.
    """
    complete = [one for one in checkpoints if one.complete]
    return max(complete, key=lambda each: each.seq, default=None)


@dataclass
class Resumer(Recorder):
    """A recorder that first finds its way to where the run stopped."""

    target: Checkpoint | None = None
    jumps: Jumps = field(init=False)
    retreat: Callable[[Checkpoint, RearviewError], None] | None = None
    """Begins anew from an earlier checkpoint than the one that turned out to be of no use."""
    mending: Mending | None = None
    """Set while a run goes on with another source than it had, until the checkpoint is reached."""
    continues: str = ""
    """The version that it goes on with then."""
    afresh: Callable[[RearviewError], None] | None = None
    """Sets up again without the files that the run has made; None if that was done, or there are none."""
    origin: Checkpoint | None = None
    """Where the run went on from."""

    @property
    def pending(self) -> bool:
        """Whether the program is still on its way: what it logs now was recorded before."""
        return self.target is not None

    @unobserved
    def boundary(self, entry: Entry, index: int, frame: FrameType) -> int | None:  # type: ignore[override]
        """Jump towards the target; record once it is reached."""
        if self.target is None:
            return super().boundary(entry, index, frame)
        if entry.site.loose or self.nest is None:
            return index
        self._anchor(entry, index, frame)
        path = self.path(entry, index)
        wanted = self.target.meta["path"]
        depth = len(path)
        on_the_way = depth <= len(wanted) and all(
            list(mine[:2]) == list(other[:2]) and (level == depth - 1 or mine[2] == other[2])
            for level, (mine, other) in enumerate(zip(path, wanted, strict=False))
        )
        if not on_the_way:
            return None if index == 0 and self._skip(path, frame) else index
        if depth == len(wanted) and self.target.edge == END:
            self._bring_files()
            self._skip(path, frame)
            self._arrived()
            return None
        goal: int = wanted[depth - 1][2]
        if goal > index:
            self.jumps.pending = self.jumps.nearest(path, goal)
            if self.jumps.pending is not None:
                target: int = self.jumps.pending.meta["path"][-1][2]
                return target
        return index

    def _anchor(self, entry: Entry, index: int, frame: FrameType) -> None:
        try:
            self.jumps.anchor(entry, index, frame)
        except RearviewError as exc:
            if self.mending is not None:
                self.mending.failed(exc)
            if self.afresh is not None and os.getpid() == self.pid:
                self.afresh(exc)
            raise

    def advance(
        self, entry: Entry, source: Iterator[Any], index: int, target: int, frame: FrameType
    ) -> int:
        """Go to the pending checkpoint; if it is the target, the run goes on from here."""
        assert self.target is not None
        arrives = self.jumps.pending is self.target
        if arrives:
            self._bring_files()
        checkpoint = self.jumps.pending
        try:
            self.jumps.advance(source, target - index, frame)
        except StateError as exc:
            self._retreat(checkpoint, exc)
            raise
        if arrives:
            self._arrived()
        return target

    def _skip(self, path: list[list[Any]], frame: FrameType) -> bool:
        checkpoint = self.jumps.at(END, path)
        if checkpoint is None:
            return False
        if self.mending is not None:
            self.mending.skipped(path[-1][0])
        try:
            self.jumps.restore(checkpoint, frame)
        except StateError as exc:
            self._retreat(checkpoint, exc)
            raise
        return True

    def refusing(self, exc: StateError) -> None:
        """Begin anew: a gradient flows through the boundary that the run went on from."""
        self._retreat(self.origin or self.target, exc)

    def _retreat(self, checkpoint: Checkpoint | None, exc: StateError) -> None:
        if self.mending is not None:
            self.mending.failed(exc)
        if self.retreat is not None and checkpoint is not None and os.getpid() == self.pid:
            self.retreat(checkpoint, exc)

    def _bring_files(self) -> None:
        """Bring files back that are too large for a checkpoint, before it cuts them to size."""
        assert self.target is not None
        if self.outputs is not None:
            self.outputs.bring_back(self.target.meta.get("outputs", {}).get("large", ()))

    def _arrived(self) -> None:
        self.origin, self.target = self.target, None
        if self.mending is not None:
            self.mending.stop()
            self.mending = None
            told = {"version": self.continues, "point": str(self.origin and self.origin.point)}
            self.runs.note(self.run, "continued", told)
        if self.origin is not None:
            path = self.origin.meta["path"]
            whole = len(path) == 1 and self.origin.edge != END
            self.timeline.skipped(path[0][2] + (not whole))
        if self.clock is not None:
            self.clock.go_on()
        self.pulse.now = self.last = perf_counter()

    def ended(self, entry: Entry, index: int, frame: FrameType) -> None:
        """Record loop ends only once the target is reached."""
        if self.target is None:
            super().ended(entry, index, frame)

    def log(self, items: Mapping[str, Any]) -> None:
        """Record values only once the target is reached; those before are recorded already."""
        if self.target is None:
            super().log(items)
