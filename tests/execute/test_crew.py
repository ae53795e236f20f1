"""A backfill says how it is and hears how many workers to use, through files in the store."""

import pytest

from rearview._history import History
from rearview.errors import UsageError
from rearview.execute import status
from rearview.execute.status import Post, ask_for, folder_of, under_way
from rearview.store.project import Project


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "EVERY", 0.0)
    return Project.create(tmp_path)


def say(post, **changes):
    facts = {"workers": 2, "busy": 2, "segments": 9, "ended": 4, "left": 75.0, **changes}
    post.say(**facts)


def test_it_is_seen_while_it_lasts_and_leaves_nothing(project):
    with Post(project, ["g"]).open() as post:
        say(post)
        (seen,) = under_way(project)
        assert (seen.names, seen.workers, seen.ended) == (("g",), 2, 4)
        ask_for(project, seen.id, 5)
    assert list(folder_of(project).iterdir()) == []


def test_it_hears_how_many_workers_are_asked_for(project):
    with Post(project, ["g"]).open() as post:
        assert post.asked() is None
        say(post)
        History(project).employ(5)
        assert post.asked() == 5
        History(project).employ(1)
        assert post.asked() == 1


def test_what_was_asked_for_wrongly_is_not_heard(project):
    with Post(project, ["g"]).open() as post:
        say(post)
        (seen,) = under_way(project)
        (folder_of(project) / f"{seen.id}.workers").write_text("many")
        assert post.asked() is None


def test_none_and_several_are_told_apart(project):
    past = History(project)
    with pytest.raises(UsageError, match="No backfill is under way") as caught:
        past.employ(2)
    assert caught.value.slug == "which-backfill"
    with Post(project, ["g"]).open() as one, Post(project, ["h"]).open() as two:
        say(one)
        say(two)
        with pytest.raises(UsageError, match="2 backfills are under way"):
            past.employ(2)
        assert past.employ(2, of=under_way(project)[1].id).names == ("h",)


def test_what_a_dead_one_left_is_not_shown_and_goes_away(project):
    post = Post(project, ["g"])
    say(post)
    (file,) = folder_of(project).iterdir()
    text = file.read_text().replace('"born":', '"born":1')
    file.write_text(text)
    assert under_way(project) == []
    assert not file.exists()


def test_a_store_that_cannot_be_written_does_not_stop_it(project, monkeypatch):
    def full(*_args, **_named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(status, "publish", full)
    with Post(project, ["g"]).open() as post:
        say(post)
    assert under_way(project) == []
