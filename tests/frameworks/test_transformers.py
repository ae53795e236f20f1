"""The Trainer, killed at any step and started again, ends as if it had not been killed."""

import os
import pickle
import random
import signal
from itertools import count

import pytest
from forked import KILLED, PAUSED, kill, run, run_with_random_kills, same

STEPS, EPOCHS = 4, 3
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module", autouse=True)
def _transformers():
    pytest.importorskip("torch", reason="LOUD: torch is not installed")
    pytest.importorskip("transformers", reason="LOUD: transformers is not installed")
    pytest.importorskip("accelerate", reason="LOUD: accelerate is not installed")


def train(folder, *, until=None, how=signal.SIGKILL, callback=True, accumulate=1):
    import torch
    import transformers

    from rearview.frameworks.transformers import RearviewCallback

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4 * STEPS

        def __getitem__(self, i):
            ids = torch.tensor([i, random.randrange(20), *torch.randint(0, 20, (3,)).tolist()])
            return {"input_ids": ids, "labels": torch.tensor(i % 2)}

    torch.set_num_threads(1)
    transformers.set_seed(7)
    steps = count()

    class Mine(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            if next(steps) == until:
                kill(how)
            return loss

    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    saving = [RearviewCallback("run.ckpt", checkpoint_every=2)] if callback else []
    trainer = Mine(
        transformers.BertForSequenceClassification(config),
        transformers.TrainingArguments(
            output_dir="out",
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=4 // accumulate,
            gradient_accumulation_steps=accumulate,
            logging_steps=3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Rows(),
        callbacks=saving,
    )
    trainer.train()
    weights = {k: v.numpy() for k, v in trainer.model.state_dict().items()}
    logged = [
        {k: v for k, v in one.items() if "runtime" not in k and "per_second" not in k}
        for one in trainer.state.log_history
    ]
    (folder / "end").write_bytes(pickle.dumps((weights, logged)))


def end(folder):
    return pickle.loads((folder / "end").read_bytes())


@pytest.fixture(scope="module", params=[1, 2], ids=["one batch a step", "two batches a step"])
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run(train, folder, accumulate=request.param) == 0
    return request.param, *end(folder)


def test_the_callback_does_not_change_the_training(whole, tmp_path):
    accumulate, weights, logged = whole
    assert run(train, tmp_path, callback=False, accumulate=accumulate) == 0
    found = end(tmp_path)
    assert same(found[0], weights)
    assert found[1] == logged


@pytest.mark.parametrize("kill_at", [[5], [2 * STEPS - 1], [3, 3, 2]])
def test_a_killed_training_ends_bit_for_bit_as_an_uninterrupted_one(whole, kill_at, tmp_path):
    accumulate, weights, logged = whole
    for until in kill_at:
        killed = run(train, tmp_path, until=until * accumulate, accumulate=accumulate)
        assert killed == KILLED
    assert run(train, tmp_path, accumulate=accumulate) == 0
    found = end(tmp_path)
    assert same(found[0], weights)
    assert found[1] == logged


def test_a_training_that_gets_a_signal_saves_and_exits_with_the_code_to_be_continued(
    whole, tmp_path
):
    accumulate, weights, logged = whole
    assert run(train, tmp_path, until=4, how=signal.SIGTERM, accumulate=accumulate) == PAUSED
    assert run(train, tmp_path, accumulate=accumulate) == 0
    found = end(tmp_path)
    assert same(found[0], weights)
    assert found[1] == logged


@pytest.mark.parametrize("seed", [2])
def test_a_training_killed_at_random_steps_ends_bit_for_bit_the_same(whole, seed, tmp_path):
    accumulate, weights, logged = whole
    assert run_with_random_kills(train, tmp_path, seed, accumulate=accumulate) >= 2
    found = end(tmp_path)
    assert same(found[0], weights)
    assert found[1] == logged
