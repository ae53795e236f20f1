"""A predicate on an inner loop chooses inner iterations, and never leaves out what it asks for."""

import pytest

from plainly import recorded, write
from rearview._history import history

pytestmark = pytest.mark.usefixtures("warm_start")

SCRIPT = """
import time
import rearview

total = 0
for epoch in range(3):
    for step in range(10):
        total += 1
        time.sleep(0.002)
        if step % 2 == 0:
            rearview.log("loss", total)
    for test in range(4):
        total += 1
    rearview.log("acc", epoch)
"""
INNER = "        time.sleep(0.002)\n"


@pytest.fixture
def past(tmp_path):
    write(tmp_path, train=SCRIPT)
    assert recorded(tmp_path, "train.py").code == 0
    write(tmp_path, train=SCRIPT.replace(INNER, f'{INNER}        rearview.log("x", total)\n'))
    return history(tmp_path)


def where_filled(past, name="x"):
    rows = past.sql(
        f"SELECT indices FROM records WHERE name = '{name}' AND (origin = 'recorded' OR replay IS NOT NULL)"
    )
    return sorted({tuple(row["indices"]) for row in rows})


@pytest.mark.parametrize(
    ("where", "points"),
    [
        # iterations of which nothing is recorded count as chosen beside one that is
        ("step = 4 and epoch = 1", [(1, 3), (1, 4), (1, 5)]),
        ("loss between 19 and 21", [(1, 3), (1, 4), (1, 5), (1, 6), (1, 7)]),
        ("step > 7", [(k, i) for k in range(3) for i in (7, 8, 9)]),
        # the stretch of one iteration does not widen that of another
        ("loss in (1, 21)", [(0, 0), (0, 1), (1, 5), (1, 6), (1, 7)]),
        ("acc = 2", [(2, i) for i in range(10)]),
    ],
)
def test_only_the_stretches_that_are_chosen_are_filled(past, where, points):
    plan = past.plan(["x"], where=where)
    assert plan.missing.cells == len(points)
    report = past.backfill(["x"], where=where, plan=plan)
    assert report.proved, report.proof
    assert where_filled(past) == points
    assert past.plan(["x"], where=where).nothing


def test_rows_left_out_by_a_condition_are_filled_when_requested(past):
    past.backfill(["x"], where="step > 7")
    assert past.plan(["x"], where="step > 8").nothing
    assert not past.plan(["x"], where="step > 5").nothing
    assert not past.plan(["x"], at="epoch=1").nothing
    past.backfill(["x"], where="step > 5 and epoch = 1")
    assert (1, 6) in where_filled(past)
    assert past.backfill(["x"]).proved
    assert where_filled(past) == [(k, i) for k in range(3) for i in range(10)]
    assert past.plan(["x"], where="step = 2").nothing


def test_both_a_predicate_and_iterations_may_be_given(past):
    past.backfill(["x"], where="step > 3", at="epoch=1/step=0:6")
    assert where_filled(past) == [(1, 3), (1, 4), (1, 5)]
    assert not past.plan(["x"], at="epoch=1/step=0:6").nothing
    assert past.plan(["x"], where="step > 3", at="epoch=1/step=0:6").nothing


def test_values_logged_in_another_loop_are_filled_in_whole_iterations(past, tmp_path):
    added = '    for test in range(4):\n        rearview.log("y", total)\n'
    write(tmp_path, train=SCRIPT.replace("    for test in range(4):\n", added))
    report = history(tmp_path).backfill(["y"], where="step = 4 and epoch = 1")
    assert report.proved, report.proof
    assert where_filled(past, "y") == [(1, i) for i in range(4)]


def test_less_is_computed_than_for_whole_iterations(past):
    some = past.plan(["x"], where="step = 4 and epoch = 1").plan
    whole = past.plan(["x"], where="epoch = 1").plan
    assert some.segments[0].inner == (("train.py:<module>:1:step", 3, 6),)
    assert some.seconds < whole.seconds
