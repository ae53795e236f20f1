"""A real Ray cluster of several nodes on this machine: shares of accelerators, lost nodes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from limits import HUNG

pytest.importorskip("ray", reason="LOUD: ray is not installed, its executor is not tested")

import rearview
from execute.test_run_plan import GOOD, RUN, Granted, Scripted, segment
from rays import traceless
from rearview._history import history
from rearview.errors import SiteError
from rearview.execute.executor import Task
from rearview.execute.ray import Ray, Shipments
from rearview.execute.run_plan import Claim, Pool


@pytest.fixture(scope="module")
def cluster():
    """A head that computes nothing, and a node with an accelerator that is only counted."""
    import ray
    from ray.cluster_utils import Cluster

    with traceless():
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "include_dashboard": False},
        )
        made.add_node(num_cpus=2, num_gpus=1)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


def task(folder, code, name="t"):
    return Task(
        name,
        (sys.executable, "-c", code),
        dict(os.environ),
        folder,
        folder / f"{name}.txt",
        folder / f"{name}.json",
    )


def ended(job, within=HUNG):
    deadline = time.monotonic() + within
    while (code := job.wait(0.2)) is None:
        assert time.monotonic() < deadline
    return code


def test_a_share_of_an_accelerator_bounds_how_many_run_at_once(cluster, tmp_path):
    half = Ray(8, gpus=0.5)
    assert half.slots == 2
    assert Ray(8, gpus=1.0).slots == 1
    code = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    jobs = [half.start(task(tmp_path, code, name), 0) for name in "ab"]
    assert [ended(job) for job in jobs] == [0, 0]
    assert {(tmp_path / f"{name}.txt").read_text().strip() for name in "ab"} == {"0"}


def test_without_a_share_of_accelerators_the_program_sees_the_same_as_on_this_machine(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    code = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    assert ended(Ray(1).start(task(tmp_path, code), 0)) == 0
    assert (tmp_path / "t.txt").read_text().strip() == "3"


def test_a_share_that_no_node_has_is_refused_at_once(cluster):
    with pytest.raises(SiteError, match="no node of the Ray cluster has more than 1") as caught:
        Ray(2, gpus=2.0)
    assert caught.value.slug == "ray-gpus"


def test_a_node_that_does_not_see_the_folder_says_so(cluster, tmp_path):
    job = Ray(1).start(task(tmp_path / "gone", "pass"), 0)
    with pytest.raises(SiteError, match="Every node needs Python") as caught:
        ended(job)
    assert caught.value.slug == "ray-node"


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_stopped_task_s_process_ends_too(cluster, tmp_path):
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    job = Ray(1).start(task(tmp_path, code), 0)
    deadline = time.monotonic() + HUNG
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.stop()
    assert ended(job) != 0
    while alive(int(mark.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_segments_of_a_lost_node_are_done_elsewhere(cluster, tmp_path):
    nodes = [cluster.add_node(num_cpus=1)]
    go = tmp_path / "go"
    count = iter(range(100))

    class Claims(Granted):
        def take(self, segment):
            name, number = segment.version, next(count)
            code = (
                "import os, time, pathlib\n"
                f"pathlib.Path({str(tmp_path / f'{name}-{number}.begun')!r}).touch()\n"
                f"while not os.path.exists({str(go)!r}): time.sleep(0.05)\n"
                f"pathlib.Path({str(tmp_path / f'{name}.done')!r}).touch()\n"
            )
            return Claim(task(tmp_path, code, f"{name}-{number}"))

    class Anything(Scripted):
        def judge(self, run, one, code, seconds, redone=""):
            self.verdicts[one.id] = [GOOD]
            return super().judge(run, one, code, seconds, redone)

    lost = []

    def progress(event):
        if event.kind == "lost":
            lost.append(event.segment)
        if len(list(tmp_path.glob("*.begun"))) == 3 and nodes:
            cluster.remove_node(nodes.pop())
        if lost and not go.exists():
            go.touch()

    replays = Anything({})
    pool = Pool(replays, Ray(3), Claims(tmp_path, replays), progress)
    outcomes = pool.run([segment(name) for name in "abc"], {"r": RUN})
    assert len(outcomes) == 3
    assert lost
    assert sorted(file.stem for file in tmp_path.glob("*.done")) == ["a", "b", "c"]
    assert len(replays.abandoned) == len(lost)


SCRIPT = """\
import random
weight = 1.0
for epoch in range(4):
    for step in range(3):
        weight = weight * 0.9 + random.random()
    print(weight)
"""


def test_a_backfill_reads_checkpoints_from_the_shared_store_and_is_proved(
    cluster, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(rearview.__file__).parent.parent))
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "rearview", "run", "-q", "--every", "train.py"]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    probe = "random.random()\n        rearview.log('weight', weight)\n"
    (tmp_path / "train.py").write_text(
        "import rearview\n" + SCRIPT.replace("random.random()\n", probe)
    )
    past = history(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("rearview.execute.ray.ShippedJob", None)  # nothing may be shipped
        report = past.backfill(["weight"], at="epoch=2:4", workers=2, on="ray", gpus=0.5)
    assert report.proved, report.proof
    assert sum(outcome.report.restored for outcome in report.outcomes) > 0
    last = [row["weight"] for row in past.table("weight") if row["step"] == 2]
    assert [repr(value) for value in last if value is not None] == told.stdout.split()[2:]

    # a node that sees the folder is used as it is, too, when another one was met that does not
    met = property(lambda self: True, lambda self, value: None)
    monkeypatch.setattr(Shipments, "needed", met, raising=False)
    monkeypatch.setattr(Shipments, "folder_owner", None)
    report = past.backfill(["weight"], at="epoch=0:2", workers=2, on="ray", gpus=0.5)
    assert report.proved, report.proof
    assert len(list(past.table("weight"))) == 12
