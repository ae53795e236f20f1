"""Jobs under a real Slurm: signalled before their end, preempted, killed; same end state."""

import os
import signal
import sys
from pathlib import Path

import pytest

from sites.common import HERE, SRC, expected, starts, until
from sites.slurm import served

STEPS = 60


@pytest.fixture(scope="module")
def site():
    yield from served()


@pytest.fixture
def submit(site, tmp_path, monkeypatch):
    monkeypatch.setitem(site.env, "PYTHONPATH", str(SRC))
    monkeypatch.setitem(site.env, "PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def submit(*options, seconds):
        return site.submit(
            f"--chdir={tmp_path}",
            *options,
            HERE / "slurm.sh",
            sys.executable,
            HERE / "train.py",
            STEPS,
            seconds,
            tmp_path,
        )

    return submit


def finished(site, tmp_path, job, seconds=150):
    def said():
        out = tmp_path / "out.txt"
        text = out.read_text()[-1500:] if out.exists() else ""
        return f"{site.run('scontrol', 'show', 'job', job)}\n{text}\nstarts {starts(tmp_path)}"

    until((tmp_path / "final.txt").exists, seconds, said)
    return (tmp_path / "final.txt").read_text()


def test_a_job_that_gets_usr1_before_its_end_is_queued_again_and_continues(site, submit, tmp_path):
    # one minute is the shortest limit, and Slurm looks at limits every half minute
    job = submit("--time=1", "--signal=USR1@55", seconds=0.8)
    assert finished(site, tmp_path, job) == expected(STEPS)
    begun = starts(tmp_path)
    assert len(begun) > 1
    assert begun == sorted(begun)
    assert begun[1] > 0
    assert int(site.job(job)["Restarts"]) == len(begun) - 1


def test_a_preempted_job_continues_from_its_save(site, submit, tmp_path):
    job = submit(seconds=0.1)
    until((tmp_path / "state.json").exists, 60, lambda: site.run("squeue"))
    site.run("scontrol", "requeue", job)
    assert finished(site, tmp_path, job) == expected(STEPS)
    assert starts(tmp_path)[1] > 0


def test_a_step_that_is_killed_outright_loses_no_completed_save(site, submit, tmp_path):
    job = submit(seconds=0.1)
    until((tmp_path / "state.json").exists, 60, lambda: site.run("squeue"))
    process = int((tmp_path / "trace.txt").read_text().split()[2])
    os.kill(process, signal.SIGKILL)
    until(lambda: site.job(job)["JobState"] == "FAILED", 60, lambda: site.run("squeue"))
    assert not (tmp_path / "final.txt").exists()
    again = submit(seconds=0.01)
    assert finished(site, tmp_path, again) == expected(STEPS)
    assert starts(tmp_path)[1] > 0
