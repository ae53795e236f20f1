"""Leaving at once: what a program started does not outlive it."""

import subprocess
import sys
from pathlib import Path

import pytest

from limits import HUNG

SRC = Path(__file__).parents[2] / "src"
TEXT = """
import multiprocessing, time
from rearview.checkpointer.signals import leave_at_once

if __name__ == "__main__":
    worker = multiprocessing.get_context({!r}).Process(target=time.sleep, args=(600,), daemon=True)
    worker.start()
    print("started", flush=True)
    leave_at_once(7)
"""


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_workers_end_with_the_program(tmp_path, way):
    (tmp_path / "train.py").write_text(TEXT.format(way))
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,  # open for as long as one of its workers lives
        text=True,
        timeout=HUNG,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "started\n")
