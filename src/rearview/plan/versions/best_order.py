"""Choose the order in which the versions of a tree are replayed, within a limit on the size of kept checkpoints.

The planner `auto` tries all published planners (`chex_planners`), so it is never worse than the best of them. It also
tries a dynamic program over all depth-first orders that keep only ancestors of the current node, and a beam search
(`search`) for other orders, which handles large trees in blocks. Finally, a best-first search over all legal orders
tries to find a better one until its limit is reached. This search also proves a lower bound, from which the gap is
computed.

A node is *kept* if the state after it is checkpointed and not yet evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rearview.errors import PlanError
from rearview.plan.versions.chex_planners import (
    Choice,
    KeptAncestors,
    depth_first_steps,
    lfu,
    parent_choice,
    prp,
    sequential,
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

BLOCK_LEAVES = 12
"""Most leaves of a block: a subtree of a large tree in which orders that are not depth-first are tried."""
BEAM_LEAVES = 60
"""Most leaves of a tree for which a beam search over the whole tree is tried."""
GRIDS = (64, 20, 10, 5)
"""Numbers of equal units into which the dynamic program divides the room of a cache level, from fine to coarse."""
MAX_SITUATIONS = 150_000
"""Most situations that the dynamic program examines; if there are more, it rounds sizes to coarser units (`GRIDS`)."""
PLANNERS = ("auto", "prp1", "prp2", "pc", "lfu", "none")


@dataclass(frozen=True, slots=True)
class Order:
    """Steps that replay every version, their cost, and a proved lower bound of the cost."""

    steps: tuple[ReplayStep, ...]
    seconds: float
    """Seconds until the last of `workers` has ended its steps."""
    bound: float
    """Lower bound: no order takes fewer seconds."""
    by: str
    """Name of the planner that found the steps."""
    tried: Mapping[str, float] = field(default_factory=dict)
    """Name of each planner that was tried -> seconds of the steps that it found."""
    workers: int = 1

    @property
    def gap(self) -> float:
        """Largest fraction of `seconds` that a better order could save, according to `bound`."""
        return 0.0 if self.seconds <= 0 else max(0.0, 1.0 - self.bound / self.seconds)


def order(
    tree: Tree,
    room: float | Levels,
    *,
    planner: str = "auto",
    workers: int = 1,
    patience: int = 20_000,
    may_continue: Callable[[], bool] = lambda: True,
) -> Order:
    """Return the best order found for replaying `tree` on `workers` workers.

    `room` are the cache levels, or the bytes of a single level. `planner` is one of `PLANNERS`. The search ends after
    `patience` situations, or when `may_continue` returns False. The tree is split at existing checkpoints: the nodes
    below such a checkpoint are replayed from the checkpoint.
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
    for base, nodes, part_tree in tree.parts():
        if planner == "auto":
            sequences, lower_bound = _auto(part_tree, levels, patience, may_continue)
            if base != START:
                # another order could compute the state of `base` again, which may be faster than loading it
                lower_bound -= max(0.0, part_tree.start - tree.cells[base].seconds) * len(
                    part_tree.leaves
                )
        else:
            sequences, lower_bound = (
                {planner: _published_steps(part_tree, levels, planner)},
                _lower_bound(part_tree),
            )
        bound += max(0.0, lower_bound)
        per_part.append((base, nodes, sequences, lower_bound))
    names = list(dict.fromkeys(name for _, _, sequences, _ in per_part for name in sequences))
    for name in names:
        if all(name in sequences for _, _, sequences, _ in per_part):
            candidates[name] = [
                _renumbered(step, base, nodes)
                for base, nodes, sequences, _ in per_part
                for step in _with_final_evictions(sequences[name])
            ]
    tried = {
        name: schedule(tree, steps, levels, workers) if workers > 1 else check(tree, steps, levels)
        for name, steps in candidates.items()
    }
    if not tried:
        return Order((), 0.0, 0.0, planner, {}, workers)
    best = _best_planner(tree, candidates, tried, levels, workers)
    bound = max(bound / workers, _longest_path(tree)) if workers > 1 else bound
    return Order(
        tuple(candidates[best]),
        tried[best],
        min(bound, tried[best]),
        best,
        dict(sorted(tried.items())),
        workers,
    )


def _best_planner(
    tree: Tree,
    candidates: Mapping[str, list[ReplayStep]],
    tried: Mapping[str, float],
    levels: Levels,
    workers: int,
) -> str:
    """Return the name of the planner with the best order in `candidates`; `tried` are the seconds of each order.

    With several workers, an order that takes up to 1 % longer than the fastest one is better if it computes fewer
    seconds in total: workers share the machine, so computing a cell twice always costs something.
    """

    def rank(name: str) -> tuple[float, bool]:
        return tried[name], name not in {"search", "dynamic program"}

    if workers == 1:
        return min(tried, key=rank)
    least = min(tried.values()) * 1.01
    close = [name for name in tried if tried[name] <= least]
    return min(close, key=lambda name: (check(tree, candidates[name], levels), *rank(name)))


def _renumbered(step: ReplayStep, base: int, nodes: list[int]) -> ReplayStep:
    """Return `step`, made for a part of the tree, with the node numbers of the whole tree (`Tree.parts`)."""
    if step.node == START:
        level = EXISTING if base != START else step.level
        return step._replace(node=base, child=nodes[step.child], level=level)
    child = nodes[step.child] if step.do is Do.RESTORE else START
    return step._replace(node=nodes[step.node], child=child)


def _with_final_evictions(steps: list[ReplayStep]) -> list[ReplayStep]:
    """Return `steps` and evictions of all nodes that are still kept, so that the next part has the whole room."""
    kept_states: dict[tuple[int, int], None] = {}
    for step in steps:
        if step.do is Do.CHECKPOINT:
            kept_states[step.node, step.level] = None
        elif step.do is Do.EVICT:
            del kept_states[step.node, step.level]
    return steps + [ReplayStep(Do.EVICT, node, level=level) for node, level in kept_states]


def _lower_bound(tree: Tree) -> float:
    """Return a lower bound in seconds for every order of `tree`, without searching for an order.

    Each cell is computed at least once, and each leaf needs a new process or a restore.
    """
    return search(tree, max((cell.size for cell in tree.cells), default=0), patience=0)[1]


def _longest_path(tree: Tree) -> float:
    """Return the seconds of the longest path of nodes, which one worker must compute in sequence."""
    return max(
        (part.start + reach for _, _, part in tree.parts() for reach in part.reach), default=0.0
    )


def _published_steps(tree: Tree, levels: Sequence[CacheLevel], planner: str) -> list[ReplayStep]:
    if planner == "none" or all(level.room <= 0 for level in levels):
        return sequential(tree)
    level = next(i for i, level in enumerate(levels) if level.room > 0)
    if planner == "pc":
        return parent_choice(tree, levels, level=level)
    if planner == "lfu":
        return lfu(tree, levels, level=level)
    return prp(tree, levels, per_byte=planner == "prp2", level=level)


def _auto(
    tree: Tree, levels: Sequence[CacheLevel], patience: int, may_continue: Callable[[], bool]
) -> tuple[dict[str, list[ReplayStep]], float]:
    """Return (name of a planner -> its steps, lower bound in seconds) for a tree without existing checkpoints."""
    sequences: dict[str, list[ReplayStep]] = {"none": sequential(tree)}
    for i, level in enumerate(levels):
        if level.room <= 0:
            continue
        suffix = "" if i == 0 else f" ({level.name})"
        sequences[f"PRP-v1{suffix}"] = prp(tree, levels, level=i)
        sequences[f"PRP-v2{suffix}"] = prp(tree, levels, per_byte=True, level=i)
        sequences[f"LFU{suffix}"] = lfu(tree, levels, level=i)
        with suppress(
            PlanError
        ):  # if the tree is too high for Parent Choice, the dynamic program covers its orders
            sequences[f"PC{suffix}"] = parent_choice(tree, levels, level=i)
    choose = depth_first_choice(tree, levels)
    sequences["dynamic program"] = depth_first_steps(tree, choose)
    if len(tree.leaves) > BLOCK_LEAVES:
        sequences["blocks"] = by_blocks(tree, levels, choose, may_continue=may_continue)
    if len(tree.leaves) > BEAM_LEAVES and may_continue():
        wide_blocks = by_blocks(
            tree, levels, choose, most=2 * BLOCK_LEAVES, width=4, may_continue=may_continue
        )
        sequences["wide blocks"] = wide_blocks
    if len(tree.leaves) <= BEAM_LEAVES:
        steps = beam(tree, levels, may_continue=may_continue)
        if steps is not None:
            sequences["beam"] = steps
    costs = {name: check(tree, steps, levels) for name, steps in sequences.items()}
    best = min(costs, key=lambda name: (costs[name], name != "dynamic program"))
    if len(tree.leaves) > 2 * BEAM_LEAVES:
        patience = 0  # no search, only its bound: in so large a tree, it finds no better order
    better_steps, bound = search(
        tree, levels, below=costs[best], patience=patience, may_continue=may_continue
    )
    sequences["search"] = better_steps if better_steps is not None else sequences[best]
    return sequences, bound


def dynamic(tree: Tree, room: float | Levels, *, states: int = MAX_SITUATIONS) -> list[ReplayStep]:
    """Return the best depth-first steps that keep only ancestors of the current node; see `depth_first_choice`."""
    return depth_first_steps(tree, depth_first_choice(tree, room, states=states))


def depth_first_choice(tree: Tree, room: float | Levels, *, states: int = MAX_SITUATIONS) -> Choice:
    """Return the `Choice` of the best depth-first order among those that keep only ancestors of the current node.

    The best replay of the subtree of a node depends on its *situation*: the nearest kept ancestor, and the free room.
    So the number of situations is nodes x height x sizes, not 2^height as for sets of kept ancestors. If there are
    more than `states` situations, sizes are rounded up. If that is not enough, the choice keeps no node.
    """
    levels = levels_of(room)
    sizes = [tuple(float(cell.size) for _ in levels) for cell in tree.cells]
    free_room = tuple(level.room for level in levels)
    situations = _situations(tree, sizes, free_room, states)
    for grid in GRIDS:
        if situations is not None:
            break
        # sizes are rounded up to whole units of room: there are fewer situations, and kept nodes always fit
        sizes = [
            tuple(float(-(-cell.size * grid // max(level.room, 1))) for level in levels)
            for cell in tree.cells
        ]
        free_room = tuple(float(grid) if level.room > 0 else 0.0 for level in levels)
        situations = _situations(tree, sizes, free_room, states)
    if situations is None:
        return lambda *_: ((), 0)
    costs: dict[tuple[int, int, int, tuple[float, ...]], float] = {}
    choices: dict[tuple[int, int, int, tuple[float, ...]], tuple[tuple[int, ...], int]] = {}
    for node in range(len(tree) - 1, -1, -1):
        children = tree.children[node]
        for nearest_kept, nearest_level, free in situations[node]:
            key = (node, nearest_kept, nearest_level, free)
            seconds = tree.load(nearest_kept, levels[nearest_level]) + tree.between(
                nearest_kept, node
            )
            if not children:
                costs[key] = seconds
                continue
            costs_without = [costs[child, nearest_kept, nearest_level, free] for child in children]
            costs[key], choices[key] = sum(costs_without), ((), 0)
            for at, level in enumerate(levels):
                if free[at] < sizes[node][at]:
                    continue
                free_after = _room_after(free, at, sizes[node][at])
                costs_with = [costs[child, node, at, free_after] for child in children]
                kept_cost = seconds + tree.save(node, level) - tree.load(node, level)
                kept_cost += sum(map(min, zip(costs_with, costs_without, strict=True)))
                kept_for = tuple(
                    c for c, a, b in zip(children, costs_with, costs_without, strict=True) if a < b
                )
                if kept_for and kept_cost < costs[key]:
                    costs[key], choices[key] = kept_cost, (kept_for, at)

    def choose(node: int, kept_ancestors: KeptAncestors) -> tuple[tuple[int, ...], int]:
        free = free_room
        for ancestor, at in kept_ancestors:
            free = _room_after(free, at, sizes[ancestor][at])
        nearest_kept, nearest_level = kept_ancestors[-1] if kept_ancestors else (START, 0)
        return choices.get((node, nearest_kept, nearest_level, free), ((), 0))

    return choose


def by_blocks(
    tree: Tree,
    room: float | Levels,
    choose: Choice,
    *,
    most: int = BLOCK_LEAVES,
    width: int = 10,
    may_continue: Callable[[], bool] = lambda: True,
) -> list[ReplayStep]:
    """Return depth-first steps, except that subtrees of at most `most` leaves (blocks) are replayed in the best order.

    Within a block, a beam search of `width` tries orders that alternate between branches, in the room that kept
    ancestors leave. If none is better, the block is replayed in its best depth-first order. So the result is never
    worse than the order of `choose`.
    """
    levels = levels_of(room)
    leaves = [0 if below else 1 for below in tree.children]
    block_nodes: list[list[int]] = [[node] for node in range(len(tree))]
    for node in range(len(tree) - 1, -1, -1):
        above = tree.parent[node]
        if above != START:
            leaves[above] += leaves[node]
            if leaves[above] <= most:
                block_nodes[above] += block_nodes[node]
    steps = StepBuilder(tree)
    stack: list[tuple[int, KeptAncestors] | None] = [(root, ()) for root in reversed(tree.roots)]
    to_evict: list[tuple[int, int]] = []
    kept_path: list[tuple[int, int]] = []
    while stack:
        item = stack.pop()
        if item is None:
            to_evict.append(kept_path.pop())
            continue
        node, kept_ancestors = item
        nearest_kept = kept_ancestors[-1] if kept_ancestors else (START, 0)
        if leaves[node] <= most:
            steps.steps += [ReplayStep(Do.EVICT, n, level=at) for n, at in to_evict]
            to_evict = []
            path = tree.path(nearest_kept[0], node)
            nodes = [*path[:-1], *sorted(block_nodes[node])]
            steps.steps += _block(tree, levels, kept_ancestors, nodes, width, may_continue)
            continue
        kept_for, level = choose(node, kept_ancestors)
        kept_for = [child for child in tree.children[node] if child in kept_for]
        other_children = [child for child in tree.children[node] if child not in kept_for]
        stack += [(child, kept_ancestors) for child in reversed(other_children)]
        if kept_for:
            steps.add_path(
                nearest_kept[0], node, level=nearest_kept[1], keep=[(node, level)], drop=to_evict
            )
            to_evict = []
            kept_path.append((node, level))
            stack.append(None)
            stack += [(child, (*kept_ancestors, (node, level))) for child in reversed(kept_for)]
    steps.steps += [ReplayStep(Do.EVICT, node, level=at) for node, at in to_evict]
    return steps.steps


def _block(
    tree: Tree,
    levels: Levels,
    kept_ancestors: KeptAncestors,
    nodes: list[int],
    width: int,
    may_continue: Callable[[], bool],
) -> list[ReplayStep]:
    """Return the steps that replay the `nodes` of one block, and that evict all of these nodes at the end.

    The steps begin from the last of `kept_ancestors`. `width` is that of the beam search.
    """
    nearest_kept, nearest_level = kept_ancestors[-1] if kept_ancestors else (START, 0)
    index_of = {node: i for i, node in enumerate(nodes)}
    part = Tree.of(
        [index_of.get(tree.parent[node], START) for node in nodes],
        [tree.cells[node] for node in nodes],
        start=tree.load(nearest_kept, levels[nearest_level]),
    )
    used_bytes = [
        sum(tree.cells[n].size for n, at in kept_ancestors if at == i) for i in range(len(levels))
    ]
    free = [
        replace(level, room=level.room - bytes_in_level)
        for level, bytes_in_level in zip(levels, used_bytes, strict=True)
    ]
    best = dynamic(part, free)
    beam_steps = (
        beam(part, free, width=width, may_continue=may_continue) if len(part.leaves) > 1 else None
    )
    if beam_steps is not None and check(part, beam_steps, free) < check(part, best, free):
        best = beam_steps
    return [
        step._replace(node=nearest_kept, child=nodes[step.child], level=nearest_level)
        if step.node == START
        else step._replace(
            node=nodes[step.node], child=nodes[step.child] if step.do is Do.RESTORE else START
        )
        for step in _with_final_evictions(best)
    ]


def _room_after(free: tuple[float, ...], at: int, size: float) -> tuple[float, ...]:
    return (*free[:at], free[at] - size, *free[at + 1 :])


def _situations(
    tree: Tree, sizes: list[tuple[float, ...]], room: tuple[float, ...], limit: int
) -> list[set[tuple[int, int, tuple[float, ...]]]] | None:
    """Return for each node its possible situations: (nearest kept ancestor, its level, free room of each level).

    Return None if there are more than `limit` situations.
    """
    situations: list[set[tuple[int, int, tuple[float, ...]]]] = [set() for _ in range(len(tree))]
    count = 0
    for node, above in enumerate(tree.parent):
        if above == START:
            situations[node] = {(START, 0, room)}
        else:
            for nearest_kept, level, free in situations[above]:
                situations[node].add((nearest_kept, level, free))
                for at, size in enumerate(sizes[above]):
                    if free[at] >= size:
                        situations[node].add((above, at, _room_after(free, at, size)))
        count += len(situations[node])
        if count > limit:
            return None
    return situations


@dataclass(frozen=True, slots=True)
class ReplayPath:
    """The steps of one process: it restores a state and executes the steps up to the next restore of another state."""

    steps: tuple[ReplayStep, ...]

    @property
    def base(self) -> tuple[int, int]:
        """(node, cache level) of the state that the path restores first."""
        return self.steps[0].node, self.steps[0].level

    @property
    def changes_cache(self) -> bool:
        """Whether the path checkpoints or evicts; paths that do must start in the planned order."""
        return any(step.do in {Do.CHECKPOINT, Do.EVICT} for step in self.steps)


def paths_of(steps: Sequence[ReplayStep]) -> list[ReplayPath]:
    """Divide the steps of a replay into paths; each path ends before a restore of a state that its process has not."""
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
    """Return the seconds until `workers` workers, which share the checkpoints, have executed all `steps`.

    A path starts when its first state is kept and a worker is free. Paths that checkpoint or evict start in their
    planned order, and the cache changes in this order; so its size stays within the limit, however long the steps
    take. Other paths may start earlier than planned.
    """
    check(tree, steps, room)
    levels = levels_of(room)
    paths = paths_of(steps)
    checkpoint_index: dict[tuple[int, int], int] = {}
    checkpoint_count = 0
    base_index: list[int] = []  # item i: index of the checkpoint that path i restores first, or -1
    for path in paths:
        base_index.append(checkpoint_index.get(path.base, -1))
        for step in path.steps:
            if step.do is Do.CHECKPOINT:
                checkpoint_index[step.node, step.level] = checkpoint_count
                checkpoint_count += 1
    clock = [0.0] * workers
    heapq.heapify(clock)
    checkpoint_times: list[float] = []  # when each checkpoint is complete, in planned order
    waiting = list(range(len(paths)))
    last_change = 0.0  # when the last checkpoint was completed
    while waiting:
        next_path = waiting[0]
        now = heapq.heappop(clock)
        starting_path = next_path
        if base_index[next_path] >= 0 and checkpoint_times[base_index[next_path]] > now:
            # the next path must wait for its checkpoint: start a path before it that does not change the cache
            for later in waiting[1:]:
                planned = base_index[later] < len(checkpoint_times)
                can_start = base_index[later] < 0 or (
                    planned and checkpoint_times[base_index[later]] <= now
                )
                if can_start and not paths[later].changes_cache:
                    starting_path = later
                    break
        waiting.remove(starting_path)
        base, level = paths[starting_path].base
        begin = max(
            now,
            checkpoint_times[base_index[starting_path]] if base_index[starting_path] >= 0 else 0.0,
        )
        at = begin + tree.load(base, levels[level] if level >= 0 else None)
        for step in paths[starting_path].steps:
            if step.do is Do.COMPUTE:
                at += tree.cells[step.node].seconds
            elif step.do is Do.CHECKPOINT:
                at = max(at, last_change) + tree.save(step.node, levels[step.level])
                last_change = at
                checkpoint_times.append(at)
        heapq.heappush(clock, at)
    return max(clock)
