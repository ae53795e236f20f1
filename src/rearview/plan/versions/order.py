"""The order in which versions are replayed as one tree, within bounds on the size of kept checkpoints.

`auto` is never worse than the published planners: all of them are tried. A dynamic program covers every
depth-first order that keeps ancestors only. A beam search finds other orders, in large trees block by block.
A best-first search over all legal sequences improves on the best of them until its time is up; the lower
bound that it has proved by then gives the gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rearview.errors import PlanError
from rearview.plan.versions.chex_planners import (
    Choice,
    Kept,
    lfu,
    parent_choice,
    prp,
    sequential,
    walk,
)
from rearview.plan.versions.search import beam, search
from rearview.plan.versions.tree import (
    EXISTING,
    START,
    CacheLevel,
    Do,
    Levels,
    ReplayStep,
    StepBuilder,
    Tree,
    check,
    levels_of,
)

BLOCK = 12
"""In large trees, orders that are not depth-first are tried within subtrees of up to this many leaves."""
WIDEST = 60
"""In trees of up to this many leaves, a beam search tries orders that are not depth-first."""
GRIDS = (64, 20, 10, 5)
"""Numbers of steps into which the dynamic program divides the room, from fine to coarse."""
STATES = 150_000
"""Most situations that the dynamic program examines before it uses coarser steps."""
PLANNERS = ("auto", "prp1", "prp2", "pc", "lfu", "none")


@dataclass(frozen=True, slots=True)
class Order:
    """Steps that replay every version, their cost, and the proved bound of the best cost."""

    steps: tuple[ReplayStep, ...]
    seconds: float
    """Wall seconds on the workers it was planned for."""
    bound: float
    """Seconds below which no order can be."""
    by: str
    """The planner that found it."""
    tried: Mapping[str, float] = field(default_factory=dict)
    """Planner -> seconds."""
    workers: int = 1

    @property
    def gap(self) -> float:
        """Largest fraction of the cost that a better order could save."""
        return 0.0 if self.seconds <= 0 else max(0.0, 1.0 - self.bound / self.seconds)


def order(
    tree: Tree,
    room: float | Levels,
    *,
    planner: str = "auto",
    workers: int = 1,
    patience: int = 20_000,
    going: Callable[[], bool] = lambda: True,
) -> Order:
    """Return the best order found for replaying a tree with these levels for checkpoints.

    The search ends after `patience` situations, or when `going` returns False. Existing checkpoints
    cut the tree: the nodes below one are replayed from it.
    """
    if planner not in PLANNERS:
        raise PlanError(
            f"There is no planner {planner!r}. Choose one of {', '.join(PLANNERS)}.",
            slug="planner",
        )
    levels = levels_of(room)
    candidates: dict[str, list[ReplayStep]] = {}
    bound = 0.0
    per_part: list[tuple[int, list[int], dict[str, list[ReplayStep]], float]] = []
    for base, nodes, part in tree.parts():
        if planner == "auto":
            sequences, least = _auto(part, levels, patience, going)
            if base != START:
                # computing past a slow checkpoint could be cheaper, so the bound must be lower
                least -= max(0.0, part.start - tree.cells[base].seconds) * len(part.leaves)
        else:
            sequences, least = {planner: _published(part, levels, planner)}, _least(part)
        bound += max(0.0, least)
        per_part.append((base, nodes, sequences, least))
    names = list(dict.fromkeys(name for _, _, sequences, _ in per_part for name in sequences))
    for name in names:
        if all(name in sequences for _, _, sequences, _ in per_part):
            candidates[name] = [
                _renamed(step, base, nodes)
                for base, nodes, sequences, _ in per_part
                for step in _emptied(sequences[name])
            ]
    tried = {
        name: schedule(tree, steps, levels, workers) if workers > 1 else check(tree, steps, levels)
        for name, steps in candidates.items()
    }
    if not tried:
        return Order((), 0.0, 0.0, planner, {}, workers)
    by = _best(tree, candidates, tried, levels, workers)
    bound = max(bound / workers, _longest(tree)) if workers > 1 else bound
    return Order(
        tuple(candidates[by]),
        tried[by],
        min(bound, tried[by]),
        by,
        dict(sorted(tried.items())),
        workers,
    )


def _best(
    tree: Tree,
    candidates: Mapping[str, list[ReplayStep]],
    tried: Mapping[str, float],
    levels: Levels,
    workers: int,
) -> str:
    """Return the planner whose order is used.

    On several workers an order may take up to 1 % longer if it computes less in all: workers share
    the machine, so computing a cell twice is never quite free.
    """

    def rank(name: str) -> tuple[float, bool]:
        return tried[name], name not in {"search", "dynamic program"}

    if workers == 1:
        return min(tried, key=rank)
    least = min(tried.values()) * 1.01
    close = [name for name in tried if tried[name] <= least]
    return min(close, key=lambda name: (check(tree, candidates[name], levels), *rank(name)))


def _renamed(step: ReplayStep, base: int, nodes: list[int]) -> ReplayStep:
    """Return a step of a part with the node numbers of the whole tree."""
    if step.node == START:
        level = EXISTING if base != START else step.level
        return step._replace(node=base, child=nodes[step.child], level=level)
    child = nodes[step.child] if step.do is Do.RESTORE else START
    return step._replace(node=nodes[step.node], child=child)


def _emptied(steps: list[ReplayStep]) -> list[ReplayStep]:
    """Return the steps with evictions at the end, so that the next part finds all the room."""
    held: dict[tuple[int, int], None] = {}
    for step in steps:
        if step.do is Do.CHECKPOINT:
            held[step.node, step.level] = None
        elif step.do is Do.EVICT:
            del held[step.node, step.level]
    return steps + [ReplayStep(Do.EVICT, node, level=level) for node, level in held]


def _least(tree: Tree) -> float:
    """Return a lower bound in seconds for every order: each cell once, a start or load for each leaf."""
    return search(tree, max((cell.size for cell in tree.cells), default=0), patience=0)[1]


def _longest(tree: Tree) -> float:
    """Return the seconds of the longest path that has to be computed in sequence."""
    return max(
        (part.start + reach for _, _, part in tree.parts() for reach in part.reach), default=0.0
    )


def _published(tree: Tree, levels: Sequence[CacheLevel], planner: str) -> list[ReplayStep]:
    if planner == "none" or all(level.room <= 0 for level in levels):
        return sequential(tree)
    level = next(i for i, level in enumerate(levels) if level.room > 0)
    if planner == "pc":
        return parent_choice(tree, levels, level=level)
    if planner == "lfu":
        return lfu(tree, levels, level=level)
    return prp(tree, levels, per_byte=planner == "prp2", level=level)


def _auto(
    tree: Tree, levels: Sequence[CacheLevel], patience: int, going: Callable[[], bool]
) -> tuple[dict[str, list[ReplayStep]], float]:
    """Return the steps of every planner for a tree without existing checkpoints, and the bound."""
    sequences: dict[str, list[ReplayStep]] = {"none": sequential(tree)}
    for i, level in enumerate(levels):
        if level.room <= 0:
            continue
        suffix = "" if i == 0 else f" ({level.name})"
        sequences[f"PRP-v1{suffix}"] = prp(tree, levels, level=i)
        sequences[f"PRP-v2{suffix}"] = prp(tree, levels, per_byte=True, level=i)
        sequences[f"LFU{suffix}"] = lfu(tree, levels, level=i)
        with suppress(PlanError):  # the tree is too high: the dynamic program finds the same orders
            sequences[f"PC{suffix}"] = parent_choice(tree, levels, level=i)
    choose = depth_first_choice(tree, levels)
    sequences["dynamic program"] = walk(tree, choose)
    if len(tree.leaves) > BLOCK:
        sequences["blocks"] = by_blocks(tree, levels, choose, going=going)
    if len(tree.leaves) > WIDEST and going():
        wide = by_blocks(tree, levels, choose, most=2 * BLOCK, width=4, going=going)
        sequences["wide blocks"] = wide
    if len(tree.leaves) <= WIDEST:
        steps = beam(tree, levels, going=going)
        if steps is not None:
            sequences["beam"] = steps
    costs = {name: check(tree, steps, levels) for name, steps in sequences.items()}
    by = min(costs, key=lambda name: (costs[name], name != "dynamic program"))
    if len(tree.leaves) > 2 * WIDEST:
        patience = 0  # a search would find no better order, and the bound needs no search
    better, bound = search(tree, levels, below=costs[by], patience=patience, going=going)
    sequences["search"] = better if better is not None else sequences[by]
    return sequences, bound


def dynamic(tree: Tree, room: float | Levels, *, states: int = STATES) -> list[ReplayStep]:
    """Return the best depth-first steps that keep ancestors only."""
    return walk(tree, depth_first_choice(tree, room, states=states))


def depth_first_choice(tree: Tree, room: float | Levels, *, states: int = STATES) -> Choice:
    """Return which nodes the best depth-first order keeps, if it keeps ancestors only.

    The best way to replay what is below a node depends on two things: the nearest kept state above it
    and the room left. So there are nodes x height x sizes situations, not 2^height sets.
    """
    levels = levels_of(room)
    sizes = [tuple(float(cell.size) for _ in levels) for cell in tree.cells]
    left = tuple(level.room for level in levels)
    reached = _situations(tree, sizes, left, states)
    for grid in GRIDS:
        if reached is not None:
            break
        # sizes are rounded up to a grid: fewer situations, and kept states always fit
        sizes = [
            tuple(float(-(-cell.size * grid // max(level.room, 1))) for level in levels)
            for cell in tree.cells
        ]
        left = tuple(float(grid) if level.room > 0 else 0.0 for level in levels)
        reached = _situations(tree, sizes, left, states)
    if reached is None:
        return lambda *_: ((), 0)
    costs: dict[tuple[int, int, int, tuple[float, ...]], float] = {}
    choices: dict[tuple[int, int, int, tuple[float, ...]], tuple[tuple[int, ...], int]] = {}
    for node in range(len(tree) - 1, -1, -1):
        below = tree.children[node]
        for near, near_level, free in reached[node]:
            key = (node, near, near_level, free)
            once = tree.load(near, levels[near_level]) + tree.between(near, node)
            if not below:
                costs[key] = once
                continue
            without = [costs[child, near, near_level, free] for child in below]
            costs[key], choices[key] = sum(without), ((), 0)
            for at, level in enumerate(levels):
                if free[at] < sizes[node][at]:
                    continue
                rest = _less(free, at, sizes[node][at])
                with_ = [costs[child, node, at, rest] for child in below]
                kept = once + tree.save(node, level) - tree.load(node, level)
                kept += sum(map(min, zip(with_, without, strict=True)))
                chosen = tuple(c for c, a, b in zip(below, with_, without, strict=True) if a < b)
                if chosen and kept < costs[key]:
                    costs[key], choices[key] = kept, (chosen, at)

    def choose(node: int, kept: Kept) -> tuple[tuple[int, ...], int]:
        free = left
        for ancestor, at in kept:
            free = _less(free, at, sizes[ancestor][at])
        near, near_level = kept[-1] if kept else (START, 0)
        return choices.get((node, near, near_level, free), ((), 0))

    return choose


def by_blocks(
    tree: Tree,
    room: float | Levels,
    choose: Choice,
    *,
    most: int = BLOCK,
    width: int = 10,
    going: Callable[[], bool] = lambda: True,
) -> list[ReplayStep]:
    """Return depth-first steps in which subtrees of at most `most` leaves are replayed in any order.

    Within such a block a beam looks for orders that go back and forth between branches; it has the room
    that the nodes kept above leave. The best depth-first order of the block is the fallback, so the
    result is never worse than that of `choose` alone.
    """
    levels = levels_of(room)
    leaves = [0 if below else 1 for below in tree.children]
    below_of: list[list[int]] = [[node] for node in range(len(tree))]
    for node in range(len(tree) - 1, -1, -1):
        above = tree.parent[node]
        if above != START:
            leaves[above] += leaves[node]
            if leaves[above] <= most:
                below_of[above] += below_of[node]
    steps = StepBuilder(tree)
    stack: list[tuple[int, Kept] | None] = [(root, ()) for root in reversed(tree.roots)]
    evict: list[tuple[int, int]] = []
    held: list[tuple[int, int]] = []
    while stack:
        item = stack.pop()
        if item is None:
            evict.append(held.pop())
            continue
        node, kept = item
        near = kept[-1] if kept else (START, 0)
        if leaves[node] <= most:
            steps.steps += [ReplayStep(Do.EVICT, n, level=at) for n, at in evict]
            evict = []
            chain = tree.path(near[0], node)
            nodes = [*chain[:-1], *sorted(below_of[node])]
            steps.steps += _block(tree, levels, kept, nodes, width, going)
            continue
        chosen, level = choose(node, kept)
        chosen = [child for child in tree.children[node] if child in chosen]
        other_children = [child for child in tree.children[node] if child not in chosen]
        stack += [(child, kept) for child in reversed(other_children)]
        if chosen:
            steps.run(near[0], node, level=near[1], keep=[(node, level)], drop=evict)
            evict = []
            held.append((node, level))
            stack.append(None)
            stack += [(child, (*kept, (node, level))) for child in reversed(chosen)]
    steps.steps += [ReplayStep(Do.EVICT, node, level=at) for node, at in evict]
    return steps.steps


def _block(
    tree: Tree,
    levels: Levels,
    kept: Kept,
    nodes: list[int],
    width: int,
    going: Callable[[], bool],
) -> list[ReplayStep]:
    """Return the steps that replay some nodes, with numbers of the whole tree; nothing is kept after them."""
    near, near_level = kept[-1] if kept else (START, 0)
    number = {node: i for i, node in enumerate(nodes)}
    part = Tree.of(
        [number.get(tree.parent[node], START) for node in nodes],
        [tree.cells[node] for node in nodes],
        start=tree.load(near, levels[near_level]),
    )
    used = [sum(tree.cells[n].size for n, at in kept if at == i) for i in range(len(levels))]
    free = [
        replace(level, room=level.room - taken) for level, taken in zip(levels, used, strict=True)
    ]
    best = dynamic(part, free)
    other = beam(part, free, width=width, going=going) if len(part.leaves) > 1 else None
    if other is not None and check(part, other, free) < check(part, best, free):
        best = other
    return [
        step._replace(node=near, child=nodes[step.child], level=near_level)
        if step.node == START
        else step._replace(
            node=nodes[step.node], child=nodes[step.child] if step.do is Do.RESTORE else START
        )
        for step in _emptied(best)
    ]


def _less(free: tuple[float, ...], at: int, size: float) -> tuple[float, ...]:
    return (*free[:at], free[at] - size, *free[at + 1 :])


def _situations(
    tree: Tree, sizes: list[tuple[float, ...]], room: tuple[float, ...], limit: int
) -> list[set[tuple[int, int, tuple[float, ...]]]] | None:
    """Return, per node, each possible (nearest kept node, its level, room left)."""
    reached: list[set[tuple[int, int, tuple[float, ...]]]] = [set() for _ in range(len(tree))]
    count = 0
    for node, above in enumerate(tree.parent):
        if above == START:
            reached[node] = {(START, 0, room)}
        else:
            for near, level, free in reached[above]:
                reached[node].add((near, level, free))
                for at, size in enumerate(sizes[above]):
                    if free[at] >= size:
                        reached[node].add((above, at, _less(free, at, size)))
        count += len(reached[node])
        if count > limit:
            return None
    return reached


@dataclass(frozen=True, slots=True)
class ReplayPath:
    """A restore and the steps up to the next restore that is not of the state in the process."""

    steps: tuple[ReplayStep, ...]

    @property
    def base(self) -> tuple[int, int]:
        """Node and level the path begins from."""
        return self.steps[0].node, self.steps[0].level

    @property
    def changes_cache(self) -> bool:
        """Whether it checkpoints or evicts: such paths start in their planned order."""
        return any(step.do in {Do.CHECKPOINT, Do.EVICT} for step in self.steps)


def paths_of(steps: Sequence[ReplayStep]) -> list[ReplayPath]:
    """Return the paths of a sequence; one process executes a path after one restore."""
    paths: list[list[ReplayStep]] = []
    last = START
    for step in steps:
        if step.do is Do.RESTORE and not (last == step.node != START and paths):
            paths.append([])
        elif not paths:
            paths.append([ReplayStep(Do.RESTORE, START, step.node)])
        paths[-1].append(step)
        if step.do is not Do.EVICT:
            last = step.node if step.do is Do.CHECKPOINT else START
    return [ReplayPath(tuple(path)) for path in paths]


def schedule(tree: Tree, steps: Sequence[ReplayStep], room: float | Levels, workers: int) -> float:
    """Return the wall seconds of steps on several workers that share the checkpoints.

    A path starts when its base is kept and a worker is free. Paths that change the cache start in
    their planned order, and the cache changes in that order, so the bound on its size holds at any
    timing; other paths may start as soon as their base is there.
    """
    check(tree, steps, room)
    levels = levels_of(room)
    paths = paths_of(steps)
    # index of the cache change, among all of them, that each path has to wait for
    kept_at: dict[tuple[int, int], int] = {}
    changes = 0
    available: list[int] = []
    for path in paths:
        available.append(kept_at.get(path.base, -1))
        for step in path.steps:
            if step.do is Do.CHECKPOINT:
                kept_at[step.node, step.level] = changes
                changes += 1
    clock = [0.0] * workers
    heapq.heapify(clock)
    done_at: list[float] = []  # time of each checkpoint, in planned order
    waiting = list(range(len(paths)))
    changed = 0.0  # time of the last change of the cache
    while waiting:
        first = waiting[0]
        now = heapq.heappop(clock)
        ready = first
        if available[first] >= 0 and done_at[available[first]] > now:
            # the next path has to wait: a path that does not change the cache may come first
            for other in waiting[1:]:
                planned = available[other] < len(done_at)
                free = available[other] < 0 or (planned and done_at[available[other]] <= now)
                if free and not paths[other].changes_cache:
                    ready = other
                    break
        waiting.remove(ready)
        base, level = paths[ready].base
        begin = max(now, done_at[available[ready]] if available[ready] >= 0 else 0.0)
        at = begin + tree.load(base, levels[level] if level >= 0 else None)
        for step in paths[ready].steps:
            if step.do is Do.COMPUTE:
                at += tree.cells[step.node].seconds
            elif step.do is Do.CHECKPOINT:
                at = max(at, changed) + tree.save(step.node, levels[step.level])
                changed = at
                done_at.append(at)
        heapq.heappush(clock, at)
    return max(clock)
