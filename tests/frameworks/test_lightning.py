"""Lightning, killed at any batch and started again, ends as if it had not been killed."""

import pickle
import random
import signal

import pytest
from forked import KILLED, PAUSED, kill, run, run_with_random_kills, same

torch = pytest.importorskip("torch", reason="LOUD: torch is not installed")
pl = pytest.importorskip("lightning.pytorch", reason="LOUD: lightning is not installed")

from rearview.checkpointer.lightning_callback import LightningCheckpointCallback  # noqa: E402
from rearview.frameworks.lightning import RearviewCallback  # noqa: E402

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


def end(folder):
    return pickle.loads((folder / "end").read_bytes())


@pytest.fixture(scope="module", params=[1, 3], ids=["each batch steps", "three batches step"])
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run(train, folder, accumulate=request.param) == 0
    plain = tmp_path_factory.mktemp("plain")
    assert run(train, plain, accumulate=request.param, callback=False) == 0
    return request.param, end(folder), end(plain)


def test_the_callback_does_not_change_the_training(whole):
    _, with_it, without = whole
    assert same(with_it[0], without[0])
    assert with_it[1:] == without[1:]


@pytest.mark.parametrize("kill_at", [[5], [2 * BATCHES - 1], [3, 4, 2]])
def test_a_killed_training_ends_bit_for_bit_as_an_uninterrupted_one(whole, kill_at, tmp_path):
    accumulate, expected, _ = whole
    for until in kill_at:
        assert run(train, tmp_path, until=until, accumulate=accumulate) == KILLED
    assert run(train, tmp_path, accumulate=accumulate) == 0
    found = end(tmp_path)
    assert same(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_a_training_that_gets_a_signal_saves_and_exits_with_the_code_to_be_continued(
    whole, tmp_path
):
    accumulate, expected, _ = whole
    assert run(train, tmp_path, until=4, how=signal.SIGTERM, accumulate=accumulate) == PAUSED
    assert run(train, tmp_path, accumulate=accumulate) == 0
    found = end(tmp_path)
    assert same(found[0], expected[0])
    assert found[1:] == expected[1:]


@pytest.mark.parametrize("seed", [2])
def test_a_training_killed_at_random_steps_ends_bit_for_bit_the_same(whole, seed, tmp_path):
    accumulate, expected, _ = whole
    assert run_with_random_kills(train, tmp_path, seed, accumulate=accumulate) >= 2
    found = end(tmp_path)
    assert same(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_the_published_callback_also_resumes_bit_for_bit(whole, tmp_path):
    accumulate, expected, _ = whole
    given = {"accumulate": accumulate, "callback": "published"}
    assert run(train, tmp_path, until=BATCHES + 2, **given) == KILLED
    saved = list((tmp_path / "run.ckpt.saves").iterdir())
    assert len(saved) == 2  # at the start of each epoch
    assert run(train, tmp_path, until=2, how=signal.SIGTERM, **given) == PAUSED
    assert run(train, tmp_path, **given) == 0
    found = end(tmp_path)
    assert same(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_the_scale_of_mixed_precision_is_resumed_too(tmp_path):
    assert run(train, tmp_path / "whole", scaled=True) == 0
    assert run_with_random_kills(train, tmp_path / "killed", 3, scaled=True) >= 2
    expected, found = end(tmp_path / "whole"), end(tmp_path / "killed")
    assert same(found[0], expected[0])
    assert found[1:] == expected[1:]
    assert expected[-1]["scale"] != 4.0
