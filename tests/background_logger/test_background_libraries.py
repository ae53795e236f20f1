"""Background writers of the libraries people use, read back by the libraries' own readers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import rearview
from plainly import recorded, write
from rearview._history import history
from rearview.bridges.wandb_files import log_records


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "images": 0})
    found.Reload()
    return found


def summary_writer(library):
    if library == "torch":
        from torch.utils.tensorboard import SummaryWriter
    else:
        from tensorboardX import SummaryWriter
    return SummaryWriter


@pytest.mark.parametrize("library", ["torch", "tensorboardX"])
def test_a_summary_writer_writes_the_same_in_the_background(tmp_path, library):
    make = summary_writer(library)
    torch.manual_seed(0)
    weights = [torch.randn(50), torch.randn(3, 3, requires_grad=True)]
    plain = make(str(tmp_path / "plain"))
    ours = rearview.background(make, str(tmp_path / "ours"))
    for step in range(3):
        for writer in (plain, ours):
            writer.add_scalar("loss", 1 / (step + 1), step)
            writer.add_scalars("both", {"a": step, "b": 2.0}, step)
            writer.add_histogram("w", weights[0], step)
            writer.add_histogram("v", weights[1], global_step=step)
            writer.add_image("picture", np.full((3, 4, 4), step / 4), step)
        weights[0] *= 2  # after the call: it has been copied
    for writer in (plain, ours):
        writer.close()
    one, two = events(tmp_path / "plain"), events(tmp_path / "ours")
    assert two.Tags()["scalars"] == one.Tags()["scalars"]
    assert [(e.step, e.value) for e in two.Scalars("loss")] == [
        (e.step, e.value) for e in one.Scalars("loss")
    ]
    for tag in ("w", "v"):
        assert [e.histogram_value for e in two.Histograms(tag)] == [
            e.histogram_value for e in one.Histograms(tag)
        ]
    assert [e.encoded_image_string for e in two.Images("picture")] == [
        e.encoded_image_string for e in one.Images("picture")
    ]
    folders = [{p.name for p in (tmp_path / n).iterdir() if p.is_dir()} for n in ("plain", "ours")]
    assert folders[0] == folders[1] != set()


@pytest.mark.parametrize("library", ["torch", "tensorboardX"])
def test_an_existing_summary_writer_continues_in_the_background(tmp_path, library):
    writer = summary_writer(library)(str(tmp_path / "logs"), filename_suffix=".x")
    writer.add_scalar("loss", 0.0, 0)
    ours = rearview.background(writer)
    assert Path(ours.get_logdir() if library == "torch" else ours.logdir) == tmp_path / "logs"
    ours.add_scalar("loss", 1.0, 1)
    ours.close()
    found = events(tmp_path / "logs").Scalars("loss")
    assert [(e.step, e.value) for e in found] == [(0, 0.0), (1, 1.0)]
    assert all(path.name.endswith(".x") for path in (tmp_path / "logs").iterdir())


def test_figures_are_closed_here_as_the_writer_closes_them_there(tmp_path):
    import matplotlib.pyplot as plt

    writer = rearview.background(summary_writer("torch"), str(tmp_path))
    figure, axes = plt.subplots(figsize=(1, 1))
    axes.plot([1, 2])
    writer.add_figure("curve", figure, 0)
    assert plt.get_fignums() == []
    writer.close()
    assert events(tmp_path).Images("curve")[0].width == 100


@pytest.mark.filterwarnings("ignore")  # of MLflow's own libraries
def test_mlflow_continues_the_active_run_in_the_background(tmp_path):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    try:
        with mlflow.start_run() as run:
            ours = rearview.background(mlflow)
            for step in range(5):
                ours.log_metric("loss", 1 / (step + 1), step=step)
            ours.log_param("lr", 0.1)
            ours.close()
        client = mlflow.MlflowClient()
        found = client.get_metric_history(run.info.run_id, "loss")
        assert sorted((m.step, m.value) for m in found) == [(k, 1 / (k + 1)) for k in range(5)]
        assert client.get_run(run.info.run_id).data.params == {"lr": "0.1"}
        assert client.get_run(run.info.run_id).info.status == "FINISHED"
    finally:
        mlflow.set_tracking_uri(None)


def wandb_rows(folder):
    """Return the history of the one offline run below a folder, decoded by wandb's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = Path(folder).glob("wandb/offline-run-*/run-*.wandb")
    records = [Record.FromString(data) for data in log_records(file)]
    return [
        {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]


@pytest.mark.parametrize("exists", [False, True], ids=["made there", "made here"])
def test_a_run_of_wandb_is_logged_to_in_the_background(tmp_path, monkeypatch, exists):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    options = {"project": "p", "mode": "offline", "dir": str(tmp_path)}
    if exists:
        run = rearview.background(wandb.init(**options))
    else:
        run = rearview.background(wandb.init, **options)
    for step in range(4):
        run.log({"loss": 1 / (step + 1), "nested": {"a": step}})
    run.summary["best"] = 0.25
    run.finish()
    wandb.teardown()
    rows = wandb_rows(tmp_path)
    assert [row["loss"] for row in rows] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [row["_step"] for row in rows] == [0, 1, 2, 3]


SCRIPT = """
import random, sys
import rearview
from torch.utils.tensorboard import SummaryWriter
writer = rearview.background(SummaryWriter, "logs")
weight = random.random()
for epoch in range(4):
    for step in range(500):
        weight += 0.001 * random.random()
    writer.add_scalar("weight", weight, epoch)
writer.close()
print(writer)
"""


def test_a_recorded_run_logs_in_the_background_and_its_replay_logs_nothing(tmp_path):
    write(tmp_path, train=SCRIPT)
    ended = recorded(tmp_path, "train.py")
    assert (ended.code, ended.out) == (0, "<background SummaryWriter>\n"), ended.err
    files = sorted(tmp_path.glob("logs/*"))
    assert len(events(tmp_path / "logs").Scalars("weight")) == 4
    before = {file: file.read_bytes() for file in files}
    probe = '    rearview.log("half", weight / 2)\n    writer.add_histogram("w", [weight], epoch)\n'
    write(tmp_path, train=SCRIPT.replace("    writer.add", f"{probe}    writer.add"))
    report = history(tmp_path).backfill(["half", "w"], workers=1)
    assert report.proved, report.proof
    rows = history(tmp_path).table("half", "w").rows()
    assert len(rows) == 4
    assert all(row["half"] is not None and row["w"] is not None for row in rows)
    assert {file: file.read_bytes() for file in sorted(tmp_path.glob("logs/*"))} == before
