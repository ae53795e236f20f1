"""A node that takes jobs when its power is green, under a real HTCondor."""

import tempfile
import time
from pathlib import Path

import pytest

from energy.grid import Grid, serving
from sites import condor as module
from sites.common import SRC, expected, starts, until
from sites.condor import condor
from sites.condor_jobs import enter, finished, submit


@pytest.fixture
def jobs():
    with tempfile.TemporaryDirectory(prefix="condor-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def light(site, name, value):
    until(
        lambda: value in site.run("condor_status", "-af", name, check=False),
        60,
        lambda: site.log("StartLog"),
    )


def test_a_node_works_while_its_power_is_green_and_its_jobs_save_when_it_is_not(jobs, monkeypatch):
    grid = Grid(time.time())
    grid.shares, grid.lights = [10.0] * 8, [0] * 8
    with serving(grid) as url:
        monkeypatch.setattr(
            module,
            "SETTINGS",
            {
                **module.SETTINGS,
                "STARTD_CRON_JOBLIST": "GREEN",
                "STARTD_CRON_GREEN_EXECUTABLE": "/usr/bin/python3",
                "STARTD_CRON_GREEN_ARGS": f"-m rearview.energy.htcondor_cron --url {url}",
                "STARTD_CRON_GREEN_ENV": "PYTHONPATH=/rearview",
                "STARTD_CRON_GREEN_PERIOD": "2s",
                "START": "GreenStart =?= True",
                "PREEMPT": "GreenContinue =?= False",
            },
        )
        context = condor(SRC, jobs)
        site = enter(context)
        try:
            folder = submit(site, jobs, "job", steps=150, seconds=0.1)
            light(site, "GreenStart", "false")
            time.sleep(5)
            assert starts(folder) == []
            grid.shares, grid.lights = [95.0] * 8, [2] * 8
            until(lambda: starts(folder), 60, lambda: site.log("StartLog"))
            grid.shares, grid.lights = [10.0] * 8, [0] * 8
            until(lambda: "evicted" in (folder / "log.txt").read_text(), 60, folder.iterdir)
            assert not (folder / "final.txt").exists()
            grid.shares, grid.lights = [95.0] * 8, [2] * 8
            assert finished(site, folder) == expected(150)
            assert starts(folder)[1] > 0
        finally:
            context.__exit__(None, None, None)
