"""Run segments on an executor: as many at once as it has slots, each until it has an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rearview.execute.executor import Executor, Job, Task
from rearview.execute.replays import Outcome, Replays, doubtful
from rearview.model import Run

LOST = 2
"""How often a segment is started again whose process was killed under it."""
_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class Event:
    """A sign of progress."""

    kind: str
    """`started`, `progress` or `finished`."""
    segment: int
    total: int
    run: str
    done: float = 0.0
    """Share of all predicted seconds that is done."""
    seconds: float = 0.0
    left: float | None = None
    message: str = ""


Progress = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Piece:
    """One segment that is made ready only when its turn has come."""

    run: Run
    seconds: float
    """Predicted."""
    prepare: Callable[[], Task]


@dataclass(slots=True)
class _Running:
    number: int
    job: Job
    begun: float


@dataclass
class Pool:
    """Carries out pieces in their order."""

    replays: Replays
    executor: Executor
    progress: Progress | None = None
    _lost: dict[int, int] = field(default_factory=dict)
    _again: set[int] = field(default_factory=set)

    def carry_out(self, pieces: Sequence[Piece]) -> list[Outcome]:
        """Return what became of each piece, in their order."""
        waiting: list[tuple[int, Task | None]] = [(k, None) for k in range(len(pieces))]
        running: dict[int, _Running] = {}
        outcomes: dict[int, Outcome] = {}
        total = sum(piece.seconds for piece in pieces) or 1.0
        done = 0.0
        try:
            while waiting or running:
                # asked each time: workers may come and go while we run
                for slot in range(self.executor.slots):
                    if waiting and slot not in running:
                        number, task = waiting.pop(0)
                        job = self.executor.start(task or pieces[number].prepare(), slot)
                        running[slot] = _Running(number, job, time.monotonic())
                        self._tell("started", number, pieces, done / total)
                for slot, one in list(running.items()):
                    code = one.job.wait(_PAUSE / len(running))
                    if code is None:
                        continue
                    del running[slot]
                    spent = time.monotonic() - one.begun
                    retry = self._judge(one, pieces[one.number].run, code, spent, outcomes)
                    if retry is not None:
                        waiting.insert(0, (one.number, retry))
                        continue
                    done += pieces[one.number].seconds
                    self._tell("finished", one.number, pieces, done / total, spent)
                self._tell_left(pieces, running, done, total)
        finally:
            for one in running.values():
                one.job.stop()
            self.executor.close()
        return [outcomes[number] for number in sorted(outcomes)]

    def _judge(
        self, one: _Running, run: Run, code: int, spent: float, outcomes: dict[int, Outcome]
    ) -> Task | None:
        """Keep the outcome; return what to start instead if it settles nothing."""
        task = one.job.task
        if code < 0 and not task.report.exists() and self._lost.get(one.number, 0) < LOST:
            self._lost[one.number] = self._lost.get(one.number, 0) + 1
            return task
        outcome = outcomes[one.number] = self.replays.judge(run, task, code, spent)
        if doubtful(outcome.report) and one.number not in self._again:
            self._again.add(one.number)
            return self.replays.from_the_start(run, task)
        return None

    def _tell(
        self, kind: str, number: int, pieces: Sequence[Piece], done: float, seconds: float = 0.0
    ) -> None:
        if self.progress is not None:
            run = pieces[number].run.id
            self.progress(Event(kind, number, len(pieces), run, done, seconds))

    def _tell_left(
        self, pieces: Sequence[Piece], running: dict[int, _Running], done: float, total: float
    ) -> None:
        """Say how far the segments under way are, as predicted."""
        if self.progress is None or not running:
            return
        now = time.monotonic()
        under_way = sum(
            min(now - one.begun, pieces[one.number].seconds) for one in running.values()
        )
        left = (total - done - under_way) / max(1, len(running))
        one = next(iter(running.values()))
        self.progress(
            Event(
                "progress",
                one.number,
                len(pieces),
                pieces[one.number].run.id,
                done=(done + under_way) / total,
                left=max(0.0, left),
            )
        )
