"""What is left of a segment when its turn has come: other backfills may be at the same work.

A replay that has started and not ended is a claim on what it covers, as long as the backfill that
it belongs to lives. There is no lock: a claim is a line in the run's own file, and of two that were
made at once the one that stands first in the file holds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rearview.backfill.coverage import ALL, Cell, cells, taken
from rearview.backfill.segments import Prepared
from rearview.backfill.shared_imports import Lead
from rearview.execute.executor import Task
from rearview.execute.pool import PendingSegment, Turn
from rearview.execute.replay_jobs import Replays
from rearview.execute.status import Post, RecordTail, at_work
from rearview.model import Segment
from rearview.model.run import name_of
from rearview.store.runs import Replay

Cells = Mapping[str, frozenset[Cell]]
"""Cells by the name that is logged there."""
_KNOWN = 0.5
"""Seconds for which a backfill that was seen at work is taken to be."""


@dataclass
class Turns:
    """Hands out the segments of one backfill beside those of others."""

    replays: Replays
    post: Post
    alike: Collection[Lead] = ()
    """Beginnings that several segments share."""
    planned: dict[str, Segment] = field(default_factory=dict)
    """By replay: the segment, where it runs as it was planned."""
    _held: dict[Segment, tuple[object, ...] | None] = field(default_factory=dict)
    """What was there when all that is left of a segment was claimed by others."""
    _seen: tuple[float, frozenset[str]] = (0.0, frozenset())

    def piece(self, one: Prepared, segment: Segment, *, first: bool) -> PendingSegment:
        """Return a segment as a piece of work that is laid out only when its turn has come."""
        last = segment.first if segment.last is None else segment.last
        wanted = range(segment.first, last) if segment.only is None else segment.only

        def watch(task: Task) -> RecordTail:
            loop = name_of(segment.loop) if segment.loop is not None else None
            return RecordTail(self.replays.runs.folder(one.run.id), task.id, loop, wanted)

        return PendingSegment(
            one.run, segment.seconds, lambda: self._turn(one, segment, first=first), watch
        )

    def _turn(self, one: Prepared, segment: Segment, *, first: bool) -> Turn:
        wanted = _cells(one, segment, first=first)
        if not any(wanted.values()):
            return Turn(self._task(one, segment, first))
        # before anything is read: what changes meanwhile is seen next time
        signs = self._signs(one)
        if signs is not None and self._held.get(segment) == signs:
            return Turn(None, rest=True)
        known = self.replays.runs.replays(one.run.id)
        filled, claimed = self._others(one, known)
        theirs = _taken(one, [replay for replay in known if self._new(one, replay)])
        helped = any(wanted[name] & theirs[name] for name in wanted)
        left = {name: wanted[name] - filled[name] - claimed[name] for name in wanted}
        rest = any((wanted[name] - filled[name]) & claimed[name] for name in wanted)
        if not any(left.values()):
            self._held[segment] = signs if rest else None
            return Turn(None, rest=rest, filled=helped)
        if left == wanted:
            task = self._task(one, segment, first)
            self.planned[task.id] = segment
        else:
            task = self._task(*_reduced(one, segment, wanted, left, first=first))
        if self._beaten(one, task, left):
            self.replays.abandon(one.run, task, "another backfill was first")
            self.planned.pop(task.id, None)
            return Turn(None, rest=True)
        return Turn(task, rest=rest, filled=helped)

    def _task(self, one: Prepared, segment: Segment, first: bool) -> Task:
        wanted = one.wanted(segment, first=first)
        told = {**one.kept(segment), "crew": self.post.id}
        imports = one.lead.imports if one.lead is not None and one.lead in self.alike else None
        return self.replays.prepare(one.run, one.version, wanted, segment, told, imports)

    def _beaten(self, one: Prepared, task: Task, mine: Cells) -> bool:
        """Say whether another claimed some of the same before us, just now."""
        known = self.replays.runs.replays(one.run.id)
        place = next(k for k, replay in enumerate(known) if replay.id == task.id)
        filled, claimed = self._others(one, known[:place])
        return any(mine[name] & (filled[name] | claimed[name]) for name in mine)

    def _others(self, one: Prepared, known: Iterable[Replay]) -> tuple[Cells, Cells]:
        """Return the cells that are filled, and those that others have under way."""
        known = list(known)
        living = at_work(self.replays.project) - {self.post.id} if known else frozenset()
        claims = [
            replace(replay, proved=True)
            for replay in known
            if replay.ended is None and replay.facts.get("crew") in living
        ]
        return _taken(one, known), _taken(one, claims)

    def _new(self, one: Prepared, replay: Replay) -> bool:
        """Say whether another backfill has filled what a replay covers since all was planned."""
        return replay.id not in one.known and replay.facts.get("crew") != self.post.id

    def _signs(self, one: Prepared) -> tuple[object, ...] | None:
        """Return what changes when others begin or end something, or die; it is cheap to ask."""
        when, living = self._seen
        if time.monotonic() - when > _KNOWN:
            living = at_work(self.replays.project)
            self._seen = time.monotonic(), living
        try:
            found = (self.replays.runs.folder(one.run.id) / "replays.jsonl").stat()
        except FileNotFoundError:
            return None
        return living, found.st_size, found.st_mtime_ns


def _cells(one: Prepared, segment: Segment, *, first: bool) -> Cells:
    """Return what a segment is to fill."""
    facts: dict[str, Any] = {
        "covered": (segment.first, ALL if segment.last is None else segment.last),
        "only": segment.only,
        "head": first,
        "tail": segment.tail or segment.loop is None,
    }
    return {name: cells(one.about, one.probes.of(name), facts) for name in one.names}


def _taken(one: Prepared, replays: Iterable[Replay]) -> Cells:
    same = one.told["same"].__getitem__
    known = list(replays)
    return {name: taken(one.about, known, name, one.probes.of(name), same) for name in one.names}


def _reduced(
    one: Prepared, segment: Segment, wanted: Cells, left: Cells, *, first: bool
) -> tuple[Prepared, Segment, bool]:
    """Return what is left of a segment: fewer names, fewer iterations, without its ends."""
    names = tuple(name for name in one.names if left[name])
    asked = tuple(dict.fromkeys(probe for name in names for probe in one.probes.of(name)))
    before, now = (frozenset[Cell]().union(*some.values()) for some in (wanted, left))
    only = tuple(sorted(cell for cell in now if isinstance(cell, int)))
    if segment.loop is not None and only:
        share = len(only) / sum(isinstance(cell, int) for cell in before)
        tail = segment.tail and "tail" not in before - now
        segment = replace(segment, only=only, tail=tail, seconds=share * segment.seconds)
    return replace(one, names=names, asked=asked), segment, first and "head" not in before - now
