"""Claim segments, so that backfills that run at the same time do not fill the same values twice.

As long as a replay and its backfill run, the replay claims the cells that it will fill. (A cell is a part of a run in
which a name is logged, see `coverage.Cell`.) There is no lock. A claim is a line in the file `replays.jsonl` of the
run; if two backfills claim a cell at the same moment, the backfill whose line comes first gets it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rearview.backfill.coverage import ALL, Cell, cells_of, filled_cells
from rearview.backfill.examine_run import PreparedRun
from rearview.backfill.facts_and_segments import RunRequest, replay_start, segment_file
from rearview.backfill.setup_sharing import LeadingImports
from rearview.execute.backfill_status import StatusFile, active_backfills
from rearview.execute.executor import SetupStage, Task
from rearview.execute.replay_jobs import ReplayJobs
from rearview.execute.run_plan import Claim
from rearview.model import ReplayStart, Segment
from rearview.store.runs import Replay

Cells = Mapping[str, frozenset[Cell]]
"""Logged name -> a set of its cells."""
_ACTIVE_SECONDS = 0.5
"""Seconds for which the list of active backfills is kept in memory before it is read again."""


@dataclass
class SegmentClaims:
    """Claims the segments of one plan; implements the protocol `Claims` of `execute.run_plan`."""

    replays: ReplayJobs
    status: StatusFile
    prepared: Mapping[str, PreparedRun]
    """Id of a run -> the prepared run."""
    segments: Sequence[Segment] = ()
    shared_imports: Collection[LeadingImports] = ()
    """Imports at the start of programs that are executed once for several segments."""
    stages: Mapping[str, tuple[SetupStage, ...]] = field(default_factory=dict)
    """Id of a run -> statements before its main loop that are executed once for several segments."""
    planned: dict[str, Segment] = field(default_factory=dict)
    """Id of a replay -> its segment, only for replays that claimed all of their segment."""
    _status_when_claimed: dict[Segment, tuple[object, ...] | None] = field(default_factory=dict)
    """Segment -> value of `_claims_status` when other backfills had claimed all its missing cells. As long as the
    value does not change, the segment cannot be claimed.
    """
    _active: tuple[float, frozenset[str]] = (0.0, frozenset())
    """(monotonic time of reading, ids of the active backfills)."""

    def __post_init__(self) -> None:
        self._first_of_run = {segment.run: segment for segment in reversed(self.segments)}

    def take(self, segment: Segment) -> Claim:
        """Claim the part of `segment` that no other backfill has filled or claimed, and prepare a replay of this part.

        If there is no such part, the claim has no task.
        """
        prepared = self.prepared[segment.run]
        request = prepared.request
        first = self._first_of_run[segment.run] is segment
        segment_cells = _cells_of_segment(request, segment, first=first)
        if not any(segment_cells.values()):
            return Claim(self._task(prepared, request, segment, first=first))
        # read the status before the replays: if a claim changes in between, the next call sees another status
        status = self._claims_status(request)
        if status is not None and self._status_when_claimed.get(segment) == status:
            return Claim(None, retry_later=True)
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
            self._status_when_claimed[segment] = status if claimed_by_others else None
            return Claim(None, retry_later=claimed_by_others, filled=helped)
        if unclaimed == segment_cells:
            task = self._task(prepared, request, segment, first=first)
            self.planned[task.id] = segment
        else:
            reduced, part, first = _reduce(request, segment, segment_cells, unclaimed, first=first)
            task = self._task(prepared, reduced, part, first=first)
        if self._lost_race(request, task, unclaimed):
            self.release(segment, task, "another backfill was first")
            self.planned.pop(task.id, None)
            return Claim(None, retry_later=True)
        return Claim(task, retry_later=claimed_by_others, filled=helped)

    def release(self, segment: Segment, task: Task, why: str) -> None:
        """Give up the claim of `task` on `segment`, so that another backfill may claim it; `why` is stored."""
        self.replays.abandon(self.prepared[segment.run].run, task, why)

    def _task(
        self, prepared: PreparedRun, request: RunRequest, segment: Segment, *, first: bool
    ) -> Task:
        file = segment_file(request, segment, first=first)
        start = replay_start(request, segment, self.status.id)
        leading = prepared.leading_imports
        imports = (
            leading.imports if leading is not None and leading in self.shared_imports else None
        )
        stages = self.stages.get(segment.run, ()) if imports is not None else ()
        # a set-up that ends before the main loop is only useful for a segment that runs a part of this loop
        stages = tuple(stage for stage in stages if stage.start.statements is not None or file.main)
        return self.replays.prepare(
            request.run, request.version, file, segment, start, imports, stages
        )

    def _lost_race(self, request: RunRequest, task: Task, own_cells: Cells) -> bool:
        """Return True if another backfill claimed or filled some of `own_cells` just before `task` claimed them."""
        replays = self.replays.runs.replays(request.run.id)
        position = next(k for k, replay in enumerate(replays) if replay.id == task.id)
        filled, claimed = self._cells_of_others(request, replays[:position])
        return any(own_cells[name] & (filled[name] | claimed[name]) for name in own_cells)

    def _cells_of_others(
        self, request: RunRequest, replays: Sequence[Replay]
    ) -> tuple[Cells, Cells]:
        """Return (requested cells that `replays` have filled, requested cells that other active backfills claim)."""
        active = active_backfills(self.replays.project) - {self.status.id} if replays else ()
        claims = [
            replace(replay, proved=True)
            for replay in replays
            if replay.ended is None and replay.start.crew in active
        ]
        return _filled(request, replays), _filled(request, claims)

    def _is_new(self, prepared: PreparedRun, replay: Replay) -> bool:
        """Return True if `replay` belongs to another backfill and had not ended when the run was prepared."""
        by_another = replay.start.crew != self.status.id
        return replay.id not in prepared.ended_replays and by_another

    def _claims_status(self, request: RunRequest) -> tuple[object, ...] | None:
        """Return a value that changes when a backfill starts, ends or dies, or claims cells of the requested run.

        Return None if the run has no replays. Comparing this value is much faster than reading the claims.
        """
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
    """Return the requested cells that `segment` fills; `first` says that it is the first segment of its run."""
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
    """Return the cells of the requested names that `replays` have filled; replays that do not count are ignored."""
    digest_of = (request.digests or {}).__getitem__
    all_replays = list(replays)
    return {
        name: filled_cells(request.coverage, all_replays, name, request.probes.of(name), digest_of)
        for name in request.names
    }


def _reduce(
    request: RunRequest, segment: Segment, segment_cells: Cells, unclaimed: Cells, *, first: bool
) -> tuple[RunRequest, Segment, bool]:
    """Return (`request`, `segment`, `first`) reduced to the `unclaimed` ones of the cells `segment_cells`.

    The reduced segment may fill fewer names, run fewer iterations, and leave out values from before the main loop
    (`first` is then False) or after it.
    """
    names = tuple(name for name in request.names if unclaimed[name])
    probes = tuple(dict.fromkeys(probe for name in names for probe in request.probes.of(name)))
    planned, remaining = (
        frozenset[Cell]().union(*cells.values()) for cells in (segment_cells, unclaimed)
    )
    only = tuple(sorted(cell for cell in remaining if isinstance(cell, int)))
    if segment.loop is not None and only:
        fraction = len(only) / sum(isinstance(cell, int) for cell in planned)
        tail = segment.tail and "tail" not in planned - remaining
        segment = replace(segment, only=only, tail=tail, seconds=fraction * segment.seconds)
    reduced = replace(request, names=names, requested=probes)
    return reduced, segment, first and "head" not in planned - remaining
