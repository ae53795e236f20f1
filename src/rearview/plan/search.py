"""Best-first search over every order of versions and every way to keep states."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from rearview.plan.tree import START, Do, Step, Tree

State = tuple[int, frozenset[int]]
"""Leaves still to reach, as bits, and nodes kept."""
Move = tuple[int, int]
"""Leaf to reach, and node to begin from."""


def search(
    tree: Tree,
    room: float,
    *,
    below: float = float("inf"),
    patience: int = 20_000,
    going: Callable[[], bool] = lambda: True,
) -> tuple[list[Step] | None, float]:
    """Return (steps that take less than `below`, or None; what no order can beat).

    A* over (leaves still to reach, states kept): any order of leaves, any keeping.
    """
    return _Search(tree, room).run(below, patience, going)


def beam(tree: Tree, room: float, *, width: int | None = None) -> list[Step]:
    """Return good steps of any order, leaf by leaf: only the `width` most promising go on.

    By default it is narrower the more leaves there are, so that the effort stays about the same.
    """
    if width is None:
        width = max(3, min(40, 16_000 // max(1, len(tree.leaves)) ** 2))
    return _Search(tree, room).beam(width)


class _Search:
    def __init__(self, tree: Tree, room: float) -> None:
        self.tree = tree
        self.room = room
        self.leaves = tree.leaves
        self.paths = {leaf: tree.path(START, leaf) for leaf in self.leaves}
        loads = [cell.load for cell in tree.cells]
        self.cheapest = min([tree.start, *loads])
        self.free_to_keep = all(cell.save == 0 for cell in tree.cells)
        self.free_to_load = not any(loads)
        self.fits = [cell.size <= room for cell in tree.cells]
        self.worthy = [self._worthy(node) for node in range(len(tree))]
        # bit i stands for leaf i; under[n]: the leaves below node n
        self.under = [0] * len(tree)
        for i, leaf in enumerate(self.leaves):
            for node in self.paths[leaf]:
                self.under[node] |= 1 << i
        self.known: dict[State, float] = {}

    def _worthy(self, node: int) -> bool:
        """Return True if keeping a node can be better than keeping its only child."""
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
        """Return what the rest takes at least.

        Each cell still needed is computed once; one that is too large to be kept, once for every
        time that a cell after it is.
        """
        found = self.known.get(state)
        if found is not None:
            return found
        remaining, held = state
        tree, under, fits = self.tree, self.under, self.fits
        total = remaining.bit_count() * self.cheapest
        times: dict[int, int] = {}
        bit = 1 << len(self.leaves)
        for leaf in reversed(self.leaves):
            bit >>= 1
            if remaining & bit:
                times[leaf] = 1
        for node in range(len(tree) - 1, -1, -1):
            if not under[node] & remaining or node in held:
                continue
            count = times.get(node, 0)
            if not count:
                continue
            total += count * tree.cells[node].seconds
            above = tree.parent[node]
            if above != START:
                times[above] = 1 if fits[above] else times.get(above, 0) + count
        self.known[state] = total
        return total

    def run(
        self, below: float, patience: int, going: Callable[[], bool]
    ) -> tuple[list[Step] | None, float]:
        """Search until all is proved, or patience ends."""
        start: State = ((1 << len(self.leaves)) - 1, frozenset())
        spent = {start: 0.0}
        came: dict[State, tuple[State, Move]] = {}
        heap = [(self.least(start), 0, start)]
        number = 0
        while heap:
            estimate, _, state = heapq.heappop(heap)
            if estimate >= below - 1e-9:
                return None, below
            if estimate > spent[state] + self.least(state) + 1e-9:
                continue  # reached more cheaply since
            if not state[0]:
                return self._steps(came, state), estimate
            if number >= patience or not going():
                return None, estimate
            number += 1
            for cost, move, then in self._moves(*state):
                total = spent[state] + cost
                if total < spent.get(then, float("inf")) - 1e-12:
                    rest = self.least(then)
                    if total + rest >= below - 1e-9:
                        continue
                    spent[then] = total
                    came[then] = (state, move)
                    # of equal ones the deepest first: it ends sooner
                    heapq.heappush(heap, (total + rest, then[0].bit_count(), then))
        return None, below

    def beam(self, width: int) -> list[Step]:
        """Go from leaf to leaf with the most promising situations only."""
        start: State = ((1 << len(self.leaves)) - 1, frozenset())
        layer = {start: 0.0}
        came: dict[State, tuple[State, Move]] = {}
        for _ in self.leaves:
            after: dict[State, float] = {}
            for state, spent in layer.items():
                for cost, move, then in self._moves(*state):
                    if spent + cost < after.get(then, float("inf")):
                        after[then] = spent + cost
                        came[then] = (state, move)
            ranked = sorted(after, key=lambda state: after[state] + self.least(state))
            layer = {state: after[state] for state in ranked[:width]}
        return self._steps(came, min(layer, key=layer.__getitem__))

    def _moves(self, remaining: int, held: frozenset[int]) -> Iterator[tuple[float, Move, State]]:
        tree = self.tree
        left = [leaf for i, leaf in enumerate(self.leaves) if remaining >> i & 1]
        if self.free_to_load:
            # a leaf right after a kept state can never be had for less: take it at once
            left = next(([leaf] for leaf in left if tree.parent[leaf] in held), left)
        for leaf in left:
            rest = remaining & ~self.under[leaf]
            useful = [node for node in held if self.under[node] & rest]
            taken = self.free_to_load and tree.parent[leaf] in held
            bases = [node for node in self.paths[leaf] if node in held]
            for near in [tree.parent[leaf]] if taken else (START, *bases):
                cost = tree.load(near) + tree.between(near, leaf)
                fresh = [
                    node
                    for node in tree.path(near, leaf)
                    if self.worthy[node] and self.under[node] & rest and node not in held
                ]
                for kept in self._keepings(useful, fresh):
                    saving = sum(tree.cells[node].save for node in kept if node not in held)
                    yield cost + saving, (leaf, near), (rest, kept)

    def _keepings(self, held: list[int], fresh: list[int]) -> Iterator[frozenset[int]]:
        """Yield what may be kept after a leaf; if keeping is free, only what cannot be added to."""
        nodes = sorted((*held, *fresh), key=lambda node: -self.tree.cells[node].size)
        sizes = [self.tree.cells[node].size for node in nodes]
        if self.free_to_keep and sum(sizes) <= self.room:
            yield frozenset(nodes)
            return
        chosen: list[int] = []

        def take(at: int, used: float, smallest: float) -> Iterator[frozenset[int]]:
            if at == len(nodes):
                if not self.free_to_keep or used + smallest > self.room:
                    yield frozenset(chosen)
                return
            if used + sizes[at] <= self.room:
                chosen.append(nodes[at])
                yield from take(at + 1, used + sizes[at], smallest)
                chosen.pop()
            yield from take(at + 1, used, min(smallest, sizes[at]))

        yield from take(0, 0.0, float("inf"))

    def _steps(self, came: dict[State, tuple[State, Move]], state: State) -> list[Step]:
        chain: list[tuple[frozenset[int], Move, frozenset[int]]] = []
        while state in came:
            before, move = came[state]
            chain.append((before[1], move, state[1]))
            state = before
        steps: list[Step] = []
        for held, (leaf, near), kept in reversed(chain):
            steps.append((Do.GO_BACK, near))
            steps.extend((Do.DROP, node) for node in sorted(held - kept))
            for node in self.tree.path(near, leaf):
                steps.append((Do.COMPUTE, node))
                if node in kept and node not in held:
                    steps.append((Do.KEEP, node))
        return steps
