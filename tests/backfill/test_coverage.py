"""What was filled is not filled again; what was filled in part is not taken for whole."""

import shutil

import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.backfill.coverage import is_superseded
from rearview.model import ReplayReport, ReplayStart
from rearview.store.runs import Replay, Runs

pytestmark = pytest.mark.usefixtures("warm_start")

SCRIPT = """
w = 1.0
for epoch in range(4):
    for step in range(4 - epoch):
        w = w * 0.9 + step
print(w)
"""
LOOP, END = "        w = w * 0.9 + step\n", "print(w)\n"


def probed(folder, *, step='rearview.log("w", w)', after=""):
    text = SCRIPT.replace(LOOP, f"{LOOP}        {step}\n").replace(END, f"{after}\n{END}")
    (folder / "train.py").write_text("import rearview\n" + text)


def steps(past, name="w"):
    """Return the points that have a value, each once, and how many values there are in all."""
    found = [
        row["indices"]
        for row in past.sql(
            f"SELECT indices FROM records WHERE name = '{name}' AND (origin = 'recorded' OR replay IS NOT NULL)"
        )
    ]
    return sorted({tuple(one) for one in found}), len(found)


@pytest.fixture
def past(tmp_path):
    write(tmp_path, train=SCRIPT)
    assert recorded(tmp_path, "train.py").code == 0
    probed(tmp_path)
    return history(tmp_path)


EVERY = [(epoch, step) for epoch in range(4) for step in range(4 - epoch)]


def test_steps_that_were_left_out_are_filled_when_they_are_asked_for(past):
    past.backfill(["w"], at="epoch=1/step=0:1")
    assert steps(past)[0] == [(1, 0)]
    assert past.plan(["w"], at="epoch=1/step=0:1").nothing
    assert past.plan(["w"], at="epoch=1/step=0").nothing
    past.backfill(["w"], at="epoch=1")
    assert steps(past)[0] == [(1, 0), (1, 1), (1, 2)]
    past.backfill(["w"])
    assert steps(past)[0] == EVERY
    assert past.plan(["w"]).nothing


def test_an_inner_loop_without_an_end_runs_to_its_end_in_each_iteration(past):
    past.backfill(["w"], at="step=1:")
    assert steps(past)[0] == [point for point in EVERY if point[1] >= 1]
    again = past.plan(["w"], at="step=1:")
    assert again.nothing
    assert not again.refusals


def test_values_logged_after_the_loop_are_filled_once(past, tmp_path):
    probed(tmp_path, after='rearview.log("end", w)')
    assert past.backfill(["end"]).proved
    assert past.plan(["end"]).nothing


def test_another_statement_does_not_make_a_filled_column_run_again(past, tmp_path):
    assert past.backfill(["w"]).proved
    probed(tmp_path, after='half = w / 2\nrearview.log("end", half)')
    past = history(tmp_path)
    assert past.plan(["w"]).nothing
    both = past.plan(["w", "end"])
    assert [each.request.names for each in both.prepared.values()] == [("end",)]


def test_a_statement_that_logs_another_value_fills_the_column_again(past, tmp_path):
    assert past.backfill(["w"]).proved
    probed(tmp_path, step='rearview.log("w", w * 2)')
    past = history(tmp_path)
    assert past.backfill(["w"]).written == len(EVERY)
    values = [row["w"] for row in past.table("w")]
    w = 1.0
    for (_, step), value in zip(EVERY, values, strict=True):
        w = w * 0.9 + step
        assert value == w * 2


def filled(folder, text, *, at):
    """Record a program, log `w` in its inner loop afterwards, and have that filled in some places."""
    write(folder, train=text)
    assert recorded(folder, "train.py").code == 0
    probe = '        rearview.log("w", w)\n'
    (folder / "train.py").write_text("import rearview\n" + text.replace(LOOP, LOOP + probe))
    past = history(folder)
    past.backfill(["w"], at=at)
    return past


@pytest.mark.parametrize("numbers", ["range(1, 5)", "enumerate('abcd', 1)"])
def test_an_inner_iteration_is_named_by_the_count_of_its_loop(tmp_path, numbers):
    target = "step, _" if "enumerate" in numbers else "step"
    text = SCRIPT.replace("step in range(4 - epoch)", f"{target} in {numbers}")
    past = filled(tmp_path, text, at="epoch=2/step=1:3")
    assert [(row["epoch"], row["step"]) for row in past.table("w")] == [(2, 1), (2, 2)]


def test_an_outer_loop_over_an_enumeration_is_named_by_its_count(tmp_path):
    text = SCRIPT.replace("epoch in range(4)", "epoch, _ in enumerate('abcd', 1)").replace(
        "range(4 - epoch)", "range(3)"
    )
    past = filled(tmp_path, text, at="epoch=1")
    assert {row["epoch"] for row in past.table("w")} == {1}


@pytest.mark.parametrize(
    "value",
    ["1 / (epoch - 2)", "(lambda: 1 / (epoch - 2))()"],
    ids=["only computes", "may draw"],
)
def test_a_statement_that_raises_is_named_with_its_line_and_iteration(past, tmp_path, value):
    probed(tmp_path, step=f'rearview.log("ratio", {value})')
    (outcome,) = history(tmp_path).backfill(["ratio"]).outcomes
    assert not outcome.proved
    assert "train.py:7 raised ZeroDivisionError" in outcome.report.error
    assert "at epoch=2/step=0" in outcome.report.error


def test_recorded_values_are_shown_while_the_source_does_not_parse(past, tmp_path):
    past.backfill(["w"])
    (tmp_path / "train.py").write_text("def broken(:\n")
    assert len(history(tmp_path).table("w").rows()) == len(EVERY)


def test_recorded_values_can_be_queried_while_versions_cannot_be_written(past, tmp_path):
    past.backfill(["w"])
    cache = tmp_path / ".rearview" / "cache" / "versions"
    shutil.rmtree(cache)
    cache.touch()  # stands in the way, as a read-only disk does, for whoever runs the tests
    past = history(tmp_path)
    assert len(past.table("w").rows()) == len(EVERY)
    (refusal,) = past.plan(["other"]).refusals
    assert "source as it is now was not written" in refusal.reason


@pytest.fixture
def bare(tmp_path):
    """A run without checkpoints, and a statement before its loop: nothing can be compared."""
    write(tmp_path, train=SCRIPT)
    assert recorded(tmp_path, "train.py", every=False, epsilon=0.0).code == 0
    (tmp_path / "train.py").write_text(
        "import rearview\n" + SCRIPT.replace("w = 1.0\n", 'w = 1.0\nrearview.log("w0", w)\n')
    )
    return history(tmp_path)


def test_a_replay_without_anything_to_compare_is_unproved_and_not_repeated(bare):
    first = bare.backfill(["w0"])
    assert (first.proved, first.written) == (False, 1)
    second = bare.plan(["w0"])
    assert (second.nothing, second.missing.cells, second.refusals) == (True, 0, [])
    assert [(one.run, one.names) for one in second.unproved] == [(bare.run().id, ("w0",))]
    assert not bare.plan(["w0"], again=True).nothing
    assert bare.backfill(["w0"], again=True).written == 1


def test_a_differing_replay_is_repeated_by_every_backfill(bare):
    (one,) = bare.backfill(["w0"]).outcomes
    report = ReplayReport(finished=True, difference="w at the start")
    Runs(bare.project).end_replay(one.run, one.replay, proved=False, report=report)
    plan = bare.plan(["w0"])
    assert not plan.nothing
    assert plan.unproved == []


def test_an_unproved_replay_is_repeated_after_the_run_was_resumed(bare, tmp_path):
    assert not bare.backfill(["w0"]).proved
    run = bare.run()
    Runs(bare.project).end(run.id, 0, run.end)
    plan = history(tmp_path).plan(["w0"])
    assert not plan.nothing
    assert plan.unproved == []


TWICE = """
import json
class Tell(json.JSONEncoder):
    def default(self, value):
        loss = value.real
        # PROBE
        return loss
def fit(loss=1.0):
    for epoch in range(3):
        loss = loss * 0.5 + epoch
        json.dumps([complex(loss)], cls=Tell)
fit()
fit()
"""
"""A loop that is entered twice, and a method that a library calls back: its callers are not known."""


def test_values_of_a_callback_in_a_loop_entered_twice_are_filled_once(tmp_path):
    write(tmp_path, train=TWICE)
    assert recorded(tmp_path, "train.py").code == 0
    text = TWICE.replace("# PROBE", 'rearview.log("asked", loss)')
    (tmp_path / "train.py").write_text("import rearview\n" + text)
    past = history(tmp_path)
    report = past.backfill(["asked"])
    assert (report.written, report.proved) == (6, True), report.proof
    assert past.plan(["asked"]).nothing


def ended(name, started, **start):
    return Replay(
        name, "run", started, started + 1, True, ReplayStart(names=("w",), **start), ReplayReport(finished=True, states=1)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("earlier", "later", "superseded"),
    [
        ({"covered": (0, 4)}, {"covered": (0, 4)}, True),
        ({"covered": (0, 4)}, {"covered": (0, 3)}, False),
        ({"only": (1, 3)}, {"covered": (0, 4)}, True),
        ({"covered": (0, 4), "head": True}, {"covered": (0, 4)}, False),
        ({"covered": (0, 4), "version": "a"}, {"covered": (0, 4), "version": "b"}, False),
        (
            {"covered": (0, 4), "version": "a", "same": {"w": "x"}},
            {"covered": (0, 4), "version": "b", "same": {"w": "x"}},
            True,
        ),
        ({"covered": (0, 4), "same": {"w": "x"}}, {"covered": (0, 4), "same": {"w": "y"}}, False),
        (
            {"covered": (0, 4)},
            {"covered": (0, 4), "inner": {"step": {1: (0, 3)}}},
            False,
        ),
    ],
)
def test_a_replay_is_superseded_by_one_that_covers_it_and_logs_the_same(earlier, later, superseded):
    replays = [ended("a", 1.0, **earlier), ended("b", 2.0, **later)]
    assert is_superseded(replays[0], replays) is superseded
