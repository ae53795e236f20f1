"""The oracle of this room: a program resumed in the middle ends as if it had never stopped."""

import pickle

import pytest

from rearview.state.capture import capture
from rearview.state.compare import compare
from rearview.state.object_numbers import Anchors
from rearview.state.restore import restore


def rooted(names):
    return {f"local:main:{name}": value for name, value in names.items()}


def is_project(module):
    """Our own test files play the user's project; everything else is a library."""
    name = module if isinstance(module, str) else module.__name__
    return name.startswith(("test_", "tests.", "state.")) or ".test_" in name


class Program:
    """A set-up that makes names, and a step that changes them and returns what it logs."""

    def __init__(self, setup, step):
        self.step = step
        self.names = setup()
        self.anchors = Anchors.walk(rooted(self.names), project=is_project)

    def run(self, start, stop):
        return [self.step(self.names, i) for i in range(start, stop)]

    def capture(self, **options):
        captured = capture(self.anchors, rooted(self.names), **options)
        return captured, {key: bytes(data) for key, data in captured.buffers.items()}

    def restore(self, skeleton, buffers):
        values = restore(self.anchors, rooted(self.names), skeleton, buffers.__getitem__)
        self.names = {name.rpartition(":")[2]: value for name, value in values.items()}


@pytest.fixture(autouse=True)
def one_thread():
    """Keep tiny matrices on one thread: starting more costs more than the work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def program():
    """Make a Program from its set-up and step."""
    return Program


@pytest.fixture
def resumes():
    """Check that a program resumes exactly, and return both ends of it.

    The truth is the uninterrupted program; what it logs after the boundary must come out of the
    resumed one too, and not out of one that was merely set up again.
    """

    def check(setup, step, *, at=2, stop=5, stale_differs=True, missing=()):
        truth = Program(setup, step)
        before = truth.run(0, at)
        captured, buffers = truth.capture()
        assert [m for m in captured.missing if not any(w in str(m) for w in missing)] == []
        logged = pickle.dumps(truth.run(at, stop))
        end, end_buffers = truth.capture()

        resumed = Program(setup, step)
        resumed.anchors.check(truth.anchors.signature)
        resumed.restore(captured.skeleton, buffers)
        assert pickle.dumps(resumed.run(at, stop)) == logged
        now, _ = resumed.capture()
        difference = compare(resumed.anchors, now, end.skeleton, end_buffers.__getitem__)
        assert difference is None, str(difference)

        if stale_differs:
            stale = Program(setup, step)
            assert pickle.dumps(stale.run(at, stop)) != logged, "this program has no state to lose"
        assert len(before) == at
        return truth, resumed

    return check
