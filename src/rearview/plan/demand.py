"""Find which parts of each iteration of a run's outermost loop must run to fill the requested values.

The `Axis` of a run says when each iteration was computed, and from which checkpoints a replay can start. The `Demand`
collects from all requests which iterations must run.
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
"""Number of low bits of a place. A *place* in a run is one integer, so that a million places can be compared quickly.
Its high bits are the iteration of the outermost loop. Its low bits are 0 before the inner loop, i + 1 at iteration i
of the inner loop, and END after the inner loop.
"""
END = (1 << BITS) - 1
"""Low bits of a place after the inner loop."""


StartPlace = tuple[int, float, float, tuple[CheckpointFacts, ...]]
"""A place where a replay can begin: (place, time, cost, checkpoints).

A replay begins at the start of the program, or restores complete `checkpoints`; partial checkpoints are only compared
(docs/decisions/partial-checkpoints.md). `time` is when the run was at `place`, in seconds of computing since the
outermost loop began. `cost` is how many seconds a process needs to get to `place` after its set-up. A start place is a
plain tuple, because there may be a million of them.
"""
START: StartPlace = (0, 0.0, 0.0, ())


class Axis:
    """The outermost loop of a run as a time axis in seconds, with the places where a replay can start.

    Of several inner loops, only one is considered, and it is assumed to be the first in each iteration: the loop
    `inner_name`, or the first inner loop by default.
    """

    def __init__(self, cost: CostModel, inner_name: str | None = None) -> None:
        facts, pace = cost.facts, cost.speed.compute
        self.cost = cost
        main = facts.loops[0] if facts.loops else None
        self.name = main.name if main else None
        self.seconds = [value * pace for value in main.seconds] if main else []
        self.edges = list(accumulate(self.seconds, initial=0.0))
        """Seconds at which each iteration of the outermost loop begins; the last item is the end of the loop."""
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
        self.at_begin: list[StartPlace] = []
        """Item i: the start place from which the beginning of outer iteration i is reached soonest."""
        self.at_end: list[StartPlace] = []
        """Item i: the start place from which the end of the inner loop in outer iteration i is reached soonest."""

    def find_starts(self) -> None:
        """Fill `at_begin` and `at_end`; they are needed only if iterations or the code after the loop must run."""
        self._sort_checkpoints(self.cost.facts.checkpoints)
        self._find_best_starts()

    @property
    def count(self) -> int:
        """Number of iterations of the outermost loop."""
        return len(self.seconds)

    def pace(self, iteration: int) -> float:
        """Return the mean seconds of one iteration of the inner loop in `iteration` of the outermost loop."""
        return self.inner[iteration] / max(self.counts[iteration], 1)

    def best_start_before(self, iteration: int, inner: int) -> StartPlace:
        """Return the start place from which a replay reaches inner iteration `inner` of `iteration` soonest."""
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

    def _sort_checkpoints(self, checkpoints: Sequence[CheckpointFacts]) -> None:
        """Store the complete checkpoints in `_begins`, `_ends` and `_middles`, by outer iteration."""
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
        """Fill `at_begin` and `at_end` with the start place from which each iteration is reached soonest.

        This is not always the nearest checkpoint: one that is slow to restore is passed over.
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
                reach = self.best_start_before(k, middles[k][-1][0])
                if reach[2] - reach[1] <= least:
                    least, best = reach[2] - reach[1], reach
            checkpoint = ends.get(k)
            if checkpoint is not None:
                cost, time = restore(checkpoint), time + inner[k]
                if cost - time <= least:
                    least, best = cost - time, (place + END, time, cost, (checkpoint,))
            at_end(best)


# parts of one iteration of the outermost loop that must run; plain numbers, because there may be a million iterations
NONE = 0
HEAD = 1
"""The code before the inner loop."""
TAIL = 2
"""The code after the inner loop."""
RUN = 4
"""The inner loop itself, or the whole iteration if there is no inner loop."""


class Demand:
    """Collects from requests which parts of which iterations of one run must be executed."""

    def __init__(self, axis: Axis, facts: RunFacts) -> None:
        self.axis = axis
        self.facts = facts
        self.needs: dict[int, int] = {}
        """Outer iteration -> parts that must run in it, a sum of HEAD, TAIL and RUN."""
        self.low: dict[int, int] = {}
        """Outer iteration -> first requested iteration of the inner loop."""
        self.high: dict[int, int | None] = {}
        """Outer iteration -> end (not included) of the requested inner iterations; None: the end of the inner loop."""
        self.inner: dict[str, tuple[int, int | None]] = {}
        """Inner loop -> (first, end) of the smallest range with all its requested iterations; None: no end."""
        self.within: InnerIterations | None = None
        self.not_entered_inside: set[int] = set()
        """Outer iterations in which a replay must run the inner loop from its first iteration."""
        self.setup = self.after = self.whole = False
        self.cells = self.nbytes = 0
        self.approximate = False
        """Whether `cells` (the number of requested values) is partly a guess."""
        self.at_least = False
        """Whether there may be more requested values than `cells`."""

    def add(self, request: ValueRequest) -> str:
        """Add the parts of iterations that `request` needs; return why the run cannot answer it, or an empty text."""
        if not request.loops:
            if request.at:
                return _not_in_loop(request, request.at[0].loop)
            self.cells += 1
            self.nbytes += request.cell_bytes
            self.at_least |= request.uncounted
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
            # the statement reads variables that probes assign in the loop, so all iterations must run
            self.whole |= request.feeds
            return ""
        return self._add_in_loops(request)

    def _add_in_loops(self, request: ValueRequest) -> str:
        axis = self.axis
        if axis.name != request.loops[0]:
            return (
                f"the run has no loop `{name_of(request.loops[0])}` "
                f"(its outermost loop is `{name_of(axis.name or '')}`)"
            )
        loop_names = columns_of(request.loops)
        outer = next((at for at in request.at if at.loop == loop_names[0]), None)
        iterations: Iterable[int] = range(axis.count)
        if outer is not None:
            values = self.facts.loops[0].values
            iterations = outer.indices(axis.count, values)
            if not iterations:
                listed = _values_text(values)
                listed = listed or f", 0 to {axis.count - 1}; a range is written {outer.loop}=1:3"
                return f"the run has no iteration {outer}: it has {axis.count}{listed}"
        if request.missing_iterations is not None:
            iterations = [k for k in iterations if k in request.missing_iterations]
        foreign_loops = [at.loop for at in request.at if at.loop not in loop_names]
        if foreign_loops:
            return _not_in_loop(request, foreign_loops[0])
        self.whole |= request.depth is not None and request.depth < 1 and bool(iterations)
        inner = [at for at in request.at if at.loop != loop_names[0]]
        if len(request.loops) == 1:
            need = {"before": HEAD, "after": TAIL, "between": TAIL}.get(request.place, RUN)
            self._require(iterations, RUN if request.feeds else need, request)
            return ""
        if not inner and request.within is None:
            self._require(iterations, RUN, request)
            return ""
        self.within = request.within
        return self._add_inner_iterations(iterations, request)

    def _require(self, iterations: Iterable[int], need: int, request: ValueRequest) -> None:
        needs = self.needs
        for k in iterations:
            needs[k] = needs.get(k, NONE) | need
        cells = self._count_cells(iterations, request)
        if need == RUN:
            self.low.update(dict.fromkeys(iterations, 0))
            self.high.update(dict.fromkeys(iterations))
        self.cells += cells
        self.nbytes += cells * request.cell_bytes
        if len(request.loops) > 1 and request.depth == 1:
            self.not_entered_inside.update(iterations)

    def _count_cells(self, iterations: Iterable[int], request: ValueRequest) -> int:
        """Return the number of values that `request` asks for in `iterations` of the outermost loop."""
        depth = len(request.loops)
        if depth == 1:
            return sum(1 for _ in iterations)
        named = [each for each in self.facts.loops[1:] if each.name == request.loops[1]]
        inner: LoopFacts | DeepFacts | None = named[0] if named else None
        deep = inner
        if depth > 2:
            below = request.loops[1:]
            deep = self.facts.deep.get(below) or self.facts.deep.get(tuple(map(name_of, below)))
        self.at_least |= deep is None
        loop = deep or inner
        if loop is None:
            return sum(1 for _ in iterations)
        counts, counted = loop.counts, loop.counted
        if isinstance(iterations, range):  # all iterations: the usual case, so it must be fast
            iterations = range(min(len(iterations), len(counts)))
            self.approximate |= not (counted.start <= 0 and len(iterations) <= counted.stop)
            return sum(counts[: len(iterations)])
        self.approximate |= any(k not in counted for k in iterations)
        return sum(counts[k] for k in iterations if k < len(counts))

    def _add_inner_iterations(self, iterations: Iterable[int], request: ValueRequest) -> str:
        loop = request.loops[1]
        loop_names = columns_of(request.loops)
        at = next((a for a in request.at if a.loop == loop_names[1]), None)
        facts = next((f for f in self.facts.loops if f.name == loop), None)
        values = facts.values if facts is not None else None
        # if the target variable has other values each time the loop is entered, any iteration may be the selected one
        selection = None if facts is not None and facts.varied else at
        any_selected = False
        most_inner = max(self.axis.counts, default=0)
        for k in iterations:
            is_counted = facts is None or k in facts.counted
            # if the inner iterations were not counted here, assume the largest number of any outer iteration
            count = self.axis.counts[k] if is_counted else most_inner
            self.approximate |= not is_counted
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
            self.needs[k] = self.needs.get(k, NONE) | RUN
            last = self.high.get(k, 0) if already_added else high
            self.low[k] = min(low, self.low[k]) if already_added else low
            self.high[k] = None if last is None else max(high, last)
            cells = len(inner_indices)
            if len(request.loops) > 2:
                # assume that the iterations of deeper loops are evenly distributed over the inner iterations
                cells = round(self._count_cells([k], request) * cells / count)
                self.approximate |= len(inner_indices) < count
            self.cells += cells
            self.nbytes += request.cell_bytes * cells
            if request.depth == 1:
                self.not_entered_inside.add(k)
            if at is not None:
                bound = (
                    high if selection and (selection.single or selection.last is not None) else None
                )
                self._extend_inner_range(loop, (low, bound))
        if not (
            any_selected or at is None or any(at.indices(n, values) for n in set(self.axis.counts))
        ):
            return (
                f"the run has no iteration {at}: "
                f"`{loop_names[1]}` has at most {most_inner} in each `{loop_names[0]}`{_values_text(values)}"
            )
        return ""

    def _extend_inner_range(self, loop: str, span: tuple[int, int | None]) -> None:
        """Extend the requested range of the inner loop `loop` so that it contains `span` (first, end)."""
        first, last = self.inner.get(loop, span)
        high = None if last is None or span[1] is None else max(last, span[1])
        self.inner[loop] = (min(first, span[0]), high)


def _not_in_loop(request: ValueRequest, loop: str) -> str:
    """Return why `request` cannot be answered: it selects iterations of `loop`, which is not around the statement."""
    loops = [f"`{name_of(each)}`" for each in request.loops]
    around = f"only in {' and '.join(loops)}" if loops else "but outside all loops"
    return f"`{request.names[0]}` is not logged in a loop `{loop}`, {around}"


def _values_text(values: Sequence[TargetValue] | None) -> str:
    """Return the end of a sentence that lists the first values of a loop's target variable; empty without values.

    >>> _values_text(["a", "b"]), _values_text(None), _values_text(range(9))
    (': a, b', '', ': 0, 1, 2, 3, 4 and so on')
    """
    if not values:
        return ""
    ending = " and so on" if len(values) > 5 else ""
    return f": {', '.join(map(str, values[:5]))}{ending}"
