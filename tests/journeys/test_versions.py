"""One statement, every past version: adapted to its names, or refused with the reason."""

import json
import subprocess
import sys

import pytest

from limits import HUNG

OLD = """\
import random

lr = 0.1
w = [random.gauss(0, 1) for _ in range(8)]
for epoch in range(3):
    total = 0.0
    for i in range(50):
        x = [random.random() for _ in w]
        err = sum(a * b for a, b in zip(w, x)) - sum(x)
        w = [a - lr * err * b for a, b in zip(w, x)]
        total += err * err
    print(epoch, total)
"""
NEW = """\
import random

rate = 0.05


def step(weights, x):
    error = sum(a * b for a, b in zip(weights, x)) - sum(x)
    return [a - rate * error * b for a, b in zip(weights, x)], error


weights = [random.gauss(0, 1) for _ in range(8)]
for epoch in range(3):
    total = 0.0
    for i in range(50):
        x = [random.random() for _ in weights]
        weights, error = step(weights, x)
        total += error * error
    print(epoch, total, rate)
"""
PROBE = """\
    rearview.log("norm", sum(a * a for a in weights))
    print(epoch, total, rate)
"""


def rearview(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )


@pytest.fixture
def project(tmp_path):
    for text in (OLD, NEW):
        (tmp_path / "train.py").write_text(text)
        assert rearview(tmp_path, "run", "-q", "train.py").returncode == 0
    probed = NEW.replace("    print(epoch, total, rate)\n", PROBE)
    (tmp_path / "train.py").write_text(
        probed.replace("import random\n", "import random\nimport rearview\n")
    )
    return tmp_path


def test_a_statement_reaches_a_version_whose_names_were_others(project):
    shown = rearview(project, "propagate", "norm", "--json")
    assert shown.returncode == 0, shown.stderr
    diffs = [one["diff"] for one in json.loads(shown.stdout)]
    assert "for a in weights" in diffs[0]
    assert "for a in w))" in diffs[1]
    filled = rearview(project, "backfill", "norm", "-q")
    assert filled.returncode == 0, filled.stdout + filled.stderr
    rows = json.loads(rearview(project, "table", "norm", "--format", "json").stdout)
    assert len({row["run"] for row in rows}) == 2
    assert [row["epoch"] for row in rows] == [0, 1, 2] * 2
    assert all(isinstance(row["norm"], float) for row in rows)


def test_a_version_that_lacks_a_variable_is_refused_and_the_other_is_filled(project):
    text = (project / "train.py").read_text()
    (project / "train.py").write_text(
        text.replace("sum(a * a for a in weights)", "step(weights, x)[1]")
    )
    filled = rearview(project, "backfill", "norm", "-q")
    assert filled.returncode == 1
    rows = json.loads(rearview(project, "table", "norm", "--format", "json").stdout)
    assert [row["norm"] is None for row in rows if row["run"] == rows[-1]["run"]] == [False] * 3
    shown = rearview(project, "propagate", "norm")
    assert shown.returncode == 1
    assert "refused" in shown.stdout


def test_a_placement_made_by_hand_serves(project):
    runs = json.loads(rearview(project, "runs", "--json").stdout)
    done = rearview(project, "propagate", "norm", "--correct", runs[0]["id"], "train.py:12")
    assert "by hand" in done.stdout or done.returncode == 0, done.stderr


def test_places_made_by_hand_are_listed_and_undone(project):
    run = json.loads(rearview(project, "runs", "--json").stdout)[0]["id"]
    assert rearview(project, "propagate", "norm", "--correct", run, "train.py:12").returncode == 0
    listed = rearview(project, "propagate", "--corrections")
    assert f"({run}): norm before train.py:12" in listed.stdout
    undone = rearview(project, "propagate", "norm", "--undo", run)
    assert undone.stdout.startswith("undone: "), undone.stderr
    assert undone.returncode == 0
    assert rearview(project, "propagate", "norm", "--undo", run).returncode == 1
    assert "No place was given" in rearview(project, "propagate", "--corrections").stderr
    assert rearview(project, "propagate").returncode == 2


def test_insertions_are_shown_for_each_version_before_they_run(project):
    shown = rearview(project, "backfill", "norm", "--explain")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("+++ b/train.py") == 2
    assert "for a in w))" in shown.stdout
    plan = json.loads(rearview(project, "backfill", "norm", "--explain", "--json").stdout)
    assert {run for one in plan["insertions"] for run in one["runs"]} == {
        run["id"] for run in json.loads(rearview(project, "runs", "--json").stdout)
    }


def test_statements_are_compared_as_propagation_matches_them(project):
    run = json.loads(rearview(project, "runs", "--json").stdout)[0]["id"]
    shown = rearview(project, "diff", "--statements", run)
    assert shown.returncode == 1
    assert "renamed" in shown.stdout
    assert "added" in shown.stdout
    assert rearview(project, "diff", "--statements", run, run).returncode == 0
