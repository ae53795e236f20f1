"""Rearview as a logger of Lightning, Keras and the Hugging Face Trainer, in recorded programs."""

import pytest

from plainly import recorded, write
from rearview._history import history

pytestmark = pytest.mark.usefixtures("warm_torch")

LIGHTNING = """
import logging, warnings
warnings.simplefilter("ignore")
import torch
from lightning.pytorch import LightningModule, Trainer
from rearview.frameworks.loggers import lightning_logger

class Net(LightningModule):
    def __init__(self, width=8, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        loss = self.net(batch).pow(2).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

Trainer(max_epochs=2, logger=lightning_logger(), log_every_n_steps=1, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, accelerator="cpu",
        ).fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
"""

KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy
from rearview.frameworks.loggers import keras_logger
model = keras.Sequential([keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(numpy.ones((8, 3)), numpy.ones(8), epochs=3, batch_size=4, verbose=0,
          callbacks=[keras_logger(every_batch=True)])
"""

TRANSFORMERS = """
import torch
from transformers import Trainer, TrainingArguments
from rearview.frameworks.loggers import report_to_rearview

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        return {"loss": (self.net(x) - labels).pow(2).mean()}

report_to_rearview()
rows = [{"x": torch.ones(4) * k, "labels": torch.ones(1)} for k in range(8)]
arguments = TrainingArguments("out", report_to="rearview", logging_steps=1, num_train_epochs=2,
    per_device_train_batch_size=4, save_strategy="no", disable_tqdm=True, use_cpu=True)
Trainer(Net(), arguments, train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("script", "name", "count", "parameters"),
    [
        (LIGHTNING, "loss", 4, {"width": 8, "lr": 0.1}),
        (KERAS, "loss", 3, {"epochs": 3, "optimizer/learning_rate": 0.05}),
        (TRANSFORMERS, "train/loss", 4, {"num_train_epochs": 2, "per_device_train_batch_size": 4}),
    ],
    ids=["lightning", "keras", "transformers"],
)
def test_values_that_a_framework_logs_become_records(tmp_path, script, name, count, parameters):
    write(tmp_path, train=script)
    ended = recorded(tmp_path, "train.py")
    assert ended.code == 0, ended.err
    past = history(tmp_path)
    rows = [row for row in past.table(name).rows() if row[name] is not None]
    assert len(rows) == count
    assert all(isinstance(row[name], float) for row in rows)
    assert rows[-1]["epoch"] is not None  # at the points of the library's own loops
    arguments = past.run().args
    assert {key: arguments[key] for key in parameters} == pytest.approx(parameters)
    if script == KERAS:
        assert len(past.table("batch/loss").rows()) == 6
