"""The planners that CHEX published: PRP-v1, PRP-v2, Parent Choice and LFU.

Each planner returns its steps, with checkpoints in one level only. `tree.check` counts the cost of the
steps: the published listings count some computations twice or not at all, so their own sums are not
used. The planners ignore existing checkpoints: `order` cuts the tree there first.
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

Kept = tuple[tuple[int, int], ...]
"""(node, level) of the kept nodes above a node, outermost first."""
Choice = Callable[[int, Kept], tuple[Collection[int], int]]
"""(node, kept above it) -> (children for which the node is kept, level); no children: not kept."""


def walk(tree: Tree, choose: Choice) -> list[ReplayStep]:
    """Return the steps of a depth-first replay that keeps nodes as `choose` says.

    A kept node stays until the children it is kept for are done, which come first.
    """
    steps = StepBuilder(tree)
    # (node, kept above, nodes kept since the last restore) or (node to evict, level)
    stack: list[tuple[int, Kept] | tuple[int, int, None]] = [
        (root, ()) for root in reversed(tree.roots)
    ]
    pending: list[tuple[int, int]] = []  # kept nodes of the path that is being computed
    path_base: tuple[int, int] = (START, 0)
    evict: list[tuple[int, int]] = []

    def finish(end: int) -> None:
        nonlocal pending, evict
        steps.run(path_base[0], end, level=path_base[1], keep=pending, drop=evict)
        pending, evict = [], []

    while stack:
        item = stack.pop()
        if len(item) == 3:
            evict.append((item[0], item[1]))
            continue
        node, kept = item
        near = kept[-1] if kept else (START, 0)
        if not pending:
            path_base = near
        below = tree.children[node]
        chosen, level = choose(node, kept) if below else ((), 0)
        chosen = [child for child in chosen if child in below]
        if not below:
            finish(node)
        elif not chosen:
            stack.extend((child, kept) for child in reversed(below))
        else:
            pending.append((node, level))
            other_children = [child for child in below if child not in chosen]
            stack.extend((child, kept) for child in reversed(other_children))
            stack.append((node, level, None))
            stack.extend((child, (*kept, (node, level))) for child in reversed(chosen))
    steps.steps.extend(ReplayStep(Do.EVICT, node, level=level) for node, level in evict)
    return steps.steps


def depth_first_cost(
    tree: Tree, kept: Collection[int], room: float, level: CacheLevel | None = None
) -> float:
    """Return the seconds of a depth-first replay that keeps these nodes; infinite if they do not fit.

    CHEX calls it DFSCost.
    """
    level = level or CacheLevel(room)
    total = 0.0
    used = [0.0] * len(tree)
    near = [START] * len(tree)
    for node, above in enumerate(tree.parent):
        if above != START:
            used[node], near[node] = used[above], near[above]
            if above in kept:
                near[node] = above
        inner = bool(tree.children[node])
        if node in kept and inner:
            used[node] += tree.cells[node].size
            if used[node] > room:
                return float("inf")
            # the first child continues from it without loading
            total += tree.save(node, level) - tree.load(node, level)
        if not inner or node in kept:
            total += tree.load(near[node], level) + tree.between(near[node], node)
    return total


def prp(
    tree: Tree, room: float | Levels, *, per_byte: bool = False, level: int = 0
) -> list[ReplayStep]:
    """Return the steps of Persistent Root Policy: keep the node that saves most, repeatedly.

    `per_byte` divides the saving by the size: PRP-v2; else PRP-v1.
    """
    place = levels_of(room)[level]
    kept: set[int] = set()
    while True:
        best, best_node = 0.0, None
        for node, saved in _savings(tree, kept, place):
            gain = saved / max(tree.cells[node].size, 1) if per_byte else saved
            if gain > best + 1e-12:
                best, best_node = gain, node
        if best_node is None:
            break
        kept.add(best_node)
    return walk(tree, lambda node, _: (tree.children[node] if node in kept else (), level))


def _savings(tree: Tree, kept: set[int], level: CacheLevel) -> Iterator[tuple[int, float]]:
    """Yield the seconds that keeping each further node saves, as the difference of two `depth_first_cost`.

    Only the cost of nodes below it that begin from the same kept state changes, so one pass up and
    one down is enough where the published listing walks the whole tree for each node.
    """
    count = len(tree)
    near, used = [START] * count, [0.0] * count
    for node, above in enumerate(tree.parent):
        if above != START:
            near[node] = above if above in kept else near[above]
            used[node] = used[above]
        used[node] += tree.cells[node].size if node in kept else 0
    ends, most = [0] * count, used[:]
    for node in range(count - 1, -1, -1):
        above = tree.parent[node]
        if above != START:
            ends[above] += 1 if node in kept or not tree.children[node] else ends[node]
            most[above] = max(most[above], most[node])
    for node, cell in enumerate(tree.cells):
        if node in kept or not tree.children[node]:
            continue
        if most[node] + cell.size <= level.room:
            once = tree.load(near[node], level) + tree.between(near[node], node)
            saved = (ends[node] - 1) * (once - tree.load(node, level))
            yield node, saved - tree.save(node, level)


def parent_choice(
    tree: Tree, room: float | Levels, *, states: int = 60_000, level: int = 0
) -> list[ReplayStep]:
    """Return the steps of Parent Choice: for each child, keep its parent or not.

    Kept sets are distinguished in full, as published; there are up to 2^height of them, so it is
    refused beyond `states`.
    """
    place = levels_of(room)[level]
    costs: dict[tuple[int, tuple[int, ...]], float] = {}
    choices: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    order: list[tuple[int, tuple[int, ...], float]] = [(root, (), 0.0) for root in tree.roots]
    seen = {(node, kept) for node, kept, _ in order}
    for node, kept, used in order:  # every situation, parents first; the loop below appends to it
        cell = tree.cells[node]
        options: list[tuple[tuple[int, ...], float]] = [(kept, used)]
        if used + cell.size <= place.room:
            options.append(((*kept, node), used + cell.size))
        for child in tree.children[node]:
            for with_, room_used in options:
                if (child, with_) not in seen:
                    seen.add((child, with_))
                    order.append((child, with_, room_used))
        if len(order) > states:
            raise PlanError(
                f"Parent Choice would examine more than {states} situations for this tree of "
                f"{len(tree)} cells. Use `--planner auto`, which does not need them.",
                slug="parent-choice",
            )
    for node, kept, used in reversed(order):
        near = kept[-1] if kept else START
        below, cell = tree.children[node], tree.cells[node]
        if not below:
            costs[node, kept] = tree.load(near, place) + tree.between(near, node)
            continue
        more = (*kept, node)
        if used + cell.size > place.room:
            costs[node, kept] = sum(costs[child, kept] for child in below)
            choices[node, kept] = ()
            continue
        chosen = tuple(c for c in below if costs[c, more] <= costs[c, kept])
        choices[node, kept] = chosen
        costs[node, kept] = sum(min(costs[c, more], costs[c, kept]) for c in below)
        if chosen:
            # the published listing leaves out the seconds to compute the kept node
            once = tree.load(near, place) + tree.between(near, node)
            costs[node, kept] += once + tree.save(node, place) - tree.load(node, place)
    return walk(
        tree,
        lambda node, kept: (choices.get((node, tuple(n for n, _ in kept)), ()), level),
    )


def lfu(tree: Tree, room: float | Levels, *, level: int = 0) -> list[ReplayStep]:
    """Return the steps of the least-frequently-used cache: version by version, in their order.

    The worth of a kept node is its uses times the cells below it, divided by its size; the node of least worth is evicted.
    """
    place = levels_of(room)[level]
    below = tree.subtree()
    uses = [0] * len(tree)
    held: set[int] = set()
    used = 0.0
    steps: list[ReplayStep] = []

    def worth(node: int) -> float:
        return uses[node] * below[node] / max(tree.cells[node].size, 1)

    leaves = set(tree.leaves)
    for leaf in [n for n in dict.fromkeys(tree.versions) if n in leaves] or tree.leaves:
        path = tree.path(START, leaf)
        first = max((i + 1 for i, n in enumerate(path) if n in held), default=0)
        first = min(first, len(path) - 1)
        base = path[first - 1] if first else START
        if base in held:
            uses[base] += 1
        steps.append(ReplayStep(Do.RESTORE, base, path[first], level))
        for i, node in enumerate(path[first:], first):
            steps.append(ReplayStep(Do.COMPUTE, node))
            uses[node] += 1
            size = tree.cells[node].size
            if not tree.children[node] or size > place.room or node in held:
                continue
            worse = sorted((n for n in held if worth(n) < worth(node)), key=worth)
            if used + size - sum(tree.cells[n].size for n in worse) > place.room:
                continue
            while used + size > place.room:
                dropped = worse.pop(0)
                held.discard(dropped)
                used -= tree.cells[dropped].size
                steps.append(ReplayStep(Do.EVICT, dropped, level=level))
            held.add(node)
            used += size
            steps.append(ReplayStep(Do.CHECKPOINT, node, level=level))
            steps.append(ReplayStep(Do.RESTORE, node, path[i + 1], level))
    return steps


def sequential(tree: Tree) -> list[ReplayStep]:
    """Return the steps that compute every leaf from the start and keep nothing."""
    return walk(tree, lambda _node, _kept: ((), 0))
