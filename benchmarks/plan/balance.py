"""How evenly plans load 4, 16 and 64 workers: bounds over the planned time.

`of its segments`: the time that no order of these very segments can beat. `of any plan`: the time
that no plan can beat, since work is never cut between checkpoints. `of perfect`: the whole work
spread evenly, without a second start, which no plan can reach.

Segments come from runs whose iterations vary as measured training does: a drift, noise, and now
and then a slow one.
"""

import random

from rearview.model import Point, Step
from rearview.plan.divide_work import divide, lower_bound, schedule, shortest_possible
from rearview.plan.facts import CheckpointFacts, LoopFacts, RunFacts, RunQuestion, ValueRequest
from rearview.plan.survey_work import survey

DEEP = ValueRequest(("n",), ("epoch", "step"))


def facts(draw, name, epochs, every):
    base = draw.uniform(2.0, 60.0)
    seconds = [
        base
        * (1 + 0.002 * k)
        * draw.lognormvariate(0, 0.08)
        * (3.0 if draw.random() < 0.02 else 1.0)
        for k in range(epochs)
    ]
    points = tuple(
        CheckpointFacts(f"{name}-{k}", Point((Step("epoch", k),)), nbytes=500_000_000)
        for k in range(every, epochs, every)
    )
    loops = (LoopFacts("epoch", seconds), LoopFacts("step", seconds, [100] * epochs))
    return RunFacts(name, name, loops, start=4.0, setup=draw.uniform(1, 20), checkpoints=points)


def main():
    draw = random.Random(7)
    cases = {
        "one run, 200 epochs": [facts(draw, "a", 200, 1)],
        "one run, checkpoint every 5": [facts(draw, "b", 200, 5)],
        "10 runs": [
            facts(draw, f"c{i}", draw.randint(20, 200), draw.choice([1, 2, 5])) for i in range(10)
        ],
        "300 runs": [
            facts(draw, f"d{i}", draw.randint(5, 100), draw.choice([1, 2, 5])) for i in range(300)
        ],
    }
    print(
        "| history | workers | segments | hours of computing | minutes planned | of its segments | of any plan | of perfect |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, runs in cases.items():
        work = survey([RunQuestion(run, (DEEP,)) for run in runs])
        alone = divide(work).seconds
        for workers in (4, 16, 64):
            seconds = [segment.seconds for segment in divide(work, workers=workers).segments]
            taken = schedule(seconds, workers).seconds
            print(
                f"| {name} | {workers} | {len(seconds)} | {sum(seconds) / 3600:.2f} | {taken / 60:.1f} "
                f"| {lower_bound(seconds, workers) / taken:.3f} | {shortest_possible(work, workers) / taken:.3f} | {alone / workers / taken:.3f} |"
            )


if __name__ == "__main__":
    main()
