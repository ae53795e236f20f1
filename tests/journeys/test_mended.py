"""Journey: a run that crashed goes on, with the source it ran or with the mended one."""

import os
import subprocess
import sys

import pytest

from plainly import SOURCE
from rearview._history import history
from rearview.config import Settings
from rearview.remote.open import open_remote
from rearview.store.maintenance.sync import pull, push
from rearview.store.project import Project
from rearview.store.runs import Runs
from rearview.store.versions.versions import Versions

pytestmark = pytest.mark.usefixtures("warm_start")

SCRIPT = """\
import random
import rearview

rate = 0.5
weight = 0.0


def scale(value):
    return value * rate


def report(epoch, value):
    if epoch == 4:
        return value / undefined_name
    return value


def finish(value):
    print("finished", value > 0)


def warm_up():
    total = 0
    for turn in range(3):
        total += scale(turn)
    return total


def train():
    global weight
    weight = warm_up()
    for epoch in range(6):
        weight += scale(random.random())
        rearview.log("score", report(epoch, weight))
    finish(weight)


train()
"""
MENDED = SCRIPT.replace("value / undefined_name", "value / 2  # mended")


class Script:
    """A project with a run that crashed in its fifth epoch."""

    def __init__(self, folder):
        self.folder = folder
        self.script = folder / "train.py"

    def rearview(self, *words):
        return subprocess.run(
            [sys.executable, "-m", "rearview", *words],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": SOURCE},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def crash(self, text=SCRIPT):
        self.script.write_text(text)
        crashed = self.rearview("run", "--every", "train.py")
        assert crashed.returncode == 1, crashed.stderr
        return crashed


@pytest.fixture
def project(tmp_path):
    return Script(tmp_path)


def test_a_resumed_run_shows_the_source_that_ran_and_says_that_it_differs(project):
    project.crash()
    project.script.write_text("# a new first line\n" + MENDED)
    resumed = project.rearview("resume")
    assert resumed.returncode == 1
    assert "return value / undefined_name\n" in resumed.stderr
    assert "mended" not in resumed.stderr
    assert resumed.stderr.count("train.py differs in the work tree") == 1


def test_a_resumed_run_says_nothing_of_a_source_that_is_the_same(project):
    project.crash()
    assert "work tree" not in project.rearview("resume").stderr


MENDS = {
    "a function that the loop calls": ("value / undefined_name", "value / 2"),
    "the body of the loop": (
        'rearview.log("score", report(epoch, weight))',
        'rearview.log("score", weight)',
    ),
    "with a new function and import": (
        "        return value / undefined_name",
        (
            "        return halved(value)\n    return value\n\n\nimport math\n\n\n"
            "def halved(value):\n    return math.floor(value) / 2\n\n\ndef unused(value):"
        ),
    ),
    "with another parameter": (
        "def report(epoch, value):\n    if epoch == 4:\n        return value / undefined_name",
        "def report(epoch, value, *more):\n    if epoch == 4:\n        return value / 2",
    ),
}


@pytest.mark.parametrize("name", MENDS)
def test_a_mend_that_runs_after_the_checkpoint_is_gone_on_with(name, project):
    project.crash()
    before = project.rearview("table", "score", "--format", "csv").stdout.splitlines()
    mended = SCRIPT.replace(*MENDS[name])
    assert mended != SCRIPT
    project.script.write_text(mended)
    resumed = project.rearview("resume", "--source", "worktree")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == "finished True\n"
    after = project.rearview("table", "score", "--format", "csv").stdout.splitlines()
    assert len(after) == 7
    assert after[:4] == before[:4]  # what the old source computed stays


def test_code_after_the_loop_may_be_edited_before_a_resume(project):
    text = SCRIPT.replace("value / undefined_name", "value").replace("value > 0", "undefined_name")
    project.crash(text)
    project.script.write_text(text.replace("undefined_name", "value > 0"))
    resumed = project.rearview("resume", "--source", "worktree")
    assert (resumed.returncode, resumed.stdout) == (0, "finished True\n"), resumed.stderr


CLASSES = """
import rearview

class Model:
    def __init__(self):
        self.weight = 1.0
    def step(self, epoch):
        self.weight *= 1.5
        if epoch == 3:
            self.weight /= undefined_name
        return self.weight

model = Model()
for epoch in range(5):
    rearview.log("weight", model.step(epoch))
print("finished", model.weight)
"""


def test_methods_may_be_mended_and_added(project):
    project.crash(CLASSES)
    mended = CLASSES.replace("self.weight /= undefined_name", "self.halve()").replace(
        "    def step", "    def halve(self):\n        self.weight /= 2\n    def step"
    )
    project.script.write_text(mended)
    resumed = project.rearview("resume", "--source", "worktree")
    assert (resumed.returncode, resumed.stdout) == (0, f"finished {1.5**5 / 2}\n"), resumed.stderr


FORBIDDEN = {
    "the set-up": ("rate = 0.5", "rate = 0.7", "line 4 of train.py was changed"),
    "a function that the set-up calls": (
        "return value * rate",
        "return value * rate * 2",
        "of train.py was changed",
    ),
    "a loop that ended before": (
        "total += scale(turn)",
        "total += 2 * scale(turn)",
        "of train.py was changed",
    ),
    "a line that was added to the set-up": (
        "weight = 0.0\n",
        "weight = 0.0\nrandom.seed(3)\n",
        "line 6 of train.py was added",
    ),
    "a line of the set-up that was removed": (
        "    weight = warm_up()\n",
        "",
        "is next to `weight = warm_up()`, which was removed",
    ),
    "a default of a function": (
        "def report(epoch, value):",
        "def report(epoch, value, share=2):",
        "of train.py was changed",
    ),
    "the loop itself": ("range(6)", "range(9)", "The loop epoch of train.py"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_mend_that_runs_before_the_checkpoint_is_refused(name, project):
    project.crash()
    old, new, reason = FORBIDDEN[name]
    project.script.write_text(MENDED.replace(old, new))
    refused = project.rearview("resume", "--source", "worktree")
    assert refused.returncode == 2, refused.stderr
    assert reason in refused.stderr
    assert "mend-too-early" in refused.stderr
    run = history(project.folder).run()
    assert (run.status.value, run.continued) == ("failed", ())
    project.script.write_text(MENDED)  # and nothing is lost by that
    assert project.rearview("resume", "--source", "worktree").returncode == 0


def test_a_run_of_two_sources_says_so_and_is_not_replayed(project):
    project.crash()
    project.script.write_text(MENDED)
    project.rearview("resume", "--source", "worktree")
    run = history(project.folder).run()
    assert run.source != run.version
    shown = project.rearview("show").stdout
    assert f"{run.source[:12]} from epoch=" in shown
    replayed = project.rearview("replay")
    assert (replayed.returncode, "two-sources" in replayed.stderr) == (2, True), replayed.stderr
    project.script.write_text(
        MENDED.replace("    finish", "        rearview.log('w', 1)\n    finish")
    )
    filled = project.rearview("backfill", "w")
    assert filled.returncode == 1
    assert "continued with another source" in filled.stdout + filled.stderr


def test_a_continued_run_that_stops_again_continues_with_its_last_source(project):
    project.crash()
    twice = MENDED.replace(
        "    return value\n", "    return value + (also_undefined if epoch > 4 else 0)\n", 1
    )
    project.script.write_text(twice)
    again = project.rearview("resume", "--source", "worktree")
    assert again.returncode == 1
    assert "also_undefined" in again.stderr
    same = project.rearview("resume")
    assert "also_undefined" in same.stderr
    project.script.write_text(MENDED)
    assert project.rearview("resume", "--source", "worktree").returncode == 0
    assert len(history(project.folder).run().continued) == 2


def test_a_run_without_a_checkpoint_is_not_gone_on_with(project):
    project.script.write_text("undefined_name\n")
    project.rearview("run", "train.py")
    project.script.write_text("print('mended')\n")
    refused = project.rearview("resume", "--source", "worktree")
    assert refused.returncode == 2
    assert "no-checkpoint" in refused.stderr


def test_both_sources_of_a_continued_run_travel(project, tmp_path_factory):
    project.crash()
    project.script.write_text(MENDED)
    project.rearview("resume", "--source", "worktree")
    run = history(project.folder).run()
    remote = open_remote(str(tmp_path_factory.mktemp("remote")))
    push(Project.open(project.folder), run.id, remote, "key")
    there = Project.create(tmp_path_factory.mktemp("there"))
    assert pull(there, remote, "key") == run.id
    texts = Versions(there, Settings()).files(Runs(there).get(run.id).source)
    assert texts["train.py"].decode() == MENDED
