"""Killed at random instants of saving and transferring: nothing corrupt, nothing lost."""

import os
import random
import shutil
import signal
import struct
import tempfile
import time
from pathlib import Path

import pytest

from rearview.remote.retry import Retry
from rearview.runtime.checkpointer import Checkpointer

KILLS = 300
PIECES = 6


def write(path, value):
    """Write a value in pieces, so that a kill can fall between them."""
    with path.open("wb", buffering=0) as file:
        for piece in range(PIECES):
            file.write(struct.pack("<QQ", value, piece) * 500)


def read(path):
    """Return the value if every piece is that of one save."""
    data = path.read_bytes()
    value = struct.unpack_from("<Q", data)[0]
    expected = b"".join(struct.pack("<QQ", value, piece) * 500 for piece in range(PIECES))
    assert data == expected, "half a save was restored"
    return value


def make(folder, **options):
    return Checkpointer(
        folder / "here" / "ck.pt",
        write,
        read,
        checkpoint_every=1,
        checkpoint_transfer_mode="shared",
        checkpoint_transfer_target=folder / "far" / "ck.pt",
        signals=(),
        retry=Retry(attempts=1),
        **options,
    )


def job(folder, report, options):
    """Go on from the last save, report each step once it is done, until killed."""
    one = make(folder, **options)
    value = one.restore(0)
    os.write(report, struct.pack("<Q", 0))
    while True:
        value += 1
        one.step(value)
        os.write(report, struct.pack("<Q", value))


@pytest.fixture
def folder(tmp_path):
    """Return a folder in memory if there is one: a kill is the same there, and syncing is free."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def step_takes(folder):
    """Return the seconds that one step takes on this machine, as busy as it is now."""
    (folder / "here").mkdir()
    with make(folder) as one:
        begun = time.perf_counter()
        for value in range(1, 6):
            one.step(value)
    return (time.perf_counter() - begun) / 5


def killed_after(folder, seconds, options):
    """Run the job for so long; return the last step it reported as saved, or None."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            job(folder, write_end, options)
        finally:
            os._exit(1)  # only an error comes here
    os.close(write_end)
    os.read(read_end, 8)  # it has begun
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    reported = b""
    while data := os.read(read_end, 1 << 16):
        reported += data
    os.close(read_end)
    return struct.unpack("<Q", reported[-8:])[0] if reported else None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
def test_three_hundred_kills_never_corrupt_and_never_lose_a_completed_save(folder):
    dice = random.Random(7)
    takes = step_takes(folder)
    acknowledged = 0
    moved, only_here, in_the_middle = 0, False, 0
    for _ in range(KILLS):
        last = killed_after(folder, dice.uniform(0, 4 * takes), {})
        acknowledged = max(acknowledged, last or 0)
        in_the_middle += any(path.name.startswith(".rv-") for path in folder.rglob("*"))
        only_here = only_here and last is None
        if dice.random() < 0.3 and not only_here:  # the job starts again on another node
            shutil.rmtree(folder / "here")
            (folder / "here").mkdir()
            moved += 1
        elif dice.random() < 0.2:  # or the place away loses everything
            shutil.rmtree(folder / "far", ignore_errors=True)
            only_here = True
        with make(folder) as one:
            assert one.restore(0) >= acknowledged
    assert acknowledged > KILLS / 3
    assert moved > 50
    assert in_the_middle > 50


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kills_in_the_background_never_corrupt_and_never_go_back(folder):
    dice = random.Random(8)
    takes = step_takes(folder)
    seen = 0
    for _ in range(60):
        killed_after(folder, dice.uniform(0, 12 * takes), {"asynchronous": True})
        with make(folder) as one:
            found = one.restore(0)
        assert found >= seen
        seen = found
    assert seen > 20
