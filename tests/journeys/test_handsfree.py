"""Journey: record a script as it is, ask a new question, get it answered exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("warm_start")

SRC = Path(__file__).parent.parent.parent / "src"

SCRIPT = """\
import argparse
import random
import sys

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
args = parser.parse_args()

weights = [random.random() for _ in range(2000)]
history = []
for epoch in range(args.epochs):
    order = list(range(20))
    random.shuffle(order)
    for step, sample in enumerate(order):
        noise = random.gauss(0.0, 1.0)
        gradient = [w * 0.1 + noise * sample for w in weights]
        weights = [w - 0.01 * g for w, g in zip(weights, gradient)]
    history.append(sum(weights))
    print("epoch", epoch, repr(history[-1]))
print("done", file=sys.stderr)
"""

PROBED = SCRIPT.replace("import sys\n", "import sys\n\nimport rearview\n", 1)
PROBED = PROBED.replace(
    "        weights = [w -",
    '        rearview.log("norm", sum(g * g for g in gradient) ** 0.5)\n        weights = [w -',
    1,
)
PROBED = PROBED.replace(
    "    history.append(sum(weights))\n",
    '    history.append(sum(weights))\n    rearview.log("total", history[-1])\n',
    1,
)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def rearview(folder, *words, **more):
    env = {key: value for key, value in os.environ.items() if not key.startswith("REARVIEW_")}
    env |= {"PYTHONPATH": str(SRC), **more}
    return subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def recorded(folder, *words):
    """Record the script; returns what it printed for each epoch."""
    done = rearview(folder, "run", "--every", "train.py", *words)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch")]
    return [float(line.split()[2]) for line in lines]


def rows(folder, *words):
    done = rearview(folder, "table", *words, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_output_and_exit_code_are_the_scripts_own(project):
    (project / "fails.py").write_text("import sys\nprint('out')\nsys.exit(7)\n")
    done = rearview(project, "run", "fails.py")
    assert (done.returncode, done.stdout) == (7, "out\n")
    assert done.stderr == "rearview: recording fails.py\n"
    done = rearview(project, "run", "-q", "train.py", "--epochs", "1")
    assert done.stderr == "done\n"


def test_a_probe_in_the_outer_loop_gets_the_values_of_the_run(project):
    totals = recorded(project)
    (project / "train.py").write_text(PROBED)
    done = rearview(project, "backfill", "total")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: " in done.stdout
    found = rows(project, "total")
    assert [row["epoch"] for row in found] == list(range(6))
    assert [row["total"] for row in found] == totals


def test_a_probe_in_the_inner_loop_fills_only_the_epochs_asked_for(project):
    recorded(project)
    (project / "train.py").write_text(PROBED)
    done = rearview(project, "backfill", "norm", "--at", "epoch=2:4", "--json")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, told[-1]["exact"]) == (0, True), done.stderr
    assert {"planned", "started", "proved", "done"} <= {one["event"] for one in told}
    filled = [row for row in rows(project, "norm") if row["norm"] is not None]
    assert [(row["epoch"], row["step"]) for row in filled] == [
        (epoch, step) for epoch in (2, 3) for step in range(20)
    ]
    assert {"run", "epoch", "step", "norm"} <= set(filled[0])


DEEP = """\
import random

total = 0.0
for epoch in range(3):
    for step in range(4):
        for part in range(3):
            total += sum(random.random() for _ in range(5000))
        print("epoch", repr(total))
"""


def test_a_short_loop_deep_inside_is_left_alone_until_it_is_asked_about(project):
    (project / "train.py").write_text(DEEP)
    totals = [
        float(line.split()[1])
        for line in rearview(project, "run", "--every", "train.py").stdout.splitlines()
    ]
    shown = rearview(project, "show").stdout
    assert "step (" in shown
    assert "part (" not in shown
    probed = DEEP.replace("        print", '            rearview.log("sum", total)\n        print')
    (project / "train.py").write_text("import rearview\n" + probed)
    done = rearview(project, "backfill", "sum")
    assert "exact: " in done.stdout, done.stdout + done.stderr
    found = rows(project, "sum")
    assert [(row["epoch"], row["step"], row["part"]) for row in found] == [
        (epoch, step, part) for epoch in range(3) for step in range(4) for part in range(3)
    ]
    assert [row["sum"] for row in found if row["part"] == 2] == totals


def test_every_run_is_filled_and_a_second_time_nothing_runs(project):
    recorded(project)
    recorded(project, "--epochs", "3")
    (project / "train.py").write_text(PROBED)
    assert "total: 9 cells missing, about" in rearview(project, "table", "total").stderr
    told = rearview(project, "backfill", "total", "--runs=-1", "--runs=-2", "--explain", "--json")
    planned = [segment["run"] for segment in json.loads(told.stdout)["plan"]["segments"]]
    known = [run["id"] for run in json.loads(rearview(project, "runs", "--json").stdout)]
    assert planned == known[::-1]  # in the order that they were named
    assert rearview(project, "backfill", "total").returncode == 0
    found = rows(project, "total")
    assert len({row["run"] for row in found}) == 2
    assert len(found) == 9
    again = rearview(project, "backfill", "total")
    assert again.returncode == 0
    assert "Nothing is missing." in again.stderr
    assert rows(project, "total") == found


def test_an_edit_that_changes_the_computation_is_refused_with_its_line(project):
    recorded(project)
    (project / "train.py").write_text(PROBED.replace("0.01", "0.02"))
    done = rearview(project, "backfill", "total")
    assert done.returncode == 1
    assert "refused" in done.stdout + done.stderr
    assert "train.py:" in done.stdout + done.stderr


def test_a_statement_that_changes_the_computation_is_refused_with_its_line(project):
    recorded(project)
    changing = PROBED.replace(
        'rearview.log("total", history[-1])', 'rearview.log("total", history.pop())'
    )
    (project / "train.py").write_text(changing)
    done = rearview(project, "backfill", "total")
    assert done.returncode == 1
    assert "`history.pop()`" in done.stderr
    assert "total" not in rearview(project, "table").stdout or not [
        row for row in rows(project, "total") if row["total"] is not None
    ]


def test_a_replay_proves_the_run_and_leaves_the_tree_alone(project):
    recorded(project)
    before = {path: path.read_bytes() for path in project.iterdir() if path.is_file()}
    done = rearview(project, "replay", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["exact"] is True
    assert {path: path.read_bytes() for path in project.iterdir() if path.is_file()} == before


def test_the_run_can_be_looked_at(project):
    recorded(project)
    run = json.loads(rearview(project, "runs", "--json").stdout)[0]
    assert run["status"] == "finished"
    shown = rearview(project, "show", run["id"][-4:])
    assert shown.returncode == 0, shown.stderr
    assert "epoch (6 iterations)" in shown.stdout
    assert rearview(project, "diff").returncode == 0
    (project / "train.py").write_text(PROBED)
    assert rearview(project, "diff").returncode == 1


def test_an_unknown_name_gets_the_nearest(project):
    recorded(project)
    (project / "train.py").write_text(PROBED)
    rearview(project, "backfill", "total")
    done = rearview(project, "table", "totl")
    assert done.returncode == 2
    assert "total" in done.stderr


def test_iterations_that_cannot_be_read_are_explained_before_anything_runs(project):
    recorded(project, "--epochs", "1")
    (project / "train.py").write_text(PROBED)
    done = rearview(project, "backfill", "total", "--at", "epoch")
    assert done.returncode == 2
    assert "names no iterations" in done.stderr
    for form, told in (
        ("epoch=5:3", "at-empty"),
        ("epoch=1:2:3", "at-form"),
        ("a=1/a=2", "at-form"),
    ):
        for command in (("backfill", "total"), ("replay",)):
            done = rearview(project, *command, "--at", form)
            assert done.returncode == 2, done.stderr
            assert told in done.stderr
    assert "epoch=3:5" in rearview(project, "backfill", "total", "--at", "a=1:2:3").stderr


def test_the_store_may_be_a_link_to_another_folder(project, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    root = {"REARVIEW_ROOT": str(elsewhere)}
    (elsewhere / "train.py").write_text(SCRIPT)
    script = str(elsewhere / "train.py")
    assert rearview(project, "run", script, "--epochs", "1", **root).returncode == 0
    assert len(json.loads(rearview(project, "runs", "--json", **root).stdout)) == 1
    assert not (project / ".rearview").exists()


def test_the_store_may_be_a_link_to_another_disk(project, tmp_path_factory):
    (project / ".rearview").symlink_to(tmp_path_factory.mktemp("disk"), target_is_directory=True)
    recorded(project, "--epochs", "2")
    (project / "train.py").write_text(PROBED)
    assert rearview(project, "backfill", "total", "-q").returncode == 0
    assert rearview(project, "gc").returncode == 0
    assert rearview(project, "verify").returncode == 0
    assert (project / ".rearview").is_symlink()


def test_a_script_outside_the_project_is_refused(project, tmp_path_factory):
    root = {"REARVIEW_ROOT": str(tmp_path_factory.mktemp("elsewhere"))}
    done = rearview(project, "run", "train.py", "--epochs", "1", **root)
    assert done.returncode == 2
    assert "outside-project" in done.stderr
    done = rearview(project, "run", "-m", "train", **root)
    assert done.returncode == 2
    assert "outside-project" in done.stderr


def test_a_missing_or_newer_store_is_reported_clearly(project):
    done = rearview(project, "runs")
    assert done.returncode == 2
    assert "no-store" in done.stderr
    recorded(project, "--epochs", "1")
    (project / ".rearview" / "format").write_text("99\n")
    done = rearview(project, "runs")
    assert done.returncode == 2
    assert "store-newer" in done.stderr


def test_freeing_space_keeps_every_array_that_was_logged(project):
    (project / "arrays.py").write_text(
        "import numpy, rearview\n"
        "for epoch in range(3):\n"
        "    rearview.log('alone', numpy.full(3000, float(epoch)))\n"
        "    rearview.log('inside', {'deep': [numpy.full(3000, epoch + 0.5)]})\n"
    )
    assert rearview(project, "run", "arrays.py").returncode == 0
    old = {path: 0 for path in (project / ".rearview" / "objects").rglob("*") if path.is_file()}
    assert len(old) >= 6
    for path in old:
        os.utime(path, (0, 0))
    done = rearview(project, "gc")
    assert done.returncode == 0, done.stderr
    assert [path for path in old if not path.exists()] == []
    assert rearview(project, "verify").returncode == 0


def test_the_store_is_whole_after_all_of_it(project):
    recorded(project)
    done = rearview(project, "verify")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok: 1 run")
    assert rearview(project, "gc", "--dry-run").returncode == 0
