"""Divide the segments of a backfill with other backfills that run at the same time.

A replay that has started and not ended is a claim on the cells that it covers, as long as its backfill
runs. There is no lock: a claim is a line in the run's own file, and if two backfills claim the same cells
at once, the line that comes first in the file holds.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rearview.backfill.coverage import ALL, Cell, cells_of, filled_cells
from rearview.backfill.prepare_run import PreparedRun
from rearview.backfill.run_facts import RunRequest, replay_start, segment_file
from rearview.backfill.setup_sharing import Lead
from rearview.execute.backfill_status import StatusFile, active_backfills
from rearview.execute.executor import SetupStage, Task
from rearview.execute.replay_jobs import ReplayJobs
from rearview.execute.run_plan import Claim
from rearview.model import ReplayStart, Segment
from rearview.store.runs import Replay

Cells = Mapping[str, frozenset[Cell]]
"""Cells by the name that is logged there."""
_ACTIVE_SECONDS = 0.5
"""Seconds for which the list of active backfills is not read again."""


@dataclass
class SegmentClaims:
    """Claims the segments of one plan (the `Claims` of `execute.run_plan`)."""

    replays: ReplayJobs
    status: StatusFile
    prepared: Mapping[str, PreparedRun]
    """By run."""
    segments: Sequence[Segment] = ()
    shared_leads: Collection[Lead] = ()
    """Starts that several segments share."""
    stages: Mapping[str, tuple[SetupStage, ...]] = field(default_factory=dict)
    """By run: the parts of its set-up that several segments share."""
    planned: dict[str, Segment] = field(default_factory=dict)
    """By replay, the segment if it runs exactly as planned."""
    _held_states: dict[Segment, tuple[object, ...] | None] = field(default_factory=dict)
    """State of the claims when other backfills had claimed all that is left of a segment."""
    _active: tuple[float, frozenset[str]] = (0.0, frozenset())

    def __post_init__(self) -> None:
        self._first_of_run = {segment.run: segment for segment in reversed(self.segments)}

    def take(self, segment: Segment) -> Claim:
        """Claim the part of a segment that no other backfill has filled or claimed, and prepare its replay."""
        prepared = self.prepared[segment.run]
        request = prepared.request
        first = self._first_of_run[segment.run] is segment
        segment_cells = _cells_of_segment(request, segment, first=first)
        if not any(segment_cells.values()):
            return Claim(self._task(prepared, request, segment, first=first))
        # read before the replays are: a change in between is then noticed next time
        state = self._claims_state(request)
        if state is not None and self._held_states.get(segment) == state:
            return Claim(None, rest=True)
        replays = self.replays.runs.replays(request.run.id)
        filled, claimed = self._cells_of_others(request, replays)
        newly_filled = _filled(request, [each for each in replays if self._is_new(prepared, each)])
        helped = any(segment_cells[name] & newly_filled[name] for name in segment_cells)
        unclaimed = {
            name: segment_cells[name] - filled[name] - claimed[name] for name in segment_cells
        }
        claimed_by_others = any(
            (segment_cells[name] - filled[name]) & claimed[name] for name in segment_cells
        )
        if not any(unclaimed.values()):
            self._held_states[segment] = state if claimed_by_others else None
            return Claim(None, rest=claimed_by_others, filled=helped)
        if unclaimed == segment_cells:
            task = self._task(prepared, request, segment, first=first)
            self.planned[task.id] = segment
        else:
            reduced, part, first = _reduce(request, segment, segment_cells, unclaimed, first=first)
            task = self._task(prepared, reduced, part, first=first)
        if self._lost_race(request, task, unclaimed):
            self.release(segment, task, "another backfill was first")
            self.planned.pop(task.id, None)
            return Claim(None, rest=True)
        return Claim(task, rest=claimed_by_others, filled=helped)

    def release(self, segment: Segment, task: Task, why: str) -> None:
        """Give up the claim of a task, so that any backfill may run its segment."""
        self.replays.abandon(self.prepared[segment.run].run, task, why)

    def _task(
        self, prepared: PreparedRun, request: RunRequest, segment: Segment, *, first: bool
    ) -> Task:
        file = segment_file(request, segment, first=first)
        start = replay_start(request, segment, self.status.id)
        lead = prepared.lead
        imports = lead.imports if lead is not None and lead in self.shared_leads else None
        stages = self.stages.get(segment.run, ()) if imports is not None else ()
        # a segment that does not divide the main loop does not stop there
        stages = tuple(stage for stage in stages if stage.start.statements is not None or file.main)
        return self.replays.prepare(
            request.run, request.version, file, segment, start, imports, stages
        )

    def _lost_race(self, request: RunRequest, task: Task, own: Cells) -> bool:
        """Return True if another backfill claimed some of the same cells just before this one."""
        replays = self.replays.runs.replays(request.run.id)
        position = next(k for k, replay in enumerate(replays) if replay.id == task.id)
        filled, claimed = self._cells_of_others(request, replays[:position])
        return any(own[name] & (filled[name] | claimed[name]) for name in own)

    def _cells_of_others(
        self, request: RunRequest, replays: Sequence[Replay]
    ) -> tuple[Cells, Cells]:
        """Return the filled cells, and the cells that other backfills have claimed."""
        active = active_backfills(self.replays.project) - {self.status.id} if replays else ()
        claims = [
            replace(replay, proved=True)
            for replay in replays
            if replay.ended is None and replay.start.crew in active
        ]
        return _filled(request, replays), _filled(request, claims)

    def _is_new(self, prepared: PreparedRun, replay: Replay) -> bool:
        """Return True if another backfill ran a replay since the plan was made."""
        by_another = replay.start.crew != self.status.id
        return replay.id not in prepared.ended_replays and by_another

    def _claims_state(self, request: RunRequest) -> tuple[object, ...] | None:
        """Return a value, cheap to get, that changes when another backfill starts, ends or dies."""
        when, active = self._active
        if time.monotonic() - when > _ACTIVE_SECONDS:
            active = active_backfills(self.replays.project)
            self._active = time.monotonic(), active
        try:
            file = (self.replays.runs.folder(request.run.id) / "replays.jsonl").stat()
        except FileNotFoundError:
            return None
        return active, file.st_size, file.st_mtime_ns


def _cells_of_segment(request: RunRequest, segment: Segment, *, first: bool) -> Cells:
    """Return the cells that a segment fills."""
    start = ReplayStart(
        covered=(segment.first, ALL if segment.last is None else segment.last),
        only=None if segment.only is None else tuple(segment.only),
        head=first,
        tail=segment.tail or segment.loop is None,
    )
    return {
        name: cells_of(request.coverage, request.probes.of(name), start) for name in request.names
    }


def _filled(request: RunRequest, replays: Iterable[Replay]) -> Cells:
    """Return the cells that replays filled."""
    digest_of = (request.digests or {}).__getitem__
    some = list(replays)
    return {
        name: filled_cells(request.coverage, some, name, request.probes.of(name), digest_of)
        for name in request.names
    }


def _reduce(
    request: RunRequest, segment: Segment, segment_cells: Cells, unclaimed: Cells, *, first: bool
) -> tuple[RunRequest, Segment, bool]:
    """Return the part of a segment that is left: fewer names, fewer iterations, maybe without its ends.

    The last value is True if that part includes the code before the loop.
    """
    names = tuple(name for name in request.names if unclaimed[name])
    probes = tuple(dict.fromkeys(probe for name in names for probe in request.probes.of(name)))
    before, now = (frozenset[Cell]().union(*cells.values()) for cells in (segment_cells, unclaimed))
    only = tuple(sorted(cell for cell in now if isinstance(cell, int)))
    if segment.loop is not None and only:
        fraction = len(only) / sum(isinstance(cell, int) for cell in before)
        tail = segment.tail and "tail" not in before - now
        segment = replace(segment, only=only, tail=tail, seconds=fraction * segment.seconds)
    reduced = replace(request, names=names, requested=probes)
    return reduced, segment, first and "head" not in before - now
