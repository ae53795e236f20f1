"""What the Checkpointer's tests share: a value that is a number in a file, and fresh instances."""

import shutil

import pytest

from rearview import Checkpointer
from rearview.remote.base import Retry

ONCE = Retry(attempts=1)


def write(path, value):
    path.write_text(str(value))


def read(path):
    return int(path.read_text())


@pytest.fixture
def make(tmp_path):
    made = []

    def make(name="here/a b.pt", **options):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"checkpoint_every": 1, "retry": ONCE, **options}
        made.append(Checkpointer(path, write, read, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def other_node(tmp_path):
    shutil.rmtree(tmp_path / "here", ignore_errors=True)
