"""Cells are counted at any depth of loops, and what is a guess is said to be one."""

import shutil
import subprocess

import pytest

from limits import HUNG
from plainly import recorded, write
from rearview._history import history
from rearview.backfill.facts_and_segments import deep_loops, inner_loops
from rearview.backfill.reports import MissingCells
from rearview.model import LoopTotals, MainLoop, RunEnd
from rearview.model.run import read_record

pytestmark = pytest.mark.usefixtures("warm_start")

SHORT = """
import os, time, rearview
total = 0
for epoch in range(300):
    for step in range(3):
        total += step
        rearview.log("loss", total)
"""
STOPS = """
    if epoch == int(os.environ.get("REARVIEW_STOPS", -1)):
        os._exit(9)
    time.sleep(0.02)
"""
DEEP = """
import time
total = 0
for epoch in range(3):
    for fold in range(2):
        for batch in range(2 + epoch):
            for item in range(2):
                total += item
                time.sleep(0.012)
    if epoch == 1:
        for test in range(4):
            time.sleep(0.01)
"""


def probe(folder, after, name):
    text = (folder / "train.py").read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith(after))
    indent = line[: len(line) - len(line.lstrip())]
    added = f"{line}\n{indent}import rearview\n{indent}rearview.log({name!r}, total)"
    write(folder, train=text.replace(line, added, 1))


def filled(folder, name, at=None):
    report = history(folder).backfill([name], at=at)
    assert report.proved, report.proof
    return report.written


def test_iterations_that_pass_in_slices_count_their_inner_loops_each(tmp_path):
    write(tmp_path, train=SHORT)
    # iterations that are saved one by one pass one by one
    assert recorded(tmp_path, "train.py", every=False).code == 0
    main = history(tmp_path).run().end.main
    assert any(many > 1 for many, _ in main.iterations), "nothing passed in slices"
    assert [count for _, count in main.inner["train.py:<module>:1:step"]] == [3] * 300
    probe(tmp_path, "total +=", "t")
    assert history(tmp_path).plan(["t"]).missing == MissingCells(900)
    # asked for one of those that passed together with others
    assert filled(tmp_path, "t", "epoch=297/step=1") == 1
    assert history(tmp_path).plan(["t"]).missing == MissingCells(900)
    assert filled(tmp_path, "t") == 900


@pytest.mark.parametrize(
    ("after", "cells"),
    [("total += item", 36), ("for item", 18), ("for batch", 6), ("time.sleep(0.01)", 4)],
)
def test_loops_are_counted_at_any_depth(deep, after, cells):
    probe(deep, after, "t")
    if after.startswith("for"):
        text = (deep / "train.py").read_text()
        write(deep, train=moved_up(text))
    assert history(deep).plan(["t"]).missing == MissingCells(cells)
    assert filled(deep, "t") == cells


def moved_up(text):
    """Put what was added behind the head of a loop before it."""
    lines = text.splitlines()
    at = lines.index(next(line for line in lines if "import rearview" in line))
    return "\n".join([*lines[: at - 1], lines[at], lines[at + 1], lines[at - 1], *lines[at + 2 :]])


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep")
    write(folder, train=DEEP)
    assert recorded(folder, "train.py").code == 0
    return folder


@pytest.fixture
def deep(recording, tmp_path):
    shutil.copytree(recording, tmp_path / "deep")
    history(tmp_path / "deep").trust()
    return tmp_path / "deep"


def main(**more):
    facts = {"site": "a:0:epoch", "iterations": [(1, 0.1)] * 3, "counted": [0, 9], **more}
    return read_record(MainLoop, facts)


END = RunEnd(loops={"a:1:fold": LoopTotals(), "a:2:step": LoopTotals()})


def test_a_loop_that_was_not_watched_to_its_end_is_a_guess():
    # `step` was looked at once, 5 times round, and was too short to be looked at again
    facts = main(
        inner={"a:1:fold": [(0.1, 2), (0.1, 3), (0.1, 2)]},
        deep={"fold/step": {"site": "a:2:quiet", "entries": 1, "counts": [5]}},
    )
    inner = inner_loops(facts, END, 3)
    assert (inner[0].counts, inner[0].counted) == ([2, 3, 2], range(3))
    found = deep_loops(facts, END, 3, inner)["fold", "step"]
    assert (found.counts, list(found.counted)) == ([10, 15, 10], [])


def test_a_loop_that_is_not_always_there_is_counted_where_it_is():
    (inner,) = inner_loops(main(inner={"a:1:fold": [(0.0, 0), (0.1, 3)]}), END, 3)
    assert (inner.counts, inner.counted) == ([0, 3, 0], range(3))


def test_iterations_of_another_process_are_a_guess():
    facts = main(inner={"a:1:fold": [(0.0, 0), (0.1, 4), (0.1, 4)]}, counted=[1, 9])
    (inner,) = inner_loops(facts, END, 3)
    assert (inner.counts, inner.counted) == ([4, 4, 4], range(1, 3))


def test_runs_of_older_versions_counted_slices_together():
    inner = {"a:1:fold": [(0.1, 3), (0.0, 0), (0.2, 6)]}
    facts = main(inner=inner, iterations=[(1, 0.1), (2, 0.1)], counted=None)
    (inner,) = inner_loops(facts, END, 3)
    assert (inner.counts, list(inner.counted)) == ([3, 3, 3], [])


def test_the_number_of_missing_cells_says_whether_it_is_exact():
    assert str(MissingCells(2)) == "2 cells"
    assert str(MissingCells(1, approximate=True)) == "about 1 cell"
    assert str(MissingCells(6, at_least=True)) == "at least 6 cells"
    assert str(MissingCells(6, approximate=True, at_least=True)) == "at least about 6 cells"


def test_a_resumed_run_can_be_backfilled_before_the_point_of_its_resumption(tmp_path, monkeypatch):
    write(tmp_path, train=SHORT.replace("range(300)", "range(6)") + STOPS)
    monkeypatch.setenv("REARVIEW_STOPS", "3")
    assert recorded(tmp_path, "train.py").code == 9
    monkeypatch.delenv("REARVIEW_STOPS")
    how = history(tmp_path).resume()
    subprocess.run(how.command, cwd=how.folder, env=how.environment, timeout=HUNG, check=True)
    first = history(tmp_path).run().end.main.counted[0]
    assert 0 < first <= 3
    probe(tmp_path, "total +=", "t")
    assert history(tmp_path).plan(["t"]).missing == MissingCells(18, approximate=True)
    assert filled(tmp_path, "t", "epoch=1/step=1") == 1
    assert filled(tmp_path, "t") == 18


CALLED = """
import many


def add(values):
    found = 0
    for value in values:
        found += value
    return found


class Model:
    def fit(self):
        total = 0
        for i in range(20):
            total += i
            total += add(range(3))
        return total


print(Model().fit())
"""


def test_a_statement_in_a_method_with_too_many_callers_to_know_is_filled(tmp_path):
    """Not known to be in loops is not the same as known to be before them."""
    users = [f"def use{n}(models):\n    for m in models:\n        m.fit()\n" for n in range(70)]
    write(tmp_path, train=CALLED, many="\n".join(users))
    assert recorded(tmp_path, "train.py").code == 0
    probe(tmp_path, "total += i", "t")
    assert filled(tmp_path, "t") == 20
