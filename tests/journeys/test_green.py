"""A run that waits for green power and pauses without it ends as if it had never been paused."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from energy.grid import HOUR, Grid, serving
from limits import HUNG

JOB = """\
import hashlib, random, time, rearview

weights = [random.gauss(0, 1) for _ in range(16)]
for epoch in range(30):
    for step in range(10):
        weights[:] = [w + 0.01 * (random.random() - w) for w in weights]
        time.sleep(0.01)
    rearview.log("total", sum(weights))
print(hashlib.sha256(repr(weights).encode()).hexdigest())
"""
ENV = {"REARVIEW_ENTROPY": "5a" * 32, "PYTHONHASHSEED": "3", "REARVIEW_EVERY": "1"}


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def started(folder, url, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        env={**os.environ, **ENV, "REARVIEW_GRID": f"energy-charts:de@{url}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(folder, url, *words):
    process = started(folder, url, *words)
    out, err = process.communicate(timeout=HUNG)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    (folder / "job.py").write_text(JOB)
    code, out, err = done(folder, "http://127.0.0.1:9", "run", "-q", "job.py")
    assert code == 0, err
    return out


class Soon(Grid):
    """A grid whose light changes every few seconds from the first question on; then nothing is known."""

    def __init__(self, *lights, each):
        super().__init__(time.time())
        self.each = each
        self.lights = list(lights)
        self.shares = [{0: 10.0, 1: 50.0, 2: 90.0}[light] for light in lights]

    def answer(self, path, query, headers):
        if not self.asked:
            self.times = [int(time.time()) + self.each * n for n in range(len(self.lights))]
        return super().answer(path, query, headers)


def statuses(folder):
    _, out, _ = done(folder, "", "runs", "--json")
    return [run["status"] for run in json.loads(out)]


def test_a_green_run_waits_pauses_resumes_and_ends_with_the_same_result(job, truth):
    with serving(Soon(0, 2, 0, each=3)) as url:
        code, out, err = done(job, url, "run", "--green", "job.py")
        assert (code, out) == (0, truth), err
        said = [line.removeprefix("rearview: ").split(":")[0] for line in err.splitlines()]
        assert said == [
            "waiting",
            "recording",
            "pausing at the next point",
            "waiting",
            "continuing",
        ]
        code, out, err = done(job, url, "energy", "report", "--json")
    found = json.loads(out)
    assert len(found["on"]) == 2  # once before the pause, once after it
    assert found["on"][0]["begin"] - found["asked"] > 0.5
    assert found["kwh"] > 0
    assert found["how"][0].startswith(("estimate", "RAPL"))
    assert "Fraunhofer" in found["attribution"][0]
    assert statuses(job) == ["finished"]


def test_for_batch_systems_it_leaves_with_85_instead_of_waiting(job, truth):
    words = ("run", "--green", "--exit-when-paused", "job.py")
    red, green = Grid(time.time()), Grid(time.time())
    red.lights, green.lights = [0] * 8, [2] * 8
    with serving(red) as url:
        code, out, err = done(job, url, *words)
    assert (code, out) == (85, "")
    assert "not now" in err
    assert statuses(job) == []
    with serving(Soon(2, 0, each=2)) as url:
        code, out, err = done(job, url, *words)
    assert (code, out) == (85, ""), err
    assert statuses(job) == ["paused"]
    with serving(green) as url:
        code, out, err = done(job, url, *words)
    assert (code, out) == (0, truth), err
    assert statuses(job) == ["finished"]
    _, out, _ = done(job, "", "energy", "report", "--json", "--offline")
    found = json.loads(out)
    assert found["asked"] < found["on"][0]["begin"] - 0.5  # when it was first asked for


@pytest.mark.parametrize(
    "fault",
    [(422, {"detail": "no"}), (200, {"unix_seconds": None})],
    ids=["refused", "null"],
)
def test_when_the_service_fails_nothing_is_held_back(job, truth, fault):
    grid = Grid(time.time())
    grid.fault = fault
    with serving(grid) as url:
        code, out, err = done(job, url, "run", "--green", "job.py")
    assert (code, out) == (0, truth)
    assert "recording: not held back: energy-charts" in err


def test_an_answer_that_is_out_of_date_holds_nothing_back(job, truth):
    with serving(Grid(time.time() - 30 * HOUR)) as url:
        code, out, err = done(job, url, "run", "--green", "job.py")
    assert (code, out) == (0, truth), err


def test_at_the_deadline_a_run_begins_at_any_colour(job, truth):
    red = Grid(time.time())
    red.lights = [0] * 8
    with serving(red) as url:
        code, out, err = done(job, url, "run", "--green", "--by", "3s", "job.py")
    assert (code, out) == (0, truth), err
    assert "how long it takes is not known" in err
    assert "the deadline leaves no time to wait" in err


def test_a_green_run_can_be_stopped_while_it_waits_and_while_it_runs(job, truth):
    red = Grid(time.time())
    red.lights = [0] * 8
    with serving(red) as url:
        for number, code in ((signal.SIGTERM, 85), (signal.SIGINT, 130)):
            process = started(job, url, "run", "--green", "job.py")
            assert "waiting" in process.stderr.readline()
            process.send_signal(number)
            process.communicate(timeout=HUNG)
            assert process.returncode == code
    green = Grid(time.time())
    green.lights = [2] * 8
    with serving(green) as url:
        process = started(job, url, "run", "--green", "job.py")
        assert "recording" in process.stderr.readline()
        time.sleep(1.5)
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=HUNG)
        assert (process.returncode, out) == (85, ""), err
        code, out, err = done(job, url, "run", "--green", "job.py")
    assert (code, out) == (0, truth), err
    assert statuses(job) == ["finished"]


def test_killed_outright_it_takes_the_program_along_and_loses_nothing(job, truth):
    green = Grid(time.time())
    green.lights = [2] * 8
    with serving(green) as url:
        with started(job, url, "run", "--green", "job.py") as process:
            assert "recording" in process.stderr.readline()
            time.sleep(1.5)
            process.kill()
        deadline = time.monotonic() + HUNG
        while statuses(job) == ["running"]:
            assert time.monotonic() < deadline
        code, out, err = done(job, url, "run", "--green", "job.py")
    assert (code, out) == (0, truth), err
    assert statuses(job) == ["finished"]


def test_a_pause_saves_even_if_recording_takes_no_checkpoints(job, truth):
    words = ("run", "--green", "--exit-when-paused", "--epsilon", "0", "job.py")
    for each in (2, 5, 12):  # a machine that is busy may not even have begun when the light changes
        with serving(Soon(2, 0, each=each)) as url:
            env = {**os.environ, **ENV, "REARVIEW_GRID": f"energy-charts:de@{url}"}
            env["REARVIEW_EVERY"] = "0"
            done = subprocess.run(
                [sys.executable, "-m", "rearview", *words], cwd=job, env=env, check=False
            )
        assert done.returncode == 85
        if saved := list((job / ".rearview" / "checkpoints").rglob("*.json")):
            break
    assert saved
