"""A budget is kept while a run goes on, by a process beside it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rearview.config import Settings
from rearview.model import Edge, Point, Snapshot, Step
from rearview.runtime.saving import overhead as budgets
from rearview.runtime.saving.overhead import Costs, DiskBudget
from rearview.runtime.saving.writer import Writer
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.maintenance import thin_and_collect
from rearview.store.maintenance.thin_and_collect import fit_budget, usage
from rearview.store.maintenance.verify import verify
from rearview.store.project import Project
from rearview.store.runs import Runs

MB = 1 << 20


@pytest.fixture
def project(tmp_path):
    return Project.create(tmp_path)


def fill(project, run, count):
    """Save `count` checkpoints of 2 MB that share nothing, and make them look old."""
    checkpoints = Checkpoints(project)
    writer = Writer(checkpoints, Settings())
    state = {"w": np.zeros(MB // 4)}
    for seq in range(count):
        state["w"] += 1 + hash(run) % 1000
        point = Point((Step("epoch", seq),))
        assert writer.submit(Snapshot(run, seq, point, Edge.START, b"", state), wait=True)
        assert writer.drain(30)
    assert writer.close(30)
    for folder, _, names in os.walk(project.store):
        for name in names:
            os.utime(Path(folder, name), (1e9, 1e9))
    return checkpoints


def begun(project, *, ended):
    runs = Runs(project)
    run = runs.reserve()
    runs.start(run, {})
    if ended:
        runs.end(run, 0)
    return run


def test_the_store_is_made_to_fit_by_thinning_evenly(project):
    run = begun(project, ended=True)
    checkpoints = fill(project, run, 8)
    freed = fit_budget(project, 7 * MB, run)
    assert len(freed.checkpoints) == 5
    assert usage(project) == freed.left <= 7 * MB
    left = [each.seq for each in checkpoints.of(run)]
    assert left[-1] == 7  # where the run would be continued
    assert verify(project).problems == ()


def test_other_runs_in_progress_keep_all_their_checkpoints(project, monkeypatch):
    monkeypatch.setattr(thin_and_collect, "RECORDING", 0.0)
    mine, other = begun(project, ended=False), begun(project, ended=False)
    fill(project, mine, 4)
    checkpoints = fill(project, other, 4)
    freed = fit_budget(project, MB, mine)
    assert len(checkpoints.of(other)) == 4
    assert len(freed.checkpoints) == 3
    assert len(checkpoints.of(mine)) == 1


def test_a_run_that_outgrows_the_disk_budget_is_thinned_by_another_process(project):
    run = begun(project, ended=True)
    checkpoints = fill(project, run, 6)
    budget = DiskBudget(project, run, 8 * MB)
    budget.saved(Costs(stored=2 * MB))
    for _ in range(600):
        if budget._is_idle():
            break
        time.sleep(0.05)
    assert budget.used == usage(project) <= 8 * MB * budgets.CLEANUP_TARGET
    assert len(checkpoints.of(run)) == 3


def test_no_cleanup_starts_within_the_budget_or_without_one(project, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    run = begun(project, ended=True)
    fill(project, run, 2)
    for most in (0, 100 * MB):
        budget = DiskBudget(project, run, most)
        for _ in range(3):
            budget.saved(Costs(stored=MB))
        budget.close()


def test_a_cleanup_is_not_started_again_at_once(project, monkeypatch):
    started = []

    class Done:
        def poll(self):
            return 0

        def communicate(self):
            return ("broken", None)

    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(a) or Done())
    run = begun(project, ended=True)
    fill(project, run, 2)
    budget = DiskBudget(project, run, MB)
    for _ in range(5):
        budget.saved(Costs(stored=MB))
    assert len(started) == 1


def test_a_recorded_run_keeps_to_the_budget(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np\n"
        "w = np.random.default_rng(0).standard_normal(300_000)\n"
        "for epoch in range(8):\n"
        "    w += 1\n"
        "    sum(range(400_000))\n"
    )
    env = {**os.environ, "REARVIEW_EVERY": "1", "REARVIEW_BUDGET": str(6 * MB)}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "rearview", "run", "train.py"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    project = Project.open(tmp_path)
    checkpoints = Checkpoints(project)
    (run,) = checkpoints.runs()
    for _ in range(600):
        if len(checkpoints.of(run)) <= 3:
            break
        time.sleep(0.05)
    assert 1 <= len(checkpoints.of(run)) <= 3  # the last shares its bytes with another
    assert verify(project).problems == ()


def test_a_clean_up_that_cannot_be_started_does_not_fail_the_save_or_the_end_of_the_run(
    project, monkeypatch
):
    def no_more_processes(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", no_more_processes)
    budget = DiskBudget(project, "r", limit=1, used=10)
    budget.saved(Costs(stored=5))
    assert budget.used == 15
    budget.close()
