"""Jobs under a real HTCondor: self-checkpointing, evicted, killed."""

import tempfile
import time
from pathlib import Path

import pytest

from sites.common import SRC, expected, starts, until
from sites.condor import condor
from sites.condor_jobs import enter, finished, submit


@pytest.fixture(scope="module")
def jobs():
    with tempfile.TemporaryDirectory(prefix="condor-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def site(jobs):
    context = condor(SRC, jobs)
    yield enter(context)
    context.__exit__(None, None, None)


def running(site, folder, after):
    until(lambda: len(starts(folder)) > after, 60, lambda: site.run("condor_q", check=False))


def job_of(folder):
    return (folder / "log.txt").read_text().split("(")[1].split(")")[0].removesuffix(".000")


def test_a_job_exits_with_85_at_intervals_and_continues_each_time(site, jobs):
    folder = submit(site, jobs, "periodic", steps=60, seconds=0.1, options="'exit_every=\"2s\"'")
    assert finished(site, folder) == expected(60)
    begun = starts(folder)
    assert len(begun) >= 3
    assert begun == sorted(set(begun))


def test_an_evicted_job_saves_at_its_next_step_and_continues_from_there(site, jobs):
    folder = submit(site, jobs, "evicted", steps=60, seconds=0.15)
    running(site, folder, 0)
    time.sleep(3)
    site.run("condor_vacate_job", job_of(folder))
    assert finished(site, folder) == expected(60)
    begun = starts(folder)
    assert len(begun) == 2
    assert begun[1] >= 10


def test_a_killed_job_continues_from_the_last_transferred_checkpoint(site, jobs):
    folder = submit(site, jobs, "killed", steps=80, seconds=0.1, options="'exit_every=\"2s\"'")
    running(site, folder, 2)
    before = starts(folder)[-1]
    site.run("condor_vacate_job", "-fast", job_of(folder))
    assert finished(site, folder) == expected(80)
    assert all(step >= before > 0 for step in starts(folder)[3:])
