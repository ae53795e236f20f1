"""What a run writes is part of its state, and a replay leaves the user's files alone."""

import os
import subprocess
import textwrap
import time

import pytest

from limits import HUNG
from plainly import SOURCE, recorded, write
from rearview._history import history
from rearview.model.run import CAPTURED
from rearview.store.records import read

TEXT = """
import os, pathlib
here = pathlib.Path(__file__).parent
total = 0
for epoch in range(6):
    for i in range(2000):
        total += i % 7
    if epoch in (1, 3):
        (here / "out").mkdir(exist_ok=True)
        (here / "out" / "best.txt").write_text(str(total))
    if epoch == 2:
        with open("temporary.txt", "w") as file:
            file.write("x")
        os.replace("temporary.txt", "kept.txt")
    with open("log.txt", "a") as file:
        file.write(f"{epoch}\\n")
best = int((here / "out" / "best.txt").read_text())
lines = open("log.txt").read().split()
"""
PROBE = 'rearview.log("best", best)\nrearview.log("lines", len(lines))\nrearview.log("files", sorted(os.listdir(".")))\n'


def test_files_written_in_skipped_iterations_are_there_in_a_replay(tmp_path):
    write(tmp_path, train=TEXT)
    assert recorded(tmp_path, "train.py").code == 0
    written = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.txt")}
    (tmp_path / "train.py").write_text("import rearview\n" + TEXT + PROBE)
    report = history(tmp_path).backfill(["best", "lines"])
    assert report.proved, report.proof
    assert report.outcomes[0].report.restored >= 1
    found = {
        record.name: record.value
        for file in (tmp_path / ".rearview" / "runs").glob("*/records-*.jsonl")
        for record in read(file)
        if record.origin not in CAPTURED
    }
    assert found["best"] == int((tmp_path / "out" / "best.txt").read_text())
    assert found["lines"] == 6
    assert {p: p.stat().st_mtime_ns for p in written} == written


def test_a_replay_does_not_write_through_links_into_the_users_tree(tmp_path):
    text = """
    import numpy, torch, pathlib
    here = pathlib.Path(__file__).parent
    total = 0
    for epoch in range(4):
        for i in range(2000): total += i
    torch.save({"total": total}, here / "model.pt")
    with open(here / "notes.txt", "a") as file:
        file.write("done\\n")
    """
    write(tmp_path, train=textwrap.dedent(text))
    assert recorded(tmp_path, "train.py").code == 0
    model = (tmp_path / "model.pt").stat().st_mtime_ns
    probed = "import rearview\n" + textwrap.dedent(text) + 'rearview.log("total", total)\n'
    (tmp_path / "train.py").write_text(probed)
    report = history(tmp_path).backfill(["total"])
    assert report.written == 1, report.proof
    assert (tmp_path / "model.pt").stat().st_mtime_ns == model
    assert (tmp_path / "notes.txt").read_text() == "done\n"


OUTSIDE = """
import os, pathlib
from io import open
from os import listdir, makedirs
home = os.environ["OUTPUTS"]
found = sorted(listdir("../data"))
start = int(open("../data/start.txt").read())
makedirs(f"{home}/run", exist_ok=False)
if os.path.exists(f"{home}/best.txt"):
    start = -1
total = start
for epoch in range(6):
    for i in range(2000):
        total += i % 7
    if epoch in (1, 3):
        pathlib.Path(home, "best.txt").write_text(str(total))
    with open(f"{home}/run/log.txt", "a") as file:
        file.write(f"{epoch}\\n")
    for name in ("shared", "ours"):
        with open(f"../data/{name}.txt", "a") as file:
            file.write("line\\n")
    if epoch == int(os.environ.get("REARVIEW_DIES", -1)):
        os._exit(9)
best = int(pathlib.Path(home, "best.txt").read_text())
lines = open(f"{home}/run/log.txt").read().split()
"""


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """Return a project that reads and writes outside of its folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # else all of this would be temporary
    monkeypatch.setenv("OUTPUTS", str(tmp_path / "outputs"))
    for name in ("tmp", "outputs", "data", "proj"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "start.txt").write_text("5")
    (tmp_path / "data" / "shared.txt").write_text("")
    write(tmp_path / "proj", train=OUTSIDE)
    return tmp_path


def _contents(folder):
    return {
        str(path.relative_to(folder)): (path.read_text(), path.stat().st_mtime_ns)
        for part in ("outputs", "data")
        for path in (folder / part).rglob("*")
        if path.is_file()
    }


def test_a_replay_of_a_program_that_works_outside_the_project_is_exact_and_changes_nothing(beside):
    done = recorded(beside / "proj", "train.py")
    assert done.code == 0, done.err
    then = _contents(beside)
    assert then["outputs/run/log.txt"][0].split() == list("012345")
    probe = 'rearview.log("best", best)\nrearview.log("lines", len(lines))\nrearview.log("start", start)\n'
    (beside / "proj" / "train.py").write_text("import rearview\n" + OUTSIDE + probe)
    report = history(beside / "proj").backfill(["best", "lines", "start"])
    assert report.proved, report.proof
    found = {
        record.name: record.value
        for file in (beside / "proj" / ".rearview" / "runs").glob("*/records-*.jsonl")
        for record in read(file)
        if record.origin not in CAPTURED
    }
    assert found == {"best": int(then["outputs/best.txt"][0]), "lines": 6, "start": 5}
    assert _contents(beside) == then


def test_a_resumed_run_resets_its_own_files_outside_the_project_and_leaves_shared_ones(
    beside, monkeypatch
):
    monkeypatch.setenv("REARVIEW_DIES", "4")
    assert recorded(beside / "proj", "train.py").code == 9
    shared = [beside / "data" / name for name in ("shared.txt", "ours.txt")]
    for path in shared:
        path.write_text(path.read_text() + "of another\n")
    later = time.time() + 60
    os.utime(shared[1], (later, later))
    monkeypatch.delenv("REARVIEW_DIES")
    how = history(beside / "proj").resume()
    environment = {**how.environment, "PYTHONPATH": SOURCE}
    subprocess.run(how.command, cwd=how.folder, env=environment, timeout=HUNG, check=True)
    assert (beside / "outputs" / "run" / "log.txt").read_text().split() == list("012345")
    for path in shared:
        assert "of another" in path.read_text().split("\n")
    assert not [path for path in beside.rglob("*.rearview") if path.is_file()]


TEMPORARY = """
import os, tempfile, time
with tempfile.NamedTemporaryFile(mode="w", prefix="kept_", delete=False) as file:
    file.write("x")
def shards(folder):
    for i in range(10):
        with open(os.path.join(folder, f"{i}.txt"), "w") as file:
            file.write("1")
with tempfile.TemporaryDirectory() as folder:
    shards(folder)
    start = len(os.listdir(folder))
    assert start == 10
total = start
for step in range(6):
    for i in range(2000):
        total += i % 7
    if step == int(os.environ.get("REARVIEW_DIES", -1)):
        os._exit(9)
"""


@pytest.fixture
def passing(tmp_path, monkeypatch):
    """Return a project that works with temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return write(tmp_path / "proj", train=TEMPORARY)


def test_a_temporary_folder_of_a_loop_that_is_skipped_is_filled_again(passing, monkeypatch):
    monkeypatch.setenv("REARVIEW_DIES", "4")
    assert recorded(passing, "train.py").code == 9
    monkeypatch.delenv("REARVIEW_DIES")
    how = history(passing).resume()
    environment = {**how.environment, "PYTHONPATH": SOURCE}
    subprocess.run(how.command, cwd=how.folder, env=environment, timeout=HUNG, check=True)
    assert [one.name[:5] for one in (passing.parent / "tmp").iterdir()] == ["kept_"]


def test_names_of_temporary_files_that_were_left_are_drawn_again_in_every_replay(passing):
    assert recorded(passing, "train.py").code == 0
    left = {one: one.read_text() for one in (passing.parent / "tmp").iterdir()}
    assert list(left.values()) == ["x"]
    probed = "import rearview\n" + TEMPORARY.replace(
        "        total += i % 7\n", '        total += i % 7\n        rearview.log("t", total)\n'
    )
    (passing / "train.py").write_text(probed)
    report = history(passing).backfill(["t"], workers=2)
    assert report.proved, report.proof
    assert all(one.report.restored or not one.report.differing for one in report.outcomes)
    assert {one: one.read_text() for one in (passing.parent / "tmp").iterdir()} == left
