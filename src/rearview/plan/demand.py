"""What has to run in each iteration of a run's outermost loop to answer the wants.

The axis of a run says where its iterations lie in time and from which checkpoints a replay can start; the
demand adds, want by want, which of them must be executed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from rearview.model.checkpoint import Edge
from rearview.model.run import columns_of, name_of
from rearview.plan.cost import CostModel
from rearview.plan.facts import CheckpointFacts, DeepFacts, LoopFacts, RunFacts, Shown, Want, Within

BITS = 48
"""A place in a run is one number: the iteration of the outermost loop above these bits; below
them 0 before its inner loop, i + 1 at iteration i of that, END after it. Places are compared, and
a long history has a million of them."""
END = (1 << BITS) - 1


Stop = tuple[int, float, float, tuple[CheckpointFacts, ...]]
"""A place where replay can begin: (place, time, cost, checkpoints).

`time` is on the axis: seconds of computing since the outermost loop began. `cost` is what it takes
to get there in a process that has done its set-up. It is reached by the program's start or by restoring
a complete checkpoint; a partial one is only compared with (docs/decisions/partial-checkpoints.md).
A plain tuple, since a long history has a million of them.
"""
START: Stop = (0, 0.0, 0.0, ())


class Axis:
    """The outermost loop of a run in seconds, and the stops along it.

    Of several inner loops one is looked at; within an iteration it is taken to come first, and
    what is outside of it last.
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
        self.at_begin: list[Stop] = []
        """Outer iteration -> the best stop at or before its beginning."""
        self.at_end: list[Stop] = []
        """Outer iteration -> the best stop at or before the end of its inner loop."""

    def lay_out(self) -> None:
        """Find the stops; a question about the set-up alone does without."""
        self._sort(self.cost.facts.checkpoints)
        self._stops()

    @property
    def count(self) -> int:
        """Iterations that the outermost loop had."""
        return len(self.seconds)

    def pace(self, iteration: int) -> float:
        """Return the seconds of one inner iteration."""
        return self.inner[iteration] / max(self.counts[iteration], 1)

    def before(self, iteration: int, inner: int) -> Stop:
        """Return the stop from which an inner iteration is reached soonest."""
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
        """Sort complete checkpoints by where they lie; those of other loops are left out."""
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
        for found in middles.values():
            found.sort(key=lambda item: item[0])

    def _stops(self) -> None:
        """Walk along the axis, keeping the stop from which the way on is shortest.

        A late checkpoint that is slow to restore can lose against an earlier one.
        """
        restore, edges, inner = self.cost.restore, self.edges, self.inner
        begins, ends, middles = self._begins, self._ends, self._middles
        best = START
        least = 0.0
        at_begin, at_end = self.at_begin.append, self.at_end.append
        for k in range(self.count + 1):
            time, place = edges[k], k << BITS
            found = begins.get(k)
            if found is not None:
                cost = restore(found)
                if cost - time <= least:
                    least, best = cost - time, (place, time, cost, (found,))
            at_begin(best)
            if k in middles:
                reach = self.before(k, middles[k][-1][0])
                if reach[2] - reach[1] <= least:
                    least, best = reach[2] - reach[1], reach
            found = ends.get(k)
            if found is not None:
                cost, time = restore(found), time + inner[k]
                if cost - time <= least:
                    least, best = cost - time, (place + END, time, cost, (found,))
            at_end(best)


# what must happen in one iteration of the outermost loop: plain numbers, there are many of them
NONE = 0
HEAD = 1
"""What stands before its inner loop."""
TAIL = 2
"""What stands after it."""
RUN = 4
"""The inner loop itself, or all of an iteration that has none."""


class Needs:
    """Collects what is wanted of one run, iteration by iteration."""

    def __init__(self, axis: Axis, facts: RunFacts) -> None:
        self.axis = axis
        self.facts = facts
        self.by: dict[int, int] = {}
        self.low: dict[int, int] = {}
        self.high: dict[int, int | None] = {}
        self.inner: dict[str, tuple[int, int | None]] = {}
        self.within: Within | None = None
        self.fenced: set[int] = set()
        """Iterations that may not be entered in the middle."""
        self.setup = self.after = self.whole = False
        self.cells = self.nbytes = 0
        self.about = False
        """Some cells are a guess."""
        self.least = False
        """There are more cells than anybody counted."""

    def add(self, wanted: Want) -> str:
        """Take in one wish; return why it cannot be met, or nothing."""
        if not wanted.loops:
            if wanted.at:
                return _elsewhere(wanted, wanted.at[0].loop)
            self.cells += 1
            self.nbytes += wanted.cell_bytes
            self.least |= wanted.several
            if wanted.place == "before" or self.axis.name is None:
                self.setup = True
                return ""
            if not self.facts.finished:
                return (
                    f"the run never finished, so what follows "
                    f"its loop `{name_of(self.axis.name)}` was never reached"
                )
            self.after = True
            self.whole |= wanted.depth is not None and wanted.depth < 0
            # fed by the loop: its iterations must run
            self.whole |= wanted.feeds
            return ""
        return self._in_loops(wanted)

    def _in_loops(self, wanted: Want) -> str:
        axis = self.axis
        if axis.name != wanted.loops[0]:
            return (
                f"the run has no loop `{name_of(wanted.loops[0])}` "
                f"(its outermost loop is `{name_of(axis.name or '')}`)"
            )
        shown = columns_of(wanted.loops)
        outer = next((at for at in wanted.at if at.loop == shown[0]), None)
        chosen: Iterable[int] = range(axis.count)
        if outer is not None:
            values = self.facts.loops[0].values
            chosen = outer.indices(axis.count, values)
            if not chosen:
                listed = (
                    _listed(values)
                    or f", 0 to {axis.count - 1}; a range is written {outer.loop}=1:3"
                )
                return f"the run has no iteration {outer}: it has {axis.count}{listed}"
        if wanted.missing is not None:
            chosen = [k for k in chosen if k in wanted.missing]
        strange = [at.loop for at in wanted.at if at.loop not in shown]
        if strange:
            return _elsewhere(wanted, strange[0])
        self.whole |= wanted.depth is not None and wanted.depth < 1 and bool(chosen)
        inner = [at for at in wanted.at if at.loop != shown[0]]
        if len(wanted.loops) == 1:
            need = {"before": HEAD, "after": TAIL, "between": TAIL}.get(wanted.place, RUN)
            self._note(chosen, RUN if wanted.feeds else need, wanted)
            return ""
        if not inner and wanted.within is None:
            self._note(chosen, RUN, wanted)
            return ""
        self.within = wanted.within
        return self._inner(chosen, wanted)

    def _note(self, chosen: Iterable[int], need: int, wanted: Want) -> None:
        by = self.by
        for k in chosen:
            by[k] = by.get(k, NONE) | need
        cells = self._count(chosen, wanted)
        if need == RUN:
            self.low.update(dict.fromkeys(chosen, 0))
            self.high.update(dict.fromkeys(chosen))
        self.cells += cells
        self.nbytes += cells * wanted.cell_bytes
        if len(wanted.loops) > 1 and wanted.depth == 1:
            self.fenced.update(chosen)

    def _count(self, chosen: Iterable[int], wanted: Want) -> int:
        """Return how many cells there are in some iterations of the outermost loop."""
        depth = len(wanted.loops)
        if depth == 1:
            return sum(1 for _ in chosen)
        named = [loop for loop in self.facts.loops[1:] if loop.name == wanted.loops[1]]
        inner: LoopFacts | DeepFacts | None = named[0] if named else None
        deep = inner
        if depth > 2:
            below = wanted.loops[1:]
            deep = self.facts.deep.get(below) or self.facts.deep.get(tuple(map(name_of, below)))
        self.least |= deep is None
        found = deep or inner
        if found is None:
            return sum(1 for _ in chosen)
        counts, seen = found.counts, found.counted
        if isinstance(chosen, range):  # all of them, which is the usual question of a long history
            chosen = range(min(len(chosen), len(counts)))
            self.about |= not (seen.start <= 0 and len(chosen) <= seen.stop)
            return sum(counts[: len(chosen)])
        self.about |= any(k not in seen for k in chosen)
        return sum(counts[k] for k in chosen if k < len(counts))

    def _inner(self, chosen: Iterable[int], wanted: Want) -> str:
        loop = wanted.loops[1]
        shown = columns_of(wanted.loops)
        at = next((a for a in wanted.at if a.loop == shown[1]), None)
        facts = next((f for f in self.facts.loops if f.name == loop), None)
        values = facts.values if facts is not None else None
        # where the target held something else each time, every iteration may be meant
        some = None if facts is not None and facts.varied else at
        met = False
        most = max(self.axis.counts, default=0)
        for k in chosen:
            known = facts is None or k in facts.counted
            # where nobody counted, there may have been as many as anywhere
            count = self.axis.counts[k] if known else most
            self.about |= not known
            picked = list(range(count)) if some is None else some.indices(count, values)
            if wanted.within is not None:
                picked = wanted.within.of(k, picked)
            if not picked:
                continue
            met = True
            low, high = picked[0], picked[-1] + 1
            asked = k in self.low
            self.by[k] = self.by.get(k, NONE) | RUN
            last = self.high.get(k, 0) if asked else high
            self.low[k] = min(low, self.low[k]) if asked else low
            self.high[k] = None if last is None else max(high, last)
            cells = len(picked)
            if len(wanted.loops) > 2:
                # of what is inside nobody knows how it is shared out
                cells = round(self._count([k], wanted) * cells / count)
                self.about |= len(picked) < count
            self.cells += cells
            self.nbytes += wanted.cell_bytes * cells
            if wanted.depth == 1:
                self.fenced.add(k)
            if at is not None:
                bound = high if some and (some.single or some.last is not None) else None
                self._limit(loop, (low, bound))
        if not (met or at is None or any(at.indices(n, values) for n in set(self.axis.counts))):
            return (
                f"the run has no iteration {at}: "
                f"`{shown[1]}` has at most {most} in each `{shown[0]}`{_listed(values)}"
            )
        return ""

    def _limit(self, loop: str, span: tuple[int, int | None]) -> None:
        """Let an inner loop run as far as any iteration around it wants."""
        first, last = self.inner.get(loop, span)
        high = None if last is None or span[1] is None else max(last, span[1])
        self.inner[loop] = (min(first, span[0]), high)


def _elsewhere(wanted: Want, loop: str) -> str:
    loops = [f"`{name_of(each)}`" for each in wanted.loops]
    around = f"only in {' and '.join(loops)}" if loops else "but outside all loops"
    return f"`{wanted.names[0]}` is not logged in a loop `{loop}`, {around}"


def _listed(values: Sequence[Shown] | None) -> str:
    """Return what a target held, as the end of a sentence.

    >>> _listed(["a", "b"]), _listed(None), _listed(range(9))
    (': a, b', '', ': 0, 1, 2, 3, 4 and so on')
    """
    if not values:
        return ""
    more = " and so on" if len(values) > 5 else ""
    return f": {', '.join(map(str, values[:5]))}{more}"
