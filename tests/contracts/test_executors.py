"""Every executor keeps the same promises."""

import os
import signal
import sys
import time

import pytest

from limits import HUNG
from rays import traceless
from rearview.execute.executor import Task, by_hand
from rearview.execute.local import Local


def make_local():
    return Local(2)


def make_ray():
    pytest.importorskip("ray", reason="LOUD: ray is not installed, its executor is not tested")
    from rearview.execute.ray import Ray

    os.environ["RAY_ADDRESS"] = "local"  # not a cluster that another test has started
    return Ray(2)


@pytest.fixture(params=[make_local, make_ray], ids=["local", "ray"], scope="module")
def executor(request):
    with traceless():
        made = request.param()
        yield made
        made.close()


def task(folder, code):
    return Task(
        id="t",
        command=(sys.executable, "-c", code),
        environment={**os.environ, "GREETING": "hello"},
        folder=folder,
        log=folder / "output.txt",
        report=folder / "report.json",
    )


def ended(job):
    while (code := job.wait(0.5)) is None:
        pass
    return code


def test_a_task_runs_in_its_folder_and_environment_and_leaves_its_output(executor, tmp_path):
    job = executor.start(task(tmp_path, "import os; print(os.environ['GREETING'], os.getcwd())"), 0)
    assert ended(job) == 0
    assert (tmp_path / "output.txt").read_text().split() == ["hello", str(tmp_path)]


def test_the_exit_code_is_the_tasks_own(executor, tmp_path):
    assert ended(executor.start(task(tmp_path, "raise SystemExit(7)"), 0)) == 7


def test_a_task_that_was_killed_says_so(executor, tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert ended(executor.start(task(tmp_path, code), 0)) == -signal.SIGKILL


def test_a_stopped_task_does_not_continue(executor, tmp_path):
    mark = tmp_path / "mark"
    code = f"import time, pathlib; pathlib.Path({str(mark)!r}).touch(); time.sleep(600)"
    job = executor.start(task(tmp_path, code), 0)
    deadline = time.monotonic() + HUNG
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.stop()
    assert ended(job) != 0


def test_there_are_as_many_slots_as_asked_for(executor):
    assert executor.slots == 2


def test_a_task_can_be_started_by_hand(tmp_path):
    one = task(tmp_path, "pass")
    assert by_hand(one)[-len(one.command) :] == [*one.command]
