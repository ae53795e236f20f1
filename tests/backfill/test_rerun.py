"""A script that runs for a moment is run again at once, in one process, and that is said."""

import os

import pytest

from plainly import recorded, write
from rearview._history import history

SCRIPT = """
total = 0.0
for epoch in range(6):
    for step in range(40):
        total += step * 0.5
        # INNER total
    # OUTER total
print(total)
"""
CHANGING = """
import itertools
import pathlib
total = 0
numbers = itertools.count()
for epoch in range(6):
    for step in range(40):
        total += next(numbers)
    if pathlib.Path("odd").exists():
        total += 1
    # OUTER total
"""


@pytest.fixture(autouse=True)
def rerun(monkeypatch):
    """Let short scripts run again, as they do by default."""
    monkeypatch.setenv("REARVIEW_RERUN", "true")


def asked(folder, text, kind, **question):
    """Record a script, add its probe and ask for it; return (plan, report, replays that were started)."""
    write(folder, train=text)
    assert recorded(folder, "train.py").code == 0
    probed = text.replace(f"# {kind} total", 'rearview.log("asked", total)')
    (folder / "train.py").write_text("import rearview\n" + probed)
    past = history(folder)
    plan = past.plan(["asked"], **question)
    report = past.backfill(["asked"], **question)
    return plan, report, past.show().replays


@pytest.mark.parametrize(("kind", "values"), [("OUTER", 6), ("INNER", 240)])
def test_a_short_script_runs_again_in_one_process_and_restores_nothing(tmp_path, kind, values):
    plan, report, replays = asked(tmp_path, SCRIPT, kind)
    (segment,) = plan.plan.segments
    assert segment.rerun
    assert any("again from the start" in note for note in plan.notes)
    assert (len(replays), report.written) == (1, values)
    assert report.proved, report.proof
    assert report.outcomes[0].report.restored == report.outcomes[0].report.skipped == 0
    assert report.outcomes[0].report.states > 0
    assert history(tmp_path).plan(["asked"]).nothing


def test_some_iterations_of_a_short_script_are_filled_by_running_up_to_them(tmp_path):
    _, report, replays = asked(tmp_path, SCRIPT, "OUTER", at="epoch=2:4")
    assert (len(replays), report.written) == (1, 2)
    assert report.outcomes[0].report.restored == 0
    rows = history(tmp_path).table("asked").rows()
    assert [row["epoch"] for row in rows if row["asked"] is not None] == [2, 3]


def test_a_rerun_that_differs_is_not_run_a_second_time(tmp_path):
    write(tmp_path, train=CHANGING)
    assert recorded(tmp_path, "train.py").code == 0
    probed = CHANGING.replace("# OUTER total", 'rearview.log("asked", total)')
    (tmp_path / "train.py").write_text("import rearview\n" + probed)
    odd = tmp_path / "odd"
    odd.touch()
    os.utime(odd, (0, 0))
    past = history(tmp_path)
    report = past.backfill(["asked"])
    assert not report.proved
    assert len(past.show().replays) == 1


def test_the_setting_rerun_switches_reruns_off(tmp_path, monkeypatch):
    monkeypatch.setenv("REARVIEW_RERUN", "false")
    plan, report, _ = asked(tmp_path, SCRIPT, "OUTER", at="epoch=4")
    assert not any(segment.rerun for segment in plan.plan.segments)
    assert not any("again from the start" in note for note in plan.notes)
    assert sum(outcome.report.restored for outcome in report.outcomes) > 0
