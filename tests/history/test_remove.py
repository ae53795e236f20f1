"""A removed run is gone entirely, nothing else is, and an interrupted removal can be repeated."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rearview
from rearview._history import facade
from rearview.errors import UsageError
from rearview.execute.backfill_status import folder_of
from rearview.model import ReplayStart
from rearview.store.create_files import publish
from rearview.store.machine_and_process import process_identity
from rearview.store.maintenance import removal
from rearview.store.runs import Runs
from recorded import Recorded, at

SCRIPT = """\
import sys
import numpy as np
import rearview
shared = np.arange(1 << 16)
own = np.full(1 << 16, float(sys.argv[1]))
for epoch in range(3):
    own = own + shared[epoch]
    rearview.log("total", float(own.sum()))
    rearview.log("values", own[:4].copy())
with open(f"out-{sys.argv[1]}.txt", "w") as file:
    file.write("result")
"""


def command(*words, folder):
    env = {**os.environ, "REARVIEW_ROOT": str(folder), "REARVIEW_EPSILON": "100"}
    ran = subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A project with two runs that share an object; the first was backfilled."""
    folder = tmp_path_factory.mktemp("two") / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    for number in "12":
        command("run", "--every", "train.py", number, folder=folder)
    probe = '    rearview.log("biggest", float(own.max()))\n'
    (folder / "train.py").write_text(SCRIPT.replace("    own = own +", probe + "    own = own +"))
    first = rearview.history(folder).runs()[0].id  # by start; ids of one second sort by chance
    command("backfill", "biggest", "--runs", first, folder=folder)
    return folder


@pytest.fixture
def past(template, tmp_path):
    shutil.copytree(template, tmp_path / "project", symlinks=True)
    for room in ("objects", "packs"):  # a sweep leaves files alone that were only just written
        for file in (tmp_path / "project" / ".rearview" / room).rglob("*"):
            if file.is_file():
                os.utime(file, (1e9, 1e9))
    return rearview.history(tmp_path / "project")


def traces_of(past, *texts):
    """Return the files of a store whose path speaks of a run or its replays."""
    found = (str(p.relative_to(past.project.store)) for p in past.project.store.rglob("*"))
    return sorted(path for path in found if any(text in path for text in texts))


def test_a_removed_run_leaves_nothing_and_the_other_run_stays_whole(past):
    first, second = past.runs()
    replays = [replay.id for replay in Runs(past.project).replays(first.id)]
    assert replays
    before = past.table("total", runs=[second.id]).rows()
    report = past.remove(first.id)
    assert report.runs == (first.id,)
    assert report.nbytes > 1 << 16
    assert [run.id for run in past.runs()] == [second.id]
    assert traces_of(past, first.id, *replays) == []
    assert not [
        name for name in past._versions.versions_by_ref() if first.id in name or "derived" in name
    ]
    assert past.table("total").rows() == before
    assert past.verify().ok
    assert (past.project.root / "out-1.txt").is_file()  # what it wrote is the user's
    checkpoints = past._checkpoints.of(second.id)
    for checkpoint in checkpoints:
        loaded = past._checkpoints.load(checkpoint)
        assert all(loaded[key] is not None for key in checkpoint.parts)


def test_a_dry_run_changes_nothing_and_prints_the_bytes_it_would_free(past):
    first = past.runs()[0].id
    past.table().rows()  # any question seals the records of runs that have ended
    files = sorted(past.project.store.rglob("*"))
    would = past.remove(first, dry=True)
    skip = {"cache", "writing"}
    left = sorted(past.project.store.rglob("*"))
    assert [p for p in left if p.relative_to(past.project.store).parts[0] not in skip] == [
        p for p in files if p.relative_to(past.project.store).parts[0] not in skip
    ]
    assert would.nbytes > 1 << 16
    done = past.remove(first)  # what was young a moment ago may be spared no longer
    assert done.nbytes + done.freed.spared == would.nbytes + would.freed.spared


@pytest.mark.parametrize("step", range(6))
def test_a_removal_that_was_interrupted_anywhere_can_be_repeated(past, monkeypatch, step):
    first, second = past.runs()
    past.name(first.id, "old")
    replays = [replay.id for replay in Runs(past.project).replays(first.id)]
    calls = []

    def interrupted(real):
        def call(*args, **options):
            if len(calls) == step:
                raise KeyboardInterrupt
            calls.append(args)
            return real(*args, **options)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(removal, "_delete", interrupted(removal._delete))
        for name in ("drop", "drop_derived"):
            method = getattr(type(past._versions), name)
            patched.setattr(type(past._versions), name, interrupted(method))
        patched.setattr(facade, "sweep", interrupted(facade.sweep))
        with pytest.raises(KeyboardInterrupt):
            past.remove("old")
    again = rearview.history(past.project.root)
    assert [run.id for run in again.runs()] == [second.id]  # it is gone for readers at once
    assert again.verify().ok
    if removal.unfinished(past.project):
        assert again.remove("old").runs == (first.id,)
    else:
        again.gc()
        removal.drop_empty_packs(past.project, [first.id])
    assert traces_of(again, first.id, *replays) == []
    assert again.verify().ok


def test_a_sweep_completes_a_removal_too(past, monkeypatch):
    first = past.runs()[0].id
    with monkeypatch.context() as patched:
        patched.setattr(removal, "finish_removals", lambda *_: (_ for _ in ()).throw(OSError("x")))
        with pytest.raises(rearview.errors.StoreError):
            past.remove(first)
    assert removal.unfinished(past.project)
    past.gc()
    assert not removal.unfinished(past.project)


@pytest.fixture
def project(tmp_path):
    return Recorded(tmp_path)


def test_a_running_run_is_refused(project):
    run = project.run((at(epoch=0), {"a": 1}), over=False)
    past = rearview.history(project.project.root)
    with pytest.raises(UsageError, match="is running"):
        past.remove(run)
    project.open.close()
    assert [each.id for each in past.runs()] == [run]


def test_a_run_that_others_came_from_is_refused_unless_they_go_too(project):
    parent = project.run((at(epoch=0), {"a": 1}))
    child = project.run((at(epoch=0), {"a": 1}), parent=parent)
    past = rearview.history(project.project.root)
    with pytest.raises(UsageError, match=child):
        past.remove(parent)
    past.remove(parent, child)
    assert past.runs() == []


def test_nothing_is_removed_while_a_backfill_is_under_way(project):
    run = project.run((at(epoch=0), {"a": 1}))
    past = rearview.history(project.project.root)
    about = {"id": "b", "names": ["a"], "started": 0.0, "workers": 1, "busy": 1, "segments": 1}
    about |= {"ended": 0, "process": process_identity()}
    file = folder_of(project.project) / "b.json"
    file.parent.mkdir()
    publish(file, __import__("msgspec").json.encode(about))
    with pytest.raises(UsageError, match="backfill"):
        past.remove(run)
    file.unlink()
    assert past.remove(run).runs == (run,)


def test_one_refused_run_keeps_all_the_others_named_with_it(project):
    run = project.run((at(epoch=0), {"a": 1}))
    going = project.run((at(epoch=0), {"a": 1}), over=False)
    past = rearview.history(project.project.root)
    with pytest.raises(UsageError):
        past.remove(run, going)
    project.open.close()
    assert {each.id for each in past.runs()} == {run, going}


def test_a_run_that_holds_files_of_the_project_is_refused(project):
    run = project.run((at(epoch=0), {"a": 1}))
    aside = project.runs.folder(run) / "aside" / "out"
    aside.mkdir(parents=True)
    (aside / "model.pt").write_text("precious")
    with pytest.raises(UsageError, match=r"model\.pt"):
        rearview.history(project.project.root).remove(run)
    assert (aside / "model.pt").is_file()


def test_a_damaged_run_can_be_removed(project):
    run = project.run((at(epoch=0), {"a": 1}))
    (project.runs.folder(run) / "run.json").write_text("?")
    past = rearview.history(project.project.root)
    past.remove(run)
    assert past.runs() == []


def test_a_store_cannot_make_a_removal_delete_files_elsewhere(project, tmp_path):
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("x")
    run = project.run((at(epoch=0), {"a": 1}))
    for name in ("../../precious", "..", ".", str(outside), ""):
        project.runs.start_replay(run, name, ReplayStart())
    link = project.project.replays / "linked"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    project.runs.start_replay(run, "linked", ReplayStart())
    removal.remove(project.project, rearview.history(tmp_path)._versions, run)
    assert (outside / "file").is_file()
    assert project.project.store.is_dir()
    assert not Path(link).is_symlink()


def test_an_unknown_run_is_refused(project):
    project.run((at(epoch=0), {"a": 1}))
    with pytest.raises(UsageError, match="no run"):
        rearview.history(project.project.root).remove("nothing-like-it")
