import pytest

from rearview.model import CheckpointMeta, Edge, Part, Point, Snapshot, Step
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project

BIG = 1 << 20


@pytest.fixture
def project(tmp_path):
    return Project.create(tmp_path)


@pytest.fixture
def checkpoints(project):
    return Checkpoints(project)


@pytest.fixture
def state():
    """Parts of every kind: large, large and unaligned, small, tiny, empty."""

    def make(seed):
        return {
            "large": bytes([seed % 256]) * (BIG + 4096),
            "odd": (seed.to_bytes(4, "big") * (BIG // 4 + 1))[: BIG + 13],
            "small": seed.to_bytes(8, "big") * 100,
            "tiny": b"x%d" % seed,
            "empty": b"",
        }

    return make


@pytest.fixture
def save(checkpoints, state):
    def one(seq, *, run="r", seed=None, store=None):
        contents = state(seq if seed is None else seed)
        parts = [Part(key, data) for key, data in contents.items()]
        point = Point((Step("epoch", seq),))
        return (store or checkpoints).save(
            Snapshot(run, seq, point, Edge.START, meta=CheckpointMeta(records=seq)), parts
        )

    return one


@pytest.fixture
def holds(checkpoints, state):
    """Return True if checkpoint `seq` loads, byte for byte."""

    def check(seq, *, run="r", seed=None, store=None):
        store = store or checkpoints
        loaded = store.load(store.get(f"{run}/{seq}"))
        expected = state(seq if seed is None else seed)
        return {key: bytes(view) for key, view in loaded.items()} == expected

    return check
