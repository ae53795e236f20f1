"""Stores that are slow, far away, in memory, or whose clock jumps."""

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from limits import HUNG
from rearview.config import Settings
from rearview.model import Edge, Point, Snapshot, Step
from rearview.runtime.saving.writer import Writer
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.maintenance.thin_and_collect import gc
from rearview.store.maintenance.verify import verify
from rearview.store.project import Project

MB = 1 << 20
TOUCHES = ("open", "fsync", "fdatasync", "rename", "replace", "link", "unlink", "mkdir", "pwrite")
"""What a save asks of a file system."""


def train(writer, epochs, *, wait=False):
    """Submit a state that changes; return what it was at each checkpoint that was taken."""
    state = {"w": np.zeros(MB // 4), "b": np.zeros(10)}
    taken = {}
    for seq in range(epochs):
        state["w"] += 1
        state["b"] += 0.5
        point = Point((Step("epoch", seq),))
        if writer.submit(Snapshot("r", seq, point, Edge.START, b"", state), wait=wait):
            taken[seq] = state["w"][0]
    return taken


def check(checkpoints, taken):
    assert [each.seq for each in checkpoints.of("r")] == list(taken)
    for each in checkpoints.of("r"):
        loaded = checkpoints.load(each)
        assert np.all(np.frombuffer(loaded["w"]) == taken[each.seq])
    assert verify(checkpoints.project).problems == ()


@pytest.fixture
def far(monkeypatch):
    """A folder that answers after 50 ms, whatever is asked; returns which threads had to wait."""
    waited = set()
    for name in TOUCHES:
        real = getattr(os, name, None)
        if real is None:
            continue

        def slow(*args, real=real, **kwargs):
            waited.add(threading.get_ident())
            if threading.current_thread().name.startswith("rearview"):
                time.sleep(0.05)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, slow)
    return waited


def test_training_never_waits_for_a_folder_far_away(tmp_path, far):
    checkpoints = Checkpoints(Project.create(tmp_path))
    writer = Writer(checkpoints, Settings())
    far.clear()
    taken = train(writer, 3)
    assert threading.get_ident() not in far
    assert writer.drain(60)
    assert far
    assert 0 in taken
    assert writer.close(60)
    check(checkpoints, taken)


def test_a_folder_far_away_gets_every_checkpoint_that_was_asked_for(tmp_path, far):
    checkpoints = Checkpoints(Project.create(tmp_path))
    writer = Writer(checkpoints, Settings())
    taken = train(writer, 3, wait=True)
    assert writer.close(60)
    assert len(taken) == 3
    check(checkpoints, taken)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory here")
def test_a_store_in_memory_is_a_store():
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        checkpoints = Checkpoints(Project.create(place))
        writer = Writer(checkpoints, Settings())
        taken = train(writer, 4, wait=True)
        assert writer.close(30)
        check(checkpoints, taken)
    finally:
        shutil.rmtree(place)


def test_a_clock_that_jumps_neither_loses_nor_reorders_checkpoints(tmp_path, monkeypatch):
    real = time.time
    jumps = iter([0, 86_400, -86_400 * 365, 3, -7200, 10**8] * 100)
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    checkpoints = Checkpoints(Project.create(tmp_path))
    writer = Writer(checkpoints, Settings())
    taken = train(writer, 6, wait=True)
    assert writer.close(30)
    check(checkpoints, taken)
    gc(checkpoints.project, referenced=tuple, budget=5 * MB)
    left = [each.seq for each in checkpoints.of("r")]
    assert left[-1] == 5
    assert len(left) == 2
    check(checkpoints, {seq: taken[seq] for seq in left})


def test_a_slow_disk_makes_checkpoints_rare_and_nothing_else(tmp_path, monkeypatch):
    """Each write waits until the program is three epochs further."""
    turn, real = threading.Semaphore(0), os.fsync

    def slow(fd):
        assert turn.acquire(timeout=HUNG)
        return real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    checkpoints = Checkpoints(Project.create(tmp_path))
    writer = Writer(checkpoints, Settings(staging=2 * MB + 8192))
    state, taken = {"w": np.zeros(MB // 4)}, {}
    for seq in range(12):
        state["w"] += 1
        if writer.submit(Snapshot("r", seq, Point((Step("epoch", seq),)), Edge.START, b"", state)):
            taken[seq] = state["w"][0]
        if seq % 3 == 2:
            for _ in range(100):
                turn.release()
            assert writer.drain(30)
            while turn.acquire(blocking=False):
                pass
    assert list(taken) == [0, 3, 6, 9]
    for _ in range(100):
        turn.release()
    assert writer.close(30)
    check(checkpoints, taken)
