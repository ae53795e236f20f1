"""Replay cost of CHEX's planners and ours over cache sizes, on trees drawn by the tables of the paper.

The paper's trees are not published; these have the numbers of its tables 1 and 2: versions, lengths,
ranges of cell costs and sizes, and for the six applications also the sums.

    python benchmarks/multiversion/planners.py [CI DI AN ML1 ML2 ML3 ML4 SC1 SC2]
"""

import random
import statistics
import sys
import time

from rearview.plan.versions.best_order import order
from rearview.plan.versions.search import search
from rearview.plan.versions.tree import START, Cell, Do, Tree, check

GB = 10**9
PLANNERS = ("LFU", "PRP-v1", "PRP-v2", "PC")


def draw_shape(draw, versions, length, factor, first_branch=0):
    """Return parents and depths of a tree with so many leaves: branches come with probability 1/2."""
    while True:
        parent, depth, level = [START], [0], [0]
        for _ in range(length - 1):
            below = []
            for node in level:
                wide = factor if depth[node] >= first_branch else 1
                count = max(1, sum(draw.random() < 0.5 for _ in range(wide)))
                for _ in range(count):
                    parent.append(node)
                    depth.append(depth[node] + 1)
                    below.append(len(parent) - 1)
            level = below
        if len(level) >= versions:
            return prune(draw, parent, depth, level, versions)


def prune(draw, parent, depth, leaves, versions):
    """Keep `versions` leaves and what leads to them."""
    kept = set()
    for leaf in draw.sample(leaves, versions):
        node = leaf
        while node != START and node not in kept:
            kept.add(node)
            node = parent[node]
    order_ = sorted(kept)
    number = {node: i for i, node in enumerate(order_)} | {START: START}
    return [number[parent[node]] for node in order_], [depth[node] for node in order_]


def synthetic(kind, seed):
    """Table 2: 20 versions, at most 6 cells, at most 4 branches."""
    draw = random.Random(f"{kind}{seed}")
    parent, depth = draw_shape(draw, 20, 6, 4)
    cells = []
    for i, level in enumerate(depth):
        rising = (level + draw.random()) / 6
        seconds = {"CI": draw.uniform(100, 600), "DI": 100.0, "AN": 100 + 500 * rising}[kind]
        size = {"CI": 0.5, "DI": draw.uniform(0.1, 0.6), "AN": 0.1 + 0.5 * rising}[kind]
        cells.append(Cell(str(i), "", seconds, int(size * GB)))
    return Tree.of(parent, cells)


# table 1: versions, length, seconds in all, longest cell, GB in all, smallest and largest state,
# and where most of the computing is (section 7.1.1)
APPLICATIONS = {
    "ML1": (25, 11, 33390, 1073, 57, (0.2, 1.8), "early"),
    "ML2": (24, 9, 298, 8.5, 37, (0.2, 0.38), "even"),
    "ML3": (32, 8, 2127, 50, 106, (0.4, 2.0), "early"),
    "ML4": (36, 17, 10696, 240, 566, (1.3, 11.0), "late"),
    "SC1": (12, 18, 7126, 926, 13, (0.077, 0.1), "last"),
    "SC2": (23, 33, 10826, 224, 14, (0.04, 0.05), "early"),
}


def application(name):
    versions, length, total, longest, _, (small, large), where = APPLICATIONS[name]
    draw = random.Random(name)
    first = {"early": length // 2, "even": length // 3, "late": length // 4, "last": length // 3}[
        where
    ]
    factor, mean = (3, 1.625) if length < 20 else (2, 1.25)
    while first and mean ** (length - 1 - first) < versions:
        first -= 1  # else a tree with so many leaves hardly ever comes up, or never
    parent, depth = draw_shape(draw, versions, length, factor, first)
    weight = []
    for level in depth:
        share = level / (length - 1)
        heavy = {
            "early": 1.0 if share < 0.55 else 0.1,
            "even": 0.5,
            "late": 1.0 if share > 0.6 else 0.1,
            "last": 1.0 if level == length - 1 else 1e-4,
        }[where]
        weight.append(heavy * draw.random() ** 2)
    alone = Tree.of(parent, [Cell(str(i), "", w, 1) for i, w in enumerate(weight)]).one_by_one
    seconds = [min(longest, w * total / alone) for w in weight]
    sizes = [
        small + (large - small) * (level / length * 0.7 + 0.3 * draw.random()) for level in depth
    ]
    cells = [
        Cell(str(i), "", s, int(z * GB))
        for i, (s, z) in enumerate(zip(seconds, sizes, strict=True))
    ]
    return Tree.of(parent, cells)


def planned(tree, room):
    begin = time.process_time()
    end = begin + 0.8  # as `rearview replay` has it
    found = order(tree, room, patience=10**9, may_continue=lambda: time.process_time() < end)
    return found, time.process_time() - begin


def rows(name, trees, rooms, label):
    for room, text in zip(rooms, label, strict=True):
        shares = {planner: [] for planner in (*PLANNERS, "ours", "bound")}
        took, above = [], 0
        for tree in trees:
            size = room(tree) if callable(room) else room
            found, seconds = planned(tree, size)
            took.append(seconds)
            for planner in PLANNERS:
                if planner in found.tried:
                    shares[planner].append(100 * found.tried[planner] / tree.one_by_one)
            shares["ours"].append(100 * found.seconds / tree.one_by_one)
            shares["bound"].append(100 * found.bound / tree.one_by_one)
            above += any(found.seconds > cost + 1e-6 for cost in found.tried.values())
        values = " | ".join(f"{statistics.mean(v):.1f}" if v else "-" for v in shares.values())
        print(f"| {name} | {text} | {values} | {max(took):.2f} | {above} |", flush=True)


def head(first):
    print(
        f"| {first} | cache | {' | '.join(PLANNERS)} | ours | no order below | slowest plan, CPU s | ours above |"
    )
    print("|---|---|" + "---:|" * 8)


def versions_in_time(tree):
    """Figure 11: versions replayed after so many seconds."""
    marks = [2500, 5000, 7500, 10000, 15000, 20000]
    print("\n| cache | " + " | ".join(f"{m} s" for m in marks) + " |")
    print("|---|" + "---:|" * len(marks))
    for room in (0, 0.25, 0.5, 1.0):
        found, _ = planned(tree, room * GB)
        at, ends = 0.0, []
        for step in found.steps:
            if step.do is Do.COMPUTE:
                at += tree.cells[step.node].seconds
                if not tree.children[step.node]:
                    ends.append(at)
        print(
            f"| {room} GB | " + " | ".join(str(sum(e <= m for e in ends)) for m in marks) + " |",
            flush=True,
        )


def known_optima(count=20):
    """Compare plans with optima that a long search proves, on random trees of 10 to 14 versions."""
    proved, excess = 0, []
    for seed in range(count):
        draw = random.Random(f"optimum {seed}")
        parent, _ = draw_shape(draw, draw.randint(10, 14), 5, 4)
        cells = [
            Cell(str(i), "", draw.uniform(1, 600), draw.randint(10**8, 6 * 10**8))
            for i in range(len(parent))
        ]
        tree, room = Tree.of(parent, cells), draw.choice([0.5, 0.7, 1.0]) * GB
        found, _ = planned(tree, room)
        end = time.process_time() + 6
        _, least = search(
            tree,
            room,
            below=found.seconds,
            patience=10**9,
            may_continue=lambda end=end: time.process_time() < end,
        )
        proved += least >= found.seconds - 1e-6
        excess.append(found.seconds / least - 1)
    print(
        f"{count} trees of 10 to 14 versions: the plan of 0.8 s is proved optimal for {proved}; "
        f"for the others it is at most {max(excess):.1%} above the optimum."
    )


def main():
    chosen = set(sys.argv[1:])
    print("Replay cost in percent of no cache; means over trees.\n")
    head("synthetic (5 trees each)")
    for kind in ("CI", "DI", "AN"):
        if chosen and kind not in chosen:
            continue
        trees = [synthetic(kind, seed) for seed in range(5)]
        sizes = [0.25, 0.5, 0.6, 1.0, 1.5, 2.0]
        rows(kind, trees, [s * GB for s in sizes], [f"{s} GB" for s in sizes])
    print()
    head("application")
    for name in APPLICATIONS:
        if chosen and name not in chosen:
            continue
        tree = application(name)
        largest = max(cell.size for cell in tree.cells)
        factors = [0.5, 1, 2, 3, 4]
        rows(name, [tree], [f * largest for f in factors], [f"{f}X" for f in factors])
    print("\nVersions of the first AN tree that are replayed after so many seconds, our order.")
    tree = synthetic("AN", 0)
    versions_in_time(tree)
    if not chosen or "optima" in chosen:
        print("\nKnown optima.")
        known_optima()
    if chosen and "500" not in chosen:
        return
    print("\nPlanning 500 cells.")
    draw = random.Random(5)
    parent, depth = [START], [0]
    while len(parent) < 500:
        recent = [i for i in range(max(0, len(parent) - 25), len(parent)) if depth[i] < 30]
        above = draw.choice(recent or [0])
        parent.append(above)
        depth.append(depth[above] + 1)
    big = Tree.of(
        parent,
        [
            Cell(str(i), "", draw.uniform(1, 600), draw.randint(10**8, 6 * 10**8))
            for i in range(500)
        ],
    )
    for room in (0.5, 1, 2, 5):
        found, seconds = planned(big, room * GB)
        assert abs(check(big, found.steps, room * GB) - found.seconds) < 1e-6
        best = min(found.tried[name] for name in PLANNERS if name in found.tried)
        print(
            f"{room} GB: {seconds:.2f} s of CPU time, proven gap {found.gap:.1%}, "
            f"{1 - found.seconds / best:.1%} below the best published order"
        )


if __name__ == "__main__":
    main()
