"""Statements for other trackers as probes: their values land in the table, and only there."""

import importlib.util

import pytest

from plainly import recorded, write
from rearview._history import history

PLAIN = """
import random
weight = random.random()
for epoch in range(4):
    for step in range(500):
        weight += 0.001 * random.random()
    weight *= 0.9
print(weight)
"""

TENSORBOARD = """
import random, sys
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter(sys.argv[1])
weight = random.random()
for epoch in range(4):
    for step in range(500):
        weight += 0.001 * random.random()
    writer.add_scalar("weight", weight, epoch)
writer.close()
"""

WANDB = """
import random
import wandb
run = wandb.init(project="p", mode="offline")
weight = random.random()
for epoch in range(4):
    for step in range(500):
        weight += 0.001 * random.random()
    wandb.log({"weight": weight}, step=epoch)
run.finish()
"""

MLFLOW = """
import random, sys
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
weight = random.random()
with mlflow.start_run():
    for epoch in range(3):
        for step in range(500):
            weight += 0.001 * random.random()
        mlflow.log_metric("weight", weight, step=epoch)
"""


def bytes_of(*folders):
    return {
        path: path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".rearview" not in path.parts and path.suffix != ".py"
    }


def ask(folder, text, names):
    """Put the probes in and fill their columns; returns them by epoch."""
    (folder / "train.py").write_text(text)
    report = history(folder).backfill(names, workers=1)
    assert report.proved, report.proof
    rows = history(folder).table(*names).rows()
    return [row for row in rows if any(row.get(name) is not None for name in names)]


def needs(*libraries):
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"LOUD: {library} is not installed, so it is not tested as a probe")


@pytest.mark.parametrize(
    ("head", "probe", "names"),
    [
        ("import wandb\n", 'wandb.log({"a": weight, "b": epoch}, step=epoch)', ["a", "b"]),
        ("import mlflow\n", 'mlflow.log_metric("a", weight, step=epoch)', ["a"]),
        ("import mlflow as m\n", 'm.log_metrics({"a": weight, "b": 2}, step=epoch)', ["a", "b"]),
        (
            "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('probes')\n",
            'writer.add_scalar("a", weight, epoch)\n    writer.add_scalars("b", {"c": 1}, epoch)',
            ["a", "b/c"],
        ),
    ],
)
def test_a_trackers_statement_fills_a_column(tmp_path, head, probe, names):
    needs("wandb", "mlflow", "tensorboard")
    write(tmp_path, train=PLAIN)
    recorded(tmp_path, "train.py")
    before = bytes_of(tmp_path)
    rows = ask(
        tmp_path, head + PLAIN.replace("    weight *=", f"    {probe}\n    weight *="), names
    )
    assert len(rows) == 4
    assert all(row[name] is not None for row in rows for name in names)
    assert bytes_of(tmp_path) == before


@pytest.mark.parametrize("absolute", [True, False])
def test_tensorboard_files_stay_as_they_were(tmp_path, absolute):
    needs("tensorboard")
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    where = str(elsewhere) if absolute else "events"
    write(project, train=TENSORBOARD)
    assert recorded(project, "train.py", where).code == 0
    before = bytes_of(project, elsewhere)
    assert any("tfevents" in path.name for path in before)
    probed = TENSORBOARD.replace("writer.close", 'writer.add_scalar("last", weight)\nwriter.close')
    probed = probed.replace("    writer.add_scalar", '    writer.add_histogram("w", [weight])\n'
                            "    writer.add_scalar")  # fmt: skip
    assert len(ask(project, probed, ["last", "w"])) == 4
    assert bytes_of(project, elsewhere) == before


def test_wandb_is_not_told_a_second_time(tmp_path):
    needs("wandb")
    write(tmp_path, train=WANDB)
    ended = recorded(tmp_path, "train.py")
    assert ended.code == 0, ended.err
    before = bytes_of(tmp_path)
    assert any(path.suffix == ".wandb" for path in before)
    probed = WANDB.replace("    wandb.log", '    wandb.log({"half": weight / 2})\n    wandb.log')
    assert len(ask(tmp_path, probed, ["half"])) == 4
    assert bytes_of(tmp_path) == before


def test_mlflow_is_not_told_a_second_time(tmp_path):
    needs("mlflow")
    write(tmp_path, train=MLFLOW)
    ended = recorded(tmp_path, "train.py", f"sqlite:///{tmp_path}/runs.db")
    assert ended.code == 0, ended.err
    before = bytes_of(tmp_path)
    assert tmp_path / "runs.db" in before
    probed = MLFLOW.replace(
        "        mlflow.log", '        mlflow.log_metric("half", weight / 2)\n        mlflow.log'
    )
    assert len(ask(tmp_path, probed, ["half"])) == 3
    assert bytes_of(tmp_path) == before
