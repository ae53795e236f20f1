"""Find, restore and compare the checkpoints of a run that is executed again.

A replay or a resumed run looks up checkpoints by loop path (`CheckpointIndex`). `KnownMemory` remembers which stored
object a memory block equals, so that the object is not read or hashed again: for example, a data set in memory is
equal in all checkpoints of a run.

Roots are the global and local variables from which the objects of the state are reached. Anchors are the objects
that existed when the outermost loop was entered; a saved state refers to them by number.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from types import FrameType
from typing import Any

import msgspec

from rearview.errors import ReplayError
from rearview.model import Checkpoint, Edge, LoopStep
from rearview.runtime.base_session import Session
from rearview.runtime.loops import LoopEntry
from rearview.runtime.program_frames import as_recorded, load_modules, rebind
from rearview.runtime.sandbox.file_view import PathUse
from rearview.runtime.sandbox.written_files import restore_files
from rearview.runtime.saving.dirty_pages import TRACK_FROM, Pages, PageWatch, address_of
from rearview.state.capture import capture
from rearview.state.codecs.suspended_generators import draw_items
from rearview.state.compare import Difference, compare
from rearview.state.restore import restore
from rearview.store.checkpoints.checkpoints import Checkpoints, LoadedCheckpoint
from rearview.store.checkpoints.objects import as_bytes, digest


class KnownFrom(Enum):
    """The way in which Rearview learned that a memory block equals a stored object."""

    READ = "read"
    """The object was read from the store into the block."""
    HASHED = "hashed"
    """The hash of the block equals the hash of the object."""


@dataclass(slots=True)
class _KnownBlock:
    nbytes: int
    oid: str
    known_from: tuple[KnownFrom, ...]
    watch: PageWatch | None


@dataclass(slots=True)
class KnownMemory:
    """Remembers which memory blocks of this process equal stored objects, until the program writes to the blocks."""

    pages: Pages = field(default_factory=Pages)
    blocks: dict[int, _KnownBlock] = field(default_factory=dict)

    def holds(self, view: memoryview, oid: str) -> bool:
        """Return True if the memory `view` is known to equal the object `oid`; False if it differs or is not known."""
        if len(view) < TRACK_FROM or not self.blocks:
            return False
        block = self.blocks.get(address_of(view))
        if block is None or block.watch is None or (block.oid, block.nbytes) != (oid, len(view)):
            return False
        return self.pages.unwritten(block.watch, view)

    def remember(self, view: memoryview, oid: str, how: KnownFrom) -> None:
        """Remember that the memory `view` now equals the object `oid`; `how` says how Rearview learned it.

        The memory pages are watched for writes only after the same object was read twice, or hashed twice: most
        memory changes between two checkpoints, and watching costs more than reading. A hash after a read does not
        count as the second time, because every restored state is compared soon after the restore.
        """
        if len(view) < TRACK_FROM or not self.pages.available:
            return
        address = address_of(view)
        block = self.blocks.get(address)
        if block is not None and block.watch is not None:
            self.pages.forget(block.watch)
        same = block is not None and (block.oid, block.nbytes) == (oid, len(view))
        known_from = block.known_from if block is not None and same else ()
        watch = self.pages.watch(view) if how in known_from else None
        self.blocks[address] = _KnownBlock(
            len(view), oid, known_from if how in known_from else (*known_from, how), watch
        )


Key = tuple[Edge, tuple[LoopStep, ...]]


def key_of(edge: Edge, path: Sequence[LoopStep]) -> Key:
    """Return the key of a checkpoint in `CheckpointIndex`: `edge` and the steps of `path`, from the outermost loop in.

    For a checkpoint at the end of a loop (`Edge.END`), -1 replaces the last iteration, which does not matter then.
    """
    if edge is Edge.END:
        path = [*path[:-1], path[-1]._replace(iteration=-1)]
    return edge, tuple(path)


@dataclass
class CheckpointIndex:
    """Index of the checkpoints of one run, for a session that executes the run again."""

    session: Session
    store: Checkpoints
    complete: dict[Key, Checkpoint] = field(default_factory=dict)
    partial: dict[Key, Checkpoint] = field(default_factory=dict)
    """Key -> checkpoint of which parts are missing: it is compared with the live state but never restored."""
    starts: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)
    """Loop path without the last iteration -> sorted iterations of the loop that have a complete checkpoint."""
    restored: int = 0
    """Number of checkpoints that this session has restored."""
    seconds: float = 0.0
    """Seconds that this session spent on restoring checkpoints."""
    pending: Checkpoint | None = None
    """Checkpoint that the next call of `advance` restores; None if no checkpoint is chosen."""
    known_memory: KnownMemory = field(default_factory=KnownMemory)
    _last_roots: tuple[str, dict[str, list[str]]] = field(default=("", {}))
    """Oid of the object with the recorded roots in the last loaded checkpoint, and these roots, decoded."""

    @classmethod
    def of(
        cls, session: Session, store: Checkpoints, run: str, depth: int | None = None
    ) -> CheckpointIndex:
        """Return the index of the checkpoints of `run` in `store`.

        With `depth`, the index has only checkpoints that are inside at most `depth` loops.
        """
        index = cls(session, store)
        for checkpoint in store.of(run):
            key = key_of(checkpoint.edge, checkpoint.meta.path)
            if depth is not None and len(key[1]) > depth:
                continue
            if not checkpoint.complete:
                index.partial[key] = checkpoint
            else:
                index.complete[key] = checkpoint
                if checkpoint.edge is Edge.START:
                    insort(index.starts.setdefault(_without_index(key[1]), []), key[1][-1][2])
        return index

    def walk_recorded_anchors(self, entry: LoopEntry, index: int, frame: FrameType) -> None:
        """Collect the anchors of the outermost loop `entry` if the recording collected them before iteration `index`.

        Anchors are the objects that exist at this moment; checkpoints of the loop refer to them by number. Raise an
        error if the live objects differ from the recorded anchors.
        """
        nest = self.session.nest
        if nest is None or nest.entry is not entry or nest.anchors is not None:
            return
        head = (entry.site.id, entry.ordinal)
        for _, checkpoint in self._of_loop(head):
            if checkpoint.meta.anchored == index:
                loaded = self.store.load(checkpoint)
                recorded = msgspec.json.decode(loaded["anchors"])
                live, _ = self.session.roots(frame)
                matching = as_recorded(live, recorded["names"])
                missing_names = [name for name in recorded["names"] if name not in matching]
                if missing_names:
                    raise ReplayError(
                        f"{_root_in_words(missing_names[0])} existed when the run entered the loop {entry.site.name}, "
                        "and does not exist now. The program took another path; was an input changed?",
                        slug="anchors",
                    )
                self.session.walk_anchors(nest, index, matching, recorded["signature"]).check(
                    recorded["signature"]
                )
                return

    def _of_loop(self, head: tuple[str, int]) -> Iterator[tuple[Key, Checkpoint]]:
        for checkpoints in (self.complete, self.partial):
            for key, checkpoint in checkpoints.items():
                if key[1][0][:2] == head:
                    yield key, checkpoint

    def at(self, edge: Edge, path: Sequence[LoopStep]) -> Checkpoint | None:
        """Return the complete checkpoint at the boundary given by `edge` (start of an iteration or end) and `path`.

        Return None if there is none, or if the anchors are not collected yet, so that it cannot be restored.
        """
        checkpoint = self.complete.get(key_of(edge, path))
        nest = self.session.nest
        if checkpoint is None or nest is None or nest.anchors is None:
            return None
        return checkpoint

    def to_compare(self, edge: Edge, path: Sequence[LoopStep]) -> Checkpoint | None:
        """Return the checkpoint with which to compare the live state at the boundary given by `edge` and `path`.

        A checkpoint with missing parts is returned only if there is no complete one. Return None if there is neither,
        or if the anchors are not collected yet.
        """
        nest = self.session.nest
        if nest is None or nest.anchors is None:
            return None
        return self.at(edge, path) or self.partial.get(key_of(edge, path))

    def nearest(self, path: Sequence[LoopStep], goal: int) -> Checkpoint | None:
        """Return the last complete checkpoint of a loop after its current iteration, or None if there is none.

        The last step of `path` names the loop and its current iteration. Checkpoints after iteration `goal` are
        ignored.
        """
        _, steps = key_of(Edge.START, path)
        *outer, (site, ordinal, index) = steps
        starts = self.starts.get(_without_index(steps), [])
        position = bisect_right(starts, goal) - 1
        if position < 0 or starts[position] <= index:
            return None
        return self.at(Edge.START, [*outer, LoopStep(site, ordinal, starts[position])])

    def has_more(self, path: Sequence[LoopStep], reach: int) -> bool:
        """Return True if the last loop of `path` has a later checkpoint, at or before its iteration `reach`."""
        _, steps = key_of(Edge.START, path)
        for key, checkpoint in (*self.complete.items(), *self.partial.items()):
            last = checkpoint.meta.path[-1].iteration
            later = last > steps[-1][2] or checkpoint.edge is Edge.END
            if _without_index(key[1]) == _without_index(steps) and later and last <= reach:
                return True
        return False

    def advance(self, source: Iterator[Any], count: int, frame: FrameType) -> None:
        """Draw `count` items from the loop's iterator `source` and drop them, then restore the checkpoint `pending`."""
        deque(draw_items(source, count), maxlen=0)
        assert self.pending is not None
        self.restore(self.pending, frame)
        self.pending = None

    def restore(self, checkpoint: Checkpoint, frame: FrameType) -> None:
        """Restore the state of `checkpoint` into the program's objects, variables and output files.

        `frame` is the frame in which the innermost loop runs.
        """
        begun = perf_counter()
        nest = self.session.nest
        assert nest is not None
        assert nest.anchors is not None
        loaded = self.store.load(checkpoint)
        recorded = self._recorded_roots(loaded)
        load_modules(recorded["names"])
        live, frames = self.session.roots(frame)
        functions = [program_frame.f_code.co_qualname for program_frame in frames]
        if functions != recorded["frames"]:
            raise ReplayError(
                f"The checkpoint at {checkpoint.point} was taken in {' → '.join(recorded['frames'])}; "
                f"the program is now in {' → '.join(functions)}.",
                slug="frames",
            )
        matching = as_recorded(live, recorded["names"])
        restore_files(
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
            if not self.known_memory.holds(view, oid):
                loaded.read_into(key, view)
                self.known_memory.remember(view, oid, KnownFrom.READ)

        values = restore(nest.anchors, matching, skeleton, loaded.__getitem__, read)
        rebind(values, matching, frames)
        self.restored += 1
        self.seconds += perf_counter() - begun

    def _recorded_roots(self, loaded: LoadedCheckpoint) -> dict[str, list[str]]:
        """Return the roots that the checkpoint `loaded` has recorded.

        `names` are the names of all roots, `frames` the functions to which local variables belong. If successive
        checkpoints have equal roots, they are decoded once.
        """
        oid = loaded.checkpoint.parts["roots"].oid
        if oid != self._last_roots[0]:
            self._last_roots = (oid, msgspec.json.decode(loaded["roots"]))
        return self._last_roots[1]

    def difference(self, checkpoint: Checkpoint, frame: FrameType) -> Difference | None:
        """Return the first difference between the live state in `frame` and `checkpoint`, or None if they are equal."""
        nest = self.session.nest
        assert nest is not None
        assert nest.anchors is not None
        loaded = self.store.load(checkpoint)
        recorded = self._recorded_roots(loaded)
        live, _ = self.session.roots(frame)
        matching = as_recorded(live, recorded["names"])
        captured = capture(nest.anchors, matching)

        def equal_buffers(key: str, current_key: str) -> bool:
            # compare hashes, without reading the stored object: its oid is the hash of its bytes
            view, oid = as_bytes(captured.buffers[current_key]), checkpoint.parts[key].oid
            if self.known_memory.holds(view, oid):
                return True
            if digest(view) != oid:
                return False
            self.known_memory.remember(view, oid, KnownFrom.HASHED)
            return True

        skeleton = bytes(loaded["skeleton"])
        return compare(
            nest.anchors,
            captured,
            skeleton,
            lambda key: loaded[key],
            recorded_missing=checkpoint.missing,
            equal_buffers=equal_buffers,
        )


def _without_index(steps: tuple[tuple[str, int, int], ...]) -> tuple[Any, ...]:
    return (*steps[:-1], steps[-1][:2])


def _root_in_words(root: str) -> str:
    """Return the name of a root as a message to the user shows it.

    >>> _root_in_words("local:0:main:model"), _root_in_words("global:__main__:lr")
    ('model in main', 'lr in __main__')
    """
    _, _, scoped = root.partition(":")
    place, _, name = scoped.rpartition(":")
    return f"{name} in {place.rpartition(':')[2]}"
