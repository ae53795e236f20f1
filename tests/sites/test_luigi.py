"""A task under luigi's central scheduler, which starts it again until it is done."""

import importlib.util
import os
import subprocess
import sys

import pytest

from limits import HUNG
from servers.daemons import free_port, running
from sites.common import HERE, SRC, expected, starts

CONFIG = """
[scheduler]
retry_count=100
retry_delay=1
prune_on_get_work=true
[worker]
keep_alive=true
max_reschedules=100
wait_interval=1
wait_jitter=0
"""


@pytest.mark.skipif(
    importlib.util.find_spec("luigi") is None,
    reason="NOT TESTED under luigi: not installed; run tests/sites/install",
)
def test_a_task_that_exits_85_is_tried_again_until_it_is_done(tmp_path):
    (tmp_path / "luigi.cfg").write_text(CONFIG)
    port = free_port()
    env = {
        **os.environ,
        "LUIGI_CONFIG_PATH": str(tmp_path / "luigi.cfg"),
        "PYTHONPATH": f"{SRC}:{HERE}",
        "PYTHONWARNINGS": "ignore",
        "TRAIN": str(HERE / "train.py"),
    }
    scheduler = [sys.executable, "-c", "from luigi.cmdline import luigid; luigid()"]
    scheduler += ["--address", "127.0.0.1", "--port", str(port)]
    scheduler += ["--state-path", str(tmp_path / "state")]
    with running(scheduler, port, tmp_path / "luigid.log", env=env, cwd=tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", "from luigi.cmdline import luigi_run; luigi_run()",
             "--module", "luigi_task", "Train", "--folder", str(tmp_path),
             "--scheduler-host", "127.0.0.1", "--scheduler-port", str(port)],
            env=env, cwd=tmp_path, capture_output=True, text=True, timeout=HUNG, check=False,
        )  # fmt: skip
    assert (tmp_path / "final.txt").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "final.txt").read_text() == expected(60)
    begun = starts(tmp_path)
    assert len(begun) > 2
    assert begun == sorted(begun)
