"""What is wanted of a run, iteration by iteration of its outermost loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rearview.model.point import columns_of, name_of
from rearview.plan.axis import Axis
from rearview.plan.facts import DeepFacts, LoopFacts, RunFacts, Shown, Wanted, Within

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

    def add(self, wanted: Wanted) -> str:
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
                    f"run {self.facts.run} never finished, so what follows "
                    f"its loop `{name_of(self.axis.name)}` was never reached"
                )
            self.after = True
            self.whole |= wanted.depth is not None and wanted.depth < 0
            # fed by the loop: its iterations must run
            self.whole |= wanted.feeds
            return ""
        return self._in_loops(wanted)

    def _in_loops(self, wanted: Wanted) -> str:
        axis = self.axis
        if axis.name != wanted.loops[0]:
            return (
                f"run {self.facts.run} has no loop `{name_of(wanted.loops[0])}` "
                f"(its outermost loop is `{name_of(axis.name or '')}`)"
            )
        shown = columns_of(wanted.loops)
        outer = next((at for at in wanted.at if at.loop == shown[0]), None)
        chosen: Iterable[int] = range(axis.count)
        if outer is not None:
            values = self.facts.loops[0].values
            chosen = outer.indices(axis.count, values)
            if not chosen:
                return (
                    f"run {self.facts.run} has no iteration {outer}: "
                    f"it has {axis.count}{_listed(values)}"
                )
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

    def _note(self, chosen: Iterable[int], need: int, wanted: Wanted) -> None:
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

    def _count(self, chosen: Iterable[int], wanted: Wanted) -> int:
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

    def _inner(self, chosen: Iterable[int], wanted: Wanted) -> str:
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
                f"run {self.facts.run} has no iteration {at}: "
                f"`{shown[1]}` has at most {most} in each `{shown[0]}`{_listed(values)}"
            )
        return ""

    def _limit(self, loop: str, span: tuple[int, int | None]) -> None:
        """Let an inner loop run as far as any iteration around it wants."""
        first, last = self.inner.get(loop, span)
        high = None if last is None or span[1] is None else max(last, span[1])
        self.inner[loop] = (min(first, span[0]), high)


def _elsewhere(wanted: Wanted, loop: str) -> str:
    return f"`{wanted.names[0]}` is not logged in a loop `{loop}`"


def _listed(values: Sequence[Shown] | None) -> str:
    """Return what a target held, as the end of a sentence.

    >>> _listed(["a", "b"]), _listed(None), _listed(range(9))
    (': a, b', '', ': 0, 1, 2, 3, 4 and so on')
    """
    if not values:
        return ""
    more = " and so on" if len(values) > 5 else ""
    return f": {', '.join(map(str, values[:5]))}{more}"
