"""A state to save, and writers to save it with."""

import threading

import numpy as np

from limits import HUNG
from rearview.model import Edge, Point, Snapshot, Step
from rearview.runtime.saving.writer import SKELETON

MB = 1 << 20
ONE = 5 * MB
"""Staging memory for one checkpoint of `arrays`, not for two."""


def arrays():
    rng = np.random.default_rng(0)
    return {
        "weights": rng.standard_normal(MB // 4),
        "frozen": rng.standard_normal(MB // 4),
        "bias": rng.standard_normal(100),
        "shared": rng.standard_normal(20_000),
        "empty": np.zeros(0),
    }


def submit(writer, seq, buffers, *, run="r", **more):
    return writer.submit(
        Snapshot(run, seq, Point((Step("epoch", seq),)), Edge.START, b"s%d" % seq, buffers), **more
    )


def equal(checkpoints, seq, expected, *, run="r"):
    loaded = checkpoints.load(checkpoints.get(f"{run}/{seq}"))
    assert set(loaded) == {*expected, SKELETON}
    assert loaded[SKELETON] == b"s%d" % seq
    for key, value in expected.items():
        assert bytes(loaded[key]) == value.tobytes(), key


def stalled(store):
    """Make saves wait until the returned event is set."""
    go, real = threading.Event(), store.save

    def save(*args, **kwargs):
        assert go.wait(HUNG)
        return real(*args, **kwargs)

    store.save = save
    return go
