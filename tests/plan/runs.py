"""Runs to plan for, in few words."""

from rearview.model import Point, Step
from rearview.plan.facts import CheckpointFacts, LoopFacts, RunFacts


def checkpoint(name, epoch, step=None, *, edge="start", complete=True, restore=1.0, nbytes=10):
    steps = (Step("epoch", epoch),) + (() if step is None else (Step("step", step),))
    return CheckpointFacts(name, Point(steps), edge, complete, nbytes, restore)


def run(seconds, checkpoints=(), *, inner=None, counts=None, name="r", **more):
    loops = (LoopFacts("epoch", seconds),)
    if inner is not None:
        loops += (LoopFacts("step", inner, counts or [10] * len(seconds)),)
    return RunFacts(
        name,
        f"v-{name}",
        loops,
        **{"start": 1.0, "setup": 2.0, **more},
        checkpoints=tuple(checkpoints),
    )


def starts(*epochs, **more):
    return [checkpoint(f"s{k}", k, **more) for k in epochs]


def ends(*epochs, **more):
    return [checkpoint(f"e{k}", k, 10, edge="end", **more) for k in epochs]
