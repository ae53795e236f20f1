"""A project may hold the environment that it runs in."""

import os
import subprocess
import sys
import sysconfig
import venv

import pytest

from plainly import SOURCE

SCRIPT = """\
import heavy
weight = 1.0
for epoch in range(4):
    weight = weight * heavy.RATE + epoch
"""
PROBED = "import rearview\n" + SCRIPT + "    rearview.log('weight', weight)\n"


@pytest.fixture(params=[".venv", "tools/env"])
def rearview(request, tmp_path):
    """Return how to run the command in a project whose packages lie inside it."""
    place = tmp_path / request.param
    venv.create(place)
    libraries = place / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (libraries / "here.pth").write_text(sysconfig.get_path("purelib"))
    (libraries / "heavy.py").write_text("RATE = 0.5\n")

    def run(*words):
        command = [place / "bin/python", "-m", "rearview", *words]
        env = {**os.environ, "PYTHONPATH": SOURCE, "REARVIEW_ROOT": str(tmp_path)}
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_its_packages_are_found_in_a_replay(rearview, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    rearview("run", "-q", "--every", "train.py")
    (tmp_path / "train.py").write_text(PROBED)
    assert "exact" in rearview("backfill", "weight")
