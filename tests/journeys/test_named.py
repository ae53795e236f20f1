"""What a recorded call returns gets a name after the run, and its values are exact."""

import json
import subprocess
import sys

from limits import HUNG

TRAIN = """\
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.drop(x))


torch.manual_seed(0)
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for epoch in range(3):
    for step in range(4):
        loss = (model(torch.randn(8, 4)) ** 2).mean()
        opt.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.2)
        opt.step()
    kept.append(loss.item())
    print(epoch, loss.item())
"""
CLIP = "clip_grad_norm_(model.parameters(), 0.2)\n"
PROBED = (
    ("import torch\n", "import rearview\nimport torch\n"),
    (CLIP, f'gn = {CLIP}        rearview.log("gn", gn)\n'),
    (
        "kept.append(loss.item())\n",
        'last = loss.item()\n    rearview.log("last", last)\n    kept.append(last)\n',
    ),
    (
        "return self.fc(self.drop(x))\n",
        'out = self.fc(self.drop(x))\n        rearview.log("out", out.sum().item())\n        return out\n',
    ),
)


LOGGER = """\
import json, sys
def log(name, value):
    print(json.dumps([name, float(value)]), file=sys.stderr)
"""


def rearview(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )


def test_a_named_value_of_a_recorded_statement_is_exact_in_every_version(tmp_path):
    probed = TRAIN
    for before, after in PROBED:
        assert before in probed
        probed = probed.replace(before, after)
    # truth: the probed text, run by plain Python; its seed makes every run the same
    truth = tmp_path / "truth"
    truth.mkdir()
    (truth / "train.py").write_text(probed)
    (truth / "rearview.py").write_text(LOGGER)
    plain = subprocess.run(
        [sys.executable, "train.py"], cwd=truth, capture_output=True, check=True, text=True
    )
    expected = [json.loads(line) for line in plain.stderr.splitlines()]
    project = tmp_path / "project"
    project.mkdir()
    for text in (TRAIN.replace("range(3)", "range(2)"), TRAIN):
        (project / "train.py").write_text(text)
        assert rearview(project, "run", "-q", "train.py").returncode == 0
    (project / "train.py").write_text(probed)

    names = ("gn", "last", "out")
    filled = rearview(project, "backfill", *names, "--yes")
    assert filled.returncode == 0, filled.stdout + filled.stderr  # 1 if anything is unproved
    assert "exact:" in filled.stdout + filled.stderr

    rows = json.loads(rearview(project, "table", *names, "--format", "json").stdout)
    runs = list(dict.fromkeys(row["run"] for row in rows))
    for run, epochs in zip(runs, (2, 3), strict=True):
        mine = [row for row in rows if row["run"] == run and row["step"] is not None]
        assert len(mine) == 4 * epochs
        for name in ("gn", "out"):
            told = [value for each, value in expected if each == name]
            assert [row[name] for row in mine] == told[: len(mine)]
        lasts = [row["last"] for row in mine if row["step"] == 3]
        assert lasts == [value for each, value in expected if each == "last"][:epochs]


def test_a_refusal_blames_the_statement_that_was_changed(tmp_path):
    (tmp_path / "train.py").write_text("for i in range(3):\n    f = sum([i, 1])\n")
    assert rearview(tmp_path, "run", "-q", "train.py").returncode == 0
    (tmp_path / "train.py").write_text(
        "import rearview\nfor i in range(3):\n    f = sum([i, 2])\n    rearview.log('f', f)\n"
    )
    said = rearview(tmp_path, "backfill", "f", "--yes")
    assert said.returncode
    assert "train.py:3 is not a probe: `f = sum([i, 2])`" in said.stdout + said.stderr
    assert "import rearview" not in said.stdout + said.stderr
