"""Programs with bars, trackers and downloads: a replay from a checkpoint is exact the first time."""

import importlib.util
import subprocess
import sys

import pytest

from plainly import recorded, write
from rearview._history import history, start_run
from rearview.store.project import Project
from rearview.store.runs import Runs

TQDM = """
import time
import torch
from tqdm import tqdm
torch.manual_seed(0)
net = torch.nn.Linear(16, 4)
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
data = torch.randn(64, 16)
seen = []
for epoch in tqdm(range(6)):
    bar = tqdm(range(8), desc=f"epoch {epoch}", mininterval=0)
    for i in bar:
        loss = net(data[i * 8 : i * 8 + 8]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if i == epoch:  # what tqdm's monitor does to a bar that was not drawn for ten seconds
            bar.miniters = 1
            bar.refresh(nolock=False)
            time.sleep(0.001 * (time.time_ns() % 7))
    value = loss.item()
    seen.append(value)
"""

PROGRESSBAR = """
import numpy as np
import progressbar
class Machine:
    def __init__(self, rounds):
        self.rounds = rounds
        self.bar = progressbar.ProgressBar()
    def fit(self, data):
        self.weights = np.random.default_rng(3).normal(size=(data.shape[1], 8))
        for epoch in self.bar(range(self.rounds)):
            for begin in range(0, len(data), 16):
                batch = data[begin : begin + 16]
                self.weights += 0.001 * batch.T @ np.tanh(batch @ self.weights)
            value = float(self.weights.sum())
machine = Machine(5)
machine.fit(np.random.default_rng(5).normal(size=(64, 12)))
"""

IMPORTING = """
import random
import time
weight = random.random()
for epoch in range(5):
    started = time.time()
    for step in range(200):
        weight += 0.001 * random.random()
    import dateutil.parser  # which looks at the clock when it is imported
    took = time.time() - started
    value = weight
"""

ABSENT = """
import io, os, random, sys, tarfile
if not os.path.exists("data"):
    parts = [random.random() for _ in range(8)]
    text = repr(parts).encode()
    with tarfile.open("data.tar", "w") as made:
        about = tarfile.TarInfo("data/parts.txt")
        about.size, about.mtime = len(text), 1_000_000_000
        made.addfile(about, io.BytesIO(text))
    with tarfile.open("data.tar") as made:
        made.extractall(".", filter="data")
with open("data/parts.txt") as file:
    data = eval(file.read())
weight = 0.0
for epoch in range(5):
    for one in data:
        weight += one * random.random()
    value = weight
    if epoch == 3 and os.path.exists("stop"):
        sys.exit("stopped")
print(weight)
"""

TENSORBOARDX = """
import random
from tensorboardX import SummaryWriter
writer = SummaryWriter(logdir="events")
weight = random.random()
for epoch in range(4):
    for step in range(200):
        weight += 0.001 * random.random()
        writer.add_scalar("weight", weight, 200 * epoch + step)
    writer.add_scalars("both", {"a": weight, "b": 1.0}, epoch)
    value = weight
writer.close()
"""

LOOPING_PROBE = """
{indent}import rearview
{indent}for part in [value, value / 2]:
{indent}    rearview.log("asked", part)
"""


def probed(text):
    """Return the program with a probe, a loop itself, after the statement that sets `value`."""
    lines = []
    for line in text.splitlines():
        lines.append(line)
        if line.lstrip().startswith("value ="):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(LOOPING_PROBE.format(indent=indent))
    return "\n".join(lines) + "\n"


def needs(*libraries):
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"LOUD: {library} is not installed, so it is not tested")


def tries(folder):
    """Return whether each replay of the newest run was proved, in order."""
    runs = Runs(Project.open(folder))
    return [one.proved for one in runs.replays(runs.all()[-1].id)]


PROGRAMS = {
    "a progress bar": (TQDM, ("tqdm", "torch")),
    "a progress bar that is iterated over": (PROGRESSBAR, ("progressbar",)),
    "an import in the loop": (IMPORTING, ("dateutil",)),
    "data that is made if it is absent": (ABSENT, ()),
    "tensorboardX": (TENSORBOARDX, ("tensorboardX",)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_replay_from_a_checkpoint_is_exact_the_first_time(tmp_path, name):
    text, libraries = PROGRAMS[name]
    needs(*libraries)
    write(tmp_path, train=text)
    ended = recorded(tmp_path, "train.py")
    assert ended.code == 0, ended.err
    (tmp_path / "train.py").write_text(probed(text))
    report = history(tmp_path).backfill(["asked"], at="epoch=3:", workers=1)
    assert report.proved, report.proof
    assert tries(tmp_path) == [True]
    rows = history(tmp_path).table("asked").rows()
    epochs = 6 if text is TQDM else 5 if text is not TENSORBOARDX else 4
    assert len([row for row in rows if row["asked"] is not None]) == 2 * (epochs - 3)


def test_a_run_that_made_its_data_is_resumed_as_if_the_data_were_absent(tmp_path):
    write(tmp_path, train=ABSENT)
    (tmp_path / "stop").touch()
    stopped = recorded(tmp_path, "train.py")
    assert "stopped" in stopped.err
    (tmp_path / "stop").unlink()
    command = [sys.executable, "-m", "rearview", "resume"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "setting up again without them" in done.stderr
    assert (tmp_path / "data" / "parts.txt").is_file()


def test_a_script_that_imports_from_above_is_recorded_with_its_repository(tmp_path, monkeypatch):
    top = tmp_path / "repo"
    write(top / "jobs", train="import sys\nsys.path.append('..')\nimport tools\ntools.work()\n")
    (top / "jobs" / ".rearview").rmdir()
    (top / "tools.py").write_text("def work():\n    return 1\n")
    subprocess.run(["git", "init", "-q", str(top)], check=True)
    monkeypatch.chdir(top / "jobs")
    monkeypatch.delenv("REARVIEW_ROOT", raising=False)
    how = start_run("train.py", [])
    assert f'"root":"{top.resolve()}"' in "".join(how.environment.values())
    (top / "jobs" / "train.py").write_text("print('nothing from above')\n")
    how = start_run("train.py", [])
    assert f'"root":"{(top / "jobs").resolve()}"' in "".join(how.environment.values())


def test_a_statement_above_the_project_is_named_with_the_variable_to_set(tmp_path):
    top = tmp_path / "repo"
    project = write(top / "jobs", train="weight = 0\nfor epoch in range(2):\n    weight += 1\n")
    (top / "tools.py").write_text("import rearview\nrearview.log('above', 1)\n")
    subprocess.run(["git", "init", "-q", str(top)], check=True)
    assert recorded(project, "train.py").code == 0
    report = history(project).backfill(["above"], workers=1)
    refused = " ".join(one.reason for one in report.refusals)
    assert f"{top / 'tools.py'} logs it" in refused
    assert f"REARVIEW_ROOT={top}" in refused
