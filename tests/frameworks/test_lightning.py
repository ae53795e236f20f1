"""Lightning, killed at any batch and started again, ends as if it had not been killed."""

import pickle
import signal

import pytest
from forked import KILLED, PAUSED, run, run_with_random_kills, same

BATCHES = 4


@pytest.fixture(scope="module", autouse=True)
def _lightning():
    pytest.importorskip("torch", reason="LOUD: torch is not installed")
    pytest.importorskip("lightning.pytorch", reason="LOUD: lightning is not installed")
    import lightning_training

    assert lightning_training.BATCHES == BATCHES


def train(folder, **given):
    import lightning_training

    lightning_training.train(folder, **given)


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
