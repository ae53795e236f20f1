import pytest

from rearview.store.checkpoints import Checkpoints
from rearview.store.project import Project
from servers.fixtures import pytest_sessionfinish, pytest_terminal_summary, server

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary", "server"]


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(Project.create(tmp_path))
