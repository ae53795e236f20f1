"""Keras on torch, killed at any batch and started again, ends as if it had not been killed."""

import os
import pickle
import signal
from itertools import count

import numpy as np
import pytest
from forked import KILLED, PAUSED, kill, run, run_with_random_kills, same

BATCHES, EPOCHS = 4, 3
os.environ.setdefault("KERAS_BACKEND", "torch")


@pytest.fixture(scope="module", autouse=True)
def _keras():
    pytest.importorskip("torch", reason="LOUD: torch is not installed")
    pytest.importorskip("keras", reason="LOUD: keras is not installed")


def train(folder, *, until=None, how=signal.SIGKILL, callback=True):
    import keras
    import torch

    from rearview.checkpointer.keras_callback import KerasCheckpointerCallback
    from rearview.frameworks.keras import RearviewCallback

    torch.set_num_threads(1)
    keras.utils.set_random_seed(7)
    steps = count()

    class Net(keras.Sequential):
        def train_step(self, data):
            logs = super().train_step(data)
            if next(steps) == until:
                kill(how)
            return logs

    x = np.random.default_rng(3).normal(size=(6 * BATCHES, 5)).astype("float32")
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    model = Net([keras.Input((5,)), *layers, keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse", metrics=["mae"])
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=0.1)
    saving = [RearviewCallback("run.ckpt", checkpoint_every=3)] if callback else []
    if callback == "published":
        saving = [KerasCheckpointerCallback(local_checkpoint_file="run.ckpt", checkpoint_every=1)]
    history = model.fit(
        x,
        x.sum(1),
        batch_size=6,
        epochs=EPOCHS,
        verbose=0,
        validation_data=(x[:4], x[:4].sum(1)),
        callbacks=[*saving, plateau],
    )
    weights = {str(k): w for k, w in enumerate(model.get_weights())}
    weights |= {f"o{k}": v.value.detach().numpy() for k, v in enumerate(model.optimizer.variables)}
    (folder / "end").write_bytes(pickle.dumps((weights, history.history)))


def end(folder):
    return pickle.loads((folder / "end").read_bytes())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run(train, folder) == 0
    return end(folder)


def test_the_callback_does_not_change_the_training(whole, tmp_path):
    assert run(train, tmp_path, callback=False) == 0
    weights, history = end(tmp_path)
    assert same(weights, whole[0])
    assert history == whole[1]


@pytest.mark.parametrize("kill_at", [[5], [2 * BATCHES - 1], [2, 3, 4]])
def test_a_killed_training_ends_bit_for_bit_as_an_uninterrupted_one(whole, kill_at, tmp_path):
    for until in kill_at:
        assert run(train, tmp_path, until=until) == KILLED
    assert run(train, tmp_path) == 0
    weights, history = end(tmp_path)
    assert same(weights, whole[0])
    assert history == whole[1]


def test_a_training_that_gets_a_signal_saves_and_exits_with_the_code_to_be_continued(
    whole, tmp_path
):
    assert run(train, tmp_path, until=4, how=signal.SIGTERM) == PAUSED
    assert run(train, tmp_path) == 0
    weights, history = end(tmp_path)
    assert same(weights, whole[0])
    assert history == whole[1]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_training_killed_at_random_batches_ends_bit_for_bit_the_same(whole, seed, tmp_path):
    assert run_with_random_kills(train, tmp_path, seed) >= 2
    weights, history = end(tmp_path)
    assert same(weights, whole[0])
    assert history == whole[1]


def test_the_published_callback_also_resumes_bit_for_bit(whole, tmp_path):
    assert run(train, tmp_path, until=BATCHES + 2, callback="published") == KILLED
    assert len(list((tmp_path / "run.ckpt.saves").iterdir())) == 2  # at the start of each epoch
    assert run(train, tmp_path, until=2, how=signal.SIGTERM, callback="published") == PAUSED
    assert run(train, tmp_path, callback="published") == 0
    weights, history = end(tmp_path)
    assert same(weights, whole[0])
    assert history == whole[1]
