"""The commands reach trees, replays and packages; recorded runs are versions like any other."""

import json
import os
import subprocess
import sys

import pytest
from studies import notebook, printed


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "home").mkdir()
    study = tmp_path / "study"
    study.mkdir()
    return study


def rearview(folder, *words, code=0, **more):
    done = subprocess.run(
        [sys.executable, "-m", "rearview", *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder.parent / "home"), **more},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


TRAIN = """import os

rate = float(os.environ.get("RATE", "1"))
w = 0.0
for epoch in range({}):
    w += rate

print(w)
"""


def test_recorded_runs_are_one_tree_and_replay_as_they_printed(folder):
    script = folder / "train.py"
    for epochs in (2, 4):
        script.write_text(TRAIN.format(epochs))
        rearview(folder, "run", "train.py")
    rearview(folder, "run", "train.py", RATE="3")
    tree = json.loads(rearview(folder, "tree", "--json"))
    parents = [node[0] for node in tree["nodes"]]
    # import, assignments, two epochs, then the end of one and two more epochs of the other
    assert parents[:5] == [-1, 0, 1, 2, 2]
    assert parents.count(-1) == 2  # another rate shares nothing: libraries read variables at import
    package = folder.parent / "runs.rvz"
    rearview(folder, "pack", package)
    report = json.loads(rearview(folder.parent, "replay", package, "--yes", "--offline", "--json"))
    assert [v["verdict"] for v in report["versions"]] == ["same"] * 3
    assert report["exact"]


def test_a_packed_run_of_a_notebook_is_compared_with_the_outputs_of_the_run(folder):
    for n in (1, 2):
        notebook(folder / "study.ipynb", ["x = 3", f"print(x + {n})", "x"])
        rearview(folder, "run", "-q", "study.ipynb")
    package = folder.parent / "notebooks.rvz"
    rearview(folder, "pack", package)
    report = json.loads(rearview(folder.parent, "replay", package, "--yes", "--offline", "--json"))
    assert [v["verdict"] for v in report["versions"]] == ["same"] * 2
    assert [len(v["cells"]) for v in report["versions"]] == [3, 3]


def test_a_difference_is_printed_as_a_diff_with_exit_code_1(folder):
    for n in (1, 2):
        shown = [[], printed("3\n" if n == 1 else "<script>4</script>\n")]
        notebook(folder / f"v{n}.ipynb", ["x = 3", "print(x)"], shown)
    page = folder.parent / "page.html"
    out = rearview(folder, "replay", "v1.ipynb", "v2.ipynb", "--html", page, "-q", code=1)
    assert "different" in out
    assert "'3' instead of '<script>4</script>'" in out
    text = page.read_text()
    assert "&lt;script&gt;4" in text
    assert "<script" not in text
    assert "http://www.w3.org/2000/svg" in text
    assert text.count("http") == text.count("http://www.w3.org") + text.count("http-equiv")


@pytest.mark.parametrize("planner", ["auto", "prp1", "prp2", "pc", "lfu", "none"])
def test_a_dry_run_plans_with_any_planner_and_runs_nothing(folder, planner):
    for n in (1, 2):
        (folder / f"v{n}.py").write_text(f"open('ran', 'w')\n\nprint({n})\n")
    plan = json.loads(
        rearview(folder, "replay", "v1.py", "v2.py", "--dry-run", "--json", "--planner", planner)
    )
    assert plan["bound"] <= plan["seconds"] <= plan["one_by_one"] + 1
    assert not (folder / "ran").exists()


def test_only_some_versions_are_replayed_and_an_unknown_one_is_refused(folder):
    for n in (1, 2, 3):
        (folder / f"v{n}.py").write_text(f"x = 1\n\nprint({n})\n")
    files = [f"v{n}.py" for n in (1, 2, 3)]
    report = json.loads(rearview(folder, "replay", *files, "--only", "v2", "--json"))
    assert [v["name"] for v in report["versions"]] == ["v2"]
    rearview(folder, "replay", *files, "--only", "v9", code=2)


def test_a_package_that_is_not_there_or_badly_named_is_refused(folder):
    rearview(folder, "replay", "gone.rvz", code=2)
    (folder / "a.py").write_text("x = 1\n")
    rearview(folder, "pack", "a.zip", "a.py", code=2)


def test_cells_that_cannot_be_compared_are_named_with_the_reason(folder):
    notebook(folder / "a.ipynb", ["x = 3", "print(x)"])
    out = rearview(folder, "replay", "a.ipynb", "-q")
    assert "cells 1, 2: not comparable: the author's outputs were not recorded" in out


def test_an_empty_notebook_replays_to_nothing(folder):
    notebook(folder / "a.ipynb", [])
    report = json.loads(rearview(folder, "replay", "a.ipynb", "--json"))
    assert report["computed"] == 0
    assert report["exact"]


def test_a_package_of_scripts_is_judged_by_the_replay_of_its_author(folder):
    loop = "w = 1\n\nfor i in range({}):\n    print(i)\n\nprint('end', w)\n"
    for n in (2, 4):
        (folder / f"v{n}.py").write_text(loop.format(n))
    rearview(folder, "replay", "v2.py", "v4.py", "-q")
    package = folder.parent / "scripts.rvz"
    rearview(folder, "pack", package, "v2.py", "v4.py")
    words = ("replay", package, "--yes", "--offline", "--json")
    report = json.loads(rearview(folder.parent, *words))
    verdicts = [cell["verdict"] for v in report["versions"] for cell in v["cells"]]
    assert verdicts == ["same"] * 7
