"""Decide which parts of each run must be replayed for what is wanted, and by which operator.

A long history makes many small objects, so planning runs with Python's garbage collection disabled.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rearview.model import Edge, Operator
from rearview.plan.cost import CostCorrections, CostModel, Prediction
from rearview.plan.demand import BITS, HEAD, NONE, RUN, TAIL, Axis, Needs, Stop
from rearview.plan.facts import CheckpointFacts, Machine, RunFacts, RunQuestion, Within


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Let Python not look for cycles meanwhile.

    A plan over a thousand runs makes a million tuples and no cycle. Looking for some in all that
    there is takes a third of the time.
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
"""Iteration, need, and what it costs and restores: going on, then cold."""
RECORD = 35e-6
"""Seconds that a probe takes besides what it computes: the shield, the point, one record."""
TINY = 1e-3
"""Seconds per iteration below which that is not worth counting."""


@dataclass(slots=True)
class Work:
    """What one run has to do: atoms in the order of the run, as columns.

    An atom is one iteration of the outermost loop, or what follows the loop. `going` is its cost
    for a process that did the atom before it, `cold` for one that begins here.
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
    """Atoms at which another process can begin without repeating work."""
    inner: tuple[tuple[str, int, int | None], ...] = ()
    within: Within | None = None
    """Iterations of an inner loop that are wanted, where they differ from one outer one to another."""
    whole: bool = False
    """A probe carries values over iterations: nothing can be skipped."""
    tail: bool = False
    """The last atom is what follows the loop."""
    lead: float = 0.0
    """Seconds that run only to get to what is wanted."""
    rerun: float = 0.0
    """Predicted seconds of one process that restores nothing and runs up to the last that is wanted."""
    noise: float = 0.0
    """Variance per second of computing."""
    cells: int = 0
    about: bool = False
    """Some of the cells are a guess."""
    least: bool = False
    """There are more cells than anybody counted."""
    nbytes: int = 0
    """Bytes that the new values will take."""
    question: RunQuestion | None = None
    """What this answers."""

    def add(self, atoms: Sequence[Atom]) -> None:
        """Add the next atoms."""
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
    """What all runs have to do, and which cannot."""

    work: tuple[Work, ...]
    refusals: tuple[tuple[str, str], ...]


@quietly()
def survey(
    questions: Iterable[RunQuestion],
    *,
    here: Machine | None = None,
    known: CostCorrections | None = None,
) -> Survey:
    """Return what has to be replayed to answer the questions."""
    work: list[Work] = []
    refusals: list[tuple[str, str]] = []
    for question in questions:
        reason = question.facts.blocked
        if not reason:
            done = work_of(question, CostModel(question.facts, here=here, known=known))
            if isinstance(done, Work):
                work.append(done)
                continue
            reason = done
        if reason:
            refusals.append((question.facts.run, reason))
    return Survey(tuple(work), tuple(refusals))


def work_of(question: RunQuestion, cost: CostModel) -> Work | str:
    """Return the work of one run, or why it cannot be done; nothing to do gives no reason."""
    axis = Axis(cost, _inner_loop(question))
    needs = Needs(axis, question.facts)
    reasons = [reason for wanted in question.wanted if (reason := needs.add(wanted))]
    if not (needs.by or needs.setup or needs.after):
        return reasons[0] if reasons else ""
    names = tuple(dict.fromkeys(name for wanted in question.wanted for name in wanted.names))
    work = Work(question.facts, cost, names, cost.startup(), question=question)
    work.whole = needs.whole
    work.cells, work.nbytes = needs.cells, needs.nbytes
    work.about, work.least = needs.about, needs.least
    work.inner = tuple((loop, *span) for loop, span in needs.inner.items())
    work.within = needs.within
    work.noise = _noise(axis.seconds)
    if needs.by or needs.after:
        axis.lay_out()
    if needs.whole:
        _whole(work, axis, needs)
    else:
        _atoms(work, axis, needs)
    writing = _add_writing(work)
    work.rerun += work.startup.seconds + writing
    return work


def _add_writing(work: Work) -> float:
    """Add what it costs to write the new values, spread evenly; return the sum."""
    each = RECORD * work.cost.speed.compute * work.cells / max(1, len(work.going))
    if each > TINY:
        work.going = [seconds + each for seconds in work.going]
        work.cold = [seconds + each for seconds in work.cold]
        return each * len(work.going)
    return 0.0


def _inner_loop(question: RunQuestion) -> str | None:
    """Return the inner loop to look at: the one asked about, or one whose end is recorded."""
    loops = question.facts.loops[1:]
    deep = [w.loops[1] for w in question.wanted if len(w.loops) > 1]
    if deep or len(loops) < 2:
        return deep[0] if deep else None
    if any(w.place != "after" for w in question.wanted if w.loops):
        return loops[0].name  # a statement between two loops comes after the first for certain
    counts = dict.fromkeys((loop.name for loop in loops), 0)
    for checkpoint in question.facts.checkpoints:
        steps = checkpoint.point.steps
        if len(steps) == 2 and checkpoint.edge == Edge.END and steps[1].loop in counts:
            counts[steps[1].loop] += 1
    return max(loops, key=lambda loop: (counts[loop.name], sum(loop.seconds))).name


def _noise(seconds: list[float]) -> float:
    """Return the variance per second, from neighbours, so that a trend is not taken for noise."""
    count, total = len(seconds) - 1, sum(seconds)
    if count < 1 or total <= 0:
        return 0.0
    square = sum((b - a) ** 2 for a, b in pairwise(seconds)) / (2 * count)
    return square * len(seconds) / total


def _whole(work: Work, axis: Axis, needs: Needs) -> None:
    """Run everything from the start to the last that is wanted."""
    last = axis.count - 1 if needs.after else max(needs.by)
    work.cuts.append(0)
    work.add([(k, RUN, axis.seconds[k], (), axis.edges[k + 1], ()) for k in range(last + 1)])
    work.lead = sum(axis.seconds[k] for k in range(last + 1) if k not in needs.by)
    work.rerun = axis.edges[last + 1]
    if needs.after:
        work.tail = True
        _add_after(work, axis, axis.count << BITS, axis.edges[-1])


def _atoms(work: Work, axis: Axis, needs: Needs) -> None:
    edges, inner, seconds = axis.edges, axis.inner, axis.seconds
    by = needs.by
    place = 0
    position = lead = 0.0
    cuts = work.cuts
    rows: list[Atom] = []  # one call for each would take longer than all the rest
    for k in sorted(by):
        need = by[k]
        begin, end, extra = edges[k], edges[k + 1], 0.0
        here, then = k << BITS, (k + 1) << BITS
        if need & RUN:
            high = needs.high.get(k)
            stop = axis.at_begin[k]
            if high is not None and not need & TAIL:
                pace, low = axis.pace(k), needs.low[k]
                begin, end, then = edges[k] + low * pace, edges[k] + high * pace, here + high + 1
                if k not in needs.fenced:
                    stop = axis.before(k, low)
        elif need == HEAD:
            extra, end, then = seconds[k] - inner[k], begin, here
            stop = axis.at_begin[k]
        else:
            begin += inner[k]
            stop = axis.at_end[k]
            if need & HEAD and stop[0] > here:
                stop = _both_ends(axis, k, stop)
        key, time, paid, chain = stop
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
        place, position = then, end
        work.rerun = end + extra
    work.add(rows)
    work.lead = max(0.0, lead)
    if needs.after:
        work.tail = True
        _add_after(work, axis, place, position)


def _both_ends(axis: Axis, k: int, stop: Stop) -> Stop:
    """Return how to do what stands before the inner loop of `k` and then skip that loop."""
    key, begun, paid, chain = axis.at_begin[k]
    spent = paid + axis.edges[k] - begun + axis.seconds[k] - axis.inner[k] + stop[2]
    return key, stop[1], spent, chain + stop[3][-1:]


def _add_after(work: Work, axis: Axis, place: int, position: float) -> None:
    """Add what follows the loop as the last atom."""
    own = work.facts.after * work.cost.speed.compute
    end = axis.edges[-1]
    stop = axis.at_begin[0 if work.whole else axis.count]
    key, time, paid, chain = stop
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
