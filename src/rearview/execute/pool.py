"""Run segments on an executor: as many at once as it has slots, each until it has an answer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rearview.execute.executor import Executor, Job, Task
from rearview.execute.replay_jobs import ReplayOutcome, Replays, doubtful
from rearview.execute.status import Eta, Event, Post, Progress, RecordTail, UnderWay
from rearview.model import Run
from rearview.model.plan import PROBE_RAISED

LOST = 3
"""How often a segment is started again whose process was killed under it."""
LONG = 60.0
"""Seconds that a segment may still take when its worker is taken away."""
_PAUSE = 0.05
_LOOK = 0.5
"""Seconds between looks at the records of a segment, and at what others have under way."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What there is to do of a piece when its turn has come."""

    task: Task | None
    """None: nothing."""
    rest: bool = False
    """Another backfill has some of it under way: it is to be asked again later."""
    filled: bool = False
    """Another backfill has filled some of it, or all."""


@dataclass(frozen=True, slots=True)
class PendingSegment:
    """One segment that is made ready only when its turn has come."""

    run: Run
    seconds: float
    """Predicted."""
    turn: Callable[[], Turn]
    """Asked again as long as there is a rest."""
    watch: Callable[[Task], RecordTail] | None = None
    """Follows how far it is."""


@dataclass(slots=True)
class _Running:
    number: int
    job: Job
    begun: float
    pace: Eta
    watch: RecordTail | None = None
    looked: float = 0.0
    leaving: bool = False
    """Its worker was taken away; it may end."""

    @property
    def rows(self) -> int:
        return self.watch.rows if self.watch is not None else 0

    @property
    def reached(self) -> float | None:
        return self.watch.reached if self.watch is not None else None


@dataclass
class Pool:
    """Carries out pieces in their order."""

    replays: Replays
    executor: Executor
    progress: Progress | None = None
    post: Post | None = None
    """Where more or fewer workers are asked for."""
    elsewhere: set[int] = field(default_factory=set)
    """Numbers of the pieces that another backfill has filled, wholly or in part."""
    _lost: dict[int, int] = field(default_factory=dict)
    _again: dict[int, str] = field(default_factory=dict)
    """Why segments run from the start, by number."""
    _alone: bool = False
    """Segments share nothing any more: one that did was lost, or came out otherwise."""
    _raised: bool = False
    """The added statement raises without a shared start, too: others need not be asked twice."""
    _slots: int = 0
    _real: float = 0.0
    """Seconds that segments took which were predicted to take `_planned`."""
    _planned: float = 0.0

    def carry_out(self, pieces: Sequence[PendingSegment]) -> list[ReplayOutcome]:
        """Return what became of the pieces, in their order.

        Of a piece that another backfill filled there is nothing to tell.
        """
        self._pieces = pieces
        self._waiting: deque[tuple[int, Task | None]] = deque((k, None) for k in range(len(pieces)))
        self._running: dict[int, _Running] = {}
        self._outcomes: dict[int, list[ReplayOutcome]] = {}
        self._rests: set[int] = set()
        self._later: list[int] = []
        self._next_look = 0.0
        self._ended: set[int] = set()
        self._total = sum(piece.seconds for piece in pieces) or 1.0
        self._done = 0.0
        self._slots = self.executor.slots
        try:
            while self._waiting or self._running or self._later:
                self._staff()
                self._look_again()
                while self._waiting and len(self._running) < self._slots:
                    self._take()
                if not self._running:
                    time.sleep(_PAUSE)
                for slot, one in list(self._running.items()):
                    code = one.job.wait(_PAUSE / len(self._running))
                    self._look(slot, one)
                    if code is not None:
                        self._end(slot, one, code)
                self._tell_left()
        finally:
            for one in self._running.values():
                one.job.stop()
                self.replays.interrupt(self._pieces[one.number].run, one.job.task)
            self.executor.close()
        return [one for number in sorted(self._outcomes) for one in self._outcomes[number]]

    def _staff(self) -> None:
        """See how many workers there are now; they may come and go while we run."""
        asked = self.post.asked() if self.post is not None else None
        if asked is not None:
            self.executor.resize(asked)
        slots = max(1, self.executor.slots)
        if slots != self._slots:
            self._slots = slots
            self._tell("workers", 0)
        # a cluster that has shrunk says itself whose segments are lost
        surplus = 0 if asked is None else len(self._running) - asked
        for slot in sorted(self._running, key=lambda slot: -self._running[slot].begun):
            one = self._running[slot]
            if surplus <= 0:
                one.leaving = False
                continue
            surplus -= 1
            if not one.leaving:
                one.leaving = True
                self._dismiss(slot, one)

    def _dismiss(self, slot: int, one: _Running) -> None:
        """Hand a segment back that would take long; a short or nearly done one may end."""
        now = time.monotonic()
        left = one.pace.left(now, one.reached, self._factor)
        if left < max(LONG, now - one.begun):
            return
        one.job.stop()
        del self._running[slot]
        self._tell("returned", one.number, worker=slot)
        self._put_back(one, "its worker was taken away")

    def _look_again(self) -> None:
        """Once there is nothing else to start, ask again for what others had under way."""
        now = time.monotonic()
        if self._later and not self._waiting and now >= self._next_look:
            self._waiting.extend((number, None) for number in self._later)
            self._later.clear()
            self._next_look = now + _LOOK

    def _take(self) -> None:
        """Start the next piece, or what others leave of it."""
        number, task = self._waiting.popleft()
        piece = self._pieces[number]
        if task is None:
            turn = piece.turn()
            if turn.filled:
                self.elsewhere.add(number)
            if turn.task is None:
                self._leave(number, rest=turn.rest)
                return
            if turn.rest:
                self._rests.add(number)
            task = turn.task
            if number in self._again:
                self.replays.abandon(piece.run, task, "it runs from the start")
                task = self.replays.from_the_start(piece.run, task, self._again[number])
        self._start(number, task)

    def _leave(self, number: int, *, rest: bool) -> None:
        """Leave a piece to others: until they are done with it, or for good."""
        if rest:
            self._later.append(number)
            return
        self._ended.add(number)
        self._done += self._pieces[number].seconds
        self._tell("filled", number)

    def _start(self, number: int, task: Task) -> None:
        piece = self._pieces[number]
        slot = next(k for k in range(len(self._running) + 1) if k not in self._running)
        job = self.executor.start(replace(task, imports=None) if self._alone else task, slot)
        now = time.monotonic()
        watch = piece.watch(job.task) if piece.watch is not None and self.progress else None
        self._running[slot] = _Running(number, job, now, Eta(piece.seconds, now), watch)
        self._tell("started", number, seconds=piece.seconds, worker=slot)

    def _look(self, slot: int, one: _Running) -> None:
        now = time.monotonic()
        if one.watch is None or now - one.looked < _LOOK:
            return
        one.looked = now
        if one.watch.look():
            self._tell("rows", one.number, worker=slot, rows=one.rows)

    def _end(self, slot: int, one: _Running, code: int) -> None:
        del self._running[slot]
        spent = time.monotonic() - one.begun
        if not self._settled(slot, one, code, spent):
            return
        outcome = self._outcomes[one.number][-1]
        report = outcome.report
        if one.number in self._rests:
            self._rests.remove(one.number)
            self._later.append(one.number)
        else:
            planned = self._pieces[one.number].seconds
            self._ended.add(one.number)
            self._done += planned
            self._real += spent
            self._planned += planned
        self._tell(
            "proved" if outcome.proved else "failed",
            one.number,
            seconds=spent,
            worker=slot,
            rows=report.written,
            message=report.error
            or report.difference
            or ", ".join(report.lacking or report.differing),
        )

    def _settled(self, slot: int, one: _Running, code: int, spent: float) -> bool:
        """Keep the outcome; if it settles nothing, put the segment back and say so."""
        task, run = one.job.task, self._pieces[one.number].run
        if code < 0 and not task.report.exists() and self._lost.get(one.number, 0) < LOST:
            self._lost[one.number] = self._lost.get(one.number, 0) + 1
            self._alone = self._alone or task.imports is not None
            self._tell("lost", one.number, worker=slot, message=f"it ended with {code}")
            self._put_back(one, "its worker was lost")
            return False
        outcome = self.replays.judge(run, task, code, spent, self._again.get(one.number, ""))
        pinned = task.threads is not None
        raised = (outcome.report.error or "").startswith(PROBE_RAISED)
        shared = task.imports is not None and not (raised and self._raised)
        doubt = doubtful(outcome.report, pinned=pinned, shared=shared)
        if doubt and one.number not in self._again:
            why = self._again[one.number] = outcome.proof.why
            self._tell("again", one.number, seconds=spent, worker=slot, message=why)
            again = self.replays.from_the_start(run, task, why)
            self._waiting.appendleft((one.number, again))
            return False
        if one.number in self._again:
            self._alone = self._alone or outcome.proved  # perhaps that was it
            self._raised = self._raised or raised
        self._outcomes.setdefault(one.number, []).append(outcome)
        return True

    def _put_back(self, one: _Running, why: str) -> None:
        """Let the next free worker do what one had begun and did not end."""
        self.replays.abandon(self._pieces[one.number].run, one.job.task, why)
        self._rests.discard(one.number)
        self._waiting.appendleft((one.number, None))

    @property
    def _factor(self) -> float:
        """How much longer than predicted things take, as far as that was seen."""
        return self._real / self._planned if self._planned > 0 else 1.0

    def _tell(
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
                len(self._pieces),
                self._pieces[number].run.id,
                self._done / self._total,
                seconds,
                message=message,
                worker=worker,
                rows=rows,
                workers=self._slots,
            )
        )

    def _tell_left(self) -> None:
        """Say how far the segments under way are, as predicted and as they go."""
        now, factor = time.monotonic(), self._factor
        under_way = tuple(
            self._under_way(slot, one, now, factor) for slot, one in self._running.items()
        )
        numbers = [*(number for number, _ in self._waiting), *self._later]
        waiting = sum(self._pieces[number].seconds for number in numbers) * factor
        left = max(
            (sum(one.left for one in under_way) + waiting) / self._slots,
            max((one.left for one in under_way), default=0.0),
        )
        if self.post is not None:
            self.post.say(
                workers=self._slots,
                busy=len(under_way),
                segments=len(self._pieces),
                ended=len(self._ended),
                left=left,
            )
        if self.progress is None or not (under_way or self._later):
            return
        share = sum(one.done * self._pieces[one.segment].seconds for one in under_way)
        done = min(1.0, (self._done + share) / self._total)
        first = under_way[0].segment if under_way else self._later[0]
        self.progress(
            Event(
                "progress",
                first,
                len(self._pieces),
                self._pieces[first].run.id,
                done,
                left=left,
                workers=self._slots,
                under_way=under_way,
                held=len(self._later),
            )
        )

    def _under_way(self, slot: int, one: _Running, now: float, factor: float) -> UnderWay:
        piece, spent = self._pieces[one.number], now - one.begun
        left = one.pace.left(now, one.reached, factor)
        done = spent / (spent + left) if spent + left > 0 else 0.0
        predicted = max(0.0, piece.seconds - spent)
        return UnderWay(slot, one.number, piece.run.id, done, spent, predicted, left, one.rows)
