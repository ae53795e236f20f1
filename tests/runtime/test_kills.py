"""Killed at random instants of saving and transferring: nothing corrupt, nothing lost."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from limits import HUNG
from runtime import kills

SRC = Path(__file__).parents[2] / "src"
KILLS = 300
ENOUGH = 40
"""Saves, moves to another node and kills in the middle of a save that make it a test."""


@pytest.fixture
def folder(tmp_path):
    """Return a folder in memory if there is one: a kill is the same there, and syncing is free."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
def test_three_hundred_kills_never_corrupt_and_never_lose_a_completed_save(folder):
    dice = random.Random(7)
    takes = kills.step_takes(folder)
    acknowledged = 0
    moved, only_here, in_the_middle = 0, False, 0
    for kill in range(10 * KILLS):  # more where a busy machine lets few of them hit a save
        if kill >= KILLS and min(acknowledged, moved, in_the_middle) > ENOUGH:
            break
        longest = 3 * takes * max(1, kill // KILLS)
        last = kills.killed_after(folder, dice.uniform(0, longest), {})
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
        with kills.make(folder) as one:
            assert one.restore(0) >= acknowledged
    assert min(acknowledged, moved, in_the_middle) > ENOUGH


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kills_in_the_background_never_corrupt_and_never_go_back(folder):
    dice = random.Random(8)
    takes = kills.step_takes(folder)
    seen = 0
    for _ in range(60):
        kills.killed_after(folder, dice.uniform(0, 12 * takes), {"asynchronous": True})
        with kills.make(folder) as one:
            found = one.restore(0)
        assert found >= seen
        seen = found
    assert seen > 5


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "times"), [("s3", 12), ("webdav", 12), ("xrootd", 25)])
def test_kills_while_sending_to_a_real_server_lose_no_completed_save(server, tmp_path, kind, times):
    found = server(kind)
    target = f"{found.url.rstrip('/')}/{tmp_path.name}/ck.pt"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", kills.__file__, str(tmp_path), str(times), target,
         json.dumps(found.options)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True, text=True, timeout=HUNG, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen["worst"] >= 0
    assert seen["acknowledged"] > kills.ENOUGH
