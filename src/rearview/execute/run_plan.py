"""Run the segments of a plan on an executor, as many at once as the executor has slots (workers).

A segment is started again if its process was killed, or if it was stopped because there are fewer workers. If a replay
may be wrong only because of how it ran (`needs_rerun`), the segment runs again from the start of the run. Other
backfills may work on the same runs; therefore each segment is claimed just before it starts (`Claims`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from rearview.execute.backfill_status import (
    Eta,
    Event,
    Progress,
    RecordTail,
    SegmentProgress,
    StatusFile,
)
from rearview.execute.executor import Executor, Job, Task
from rearview.execute.replay_jobs import ReplayJobs, ReplayOutcome, needs_rerun
from rearview.model import Run, Segment
from rearview.model.process_messages import ReplayFailure
from rearview.model.run import name_of

MAX_LOSSES = 3
"""Most times that a segment is started again after its process was killed."""
LONG = 60.0
"""If there are fewer workers than running segments, a segment with fewer remaining seconds than this is not stopped."""
_POLL = 0.05
"""Seconds between checks of the running processes."""
_READ_EVERY = 0.5
"""Seconds between reads of a segment's records, and of the claims of other backfills."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The part of a segment that this backfill may run, as `Claims.take` returns it."""

    task: Task | None
    """The task that runs this part of the segment, or None if there is nothing to run now."""
    retry_later: bool = False
    """Whether another backfill has claimed a part of the segment; if True, `take` must be called again later."""
    filled: bool = False
    """Whether another backfill has filled the segment, wholly or in part."""


class Claims(Protocol):
    """Protocol for dividing the segments of a plan among the backfills that run at the same time."""

    def take(self, segment: Segment) -> Claim:
        """Claim the part of `segment` that no other backfill has filled or claimed, and return a task for this part."""
        ...

    def release(self, segment: Segment, task: Task, why: str) -> None:
        """Give up the claim of `task`, which did not end, on `segment`; `why` is stored with the replay."""
        ...


@dataclass(slots=True)
class _RunningSegment:
    number: int
    job: Job
    started: float
    eta: Eta
    records: RecordTail | None = None
    last_read: float = 0.0
    surplus: bool = False
    """Whether there are fewer workers than running segments, and this segment only runs on because it ends soon."""

    @property
    def rows(self) -> int:
        """Number of records that the segment has written."""
        return self.records.rows if self.records is not None else 0

    @property
    def reached(self) -> float | None:
        """Fraction of the segment's iterations up to its last record, or None before the first record."""
        return self.records.reached if self.records is not None else None


@dataclass
class Pool:
    """Runs the segments of one plan in their order, on the slots of an executor."""

    replays: ReplayJobs
    executor: Executor
    claims: Claims
    progress: Progress | None = None
    status: StatusFile | None = None
    """The status file of the backfill, through which other terminals request more or fewer workers."""
    filled_elsewhere: set[int] = field(default_factory=set)
    """Numbers of the segments that another backfill filled, wholly or in part."""
    _losses: dict[int, int] = field(default_factory=dict)
    """Number of a segment -> how many times its process was killed."""
    _rerun_reasons: dict[int, str] = field(default_factory=dict)
    """Number of a segment -> why its replay is repeated from the start of the run."""
    _unshared: bool = False
    """Whether all further segments are started as new processes, not forked. This is set after the process of a forked
    segment was killed, or after a forked segment was wrong and its repetition as a new process was exact.
    """
    _probe_raises: bool = False
    """Whether a probe raised in a segment that was not forked. Then forking is not the reason if it raises again."""
    _slots: int = 0
    _real_seconds: float = 0.0
    """Real seconds of the segments that have ended."""
    _predicted_seconds: float = 0.0
    """Predicted seconds of the segments that have ended."""

    def run(self, segments: Sequence[Segment], runs: Mapping[str, Run]) -> list[ReplayOutcome]:
        """Run the segments and return the outcomes of their replays, in the order of the segments.

        `runs` is id of a run -> run. A segment that another backfill filled has no outcome; a segment that another
        backfill filled in part may have several.
        """
        self._segments = segments
        self._runs = [runs[segment.run] for segment in segments]
        self._waiting: deque[tuple[int, Task | None]] = deque(
            (number, None) for number in range(len(segments))
        )
        self._running: dict[int, _RunningSegment] = {}
        self._outcomes: dict[int, list[ReplayOutcome]] = {}
        self._partly_claimed: set[int] = set()
        self._claimed_elsewhere: list[int] = []
        self._next_claim = 0.0
        self._ended: set[int] = set()
        self._total = sum(segment.seconds for segment in segments) or 1.0
        self._done_seconds = self._fraction_reported = 0.0
        self._segment_fractions = [0.0] * len(segments)
        self._slots = self.executor.slots
        try:
            while self._waiting or self._running or self._claimed_elsewhere:
                self._resize()
                self._reclaim()
                while self._waiting and len(self._running) < self._slots:
                    self._take_next()
                if not self._running:
                    time.sleep(_POLL)
                for slot, running in list(self._running.items()):
                    code = running.job.wait(_POLL / len(self._running))
                    self._read_records(slot, running)
                    if code is not None:
                        self._end(slot, running, code)
                self._report_progress()
        finally:
            for running in self._running.values():
                running.job.stop()
                self.replays.interrupt(self._runs[running.number], running.job.task)
            self.executor.close()
        return [outcome for number in sorted(self._outcomes) for outcome in self._outcomes[number]]

    def _resize(self) -> None:
        """Adapt the number of slots to the workers that the user requests and that the executor has."""
        requested = self.status.requested_workers() if self.status is not None else None
        if requested is not None:
            self.executor.resize(requested)
        slots = max(1, self.executor.slots)
        if slots != self._slots:
            self._slots = slots
            self._report("workers", 0)
        # if nodes leave a cluster, their jobs end like killed processes; here, only requests of the user are handled
        surplus = 0 if requested is None else len(self._running) - requested
        for slot in sorted(self._running, key=lambda slot: -self._running[slot].started):
            running = self._running[slot]
            if surplus <= 0:
                running.surplus = False
                continue
            surplus -= 1
            if not running.surplus:
                running.surplus = True
                self._stop_if_long(slot, running)

    def _stop_if_long(self, slot: int, running: _RunningSegment) -> None:
        """Stop the segment on `slot` and queue it again, unless its remaining seconds are few.

        Few means less than `LONG`, or less than the seconds that it has run.
        """
        now = time.monotonic()
        seconds_left = running.eta.seconds_left(now, running.reached, self._slowdown)
        if seconds_left < max(LONG, now - running.started):
            return
        running.job.stop()
        del self._running[slot]
        self._report("returned", running.number, worker=slot)
        self._queue_again(running, "its worker was taken away")

    def _reclaim(self) -> None:
        """If no segment is waiting, queue the segments that other backfills had claimed, to try again to claim them."""
        now = time.monotonic()
        if self._claimed_elsewhere and not self._waiting and now >= self._next_claim:
            self._waiting.extend((number, None) for number in self._claimed_elsewhere)
            self._claimed_elsewhere.clear()
            self._next_claim = now + _READ_EVERY

    def _take_next(self) -> None:
        """Claim the next waiting segment, and start the part of it that this backfill may run."""
        number, task = self._waiting.popleft()
        if task is None:
            segment, run = self._segments[number], self._runs[number]
            claim = self.claims.take(segment)
            if claim.filled:
                self.filled_elsewhere.add(number)
            if claim.task is None:
                self._skip(number, retry_later=claim.retry_later)
                return
            if claim.retry_later:
                self._partly_claimed.add(number)
            task = claim.task
            if number in self._rerun_reasons:
                self.claims.release(segment, task, "it runs from the start")
                task = self.replays.prepare_rerun(run, task, self._rerun_reasons[number])
        self._start(number, task)

    def _skip(self, number: int, *, retry_later: bool) -> None:
        """Leave a segment to another backfill: with `retry_later`, try again later, else count it as ended."""
        if retry_later:
            self._claimed_elsewhere.append(number)
            return
        self._ended.add(number)
        self._done_seconds += self._segments[number].seconds
        self._report("filled", number)

    def _start(self, number: int, task: Task) -> None:
        segment = self._segments[number]
        slot = next(k for k in range(len(self._running) + 1) if k not in self._running)
        task = replace(task, imports=None, stages=()) if self._unshared else task
        job = self.executor.start(task, slot)
        now = time.monotonic()
        records = self._records_of(number, job.task) if self.progress else None
        eta = Eta(segment.seconds, now)
        self._running[slot] = _RunningSegment(number, job, now, eta, records)
        self._report("started", number, seconds=segment.seconds, worker=slot)

    def _records_of(self, number: int, task: Task) -> RecordTail:
        segment = self._segments[number]
        last = segment.first if segment.last is None else segment.last
        iterations = range(segment.first, last) if segment.only is None else segment.only
        loop = name_of(segment.loop) if segment.loop is not None else None
        return RecordTail(self.replays.run_folder(segment.run), task.id, loop, iterations)

    def _read_records(self, slot: int, running: _RunningSegment) -> None:
        now = time.monotonic()
        if running.records is None or now - running.last_read < _READ_EVERY:
            return
        running.last_read = now
        if running.records.read():
            self._report("rows", running.number, worker=slot, rows=running.rows)

    def _end(self, slot: int, running: _RunningSegment, code: int) -> None:
        del self._running[slot]
        spent = time.monotonic() - running.started
        if not self._store_outcome(slot, running, code, spent):
            return
        outcome = self._outcomes[running.number][-1]
        report = outcome.report
        if running.number in self._partly_claimed:
            self._partly_claimed.remove(running.number)
            self._claimed_elsewhere.append(running.number)
        else:
            predicted = self._segments[running.number].seconds
            self._ended.add(running.number)
            self._done_seconds += predicted
            self._real_seconds += spent
            self._predicted_seconds += predicted
        self._report(
            "proved" if outcome.proved else "failed",
            running.number,
            seconds=spent,
            worker=slot,
            rows=report.written,
            message=report.error
            or report.difference
            or ", ".join(report.lacking or report.differing),
        )

    def _store_outcome(self, slot: int, running: _RunningSegment, code: int, spent: float) -> bool:
        """Store the outcome of a segment whose process ended with exit code `code` after `spent` seconds.

        Return False if the segment was queued again and has no outcome yet: its process was killed, or the replay must
        be repeated from the start of the run.
        """
        task, run, number = running.job.task, self._runs[running.number], running.number
        if code < 0 and not task.report.exists() and self._losses.get(number, 0) < MAX_LOSSES:
            self._losses[number] = self._losses.get(number, 0) + 1
            self._unshared = self._unshared or task.imports is not None
            self._report("lost", number, worker=slot, message=f"it ended with {code}")
            self._queue_again(running, "its worker was lost")
            return False
        outcome = self.replays.judge(run, task, code, spent, self._rerun_reasons.get(number, ""))
        raised = outcome.report.failure in {
            ReplayFailure.PROBE_RAISED,
            ReplayFailure.WRONG_PLACE,
        }
        shared = task.imports is not None and not (raised and self._probe_raises)
        doubtful = needs_rerun(outcome.report, pinned=task.threads is not None, shared=shared)
        if doubtful and number not in self._rerun_reasons:
            why = self._rerun_reasons[number] = outcome.proof.why
            self._report("again", number, seconds=spent, worker=slot, message=why)
            self._waiting.appendleft((number, self.replays.prepare_rerun(run, task, why)))
            return False
        if number in self._rerun_reasons:
            # if the repetition is exact, the first replay may have been wrong because it was forked
            self._unshared = self._unshared or outcome.proved
            self._probe_raises = self._probe_raises or raised
        self._outcomes.setdefault(number, []).append(outcome)
        return True

    def _queue_again(self, running: _RunningSegment, why: str) -> None:
        """Release the claim of a segment that did not end, and queue it so that the next free worker runs it."""
        self.claims.release(self._segments[running.number], running.job.task, why)
        self._partly_claimed.discard(running.number)
        self._waiting.appendleft((running.number, None))

    @property
    def _slowdown(self) -> float:
        """Real seconds per predicted second of the segments that have ended; 1 if none has."""
        if self._predicted_seconds <= 0:
            return 1.0
        return self._real_seconds / self._predicted_seconds

    def _report(
        self,
        kind: str,
        number: int,
        *,
        seconds: float = 0.0,
        worker: int | None = None,
        rows: int = 0,
        message: str = "",
    ) -> None:
        if self.progress is None:
            return
        self.progress(
            Event(
                kind,
                number,
                len(self._segments),
                self._segments[number].run,
                self._fraction(),
                seconds,
                message=message,
                worker=worker,
                rows=rows,
                workers=self._slots,
            )
        )

    def _report_progress(self) -> None:
        """Publish the status, and report the progress of running segments and the predicted seconds to the end."""
        now, slowdown = time.monotonic(), self._slowdown
        under_way = tuple(
            self._segment_progress(slot, running, now, slowdown)
            for slot, running in self._running.items()
        )
        numbers = [*(number for number, _ in self._waiting), *self._claimed_elsewhere]
        waiting = sum(self._segments[number].seconds for number in numbers) * slowdown
        seconds_left = max(
            (sum(each.seconds_left for each in under_way) + waiting) / self._slots,
            max((each.seconds_left for each in under_way), default=0.0),
        )
        if self.status is not None:
            self.status.update(
                workers=self._slots,
                busy=len(under_way),
                segments=len(self._segments),
                ended=len(self._ended),
                seconds_left=seconds_left,
            )
        if self.progress is None or not (under_way or self._claimed_elsewhere):
            return
        first = under_way[0].segment if under_way else self._claimed_elsewhere[0]
        self.progress(
            Event(
                "progress",
                first,
                len(self._segments),
                self._segments[first].run,
                self._fraction(),
                seconds_left=seconds_left,
                workers=self._slots,
                under_way=under_way,
                claimed_elsewhere=len(self._claimed_elsewhere),
            )
        )

    def _fraction(self) -> float:
        """Return the fraction of the predicted seconds of all segments that is done; it never decreases.

        If a segment runs again or becomes slower, its own fraction stays the same until the segment is further.
        """
        numbers = {running.number for running in self._running.values()} - self._ended
        partly = sum(self._segment_fractions[k] * self._segments[k].seconds for k in numbers)
        fraction = min(1.0, (self._done_seconds + partly) / self._total)
        self._fraction_reported = max(self._fraction_reported, fraction)
        return self._fraction_reported

    def _segment_progress(
        self, slot: int, running: _RunningSegment, now: float, slowdown: float
    ) -> SegmentProgress:
        segment, spent = self._segments[running.number], now - running.started
        seconds_left = running.eta.seconds_left(now, running.reached, slowdown)
        total = spent + seconds_left
        fraction = max(spent / total if total > 0 else 0.0, self._segment_fractions[running.number])
        self._segment_fractions[running.number] = fraction
        predicted = max(0.0, segment.seconds - spent)
        return SegmentProgress(
            *(slot, running.number, segment.run, fraction),
            *(spent, predicted, seconds_left, running.rows),
        )
