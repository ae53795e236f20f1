"""Eight processes save into one project at once while a ninth sweeps it."""

import os
import warnings

from rearview.model import Edge, Part, Point, Snapshot, Step
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.objects import Objects
from rearview.store.maintenance.thin_and_collect import gc
from rearview.store.maintenance.verify import verify

BIG = 1 << 20
WRITERS = 8
SAVES = 12


def contents(run, seq):
    # the same three large objects come and go in every run, so that sweeps and saves collide
    return {
        "shared": bytes([seq % 3]) * BIG,
        "own": f"{run}-{seq}".encode() * 10,
        "large": f"{run}-{seq}-".encode().ljust(16, b".") * (BIG // 16),
    }


def write(project, run):
    store = Checkpoints(project)
    for seq in range(SAVES):
        parts = [Part(key, data) for key, data in contents(run, seq).items()]
        store.save(Snapshot(run, seq, Point((Step("epoch", seq),)), Edge.START), parts)
        if seq % 3 != 2:
            store.delete(f"{run}/{seq}")  # so that there is garbage to sweep all the time


def in_child(action, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid:
        return pid
    try:
        action(*args)
        os._exit(0)
    finally:
        os._exit(1)


def test_eight_writers_and_a_sweeper_lose_nothing(project, monkeypatch):
    monkeypatch.setattr(
        "rearview.store.maintenance.thin_and_collect.SLACK", 0.01
    )  # only the coarseness of file times
    pids = [in_child(write, project, f"run{number}") for number in range(WRITERS)]
    freed = 0
    running = set(pids)
    while running:
        freed += gc(project, referenced=tuple).nbytes
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0
                running.discard(pid)
    assert freed > 0
    store = Checkpoints(project)
    for number in range(WRITERS):
        run = f"run{number}"
        found = store.of(run)
        assert [each.seq for each in found] == [seq for seq in range(SAVES) if seq % 3 == 2]
        for each in found:
            loaded = {key: bytes(view) for key, view in store.load(each).items()}
            assert loaded == contents(run, each.seq)
    assert verify(project).problems == ()


def test_eight_processes_put_the_same_object(project):
    data = b"same" * BIG

    def put():
        assert Objects(project).put(data).nbytes == len(data)

    pids = [in_child(put) for _ in range(WRITERS)]
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(Objects(project).all())) == 1
    assert verify(project).problems == ()
