"""What programs give to other loggers fills the table, with the real loggers."""

import importlib.util

import pytest

from plainly import recorded, write
from rearview._history import history

pytestmark = pytest.mark.usefixtures("warm_torch")


def needs(*libraries):
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"LOUD: {library} is not installed, so it is not captured here")


def columns(folder, *names):
    """Return the values of each name by point, without nulls."""
    found = {}
    for row in history(folder).table(*names).rows():
        for name in names:
            if row.get(name) is not None:
                found.setdefault(name, []).append(row[name])
    return found


def origins(folder):
    return {name: str(one) for name, one in history(folder).captured().items()}


def ran(folder, text, *words, **settings):
    write(folder, train=text)
    ended = recorded(folder, "train.py", *words, **settings)
    assert ended.code == 0, ended.err
    facts = history(folder).run().end.captured
    assert "problems" not in facts, facts
    return ended


TENSORBOARD = """
import numpy as np, torch
from torch.utils.tensorboard import SummaryWriter
import tensorboardX
writer, other = SummaryWriter("events"), tensorboardX.SummaryWriter("more")
for epoch in range(3):
    writer.add_scalar("loss", 1 / (epoch + 1), epoch)
    writer.add_scalar("tensor", torch.tensor(epoch / 2, requires_grad=True), global_step=epoch * 10)
    writer.add_scalars("split", {"train": epoch, "val": epoch * 2}, epoch)
    writer.add_histogram("weights", torch.arange(100.0), epoch)
    writer.add_image("picture", np.zeros((3, 4, 4), dtype="uint8"), epoch)
    writer.add_text("note", f"after {epoch}", epoch)
    other.add_scalar("x/acc", np.float32(0.5) * epoch, epoch)
    other.add_histogram("x/weights", np.arange(10.0), epoch)
writer.add_hparams({"lr": 0.1, "bsize": 4}, {"hparam/accuracy": 10.0})
writer.add_scalar("outside", 7.5, 42)
writer.close(); other.close()
"""


BACKGROUND = """
import mlflow, tensorboardX, rearview
mlflow.set_tracking_uri("sqlite:///mlflow.db")
writer = rearview.background(tensorboardX.SummaryWriter, "more")
tracker = rearview.background(mlflow)
tracker.log_param("rate", 0.5)
for epoch in range(3):
    writer.add_scalar("x/acc", 0.5 * epoch, epoch)
    writer.add_scalars("split", {"train": epoch}, global_step=epoch)
    writer.add_text("note", f"after {epoch}", epoch)
    tracker.log_metric("m/loss", 1 / (epoch + 1), step=epoch)
    tracker.log_metrics({"m/norm": epoch * 2.0}, step=epoch)
writer.close()
tracker.end_run()
"""


def test_values_given_to_a_background_writer_fill_the_table_too(tmp_path):
    needs("tensorboardX", "mlflow")
    ran(tmp_path, BACKGROUND)
    names = ("x/acc", "split/train", "note", "m/loss", "m/norm")
    assert columns(tmp_path, *names) == {
        "x/acc": [0.0, 0.5, 1.0],
        "split/train": [0, 1, 2],
        "note": ["after 0", "after 1", "after 2"],
        "m/loss": [1.0, 0.5, 1 / 3],
        "m/norm": [0.0, 2.0, 4.0],
    }
    assert set(origins(tmp_path).values()) == {"tensorboard", "mlflow"}
    assert history(tmp_path).run().args["rate"] == 0.5
    assert list((tmp_path / "more").glob("events.*"))


def test_tensorboard_and_tensorboardx_fill_the_table(tmp_path):
    needs("torch", "tensorboard", "tensorboardX")
    ran(tmp_path, TENSORBOARD)
    found = columns(tmp_path, "loss", "tensor", "split/val", "note", "x/acc", "hparam/accuracy")
    assert found == {
        "loss": [1.0, 0.5, 1 / 3],
        "tensor": [0.0, 0.5, 1.0],
        "split/val": [0, 2, 4],
        "note": ["after 0", "after 1", "after 2"],
        "x/acc": [0.0, 0.5, 1.0],
        "hparam/accuracy": [10.0] * 3,
    }
    assert set(origins(tmp_path).values()) == {"tensorboard"}
    counts, edges = columns(tmp_path, "weights")["weights"][-1]
    assert counts.sum() == 100
    assert edges[0] <= 0
    assert edges[-1] >= 99
    assert len(columns(tmp_path, "x/weights", "picture")["picture"]) == 3
    assert history(tmp_path).run().args == {"lr": 0.1, "bsize": 4}
    [row] = history(tmp_path).table("outside").rows()
    assert (row["step"], row["outside"]) == (42, 7.5)
    steps = history(tmp_path).table("tensor", "step").rows()
    assert [row["step_logged" if "step_logged" in row else "step"] for row in steps][1:] == [10, 20]


WANDB = """
import sys, wandb
run = wandb.init(project="p", mode="offline", config={"lr": 0.1, "model": {"depth": 2}})
wandb.config.update({"width": 8})
wandb.config.seed = 3
for epoch in range(3):
    wandb.log({"acc": epoch / 4, "nested": {"a": epoch}, "words": "fine"}, step=epoch)
    if epoch == 1:
        wandb.log({"hist": wandb.Histogram([1.0, 2.0, 3.0])}, step=epoch)
run.summary["best"] = 0.75
wandb.run.summary["acc"] = 0.5
run.finish()
"""


def test_weights_and_biases_fills_the_table(tmp_path):
    needs("wandb")
    ran(tmp_path, WANDB)
    found = columns(tmp_path, "acc", "nested.a", "words", "best", "summary/acc")
    assert found["acc"] == [0.0, 0.25, 0.5]
    assert found["nested.a"] == [0, 1, 2]
    assert found["words"] == ["fine"] * 3
    assert set(found["best"]) == {0.75}
    assert set(found["summary/acc"]) == {0.5}
    assert len(columns(tmp_path, "hist")["hist"]) == 1
    run = history(tmp_path).run()
    assert run.args == {"lr": 0.1, "model.depth": 2, "width": 8, "seed": 3}
    assert set(run.arg_origins.values()) == {"wandb"}
    assert set(origins(tmp_path).values()) == {"wandb"}


MLFLOW = """
import sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
with mlflow.start_run():
    mlflow.log_param("dropout", 0.5)
    mlflow.log_params({"momentum": 0.9})
    for epoch in range(3):
        mlflow.log_metric("f1", epoch / 4, step=epoch)
        mlflow.log_metrics({"p": 0.5, "r": epoch}, step=epoch * 100)
    mlflow.log_metric("final", 2.0)
    if len(sys.argv) > 2:
        mlflow.sklearn.autolog()
        from sklearn.linear_model import LogisticRegression
        LogisticRegression(C=0.5).fit([[0.0], [1.0]], [0, 1])
"""


def test_mlflow_and_its_autologging_fill_the_table(tmp_path):
    needs("mlflow", "sklearn")
    ran(tmp_path, MLFLOW, f"sqlite:///{tmp_path}/m.db", "autolog")
    found = columns(tmp_path, "f1", "p", "r", "final", "step")
    assert found["f1"] == [0.0, 0.25, 0.5]
    assert found["r"] == [0, 1, 2]
    assert set(found["final"]) == {2.0}
    assert found["step"] == [100, 200]
    args = history(tmp_path).run().args
    assert (args["dropout"], args["momentum"]) == (0.5, 0.9)
    assert args["C"] == 0.5
    assert any("accuracy" in name for name in origins(tmp_path))


LIGHTNING = """
import sys, torch, lightning as L
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss
    def validation_step(self, batch, index):
        self.log("val_acc", 0.25)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 2)), batch_size=4)
for logger in (True, False):
    trainer = L.Trainer(max_epochs=2, logger=logger, enable_progress_bar=False,
                        enable_checkpointing=False, enable_model_summary=False,
                        log_every_n_steps=1, accelerator="cpu")
    trainer.fit(Model(), rows, rows)
"""


def test_lightnings_log_fills_the_table_with_and_without_a_logger(tmp_path):
    needs("lightning")
    ran(tmp_path, LIGHTNING)
    found = columns(tmp_path, "val_acc", "train_loss_epoch", "train_loss_step")
    assert set(found["val_acc"]) == {0.25}
    assert len(set(found["train_loss_epoch"])) == 4
    assert len(set(found["train_loss_step"])) == 8
    own = {"val_acc", "train_loss_epoch", "train_loss_step"}
    assert {origins(tmp_path)[name] for name in own} == {"lightning"}


TRANSFORMERS = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
torch.manual_seed(0)
config = BertConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                    intermediate_size=8)
rows = [{"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor(k % 2)} for k in range(8)]
arguments = TrainingArguments("out", num_train_epochs=2, per_device_train_batch_size=4,
                              logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
                              eval_strategy="epoch", disable_tqdm=True)
Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows, eval_dataset=rows).train()
"""


def test_the_trainers_logs_fill_the_table(tmp_path):
    needs("transformers", "accelerate")
    ran(tmp_path, TRANSFORMERS)
    found = columns(tmp_path, "loss", "eval_loss", "learning_rate", "train_loss")
    assert len(found["loss"]) == 4
    assert len(set(found["eval_loss"])) == 2
    assert origins(tmp_path)["loss"] == "transformers"
    assert origins(tmp_path)["train_loss"] == "transformers"


KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
model.fit(np.ones((8, 2)), np.ones(8), epochs=3, validation_split=0.5, verbose=0)
"""


def test_the_logs_of_keras_fill_the_table(tmp_path):
    needs("keras", "torch")
    ran(tmp_path, KERAS)
    found = columns(tmp_path, "loss", "mae", "val_loss")
    assert [len(values) for values in found.values()] == [3, 3, 3]
    assert origins(tmp_path) == dict.fromkeys(("loss", "mae", "val_loss", "val_mae"), "keras")


def test_a_logger_can_be_switched_off(tmp_path):
    needs("tensorboardX")
    text = """
import tensorboardX
writer = tensorboardX.SummaryWriter("events")
for epoch in range(3):
    writer.add_scalar("loss", epoch / 2, epoch)
"""
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py", capture="-tensorboard").code == 0
    assert origins(tmp_path) == {}
