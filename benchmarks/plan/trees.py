"""Replaying versions as one tree: what each planner's order costs against the best one, and how
often that one is proved to be the best.

Trees are drawn as CHEX draws its synthetic ones: most nodes have one child, branches come with a
probability of one half, costs and sizes vary over a decade. The room is a share of the largest sum
of sizes on one path.
"""

import math
import random
import statistics
import time

from rearview.plan.versions.best_order import order
from rearview.plan.versions.tree import START, Cell, Tree

PLANNERS = ("LFU", "PRP-v1", "PRP-v2", "PC", "dynamic program", "beam")
PER_SIZE, SECONDS = 12, 2.0


def tree(draw, count):
    parent = [START]
    open_ = [0]
    while len(parent) < count:
        above = open_.pop(draw.randrange(len(open_)))
        for _ in range(2 if draw.random() < 0.5 else 1):
            if len(parent) < count:
                parent.append(above)
                open_.append(len(parent) - 1)
    cells = [
        Cell(str(i), "", draw.uniform(1, 10), draw.randint(10, 100)) for i in range(len(parent))
    ]
    return Tree.of(parent, cells)


def main():
    draw = random.Random(11)
    print(
        "| cells | room | proved best | median gap of the rest | seconds | "
        + " | ".join(PLANNERS)
        + " |"
    )
    print("|---|---|---|---|---|" + "---|" * len(PLANNERS))
    for count in (20, 40, 70):
        for share in (0.1, 0.3):
            proved, gaps, took = 0, [], []
            over = {name: [] for name in PLANNERS}
            for _ in range(PER_SIZE):
                one = tree(draw, count)
                most = max(
                    sum(one.cells[n].size for n in one.path(START, leaf)) for leaf in one.leaves
                )
                begin = time.process_time()
                end = begin + SECONDS
                found = order(
                    one,
                    share * most,
                    patience=10**9,
                    may_continue=lambda end=end: time.process_time() < end,
                )
                took.append(time.process_time() - begin)
                if found.gap < 1e-9:
                    proved += 1
                else:
                    gaps.append(found.gap)
                for name in PLANNERS:
                    over[name].append(found.tried.get(name, float("nan")) / found.seconds)
            gap = f"{statistics.median(gaps):.1%}" if gaps else "none"
            row = " | ".join(
                f"{statistics.mean(v for v in over[name] if not math.isnan(v)):.3f}"
                for name in PLANNERS
            )
            print(
                f"| {count} | {share:.0%} | {proved} of {PER_SIZE} | {gap} | {statistics.median(took):.2f} | {row} |"
            )


if __name__ == "__main__":
    main()
