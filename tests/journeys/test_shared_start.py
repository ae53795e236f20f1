"""Journey: segments that begin with the same imports share them, and nobody can tell."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from limits import HUNG
from plainly import SOURCE
from rearview._history import history
from rearview.backfill import examine_run
from rearview.execute import local
from rearview.model.process_messages import LAUNCHER

pytestmark = [
    pytest.mark.usefixtures("warm_start"),
    pytest.mark.skipif(not local.FORK_SERVER_SUPPORTED, reason="LOUD: no pidfd, nothing is shared"),
]

VERSIONS = 3
SCRIPT = """
import os
import sys
import {library}

rate = {rate}
{before}
weight = 1.0
for epoch in range(3):
    weight = weight * (1 - rate) + {value}
    print("said", repr(weight))
"""
ASKED = "    rearview.log('asked', weight)\n"


@dataclass
class Project:
    """A project with a run of each of several versions, and a statement to be filled."""

    folder: Path
    births: list[int] = field(default_factory=list)
    left_out: str = ""
    said: list[float] = field(default_factory=list)
    script: str = SCRIPT

    def record(self, *, versions=VERSIONS, library="numpy", before="", value="0.5", module=""):
        """Record runs of a script, then ask for something that it did not log."""
        words = ("-m", module) if module else ("train.py",)
        script = self.folder / (module.replace(".", "/") + ".py" if module else "train.py")
        for k in range(versions):
            text = self.script.format(
                library=library, rate=0.1 + k / 10, before=before, value=value
            )
            script.write_text(text)
            done = self.command("run", "-q", "--every", *words)
            assert done.returncode == 0, done.stderr
            lines = [line.split() for line in done.stdout.splitlines()]
            self.said += [float(words[1]) for words in lines if words[:1] == ["said"]]
        script.write_text("import rearview\n" + text + ASKED)

    def command(self, *words):
        return subprocess.run(
            [sys.executable, "-m", "rearview", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=HUNG,
            check=False,
        )

    def fill(self, *, again=0, **options):
        """Fill in this process, and compare with what the runs said.

        `again` segments may have been in doubt.
        """
        report = history(self.folder).backfill(["asked"], workers=2, **options)
        assert report.proved, report.proof
        rows = history(self.folder).table("asked").pandas()
        assert list(rows["asked"]) == self.said
        assert sum(one.name.endswith("-again") for one in self.replays) <= again
        return report

    @property
    def replays(self):
        return sorted((self.folder / ".rearview" / "replays").iterdir())


@pytest.fixture
def project(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    for name in [name for name in os.environ if name.startswith("REARVIEW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPARE", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((SOURCE, str(site))))
    (tmp_path / "project").mkdir()
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    examine_run._is_installed.cache_clear()
    made = Project(tmp_path / "project")
    spawn = local.ForkServerClient.spawn

    def watched(parent, *args):
        made.births.append(spawn(parent, *args))
        made.left_out = parent.ready.left_out
        return made.births[-1]

    monkeypatch.setattr(local.ForkServerClient, "spawn", watched)
    return made


def install(project, **modules):
    """Install libraries; `einops` is one that is known to be harmless, and is not there."""
    for name, text in modules.items():
        (project.folder.parent / "site-packages" / f"{name}.py").write_text(text)


def test_versions_that_begin_alike_share_their_start(project):
    project.record(before="draw = numpy.random.default_rng().normal()", value="draw")
    project.fill()
    assert len(project.births) == VERSIONS


def test_a_single_segment_starts_without_sharing(project):
    project.record(versions=1)
    project.fill()
    assert project.births == []


def test_the_shared_start_can_be_switched_off(project, monkeypatch):
    monkeypatch.setenv("REARVIEW_SHARED_START", "false")
    project.record()
    project.fill()
    assert project.births == []


def test_code_before_an_import_still_runs_before_it(project):
    install(project, einops="import os\nSEEN = float(os.environ.get('LEVEL', 1))")
    project.script = SCRIPT.replace("import {library}", "os.environ['LEVEL'] = '3'\nimport einops")
    project.record(value="einops.SEEN")
    assert project.said[0] > 3
    project.fill()
    assert len(project.births) == VERSIONS


UNFIT = {
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "clock": "import time\nBEGUN = time.time()",
    "draws": "import random\nOWN = random.Random()",
    "draws ": "import random\nOWN = random.random()",
    "open": "FILE = open('/dev/zero')",
    "variable": "import os\nos.environ.pop('SPARE', None)",
    "exit": "import __main__\nif not hasattr(__main__, '__file__'):\n    raise SystemExit('exit')",
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_library_that_leaves_something_behind_is_not_shared(project, kind):
    value = {"draws": "einops.OWN.random()", "clock": "einops.BEGUN % 1"}.get(kind, "0.5")
    install(project, einops=UNFIT[kind])
    project.record(library="einops", value=value)
    project.fill()
    assert kind in project.left_out


def test_imports_before_an_unshareable_library_are_shared(project):
    install(project, einops=UNFIT["clock"])
    project.script = SCRIPT.replace("import {library}", "import numpy\nimport einops")
    project.record(value="einops.BEGUN % 1 + float(numpy.random.random())")
    project.fill()
    assert len(project.births) == VERSIONS
    assert "einops" in project.left_out


def test_a_module_in_a_folder_shares_its_start_too(project):
    (project.folder / "pkg").mkdir()
    (project.folder / "pkg" / "__init__.py").write_text("import yaml\n")
    install(project, yaml="VALUE = 0.75")
    project.record(value="sys.modules['yaml'].VALUE", module="pkg.train")
    project.fill()
    assert len(project.births) == VERSIONS


def test_functions_that_a_library_took_hold_of_are_those_of_the_replay(project):
    install(
        project,
        einops="from time import time\nfrom builtins import open as open_it\n"
        "def read(name, clock=time):\n"
        "    with open_it(name) as file:\n        return float(file.read()) + clock() % 1",
    )
    project.record(
        library="einops",
        before="with open('out.txt', 'w') as file: file.write('2.5')",
        value="einops.read('out.txt')",
    )
    (project.folder / "out.txt").write_text("7.5")
    project.fill()
    assert len(project.births) == VERSIONS


def test_a_module_of_the_project_comes_before_one_that_a_library_would_import(project):
    install(project, einops="from helper import VALUE", helper="VALUE = 1.0")
    (project.folder / "helper.py").write_text("VALUE = 4.0")
    project.record(library="einops", value="einops.VALUE")
    assert project.said[0] > 4
    project.fill()
    assert len(project.births) == VERSIONS
    assert all('"spared":0' in (one / "report.json").read_text() for one in project.replays)


def test_a_shared_segment_that_differs_is_repeated_in_a_separate_process(project):
    install(project, einops="import os\nPID = os.getpid()")
    project.record(library="einops", value="(0.5 if einops.PID == os.getpid() else 0.25)")
    project.fill(again=2)
    assert 1 <= len(project.births) <= 2  # as many as there are workers; then nobody trusts it


def dies_once(project, how):
    """Let the first segment of a backfill die; returns the file that makes it."""
    flag = project.folder.parent / "flag"
    project.record(before=f"if os.path.exists({str(flag)!r}): os.remove({str(flag)!r}); {how}")
    flag.touch()
    return flag


def test_a_killed_segment_is_repeated_in_a_separate_process(project):
    flag = dies_once(project, "os.kill(os.getpid(), 9)")
    events = []
    report = project.fill(progress=events.append)
    assert not flag.exists()
    assert [event.message for event in events if event.kind == "lost"] == ["it ended with -9"]
    assert len(report.outcomes) == VERSIONS


def test_the_exit_code_of_a_segment_is_its_own(project):
    flag = dies_once(project, "os._exit(7)")
    project.fill(again=1)
    assert not flag.exists()
    logs = [(one / "report.json").read_text() for one in project.replays]
    assert sum("exit code 7" in log for log in logs) == 1


def test_a_killed_fork_server_costs_nothing(project, monkeypatch):
    project.record()
    spawn = local.ForkServerClient.spawn

    def watched(parent, *args):
        pid = spawn(parent, *args)
        parent.process.kill()
        return pid

    monkeypatch.setattr(local.ForkServerClient, "spawn", watched)
    project.fill()
    assert len(project.births) <= 2


def test_an_environment_variable_that_is_not_valid_text_is_no_obstacle(project, monkeypatch):
    project.record(versions=2)
    monkeypatch.setenv("ODD", "\udcff")
    project.fill()
    assert project.births == []


def test_a_fork_server_that_dies_during_a_request_may_have_started_the_segment(
    project, monkeypatch
):
    project.record()
    heard, asked = local.ForkServerClient._receive, []

    def silent(parent):
        if parent.ready and not asked:
            asked.append(heard(parent))
            parent.close()
            raise local.ForkServerGone
        return heard(parent)

    monkeypatch.setattr(local.ForkServerClient, "_receive", silent)
    project.fill()
    assert asked


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def awaited(holds):
    deadline = time.monotonic() + HUNG
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def waits(project):
    """Let segments wait as long as a file is there; returns it."""
    shut = project.folder.parent / "shut"
    install(
        project,
        gate="import os, subprocess, time\n"
        f"if os.path.exists({str(shut)!r}):\n    child = subprocess.Popen(['sleep', '600'])\n"
        f"while os.path.exists({str(shut)!r}):\n    time.sleep(0.02)",
    )
    project.record(before="import gate")
    shut.touch()
    return shut


def children(pid):
    found = []
    for one in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(one.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(one.parent.name))
    return found


def launched(pid):
    """Return the children of a process that run our launcher."""
    found = []
    for one in children(pid):
        with contextlib.suppress(OSError):
            if LAUNCHER.encode() in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(one)
    return found


def test_stopping_a_forked_segment_stops_all_its_processes(project):
    waits(project)
    found = []

    def interrupt(event):
        if project.births and (begun := children(project.births[0])):
            found.extend(begun)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        history(project.folder).backfill(["asked"], workers=2, progress=interrupt)
    assert found
    awaited(lambda: all(map(gone, [*project.births, *found])))


def test_the_fork_server_ends_with_a_killed_backfill(project):
    waits(project)
    process = subprocess.Popen(
        [sys.executable, "-m", "rearview", "backfill", "asked", "--yes", "--workers", "1"],
        cwd=project.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        parent = awaited(lambda: launched(process.pid))[0]
        segment = awaited(lambda: [one for one in launched(parent) if children(one)])[0]
    finally:
        process.kill()
        process.wait()
    try:
        awaited(lambda: gone(parent))
        assert not gone(segment)  # as without sharing: what it does is its own
    finally:
        os.killpg(segment, signal.SIGKILL)


MANY = """
import tempfile, uuid
from datetime import datetime
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import scipy.stats
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split

rate = {rate}
begun = datetime.now()
name = uuid.uuid4().hex + tempfile.mkdtemp()
frame = pd.DataFrame(np.random.normal(size=(60, 3)), columns=list("abc"))
frame["day"] = pd.to_datetime("21-03-04") + pd.to_timedelta(range(60), unit="D")
frame["word"] = frame.day.dt.day_name()
x, rest = train_test_split(frame[["a", "b"]].to_numpy())
y = (x.sum(1) + scipy.stats.norm.rvs(size=len(x)) > 0).astype(int)
model = SGDClassifier(alpha=rate / 100)
figure = plt.figure()
for epoch in range(3):
    model.partial_fit(x, y, classes=[0, 1])
    weight = float(model.coef_.sum()) + begun.microsecond / 1e6 + len(frame.groupby("word"))
    weight += int(name[:4], 16)
    print("said", repr(weight))
"""


def test_segments_that_share_common_libraries_are_exact(project, monkeypatch):
    for name in ("matplotlib", "pandas", "scipy", "sklearn"):
        pytest.importorskip(name)
    monkeypatch.setenv("MPLBACKEND", "agg")
    project.script = MANY
    project.record(versions=2)
    project.fill()
    assert len(project.births) == 2


TORCH = """
import time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rate = {rate}
if __name__ == "__main__":
    begun = time.time()
    order = np.random.default_rng().normal(size=32).astype("float32")
    x = torch.randn(32, 4) + torch.tensor(order)[:, None]
    loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=8, shuffle=True, num_workers=2)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate / 10)
    for epoch in range(2):
        for a, b in loader:
            loss = ((net(a)[:, 0] - b) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weight = float(net[0].weight.sum()) + begun % 1
        print("said", repr(weight))
"""


def test_segments_that_share_torch_and_loader_workers_are_exact(project, monkeypatch):
    pytest.importorskip("torch")
    project.script = TORCH
    project.record(versions=2)
    (project.folder / "train.py").write_text(
        (project.folder / "train.py").read_text().replace("\n" + ASKED, "\n    " + ASKED)
    )
    report = project.fill()
    assert len(project.births) == 2
    assert sum(outcome.report.states for outcome in report.outcomes) > 0
