"""What planning is told of checkpoints."""

from rearview.backfill.facts_and_segments import checkpoint_facts
from rearview.model import Checkpoint, CheckpointMeta, LoopStep, ObjectRef, Point, Step

MB = 1_000_000


def checkpoint(seq, edge, nbytes, stored, site="train.py:epoch"):
    steps = (Step("epoch", seq),) + ((Step("batch", 8),) if edge == "end" else ())
    meta = CheckpointMeta(path=(LoopStep(site, 0, seq),))
    parts = {"all": ObjectRef("0" * 64, nbytes)}
    return Checkpoint(f"r/{seq}", "r", seq, Point(steps), edge, parts, meta=meta, stored=stored)


def read(*checkpoints):
    return [one.nbytes // MB for one in checkpoint_facts("train.py:epoch", checkpoints)]


def test_an_unchanged_object_is_read_once():
    run = [
        checkpoint(0, "end", 430 * MB, 430 * MB),
        checkpoint(1, "start", 430 * MB, 0),
        checkpoint(2, "end", 430 * MB, 30 * MB),
        checkpoint(3, "start", 430 * MB, 1 * MB),
    ]
    assert read(*run) == [430, 430, 30, 31]


def test_bytes_that_another_run_had_stored_are_read_like_others():
    run = [checkpoint(k, "end", 430 * MB, 0) for k in range(3)]
    assert read(*run) == [430, 430, 430]


def test_checkpoints_of_other_loops_are_left_out():
    other = checkpoint(0, "end", 5 * MB, 5 * MB, site="train.py:fold")
    assert read(other, checkpoint(1, "end", 5 * MB, 2 * MB)) == [5]
