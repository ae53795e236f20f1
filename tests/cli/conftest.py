import sys

import pytest

import rearview._history
from fakehistory import FakeHistory
from rearview.cli import main


@pytest.fixture
def past(monkeypatch):
    """The history that commands find here."""
    found = FakeHistory()
    monkeypatch.setattr(rearview._history, "history", lambda start=None: found)
    return found


@pytest.fixture
def command(capsys, monkeypatch):
    """Run `rearview` with some words; returns its exit code, stdout and stderr."""
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words):
        with pytest.raises(SystemExit) as ended:
            main.main(words)
        sys.stdout.flush()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run
