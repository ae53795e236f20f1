"""The planners that CHEX published: PRP-v1, PRP-v2, Parent Choice and LFU.

Each returns the steps it would take. The cost is that of the steps, counted by `tree.check`: the
published listings count some computations twice or not at all, so their own sums are not used.
Checkpoints that exist already are unknown to them: `multiversion` cuts the tree there first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from rearview.errors import PlanError
from rearview.plan.tree import START, Do, Step, Tree

Choice = Callable[[int, tuple[int, ...]], Collection[int]]
"""(node, kept nodes above it) -> the children for which the node is kept; none: it is not."""


def walk(tree: Tree, choose: Choice) -> list[Step]:
    """Return the steps of a depth-first replay that keeps nodes as `choose` says.

    A kept node stays until those children are done, which come first; then it is dropped.
    """
    steps: list[Step] = []
    # (node, kept above, the nearest kept state is still at hand) or (node to drop,)
    stack: list[tuple[int, tuple[int, ...], bool] | tuple[int]] = [
        (root, (), False) for root in reversed(tree.roots)
    ]
    while stack:
        item = stack.pop()
        if len(item) == 1:
            steps.append((Do.DROP, item[0]))
            continue
        node, kept, at_hand = item
        above = kept[-1] if kept else START
        below = tree.children[node]
        wanted = [child for child in choose(node, kept) if child in below]
        if below and not wanted:
            stack.extend(
                (child, kept, at_hand and i == 0) for i, child in reversed(list(enumerate(below)))
            )
            continue
        if not at_hand:
            steps.append((Do.GO_BACK, above))
        steps.extend((Do.COMPUTE, n) for n in tree.path(above, node))
        if not below:
            continue
        steps.append((Do.KEEP, node))
        rest = [child for child in below if child not in wanted]
        stack.extend((child, kept, False) for child in reversed(rest))
        stack.append((node,))
        stack.extend(
            ((child, (*kept, node), i == 0) for i, child in reversed(list(enumerate(wanted))))
        )
    return steps


def depth_first_cost(tree: Tree, kept: Collection[int], room: float) -> float:
    """Return the seconds of a depth-first replay that keeps these nodes; infinite if they do not fit.

    CHEX calls it DFSCost.
    """
    total = 0.0
    used = [0.0] * len(tree)
    near = [START] * len(tree)
    for node, above in enumerate(tree.parent):
        if above != START:
            used[node], near[node] = used[above], near[above]
            if above in kept:
                near[node] = above
        cell = tree.cells[node]
        inner = bool(tree.children[node])
        if node in kept and inner:
            used[node] += cell.size
            if used[node] > room:
                return float("inf")
            # the first child goes on from it without loading
            total += cell.save - cell.load
        if not inner or node in kept:
            total += tree.load(near[node]) + tree.between(near[node], node)
    return total


def prp(tree: Tree, room: float, *, per_byte: bool = False) -> list[Step]:
    """Return the steps of Persistent Root Policy: keep what saves most, again and again.

    `per_byte` weighs the saving by size: PRP-v2; else PRP-v1.
    """
    kept: set[int] = set()
    while True:
        best, found = 0.0, None
        for node, saved in _savings(tree, kept, room):
            gain = saved / max(tree.cells[node].size, 1) if per_byte else saved
            if gain > best + 1e-12:
                best, found = gain, node
        if found is None:
            break
        kept.add(found)
    return walk(tree, lambda node, _: tree.children[node] if node in kept else ())


def _savings(tree: Tree, kept: set[int], room: float) -> Iterator[tuple[int, float]]:
    """Yield what keeping each further node saves, as the difference of two `depth_first_cost`.

    Only what lies below a node and begins from the same kept state as it changes, so one pass up
    and one down is enough where the published listing walks the whole tree for each node.
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
        if most[node] + cell.size <= room:
            once = tree.load(near[node]) + tree.between(near[node], node)
            yield node, (ends[node] - 1) * (once - cell.load) - cell.save


def parent_choice(tree: Tree, room: float, *, states: int = 200_000) -> list[Step]:
    """Return the steps of Parent Choice: each child says whether its parent is kept for it.

    Kept sets are told apart in full, as published; there are up to 2^height of them, so it gives
    up beyond `states`.
    """
    costs: dict[tuple[int, tuple[int, ...]], float] = {}
    choices: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
    order: list[tuple[int, tuple[int, ...], float]] = [(root, (), 0.0) for root in tree.roots]
    seen = {(node, kept) for node, kept, _ in order}
    for node, kept, used in order:  # grows while it is read: every situation, parents first
        cell = tree.cells[node]
        options: list[tuple[tuple[int, ...], float]] = [(kept, used)]
        if used + cell.size <= room:
            options.append(((*kept, node), used + cell.size))
        for child in tree.children[node]:
            for with_, room_used in options:
                if (child, with_) not in seen:
                    seen.add((child, with_))
                    order.append((child, with_, room_used))
        if len(order) > states:
            raise PlanError(
                f"Parent Choice looks at more than {states} situations for this tree of "
                f"{len(tree)} cells. Use the exact planner, which does not need them.",
                slug="parent-choice",
            )
    for node, kept, used in reversed(order):
        near = kept[-1] if kept else START
        below, cell = tree.children[node], tree.cells[node]
        if not below:
            costs[node, kept] = tree.load(near) + tree.between(near, node)
            continue
        more = (*kept, node)
        if used + cell.size > room:
            costs[node, kept] = sum(costs[child, kept] for child in below)
            choices[node, kept] = ()
            continue
        wanted = tuple(c for c in below if costs[c, more] <= costs[c, kept])
        choices[node, kept] = wanted
        costs[node, kept] = sum(min(costs[c, more], costs[c, kept]) for c in below)
        if wanted:
            # the listing leaves out what it takes to compute the node that is kept
            once = tree.load(near) + tree.between(near, node) + cell.save - cell.load
            costs[node, kept] += once
    return walk(tree, lambda node, kept: choices.get((node, kept), ()))


def lfu(tree: Tree, room: float) -> list[Step]:
    """Return the steps of the least-frequently-used cache: version by version, in their order.

    What is kept is worth its uses times the cells below it over its size; the least worthy goes.
    """
    below = tree.subtree()
    uses = [0] * len(tree)
    held: set[int] = set()
    used = 0.0
    steps: list[Step] = []

    def worth(node: int) -> float:
        return uses[node] * below[node] / max(tree.cells[node].size, 1)

    done: set[int] = set()
    leaves = set(tree.leaves)
    for leaf in [n for n in dict.fromkeys(tree.versions) if n in leaves] or tree.leaves:
        path = tree.path(START, leaf)
        first = max((i + 1 for i, n in enumerate(path) if n in held), default=0)
        first = min(first, len(path) - 1)
        steps.append((Do.GO_BACK, path[first - 1] if first else START))
        if first and path[first - 1] in held:
            uses[path[first - 1]] += 1
        for node in path[first:]:
            steps.append((Do.COMPUTE, node))
            uses[node] += 1
            size = tree.cells[node].size
            if not tree.children[node] or size > room or node in held:
                continue
            worse = sorted((n for n in held if worth(n) < worth(node)), key=worth)
            if used + size - sum(tree.cells[n].size for n in worse) > room:
                continue
            while used + size > room:
                dropped = worse.pop(0)
                held.discard(dropped)
                used -= tree.cells[dropped].size
                steps.append((Do.DROP, dropped))
            held.add(node)
            used += size
            steps.append((Do.KEEP, node))
        done.add(leaf)
    return steps
