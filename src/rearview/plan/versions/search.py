"""Best-first search over all legal replays of a tree: it returns the best steps, or a proven lower bound.

The steps of a replay consist of *paths*: restore a kept node (or start a process), compute downwards, checkpoint some
of the computed nodes. A node is *kept* if the state after it is checkpointed and not yet evicted. A path ends at a
leaf, or at an inner node that is checkpointed. The NP-hardness proof of CHEX needs paths that end at an inner node:
they checkpoint it, for later paths, while its parent still fits into the cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from rearview.plan.versions.tree import START, Levels, ReplayStep, StepBuilder, Tree, levels_of

KeptNodes = frozenset[tuple[int, int]]
"""(node, level) of each kept node."""
Situation = tuple[int, KeptNodes]
"""(leaves still to compute, as a number in which bit i is leaf i; the kept nodes)."""
Move = tuple[int, int, int]
"""A path: (its last node, node that it restores first, cache level of that node)."""


def search(
    tree: Tree,
    room: float | Levels,
    *,
    below: float = float("inf"),
    patience: int = 20_000,
    may_continue: Callable[[], bool] = lambda: True,
) -> tuple[list[ReplayStep] | None, float]:
    """Return (best steps, or None; lower bound in seconds for all legal replays of `tree`).

    The steps are None if no steps take less than `below` seconds, or if the search ended early: after `patience`
    situations, or when `may_continue` returned False. The A* search covers all legal replays, so the bound always
    holds.
    """
    return _Search(tree, levels_of(room), may_continue).run(below, patience)


def beam(
    tree: Tree,
    room: float | Levels,
    *,
    width: int | None = None,
    may_continue: Callable[[], bool] = lambda: True,
) -> list[ReplayStep] | None:
    """Return the steps of a beam search: each round computes one more leaf and keeps the `width` best situations.

    By default, `width` is smaller for trees with more leaves, so that the effort is about constant. Return None if
    `may_continue` returned False.
    """
    if width is None:
        width = max(3, min(40, 16_000 // max(1, len(tree.leaves)) ** 2))
    return _Search(tree, levels_of(room), may_continue).beam(width)


class _Search:
    def __init__(self, tree: Tree, levels: Levels, may_continue: Callable[[], bool]) -> None:
        self.may_continue = may_continue
        self.visited = 0
        """Number of calls of `_continues`; for each 64th call, it calls `may_continue`."""
        self.stopped = False
        self.tree = tree
        self.levels = levels
        self.leaves = tree.leaves
        self.leaf_set = frozenset(self.leaves)
        self.paths = {leaf: tree.path(START, leaf) for leaf in self.leaves}
        count = len(tree)
        # item i: indices of the cache levels into which the state after node i fits
        self.fits = [
            [i for i, level in enumerate(levels) if cell.size <= level.room] for cell in tree.cells
        ]
        loads = [tree.load(n, levels[i]) for n in range(count) for i in self.fits[n]]
        self.cheapest = min([tree.start, *loads])
        self.free_to_keep = len(levels) == 1 and not any(
            tree.save(n, levels[0]) for n in range(count)
        )
        self.free_to_load = not any(loads)
        self.worth_keeping = [self._is_worth_keeping(node) for node in range(count)]
        # under[n]: the leaves below node n (or n itself) as a number in which bit i is leaf i
        self.under = [0] * count
        for i, leaf in enumerate(self.leaves):
            for node in self.paths[leaf]:
                self.under[node] |= 1 << i
        self.bounds: dict[tuple[int, frozenset[int]], float] = {}

    def _is_worth_keeping(self, node: int) -> bool:
        """Return True if it can be useful to keep `node`; False if keeping its only child is never worse."""
        below, cell = self.tree.children[node], self.tree.cells[node]
        if not below or not self.fits[node]:
            return False
        if len(below) > 1:
            return True
        child = self.tree.cells[below[0]]
        if not self.tree.children[below[0]]:
            return False
        return child.size > cell.size or child.load > cell.load or child.save > cell.save

    def least(self, situation: Situation) -> float:
        """Return a lower bound in seconds for computing all remaining leaves of `situation`.

        Each cell that is still needed is computed at least once. If its state fits into no cache level, it is computed
        again for each computation of a child. Each leaf ends a path, and each path begins with a restore or a new
        process.
        """
        remaining, pairs = situation
        kept_nodes = frozenset(node for node, _ in pairs)
        total = self.bounds.get((remaining, kept_nodes))
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
            if not count or node in kept_nodes or not under[node] & remaining:
                continue
            total += count * tree.cells[node].seconds
            above = tree.parent[node]
            if above != START:
                times[above] = 1 if fits[above] else times[above] + count
        self.bounds[remaining, kept_nodes] = total
        return total

    def run(self, below: float, patience: int) -> tuple[list[ReplayStep] | None, float]:
        """Search and return (best steps, or None; lower bound in seconds), as the function `search` explains."""
        start: Situation = ((1 << len(self.leaves)) - 1, frozenset())
        spent = {start: 0.0}
        came_from: dict[Situation, tuple[Situation, Move]] = {}
        heap = [(self.least(start), 0, 0, start)]
        number = 0
        while heap:
            estimate, _, _, situation = heapq.heappop(heap)
            if estimate >= below - 1e-9:
                return None, below
            if estimate > spent[situation] + self.least(situation) + 1e-9:
                continue  # an outdated item: a cheaper way to `situation` was found later
            if not situation[0]:
                return self._steps(came_from, situation), estimate
            if number >= patience:
                return None, estimate
            number += 1
            for cost, move, next_situation in self._moves(*situation, inner=True):
                if not self._continues():
                    return None, estimate
                total = spent[situation] + cost
                if total < spent.get(next_situation, float("inf")) - 1e-12:
                    remaining_bound = self.least(next_situation)
                    if total + remaining_bound >= below - 1e-9:
                        continue
                    spent[next_situation] = total
                    came_from[next_situation] = (situation, move)
                    # of situations with equal estimates, the one with fewer remaining leaves comes first
                    heapq.heappush(
                        heap,
                        (
                            total + remaining_bound,
                            next_situation[0].bit_count(),
                            len(spent),
                            next_situation,
                        ),
                    )
            if self.stopped:
                return None, estimate
        return None, below

    def _continues(self) -> bool:
        self.visited += 1
        if not self.stopped and self.visited % 64 == 1:
            self.stopped = not self.may_continue()
        return not self.stopped

    def beam(self, width: int) -> list[ReplayStep] | None:
        """Return the steps of a beam search, or None if it was stopped, as the function `beam` explains."""
        start: Situation = ((1 << len(self.leaves)) - 1, frozenset())
        layer = {start: 0.0}
        came_from: dict[Situation, tuple[Situation, Move]] = {}
        while any(situation[0] for situation in layer):
            after: dict[Situation, float] = {}
            for situation, spent in layer.items():
                if not situation[0]:
                    after[situation] = min(spent, after.get(situation, spent))
                    continue
                for i, (cost, move, next_situation) in enumerate(
                    self._moves(*situation, inner=False)
                ):
                    if i > 500:
                        break  # too many next situations: a beam search may skip some
                    if spent + cost < after.get(next_situation, float("inf")):
                        after[next_situation] = spent + cost
                        came_from[next_situation] = (situation, move)
                if self.stopped or not self._continues():
                    return None
            ranked = sorted(after, key=lambda situation: after[situation] + self.least(situation))
            layer = {situation: after[situation] for situation in ranked[:width]}
        return self._steps(came_from, min(layer, key=layer.__getitem__))

    def _moves(
        self, remaining: int, kept_states: KeptNodes, *, inner: bool
    ) -> Iterator[tuple[float, Move, Situation]]:
        """Yield (seconds, move, next situation) for each path that may come next.

        `remaining` and `kept_states` are the present situation. With `inner`, paths that end at inner nodes are
        included.
        """
        tree = self.tree
        remaining_leaves = [leaf for i, leaf in enumerate(self.leaves) if remaining >> i & 1]
        kept_nodes = {node for node, _ in kept_states}
        if self.free_to_load:
            # a leaf whose parent is kept never gets cheaper: compute it at once
            ready = next(
                (leaf for leaf in remaining_leaves if tree.parent[leaf] in kept_nodes), None
            )
            if ready is not None:
                remaining_leaves, inner = [ready], False
        for leaf in remaining_leaves:
            after_leaf = remaining & ~self.under[leaf]
            yield from self._paths(leaf, after_leaf, kept_states, kept_nodes)
        if not inner:
            return
        for node in range(len(tree)):
            below = self.under[node] & remaining
            # if all remaining leaves are below `node`, a path that continues to a leaf is never worse
            if self.worth_keeping[node] and below and below != remaining and node not in kept_nodes:
                yield from self._paths(node, remaining, kept_states, kept_nodes)

    def _paths(
        self, end: int, remaining: int, kept_states: KeptNodes, kept_nodes: set[int]
    ) -> Iterator[tuple[float, Move, Situation]]:
        tree = self.tree
        leaf = end in self.leaf_set
        useful = [pair for pair in kept_states if self.under[pair[0]] & remaining]
        bases = [
            pair for pair in kept_states if self.under[pair[0]] & self.under[end] and pair[0] < end
        ]
        parent = tree.parent[end]
        if leaf and self.free_to_load and parent in kept_nodes:
            bases = [pair for pair in bases if pair[0] == parent][:1]
        else:
            bases.append((START, 0))
        for base, level in bases:
            path = tree.path(base, end)
            cost = tree.load(base, self.levels[level]) + tree.between(base, end)
            new_options = [
                (node, levels)
                for node in path
                if self.worth_keeping[node] and self.under[node] & remaining
                for levels in [[at for at in self.fits[node] if (node, at) not in kept_states]]
                if levels
            ]
            required = None if leaf else end
            for kept_after in self._kept_sets(useful, new_options, required):
                new = kept_after - kept_states
                if not leaf and base == START and len({node for node, _ in new}) < 2:
                    continue  # the node costs the same if it is computed later, on the way to a leaf
                saving = sum(tree.save(node, self.levels[at]) for node, at in new)
                yield cost + saving, (end, base, level), (remaining, kept_after)

    def _kept_sets(
        self,
        kept_states: list[tuple[int, int]],
        new_options: list[tuple[int, list[int]]],
        required: int | None,
    ) -> Iterator[KeptNodes]:
        """Yield the sets of (node, level) that may be kept after a path: subsets of `kept_states` and `new_options`.

        `new_options` are (node, levels into which it fits) of nodes on the path; `required` is a node that must be
        kept. If keeping is free, only sets with no room for another node are yielded.
        """
        sizes = self.tree.cells
        options = [
            *kept_states,
            *((node, level) for node, levels in new_options for level in levels),
        ]
        options.sort(key=lambda option: (option[0] != required, -sizes[option[0]].size))
        rooms = [level.room for level in self.levels]
        if self.free_to_keep and sum(sizes[n].size for n, _ in options) <= rooms[0]:
            yield frozenset(options)
            return
        selected: list[tuple[int, int]] = []
        bytes_from = [0.0]  # after `reverse`, item i: bytes of option i and all options after it
        for node, _ in reversed(options):
            bytes_from.append(bytes_from[-1] + sizes[node].size)
        bytes_from.reverse()

        def take(at: int, used: list[float], smallest: float) -> Iterator[KeptNodes]:
            if at == len(options):
                complete = required is None or any(node == required for node, _ in selected)
                if complete and (not self.free_to_keep or used[0] + smallest > rooms[0]):
                    yield frozenset(selected)
                return
            if not self._continues():
                return
            if self.free_to_keep and used[0] + bytes_from[at] <= rooms[0]:
                # all remaining options fit into the cache: keeping fewer nodes is never better
                complete_set = (*selected, *options[at:])
                complete = required is None or any(node == required for node, _ in complete_set)
                if complete and used[0] + bytes_from[at] + smallest > rooms[0]:
                    yield frozenset(complete_set)
                return
            node, level = options[at]
            size = sizes[node].size
            if used[level] + size <= rooms[level]:
                selected.append((node, level))
                used[level] += size
                yield from take(at + 1, used, smallest)
                used[level] -= size
                selected.pop()
            yield from take(at + 1, used, min(smallest, size))

        yield from take(0, [0.0] * len(rooms), float("inf"))

    def _steps(
        self, came_from: dict[Situation, tuple[Situation, Move]], situation: Situation
    ) -> list[ReplayStep]:
        chain: list[tuple[KeptNodes, Move, KeptNodes]] = []
        while situation in came_from:
            previous, move = came_from[situation]
            chain.append((previous[1], move, situation[1]))
            situation = previous
        steps = StepBuilder(self.tree)
        for kept_before, (end, base, level), kept_after in reversed(chain):
            steps.add_path(
                base,
                end,
                level=level,
                keep=sorted(kept_after - kept_before),
                drop=sorted(kept_before - kept_after),
            )
        return steps.steps
