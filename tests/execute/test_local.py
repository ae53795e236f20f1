"""Segments get cores and accelerators of their own where that cannot change what they compute."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rearview.execute import cores_and_accelerators
from rearview.execute.executor import Task
from rearview.execute.local import Local
from rearview.execute.replay_jobs import needs_rerun
from rearview.model import ReplayReport


def task(folder, code="pass", **more):
    return Task(
        "t",
        (sys.executable, "-c", code),
        dict(os.environ),
        folder,
        folder / "output.txt",
        folder / "report.json",
        **more,
    )


def printed(job):
    while job.wait(0.5) is None:
        pass
    return job.task.log.read_text().strip()


CORES = "import os; print(sorted(os.sched_getaffinity(0)))"
# a process is pinned just after it has begun: give a busy machine the time for that
PINNED = f"""\
import os, time
end = time.monotonic() + 1200
while len(os.sched_getaffinity(0)) > {len(cores_and_accelerators.cores()[0])} and time.monotonic() < end:
    time.sleep(0.01)
{CORES}
"""


@pytest.mark.skipif(
    len(cores_and_accelerators.cores()) < 2,
    reason="LOUD: one core only, nothing can be pinned apart",
)
def test_each_slot_has_its_own_cores_if_the_run_set_its_number_of_threads(tmp_path):
    local, found = Local(2), []
    for slot in (0, 1):
        folder = tmp_path / str(slot)
        folder.mkdir()
        found.append(printed(local.start(task(folder, PINNED, threads=1), slot)))
    assert found == [str(core) for core in cores_and_accelerators.cores()[:2]]


def test_a_run_that_set_no_number_of_threads_may_use_every_core(tmp_path):
    job = Local(2).start(task(tmp_path, CORES), 1)
    assert printed(job) == str(sorted(os.sched_getaffinity(0)))


def test_pinning_does_not_change_how_many_threads_compute(tmp_path):
    pytest.importorskip("torch", reason="LOUD: torch is not installed")
    code = "import torch; print(torch.get_num_threads())"
    one = task(tmp_path, code, threads=1)
    one = replace(one, environment={**one.environment, "OMP_NUM_THREADS": "1"})
    assert printed(Local(1).start(one, 0)) == "1"


def test_a_process_that_is_gone_is_left_alone(tmp_path):
    assert cores_and_accelerators.pin(2**22 - 1, task(tmp_path, threads=1), 0) == frozenset()


def test_whole_cores_are_shared_out(tmp_path, monkeypatch):
    monkeypatch.setattr(cores_and_accelerators, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    for one, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{one}" / "topology"
        folder.mkdir(parents=True)
        Path(folder, "thread_siblings_list").write_text(siblings + "\n")
    assert cores_and_accelerators.cores() == [[0, 2], [1, 3]]


def test_accelerators_are_shared_out_if_they_are_alike(tmp_path, monkeypatch):
    monkeypatch.delenv(cores_and_accelerators.VISIBLE, raising=False)
    monkeypatch.setattr(cores_and_accelerators, "gpus", lambda: ["A100"] * 4)
    one = task(tmp_path, accelerators=2)
    seen = [
        cores_and_accelerators.environment_of(one, slot).get(cores_and_accelerators.VISIBLE)
        for slot in range(3)
    ]
    assert seen == ["0,1", "2,3", "0,1"]
    bounded = replace(one, environment={cores_and_accelerators.VISIBLE: "5,7"}, accelerators=1)
    assert cores_and_accelerators.environment_of(bounded, 1)[cores_and_accelerators.VISIBLE] == "7"
    assert cores_and_accelerators.environment_of(replace(one, accelerators=4), 1) == one.environment
    monkeypatch.setattr(cores_and_accelerators, "gpus", lambda: ["A100", "T4"])
    assert cores_and_accelerators.environment_of(replace(one, accelerators=1), 1) == one.environment


def test_a_difference_on_few_cores_is_settled_with_all_of_them():
    assert needs_rerun(ReplayReport(difference="w", finished=True), pinned=True)
    assert not needs_rerun(ReplayReport(error="it failed"), pinned=True)
