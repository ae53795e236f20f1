"""`rearview submit --condor` under a real HTCondor: an unmodified script, interrupted, ends the same."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sites.common import HERE, SRC, until
from sites.condor import ROOT, condor
from sites.condor_jobs import enter

NAME = """it's a "name", of $(HOME)"""
PATHS = "PYTHONPATH=/rearview:/opt/rearview"


@pytest.fixture(scope="module")
def jobs():
    with tempfile.TemporaryDirectory(prefix="condor-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def site(jobs):
    if (ROOT / "complete").exists() and not (ROOT / "opt" / "rearview" / "msgspec").exists():
        pytest.skip("NOT TESTED under a real HTCondor: run tests/sites/install again")
    context = condor(SRC, jobs)
    yield enter(context)
    context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    command = [sys.executable, str(HERE / "handsfree.py"), "30", "0", NAME]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return (folder / "model.txt").read_text()


def submitted(site, jobs, name, *options):
    """Submit the training in a folder of its own; return where its results come to."""
    folder = jobs / name
    folder.mkdir()
    folder.chmod(0o777)
    shutil.copy(HERE / "handsfree.py", folder)
    site.run(
        *("env", PATHS, "python3", "-m", "rearview", "submit", "--condor", "--submit", *options),
        *("--every", "--set", f'environment="{PATHS}"', "--set", "request_memory=100"),
        *("handsfree.py", "30", "0.4", NAME),
        folder=f"/jobs/{name}",
    )
    return folder / "handsfree.results"


def finished(site, home):
    def said():
        logs = [home / f"handsfree.{kind}" for kind in ("log", "err", "out")]
        return "".join(f"--- {one}\n{one.read_text()[-2000:]}" for one in logs if one.exists())

    until((home / "model.txt").exists, 120, said)
    return (home / "model.txt").read_text()


def begun(home):
    """Return how often the run was gone on with."""
    (run,) = (home / ".rearview" / "runs").iterdir()
    lines = (run / "events.jsonl").read_text().splitlines()
    return sum(json.loads(line).get("event") == "resumed" for line in lines)


def test_a_submitted_script_leaves_now_and_then_and_ends_the_same(site, jobs, truth):
    home = submitted(site, jobs, "periodic", "--exit-every", "3s")
    assert finished(site, home) == truth
    until((home / ".rearview" / "runs").exists, 30, lambda: list(home.iterdir()))
    assert begun(home) >= 2
    # what comes back comes to its own folder, never into the project
    assert not (home.parent / ".rearview").exists()
    assert not (home.parent / "model.txt").exists()


def test_a_submitted_script_that_is_evicted_and_killed_ends_the_same(site, jobs, truth):
    home = submitted(site, jobs, "evicted", "--exit-every", "4s")
    log = home / "handsfree.log"

    def happens(what):
        count = log.read_text().count(what)
        until(lambda: log.read_text().count(what) > count, 60, log.read_text)

    happens("Finished transferring output files")  # a checkpoint
    job = log.read_text().split("(")[1].split(")")[0].removesuffix(".000")
    site.run("condor_vacate_job", job)
    happens("Job executing on host")
    site.run("condor_vacate_job", "-fast", job)
    assert finished(site, home) == truth
