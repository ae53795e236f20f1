"""Divide the work of a survey into segments for several workers.

The work for a run is a list of *atoms* (`plan.survey_work.Work`). A segment gets ranges of atoms. All workers get about the
same predicted seconds, and runs with a smaller `priority` come first. `schedule`, `lower_bound` and `balance` only
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
from rearview.plan.survey_work import Survey, Work, gc_disabled, operator_of

TimedAtoms = tuple[float, int, int]
"""(seconds, first, end): the atoms `first <= i < end` of a run, and the seconds that they take together."""
MAX_EXCHANGES, MAX_CANDIDATES = 200, 16
"""Most exchanges of atoms between shares; number of the emptiest shares that are considered for each exchange."""
UNEVENNESS = 0.001
"""Exchanges end if the fullest share exceeds the mean by at most this fraction of the mean."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times at which segments end if `workers` workers take them in order."""

    ends: tuple[float, ...]
    """Seconds from the start of the first segment to the end of each segment."""
    workers: int

    @property
    def seconds(self) -> float:
        """Seconds until all segments have ended."""
        return max(self.ends, default=0.0)


def schedule(seconds: Sequence[float], workers: int) -> Schedule:
    """Return when each segment ends if a free worker always takes the next one; item i of `seconds` is its duration.

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
    """Return a lower bound for the seconds of any schedule of segments that take `seconds`.

    A schedule takes at least the sum of `seconds` divided by `workers`. And of the `k * workers + 1` longest segments,
    one worker must run `k + 1`.

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
    """Divide `timed_atoms`, which must be sorted with the longest first, into `count` shares of nearly equal seconds.

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
    """Return the best exchange (share, give, take) between the fullest share `full` and an emptier one.

    `share` is the number of the emptier share, `give` the atoms that it gets, and `take` the atoms that `full` gets
    from it, or None for nothing. `loads` are the seconds of each share. The best exchange makes the fuller of the two
    as short as possible. Return None if no exchange makes `full` shorter.
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
            # the best atoms to take are those whose seconds are just below or just above the ideal seconds
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
"""Numbers of segments per worker that are tried when the work is divided."""
MAX_TRIES = 16
"""Number of segment lengths that `_fill_workers` tries."""
EXTRA_TIME = 0.01
"""Fraction by which duration and computing of a plan may grow to have segments for workers that are added later."""
MIN_GAIN = 0.005
"""A plan with more computing than another one must save at least this fraction of the other plan's duration."""
GAIN_PER_SECOND = 2 / 3
"""Seconds by which a plan must end sooner for each additional second of computing per worker."""
NOTICED = 0.5
"""Least seconds to save by dividing the work further, or by restoring checkpoints instead of rerunning a run."""
RISK = 0.05
"""Least fraction of a rerun's seconds that restoring must save: if a restore fails, the rerun comes on top."""


def shortest_possible(survey: Survey, workers: int) -> float:
    """Return a lower bound for the seconds of any plan; it holds because blocks of atoms are never divided.

    Blocks are explained at `_RunDivider`.
    """
    blocks: list[float] = []
    start = min((work.startup.seconds for work in survey.work), default=0.0)
    for work in survey.work:
        sums = list(accumulate(work.warm_seconds, initial=0.0))
        ends = [*work.start_atoms, len(work.warm_seconds)]
        blocks.extend(sums[b] - sums[a] for a, b in pairwise(ends))
    return start + lower_bound(blocks, workers)


class _RunDivider:
    """Divides the atoms of one run into segments.

    A process can start without repeating work only at some atoms (`Work.start_atoms`). The atoms from one of these up
    to the next are a *block*, which is never divided.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        self.sums = list(accumulate(work.warm_seconds, initial=0.0))
        self.start = work.startup.seconds
        self.shareable = min(work.facts.shareable * work.cost.speed.compute, self.start)
        self.total = len(work.warm_seconds)
        self.ends = [*work.start_atoms, self.total]

    def cost(self, ranges: AtomRanges) -> float:
        """Return the predicted seconds of a process that executes `ranges` of atoms, including its start."""
        spent, cold, sums = self.start, self.work.cold_seconds, self.sums
        for first, last in ranges:
            if first < last:
                spent += cold[first] + sums[last] - sums[first + 1]
        return spent

    def divide_by_limit(self, limit: float) -> list[AtomRanges]:
        """Return consecutive segments, each with as many blocks as fit into `limit` seconds, but at least one."""
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
        """Return at most `count` consecutive segments, such that the longest segment is as short as possible.

        `limit` is an upper bound in seconds for the longest segment.
        """
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
        """Return at most `count` segments, each with several ranges of atoms that need not be consecutive.

        The segments have more equal lengths than consecutive ones. Their processes restore a checkpoint to get to the
        next range, which is cheaper than starting another process.
        """
        shares = balance(self.blocks(), count)
        return [_join_adjacent(sorted((a, b) for _, a, b in share)) for share in shares if share]

    def fill(self, limit: float) -> list[AtomRanges]:
        """Return segments of blocks that need not be consecutive; all but the last take nearly `limit` seconds.

        A segment takes more than `limit` seconds only if it is a single block.
        """
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
        """Return (seconds, first, end) of each block, longest first.

        `seconds` are those of a process that begins with this block, without the start of the process.
        """
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
    """Return the plan that ends first on `workers` workers; its segments are ordered by priority.

    A run is divided only where a process can start without repeating work. If there are more and smaller segments, the
    workers end at more equal times, but each segment needs a start, so several sizes are tried. With a `budget`, the
    plan has only segments that end within `budget` seconds. With a `growth` above 1, the plan has up to `growth *
    workers` segments if they cost almost nothing more, so that workers can be added later. With `rerun`, a run is
    executed again from its start in one process if restoring checkpoints would not be noticeably faster.
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
    """Return how many seconds a plan must save of a duration of `spent` to be worth `added` seconds of computing.

    If `added` is negative, the result is negative, too: the plan may take longer by this.

    >>> _least_gain(3.0, 5.0, workers=2), _least_gain(0.3, 5.0, workers=2), _least_gain(-3.0, 5.0, workers=2)
    (1.0, 0.5, -1.0)
    """
    price = GAIN_PER_SECOND * added / workers
    if added <= 0:
        return price
    return max(price, NOTICED, MIN_GAIN * spent)


def _worth_restoring(divider: _RunDivider, ranges: AtomRanges) -> bool:
    """Return True if one process with `ranges` of atoms, restoring checkpoints, is noticeably faster than a rerun."""
    work = divider.work
    saved = work.rerun - divider.cost(ranges)
    return saved >= max(NOTICED, RISK * work.rerun) or not work.iterations


def _rerun(divider: _RunDivider) -> Segment:
    """Return one segment with all the work of a run, which starts with the program and restores no checkpoint."""
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
    """Yield ways to divide all runs: item i of each is the list of segments of run i. The first have few segments."""
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
    """Return a division (segments of each run) in which each worker gets one long segment or several short ones.

    The segments have nearly equal lengths; only the last segment of each run is shorter.
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
    """Return a division with more segments than `best`, up to `max_segments`, if it costs almost nothing more.

    If there is none, return `best`. Segments are (number of the run, ranges of atoms).
    """
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
    """Return (seconds until `workers` have ended all `segments`, seconds of computing in all segments together).

    Segments are (number of the run's divider, ranges of atoms).
    """
    seconds = [dividers[i].cost(ranges) for i, ranges in segments]
    shared = sum(
        (count - 1) * dividers[i].shareable for i, count in Counter(i for i, _ in segments).items()
    )
    return schedule(seconds, workers).seconds, sum(seconds) - shared


def _in_order(
    dividers: list[_RunDivider], divisions: list[list[AtomRanges]]
) -> list[tuple[int, AtomRanges]]:
    # of equal priorities, the longest segment first, because short ones fill the last gaps in the schedule
    keyed = [
        (dividers[i].work.facts.priority, -dividers[i].cost(ranges), i, ranges)
        for i, own_segments in enumerate(divisions)
        for ranges in own_segments
    ]
    return [(i, ranges) for _, _, i, ranges in sorted(keyed)]


def _limit(dividers: list[_RunDivider], max_segments: int) -> float | None:
    """Return the least limit in seconds for which `divide_by_limit` divides all runs into at most `max_segments`.

    Return None if there are more runs than `max_segments`.
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
    """Return the segment of the plan that executes `ranges` of atoms of the run of `divider`."""
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
    """Return (loop, first, last) for each inner loop of which only iterations `first <= i < last` are requested.

    The ranges hold for all `iterations` of the outermost loop; `last` of None is the end of the inner loop.
    """
    if work.within is None or any(loop == work.within.loop for loop, _, _ in work.inner):
        return work.inner
    first, last = work.within.enclosing_range(iterations)
    if (first, last) == (0, None):
        return work.inner
    return (*work.inner, (work.within.loop, first, last))
