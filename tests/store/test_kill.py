"""`kill -9` at random instants: what was acknowledged is there, and the store is whole."""

import os
import random
import select
import signal
import time
import warnings

import pytest

from rearview.config import Settings
from rearview.model import Edge, Part, Point, Snapshot, Step
from rearview.runtime.saving.writer import Writer
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.compression import CompressionPolicy
from rearview.store.maintenance.verify import verify

pytestmark = pytest.mark.slow  # forks a process for every kill

BIG = 1 << 20


def contents(seq):
    return {
        "big": seq.to_bytes(8, "big") * (BIG // 8),
        "frozen": b"f" * BIG,
        "small": b"%d" % seq,
    }


def saving(project, run, ack):
    """Save checkpoints until killed; acknowledge each that is durable."""
    store, previous = Checkpoints(project), None
    for seq in range(10**6):
        parts = [
            Part(key, data, previous.parts[key] if previous and key == "frozen" else None)
            for key, data in contents(seq).items()
        ]
        previous = store.save(Snapshot(run, seq, Point((Step("epoch", seq),)), Edge.START), parts)
        ack(seq)


def writing(project, run, ack):
    """The same through the writer, which compresses what pays."""
    writer = Writer(
        Checkpoints(project, CompressionPolicy()),
        Settings(),
        on_end=lambda seq, cost, _: cost.saved and ack(seq),
    )
    for seq in range(10**6):
        buffers = contents(seq)
        skeleton = buffers.pop("small")
        writer.submit(
            Snapshot(run, seq, Point((Step("epoch", seq),)), Edge.START, skeleton, buffers),
            wait=True,
        )


def killed(action, project, run, delay):
    """Run `action` in a child, kill it after its first sign of life plus `delay`; return acks."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # forking beside other threads is what is meant here
        pid = os.fork()
    if not pid:
        try:
            os.close(read)
            action(project, run, lambda seq: os.write(write, seq.to_bytes(8, "big")))
        finally:
            os._exit(1)
    os.close(write)
    select.select([read], [], [], 10)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    data = b""
    while piece := os.read(read, 1 << 16):
        data += piece
    os.close(read)
    return [int.from_bytes(data[at : at + 8], "big") for at in range(0, len(data), 8)]


@pytest.mark.parametrize(("action", "kills"), [(saving, 160), (writing, 40)])
def test_acknowledged_writes_survive_every_kill(project, action, kills):
    dice = random.Random(7)
    acknowledged = 0
    for number in range(kills):
        run = f"r{number}"
        acks = killed(action, project, run, dice.random() * 0.012)
        acknowledged += len(acks)
        store = Checkpoints(project)
        found = {each.seq: each for each in store.of(run)}
        assert set(acks) <= set(found)
        for each in found.values():
            loaded = store.load(each)
            expected = contents(each.seq)
            assert bytes(loaded["big"][:64]) == expected["big"][:64]
            assert loaded["small" if "small" in loaded else "skeleton"] == expected["small"]
    assert acknowledged >= kills
    report = verify(project)
    assert report.problems == ()
    assert report.checkpoints >= acknowledged
