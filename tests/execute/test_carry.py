"""A real Ray cluster with a node that does not see the project: what it needs travels."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="LOUD: ray is not installed, its executor is not tested")

import rearview
from rearview.errors import SiteError
from rearview.execute.ray import Ray
from rearview.past import history

ALONE = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
"""Runs a command that sees file systems of its own."""


def refused():
    """Return why no node can be kept from seeing a folder here; None if one can."""
    try:
        done = subprocess.run([*ALONE, "mount -t tmpfs none /mnt"], capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no unshare"
    return done.stderr.strip() if done.returncode else None


WHY = refused()
pytestmark = pytest.mark.skipif(
    WHY is not None, reason=f"LOUD: no node can be kept from seeing a folder here: {WHY}"
)


class Away:
    """A node whose processes find an empty folder where the projects are."""

    def __init__(self, address, hidden, cpus=1):
        ray = str(Path(sys.executable).with_name("ray"))
        start = f"{ray} start --address={address} --num-cpus={cpus} --block --disable-usage-stats"
        # the node finds Ray, and nothing of ours: what runs there must travel by value
        bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self.hidden = hidden
        self.process = subprocess.Popen(
            [*ALONE, f"mount -t tmpfs none {hidden} && exec {start}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=bare,
        )

    def children(self):
        """Return every process of the node."""
        space = Path(f"/proc/{self.process.pid}/ns/mnt").readlink()
        found = []
        for one in Path("/proc").glob("[0-9]*"):
            try:
                if (one / "ns/mnt").readlink() == space:
                    found.append(int(one.name))
            except OSError:
                continue
        return found

    def seen(self):
        """Return the names that stand in the hidden folder, as the node sees it."""
        return sorted(os.listdir(f"/proc/{self.process.pid}/root{self.hidden}"))

    def kill(self):
        for pid in self.children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def joined(count):
    import ray

    deadline = time.monotonic() + 60
    while int(ray.cluster_resources().get("CPU", 0)) != count:
        assert time.monotonic() < deadline, ray.nodes()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def cluster(hidden):
    """A head that computes nothing, and a node with two slots that sees no project."""
    import ray
    from ray.cluster_utils import Cluster

    environment, hook = dict(os.environ), sys.breakpointhook
    head = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    ray.init(address=head.address, log_to_driver=False)
    node = Away(head.address, hidden, cpus=2)
    joined(2)
    node.address = head.address
    yield node
    ray.shutdown()
    node.kill()
    head.shutdown()
    os.environ.clear()
    os.environ.update(environment)
    sys.breakpointhook = hook


SCRIPT = """\
import random
table = [float(line) for line in open("data/table.txt")]
weight = [1.0] * 200_000
out = open("out.txt", "w")
for epoch in range(6):
    for step in range(3):
        weight[step] = weight[step] * 0.9 + random.random() + table[step]
    out.write(f"{weight[0]!r}\\n")
    print(sum(weight))
"""
PROBE = """\
table[step]
        rearview.log("w", weight[step])
        rearview.log("all", weight[: 3 + step])
"""


@pytest.fixture
def project(hidden, request, monkeypatch):
    """A project with one recorded run and a probe added since."""
    source = Path(rearview.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", str(source))
    root = hidden / request.node.name[:24]
    (root / "data").mkdir(parents=True)
    (root / "data" / "table.txt").write_text("0.25\n0.5\n0.75\n")
    (root / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "rearview", "run", "-q", "--every", "train.py"]
    subprocess.run(words, cwd=root, capture_output=True, check=True)
    (root / "train.py").write_text("import rearview\n" + SCRIPT.replace("table[step]\n", PROBE))
    return root


def column(past, name="w"):
    return [(row["epoch"], row["step"], row[name]) for row in past.table(name)]


def test_a_node_that_does_not_see_the_project_fills_the_column_exactly(cluster, project):
    past = history(project)
    report = past.backfill(["w"], at="epoch=2:5", workers=2, on="ray")
    assert report.proved, report.proof
    assert sum(outcome.report.restored for outcome in report.outcomes) > 0
    away = column(past)
    assert cluster.seen() == []
    print(away, [o for o in report.outcomes])
