"""Which parts of each iteration of a run's outermost loop must run to fill the requested values.

The `Axis` of a run says when its iterations were computed and from which checkpoints a replay can start.
The `Demand` collects, request by request, which iterations must be executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from rearview.model.checkpoint import Edge
from rearview.model.run import columns_of, name_of
from rearview.plan.cost import CostModel
from rearview.plan.facts import (
    CheckpointFacts,
    DeepFacts,
    InnerIterations,
    LoopFacts,
    RunFacts,
    TargetValue,
    ValueRequest,
)

BITS = 48
"""A place in a run is one number, so that a million of them can be compared quickly. The bits above these
are the iteration of the outermost loop. The bits below are 0 before its inner loop, i + 1 at iteration i
of the inner loop, and END after it.
"""
END = (1 << BITS) - 1


ReplayStart = tuple[int, float, float, tuple[CheckpointFacts, ...]]
"""A place where a replay can begin: (place, time, cost, checkpoints).

`time` is on the axis: seconds of computing since the outermost loop began. `cost` is what it takes
to get there in a process that has done its set-up. It is reached by the program's start or by restoring
a complete checkpoint; a partial one is only compared with (docs/decisions/partial-checkpoints.md).
It is a plain tuple, because a long history has a million of them.
"""
START: ReplayStart = (0, 0.0, 0.0, ())


class Axis:
    """The outermost loop of a run on an axis of seconds, with the places where a replay can start.

    Of several inner loops, only one is considered; it is assumed to come first in each iteration.
    """

    def __init__(self, cost: CostModel, inner_name: str | None = None) -> None:
        facts, pace = cost.facts, cost.speed.compute
        self.cost = cost
        main = facts.loops[0] if facts.loops else None
        self.name = main.name if main else None
        self.seconds = [value * pace for value in main.seconds] if main else []
        self.edges = list(accumulate(self.seconds, initial=0.0))
        count = len(self.seconds)
        named = [loop for loop in facts.loops[1:] if loop.name == inner_name]
        inner = next(iter(named or facts.loops[1:]), None)
        self.inner_name = inner.name if inner else None
        self.inner = [0.0] * count
        self.counts: Sequence[int] = [0] * count
        if inner is not None:
            self.inner = [
                min(value * pace, whole)
                for value, whole in zip(inner.seconds, self.seconds, strict=False)
            ]
            self.inner += [0.0] * (count - len(self.inner))
            self.counts = [*inner.counts[:count], *[0] * (count - len(inner.counts))]
        self._begins: dict[int, CheckpointFacts] = {}
        self._ends: dict[int, CheckpointFacts] = {}
        self._middles: dict[int, list[tuple[int, CheckpointFacts]]] = {}
        self.at_begin: list[ReplayStart] = []
        """Outer iteration -> the best replay start at or before its beginning."""
        self.at_end: list[ReplayStart] = []
        """Outer iteration -> the best replay start at or before the end of its inner loop."""

    def find_starts(self) -> None:
        """Find the places where a replay can start; a question about the set-up alone does not need them."""
        self._sort(self.cost.facts.checkpoints)
        self._find_best_starts()

    @property
    def count(self) -> int:
        """Number of iterations of the outermost loop."""
        return len(self.seconds)

    def pace(self, iteration: int) -> float:
        """Return the seconds of one inner iteration."""
        return self.inner[iteration] / max(self.counts[iteration], 1)

    def before(self, iteration: int, inner: int) -> ReplayStart:
        """Return the replay start from which an inner iteration is reached soonest."""
        best = self.at_begin[iteration]
        for index, checkpoint in self._middles.get(iteration, ()):
            if index > inner:
                break
            within = min(index * self.pace(iteration), self.inner[iteration])
            time = self.edges[iteration] + within
            cost = self.cost.restore(checkpoint)
            if cost - time <= best[2] - best[1]:
                best = ((iteration << BITS) + index + 1, time, cost, (checkpoint,))
        return best

    def _sort(self, checkpoints: Sequence[CheckpointFacts]) -> None:
        """Sort complete checkpoints by their place; those of other loops are left out."""
        name, inner, count = self.name, self.inner_name, self.count
        begins, ends, middles = self._begins, self._ends, self._middles
        for checkpoint in checkpoints:
            steps = checkpoint.point.steps
            if not checkpoint.complete or not steps or steps[0].loop != name:
                continue
            index = steps[0].index
            if len(steps) == 1:
                begins[count if checkpoint.edge == Edge.END else index] = checkpoint
            elif steps[1].loop != inner or index >= count:
                continue
            elif checkpoint.edge != Edge.END:
                middles.setdefault(index, []).append((steps[1].index, checkpoint))
            elif len(steps) == 2:
                ends[index] = checkpoint
        for in_iteration in middles.values():
            in_iteration.sort(key=lambda item: item[0])

    def _find_best_starts(self) -> None:
        """Find, for each iteration, the replay start from which it is reached soonest.

        A late checkpoint that is slow to restore can lose against an earlier one.
        """
        restore, edges, inner = self.cost.restore, self.edges, self.inner
        begins, ends, middles = self._begins, self._ends, self._middles
        best = START
        least = 0.0
        at_begin, at_end = self.at_begin.append, self.at_end.append
        for k in range(self.count + 1):
            time, place = edges[k], k << BITS
            checkpoint = begins.get(k)
            if checkpoint is not None:
                cost = restore(checkpoint)
                if cost - time <= least:
                    least, best = cost - time, (place, time, cost, (checkpoint,))
            at_begin(best)
            if k in middles:
                reach = self.before(k, middles[k][-1][0])
                if reach[2] - reach[1] <= least:
                    least, best = reach[2] - reach[1], reach
            checkpoint = ends.get(k)
            if checkpoint is not None:
                cost, time = restore(checkpoint), time + inner[k]
                if cost - time <= least:
                    least, best = cost - time, (place + END, time, cost, (checkpoint,))
            at_end(best)


# what must run in one iteration of the outermost loop: plain numbers, because there are many of them
NONE = 0
HEAD = 1
"""The code before its inner loop."""
TAIL = 2
"""The code after its inner loop."""
RUN = 4
"""The inner loop itself, or the whole iteration if there is no inner loop."""


class Demand:
    """Collects which parts of which iterations of one run must be executed."""

    def __init__(self, axis: Axis, facts: RunFacts) -> None:
        self.axis = axis
        self.facts = facts
        self.by: dict[int, int] = {}
        self.low: dict[int, int] = {}
        self.high: dict[int, int | None] = {}
        self.inner: dict[str, tuple[int, int | None]] = {}
        self.within: InnerIterations | None = None
        self.not_entered_inside: set[int] = set()
        """Iterations that a replay may not enter in the middle."""
        self.setup = self.after = self.whole = False
        self.cells = self.nbytes = 0
        self.about = False
        """The number of cells is partly a guess."""
        self.least = False
        """There are more cells than were counted."""

    def add(self, request: ValueRequest) -> str:
        """Add one request; return why it cannot be met, or ''."""
        if not request.loops:
            if request.at:
                return _not_in_loop(request, request.at[0].loop)
            self.cells += 1
            self.nbytes += request.cell_bytes
            self.least |= request.several
            if request.place == "before" or self.axis.name is None:
                self.setup = True
                return ""
            if not self.facts.finished:
                return (
                    f"the run never finished, so what follows "
                    f"its loop `{name_of(self.axis.name)}` was never reached"
                )
            self.after = True
            self.whole |= request.depth is not None and request.depth < 0
            # it reads values that are collected in the loop, so all iterations must run
            self.whole |= request.feeds
            return ""
        return self._in_loops(request)

    def _in_loops(self, request: ValueRequest) -> str:
        axis = self.axis
        if axis.name != request.loops[0]:
            return (
                f"the run has no loop `{name_of(request.loops[0])}` "
                f"(its outermost loop is `{name_of(axis.name or '')}`)"
            )
        shown = columns_of(request.loops)
        outer = next((at for at in request.at if at.loop == shown[0]), None)
        iterations: Iterable[int] = range(axis.count)
        if outer is not None:
            values = self.facts.loops[0].values
            iterations = outer.indices(axis.count, values)
            if not iterations:
                listed = _values_text(values)
                listed = listed or f", 0 to {axis.count - 1}; a range is written {outer.loop}=1:3"
                return f"the run has no iteration {outer}: it has {axis.count}{listed}"
        if request.missing is not None:
            iterations = [k for k in iterations if k in request.missing]
        strange = [at.loop for at in request.at if at.loop not in shown]
        if strange:
            return _not_in_loop(request, strange[0])
        self.whole |= request.depth is not None and request.depth < 1 and bool(iterations)
        inner = [at for at in request.at if at.loop != shown[0]]
        if len(request.loops) == 1:
            need = {"before": HEAD, "after": TAIL, "between": TAIL}.get(request.place, RUN)
            self._note(iterations, RUN if request.feeds else need, request)
            return ""
        if not inner and request.within is None:
            self._note(iterations, RUN, request)
            return ""
        self.within = request.within
        return self._inner(iterations, request)

    def _note(self, iterations: Iterable[int], need: int, request: ValueRequest) -> None:
        by = self.by
        for k in iterations:
            by[k] = by.get(k, NONE) | need
        cells = self._count(iterations, request)
        if need == RUN:
            self.low.update(dict.fromkeys(iterations, 0))
            self.high.update(dict.fromkeys(iterations))
        self.cells += cells
        self.nbytes += cells * request.cell_bytes
        if len(request.loops) > 1 and request.depth == 1:
            self.not_entered_inside.update(iterations)

    def _count(self, iterations: Iterable[int], request: ValueRequest) -> int:
        """Return the number of cells in some iterations of the outermost loop."""
        depth = len(request.loops)
        if depth == 1:
            return sum(1 for _ in iterations)
        named = [each for each in self.facts.loops[1:] if each.name == request.loops[1]]
        inner: LoopFacts | DeepFacts | None = named[0] if named else None
        deep = inner
        if depth > 2:
            below = request.loops[1:]
            deep = self.facts.deep.get(below) or self.facts.deep.get(tuple(map(name_of, below)))
        self.least |= deep is None
        loop = deep or inner
        if loop is None:
            return sum(1 for _ in iterations)
        counts, counted = loop.counts, loop.counted
        if isinstance(iterations, range):  # all iterations: the usual question over a long history
            iterations = range(min(len(iterations), len(counts)))
            self.about |= not (counted.start <= 0 and len(iterations) <= counted.stop)
            return sum(counts[: len(iterations)])
        self.about |= any(k not in counted for k in iterations)
        return sum(counts[k] for k in iterations if k < len(counts))

    def _inner(self, iterations: Iterable[int], request: ValueRequest) -> str:
        loop = request.loops[1]
        shown = columns_of(request.loops)
        at = next((a for a in request.at if a.loop == shown[1]), None)
        facts = next((f for f in self.facts.loops if f.name == loop), None)
        values = facts.values if facts is not None else None
        # if the target's values differ each time, any iteration may be the selected one
        selection = None if facts is not None and facts.varied else at
        any_selected = False
        most_inner = max(self.axis.counts, default=0)
        for k in iterations:
            is_counted = facts is None or k in facts.counted
            # not counted there: assume the largest number that was counted anywhere
            count = self.axis.counts[k] if is_counted else most_inner
            self.about |= not is_counted
            inner_indices = (
                list(range(count)) if selection is None else selection.indices(count, values)
            )
            if request.within is not None:
                inner_indices = request.within.of(k, inner_indices)
            if not inner_indices:
                continue
            any_selected = True
            low, high = inner_indices[0], inner_indices[-1] + 1
            already_added = k in self.low
            self.by[k] = self.by.get(k, NONE) | RUN
            last = self.high.get(k, 0) if already_added else high
            self.low[k] = min(low, self.low[k]) if already_added else low
            self.high[k] = None if last is None else max(high, last)
            cells = len(inner_indices)
            if len(request.loops) > 2:
                # how the deeper iterations are distributed is not known: assume evenly
                cells = round(self._count([k], request) * cells / count)
                self.about |= len(inner_indices) < count
            self.cells += cells
            self.nbytes += request.cell_bytes * cells
            if request.depth == 1:
                self.not_entered_inside.add(k)
            if at is not None:
                bound = (
                    high if selection and (selection.single or selection.last is not None) else None
                )
                self._limit(loop, (low, bound))
        if not (
            any_selected or at is None or any(at.indices(n, values) for n in set(self.axis.counts))
        ):
            return (
                f"the run has no iteration {at}: "
                f"`{shown[1]}` has at most {most_inner} in each `{shown[0]}`{_values_text(values)}"
            )
        return ""

    def _limit(self, loop: str, span: tuple[int, int | None]) -> None:
        """Extend the range of an inner loop so that it covers `span` too."""
        first, last = self.inner.get(loop, span)
        high = None if last is None or span[1] is None else max(last, span[1])
        self.inner[loop] = (min(first, span[0]), high)


def _not_in_loop(request: ValueRequest, loop: str) -> str:
    """Return the reason for a request that selects iterations of a loop that is not around the statement."""
    loops = [f"`{name_of(each)}`" for each in request.loops]
    around = f"only in {' and '.join(loops)}" if loops else "but outside all loops"
    return f"`{request.names[0]}` is not logged in a loop `{loop}`, {around}"


def _values_text(values: Sequence[TargetValue] | None) -> str:
    """Return the values of a loop's target, as the end of a sentence.

    >>> _values_text(["a", "b"]), _values_text(None), _values_text(range(9))
    (': a, b', '', ': 0, 1, 2, 3, 4 and so on')
    """
    if not values:
        return ""
    ending = " and so on" if len(values) > 5 else ""
    return f": {', '.join(map(str, values[:5]))}{ending}"
