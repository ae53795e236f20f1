import sys

import pytest

from rearview.config import Settings
from rearview.runtime.base_session import Session
from rearview.runtime.loops import LoopHistory
from rearview.source.instrument import LoopSite
from rearview.store.project import Project


class Watching(Session):
    """Takes note of where it was asked, and how often loops were entered in one iteration."""

    def __post_init__(self):
        super().__post_init__()
        self.asked = []
        self.entered = []

    def boundary(self, entry, index, frame):
        if len(self.stack) == 1:
            self.asked.append(index)
        return index

    def push(self, entry):
        if self.stack:
            self.entered.append((self.stack[0].now, entry.ordinal))
        super().push(entry)

    def on_exhausted(self, entry, index, frame):
        return True


def history(name):
    return LoopHistory(
        LoopSite(name, name, "", 0, may_log=True, loose=False, breaks=frozenset(), inner=False)
    )


@pytest.fixture
def session(tmp_path):
    return Watching(Project.create(tmp_path), "run", Settings())


@pytest.mark.parametrize("stride", [0.0, 60.0], ids=["each", "together"])
def test_inner_loops_are_counted_separately_in_every_iteration(session, stride):
    session.stride = stride
    frame = sys._getframe()
    for _ in session.enter(history("outer"), range(20), frame):
        for _ in range(2):
            list(session.enter(history("inner"), range(3), frame))
    assert session.entered == [(index, ordinal) for index in range(20) for ordinal in (0, 1)]


def test_short_iterations_are_looked_at_together(session):
    session.stride = 60.0
    assert list(session.enter(history("outer"), range(20), sys._getframe())) == list(range(20))
    assert session.asked == [0, 1, 3, 7, 15, 20]
