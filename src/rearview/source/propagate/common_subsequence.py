"""Align two sequences: pair equal items in order, items that occur once first.

The items are numbers for the statements of two texts; equal statements have the same number.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

MAX_TABLE = 250_000  # beyond this product of lengths only items that occur once are aligned


def align_items(
    firsts: Sequence[int], seconds: Sequence[int], weights: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return the pairs of positions that have the same items, in order.

    Items that occur once on both sides are paired first (patience); where these cross, the heavier run by
    `weights` of the first sequence wins. Between them, the longest common subsequence decides.

    >>> align_items([1, 2, 3, 2], [2, 3, 1, 2])
    [(1, 0), (2, 1), (3, 3)]
    """
    pairs: list[tuple[int, int]] = []
    work = [(0, len(firsts), 0, len(seconds))]
    while work:
        i, k, j, m = work.pop()
        while i < k and j < m and firsts[i] == seconds[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        while i < k and j < m and firsts[k - 1] == seconds[m - 1]:
            k, m = k - 1, m - 1
            pairs.append((k, m))
        if i == k or j == m:
            continue
        anchors = _unique(firsts, seconds, (i, k), (j, m), weights)
        if not anchors:
            if (k - i) * (m - j) <= MAX_TABLE:
                pairs.extend(_longest(firsts, seconds, (i, k), (j, m)))
            continue
        pairs.extend(anchors)
        edges = [(i - 1, j - 1), *anchors, (k, m)]
        work.extend((a + 1, b, c + 1, d) for (a, c), (b, d) in pairwise(edges))
    return sorted(pairs)


def _unique(
    firsts: Sequence[int],
    seconds: Sequence[int],
    here: tuple[int, int],
    there: tuple[int, int],
    weights: Sequence[int] | None,
) -> list[tuple[int, int]]:
    (i, k), (j, m) = here, there
    once, also = Counter(firsts[i:k]), Counter(seconds[j:m])
    place = {seconds[at]: at for at in range(j, m) if also[seconds[at]] == 1}
    pairs = [
        (at, place[firsts[at]])
        for at in range(i, k)
        if once[firsts[at]] == 1 and firsts[at] in place
    ]
    # find the heaviest run of pairs whose second positions rise; `ends` and `totals` both rise, because a
    # run that ends later than another one and is not heavier is never extended
    ends: list[int] = []
    totals: list[int] = []
    last: list[int] = []
    before = [-1] * len(pairs)
    for at, (first, second) in enumerate(pairs):
        slot = bisect_left(ends, second)
        before[at] = last[slot - 1] if slot else -1
        total = (totals[slot - 1] if slot else 0) + (weights[first] if weights else 1)
        stop = slot
        while stop < len(ends) and totals[stop] <= total:
            stop += 1
        ends[slot:stop] = [second]
        totals[slot:stop] = [total]
        last[slot:stop] = [at]
    chain: list[tuple[int, int]] = []
    at = last[-1] if last else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]


def _longest(
    firsts: Sequence[int], seconds: Sequence[int], here: tuple[int, int], there: tuple[int, int]
) -> list[tuple[int, int]]:
    (i, k), (j, m) = here, there
    width = m - j
    table = [[0] * (width + 1)]
    for at in range(k - 1, i - 1, -1):
        below = table[-1]
        row = [0] * (width + 1)
        item = firsts[at]
        for col in range(width - 1, -1, -1):
            if item == seconds[j + col]:
                row[col] = below[col + 1] + 1
            else:
                row[col] = max(row[col + 1], below[col])
        table.append(row)
    table.reverse()
    pairs: list[tuple[int, int]] = []
    at, col = 0, 0
    while at < k - i and col < width:
        if firsts[i + at] == seconds[j + col] and table[at][col] == table[at + 1][col + 1] + 1:
            pairs.append((i + at, j + col))
            at, col = at + 1, col + 1
        elif table[at + 1][col] >= table[at][col + 1]:
            at += 1
        else:
            col += 1
    return pairs
