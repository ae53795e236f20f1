"""Planning over a long history: CPU seconds to plan 1,000 versions of 200 epochs, by kind of probe."""

import statistics
import time

from rearview.model import Point, Step
from rearview.plan.divide_work import divide
from rearview.plan.facts import CheckpointFacts, LoopFacts, RunFacts, RunQuestion, ValueRequest
from rearview.plan.survey_work import survey

VERSIONS, EPOCHS, STEPS = 1000, 200, 400
KINDS = {
    "set-up": ValueRequest(("n",), (), place="before"),
    "outer loop": ValueRequest(("n",), ("epoch",), place="after"),
    "after the loop": ValueRequest(("n",), (), place="after"),
    "inner loop": ValueRequest(("n",), ("epoch", "step")),
}


def facts(number):
    ends = tuple(
        CheckpointFacts(f"{number}-{k}-{edge}", Point(steps), edge, nbytes=100_000_000)
        for k in range(EPOCHS)
        for edge, steps in (
            ("start", (Step("epoch", k),)),
            ("end", (Step("epoch", k), Step("step", STEPS))),
        )
    )
    epoch = 30.0 + number % 7
    return RunFacts(
        f"run{number}",
        f"version{number}",
        (
            LoopFacts("epoch", [epoch] * EPOCHS),
            LoopFacts("step", [epoch - 2.0] * EPOCHS, [STEPS] * EPOCHS),
        ),
        start=3.0,
        setup=5.0,
        checkpoints=ends,
    )


def main():
    runs = [facts(number) for number in range(VERSIONS)]
    print(
        f"| probe | workers | segments | CPU seconds to plan ({VERSIONS} versions x {EPOCHS} epochs) |"
    )
    print("|---|---|---|---|")
    for kind, wanted in KINDS.items():
        for workers in (1, 64):
            questions = [RunQuestion(run, (wanted,)) for run in runs]
            took = []
            for _ in range(5):
                begin = time.process_time()
                plan = divide(survey(questions), workers=workers)
                took.append(time.process_time() - begin)
            print(f"| {kind} | {workers} | {len(plan.segments)} | {statistics.median(took):.2f} |")


if __name__ == "__main__":
    main()
