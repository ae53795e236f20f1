"""Best-first search over every legal replay sequence: the optimum, or a proven lower bound.

A sequence falls into paths: restore a kept node (or start), compute downwards, checkpoint some of the
nodes passed. A path ends at a leaf, or at an inner node that is checkpointed there: such a path is what
the NP-hardness proof of CHEX needs (keep an inner node while its parent still fits, return later).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from rearview.plan.versions.tree import START, Levels, ReplayStep, StepBuilder, Tree, levels_of

Held = frozenset[tuple[int, int]]
"""(node, level) of everything kept."""
State = tuple[int, Held]
"""Leaves still to reach, as bits, and the kept nodes."""
Move = tuple[int, int, int]
"""Last node of the path, node it begins from, level of that node."""


def search(
    tree: Tree,
    room: float | Levels,
    *,
    below: float = float("inf"),
    patience: int = 20_000,
    going: Callable[[], bool] = lambda: True,
) -> tuple[list[ReplayStep] | None, float]:
    """Return (steps that take less than `below`, or None; a lower bound for all legal sequences).

    A* over (leaves still to reach, states kept). Its moves cover every legal sequence, so the lower
    bound holds for all of them, however early the search ends.
    """
    return _Search(tree, levels_of(room), going).run(below, patience)


def beam(
    tree: Tree,
    room: float | Levels,
    *,
    width: int | None = None,
    going: Callable[[], bool] = lambda: True,
) -> list[ReplayStep] | None:
    """Return good steps of any order, leaf by leaf, following the `width` most promising states.

    By default it is narrower for more leaves, so that the effort is about the same. Returns None if
    `going` ends it.
    """
    if width is None:
        width = max(3, min(40, 16_000 // max(1, len(tree.leaves)) ** 2))
    return _Search(tree, levels_of(room), going).beam(width)


class _Search:
    def __init__(self, tree: Tree, levels: Levels, going: Callable[[], bool]) -> None:
        self.going = going
        self.visited = 0
        """Choices looked at since the start, to ask `going` now and then."""
        self.stopped = False
        self.tree = tree
        self.levels = levels
        self.leaves = tree.leaves
        self.leaf_set = frozenset(self.leaves)
        self.paths = {leaf: tree.path(START, leaf) for leaf in self.leaves}
        count = len(tree)
        # per node: the levels it fits into at all
        self.fits = [
            [i for i, level in enumerate(levels) if cell.size <= level.room] for cell in tree.cells
        ]
        loads = [tree.load(n, levels[i]) for n in range(count) for i in self.fits[n]]
        self.cheapest = min([tree.start, *loads])
        self.free_to_keep = len(levels) == 1 and not any(
            tree.save(n, levels[0]) for n in range(count)
        )
        self.free_to_load = not any(loads)
        self.worthy = [self._worthy(node) for node in range(count)]
        # bit i is leaf i; under[n]: the leaves below node n
        self.under = [0] * count
        for i, leaf in enumerate(self.leaves):
            for node in self.paths[leaf]:
                self.under[node] |= 1 << i
        self.bounds: dict[tuple[int, frozenset[int]], float] = {}

    def _worthy(self, node: int) -> bool:
        """Return True if keeping a node can be better than computing and keeping its only child."""
        below, cell = self.tree.children[node], self.tree.cells[node]
        if not below or not self.fits[node]:
            return False
        if len(below) > 1:
            return True
        child = self.tree.cells[below[0]]
        if not self.tree.children[below[0]]:
            return False
        return child.size > cell.size or child.load > cell.load or child.save > cell.save

    def least(self, state: State) -> float:
        """Return a lower bound, in seconds, for the rest of any legal sequence.

        Each cell still needed is computed once; one that fits nowhere, once for every time that a
        cell after it is computed. Every leaf ends a path, and every path begins with a load.
        """
        remaining, pairs = state
        held = frozenset(node for node, _ in pairs)
        total = self.bounds.get((remaining, held))
        if total is not None:
            return total
        tree, under, fits = self.tree, self.under, self.fits
        total = remaining.bit_count() * self.cheapest
        times = [0] * len(tree)
        for i, leaf in enumerate(self.leaves):
            if remaining >> i & 1:
                times[leaf] = 1
        for node in range(len(tree) - 1, -1, -1):
            count = times[node]
            if not count or node in held or not under[node] & remaining:
                continue
            total += count * tree.cells[node].seconds
            above = tree.parent[node]
            if above != START:
                times[above] = 1 if fits[above] else times[above] + count
        self.bounds[remaining, held] = total
        return total

    def run(self, below: float, patience: int) -> tuple[list[ReplayStep] | None, float]:
        """Search until the optimum is proved, or until patience ends."""
        start: State = ((1 << len(self.leaves)) - 1, frozenset())
        spent = {start: 0.0}
        came_from: dict[State, tuple[State, Move]] = {}
        heap = [(self.least(start), 0, 0, start)]
        number = 0
        while heap:
            estimate, _, _, state = heapq.heappop(heap)
            if estimate >= below - 1e-9:
                return None, below
            if estimate > spent[state] + self.least(state) + 1e-9:
                continue  # a cheaper way to this state was found later
            if not state[0]:
                return self._steps(came_from, state), estimate
            if number >= patience:
                return None, estimate
            number += 1
            for cost, move, then in self._moves(*state, inner=True):
                if not self._goes_on():
                    return None, estimate
                total = spent[state] + cost
                if total < spent.get(then, float("inf")) - 1e-12:
                    rest = self.least(then)
                    if total + rest >= below - 1e-9:
                        continue
                    spent[then] = total
                    came_from[then] = (state, move)
                    # of equal estimates, take the state with fewer leaves left
                    heapq.heappush(heap, (total + rest, then[0].bit_count(), len(spent), then))
            if self.stopped:
                return None, estimate
        return None, below

    def _goes_on(self) -> bool:
        self.visited += 1
        if not self.stopped and self.visited % 64 == 1:
            self.stopped = not self.going()
        return not self.stopped

    def beam(self, width: int) -> list[ReplayStep] | None:
        """Go from leaf to leaf with the most promising states only."""
        start: State = ((1 << len(self.leaves)) - 1, frozenset())
        layer = {start: 0.0}
        came_from: dict[State, tuple[State, Move]] = {}
        while any(state[0] for state in layer):
            after: dict[State, float] = {}
            for state, spent in layer.items():
                if not state[0]:
                    after[state] = min(spent, after.get(state, spent))
                    continue
                for i, (cost, move, then) in enumerate(self._moves(*state, inner=False)):
                    if i > 500:
                        break  # too many ways to keep: a beam may leave some out
                    if spent + cost < after.get(then, float("inf")):
                        after[then] = spent + cost
                        came_from[then] = (state, move)
                if self.stopped or not self._goes_on():
                    return None
            ranked = sorted(after, key=lambda state: after[state] + self.least(state))
            layer = {state: after[state] for state in ranked[:width]}
        return self._steps(came_from, min(layer, key=layer.__getitem__))

    def _moves(
        self, remaining: int, held: Held, *, inner: bool
    ) -> Iterator[tuple[float, Move, State]]:
        """Yield (seconds, move, state after it); `inner` adds the paths that end at inner nodes."""
        tree = self.tree
        remaining_leaves = [leaf for i, leaf in enumerate(self.leaves) if remaining >> i & 1]
        held_nodes = {node for node, _ in held}
        if self.free_to_load:
            # a leaf right after a kept state never gets cheaper: compute it at once
            ready = next(
                (leaf for leaf in remaining_leaves if tree.parent[leaf] in held_nodes), None
            )
            if ready is not None:
                remaining_leaves, inner = [ready], False
        for leaf in remaining_leaves:
            after_leaf = remaining & ~self.under[leaf]
            yield from self._paths(leaf, after_leaf, held, held_nodes)
        if not inner:
            return
        for node in range(len(tree)):
            below = self.under[node] & remaining
            # if all remaining leaves are below the node, the path can continue to them at no cost
            if self.worthy[node] and below and below != remaining and node not in held_nodes:
                yield from self._paths(node, remaining, held, held_nodes)

    def _paths(
        self, end: int, remaining: int, held: Held, held_nodes: set[int]
    ) -> Iterator[tuple[float, Move, State]]:
        tree = self.tree
        leaf = end in self.leaf_set
        useful = [pair for pair in held if self.under[pair[0]] & remaining]
        bases = [pair for pair in held if self.under[pair[0]] & self.under[end] and pair[0] < end]
        parent = tree.parent[end]
        if leaf and self.free_to_load and parent in held_nodes:
            bases = [pair for pair in bases if pair[0] == parent][:1]
        else:
            bases.append((START, 0))
        for base, level in bases:
            path = tree.path(base, end)
            cost = tree.load(base, self.levels[level]) + tree.between(base, end)
            fresh = [
                (node, levels)
                for node in path
                if self.worthy[node] and self.under[node] & remaining
                for levels in [[at for at in self.fits[node] if (node, at) not in held]]
                if levels
            ]
            must = None if leaf else end
            for kept in self._keepings(useful, fresh, must):
                new = kept - held
                if not leaf and base == START and len({node for node, _ in new}) < 2:
                    continue  # computing it later, when it is needed, costs the same
                saving = sum(tree.save(node, self.levels[at]) for node, at in new)
                yield cost + saving, (end, base, level), (remaining, kept)

    def _keepings(
        self, held: list[tuple[int, int]], fresh: list[tuple[int, list[int]]], must: int | None
    ) -> Iterator[Held]:
        """Yield the sets that may be kept after a path; if keeping is free, only the largest ones."""
        sizes = self.tree.cells
        options = [*held, *((node, level) for node, levels in fresh for level in levels)]
        options.sort(key=lambda option: (option[0] != must, -sizes[option[0]].size))
        rooms = [level.room for level in self.levels]
        if self.free_to_keep and sum(sizes[n].size for n, _ in options) <= rooms[0]:
            yield frozenset(options)
            return
        chosen: list[tuple[int, int]] = []
        bytes_from = [0.0]  # bytes of each option and all options after it
        for node, _ in reversed(options):
            bytes_from.append(bytes_from[-1] + sizes[node].size)
        bytes_from.reverse()

        def take(at: int, used: list[float], smallest: float) -> Iterator[Held]:
            if at == len(options):
                complete = must is None or any(node == must for node, _ in chosen)
                if complete and (not self.free_to_keep or used[0] + smallest > rooms[0]):
                    yield frozenset(chosen)
                return
            if not self._goes_on():
                return
            if self.free_to_keep and used[0] + bytes_from[at] <= rooms[0]:
                # all remaining options fit: leaving one out is never better
                kept = (*chosen, *options[at:])
                complete = must is None or any(node == must for node, _ in kept)
                if complete and used[0] + bytes_from[at] + smallest > rooms[0]:
                    yield frozenset(kept)
                return
            node, level = options[at]
            size = sizes[node].size
            if used[level] + size <= rooms[level]:
                chosen.append((node, level))
                used[level] += size
                yield from take(at + 1, used, smallest)
                used[level] -= size
                chosen.pop()
            yield from take(at + 1, used, min(smallest, size))

        yield from take(0, [0.0] * len(rooms), float("inf"))

    def _steps(self, came_from: dict[State, tuple[State, Move]], state: State) -> list[ReplayStep]:
        chain: list[tuple[Held, Move, Held]] = []
        while state in came_from:
            before, move = came_from[state]
            chain.append((before[1], move, state[1]))
            state = before
        steps = StepBuilder(self.tree)
        for held, (end, base, level), kept in reversed(chain):
            steps.run(base, end, level=level, keep=sorted(kept - held), drop=sorted(held - kept))
        return steps.steps
