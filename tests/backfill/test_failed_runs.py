"""A run that failed is replayed up to where it failed, in one try, and no further."""

import signal

import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.cli.main import main
from rearview.model import Verdict

pytestmark = pytest.mark.usefixtures("warm_start")

SCRIPT = """
import os, random, signal, sys, time
random.seed(1)
w = 0.0
def end(epoch, step):
    if (epoch, step) == (3, 2):
        {how}
for epoch in range(6):
    for step in range(5):
        w += random.random()
        time.sleep(0.001)  # shorter loops are not watched
        end(epoch, step)
    print(epoch, w)
print("done")
"""
DONE = [(epoch, step) for epoch in range(4) for step in range(5) if (epoch, step) <= (3, 2)]
HOW = {
    "raises": 'raise RuntimeError("the loss is not a number")',
    "asserts": "assert w < 0, object()",
    "exits": "sys.exit(3)",
    "exits with a message": 'sys.exit("no more data")',
}
LINE = "        w += random.random()\n"


def probed(folder, script, line='        rearview.log("w_now", w)\n'):
    (folder / "train.py").write_text(script.replace(LINE, LINE + line))
    return history(folder)


def steps(past, name="w_now"):
    rows = past.sql(f"FROM records WHERE name = '{name}' AND replay IS NOT NULL")
    return [tuple(row["indices"]) for row in rows]


@pytest.mark.parametrize("name", HOW)
def test_a_replay_that_fails_as_the_run_did_has_come_to_its_end(name, tmp_path):
    script = SCRIPT.format(how=HOW[name])
    write(tmp_path, train=script)
    assert recorded(tmp_path, "train.py").code != 0
    past = probed(tmp_path, script)
    outcomes = past.backfill(["w_now"]).outcomes
    assert [outcome.report.error for outcome in outcomes] == [None] * len(outcomes)
    assert [outcome.redone for outcome in outcomes] == [""] * len(outcomes)
    assert {outcome.proof.verdict for outcome in outcomes} == {Verdict.EXACT}
    assert sorted(steps(past)) == DONE
    assert past.plan(["w_now"]).nothing


def test_show_says_where_a_run_failed(tmp_path, monkeypatch, capsys):
    write(tmp_path, train=SCRIPT.format(how=HOW["raises"]))
    recorded(tmp_path, "train.py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["show"])
    assert "failed by RuntimeError at epoch=3/step=2 with exit code 1" in capsys.readouterr().out


@pytest.fixture
def outside(tmp_path):
    """Return the folder of a project, and a file outside it that says what ends the program."""
    cause = tmp_path / "cause.txt"
    project = tmp_path / "project"
    script = SCRIPT.format(how=f"exec(open({str(cause)!r}).read())")
    write(project, train=script)
    return project, script, cause


def test_a_replay_that_fails_in_another_way_is_reported_as_failed(outside):
    project, script, cause = outside
    cause.write_text("raise RuntimeError")
    assert recorded(project, "train.py").code == 1
    cause.write_text("raise ValueError")
    outcomes = probed(project, script).backfill(["w_now"]).outcomes
    (failed,) = [outcome for outcome in outcomes if not outcome.proved]
    assert "ValueError" in failed.report.error


def test_iterations_that_an_interrupted_run_never_came_to_are_not_filled(outside):
    project, script, cause = outside
    cause.write_text("raise KeyboardInterrupt")
    assert recorded(project, "train.py").code == -signal.SIGINT
    cause.write_text("pass")  # nobody interrupts the replay
    past = probed(project, script)
    outcomes = past.backfill(["w_now"]).outcomes
    assert [outcome.redone for outcome in outcomes] == [""] * len(outcomes)
    assert sorted(steps(past)) == DONE
    assert past.plan(["w_now"]).nothing


def test_nothing_after_the_loop_is_filled_if_its_last_iteration_was_interrupted(outside):
    project, script, cause = outside
    script = script.replace("range(6)", "range(4)").replace("range(5)", "range(3)")
    write(project, train=script)
    cause.write_text("raise KeyboardInterrupt")
    assert recorded(project, "train.py").code == -signal.SIGINT
    cause.write_text("pass")
    text = script.replace('print("done")', 'rearview.log("total", w)\nprint("done")')
    past = probed(project, text)
    past.backfill(["w_now", "total"])
    assert sorted(steps(past)) == [step for step in DONE if step[1] < 3]
    assert steps(past, "total") == []
