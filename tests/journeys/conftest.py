"""What the journeys share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import oracle


@pytest.fixture(scope="session")
def zygote(tmp_path_factory):
    process = oracle.Zygote(tmp_path_factory.mktemp("zygote"))
    yield process
    process.end()
