"""A machine is measured in about a second, and nothing is left behind."""

import pytest

from rearview.backfill import machine_speed


def test_computing_and_the_disk_are_measured_in_a_separate_process(tmp_path):
    found = machine_speed.measure(tmp_path)
    assert found is not None
    assert found.kernels["python"] > 0
    assert found.kernels["numpy"] > 0
    assert "cuda" not in found.kernels or machine_speed.gpus()
    assert found.read > 0
    assert found.write > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written_is_not_measured(tmp_path):
    assert machine_speed.measure(tmp_path / "gone") is None


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(machine_speed.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        machine_speed.disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_fastest_round_counts():
    rounds = iter([0, 3, 0])
    calls = []

    def kernel():
        calls.append(next(rounds, 0))

    assert machine_speed.best(kernel, 0.001) < 0.001
    assert len(calls) > 1
