"""A small training with Lightning that can be killed at any batch; imported only by who runs it."""

import pickle
import random
import signal

import lightning.pytorch as pl
import torch
from forked import kill

from rearview.checkpointer.lightning_callback import LightningCheckpointCallback
from rearview.frameworks.lightning import RearviewCallback

BATCHES, EPOCHS = 4, 3


class Net(pl.LightningModule):
    def __init__(self, until, how):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(6, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 1),
        )
        self.until = until
        self.how = how
        self.count = 0

    def training_step(self, batch, batch_idx):
        loss = ((self.net(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        if self.count == self.until:
            kill(self.how)
        self.count += 1
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch).abs().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "train_loss_epoch"}]


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, i):
        return torch.full((6,), i / 10) + random.random() + torch.randn(6)


class Told(pl.loggers.Logger):
    """Remembers what it was told last, and at which step."""

    name, version, last = "told", 0, None

    def log_metrics(self, metrics, step=None):
        self.last = (step, sorted(metrics.items()))

    def log_hyperparams(self, *args, **kwargs):
        pass


def scaling():
    """Mixed precision with a scaler whose scale grows and shrinks as it goes."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    return pl.plugins.MixedPrecision("16-mixed", device="cpu", scaler=scaler)


def train(folder, *, until=None, how=signal.SIGKILL, callback=True, accumulate=1, scaled=False):
    pl.seed_everything(7, verbose=False)
    torch.set_num_threads(1)
    module = Net(until, how)
    saving = [RearviewCallback("run.ckpt", checkpoint_every=3)] if callback else []
    if callback == "published":
        saving = [LightningCheckpointCallback(local_checkpoint_file="run.ckpt", checkpoint_every=1)]
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=(told := Told()),
        log_every_n_steps=2,
        plugins=[(precision := scaling())] if scaled else None,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
        callbacks=[(stopping := pl.callbacks.EarlyStopping("val_loss", patience=9)), *saving],
    )
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, shuffle=True)
    validation = torch.utils.data.DataLoader(Noisy(), batch_size=8)
    path = saving[0].restore() if callback == "published" else None
    trainer.fit(module, loader, validation, ckpt_path=path)
    weights = {k: v.numpy() for k, v in module.state_dict().items()}
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    scale = precision.scaler.state_dict() if scaled else None
    stopped = {k: repr(v) for k, v in stopping.state_dict().items()}
    facts = (weights, rates, trainer.global_step, told.last, stopped, scale)
    (folder / "end").write_bytes(pickle.dumps(facts))
