"""Plans for runs of other machines: scaled where both were measured, doubtful where not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rearview
from rearview._history import history
from rearview.backfill import machine_speed
from rearview.backfill.machine_speed import Machines, Measured
from rearview.durable_files import add_check

SCRIPT = """\
import random
weight = 1.0
for epoch in range(4):
    for step in range(3):
        weight = weight * 0.9 + random.random()
"""
OTHER = {"cpu": "another", "cores": 96, "gpus": [], "visible": None}
FAST, SLOW = Measured({"python": 0.001}, 800.0, 200.0), Measured({"python": 0.004}, 800.0, 200.0)


@pytest.fixture
def past(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(rearview.__file__).parent.parent))
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "rearview", "run", "-q", "--every", "train.py"]
    subprocess.run(words, cwd=tmp_path, env=dict(os.environ), check=True)
    probe = "random.random()\n        rearview.log('weight', weight)\n"
    text = "import rearview\n" + SCRIPT.replace("random.random()\n", probe)
    (tmp_path / "train.py").write_text(text)
    return history(tmp_path)


def move(past):
    """Let the run have been recorded on another machine."""
    file = past.project.runs / past.run().id / "run.json"
    about = json.loads(file.read_text())
    about["host"] = "node7"
    about["facts"]["hardware"] = OTHER
    file.write_bytes(add_check(json.dumps(about).encode()))


def wide(plan):
    (segment,) = plan.plan.segments
    return (segment.high - segment.low) / segment.seconds


def test_a_short_plan_for_a_run_of_this_machine_measures_nothing(past, monkeypatch):
    monkeypatch.setattr(machine_speed, "measure", None)
    plan = past.plan(["weight"], workers=1)
    assert plan.notes == []
    assert wide(plan) < 0.6


def test_a_run_of_another_machine_is_scaled_once_both_were_measured(past, monkeypatch):
    here = past.plan(["weight"], workers=1)
    move(past)
    monkeypatch.setattr(machine_speed, "measure", lambda _: FAST)
    doubtful = past.plan(["weight"], workers=1)
    assert "node7" in doubtful.notes[0]
    assert doubtful.plan.seconds == pytest.approx(here.plan.seconds)
    assert wide(doubtful) > 1.5
    monkeypatch.setattr(machine_speed, "measure", lambda _: SLOW)
    Machines(past.project.cache, OTHER).measure()  # as `rearview doctor` does there
    scaled = past.plan(["weight"], workers=1)
    assert scaled.notes == []
    assert scaled.plan.seconds == pytest.approx(here.plan.seconds / 4, rel=0.01)
    assert wide(here) < wide(scaled) < wide(doubtful)
