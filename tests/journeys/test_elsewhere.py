"""A run with a remote goes on elsewhere, however it died, and only once at a time."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

JOB = """\
import os, random, time
from pathlib import Path
import rearview

weights = [random.gauss(0, 1) for _ in range(32)]
for epoch in range(8):
    for step in range(20):
        weights[:] = [w + 0.01 * (random.random() - w) for w in weights]
    rearview.log("total", sum(weights))
    # it waits here, so that a test can see what has been brought away
    while Path(os.environ["GATE"], "wait").exists() and epoch == 5:
        Path(os.environ["GATE"], "there").touch()
        time.sleep(0.01)
print(repr(weights))
"""
SEEDS = {"REARVIEW_ENTROPY": "5a" * 32, "PYTHONHASHSEED": "3"}


@pytest.fixture
def world(tmp_path):
    """Return a folder with the job, one for its gate, and a starter of commands."""
    (tmp_path / "gate").mkdir()
    started = []

    def start(folder, *words):
        folder.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "rearview", *words],
            cwd=folder,
            env={**os.environ, **SEEDS, "GATE": str(tmp_path / "gate")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.py").write_text(JOB)
    yield tmp_path, start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def done(process):
    out, err = process.communicate()
    return process.returncode, out, err


def arrived(process, gate, manifests):
    """Wait until the job is at the gate and has saved; return what it has saved."""
    while not (gate / "there").exists() or not list(manifests.rglob("*.json")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return {file.name for file in manifests.rglob("*.json")}


def brought(away, process, saved):
    """Wait until the pointer at the remote names all these checkpoints."""
    while True:
        assert process.poll() is None, process.stderr.read()
        for pointer in away.glob("commands/[!.]*.json"):
            files = json.loads(pointer.read_bytes())["files"]
            if saved <= {name.rpartition("/")[2] for name in files}:
                return
        time.sleep(0.02)


@pytest.mark.parametrize("kind", ["folder", "fsspec"])
def test_a_killed_run_continues_from_its_last_save_in_an_empty_folder(world, kind):
    tmp_path, start = world
    whole = done(start(tmp_path / "job", "run", "-q", "job.py"))[1]
    away = tmp_path / "away"
    url = str(away) if kind == "folder" else f"local://{away}"
    (tmp_path / "gate" / "wait").touch()
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "job.py").write_text(JOB)
    process = start(tmp_path / "first", "run", "-q", "--every", "--remote", url, "job.py")
    saved = arrived(process, tmp_path / "gate", tmp_path / "first" / ".rearview" / "checkpoints")
    brought(away, process, saved)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (tmp_path / "gate" / "wait").unlink()
    code, out, err = done(start(tmp_path / "second", "resume", "--remote", url))
    assert code == 0, err
    assert out == whole
    assert "1 source file missing here" in err
    assert "not pushed" not in err
    assert "stopped recording" not in err
    ended = [*(tmp_path / "second" / ".rearview" / "runs").glob("*/end.json")]
    assert len(ended) == len([*away.glob("runs/*/end.json")]) == 1, err
    # it began where the save was: only the rest was logged there
    code, out, err = done(start(tmp_path / "second", "table", "total", "--format", "json"))
    assert [row["epoch"] for row in json.loads(out)] == list(range(8)), err
    manifests = (tmp_path / "second" / ".rearview" / "runs").glob("*/events.jsonl")
    resumed = [json.loads(line) for file in manifests for line in file.read_text().splitlines()]
    assert [event["since"] for event in resumed if event["event"] == "resumed"] > [0]
    # the end was brought away too, so that nobody goes on with it again
    code, _, err = done(start(tmp_path / "third", "resume", "--remote", url))
    assert (code, "nothing to resume" in err) == (2, True), err


def test_of_two_resumes_at_once_one_is_refused_and_names_the_other(world):
    tmp_path, start = world
    gate, job = tmp_path / "gate" / "wait", tmp_path / "job"
    gate.touch()
    first = start(job, "run", "-q", "--every", "job.py")
    manifests = job / ".rearview" / "checkpoints"
    arrived(first, gate.parent, manifests)
    code, _, err = done(start(job, "resume"))  # it still runs
    assert code == 2
    assert f"process {first.pid} on {socket.gethostname()}" in err
    first.kill()
    first.communicate()
    several = [start(job, "resume", "-q") for _ in range(4)]
    # all but one end by themselves while that one waits at the gate
    while sum(one.poll() is None for one in several) > 1:
        time.sleep(0.02)
    winner = next(one for one in several if one.poll() is None)
    for other in several:
        if other is not winner:
            code, out, err = done(other)
            assert (code, out) == (2, ""), err
            assert f"process {winner.pid} on {socket.gethostname()}" in err
    gate.unlink()
    code, _, err = done(winner)
    assert code == 0, err
    code, out, _ = done(start(job, "table", "total", "--format", "json"))
    assert [row["epoch"] for row in json.loads(out)] == list(range(8))


def test_a_claim_of_a_dead_process_is_followed_by_the_next(world):
    tmp_path, start = world
    gate, job = tmp_path / "gate" / "wait", tmp_path / "job"
    gate.touch()
    process = start(job, "run", "-q", "--every", "job.py")
    for attempt in range(3):
        log = job / ".rearview"
        while len(list(log.glob("runs/*/attempt-*.json"))) < attempt:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        arrived(process, gate.parent, log / "checkpoints")
        process.kill()
        process.communicate()
        process = start(job, "resume", "-q")
    gate.unlink()
    code, _, err = done(process)
    assert code == 0, err
