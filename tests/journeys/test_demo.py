"""Journey: what `make demo` shows, on a real training run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent.parent / "src"


@pytest.mark.slow
def test_the_demo_records_asks_and_answers_exactly(tmp_path):
    folder = tmp_path / "demo"
    env = {key: value for key, value in os.environ.items() if not key.startswith("REARVIEW_")}
    done = subprocess.run(
        [sys.executable, "-m", "rearview", "demo", str(folder), "--epochs", "4"],
        env={**env, "PYTHONPATH": str(SRC), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("exact: ") for line in lines) == 2
    assert sum("records written in" in line for line in lines) == 2
    assert any(line.split() == ["run", "epoch", "weight_norm"] for line in lines)
    assert any(line.split() == ["run", "epoch", "step", "grad_norm"] for line in lines)
    assert sorted(path.name for path in folder.iterdir()) == [".rearview", "train.py"]
