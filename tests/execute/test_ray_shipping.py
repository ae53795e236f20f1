"""A real Ray cluster with a node that does not see the project: what it needs travels."""

import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from limits import HUNG

pytest.importorskip("ray", reason="LOUD: ray is not installed, its executor is not tested")

import rearview
from rays import traceless
from rearview._history import history
from rearview.errors import SiteError
from rearview.execute import ray_files
from rearview.execute.ray_files import ChunkCache

ALONE = ("unshare", "--mount", "--propagation", "private", "sh", "-c")
"""Runs a command that sees file systems of its own."""


def refused():
    """Return why no node can be kept from seeing a folder here; None if one can."""
    try:
        done = subprocess.run(
            [*ALONE, "mount -t tmpfs none /mnt"], capture_output=True, text=True, check=False
        )
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

    @property
    def inside(self):
        """The hidden folder, as the node sees it."""
        return Path(f"/proc/{self.process.pid}/root{self.hidden}")

    def seen(self):
        """Return the names that stand in it."""
        return sorted(file.name for file in self.inside.iterdir())

    def kill(self):
        if self.process.poll() is not None:
            return
        for pid in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def soon(true):
    deadline = time.monotonic() + HUNG
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def joined(count):
    import ray

    soon(lambda: int(ray.cluster_resources().get("CPU", 0)) == count)


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def cluster(hidden):
    """A head that computes nothing, and a node with two slots that sees no project."""
    import ray
    from ray.cluster_utils import Cluster

    with traceless():
        bare = {"num_cpus": 0, "include_dashboard": False}
        head = Cluster(initialize_head=True, head_node_args=bare)
        ray.init(address=head.address, log_to_driver=False)
        node = Away(head.address, hidden, cpus=2)
        joined(2)
        node.address = head.address
        yield node
        ray.shutdown()
        node.kill()
        head.shutdown()


SCRIPT = """\
import os, pathlib, random, struct, time
import numpy
def bonus(k):
    return struct.unpack("3d", open("data/table.bin", "rb").read())[k]
weight = numpy.random.default_rng(0).random(200_000)
out = open("out.txt", "w")
for epoch in range(6):
    for step in range(3):
        weight[step] = weight[step] * 0.9 + random.random() + bonus(step)
    out.write(f"{weight[0]!r}\\n")
    if "REARVIEW_MARKS" in os.environ:
        marks = pathlib.Path(os.environ["REARVIEW_MARKS"])
        (marks / f"{os.getpid()}.begun").touch()
        while not (marks / "go").exists():
            time.sleep(0.05)
"""
PROBE = """\
bonus(step)
        rearview.log("w", weight[step])
        rearview.log("some", weight[: 40_000 + step])
"""


@pytest.fixture
def project(hidden, request, monkeypatch):
    """A project with two recorded runs, and a probe added since."""
    source = Path(rearview.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", str(source))
    root = hidden / request.node.name[-24:]
    (root / "data").mkdir(parents=True)
    (root / "data" / "table.bin").write_bytes(struct.pack("3d", 0.25, 0.5, 0.75))
    (root / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "rearview", "run", "-q", "--every", "train.py"]
    for one in [subprocess.Popen(words, cwd=root) for _ in range(2)]:
        assert one.wait() == 0
    (root / "train.py").write_text("import rearview\n" + SCRIPT.replace("bonus(step)\n", PROBE))
    return root


def columns(past):
    rows = past.table("w", "some")
    return [(row["epoch"], row["step"], row["w"], str(row["some"])) for row in rows]


def stored(root):
    return {
        file.name: file.read_bytes()
        for file in (root / ".rearview" / "objects").rglob("*")
        if file.is_file()
    }


def texts(report):
    """Return what the replays of each run wrote, whatever their order."""
    return {one.run: (one.tree / "out.txt").read_bytes() for one in report.outcomes}


def test_a_node_that_does_not_see_the_project_gives_the_same_results_as_this_machine(
    cluster, project
):
    pristine = project.with_name("pristine")
    shutil.copytree(project / ".rearview", pristine)
    report = history(project).backfill(["w"], at="epoch=2:5", workers=2, on="ray")
    assert report.proved, report.proof
    assert all(outcome.report.restored > 0 for outcome in report.outcomes)
    away, objects = columns(history(project)), stored(project)
    written = texts(report)
    assert cluster.seen() == []
    assert not list(project.rglob(".landing"))

    shutil.rmtree(project / ".rearview")
    pristine.rename(project / ".rearview")
    history(project).trust()  # a copy could be anybody's
    here = history(project).backfill(["w"], at="epoch=2:5", workers=2)
    assert here.proved
    assert columns(history(project)) == away
    assert len(away) == 2 * 9
    assert stored(project) == objects
    assert written == texts(here)


def test_only_the_files_that_a_segment_needs_are_sent_and_in_chunks(cluster, project, monkeypatch):
    carried = []
    real = ChunkCache.get

    def get(self, entry, at):
        carried.append((Path(entry.path), at))
        return real(self, entry, at)

    monkeypatch.setattr(ChunkCache, "get", get)
    monkeypatch.setattr(ray_files, "CHUNK", 1 << 20)
    past = history(project)
    report = past.backfill(["w"], runs=["latest"], at="epoch=4:5", workers=1, on="ray")
    assert report.proved, report.proof
    objects = [(path, at) for path, at in carried if path.parts[-3] == "objects"]
    assert len({path for path, _ in objects}) == 1
    assert [at for _, at in objects] == [0, 1 << 20]
    assert len(stored(project)) > 4
    manifests = {path.name for path, _ in carried if "checkpoints" in path.parts}
    kept = project / ".rearview" / "checkpoints" / past.run().id
    assert 0 < len(manifests) < len(list(kept.iterdir()))


def test_after_a_difference_the_remaining_checkpoint_parts_are_sent_to_describe_it(
    cluster, project
):
    table = project / "data" / "table.bin"
    table.write_bytes(struct.pack("3d", 0.25, 0.5, 0.875))
    os.utime(table, (0, 0))
    past = history(project)
    report = past.backfill(["w"], runs=["latest"], at="epoch=0:3", workers=1, on="ray")
    assert not report.proved
    differences = [outcome.report.difference for outcome in report.outcomes]
    assert differences
    assert all(text.startswith("weight") for text in differences), differences


def test_a_backfill_that_is_killed_leaves_nothing_on_the_node(cluster, project, tmp_path):
    words = [sys.executable, "-m", "rearview", "backfill", "w", "--on", "ray", "--yes"]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "REARVIEW_MARKS": str(tmp_path)}
    backfill = subprocess.Popen(words, cwd=project, env=environment, stdout=subprocess.DEVNULL)
    soon(lambda: list(tmp_path.glob("*.begun")))
    assert cluster.seen() == [project.name]
    replays = [int(file.stem) for file in tmp_path.glob("*.begun")]
    backfill.kill()
    backfill.wait()
    soon(lambda: cluster.seen() == [])
    assert not set(replays) & set(cluster.children())


def test_a_folder_of_the_user_at_that_path_is_left_alone(cluster, project):
    theirs = cluster.inside / project.name
    theirs.mkdir()
    (theirs / "train.py").write_text("theirs")
    with pytest.raises(SiteError, match="another folder is there") as caught:
        history(project).backfill(["w"], runs=["latest"], workers=1, on="ray")
    assert caught.value.slug == "ray-node"
    assert [file.read_text() for file in theirs.iterdir()] == ["theirs"]
    shutil.rmtree(theirs)


def test_a_killed_node_s_segment_is_taken_over(cluster, project, tmp_path, monkeypatch):
    monkeypatch.setenv("REARVIEW_MARKS", str(tmp_path))
    nodes = [cluster, Away(cluster.address, cluster.hidden)]
    joined(3)
    deadline = time.monotonic() + HUNG
    lost = []

    def progress(event):
        assert time.monotonic() < deadline
        if event.kind == "lost":
            lost.append(event.segment)
            (tmp_path / "go").touch()
        begun = {int(file.stem) for file in tmp_path.glob("*.begun")}
        for node in list(nodes):
            if len(nodes) == 2 and begun & set(node.children()):
                nodes.remove(node)
                node.kill()

    try:
        report = history(project).backfill(["w"], workers=3, on="ray", progress=progress)
        assert lost
        assert report.proved, report.proof
        assert len(columns(history(project))) == 2 * 18
        assert [node.seen() for node in nodes] == [[]]
    finally:
        for node in nodes:
            node.kill()
