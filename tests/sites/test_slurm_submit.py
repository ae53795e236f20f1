"""`rearview submit --slurm` under a real Slurm: an unmodified script, interrupted, ends the same."""

import shutil
import subprocess
import sys

import pytest

from sites.common import HERE, SRC, until
from sites.slurm import served

NAME = """it's a "name", of $(HOME)"""


@pytest.fixture(scope="module")
def site():
    yield from served()


def test_a_submitted_script_that_a_signal_stops_is_queued_again_with_the_same_result(
    site, tmp_path
):
    project = tmp_path / "my project"
    project.mkdir()
    shutil.copy(HERE / "handsfree.py", project)
    plain = [sys.executable, "handsfree.py", "60", "0", NAME]
    subprocess.run(plain, cwd=project, check=True, capture_output=True)
    truth = (project / "model.txt").read_text()
    (project / "model.txt").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "rearview", "submit", "--slurm", "--submit", "--every",
         *("--set", "time=1", "--set", "signal=USR1@50"), "handsfree.py", "60", "0.6", NAME],
        env={**site.env, "PYTHONPATH": str(SRC)}, cwd=project, text=True, check=False,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]  # Submitted batch job 1
    out = project / "handsfree.out"

    def said():
        told = out.read_text()[-1500:] if out.exists() else ""
        return f"{site.run('scontrol', 'show', 'job', job)}\n{told}"

    until((project / "model.txt").exists, 150, said)
    assert (project / "model.txt").read_text() == truth
    assert int(site.job(job)["Restarts"]) >= 1
    assert out.read_text().count("epoch 59") == 1
