"""A run laid out in time: where its iterations lie and from where replay can begin."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from rearview.plan.cost import CostModel
from rearview.plan.facts import CheckpointFacts

BITS = 48
"""A place in a run is one number: the iteration of the outermost loop above these bits; below
them 0 before its inner loop, i + 1 at iteration i of that, END after it. Places are compared, and
a long history has a million of them."""
END = (1 << BITS) - 1


Stop = tuple[int, float, float, tuple[CheckpointFacts, ...]]
"""A place where replay can begin: (place, time, cost, checkpoints).

`time` is on the axis: seconds of computing since the outermost loop began. `cost` is what it takes
to get there in a process that has done its set-up. It is reached by the program's start, by
restoring a checkpoint, or by restoring partial ones one iteration after another (pseudo-resume).
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
        self.partial: dict[int, CheckpointFacts] = {}
        """Outer iteration -> partial checkpoint after its inner loop."""
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
        """Sort checkpoints by where they lie; those of other loops are left out."""
        name, inner, count = self.name, self.inner_name, self.count
        begins, ends, middles = self._begins, self._ends, self._middles
        for checkpoint in checkpoints:
            steps = checkpoint.point.steps
            if not steps or steps[0].loop != name:
                continue
            index = steps[0].index
            if len(steps) == 1:
                if checkpoint.complete:
                    begins[count if checkpoint.edge == "end" else index] = checkpoint
            elif steps[1].loop != inner or index >= count:
                continue
            elif checkpoint.edge != "end":
                if checkpoint.complete:
                    middles.setdefault(index, []).append((steps[1].index, checkpoint))
            elif len(steps) == 2:
                (ends if checkpoint.complete else self.partial)[index] = checkpoint
        for found in middles.values():
            found.sort(key=lambda item: item[0])

    def _stops(self) -> None:
        """Walk along the axis, keeping the stop from which the way on is shortest.

        A late checkpoint that is slow to restore can lose against an earlier one.
        """
        restore, edges, inner = self.cost.restore, self.edges, self.inner
        begins, ends, middles, partial = self._begins, self._ends, self._middles, self.partial
        best = reached = START
        least = 0.0
        at_begin, at_end = self.at_begin.append, self.at_end.append
        for k in range(self.count + 1):
            time, place = edges[k], k << BITS
            found = begins.get(k)
            if found is not None:
                cost = restore(found)
                if cost - time <= least:
                    least, best = cost - time, (place, time, cost, (found,))
                if partial:
                    reached = (place, time, cost, (found,))
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
            elif k in partial and reached[0] == place:
                least, best, reached = self._through(k, reached, least, best)
            at_end(best)

    def _through(self, k: int, reached: Stop, least: float, best: Stop) -> tuple[float, Stop, Stop]:
        """Go on from a stop by restoring the partial checkpoint of iteration `k`."""
        checkpoint = self.partial[k]
        cost = reached[2] + self.cost.restore(checkpoint)
        time = self.edges[k] + self.inner[k]
        chain = (*reached[3], checkpoint)
        if cost - time <= least:
            least, best = cost - time, ((k << BITS) + END, time, cost, chain)
        cost += self.seconds[k] - self.inner[k]
        return least, best, ((k + 1) << BITS, self.edges[k + 1], cost, chain)
