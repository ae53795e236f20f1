"""The published planners of CHEX, a system that replays many versions as one tree: PRP-v1, PRP-v2, Parent Choice, LFU.

Each planner returns the steps of a replay that keeps checkpoints in one cache level only. `tree.check` computes the
seconds of the steps; the sums of the published listings are not used, because they count some computations twice or
not at all. The planners ignore checkpoints that existed before the replay: `order` splits the tree at these
checkpoints first.

In this module, a node is *kept* if the state after it is checkpointed and not yet evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from rearview.errors import PlanError
from rearview.plan.versions.tree import (
    START,
    CacheLevel,
    Do,
    Levels,
    ReplayStep,
    StepBuilder,
    Tree,
    levels_of,
)

KeptAncestors = tuple[tuple[int, int], ...]
"""(node, cache level) of each kept ancestor of a node, from the root down."""
Choice = Callable[[int, KeptAncestors], tuple[Collection[int], int]]
"""Function (node, its kept ancestors) -> (children whose subtrees are replayed while the node is kept, cache level).

If it returns no children, the node is not kept.
"""


def depth_first_steps(tree: Tree, choose: Choice) -> list[ReplayStep]:
    """Return the steps of a depth-first replay that keeps the nodes that `choose` selects.

    The subtrees of the children for which a node is kept are replayed first; then the node is evicted, and the
    subtrees of its other children are replayed.
    """
    steps = StepBuilder(tree)
    # (node to replay, its kept ancestors), or (node to evict, its cache level, None)
    stack: list[tuple[int, KeptAncestors] | tuple[int, int, None]] = [
        (root, ()) for root in reversed(tree.roots)
    ]
    to_keep: list[tuple[int, int]] = []  # (node, level) of nodes to keep on the current path
    path_base: tuple[int, int] = (START, 0)
    to_evict: list[tuple[int, int]] = []

    def finish(end: int) -> None:
        nonlocal to_keep, to_evict
        steps.add_path(path_base[0], end, level=path_base[1], keep=to_keep, drop=to_evict)
        to_keep, to_evict = [], []

    while stack:
        item = stack.pop()
        if len(item) == 3:
            to_evict.append((item[0], item[1]))
            continue
        node, kept_ancestors = item
        nearest_kept = kept_ancestors[-1] if kept_ancestors else (START, 0)
        if not to_keep:
            path_base = nearest_kept
        children = tree.children[node]
        kept_for, level = choose(node, kept_ancestors) if children else ((), 0)
        kept_for = [child for child in kept_for if child in children]
        if not children:
            finish(node)
        elif not kept_for:
            stack.extend((child, kept_ancestors) for child in reversed(children))
        else:
            to_keep.append((node, level))
            other_children = [child for child in children if child not in kept_for]
            stack.extend((child, kept_ancestors) for child in reversed(other_children))
            stack.append((node, level, None))
            stack.extend((child, (*kept_ancestors, (node, level))) for child in reversed(kept_for))
    steps.steps.extend(ReplayStep(Do.EVICT, node, level=level) for node, level in to_evict)
    return steps.steps


def depth_first_cost(
    tree: Tree, kept_nodes: Collection[int], room: float, level: CacheLevel | None = None
) -> float:
    """Return the seconds of a depth-first replay that keeps `kept_nodes`, or infinity if they do not fit into `room`.

    `level` has the seconds of saving and loading, by default none. CHEX calls this cost DFSCost.
    """
    level = level or CacheLevel(room)
    total = 0.0
    used_bytes = [0.0] * len(tree)
    nearest_kept = [START] * len(tree)
    for node, above in enumerate(tree.parent):
        if above != START:
            used_bytes[node], nearest_kept[node] = used_bytes[above], nearest_kept[above]
            if above in kept_nodes:
                nearest_kept[node] = above
        has_children = bool(tree.children[node])
        if node in kept_nodes and has_children:
            used_bytes[node] += tree.cells[node].size
            if used_bytes[node] > room:
                return float("inf")
            # no load for the first child: its computation continues in the process that has this state
            total += tree.save(node, level) - tree.load(node, level)
        if not has_children or node in kept_nodes:
            total += tree.load(nearest_kept[node], level) + tree.between(nearest_kept[node], node)
    return total


def prp(
    tree: Tree, room: float | Levels, *, per_byte: bool = False, level: int = 0
) -> list[ReplayStep]:
    """Return the steps of the Persistent Root Policy, which selects one more node to keep as long as that saves time.

    Without `per_byte`, it selects the node that saves most seconds (PRP-v1); with `per_byte`, the node that saves most
    seconds per byte (PRP-v2). `level` is the index of the cache level in `room`.
    """
    cache_level = levels_of(room)[level]
    kept_nodes: set[int] = set()
    while True:
        best, best_node = 0.0, None
        for node, saved in _savings(tree, kept_nodes, cache_level):
            gain = saved / max(tree.cells[node].size, 1) if per_byte else saved
            if gain > best + 1e-12:
                best, best_node = gain, node
        if best_node is None:
            break
        kept_nodes.add(best_node)
    return depth_first_steps(
        tree, lambda node, _: (tree.children[node] if node in kept_nodes else (), level)
    )


def _savings(tree: Tree, kept_nodes: set[int], level: CacheLevel) -> Iterator[tuple[int, float]]:
    """Yield (node, seconds saved by keeping it besides `kept_nodes`) for each node that still fits into `level`.

    The seconds are the difference of two results of `depth_first_cost`. Keeping a node changes only the cost of nodes
    below it that begin from the same kept node. So one pass up and one pass down the tree are enough for all nodes;
    the published listing computes the whole tree again for each node.
    """
    count = len(tree)
    nearest_kept, used_bytes = [START] * count, [0.0] * count
    for node, above in enumerate(tree.parent):
        if above != START:
            nearest_kept[node] = above if above in kept_nodes else nearest_kept[above]
            used_bytes[node] = used_bytes[above]
        used_bytes[node] += tree.cells[node].size if node in kept_nodes else 0
    path_ends, most = [0] * count, used_bytes[:]
    for node in range(count - 1, -1, -1):
        above = tree.parent[node]
        if above != START:
            path_ends[above] += (
                1 if node in kept_nodes or not tree.children[node] else path_ends[node]
            )
            most[above] = max(most[above], most[node])
    for node, cell in enumerate(tree.cells):
        if node in kept_nodes or not tree.children[node]:
            continue
        if most[node] + cell.size <= level.room:
            seconds_to_compute = tree.load(nearest_kept[node], level) + tree.between(
                nearest_kept[node], node
            )
            saved = (path_ends[node] - 1) * (seconds_to_compute - tree.load(node, level))
            yield node, saved - tree.save(node, level)


def parent_choice(
    tree: Tree, room: float | Levels, *, states: int = 60_000, level: int = 0
) -> list[ReplayStep]:
    """Return the steps of Parent Choice, which decides for each child whether its parent is kept while it is replayed.

    It examines *situations*: a node with the set of its kept ancestors. There may be 2^height of these sets for a
    node; raise if there are more than `states` situations. `level` is the index of the cache level in `room`.
    """
    cache_level = levels_of(room)[level]
    costs: dict[tuple[int, tuple[int, ...]], float] = {}
    choices: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    situations: list[tuple[int, tuple[int, ...], float]] = [(root, (), 0.0) for root in tree.roots]
    known_situations = {(node, ancestors) for node, ancestors, _ in situations}
    # `situations` has (node, kept ancestors, bytes that these use), parents first; this loop appends to it
    for node, ancestors, used_bytes in situations:
        cell = tree.cells[node]
        options: list[tuple[tuple[int, ...], float]] = [(ancestors, used_bytes)]
        if used_bytes + cell.size <= cache_level.room:
            options.append(((*ancestors, node), used_bytes + cell.size))
        for child in tree.children[node]:
            for kept_after, room_used in options:
                if (child, kept_after) not in known_situations:
                    known_situations.add((child, kept_after))
                    situations.append((child, kept_after, room_used))
        if len(situations) > states:
            raise PlanError(
                f"Parent Choice would examine more than {states} situations for this tree of "
                f"{len(tree)} cells. Use `--planner auto`, which does not need them.",
                slug="parent-choice",
            )
    for node, ancestors, used_bytes in reversed(situations):
        nearest_kept = ancestors[-1] if ancestors else START
        children, cell = tree.children[node], tree.cells[node]
        if not children:
            costs[node, ancestors] = tree.load(nearest_kept, cache_level) + tree.between(
                nearest_kept, node
            )
            continue
        with_node = (*ancestors, node)
        if used_bytes + cell.size > cache_level.room:
            costs[node, ancestors] = sum(costs[child, ancestors] for child in children)
            choices[node, ancestors] = ()
            continue
        kept_for = tuple(c for c in children if costs[c, with_node] <= costs[c, ancestors])
        choices[node, ancestors] = kept_for
        costs[node, ancestors] = sum(
            min(costs[c, with_node], costs[c, ancestors]) for c in children
        )
        if kept_for:
            # unlike in the published listing, the seconds to compute the kept node are counted
            seconds = tree.load(nearest_kept, cache_level) + tree.between(nearest_kept, node)
            costs[node, ancestors] += (
                seconds + tree.save(node, cache_level) - tree.load(node, cache_level)
            )
    return depth_first_steps(
        tree,
        lambda node, ancestors: (
            choices.get((node, tuple(n for n, _ in ancestors)), ()),
            level,
        ),
    )


def lfu(tree: Tree, room: float | Levels, *, level: int = 0) -> list[ReplayStep]:
    """Return the steps of a replay of the versions in their order, with a least-frequently-used cache.

    The worth of a node is its number of uses times the number of cells in its subtree, divided by its size. If a node
    does not fit, nodes of less worth are evicted. `level` is the index of the cache level in `room`.
    """
    cache_level = levels_of(room)[level]
    subtree_sizes = tree.subtree_sizes()
    uses = [0] * len(tree)
    kept_nodes: set[int] = set()
    used_bytes = 0.0
    steps: list[ReplayStep] = []

    def worth(node: int) -> float:
        return uses[node] * subtree_sizes[node] / max(tree.cells[node].size, 1)

    leaves = set(tree.leaves)
    for leaf in [n for n in dict.fromkeys(tree.versions) if n in leaves] or tree.leaves:
        path = tree.path(START, leaf)
        first = max((i + 1 for i, n in enumerate(path) if n in kept_nodes), default=0)
        first = min(first, len(path) - 1)
        base = path[first - 1] if first else START
        if base in kept_nodes:
            uses[base] += 1
        steps.append(ReplayStep(Do.RESTORE, base, path[first], level))
        for i, node in enumerate(path[first:], first):
            steps.append(ReplayStep(Do.COMPUTE, node))
            uses[node] += 1
            size = tree.cells[node].size
            if not tree.children[node] or size > cache_level.room or node in kept_nodes:
                continue
            less_worthy = sorted((n for n in kept_nodes if worth(n) < worth(node)), key=worth)
            if used_bytes + size - sum(tree.cells[n].size for n in less_worthy) > cache_level.room:
                continue
            while used_bytes + size > cache_level.room:
                evicted = less_worthy.pop(0)
                kept_nodes.discard(evicted)
                used_bytes -= tree.cells[evicted].size
                steps.append(ReplayStep(Do.EVICT, evicted, level=level))
            kept_nodes.add(node)
            used_bytes += size
            steps.append(ReplayStep(Do.CHECKPOINT, node, level=level))
            steps.append(ReplayStep(Do.RESTORE, node, path[i + 1], level))
    return steps


def sequential(tree: Tree) -> list[ReplayStep]:
    """Return the steps that compute every leaf from the start, without any checkpoint."""
    return depth_first_steps(tree, lambda _node, _kept: ((), 0))
