"""Divide work among processes: balanced by predicted seconds, in the order of priorities.

The first half knows only pieces of known length on workers: when they end, the lower bound, equal shares.
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
from rearview.plan.replay import Survey, Work, operator_of, quietly

Stretch = tuple[float, int, int]
"""(seconds, first atom, last atom)."""
EXCHANGES, CANDIDATES = 200, 16
"""How long, and with how many of the emptiest shares, exchanges are tried."""
EVEN = 0.001
"""Share of the mean by which the fullest may exceed it: many short stretches are even at once."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each segment runs if workers take them in order."""

    ends: tuple[float, ...]
    workers: int

    @property
    def seconds(self) -> float:
        """Time until all is done."""
        return max(self.ends, default=0.0)


def schedule(seconds: Sequence[float], workers: int) -> Schedule:
    """Return when each piece ends if every free worker takes the next one.

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


def bound(seconds: Sequence[float], workers: int) -> float:
    """Return a time that no schedule of these pieces can beat.

    Besides the mean: of the `k * workers + 1` longest pieces some worker gets `k + 1`.

    >>> bound([1.0] * 5, workers=4)
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


def share_out(stretches: list[Stretch], count: int) -> list[list[Stretch]]:
    """Return the stretches, longest first, in `count` shares that are as even as exchanges make them.

    >>> shares = share_out([(3.0, 0, 1), (3.0, 1, 2), (2.0, 2, 3), (2.0, 3, 4), (2.0, 4, 5)], 2)
    >>> sorted(sum(seconds for seconds, _, _ in share) for share in shares)
    [6.0, 6.0]
    """
    shares: list[list[Stretch]] = [[] for _ in range(count)]
    loads = [0.0] * count
    heap = [(0.0, number) for number in range(count)]
    for stretch in stretches:
        load, number = heap[0]
        heapq.heapreplace(heap, (load + stretch[0], number))
        shares[number].append(stretch)
        loads[number] = load + stretch[0]
    enough = (1 + EVEN) * sum(loads) / count
    for _ in range(EXCHANGES):
        full = max(range(count), key=loads.__getitem__)
        if loads[full] <= enough:
            break
        better = _exchange(shares, loads, full)
        if better is None:
            break
        other, give, take = better
        shares[full].remove(give)
        shares[other].append(give)
        if take is not None:
            shares[other].remove(take)
            shares[full].append(take)
        change = give[0] - (take[0] if take is not None else 0.0)
        loads[full] -= change
        loads[other] += change
    return shares


def _exchange(
    shares: list[list[Stretch]], loads: list[float], full: int
) -> tuple[int, Stretch, Stretch | None] | None:
    """Return (other share, what to give it, what to take for it) that lowers the fullest most."""
    found, least_load = None, loads[full] - 1e-9
    giving = sorted(shares[full])
    for other in sorted(range(len(shares)), key=loads.__getitem__)[:CANDIDATES]:
        if other == full:
            continue
        ideal = (loads[full] - loads[other]) / 2
        taking = sorted(shares[other])
        lengths = [seconds for seconds, _, _ in taking]
        for give in giving:
            # of what could be taken, the two around the ideal are the best
            at = bisect_left(lengths, give[0] - ideal)
            for take in (None, *taking[max(0, at - 1) : at + 1]):
                change = give[0] - (take[0] if take is not None else 0.0)
                if change <= 0:
                    continue
                high = max(loads[full] - change, loads[other] + change)
                if high < least_load:
                    found, least_load = (other, give, take), high
    return found


Piece = tuple[tuple[int, int], ...]
"""Stretches of atoms `first <= i < last` that one process does, in order."""
PER_WORKER = (0.125, 0.25, 0.5, 1, 1.2, 1.5, 1.75, 2, 2.5, 3, 4, 6)
"""How many segments per worker are tried."""
TRIES = 16
"""Lengths that are tried to find the one which fills all workers."""
SPARE = 0.01
"""Share of its time that a plan may be longer so that workers who come later find work."""
LEAST = 0.005
"""Share of its time by which a plan that computes more must end sooner."""
WORTH = 2 / 3
"""Seconds that a plan must end sooner for each second of computing it adds per worker. On two workers, a
run is divided if what it computes takes two thirds as long as the start that a second process repeats."""
NOTICED = 0.5
"""Seconds below which it is not worth dividing a run, or restoring checkpoints instead of running again."""
RISK = 0.05
"""Share of a rerun that restoring must save as well: a state that cannot be restored costs a rerun on top."""


def least(survey: Survey, workers: int) -> float:
    """Return a time that no plan can beat: what lies between two cuts is never divided."""
    pieces: list[float] = []
    start = min((work.startup.seconds for work in survey.work), default=0.0)
    for work in survey.work:
        sums = list(accumulate(work.going, initial=0.0))
        ends = [*work.cuts, len(work.going)]
        pieces.extend(sums[b] - sums[a] for a, b in pairwise(ends))
    return start + bound(pieces, workers)


class _Cutter:
    """Cuts the atoms of one run into pieces, each for one process."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.sums = list(accumulate(work.going, initial=0.0))
        self.start = work.startup.seconds
        self.shareable = min(work.facts.shareable * work.cost.speed.compute, self.start)
        self.total = len(work.going)
        self.ends = [*work.cuts, self.total]

    def cost(self, piece: Piece) -> float:
        """Return the seconds of a process that does the stretches of a piece."""
        spent, cold, sums = self.start, self.work.cold, self.sums
        for first, last in piece:
            if first < last:
                spent += cold[first] + sums[last] - sums[first + 1]
        return spent

    def cut(self, limit: float) -> list[Piece]:
        """Return pieces in a row, each as long as `limit` allows and at least one cut long."""
        cuts, cold, sums = self.ends, self.work.cold, self.sums
        found: list[Piece] = []
        at = 0
        while at < len(cuts) - 1:
            first = cuts[at]
            room = limit - self.start - cold[first] + sums[first + 1]
            reach = bisect_right(sums, room) - 1
            to = max(bisect_right(cuts, reach) - 1, at + 1)
            found.append(((first, cuts[to]),))
            at = to
        return found or [((0, 0),)]

    def even(self, count: int, limit: float) -> list[Piece]:
        """Return at most `count` pieces in a row, as even as possible."""
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

    def scatter(self, count: int) -> list[Piece]:
        """Return `count` pieces of stretches from all over the run, evener than in a row.

        A process jumps between its stretches by restoring, which is cheaper than another start.
        """
        shares = share_out(self.stretches(), count)
        return [_joined(sorted((a, b) for _, a, b in share)) for share in shares if share]

    def fill(self, limit: float) -> list[Piece]:
        """Return pieces of at most `limit` seconds, all but the last of them nearly full."""
        rooms: list[tuple[float, int]] = []
        shares: list[list[tuple[int, int]]] = []
        for seconds, first, last in self.stretches():
            at = bisect_left(rooms, (seconds, -1))
            room, number = rooms.pop(at) if at < len(rooms) else (limit - self.start, len(shares))
            if number == len(shares):
                shares.append([])
            shares[number].append((first, last))
            insort(rooms, (room - seconds, number))
        return [_joined(sorted(share)) for share in shares] or [((0, self.total),)]

    def stretches(self) -> list[Stretch]:
        """Return what lies between two cuts, each begun anew, the longest first."""
        cold, sums = self.work.cold, self.sums
        found = [(cold[a] + sums[b] - sums[a + 1], a, b) for a, b in pairwise(self.ends)]
        return sorted(found, reverse=True)


def _joined(stretches: list[tuple[int, int]]) -> Piece:
    found: list[tuple[int, int]] = []
    for first, last in stretches:
        if found and found[-1][1] == first:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return tuple(found)


@quietly()
def divide(
    survey: Survey,
    *,
    workers: int = 1,
    budget: float | None = None,
    growth: int = 1,
    rerun: bool = False,
) -> Plan:
    """Return the plan that ends first on `workers`, keeping to the order of priorities.

    Each run is cut only where a process can begin without repeating work; more and smaller
    segments balance better but each pays for its start, so several sizes are tried. With
    `budget`, only what ends within that many seconds is planned. With `growth`, there are
    segments for that many times the workers, so that some who come later find work, as far as
    that costs next to nothing. With `rerun`, a run that restoring would not answer noticeably sooner
    runs again from its start, in one process.
    """
    cutters = [_Cutter(work) for work in survey.work]
    best = _ordered(cutters, [[((0, cutter.total),)] for cutter in cutters])
    spent, total = _weigh(cutters, best, workers)
    for pieces in _ways(cutters, workers) if workers > 1 else ():
        tried = _ordered(cutters, pieces)
        took, computing = _weigh(cutters, tried, workers)
        if spent - took > _least_gain(computing - total, spent, workers):
            best, spent, total = tried, took, computing
    if len(best) < growth * workers:
        best = _finer(cutters, best, workers, growth * workers)
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
    price = WORTH * added / workers
    if added <= 0:
        return price
    return max(price, NOTICED, LEAST * spent)


def _worth_restoring(cutter: _Cutter, piece: Piece) -> bool:
    """Return True if a piece restores checkpoints and is noticeably sooner done than a rerun."""
    work = cutter.work
    saved = work.rerun - cutter.cost(piece)
    return saved >= max(NOTICED, RISK * work.rerun) or not work.iterations


def _rerun(cutter: _Cutter) -> Segment:
    """Return a segment that restores nothing and does all that one run has to do."""
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


def _ways(cutters: list[_Cutter], workers: int) -> Iterator[list[list[Piece]]]:
    """Yield ways to cut all runs, the fewest pieces first."""
    for share in PER_WORKER:
        limit = _limit(cutters, int(share * workers))
        if limit is None:
            continue
        both = [(cutter, len(cutter.cut(limit))) for cutter in cutters]
        yield [cutter.even(count, limit) for cutter, count in both]
        yield [cutter.scatter(count) if count > 1 else cutter.cut(limit) for cutter, count in both]
    if 0 < len(cutters) <= workers:
        yield _filled(cutters, workers)


def _filled(cutters: list[_Cutter], workers: int) -> list[list[Piece]]:
    """Return pieces that fill a worker each, and of each run a rest; several rests fill one."""
    high = sum(cutter.start + cutter.sums[-1] for cutter in cutters)
    low = high / workers
    found = [cutter.fill(high) for cutter in cutters]
    for _ in range(TRIES):
        middle = (low + high) / 2
        tried = [cutter.fill(middle) for cutter in cutters]
        if _weigh(cutters, _ordered(cutters, tried), workers)[0] <= middle:
            high, found = middle, tried
        else:
            low = middle
    return found


def _finer(
    cutters: list[_Cutter], best: list[tuple[int, Piece]], workers: int, most: int
) -> list[tuple[int, Piece]]:
    """Return more and smaller pieces, up to `most`, that cost next to nothing more."""
    spent, total = _weigh(cutters, best, workers)
    for count in range(most, len(best), -max(1, workers // 2)):
        limit = _limit(cutters, count)
        if limit is None:
            break
        pieces = [cutter.even(len(cutter.cut(limit)), limit) for cutter in cutters]
        tried = _ordered(cutters, pieces)
        if len(tried) <= len(best):
            break
        took, computing = _weigh(cutters, tried, workers)
        if took <= spent * (1 + SPARE) and computing <= total * (1 + SPARE):
            return tried
    return best


def _weigh(
    cutters: list[_Cutter], pieces: list[tuple[int, Piece]], workers: int
) -> tuple[float, float]:
    """Return (when the pieces are done, seconds of computing).

    Pieces of one run may wait for the same imports, which are computed once.
    """
    seconds = [cutters[i].cost(piece) for i, piece in pieces]
    shared = sum(
        (count - 1) * cutters[i].shareable for i, count in Counter(i for i, _ in pieces).items()
    )
    return schedule(seconds, workers).seconds, sum(seconds) - shared


def _ordered(cutters: list[_Cutter], pieces: list[list[Piece]]) -> list[tuple[int, Piece]]:
    # within a priority the longest first: the short ones fill the gaps at the end
    keyed = [
        (cutters[i].work.facts.priority, -cutters[i].cost(piece), i, piece)
        for i, own in enumerate(pieces)
        for piece in own
    ]
    return [(i, piece) for _, _, i, piece in sorted(keyed)]


def _limit(cutters: list[_Cutter], most: int) -> float | None:
    """Return the least length of pieces in a row that keeps their number at `most`."""
    if len(cutters) > most:
        return None
    low, high = 0.0, max((cutter.cost(((0, cutter.total),)) for cutter in cutters), default=0.0)
    for _ in range(30):
        middle = (low + high) / 2
        if sum(len(cutter.cut(middle)) for cutter in cutters) <= most:
            high = middle
        else:
            low = middle
    return high


def _segment(cutter: _Cutter, piece: Piece) -> Segment:
    work, loops = cutter.work, cutter.work.facts.loops
    operator = operator_of(work, *piece[0])
    seconds = cutter.cost(piece) - cutter.start
    own = Prediction(seconds, seconds * work.noise).times(1.0, share=work.cost.speed.share)
    guess = work.cost.corrected(work.startup + own, operator)
    wanted = [k for first, last in piece for k in work.iterations[first:last]]
    tail = work.tail and piece[-1][1] == cutter.total and bool(wanted)
    if tail:
        wanted.pop()
    gaps = bool(wanted) and wanted[-1] - wanted[0] + 1 != len(wanted)
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
        first=wanted[0] if wanted else (len(loops[0].seconds) if tail else 0),
        last=wanted[-1] + 1 if wanted else None,
        start=groups[0][0].id if groups and groups[0] else None,
        names=work.names,
        seconds=guess.seconds,
        low=guess.low,
        high=guess.high,
        only=tuple(wanted) if gaps else None,
        inner=_inner(work, wanted),
        restores=tuple([(c.point.steps[0].index, c.id) for c in restored]),
        tail=tail,
        priority=work.facts.priority,
        nbytes=sum([c.nbytes for c in restored]),
    )


def _inner(work: Work, iterations: Sequence[int]) -> tuple[tuple[str, int, int | None], ...]:
    """Return what is wanted of inner loops in some iterations of the outermost one."""
    if work.within is None or any(loop == work.within.loop for loop, _, _ in work.inner):
        return work.inner
    first, last = work.within.hull(iterations)
    if (first, last) == (0, None):
        return work.inner
    return (*work.inner, (work.within.loop, first, last))
