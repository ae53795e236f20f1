"""What is compressed, and what is left alone."""

import random

import pytest

from rearview.store.checkpoints.compression import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    CompressionPolicy,
    CompressionSample,
    DiskSpeed,
    compression_pays,
)

NVME, HARD_DISK, HOME_FOLDER = DiskSpeed(2e9, 1.0), DiskSpeed(1.5e8, 1.0), DiskSpeed(1e7, 1.0)
MB = 1 << 20


def sample(share, speed=3e8):
    return CompressionSample(16384, round(16384 * share), 16384 / speed)


@pytest.mark.parametrize("disk", [DiskSpeed(), NVME, HARD_DISK, HOME_FOLDER])
def test_dense_floats_are_never_compressed_and_data_that_shrinks_to_half_always_is(disk):
    for share in (0.78, 0.92, 0.96, 1.0, 1.01):
        assert not compression_pays(sample(share), disk)
    for share in (0.0, 0.14, 0.5):
        assert compression_pays(sample(share, speed=1.5e8), disk)


def test_data_that_shrinks_a_little_is_compressed_only_if_that_is_faster():
    assert not compression_pays(sample(0.6), DiskSpeed())
    assert not compression_pays(sample(0.6), NVME)
    assert compression_pays(sample(0.6), HOME_FOLDER)
    assert compression_pays(sample(0.6, speed=1e9), HARD_DISK)
    assert not compression_pays(sample(0.6, speed=2e8), HARD_DISK)


def test_the_speed_of_the_disk_follows_its_latest_writes():
    disk = DiskSpeed()
    for speed in [1e9] * 5 + [1e8] * 5:
        disk = disk.after(100 * MB, 100 * MB / speed)
    assert 1e8 <= disk.speed < 1.3e8


def test_small_writes_tell_nothing_about_the_disk():
    worth = CompressionPolicy()
    worth.add_write(4096, 0.01)
    assert worth.disk.speed is None
    worth.add_write(16 * MB, 0.1)
    assert worth.disk.speed == 160 * MB


@pytest.fixture
def arrays():
    numpy = pytest.importorskip("numpy")
    rng = numpy.random.default_rng(3)
    weights = (rng.standard_normal(2 * MB) * 0.02).astype("f4")
    frames = numpy.zeros((40, 210, 160, 3), "u1")
    for k, frame in enumerate(frames):
        frame[40:60, 2 * k : 2 * k + 20] = rng.integers(0, 255, 3)
        frame[180:, :] = 87
    return {
        "weights": weights,
        "moments": weights**2 * 1e-3,
        "half": weights.astype("f2"),
        "bfloat16": (weights.view("u4") >> 16).astype("u2"),
        "double": rng.standard_normal(MB),
        "noise": rng.integers(0, 256, 8 * MB, "u1"),
        "zeros": numpy.zeros(MB),
        "tokens": rng.zipf(1.3, MB).clip(0, 50_000),
        "mask": rng.integers(0, 2, 8 * MB, "u1").astype(bool),
        "one-hot": numpy.eye(64, dtype="f4")[rng.integers(0, 64, MB // 16)],
        "frames": frames,
        "partly filled": numpy.concatenate([weights[:MB], numpy.zeros(2 * MB, "f4")]),
    }


def test_only_real_data_that_shrink_are_compressed(arrays):
    worth = CompressionPolicy()
    worth.disk = NVME
    shrinks = {
        name
        for name, array in arrays.items()
        if worth.predicted_share(name, memoryview(array).cast("B"))
    }
    dense = {"weights", "moments", "half", "bfloat16", "double", "noise"}
    assert shrinks == arrays.keys() - dense


def test_data_that_did_not_shrink_is_seldom_sampled_again(monkeypatch):
    dense = memoryview(random.Random(5).randbytes(MB))
    worth, looks = CompressionPolicy(), []
    look = worth.sample

    def counted(view):
        looks.append(1)
        return look(view)

    monkeypatch.setattr(worth, "sample", counted)
    assert all(worth.predicted_share("a", dense) is None for _ in range(FIRST_PAUSE + 1))
    assert len(looks) == 1
    assert worth.predicted_share("another", dense) is None
    assert len(looks) == 2
    for _ in range(10_000):
        worth.predicted_share("a", dense)
    assert 10_000 // LONGEST_PAUSE < len(looks) < 25


def test_data_that_starts_to_shrink_is_noticed_and_remembered():
    dense, zeros = memoryview(random.Random(5).randbytes(MB)), memoryview(bytes(MB))
    worth = CompressionPolicy()
    assert worth.predicted_share("a", dense) is None
    found = [worth.predicted_share("a", zeros) is not None for _ in range(FIRST_PAUSE + 3)]
    assert found == [False] * FIRST_PAUSE + [True] * 3
