"""Which checkpoints to give up when space is short: those whose loss makes replay dearest last.

A question about the past falls on some iteration of the run; the replay computes from the nearest
checkpoint before it. With questions equally likely anywhere, a gap of g seconds between two
checkpoints costs g/2 on average and is hit with probability proportional to g, so the expected
replay cost grows with the sum of g². Taking out the checkpoint between gaps a and b adds 2ab:
per byte that it frees, the one with the least is taken first. That is exact for each single
removal and needs no guess about which run will be asked about.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """A checkpoint as the plan sees it."""

    id: str
    run: str
    at: float
    """Computing seconds into its run, or its number where seconds are not known."""
    frees: int
    """Bytes that only this checkpoint uses, about."""
    promised: bool = False
    """Never to be given up."""


def thin(held: Iterable[Held], *, excess: int) -> list[str]:
    """Return the ids to give up, in order, so that at least `excess` bytes are freed.

    The last checkpoint of a run, which it would resume from, and promised ones stay. Fewer bytes
    are freed when there is nothing else to give up.

    >>> four = [Held(str(i), "r", float(t), 10) for i, t in enumerate((10, 20, 21, 40))]
    >>> thin(four, excess=10)
    ['1']
    >>> thin(four, excess=1000)
    ['1', '0', '2']
    """
    runs: dict[str, list[Held]] = {}
    for each in held:
        runs.setdefault(each.run, []).append(each)
    chains = [_Chain(sorted(run, key=lambda each: each.at)) for run in runs.values()]
    queue: list[tuple[float, int, int, int]] = []
    for number, chain in enumerate(chains):
        for index in range(len(chain.held)):
            chain.offer(queue, number, index)
    gone: list[str] = []
    while excess > 0 and queue:
        _, number, index, age = heapq.heappop(queue)
        chain = chains[number]
        if age != chain.ages[index]:
            continue  # its neighbours have changed since; a newer entry stands in the queue
        each = chain.held[index]
        gone.append(each.id)
        excess -= each.frees
        for neighbour in chain.remove(index):
            chain.offer(queue, number, neighbour)
    return gone


class _Chain:
    """The checkpoints of one run as a linked list; the run's start is a place to begin, too."""

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = held
        self.before = [index - 1 for index in range(len(held))]
        self.after = [index + 1 for index in range(len(held))]
        self.ages = [0] * len(held)

    def offer(self, queue: list[tuple[float, int, int, int]], number: int, index: int) -> None:
        """Put `index` into the queue with the cost of its loss per byte, if it may go at all."""
        if self.held[index].promised or self.after[index] >= len(self.held):
            return
        before = self.held[self.before[index]].at if self.before[index] >= 0 else 0.0
        at, after = self.held[index].at, self.held[self.after[index]].at
        loss = 2 * max(at - before, 0.0) * max(after - at, 0.0)
        per_byte = loss / max(self.held[index].frees, 1)
        heapq.heappush(queue, (per_byte, number, index, self.ages[index]))

    def remove(self, index: int) -> list[int]:
        """Take `index` out and return the neighbours, whose loss is now greater."""
        before, after = self.before[index], self.after[index]
        self.ages[index] = -1
        if before >= 0:
            self.after[before] = after
        self.before[after] = before
        changed = [each for each in (before, after) if 0 <= each < len(self.held)]
        for each in changed:
            self.ages[each] += 1
        return changed


def expected(times: Sequence[float], end: float) -> float:
    """Return the mean computing seconds from the nearest checkpoint to a random moment of a run.

    >>> expected([], 10.0), expected([5.0], 10.0)
    (5.0, 2.5)
    """
    marks = [0.0, *sorted(times), end]
    return sum((b - a) ** 2 for a, b in itertools.pairwise(marks)) / (2 * end)
