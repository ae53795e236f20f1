"""Divide the work of a survey into segments for several workers.

All workers get about the same predicted seconds, and runs of higher priority come first. The first functions only
handle seconds: when each segment ends, the shortest possible time, shares of equal length.
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
"""(seconds, first atom, end): the atoms `first <= i < end` of a run, and how long they take."""
MAX_EXCHANGES, MAX_CANDIDATES = 200, 16
"""Most exchanges of atoms between shares; how many of the emptiest shares are considered for each exchange."""
UNEVENNESS = 0.001
"""Fraction of the mean load by which the fullest share may exceed the mean."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each segment ends if workers take the segments in order."""

    ends: tuple[float, ...]
    workers: int

    @property
    def seconds(self) -> float:
        """Seconds until all segments have ended."""
        return max(self.ends, default=0.0)


def schedule(seconds: Sequence[float], workers: int) -> Schedule:
    """Return when each segment ends if a free worker always takes the next segment.

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

    The time is at least the mean load of a worker. And of the `k * workers + 1` longest segments, some worker
    must run `k + 1`.

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
    """Divide `timed_atoms`, sorted by length with the longest first, into `count` shares of nearly equal seconds.

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
    """Return the exchange that lowers the load of the fullest share `full` most, or None if no exchange lowers it.

    It consists of the number of an emptier share, the atoms to give to that share, and the atoms to take from that
    share, or None to take nothing.
    """
    best, least_load = None, loads[full] - 1e-9
    giving = sorted(shares[full])
    for emptier in sorted(range(len(shares)), key=loads.__getitem__)[:MAX_CANDIDATES]:
        if emptier == full:
            continue
        ideal = (loads[full] - loads[emptier]) / 2
        taking = sorted(shares[emptier])
        lengths = [seconds for seconds, _, _ in taking]
        for give in giving:
            # the best atoms to take are the two whose lengths are next to the ideal length
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
"""Numbers of segments per worker with which a division of the work is tried."""
MAX_TRIES = 16
"""Most segment lengths that are tried to fill all workers."""
EXTRA_TIME = 0.01
"""Fraction by which a plan may take longer so that there are segments for workers that are added later."""
MIN_GAIN = 0.005
"""Fraction of its duration by which a plan must end sooner than another one to be worth more computing."""
GAIN_PER_SECOND = 2 / 3
"""Seconds by which a plan must end sooner for each additional second of computing per worker."""
NOTICED = 0.5
"""Seconds that must be saved to make it worth dividing a run, or restoring checkpoints instead of running again."""
RISK = 0.05
"""Fraction of a rerun's time that restoring must save at least, because after a failed restore the run runs again."""


def shortest_possible(survey: Survey, workers: int) -> float:
    """Return a time that no plan can beat, because the blocks of `_RunDivider.blocks` are never divided."""
    blocks: list[float] = []
    start = min((work.startup.seconds for work in survey.work), default=0.0)
    for work in survey.work:
        sums = list(accumulate(work.warm_seconds, initial=0.0))
        ends = [*work.start_atoms, len(work.warm_seconds)]
        blocks.extend(sums[b] - sums[a] for a, b in pairwise(ends))
    return start + lower_bound(blocks, workers)


class _RunDivider:
    """Divides the atoms of one run into segments.

    Only at some atoms can another process start without repeating work (`Work.start_atoms`). The atoms from one of
    these up to the next are a block, which is never divided.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.sums = list(accumulate(work.warm_seconds, initial=0.0))
        self.start = work.startup.seconds
        self.shareable = min(work.facts.shareable * work.cost.speed.compute, self.start)
        self.total = len(work.warm_seconds)
        self.ends = [*work.start_atoms, self.total]

    def cost(self, ranges: AtomRanges) -> float:
        """Return the seconds of a process that executes these ranges of atoms."""
        spent, cold, sums = self.start, self.work.cold_seconds, self.sums
        for first, last in ranges:
            if first < last:
                spent += cold[first] + sums[last] - sums[first + 1]
        return spent

    def divide_by_limit(self, limit: float) -> list[AtomRanges]:
        """Return consecutive segments, each as long as `limit` seconds allow and at least one block long."""
        starts, cold, sums = self.ends, self.work.cold_seconds, self.sums
        segments: list[AtomRanges] = []
        at = 0
        while at < len(starts) - 1:
            first = starts[at]
            room = limit - self.start - cold[first] + sums[first + 1]
            reach = bisect_right(sums, room) - 1
            to = max(bisect_right(starts, reach) - 1, at + 1)
            segments.append(((first, starts[to]),))
            at = to
        return segments or [((0, 0),)]

    def divide_evenly(self, count: int, limit: float) -> list[AtomRanges]:
        """Return at most `count` consecutive segments, whose longest one is as short as possible."""
        if count == 1:
            return [((0, self.total),)]
        low, high = 0.0, limit
        for _ in range(24):
            middle = (low + high) / 2
            if len(self.divide_by_limit(middle)) <= count:
                high = middle
            else:
                low = middle
        return self.divide_by_limit(high)

    def scatter(self, count: int) -> list[AtomRanges]:
        """Return `count` segments, each with several ranges from all over the run.

        Their lengths are more equal than those of consecutive segments. A process reaches its next range by
        restoring a checkpoint, which is cheaper than starting another process.
        """
        shares = balance(self.blocks(), count)
        return [_join_adjacent(sorted((a, b) for _, a, b in share)) for share in shares if share]

    def fill(self, limit: float) -> list[AtomRanges]:
        """Return segments of at most `limit` seconds; all but the last segment are nearly that long."""
        rooms: list[tuple[float, int]] = []
        shares: list[list[tuple[int, int]]] = []
        for seconds, first, last in self.blocks():
            at = bisect_left(rooms, (seconds, -1))
            room, number = rooms.pop(at) if at < len(rooms) else (limit - self.start, len(shares))
            if number == len(shares):
                shares.append([])
            shares[number].append((first, last))
            insort(rooms, (room - seconds, number))
        return [_join_adjacent(sorted(share)) for share in shares] or [((0, self.total),)]

    def blocks(self) -> list[TimedAtoms]:
        """Return the blocks of the run, each with its seconds in a process that starts with the block; longest first."""
        cold, sums = self.work.cold_seconds, self.sums
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
    """Return the plan that ends first on `workers`; its segments are ordered by priority.

    A run is divided only where a process can start without repeating work. With more and smaller segments, the
    workers end more equally, but each segment costs a start, so several sizes are tried. With a `budget`, the plan
    has only segments that end within `budget` seconds. With a `growth` above 1, the plan has up to
    `growth * workers` segments if they cost almost nothing more, so that workers can be added later. With
    `rerun`, a run runs again from its start in one process if restoring would not be noticeably faster.
    """
    dividers = [_RunDivider(work) for work in survey.work]
    best = _in_order(dividers, [[((0, divider.total),)] for divider in dividers])
    spent, total = _duration_and_cost(dividers, best, workers)
    for divisions in _candidate_divisions(dividers, workers) if workers > 1 else ():
        division = _in_order(dividers, divisions)
        duration, computing = _duration_and_cost(dividers, division, workers)
        if spent - duration > _least_gain(computing - total, spent, workers):
            best, spent, total = division, duration, computing
    if len(best) < growth * workers:
        best = _divide_further(dividers, best, workers, growth * workers)
    counts = Counter(i for i, _ in best)
    segments = [
        _rerun(dividers[i])
        if rerun and counts[i] == 1 and not _worth_restoring(dividers[i], ranges)
        else _segment(dividers[i], ranges)
        for i, ranges in best
    ]
    if budget is not None:
        ends = schedule([segment.seconds for segment in segments], workers).ends
        count_in_budget = next((i for i, end in enumerate(ends) if end > budget), len(segments))
        segments = segments[:count_in_budget]
    return Plan(tuple(segments), survey.refusals)


def _least_gain(added: float, spent: float, workers: int) -> float:
    """Return how much sooner than after `spent` seconds a plan must end to be worth `added` seconds of computing.

    >>> _least_gain(3.0, 5.0, workers=2), _least_gain(0.3, 5.0, workers=2), _least_gain(-3.0, 5.0, workers=2)
    (1.0, 0.5, -1.0)
    """
    price = GAIN_PER_SECOND * added / workers
    if added <= 0:
        return price
    return max(price, NOTICED, MIN_GAIN * spent)


def _worth_restoring(divider: _RunDivider, ranges: AtomRanges) -> bool:
    """Return True if a process that restores checkpoints is noticeably faster than a rerun of the run."""
    work = divider.work
    saved = work.rerun - divider.cost(ranges)
    return saved >= max(NOTICED, RISK * work.rerun) or not work.iterations


def _rerun(divider: _RunDivider) -> Segment:
    """Return one segment with all the work of a run; it starts with the program and restores nothing."""
    work = divider.work
    planned = _segment(divider, ((0, divider.total),))
    seconds = work.rerun - divider.start
    computing = Prediction(seconds, seconds * work.noise).times(1.0, share=work.cost.speed.share)
    guess = work.cost.corrected(work.startup + computing, Operator.FULL)
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


def _candidate_divisions(
    dividers: list[_RunDivider], workers: int
) -> Iterator[list[list[AtomRanges]]]:
    """Yield ways to divide all runs, beginning with few segments; each has a list of segments for every run."""
    for share in PER_WORKER:
        limit = _limit(dividers, int(share * workers))
        if limit is None:
            continue
        counts = [(divider, len(divider.divide_by_limit(limit))) for divider in dividers]
        yield [divider.divide_evenly(count, limit) for divider, count in counts]
        yield [
            divider.scatter(count) if count > 1 else divider.divide_by_limit(limit)
            for divider, count in counts
        ]
    if 0 < len(dividers) <= workers:
        yield _fill_workers(dividers, workers)


def _fill_workers(dividers: list[_RunDivider], workers: int) -> list[list[AtomRanges]]:
    """Return segments of nearly equal length, one for each worker; only the last segment of each run is shorter.

    One worker runs the short segments of several runs.
    """
    high = sum(divider.start + divider.sums[-1] for divider in dividers)
    low = high / workers
    best_division = [divider.fill(high) for divider in dividers]
    for _ in range(MAX_TRIES):
        middle = (low + high) / 2
        division = [divider.fill(middle) for divider in dividers]
        if _duration_and_cost(dividers, _in_order(dividers, division), workers)[0] <= middle:
            high, best_division = middle, division
        else:
            low = middle
    return best_division


def _divide_further(
    dividers: list[_RunDivider], best: list[tuple[int, AtomRanges]], workers: int, max_segments: int
) -> list[tuple[int, AtomRanges]]:
    """Return more and smaller segments, up to `max_segments`, if they cost almost nothing more."""
    spent, total = _duration_and_cost(dividers, best, workers)
    for count in range(max_segments, len(best), -max(1, workers // 2)):
        limit = _limit(dividers, count)
        if limit is None:
            break
        divisions = [
            divider.divide_evenly(len(divider.divide_by_limit(limit)), limit)
            for divider in dividers
        ]
        division = _in_order(dividers, divisions)
        if len(division) <= len(best):
            break
        duration, computing = _duration_and_cost(dividers, division, workers)
        if duration <= spent * (1 + EXTRA_TIME) and computing <= total * (1 + EXTRA_TIME):
            return division
    return best


def _duration_and_cost(
    dividers: list[_RunDivider], segments: list[tuple[int, AtomRanges]], workers: int
) -> tuple[float, float]:
    """Return (seconds until all segments have ended, seconds of computing in all segments together)."""
    seconds = [dividers[i].cost(ranges) for i, ranges in segments]
    shared = sum(
        (count - 1) * dividers[i].shareable for i, count in Counter(i for i, _ in segments).items()
    )
    return schedule(seconds, workers).seconds, sum(seconds) - shared


def _in_order(
    dividers: list[_RunDivider], divisions: list[list[AtomRanges]]
) -> list[tuple[int, AtomRanges]]:
    # longest first among equal priorities: short segments fill the gaps at the end
    keyed = [
        (dividers[i].work.facts.priority, -dividers[i].cost(ranges), i, ranges)
        for i, own_segments in enumerate(divisions)
        for ranges in own_segments
    ]
    return [(i, ranges) for _, _, i, ranges in sorted(keyed)]


def _limit(dividers: list[_RunDivider], max_segments: int) -> float | None:
    """Return the shortest length of segments with which all runs have at most `max_segments` together.

    Return None if there are more runs than that.
    """
    if len(dividers) > max_segments:
        return None
    low, high = 0.0, max((divider.cost(((0, divider.total),)) for divider in dividers), default=0.0)
    for _ in range(30):
        middle = (low + high) / 2
        if sum(len(divider.divide_by_limit(middle)) for divider in dividers) <= max_segments:
            high = middle
        else:
            low = middle
    return high


def _segment(divider: _RunDivider, ranges: AtomRanges) -> Segment:
    """Return the segment of the plan that executes `ranges` of atoms."""
    work, loops = divider.work, divider.work.facts.loops
    operator = operator_of(work, *ranges[0])
    seconds = divider.cost(ranges) - divider.start
    computing = Prediction(seconds, seconds * work.noise).times(1.0, share=work.cost.speed.share)
    guess = work.cost.corrected(work.startup + computing, operator)
    iterations = [k for first, last in ranges for k in work.iterations[first:last]]
    tail = work.tail and ranges[-1][1] == divider.total and bool(iterations)
    if tail:
        iterations.pop()
    gaps = bool(iterations) and iterations[-1] - iterations[0] + 1 != len(iterations)
    groups = [
        group
        for first, last in ranges
        if first < last
        for group in (work.cold_restores[first], *work.warm_restores[first + 1 : last])
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
    """Return (loop, first, last) of requested inner iterations, in `iterations` of the outermost loop."""
    if work.within is None or any(loop == work.within.loop for loop, _, _ in work.inner):
        return work.inner
    first, last = work.within.enclosing_range(iterations)
    if (first, last) == (0, None):
        return work.inner
    return (*work.inner, (work.within.loop, first, last))
