"""A backfill says how it is and hears how many workers to use, through files in the store."""

import pytest

from rearview._history import History
from rearview.errors import UsageError
from rearview.execute import backfill_status
from rearview.execute.backfill_status import (
    StatusFile,
    folder_of,
    request_workers,
    running_backfills,
)
from rearview.store.project import Project


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(backfill_status, "READ_EVERY", 0.0)
    return Project.create(tmp_path)


def say(file, **changes):
    facts = {"workers": 2, "busy": 2, "segments": 9, "ended": 4, "seconds_left": 75.0, **changes}
    file.update(**facts)


def test_a_status_file_exists_while_the_backfill_runs_and_is_removed(project):
    with StatusFile(project, ["g"]).open() as file:
        say(file)
        (seen,) = running_backfills(project)
        assert (seen.names, seen.workers, seen.ended) == (("g",), 2, 4)
        request_workers(project, seen.id, 5)
    assert list(folder_of(project).iterdir()) == []


def test_a_backfill_reads_the_requested_number_of_workers(project):
    with StatusFile(project, ["g"]).open() as file:
        assert file.requested_workers() is None
        say(file)
        History(project).set_workers(5)
        assert file.requested_workers() == 5
        History(project).set_workers(1)
        assert file.requested_workers() == 1


def test_a_malformed_request_for_workers_is_ignored(project):
    with StatusFile(project, ["g"]).open() as file:
        say(file)
        (seen,) = running_backfills(project)
        (folder_of(project) / f"{seen.id}.workers").write_text("many")
        assert file.requested_workers() is None


def test_no_backfill_and_several_backfills_give_different_errors(project):
    past = History(project)
    with pytest.raises(UsageError, match="No backfill is under way") as caught:
        past.set_workers(2)
    assert caught.value.slug == "which-backfill"
    with StatusFile(project, ["g"]).open() as one, StatusFile(project, ["h"]).open() as two:
        say(one)
        say(two)
        with pytest.raises(UsageError, match="2 backfills are under way"):
            past.set_workers(2)
        assert past.set_workers(2, of=running_backfills(project)[1].id).names == ("h",)


def test_the_status_file_of_a_dead_backfill_is_removed(project):
    file = StatusFile(project, ["g"])
    say(file)
    (path,) = folder_of(project).iterdir()
    path.write_text(path.read_text().replace('"born":', '"born":1'))
    assert running_backfills(project) == []
    assert not path.exists()


def test_a_store_that_cannot_be_written_does_not_stop_a_backfill(project, monkeypatch):
    def full(*_args, **_named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backfill_status, "publish", full)
    with StatusFile(project, ["g"]).open() as file:
        say(file)
    assert running_backfills(project) == []
