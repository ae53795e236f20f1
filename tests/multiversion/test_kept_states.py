"""States that replays of many versions leave on disk are checked, repaired and collected like the rest."""

import json
import os

from studies import replay, scripts

from rearview.multiversion.execution_tree import Measurements
from rearview.store.maintenance.thin_and_collect import gc
from rearview.store.maintenance.verify import verify
from rearview.store.project import Project

TEXT = "data = list(range(1000))\n\ntotal = sum(data)\n\nprint(total + {})\n"


def kept(folder):
    project = Project.create(folder)
    states = project.store / "multiversion" / "states"
    files = scripts(folder, a=TEXT.format(1), b=TEXT.format(2))
    known = Measurements(project.store / "multiversion" / "cells.jsonl")
    options = {"backend": "stored", "keep_states": True, "cache": 1e9}
    replay(files, measurements=known, store=states, **options)
    return project, states


def collected(project, **options):
    return gc(project, referenced=lambda: (), **options)


def test_damaged_and_incomplete_states_are_found_and_removed(tmp_path):
    project, states = kept(tmp_path)
    (state, *_) = sorted(states.iterdir())
    assert verify(project).ok
    with (state / "namespace").open("ab") as file:
        file.write(b"more")
    torn = states / "torn"
    torn.mkdir()
    (torn / "namespace").write_bytes(b"half")
    problems = {problem.path.name: problem.what for problem in verify(project).problems}
    assert "bytes" in problems[state.name]
    assert "interrupted" in problems["torn"]
    assert verify(project, repair=True).ok
    assert not state.exists()
    assert not torn.exists()
    assert verify(project).ok


def test_collection_removes_incomplete_states_and_the_oldest_beyond_the_budget(tmp_path):
    project, states = kept(tmp_path)
    before = {folder.name for folder in states.iterdir()}
    torn = states / "torn"
    torn.mkdir()
    os.utime(torn, (1, 1))
    assert collected(project, dry=True).files == 1
    assert torn.exists()
    collected(project)
    assert {folder.name for folder in states.iterdir()} == before
    assert collected(project, budget=0).nbytes > 0
    assert not list(states.iterdir())


def test_a_torn_line_of_measurements_is_named(tmp_path):
    project, _ = kept(tmp_path)
    file = project.store / "multiversion" / "cells.jsonl"
    with file.open("a") as stream:
        stream.write(json.dumps({"chain": "x"})[:5])
    (problem,) = verify(project).problems
    assert "1 line that cannot be read" in problem.what
    assert problem.done
