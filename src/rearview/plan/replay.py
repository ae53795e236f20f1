"""Decide which parts of each run must be replayed to fill the requested values, and by which operator.

`survey` is the first half of planning; `divide_work.divide` turns its result into segments for workers.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rearview.model import Edge, Operator
from rearview.plan.cost import CostCorrections, CostModel, Prediction
from rearview.plan.demand import BITS, HEAD, NONE, RUN, TAIL, Axis, Demand, ReplayStart
from rearview.plan.facts import CheckpointFacts, InnerIterations, Machine, RunFacts, RunQuestion


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable Python's garbage collection in the body.

    A plan over a thousand runs makes a million tuples and no cycles; collecting takes a third of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


Checkpoints = tuple[CheckpointFacts, ...]
Atom = tuple[int, int, float, Checkpoints, float, Checkpoints]
"""(iteration, need, cost and restored checkpoints if the process continues, the same two if it starts here)."""
RECORD_SECONDS = 35e-6
"""Seconds that logging one value takes: the probe guard, the point, one record."""
NEGLIGIBLE = 1e-3
"""Seconds per iteration below which the time for logging is not counted."""


@dataclass(slots=True)
class Work:
    """The work for one run: its atoms in the order of the run, as columns.

    An atom is one iteration of the outermost loop, or the code after the loop. `going` is its cost for a
    process that has done the atom before it; `cold` is its cost for a process that starts with it.
    """

    facts: RunFacts
    cost: CostModel
    names: tuple[str, ...]
    startup: Prediction
    iterations: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    going: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    going_restores: list[Checkpoints] = field(default_factory=list)
    cold_restores: list[Checkpoints] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    """Atoms at which another process can start without repeating work."""
    inner: tuple[tuple[str, int, int | None], ...] = ()
    within: InnerIterations | None = None
    """Requested iterations of an inner loop, if they differ between outer iterations."""
    whole: bool = False
    """A probe carries values over iterations: no iteration can be skipped."""
    tail: bool = False
    """The last atom is the code after the loop."""
    lead: float = 0.0
    """Seconds that only serve to reach the requested iterations."""
    rerun: float = 0.0
    """Predicted seconds of one process that restores nothing and runs up to the last requested value."""
    noise: float = 0.0
    """Variance per second of computing."""
    cells: int = 0
    about: bool = False
    """The number of cells is partly a guess."""
    least: bool = False
    """There are at least as many cells as were counted, perhaps more."""
    nbytes: int = 0
    """Stored bytes of the new values."""
    question: RunQuestion | None = None
    """The question that this work answers."""

    def add(self, atoms: Sequence[Atom]) -> None:
        """Append atoms."""
        if not atoms:
            return
        iterations, needs, going, going_restores, cold, cold_restores = zip(*atoms, strict=True)
        self.iterations += iterations
        self.needs += needs
        self.going += going
        self.going_restores += going_restores
        self.cold += cold
        self.cold_restores += cold_restores

    @property
    def seconds(self) -> float:
        """Predicted seconds in one process, before corrections."""
        first = self.cold[0] if self.cold else 0.0
        return self.startup.seconds + first + sum(self.going[1:])


@dataclass(frozen=True, slots=True)
class Survey:
    """The work for all runs, and the runs that cannot be replayed with the reasons."""

    work: tuple[Work, ...]
    refusals: tuple[tuple[str, str], ...]


@gc_disabled()
def survey(
    questions: Iterable[RunQuestion],
    *,
    machine: Machine | None = None,
    corrections: CostCorrections | None = None,
) -> Survey:
    """Return the work that answers the questions.

    `machine` is the one that will replay, `corrections` come from earlier replays.
    """
    work: list[Work] = []
    refusals: list[tuple[str, str]] = []
    for question in questions:
        reason = question.facts.blocked
        if not reason:
            result = work_of(
                question, CostModel(question.facts, machine=machine, corrections=corrections)
            )
            if isinstance(result, Work):
                work.append(result)
                continue
            reason = result
        if reason:
            refusals.append((question.facts.run, reason))
    return Survey(tuple(work), tuple(refusals))


def work_of(question: RunQuestion, cost: CostModel) -> Work | str:
    """Return the work for one run, or the reason why it cannot be done; '' if there is nothing to do."""
    axis = Axis(cost, _inner_loop(question))
    demand = Demand(axis, question.facts)
    reasons = [reason for request in question.requests if (reason := demand.add(request))]
    if not (demand.by or demand.setup or demand.after):
        return reasons[0] if reasons else ""
    names = tuple(dict.fromkeys(name for request in question.requests for name in request.names))
    work = Work(question.facts, cost, names, cost.startup(), question=question)
    work.whole = demand.whole
    work.cells, work.nbytes = demand.cells, demand.nbytes
    work.about, work.least = demand.about, demand.least
    work.inner = tuple((loop, *span) for loop, span in demand.inner.items())
    work.within = demand.within
    work.noise = _noise(axis.seconds)
    if demand.by or demand.after:
        axis.find_starts()
    if demand.whole:
        _add_all_iterations(work, axis, demand)
    else:
        _add_needed_iterations(work, axis, demand)
    writing = _add_writing(work)
    work.rerun += work.startup.seconds + writing
    return work


def _add_writing(work: Work) -> float:
    """Add the time for writing the new values, divided equally among the atoms."""
    each = RECORD_SECONDS * work.cost.speed.compute * work.cells / max(1, len(work.going))
    if each > NEGLIGIBLE:
        work.going = [seconds + each for seconds in work.going]
        work.cold = [seconds + each for seconds in work.cold]
        return each * len(work.going)
    return 0.0


def _inner_loop(question: RunQuestion) -> str | None:
    """Return the inner loop that the plan considers: a requested one, or one with checkpoints at its end."""
    loops = question.facts.loops[1:]
    deep = [request.loops[1] for request in question.requests if len(request.loops) > 1]
    if deep or len(loops) < 2:
        return deep[0] if deep else None
    if any(request.place != "after" for request in question.requests if request.loops):
        return loops[0].name  # a statement between two loops is certainly after the first one
    counts = dict.fromkeys((loop.name for loop in loops), 0)
    for checkpoint in question.facts.checkpoints:
        steps = checkpoint.point.steps
        if len(steps) == 2 and checkpoint.edge == Edge.END and steps[1].loop in counts:
            counts[steps[1].loop] += 1
    return max(loops, key=lambda loop: (counts[loop.name], sum(loop.seconds))).name


def _noise(seconds: list[float]) -> float:
    """Return the variance per second, from differences of neighbours, so that a trend does not count."""
    count, total = len(seconds) - 1, sum(seconds)
    if count < 1 or total <= 0:
        return 0.0
    square = sum((b - a) ** 2 for a, b in pairwise(seconds)) / (2 * count)
    return square * len(seconds) / total


def _add_all_iterations(work: Work, axis: Axis, demand: Demand) -> None:
    """Add every iteration from the start to the last one that is requested."""
    last = axis.count - 1 if demand.after else max(demand.by)
    work.cuts.append(0)
    work.add([(k, RUN, axis.seconds[k], (), axis.edges[k + 1], ()) for k in range(last + 1)])
    work.lead = sum(axis.seconds[k] for k in range(last + 1) if k not in demand.by)
    work.rerun = axis.edges[last + 1]
    if demand.after:
        work.tail = True
        _add_after(work, axis, axis.count << BITS, axis.edges[-1])


def _add_needed_iterations(work: Work, axis: Axis, demand: Demand) -> None:
    """Add the iterations that the demand needs, each with the cheapest way to reach it."""
    edges, inner, seconds = axis.edges, axis.inner, axis.seconds
    by = demand.by
    place = 0
    position = lead = 0.0
    cuts = work.cuts
    rows: list[Atom] = []  # added in one call, which is much faster
    for k in sorted(by):
        need = by[k]
        begin, end, extra = edges[k], edges[k + 1], 0.0
        start_place, end_place = k << BITS, (k + 1) << BITS
        if need & RUN:
            high = demand.high.get(k)
            replay_start = axis.at_begin[k]
            if high is not None and not need & TAIL:
                pace, low = axis.pace(k), demand.low[k]
                begin, end, end_place = (
                    edges[k] + low * pace,
                    edges[k] + high * pace,
                    start_place + high + 1,
                )
                if k not in demand.not_entered_inside:
                    replay_start = axis.before(k, low)
        elif need == HEAD:
            extra, end, end_place = seconds[k] - inner[k], begin, start_place
            replay_start = axis.at_begin[k]
        else:
            begin += inner[k]
            replay_start = axis.at_end[k]
            if need & HEAD and replay_start[0] > start_place:
                replay_start = _both_ends(axis, k, replay_start)
        key, time, paid, chain = replay_start
        cold = paid + end - time + extra
        cold_from: Checkpoints = chain
        if cold > end + extra:
            cold, cold_from, paid = end + extra, (), 0.0
        going, going_from = cold, cold_from
        if not rows:
            cuts.append(0)
        else:
            if end - position + extra <= going:
                going, going_from, paid = end - position + extra, (), 0.0
            if cold_from and key >= place:
                cuts.append(len(rows))
        lead += going - paid - extra - end + begin
        rows.append((k, need, going, going_from, cold, cold_from))
        place, position = end_place, end
        work.rerun = end + extra
    work.add(rows)
    work.lead = max(0.0, lead)
    if demand.after:
        work.tail = True
        _add_after(work, axis, place, position)


def _both_ends(axis: Axis, k: int, replay_start: ReplayStart) -> ReplayStart:
    """Return the cost of running the code before the inner loop of `k` and then skipping that loop."""
    key, time, paid, chain = axis.at_begin[k]
    spent = paid + axis.edges[k] - time + axis.seconds[k] - axis.inner[k] + replay_start[2]
    return key, replay_start[1], spent, chain + replay_start[3][-1:]


def _add_after(work: Work, axis: Axis, place: int, position: float) -> None:
    """Add the code after the loop as the last atom."""
    own = work.facts.after * work.cost.speed.compute
    end = axis.edges[-1]
    replay_start = axis.at_begin[0 if work.whole else axis.count]
    key, time, paid, chain = replay_start
    cold, cold_from = paid + end - time + own, chain
    if work.whole or cold > end + own:
        cold, cold_from, paid = end + own, (), 0.0
    going, going_from = cold, cold_from
    if work.iterations and end - position + own <= going:
        going, going_from, paid = end - position + own, (), 0.0
    if not work.iterations or (key >= place and cold_from):
        work.cuts.append(len(work.iterations))
    work.lead += max(0.0, going - own - paid)
    work.rerun = end + own
    work.add([(axis.count, NONE, going, going_from, cold, cold_from)])


def operator_of(work: Work, first: int, last: int) -> Operator:
    """Return the operator that replays the atoms `first <= i < last`."""
    if not work.iterations:
        return Operator.SETUP
    if work.whole:
        return Operator.FULL
    begun = bool(work.cold_restores[first])
    if not begun and work.cold[first] > work.going[first] + 1e-9 and first:
        return Operator.FULL
    needs = work.needs[first:last]
    if any(need & RUN for need in needs):
        idle = not begun and work.iterations[first] > 0
        return Operator.FULL if idle else Operator.INNER
    if not any(needs):
        return Operator.AFTER if begun or work.iterations[first] == 0 else Operator.FULL
    return Operator.OUTER
