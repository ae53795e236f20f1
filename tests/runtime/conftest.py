import pytest

from rearview.config import Settings
from rearview.runtime.saving.dirty_pages import Pages
from rearview.runtime.saving.writer import Writer
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project
from servers.fixtures import pytest_sessionfinish, pytest_terminal_summary, server

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary", "server"]


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(Project.create(tmp_path))


@pytest.fixture
def warned():
    return []


@pytest.fixture
def make(checkpoints, warned):
    made = []

    def build(store=None, **settings):
        writer = Writer(store or checkpoints, Settings(**settings), warn=warned.append)
        made.append(writer)
        return writer

    yield build
    for writer in made:
        assert writer.close(30)


@pytest.fixture
def writer(make):
    return make()


@pytest.fixture
def pages():
    made = Pages()
    yield made
    made.close()
