"""Pieces of known length on workers: when they end, what cannot be beaten, even shares."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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
