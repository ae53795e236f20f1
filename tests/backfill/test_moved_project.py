"""A project that was moved or copied keeps its history: replays take it to be where it was."""

import os
import shutil
import subprocess

import pytest

from limits import HUNG
from plainly import SOURCE, recorded, write
from rearview._history import history
from rearview.model.run import CAPTURED
from rearview.store.records import read

pytestmark = pytest.mark.usefixtures("warm_start")

TEXT = """
import os, pathlib
here = pathlib.Path(__file__).resolve().parent
start = int((here / "data.txt").read_text())
total = start
for epoch in range(5):
    for i in range(2000):
        total += i % 7
    pathlib.Path("out.txt").write_text(str(total))
    if epoch == int(os.environ.get("REARVIEW_DIES", -1)):
        os._exit(9)
"""
PROBE = 'rearview.log("where", str(here))\nrearview.log("total", total)\n'


@pytest.fixture
def project(tmp_path):
    write(tmp_path / "old", train=TEXT)
    (tmp_path / "old" / "data.txt").write_text("5")
    return tmp_path / "old"


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_backfill_in_the_new_place_is_exact_and_runs_the_text_that_is_there(project, move):
    assert recorded(project, "train.py").code == 0
    total = int((project / "out.txt").read_text())
    new = project.parent / "new"
    move(project, new)
    if project.exists():
        history(new).trust()  # a copy could be anybody's
        (project / "train.py").write_text("raise SystemExit('not this one')\n")
    (new / "train.py").write_text("import rearview\n" + TEXT + PROBE)
    plan = history(new).plan(["total"])
    assert not plan.refusals
    report = history(new).backfill(["total", "where"])
    assert report.proved, report.proof
    found = {
        record.name: record.value
        for file in (new / ".rearview" / "runs").glob("*/records-*.jsonl")
        for record in read(file)
        if record.origin not in CAPTURED
    }
    assert found == {"total": total, "where": str(project)}


def test_a_run_is_resumed_in_the_new_folder_of_a_moved_project(project, monkeypatch):
    monkeypatch.setenv("REARVIEW_DIES", "3")
    assert recorded(project, "train.py").code == 9
    monkeypatch.delenv("REARVIEW_DIES")
    new = project.parent / "new"
    shutil.move(project, new)
    how = history(new).resume()
    assert how.folder == new
    environment = {**how.environment, "PYTHONPATH": SOURCE}
    done = subprocess.run(
        how.command,
        cwd=how.folder,
        env=environment,
        timeout=HUNG,
        check=True,
        capture_output=True,
        text=True,
    )
    assert f"was started in {project}" in done.stderr
    assert not os.path.lexists(project)
