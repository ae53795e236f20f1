"""Find which iterations of each run must be replayed to fill the requested values, and how each is reached.

`survey` is the first half of planning. The second half, `divide_work.divide`, divides this work into segments.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rearview.model import Edge, Operator
from rearview.plan.cost import CostCorrections, CostModel, Prediction
from rearview.plan.demand import BITS, HEAD, NONE, RUN, TAIL, Axis, Demand, StartPlace
from rearview.plan.facts import CheckpointFacts, InnerIterations, Machine, RunFacts, RunQuestion


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable Python's garbage collection while the body of the `with` statement, or the decorated function, runs.

    A plan for a thousand runs creates a million tuples and no cycles; collection would take a third of the time.
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
"""(iteration, needs, warm seconds, warm restores, cold seconds, cold restores), as explained in `Work`."""
RECORD_SECONDS = 35e-6
"""Seconds that it takes to log one value: guard the probe, build the point, write a record."""
NEGLIGIBLE = 1e-3
"""Seconds per iteration; if logging takes less than this, it is not included in predictions."""


@dataclass(slots=True)
class Work:
    """The work for one run, as a list of *atoms* in the order of the run.

    An atom is one iteration of the outermost loop, or the code after the loop. The fields from `iterations` to
    `cold_restores` have one item for each atom. The warm seconds and restores of an atom (checkpoints to restore) are
    those of a process that has just done the previous atom; the cold ones are those of a process that starts with it.
    """

    facts: RunFacts
    cost: CostModel
    names: tuple[str, ...]
    startup: Prediction
    iterations: list[int] = field(default_factory=list)
    needs: list[int] = field(default_factory=list)
    """Parts that must run in each iteration: a sum of HEAD, TAIL and RUN (`plan.demand`)."""
    warm_seconds: list[float] = field(default_factory=list)
    cold_seconds: list[float] = field(default_factory=list)
    warm_restores: list[Checkpoints] = field(default_factory=list)
    cold_restores: list[Checkpoints] = field(default_factory=list)
    start_atoms: list[int] = field(default_factory=list)
    """Indices of atoms with which another process can start without repeating work of earlier atoms."""
    inner: tuple[tuple[str, int, int | None], ...] = ()
    """(loop, first, last): only inner iterations `first <= i < last` are requested; `last` of None: to the end."""
    within: InnerIterations | None = None
    """Requested iterations of an inner loop, if they differ between outer iterations; else None."""
    whole: bool = False
    """Whether a probe uses values that it collects over all iterations, so that no iteration can be skipped."""
    tail: bool = False
    """Whether the last atom is the code after the loop."""
    lead_seconds: float = 0.0
    """Seconds of computing that is only needed to reach the requested iterations."""
    rerun: float = 0.0
    """Predicted seconds of one process that restores nothing and runs up to the last requested value."""
    noise: float = 0.0
    """Variance of the predicted seconds, per second of computing."""
    cells: int = 0
    """Number of missing values that the work fills."""
    approximate: bool = False
    """Whether `cells` is partly a guess."""
    at_least: bool = False
    """Whether there may be more missing values than `cells`."""
    nbytes: int = 0
    """Bytes of the new values in the store."""
    question: RunQuestion | None = None
    """The question that this work answers."""

    def add(self, atoms: Sequence[Atom]) -> None:
        """Append `atoms`, each with one item to the fields from `iterations` to `cold_restores`."""
        if not atoms:
            return
        iterations, needs, warm, warm_restores, cold, cold_restores = zip(*atoms, strict=True)
        self.iterations += iterations
        self.needs += needs
        self.warm_seconds += warm
        self.warm_restores += warm_restores
        self.cold_seconds += cold
        self.cold_restores += cold_restores

    @property
    def seconds(self) -> float:
        """Predicted seconds if one process does all the work; the seconds of earlier replays do not correct them."""
        first = self.cold_seconds[0] if self.cold_seconds else 0.0
        return self.startup.seconds + first + sum(self.warm_seconds[1:])


@dataclass(frozen=True, slots=True)
class Survey:
    """The work for all runs that can be replayed, and the reasons why others cannot."""

    work: tuple[Work, ...]
    refusals: tuple[tuple[str, str], ...]
    """(run, reason) for each run that cannot be replayed."""


@gc_disabled()
def survey(
    questions: Iterable[RunQuestion],
    *,
    machine: Machine | None = None,
    corrections: CostCorrections | None = None,
) -> Survey:
    """Return the work that fills the values requested in `questions`, and the runs that cannot be replayed.

    `machine` is the machine that will replay, or None if it is unknown. `corrections` of predicted seconds come from
    earlier replays.
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
    """Return the work for the run of `question`; or why the run cannot answer; or an empty text if nothing must run.

    `cost` predicts the seconds of the run's replays.
    """
    axis = Axis(cost, _inner_loop(question))
    demand = Demand(axis, question.facts)
    reasons = [reason for request in question.requests if (reason := demand.add(request))]
    if not (demand.needs or demand.setup or demand.after):
        return reasons[0] if reasons else ""
    names = tuple(dict.fromkeys(name for request in question.requests for name in request.names))
    work = Work(question.facts, cost, names, cost.startup(), question=question)
    work.whole = demand.whole
    work.cells, work.nbytes = demand.cells, demand.nbytes
    work.approximate, work.at_least = demand.approximate, demand.at_least
    work.inner = tuple((loop, *span) for loop, span in demand.inner.items())
    work.within = demand.within
    work.noise = _noise(axis.seconds)
    if demand.needs or demand.after:
        axis.find_starts()
    if demand.whole:
        _add_all_iterations(work, axis, demand)
    else:
        _add_needed_iterations(work, axis, demand)
    writing = _add_writing(work)
    work.rerun += work.startup.seconds + writing
    return work


def _add_writing(work: Work) -> float:
    """Add the seconds of logging the new values to the atoms of `work`, in equal shares; return the added seconds."""
    each = RECORD_SECONDS * work.cost.speed.compute * work.cells / max(1, len(work.warm_seconds))
    if each > NEGLIGIBLE:
        work.warm_seconds = [seconds + each for seconds in work.warm_seconds]
        work.cold_seconds = [seconds + each for seconds in work.cold_seconds]
        return each * len(work.warm_seconds)
    return 0.0


def _inner_loop(question: RunQuestion) -> str | None:
    """Return the id of the inner loop that the plan considers, or None for the first inner loop.

    If values are requested in an inner loop, it is that loop. If not, it is an inner loop that replays may skip,
    preferably one with many checkpoints at its end.
    """
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
    """Return the variance of the iterations' `seconds`, per second of computing.

    It is computed from the differences of successive iterations, so that a slow change over the run does not count.
    """
    count, total = len(seconds) - 1, sum(seconds)
    if count < 1 or total <= 0:
        return 0.0
    square = sum((b - a) ** 2 for a, b in pairwise(seconds)) / (2 * count)
    return square * len(seconds) / total


def _add_all_iterations(work: Work, axis: Axis, demand: Demand) -> None:
    """Add an atom for every iteration from the first one to the last requested one; no checkpoint is restored."""
    last = axis.count - 1 if demand.after else max(demand.needs)
    work.start_atoms.append(0)
    work.add([(k, RUN, axis.seconds[k], (), axis.edges[k + 1], ()) for k in range(last + 1)])
    work.lead_seconds = sum(axis.seconds[k] for k in range(last + 1) if k not in demand.needs)
    work.rerun = axis.edges[last + 1]
    if demand.after:
        work.tail = True
        _add_after(work, axis, axis.count << BITS, axis.edges[-1])


def _add_needed_iterations(work: Work, axis: Axis, demand: Demand) -> None:
    """Add an atom to `work` for each iteration in `demand.needs`, with the checkpoints that reach it soonest."""
    edges, inner, seconds = axis.edges, axis.inner, axis.seconds
    needs = demand.needs
    place = 0
    position = lead = 0.0
    start_atoms = work.start_atoms
    rows: list[Atom] = []  # collected, because adding all atoms in one call is much faster
    for k in sorted(needs):
        need = needs[k]
        begin, end, extra = edges[k], edges[k + 1], 0.0
        start_place, end_place = k << BITS, (k + 1) << BITS
        if need & RUN:
            high = demand.high.get(k)
            best_start = axis.at_begin[k]
            if high is not None and not need & TAIL:
                pace, low = axis.pace(k), demand.low[k]
                begin, end, end_place = (
                    edges[k] + low * pace,
                    edges[k] + high * pace,
                    start_place + high + 1,
                )
                if k not in demand.not_entered_inside:
                    best_start = axis.best_start_before(k, low)
        elif need == HEAD:
            extra, end, end_place = seconds[k] - inner[k], begin, start_place
            best_start = axis.at_begin[k]
        else:
            begin += inner[k]
            best_start = axis.at_end[k]
            if need & HEAD and best_start[0] > start_place:
                best_start = _both_ends(axis, k, best_start)
        key, time, paid, chain = best_start
        cold = paid + end - time + extra
        cold_from: Checkpoints = chain
        if cold > end + extra:
            cold, cold_from, paid = end + extra, (), 0.0
        warm, warm_from = cold, cold_from
        if not rows:
            start_atoms.append(0)
        else:
            if end - position + extra <= warm:
                warm, warm_from, paid = end - position + extra, (), 0.0
            if cold_from and key >= place:
                start_atoms.append(len(rows))
        lead += warm - paid - extra - end + begin
        rows.append((k, need, warm, warm_from, cold, cold_from))
        place, position = end_place, end
        work.rerun = end + extra
    work.add(rows)
    work.lead_seconds = max(0.0, lead)
    if demand.after:
        work.tail = True
        _add_after(work, axis, place, position)


def _both_ends(axis: Axis, k: int, best_start: StartPlace) -> StartPlace:
    """Return the start place if in iteration `k`, the code before and the code after the inner loop must run.

    Its cost includes the code before the inner loop, and restoring the checkpoint of `best_start`, which skips the
    inner loop.
    """
    key, time, paid, chain = axis.at_begin[k]
    spent = paid + axis.edges[k] - time + axis.seconds[k] - axis.inner[k] + best_start[2]
    return key, best_start[1], spent, chain + best_start[3][-1:]


def _add_after(work: Work, axis: Axis, place: int, position: float) -> None:
    """Add the code after the outermost loop as the last atom.

    `place` is the place (see `demand.BITS`) at which the previous atom ends, and `position` its time in seconds.
    """
    seconds_after = work.facts.after * work.cost.speed.compute
    end = axis.edges[-1]
    best_start = axis.at_begin[0 if work.whole else axis.count]
    key, time, paid, chain = best_start
    cold, cold_from = paid + end - time + seconds_after, chain
    if work.whole or cold > end + seconds_after:
        cold, cold_from, paid = end + seconds_after, (), 0.0
    warm, warm_from = cold, cold_from
    if work.iterations and end - position + seconds_after <= warm:
        warm, warm_from, paid = end - position + seconds_after, (), 0.0
    if not work.iterations or (key >= place and cold_from):
        work.start_atoms.append(len(work.iterations))
    work.lead_seconds += max(0.0, warm - seconds_after - paid)
    work.rerun = end + seconds_after
    work.add([(axis.count, NONE, warm, warm_from, cold, cold_from)])


def operator_of(work: Work, first: int, last: int) -> Operator:
    """Return the operator (the way of replaying) of a segment that runs the atoms `first <= i < last` of `work`."""
    if not work.iterations:
        return Operator.SETUP
    if work.whole:
        return Operator.FULL
    restores = bool(work.cold_restores[first])
    if not restores and work.cold_seconds[first] > work.warm_seconds[first] + 1e-9 and first:
        return Operator.FULL
    needs = work.needs[first:last]
    if any(need & RUN for need in needs):
        idle = not restores and work.iterations[first] > 0
        return Operator.FULL if idle else Operator.INNER
    if not any(needs):
        return Operator.AFTER if restores or work.iterations[first] == 0 else Operator.FULL
    return Operator.OUTER
