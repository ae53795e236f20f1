"""The checkpoints sent to a node are exactly those that its replay can reach."""

from rearview.execute.ray_files import CheckpointUse, reachable_checkpoints
from rearview.model import Checkpoint, CheckpointMeta, LoopStep, Point, SegmentFile

EPOCH = "train.py:<module>:0:epoch"
STEP = "train.py:<module>:1:step"


def checkpoint(seq, path, edge="start", *, complete=True):
    return Checkpoint(
        f"r/{seq}",
        "r",
        seq,
        Point(()),
        edge,
        {},
        complete,
        meta=CheckpointMeta(path=tuple(path)),
    )


def epoch(index):
    return LoopStep(EPOCH, 0, index)


def step(index):
    return LoopStep(STEP, 0, index)


def wanted(first, last, **more):
    return SegmentFile(
        "r", "p", "", chains=[[EPOCH, STEP]], main=EPOCH, ranges={EPOCH: [(first, last)]}, **more
    )


def uses(segment, checkpoints):
    return {
        entry.checkpoint.seq: entry.use.value
        for entry in reachable_checkpoints(segment, checkpoints)
    }


EVERY_SECOND = [checkpoint(k, [epoch(k)]) for k in range(0, 12, 2)]
LAST = checkpoint(99, [epoch(12)], "end")


def test_a_replay_reads_the_nearest_checkpoint_and_those_up_to_the_next_proof():
    found = uses(wanted(5, 7), [*EVERY_SECOND, LAST])
    assert found == {0: "anchors", 4: "restored", 6: "compared", 8: "compared", 99: "compared"}


def test_a_value_requested_after_the_loop_restores_the_end_of_the_loop():
    assert uses(wanted(5, 7, after=True), [*EVERY_SECOND, LAST])[99] == "restored"


def test_a_replay_from_the_start_compares_with_everything_on_its_way():
    found = uses(wanted(5, 7, jump=False), EVERY_SECOND)
    assert found == dict.fromkeys((0, 2, 4, 6, 8), "compared")


def test_without_a_jump_into_the_outermost_loop_a_replay_runs_from_the_first_iteration():
    assert uses(wanted(5, 7, levels=0), EVERY_SECOND) == dict.fromkeys((0, 2, 4, 6, 8), "compared")


def test_single_iterations_each_begin_at_their_own_nearest():
    asked = SegmentFile(
        "r", "p", "", everywhere=True, main=EPOCH, ranges={EPOCH: [(3, 4), (9, 10)]}
    )
    found = uses(asked, EVERY_SECOND)
    assert found == {0: "anchors", 2: "restored", 4: "compared", 8: "restored", 10: "compared"}


def test_inner_loops_that_are_passed_by_are_restored_where_they_end():
    ends = [checkpoint(50 + k, [epoch(k), step(3)], "end") for k in range(12)]
    asked = SegmentFile("r", "p", "", chains=[[EPOCH]], main=EPOCH, ranges={EPOCH: [(5, 7)]})
    found = uses(asked, [*EVERY_SECOND, *ends])
    assert {seq: use for seq, use in found.items() if seq >= 50} == dict.fromkeys(
        (54, 55, 56, 57, 58), "restored"
    )
    inner = uses(wanted(5, 7), [*EVERY_SECOND, *ends])
    assert inner[55] == inner[56] == "compared"
    assert inner[54] == "restored"  # iteration 4 is on the way, not wanted


def test_a_loop_that_is_not_divided_is_taken_whole():
    other = [checkpoint(70 + k, [LoopStep("train.py:1:warm", 0, k)]) for k in range(3)]
    found = uses(wanted(5, 7), [*other, *EVERY_SECOND])
    assert [found[70 + k] for k in range(3)] == ["compared"] * 3


def test_a_partial_checkpoint_is_never_restored():
    partial = checkpoint(4, [epoch(4)], complete=False)
    found = reachable_checkpoints(wanted(4, 5), [EVERY_SECOND[1], partial])
    assert [entry.use for entry in found] == [CheckpointUse.RESTORED, CheckpointUse.COMPARED]
