"""Go to a checkpoint: find it by the loops being executed, restore it, compare with it.

Which memory is known to hold which object: what stays the same is neither read nor hashed again.

A data set in memory is part of every checkpoint of a run, and the same in all of them.

Go to a checkpoint: find it by the loops being executed, restore it, compare with it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from types import FrameType
from typing import Any

import msgspec

from rearview.errors import ReplayError
from rearview.model import Checkpoint, Edge, PathStep
from rearview.runtime.frames import as_recorded, load_modules, qualified, rebind
from rearview.runtime.loops import LoopEntry
from rearview.runtime.sandbox.file_view import PathUse
from rearview.runtime.sandbox.outputs import put_back
from rearview.runtime.saving.dirty_pages import TRACK_FROM, Pages, PageWatch, address_of
from rearview.runtime.session import Session
from rearview.state.capture import capture
from rearview.state.codecs.iterators import drawn
from rearview.state.compare import Difference, differences
from rearview.state.restore import restore
from rearview.store.checkpoints.checkpoints import Checkpoints, LoadedCheckpoint
from rearview.store.checkpoints.objects import as_bytes, digest


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
    watch: PageWatch | None


@dataclass(slots=True)
class KnownMemory:
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


Key = tuple[Edge, tuple[PathStep, ...]]


def key_of(edge: Edge, path: Sequence[PathStep]) -> Key:
    """Return what a checkpoint is found by: its edge and its path of (site, ordinal, index).

    After a loop the last index does not matter, so it is left out.
    """
    if edge == Edge.END:
        path = [*path[:-1], path[-1]._replace(iteration=-1)]
    return edge, tuple(path)


@dataclass
class Jumps:
    """The checkpoints of one run, as a session that re-executes it finds them."""

    session: Session
    store: Checkpoints
    found: dict[Key, Checkpoint] = field(default_factory=dict)
    partial: dict[Key, Checkpoint] = field(default_factory=dict)
    """Those in which something is missing: what they hold can still be compared."""
    starts: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)
    """Iterations that a loop can be entered at, in order, by its path without the index."""
    restored: int = 0
    seconds: float = 0.0
    """Spent restoring."""
    pending: Checkpoint | None = None
    held: KnownMemory = field(default_factory=KnownMemory)
    _places: tuple[str, dict[str, list[str]]] = field(default=("", {}))
    """What the state started from in the checkpoint looked at last, under the oid of that part."""

    @classmethod
    def of(cls, session: Session, store: Checkpoints, run: str, depth: int | None = None) -> Jumps:
        """Return the jumps that the complete checkpoints of `run` allow; partial ones only prove.

        With `depth`, only those that lie so many loops deep or less.
        """
        jumps = cls(session, store)
        for checkpoint in store.of(run):
            key = key_of(checkpoint.edge, checkpoint.meta.path)
            if depth is not None and len(key[1]) > depth:
                continue
            if not checkpoint.complete:
                jumps.partial[key] = checkpoint
            else:
                jumps.found[key] = checkpoint
                if checkpoint.edge == Edge.START:
                    insort(jumps.starts.setdefault(_loop(key[1]), []), key[1][-1][2])
        return jumps

    def anchor(self, entry: LoopEntry, index: int, frame: FrameType) -> None:
        """Walk the anchors where the recording walked them, if this is where."""
        nest = self.session.nest
        if nest is None or nest.entry is not entry or nest.anchors is not None:
            return
        head = (entry.site.id, entry.ordinal)
        for _, checkpoint in self._of_loop(head):
            if checkpoint.meta.anchored == index:
                loaded = self.store.load(checkpoint)
                then = msgspec.json.decode(loaded["anchors"])
                found, _ = self.session.roots(frame)
                mine = as_recorded(found, then["names"])
                missing = [name for name in then["names"] if name not in mine]
                if missing:
                    raise ReplayError(
                        f"{_plain(missing[0])} existed when the run entered the loop {entry.site.name}, "
                        "and does not exist now. The program took another way; was an input changed?",
                        slug="anchors",
                    )
                self.session.anchor(nest, index, mine, then["signature"]).check(then["signature"])
                return

    def _of_loop(self, head: tuple[str, int]) -> Iterator[tuple[Key, Checkpoint]]:
        for kept in (self.found, self.partial):
            for key, checkpoint in kept.items():
                if key[1][0][:2] == head:
                    yield key, checkpoint

    def at(self, edge: Edge, path: Sequence[PathStep]) -> Checkpoint | None:
        """Return the checkpoint at a place, None if there is none or it can't be used yet."""
        checkpoint = self.found.get(key_of(edge, path))
        nest = self.session.nest
        if checkpoint is None or nest is None or nest.anchors is None:
            return None
        return checkpoint

    def proof(self, edge: Edge, path: Sequence[PathStep]) -> Checkpoint | None:
        """Return the checkpoint to compare with at a place, a partial one for want of a better."""
        nest = self.session.nest
        if nest is None or nest.anchors is None:
            return None
        return self.at(edge, path) or self.partial.get(key_of(edge, path))

    def nearest(self, path: Sequence[PathStep], goal: int) -> Checkpoint | None:
        """Return the last checkpoint of the loop that `path` ends in, up to iteration `goal`."""
        _, steps = key_of(Edge.START, path)
        *outer, (site, ordinal, index) = steps
        known = self.starts.get(_loop(steps), [])
        best = bisect_right(known, goal) - 1
        if best < 0 or known[best] <= index:
            return None
        return self.at(Edge.START, [*outer, PathStep(site, ordinal, known[best])])

    def ahead(self, path: Sequence[PathStep], reach: int) -> bool:
        """Say whether there is something to compare with, up to iteration `reach` of this loop."""
        _, steps = key_of(Edge.START, path)
        for key, checkpoint in (*self.found.items(), *self.partial.items()):
            last = checkpoint.meta.path[-1].iteration
            later = last > steps[-1][2] or checkpoint.edge == Edge.END
            if _loop(key[1]) == _loop(steps) and later and last <= reach:
                return True
        return False

    def advance(self, source: Iterator[Any], count: int, frame: FrameType) -> None:
        """Draw and drop `count` items, then restore the pending checkpoint."""
        deque(drawn(source, count), maxlen=0)
        assert self.pending is not None
        self.restore(self.pending, frame)
        self.pending = None

    def restore(self, checkpoint: Checkpoint, frame: FrameType) -> None:
        """Put the program into the state of `checkpoint`, in place."""
        begun = perf_counter()
        nest = self.session.nest
        assert nest is not None
        assert nest.anchors is not None
        loaded = self.store.load(checkpoint)
        then = self._started_from(loaded)
        load_modules(then["names"])
        found, frames = self.session.roots(frame)
        functions = [qualified(one.f_code) for one in frames]
        if functions != then["frames"]:
            raise ReplayError(
                f"The checkpoint at {checkpoint.point} was taken in {' → '.join(then['frames'])}; "
                f"the program is now in {' → '.join(functions)}.",
                slug="frames",
            )
        now = as_recorded(found, then["names"])
        put_back(
            checkpoint.parts,
            lambda key: loaded[key],
            checkpoint.meta.outputs,
            lambda path: self.session.real(path, PathUse.CHANGE),
            self.session.root,
            self.session.shared,
        )
        skeleton = bytes(loaded["skeleton"])

        def read(key: str, memory: Any) -> None:
            view, oid = as_bytes(memory), checkpoint.parts[key].oid
            if not self.held.holds(view, oid):
                loaded.read_into(key, view)
                self.held.note(view, oid, How.READ)

        values = restore(nest.anchors, now, skeleton, loaded.__getitem__, read)
        rebind(values, now, frames)
        self.restored += 1
        self.seconds += perf_counter() - begun

    def _started_from(self, loaded: LoadedCheckpoint) -> dict[str, list[str]]:
        """Return the names and functions that the state started from: mostly those of the last time."""
        oid = loaded.checkpoint.parts["roots"].oid
        if oid != self._places[0]:
            self._places = (oid, msgspec.json.decode(loaded["roots"]))
        return self._places[1]

    def difference(self, checkpoint: Checkpoint, frame: FrameType) -> Difference | None:
        """Return where the live state differs from `checkpoint` first; None if nowhere."""
        nest = self.session.nest
        assert nest is not None
        assert nest.anchors is not None
        loaded = self.store.load(checkpoint)
        then = self._started_from(loaded)
        found, _ = self.session.roots(frame)
        now = as_recorded(found, then["names"])
        captured = capture(nest.anchors, now)

        def same(key: str, here: str) -> bool:
            # what is recorded need not be read: its name is its hash
            view, oid = as_bytes(captured.buffers[here]), checkpoint.parts[key].oid
            if self.held.holds(view, oid):
                return True
            if digest(view) != oid:
                return False
            self.held.note(view, oid, How.HASHED)
            return True

        skeleton = bytes(loaded["skeleton"])
        every = differences(nest.anchors, captured, skeleton, lambda key: loaded[key], same=same)
        missing = (*checkpoint.missing, *captured.missing)
        return next((one for one in every if not unknown(one, missing)), None)


def unknown(difference: Difference, missing: Iterable[str]) -> bool:
    """Say whether one side did not know what differs, such as the position in a file.

    A text file cannot tell it while it is iterated over, and can once it is exhausted; whether a
    boundary lies before or behind that is a matter of slices.
    """
    if "None" not in {difference.then, difference.now}:
        return False
    places = (text.partition(": ")[0] for text in missing)
    return any(difference.path.startswith((f"{place}[", f"{place}.")) for place in places)


def _loop(steps: tuple[tuple[str, int, int], ...]) -> tuple[Any, ...]:
    return (*steps[:-1], steps[-1][:2])


def _plain(root: str) -> str:
    """Return a root's name as the user knows it.

    >>> _plain("local:0:main:model"), _plain("global:__main__:lr")
    ('model in main', 'lr in __main__')
    """
    _, _, rest = root.partition(":")
    place, _, name = rest.rpartition(":")
    return f"{name} in {place.rpartition(':')[2]}"
