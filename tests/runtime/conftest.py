import pytest

from rearview.store.checkpoints import Checkpoints
from rearview.store.project import Project


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(Project.create(tmp_path))
