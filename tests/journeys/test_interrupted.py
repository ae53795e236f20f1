"""A run that is stopped, however, ends as if it had never been."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from limits import HUNG

JOB = """\
import hashlib, random, time

weights = [random.gauss(0, 1) for _ in range(32)]

def train(weights, epoch):
    total = 0.0
    for step in range(30):
        drawn = [random.random() for _ in weights]
        weights[:] = [w + 0.01 * (d - w) for w, d in zip(weights, drawn)]
        total += sum(weights)
        time.sleep(0.003)
    return total

log = open("log.txt", "w")
for epoch in range(6):
    total = train(weights, epoch)
    import rearview
    rearview.log("total", total)
    log.write(f"{epoch} {total!r}\\n")
    log.flush()
print(hashlib.sha256(repr(weights).encode()).hexdigest())
"""
ENV = {"REARVIEW_ENTROPY": "5a" * 32, "PYTHONHASHSEED": "3"}


@pytest.fixture
def job(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    return folder


def started(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        env={**os.environ, **ENV},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def done(folder, *words):
    process = started(folder, *words)
    out, err = process.communicate(timeout=HUNG)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    (folder / "job.py").write_text(JOB)
    code, out, err = done(folder, "run", "-q", "job.py")
    assert code == 0, err
    return out, (folder / "log.txt").read_text(), totals(folder)


def totals(folder):
    """Return what the newest run logged; one killed just after its end is followed by another."""
    code, out, err = done(folder, "table", "total", "--runs", "latest", "--format", "json")
    assert code == 0, err
    return [(row["epoch"], row["total"]) for row in json.loads(out)]


def until_logged(folder, lines):
    deadline = time.monotonic() + HUNG
    while True:
        file = folder / "log.txt"
        if file.exists() and len(file.read_text().splitlines()) >= lines:
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_killed_run_is_resumed_to_the_same_end(job, truth):
    process = started(job, "run", "-q", "--every", "job.py")
    until_logged(job, 3)
    process.kill()
    process.communicate()
    code, out, err = done(job, "resume", "-q")
    assert code == 0, err
    assert (out, (job / "log.txt").read_text(), totals(job)) == truth
    code, out, _ = done(job, "runs", "--json")
    assert [run["status"] for run in json.loads(out)] == ["finished"]


def test_a_finished_run_is_not_resumed(job, truth):
    assert done(job, "run", "-q", "job.py")[0] == 0
    code, _, err = done(job, "resume")
    assert code == 2
    assert "nothing to resume" in err


def test_a_preemptible_run_exits_with_85_and_continues_anywhere(job, truth, tmp_path):
    words = ("run", "-q", "--preemptible", "--remote", str(tmp_path / "away"), "job.py")
    process = started(job, *words)
    until_logged(job, 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HUNG)
    assert process.returncode == 85, err
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "job.py").write_text(JOB)
    code, out, err = done(elsewhere, *words)
    assert code == 0, err
    assert out == truth[0]
    assert totals(elsewhere) == truth[2]


def test_kills_at_random_instants_do_not_change_the_end(job, truth):
    chance = random.Random(hashlib.sha256(b"kills").digest())
    words = ("run", "-q", "--preemptible", "job.py")
    for attempt in range(20):
        process = started(job, *words)
        try:
            out, err = process.communicate(timeout=chance.uniform(0.6, 1.6))
        except subprocess.TimeoutExpired:
            process.send_signal(chance.choice([signal.SIGKILL, signal.SIGTERM]))
            out, err = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode in {85, -signal.SIGKILL, -signal.SIGTERM}, (attempt, err)
    else:
        code, out, err = done(job, *words)
        assert code == 0, err
    assert (out, (job / "log.txt").read_text(), totals(job)) == truth


def test_a_run_that_leaves_every_so_often_comes_to_the_same_end(job, truth):
    words = ("run", "-q", "--preemptible", "--exit-every", "0.2s", "job.py")
    codes = []
    while not codes or codes[-1] == 85:
        code, out, err = done(job, *words)
        codes.append(code)
        assert len(codes) < 30, err
    assert codes[0] == 85
    assert codes[-1] == 0, err
    assert (out, (job / "log.txt").read_text(), totals(job)) == truth


def test_a_run_that_takes_no_checkpoints_saves_when_a_signal_asks_it_to_exit(job, truth):
    words = ("run", "-q", "--preemptible", "--epsilon", "0", "job.py")
    process = started(job, *words)
    until_logged(job, 2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HUNG)
    assert process.returncode == 85, err
    assert list((job / ".rearview" / "checkpoints").rglob("*.json"))
    code, out, err = done(job, *words)
    assert code == 0, err
    assert (out, (job / "log.txt").read_text(), totals(job)) == truth


WAITING = """\
import os, random, signal, time

level = 0.0
for epoch in range(12):
    level += random.random()
    time.sleep(0.1)  # shorter iterations share a checkpoint
    if epoch == 5 and os.path.exists("wait"):
        print("here", flush=True)
        signal.pause()
"""


@pytest.mark.parametrize("options", ["--every --autolog", "--epsilon 0 --autolog"])
def test_a_resumed_run_keeps_the_options_it_was_started_with(tmp_path, options):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        (folder / "job.py").write_text(WAITING)
    words = ("run", "-q", *options.split(), "job.py")
    code, _, err = done(whole, *words)
    assert code == 0, err
    (killed / "wait").touch()
    process = started(killed, *words)
    assert process.stdout.readline() == "here\n"
    process.kill()
    process.communicate()
    (killed / "wait").unlink()
    code, _, err = done(killed, "resume", "-q")
    assert code == 0, err
    assert saved(killed) == saved(whole)
    assert levels(killed) == levels(whole)


def saved(folder):
    """Return how many checkpoints a project holds."""
    return len(list((folder / ".rearview" / "checkpoints").glob("*/*.json")))


def levels(folder):
    """Return the values of `level`, which only --autolog logs."""
    code, out, err = done(folder, "table", "level", "--format", "json")
    assert code == 0, err
    values = [(row["epoch"], row["level"]) for row in json.loads(out)]
    assert len(values) == 12
    return values


STORING = """\
import os, signal, time
from pyro.poutine import runtime

for epoch in range(6):
    store = runtime._PYRO_PARAM_STORE.params
    store["weight"] = store.get("weight", 1.0) * 1.5 + epoch
    if epoch == 3 and os.path.exists("wait"):
        print("here", flush=True)
        signal.pause()
    del store
    time.sleep(0.1)  # shorter iterations share a checkpoint
print(runtime._PYRO_PARAM_STORE.params)
"""


def test_parameters_in_the_store_of_a_library_are_resumed(job, tmp_path, monkeypatch):
    library = tmp_path / "library" / "pyro" / "poutine"
    library.mkdir(parents=True)
    for folder in (library.parent, library):
        (folder / "__init__.py").touch()
    (library / "runtime.py").write_text(
        "class Store:\n    def __init__(self):\n        self.params = {}\n"
        "_PYRO_PARAM_STORE = Store()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    (job / "job.py").write_text(STORING)
    truth = done(job, "run", "-q", "job.py")
    (job / "wait").touch()
    process = started(job, "run", "-q", "--every", "job.py")
    assert process.stdout.readline() == "here\n"
    process.kill()
    process.communicate()
    (job / "wait").unlink()
    assert done(job, "resume", "-q") == truth
