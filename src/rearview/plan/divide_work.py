"""Divide the work of a survey into segments for several workers.

The work is balanced by predicted seconds and kept in the order of priorities. The first half of the module
only handles seconds: when each segment ends, a lower bound, equal shares.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from rearview.model import Operator, Plan, Segment
from rearview.plan.cost import Prediction
from rearview.plan.replay import Survey, Work, gc_disabled, operator_of

TimedAtoms = tuple[float, int, int]
"""(seconds, first atom, last atom)."""
MAX_EXCHANGES, MAX_CANDIDATES = 200, 16
"""Most exchanges that are tried, and the number of emptiest shares with which they are tried."""
UNEVENNESS = 0.001
"""Fraction of the mean by which the fullest share may exceed it."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each segment ends if workers take them in order."""

    ends: tuple[float, ...]
    workers: int

    @property
    def seconds(self) -> float:
        """Seconds until all segments have ended."""
        return max(self.ends, default=0.0)


def schedule(seconds: Sequence[float], workers: int) -> Schedule:
    """Return when each segment ends if every free worker takes the next one.

    >>> schedule([3.0, 2.0, 2.0], workers=2).ends
    (3.0, 2.0, 4.0)
    """
    free = [0.0] * max(1, min(workers, len(seconds)))
    ends: list[float] = []
    for value in seconds:
        end = free[0] + value
        heapq.heapreplace(free, end)
        ends.append(end)
    return Schedule(tuple(ends), workers)


def lower_bound(seconds: Sequence[float], workers: int) -> float:
    """Return a time that no schedule of these segments can beat.

    It is at least the mean. And of the `k * workers + 1` longest segments, some worker gets `k + 1`.

    >>> lower_bound([1.0] * 5, workers=4)
    2.0
    """
    if not seconds:
        return 0.0
    longest = sorted(seconds, reverse=True)
    sums = list(accumulate(longest, initial=0.0))
    best = max(longest[0], sums[-1] / workers)
    k = 1
    while k * workers < len(longest):
        last = k * workers + 1
        best = max(best, sums[last] - sums[last - k - 1])
        k += 1
    return best


def balance(timed_atoms: list[TimedAtoms], count: int) -> list[list[TimedAtoms]]:
    """Return `timed_atoms` in `count` shares of nearly equal seconds; they must be sorted, longest first.

    >>> shares = balance([(3.0, 0, 1), (3.0, 1, 2), (2.0, 2, 3), (2.0, 3, 4), (2.0, 4, 5)], 2)
    >>> sorted(sum(seconds for seconds, _, _ in share) for share in shares)
    [6.0, 6.0]
    """
    shares: list[list[TimedAtoms]] = [[] for _ in range(count)]
    loads = [0.0] * count
    heap = [(0.0, number) for number in range(count)]
    for atoms in timed_atoms:
        load, number = heap[0]
        heapq.heapreplace(heap, (load + atoms[0], number))
        shares[number].append(atoms)
        loads[number] = load + atoms[0]
    enough = (1 + UNEVENNESS) * sum(loads) / count
    for _ in range(MAX_EXCHANGES):
        full = max(range(count), key=loads.__getitem__)
        if loads[full] <= enough:
            break
        better = _exchange(shares, loads, full)
        if better is None:
            break
        emptier, give, take = better
        shares[full].remove(give)
        shares[emptier].append(give)
        if take is not None:
            shares[emptier].remove(take)
            shares[full].append(take)
        change = give[0] - (take[0] if take is not None else 0.0)
        loads[full] -= change
        loads[emptier] += change
    return shares


def _exchange(
    shares: list[list[TimedAtoms]], loads: list[float], full: int
) -> tuple[int, TimedAtoms, TimedAtoms | None] | None:
    """Return (other share, atom to give to it, atom to take from it) that lowers the fullest share most."""
    best, least_load = None, loads[full] - 1e-9
    giving = sorted(shares[full])
    for emptier in sorted(range(len(shares)), key=loads.__getitem__)[:MAX_CANDIDATES]:
        if emptier == full:
            continue
        ideal = (loads[full] - loads[emptier]) / 2
        taking = sorted(shares[emptier])
        lengths = [seconds for seconds, _, _ in taking]
        for give in giving:
            # the two candidates around the ideal length are the best to take
            at = bisect_left(lengths, give[0] - ideal)
            for take in (None, *taking[max(0, at - 1) : at + 1]):
                change = give[0] - (take[0] if take is not None else 0.0)
                if change <= 0:
                    continue
                high = max(loads[full] - change, loads[emptier] + change)
                if high < least_load:
                    best, least_load = (emptier, give, take), high
    return best


AtomRanges = tuple[tuple[int, int], ...]
"""Ranges of atoms, `first <= i < last`, that one process executes in order: the content of one segment."""
PER_WORKER = (0.125, 0.25, 0.5, 1, 1.2, 1.5, 1.75, 2, 2.5, 3, 4, 6)
"""How many segments per worker are tried."""
MAX_TRIES = 16
"""Segment lengths that are tried to fill all workers."""
EXTRA_TIME = 0.01
"""Fraction by which a plan may take longer so that workers that are added later find segments."""
MIN_GAIN = 0.005
"""Fraction of its time by which a plan that computes more must end sooner."""
GAIN_PER_SECOND = 2 / 3
"""Seconds by which a plan must end sooner for each additional second of computing per worker."""
NOTICED = 0.5
"""Seconds below which it is not worth dividing a run, or restoring checkpoints instead of running again."""
RISK = 0.05
"""Fraction of a rerun's time that restoring must save as well, because a failed restore costs a rerun in addition."""


def shortest_possible(survey: Survey, workers: int) -> float:
    """Return a time that no plan can beat; atoms between two cuts are never divided."""
    pieces: list[float] = []
    start = min((work.startup.seconds for work in survey.work), default=0.0)
    for work in survey.work:
        sums = list(accumulate(work.going, initial=0.0))
        ends = [*work.cuts, len(work.going)]
        pieces.extend(sums[b] - sums[a] for a, b in pairwise(ends))
    return start + lower_bound(pieces, workers)


class _Cutter:
    """Divides the atoms of one run into ranges, each for one process."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.sums = list(accumulate(work.going, initial=0.0))
        self.start = work.startup.seconds
        self.shareable = min(work.facts.shareable * work.cost.speed.compute, self.start)
        self.total = len(work.going)
        self.ends = [*work.cuts, self.total]

    def cost(self, piece: AtomRanges) -> float:
        """Return the seconds of a process that executes these ranges of atoms."""
        spent, cold, sums = self.start, self.work.cold, self.sums
        for first, last in piece:
            if first < last:
                spent += cold[first] + sums[last] - sums[first + 1]
        return spent

    def cut(self, limit: float) -> list[AtomRanges]:
        """Return consecutive segments, each as long as `limit` allows and at least one cut long."""
        cuts, cold, sums = self.ends, self.work.cold, self.sums
        segments: list[AtomRanges] = []
        at = 0
        while at < len(cuts) - 1:
            first = cuts[at]
            room = limit - self.start - cold[first] + sums[first + 1]
            reach = bisect_right(sums, room) - 1
            to = max(bisect_right(cuts, reach) - 1, at + 1)
            segments.append(((first, cuts[to]),))
            at = to
        return segments or [((0, 0),)]

    def divide_evenly(self, count: int, limit: float) -> list[AtomRanges]:
        """Return at most `count` consecutive segments that are as even as possible."""
        if count == 1:
            return [((0, self.total),)]
        low, high = 0.0, limit
        for _ in range(24):
            middle = (low + high) / 2
            if len(self.cut(middle)) <= count:
                high = middle
            else:
                low = middle
        return self.cut(high)

    def scatter(self, count: int) -> list[AtomRanges]:
        """Return `count` segments of ranges from the whole run; they are more even than consecutive ones.

        A process reaches its next range by restoring a checkpoint, which is cheaper than starting another process.
        """
        shares = balance(self.between_cuts(), count)
        return [_join_adjacent(sorted((a, b) for _, a, b in share)) for share in shares if share]

    def fill(self, limit: float) -> list[AtomRanges]:
        """Return segments of at most `limit` seconds, all but the last of them nearly full."""
        rooms: list[tuple[float, int]] = []
        shares: list[list[tuple[int, int]]] = []
        for seconds, first, last in self.between_cuts():
            at = bisect_left(rooms, (seconds, -1))
            room, number = rooms.pop(at) if at < len(rooms) else (limit - self.start, len(shares))
            if number == len(shares):
                shares.append([])
            shares[number].append((first, last))
            insort(rooms, (room - seconds, number))
        return [_join_adjacent(sorted(share)) for share in shares] or [((0, self.total),)]

    def between_cuts(self) -> list[TimedAtoms]:
        """Return the atoms between two cuts, each with the cost of starting there, the longest first."""
        cold, sums = self.work.cold, self.sums
        timed_atoms = [(cold[a] + sums[b] - sums[a + 1], a, b) for a, b in pairwise(self.ends)]
        return sorted(timed_atoms, reverse=True)


def _join_adjacent(ranges: list[tuple[int, int]]) -> AtomRanges:
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)


@gc_disabled()
def divide(
    survey: Survey,
    *,
    workers: int = 1,
    budget: float | None = None,
    growth: int = 1,
    rerun: bool = False,
) -> Plan:
    """Return the plan that ends first on `workers`, in the order of priorities.

    A run is divided only where a process can start without repeating work. More and smaller segments
    balance better, but each pays for its start, so several sizes are tried. With `budget`, only segments
    that end within that many seconds are planned. `growth` asks for segments for that many times the
    workers, so that workers that are added later find some, as long as that costs almost nothing. With
    `rerun`, a run runs again from its start in one process if restoring would not be noticeably faster.
    """
    cutters = [_Cutter(work) for work in survey.work]
    best = _in_order(cutters, [[((0, cutter.total),)] for cutter in cutters])
    spent, total = _duration_and_cost(cutters, best, workers)
    for pieces in _candidate_divisions(cutters, workers) if workers > 1 else ():
        tried = _in_order(cutters, pieces)
        took, computing = _duration_and_cost(cutters, tried, workers)
        if spent - took > _least_gain(computing - total, spent, workers):
            best, spent, total = tried, took, computing
    if len(best) < growth * workers:
        best = _divide_further(cutters, best, workers, growth * workers)
    counts = Counter(i for i, _ in best)
    segments = [
        _rerun(cutters[i])
        if rerun and counts[i] == 1 and not _worth_restoring(cutters[i], piece)
        else _segment(cutters[i], piece)
        for i, piece in best
    ]
    if budget is not None:
        ends = schedule([segment.seconds for segment in segments], workers).ends
        kept = next((i for i, end in enumerate(ends) if end > budget), len(segments))
        segments = segments[:kept]
    return Plan(tuple(segments), survey.refusals)


def _least_gain(added: float, spent: float, workers: int) -> float:
    """Return how many seconds sooner than `spent` a plan must end to be worth `added` computing.

    >>> _least_gain(3.0, 5.0, workers=2), _least_gain(0.3, 5.0, workers=2), _least_gain(-3.0, 5.0, workers=2)
    (1.0, 0.5, -1.0)
    """
    price = GAIN_PER_SECOND * added / workers
    if added <= 0:
        return price
    return max(price, NOTICED, MIN_GAIN * spent)


def _worth_restoring(cutter: _Cutter, piece: AtomRanges) -> bool:
    """Return True if restoring checkpoints is noticeably faster than a rerun."""
    work = cutter.work
    saved = work.rerun - cutter.cost(piece)
    return saved >= max(NOTICED, RISK * work.rerun) or not work.iterations


def _rerun(cutter: _Cutter) -> Segment:
    """Return a segment that restores nothing and does all the work of one run."""
    work = cutter.work
    planned = _segment(cutter, ((0, cutter.total),))
    seconds = work.rerun - cutter.start
    own = Prediction(seconds, seconds * work.noise).times(1.0, share=work.cost.speed.share)
    guess = work.cost.corrected(work.startup + own, Operator.FULL)
    return replace(
        planned,
        operator=Operator.FULL,
        start=None,
        seconds=guess.seconds,
        low=guess.low,
        high=guess.high,
        restores=(),
        rerun=True,
        nbytes=0,
    )


def _candidate_divisions(cutters: list[_Cutter], workers: int) -> Iterator[list[list[AtomRanges]]]:
    """Yield ways to divide all runs, the fewest segments first."""
    for share in PER_WORKER:
        limit = _limit(cutters, int(share * workers))
        if limit is None:
            continue
        counts = [(cutter, len(cutter.cut(limit))) for cutter in cutters]
        yield [cutter.divide_evenly(count, limit) for cutter, count in counts]
        yield [
            cutter.scatter(count) if count > 1 else cutter.cut(limit) for cutter, count in counts
        ]
    if 0 < len(cutters) <= workers:
        yield _fill_workers(cutters, workers)


def _fill_workers(cutters: list[_Cutter], workers: int) -> list[list[AtomRanges]]:
    """Return segments that fill one worker each; the remainders of several runs fill one together."""
    high = sum(cutter.start + cutter.sums[-1] for cutter in cutters)
    low = high / workers
    best_division = [cutter.fill(high) for cutter in cutters]
    for _ in range(MAX_TRIES):
        middle = (low + high) / 2
        tried = [cutter.fill(middle) for cutter in cutters]
        if _duration_and_cost(cutters, _in_order(cutters, tried), workers)[0] <= middle:
            high, best_division = middle, tried
        else:
            low = middle
    return best_division


def _divide_further(
    cutters: list[_Cutter], best: list[tuple[int, AtomRanges]], workers: int, max_segments: int
) -> list[tuple[int, AtomRanges]]:
    """Return more and smaller segments, up to `max_segments`, if they cost almost nothing more."""
    spent, total = _duration_and_cost(cutters, best, workers)
    for count in range(max_segments, len(best), -max(1, workers // 2)):
        limit = _limit(cutters, count)
        if limit is None:
            break
        pieces = [cutter.divide_evenly(len(cutter.cut(limit)), limit) for cutter in cutters]
        tried = _in_order(cutters, pieces)
        if len(tried) <= len(best):
            break
        took, computing = _duration_and_cost(cutters, tried, workers)
        if took <= spent * (1 + EXTRA_TIME) and computing <= total * (1 + EXTRA_TIME):
            return tried
    return best


def _duration_and_cost(
    cutters: list[_Cutter], pieces: list[tuple[int, AtomRanges]], workers: int
) -> tuple[float, float]:
    """Return (seconds until all segments have ended, seconds of computing)."""
    seconds = [cutters[i].cost(piece) for i, piece in pieces]
    shared = sum(
        (count - 1) * cutters[i].shareable for i, count in Counter(i for i, _ in pieces).items()
    )
    return schedule(seconds, workers).seconds, sum(seconds) - shared


def _in_order(
    cutters: list[_Cutter], pieces: list[list[AtomRanges]]
) -> list[tuple[int, AtomRanges]]:
    # within a priority the longest first: short segments fill the gaps at the end
    keyed = [
        (cutters[i].work.facts.priority, -cutters[i].cost(piece), i, piece)
        for i, own in enumerate(pieces)
        for piece in own
    ]
    return [(i, piece) for _, _, i, piece in sorted(keyed)]


def _limit(cutters: list[_Cutter], max_segments: int) -> float | None:
    """Return the smallest length of consecutive segments that keeps their number at `max_segments`."""
    if len(cutters) > max_segments:
        return None
    low, high = 0.0, max((cutter.cost(((0, cutter.total),)) for cutter in cutters), default=0.0)
    for _ in range(30):
        middle = (low + high) / 2
        if sum(len(cutter.cut(middle)) for cutter in cutters) <= max_segments:
            high = middle
        else:
            low = middle
    return high


def _segment(cutter: _Cutter, piece: AtomRanges) -> Segment:
    """Return the segment of the plan for some ranges of atoms."""
    work, loops = cutter.work, cutter.work.facts.loops
    operator = operator_of(work, *piece[0])
    seconds = cutter.cost(piece) - cutter.start
    own = Prediction(seconds, seconds * work.noise).times(1.0, share=work.cost.speed.share)
    guess = work.cost.corrected(work.startup + own, operator)
    iterations = [k for first, last in piece for k in work.iterations[first:last]]
    tail = work.tail and piece[-1][1] == cutter.total and bool(iterations)
    if tail:
        iterations.pop()
    gaps = bool(iterations) and iterations[-1] - iterations[0] + 1 != len(iterations)
    groups = [
        group
        for first, last in piece
        if first < last
        for group in (work.cold_restores[first], *work.going_restores[first + 1 : last])
    ]
    restored = [checkpoint for group in groups for checkpoint in group]
    return Segment(
        run=work.facts.run,
        version=work.facts.version,
        operator=operator,
        loop=loops[0].name if loops and work.iterations else None,
        first=iterations[0] if iterations else (len(loops[0].seconds) if tail else 0),
        last=iterations[-1] + 1 if iterations else None,
        start=groups[0][0].id if groups and groups[0] else None,
        names=work.names,
        seconds=guess.seconds,
        low=guess.low,
        high=guess.high,
        only=tuple(iterations) if gaps else None,
        inner=_inner(work, iterations),
        restores=tuple([(c.point.steps[0].index, c.id) for c in restored]),
        tail=tail,
        priority=work.facts.priority,
        nbytes=sum([c.nbytes for c in restored]),
    )


def _inner(work: Work, iterations: Sequence[int]) -> tuple[tuple[str, int, int | None], ...]:
    """Return the requested iterations of inner loops, for some iterations of the outermost loop."""
    if work.within is None or any(loop == work.within.loop for loop, _, _ in work.inner):
        return work.inner
    first, last = work.within.hull(iterations)
    if (first, last) == (0, None):
        return work.inner
    return (*work.inner, (work.within.loop, first, last))
