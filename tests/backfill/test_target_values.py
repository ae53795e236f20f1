"""`--at` goes by what a loop's target held, wherever that could be seen."""

import pytest

from plainly import recorded, write
from rearview._history import history

pytestmark = pytest.mark.usefixtures("warm_start")

BODY = """
        total += 1
        time.sleep(0.003)
        rearview.log("n", total)
"""


def asked(folder, head, inner, at, *, refused=False):
    """Record two loops, ask for `x` in some iterations, and return where it was filled."""
    text = f"import time, rearview, random, collections\ntotal = 0\n{head}\n    {inner}{BODY}"
    write(folder, train=text)
    assert recorded(folder, "train.py").code == 0
    probed = text.replace("time.sleep(0.003)", 'time.sleep(0.003); rearview.log("x", total)')
    write(folder, train=probed)
    plan = history(folder).plan(["x"], at=at)
    if refused:
        return plan.refusals[0].reason
    assert not plan.refusals
    report = history(folder).backfill(["x"], at=at)
    assert report.proved, report.proof
    return [row["n"] for row in history(folder).table("n", "x") if row["x"] is not None]


STEPS = "for step in range(2):"
NAMED = "for name in ['a', 'b', 'c']:"


@pytest.mark.parametrize(
    ("head", "inner", "at", "where"),
    [
        ("for lr in [0.1, 0.01, 0.001]:", STEPS, "lr=0.01", [3, 4]),
        ("for lr in [0.1, 0.01, 0.001]:", STEPS, "lr=:0.1", [3, 4, 5, 6]),
        (NAMED, STEPS, "name=b", [3, 4]),
        ("for name in ('a', 'b', 'a'):", STEPS, "name=a", [1, 2, 5, 6]),
        ("for file in ['d/a.txt', 'd/b.txt']:", STEPS, "file='d/b.txt'/step=1", [4]),
        ("for fold in ['1', '2']:", STEPS, "fold=2", [3, 4]),
        ("for size in [64, 32]:", STEPS, "size=32", [3, 4]),
        ("for name, deep in {'a': 1, 'b': 2}.items():", STEPS, "name=b", [3, 4]),
        ("for name, deep in zip('ab', (1, 2)):", STEPS, "name=b", [3, 4]),
        ("for epoch in range(2):", NAMED, "name=b", [2, 5]),
        ("for epoch in range(2):", NAMED, "epoch=1/name=b", [5]),
        ("for epoch in range(2):", "for lr in [0.1, 0.01]:", "lr=0.01", [2, 4]),
    ],
)
def test_iterations_are_named_by_the_value_of_the_loop_target(tmp_path, head, inner, at, where):
    assert asked(tmp_path, head, inner, at) == where


def test_loop_values_that_cannot_be_shown_are_selected_by_index(tmp_path):
    head = "for thing in [collections.OrderedDict(), collections.OrderedDict()]:"
    assert asked(tmp_path, head, STEPS, "thing=1") == [3, 4]


def test_a_target_that_holds_something_else_each_time_leaves_nothing_out(tmp_path):
    inner = "for key in [3 - epoch, 4 + epoch]:"
    found = asked(tmp_path, "for epoch in range(3):", inner, "key=1")
    assert 5 in found, "the third time it began with 1"


def test_a_range_that_begins_elsewhere_each_time_leaves_nothing_out(tmp_path):
    found = asked(tmp_path, "for epoch in range(3):", "for step in range(epoch, 3):", "step=2")
    assert {3, 5, 6} <= set(found)


def test_a_missing_loop_value_is_refused_with_the_values_it_had(tmp_path):
    head = "for lr in [0.1, 0.01]:"
    said = asked(tmp_path, head, STEPS, "lr=0.5", refused=True)
    assert said.endswith("has no iteration lr=0.5: it has 2: 0.1, 0.01")
