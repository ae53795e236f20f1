"""The order in which versions are replayed as one tree, within a bound on what is kept.

Never worse than the published planners: all of them are tried, a dynamic program covers every
depth-first order that keeps ancestors only, and a best-first search over all orders goes on from
there as long as it is let. What it has proved by then is the gap that is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from rearview.errors import PlanError
from rearview.plan.published import lfu, parent_choice, prp, walk
from rearview.plan.search import beam, search
from rearview.plan.tree import START, Step, Tree, check

WIDEST = 60
"""Leaves up to which orders other than depth-first are looked for beam by beam."""
STATES = 300_000
"""Situations that the dynamic program may look at before it counts sizes in coarser steps."""


@dataclass(frozen=True, slots=True)
class Order:
    """Steps that replay every version, what they cost and how good they are proved to be."""

    steps: tuple[Step, ...]
    seconds: float
    bound: float
    """No order can take less."""
    by: str
    """The planner that found it."""
    tried: Mapping[str, float] = field(default_factory=dict)
    """Planner -> seconds."""

    @property
    def gap(self) -> float:
        """Share of the cost that a better order could save at most."""
        return 0.0 if self.seconds <= 0 else max(0.0, 1.0 - self.bound / self.seconds)


def order(
    tree: Tree,
    room: float,
    *,
    patience: int = 20_000,
    going: Callable[[], bool] = lambda: True,
) -> Order:
    """Return the best order found for replaying a tree with `room` bytes to keep states in.

    The search ends after `patience` situations, or when `going` says so. Where a checkpoint exists
    already the tree falls apart: what lies below it is replayed from there, on its own.
    """
    parts: list[Order] = []
    steps: list[Step] = []
    for base, nodes, part in tree.parts():
        found = _order(part, room, patience, going)
        if base != START:
            # coming by, a slow checkpoint could be passed by computing: the proof allows for it
            slack = max(0.0, part.start - tree.cells[base].seconds) * len(part.leaves)
            found = replace(found, bound=max(0.0, found.bound - slack))
        parts.append(found)
        steps.extend((do, base if node == START else nodes[node]) for do, node in found.steps)
    names = set.intersection(*(set(part.tried) for part in parts)) if parts else set()
    return Order(
        tuple(steps),
        sum(part.seconds for part in parts),
        sum(part.bound for part in parts),
        " + ".join(dict.fromkeys(part.by for part in parts)),
        {name: sum(part.tried[name] for part in parts) for name in sorted(names)},
    )


def _order(tree: Tree, room: float, patience: int, going: Callable[[], bool]) -> Order:
    """Return the best order for a tree of which nothing exists yet."""
    found: dict[str, list[Step]] = {
        "PRP-v1": prp(tree, room),
        "PRP-v2": prp(tree, room, per_byte=True),
        "LFU": lfu(tree, room),
        "dynamic program": dynamic(tree, room),
    }
    if len(tree.leaves) <= WIDEST:
        found["beam"] = beam(tree, room)
    with suppress(PlanError):  # too high a tree: the dynamic program covers what it would find
        found["PC"] = parent_choice(tree, room)
    tried = {name: check(tree, steps, room) for name, steps in found.items()}
    by = min(tried, key=lambda name: (tried[name], name != "dynamic program"))
    best, seconds = found[by], tried[by]
    better, bound = search(tree, room, below=seconds, patience=patience, going=going)
    if better is not None:
        best, by, seconds = better, "search", check(tree, better, room)
    tried["search"] = seconds
    return Order(tuple(best), seconds, min(bound, seconds), by, tried)


def dynamic(tree: Tree, room: float, *, states: int = STATES) -> list[Step]:
    """Return the best depth-first steps that keep ancestors only.

    What lies below a node depends on two things: the nearest kept state above it and the room
    left. So there are nodes x height x sizes situations, not 2^height sets.
    """
    sizes = [float(cell.size) for cell in tree.cells]
    left = float(room)
    grid = 0
    while True:
        reached = _situations(tree, sizes, left, states)
        if reached is not None:
            break
        # sizes rounded up to a grid: fewer rooms to tell apart, never too much kept
        grid = grid // 4 if grid else 4096
        if grid < 4:
            return walk(tree, lambda _node, _kept: ())
        sizes = [float(-(-cell.size * grid // max(room, 1))) for cell in tree.cells]
        left = float(grid)
    costs: dict[tuple[int, int, float], float] = {}
    choices: dict[tuple[int, int, float], tuple[int, ...]] = {}
    for node in range(len(tree) - 1, -1, -1):
        below, cell = tree.children[node], tree.cells[node]
        for near, free in reached[node]:
            key = (node, near, free)
            once = tree.load(near) + tree.between(near, node)
            if not below:
                costs[key] = once
            else:
                without = [costs[child, near, free] for child in below]
                costs[key], choices[key] = sum(without), ()
                rest = free - sizes[node]
                if rest >= 0:
                    with_ = [costs[child, node, rest] for child in below]
                    kept = once + cell.save - cell.load
                    kept += sum(map(min, zip(with_, without, strict=True)))
                    wanted = tuple(
                        c for c, a, b in zip(below, with_, without, strict=True) if a < b
                    )
                    if wanted and kept < costs[key]:
                        costs[key], choices[key] = kept, wanted

    def choose(node: int, kept: tuple[int, ...]) -> tuple[int, ...]:
        free = left - sum(sizes[n] for n in kept)
        return choices.get((node, kept[-1] if kept else START, free), ())

    return walk(tree, choose)


def _situations(
    tree: Tree, sizes: list[float], room: float, limit: int
) -> list[set[tuple[int, float]]] | None:
    """Return, for each node, (nearest kept state, room left) that may hold when it is come to."""
    reached: list[set[tuple[int, float]]] = [set() for _ in range(len(tree))]
    count = 0
    for node, above in enumerate(tree.parent):
        if above == START:
            reached[node] = {(START, room)}
        else:
            for near, free in reached[above]:
                reached[node].add((near, free))
                if free >= sizes[above]:
                    reached[node].add((above, free - sizes[above]))
        count += len(reached[node])
        if count > limit:
            return None
    return reached
