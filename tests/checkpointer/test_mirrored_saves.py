"""Saves that are brought away: to places of every kind, which may fail."""

import shutil
from pathlib import Path

import pytest

from checkpointers import ONCE, make, other_node, read, write
from rearview.checkpointer.mirrored_saves import CheckpointerWarning
from rearview.errors import RemoteError, UsageError
from rearview.remote.folder import FolderRemote
from rearview.remote.open import open_remote

__all__ = ["make"]


@pytest.fixture(params=["shared", "path", "manual", "remote", "memory", "s3", "webdav", "xrootd"])
def away(request, tmp_path, server):
    """Options for one place away, of every kind."""
    kind = request.param
    (tmp_path / "far").mkdir()
    if kind == "shared":
        return {
            "checkpoint_transfer_mode": "shared",
            "checkpoint_transfer_target": tmp_path / "far" / "of mine.pt",
        }
    if kind == "path":
        return {"checkpoint_transfer_target": str(tmp_path / "far") + "/"}
    if kind == "remote":
        return {"checkpoint_transfer_target": FolderRemote(tmp_path / "far", retry=ONCE)}
    if kind == "memory":
        return {"checkpoint_transfer_target": f"memory://{tmp_path.name}/x"}
    if kind == "manual":
        return {
            "checkpoint_transfer_mode": "manual",
            "checkpoint_transfer_target": tmp_path / "far" / "of mine.pt",
            "checkpoint_transfer_callback": shutil.copy,
            "checkpoint_transfer_callback_kwargs": {},
        }
    found = server(kind)
    if kind == "xrootd":
        host, _, path = found.url.removeprefix("root://").partition("/")
        return {
            "checkpoint_transfer_mode": "xrootd",
            "xrootd_server_name": f"root://{host}/",
            "checkpoint_transfer_target": f"{path}/{tmp_path.name}/ck.pt",
        }
    return {
        "checkpoint_transfer_target": f"{found.url.rstrip('/')}/{tmp_path.name}/ck.pt",
        "remote_options": found.options,
    }


def test_a_save_comes_back_on_another_node(make, tmp_path, away):
    one = make(**away)
    for value in range(4):
        one.step(value)
    other_node(tmp_path)
    two = make(**away)
    assert two.checkpoint_exists
    assert two.restore(0) == 3
    two.step(4)
    other_node(tmp_path)
    assert make(**away).restore(0) == 4


def test_a_stale_local_save_does_not_win_over_a_newer_save_at_the_remote(make, tmp_path, away):
    one = make(**away)
    one.step(1)
    shutil.copytree(tmp_path / "here", tmp_path / "kept", symlinks=True)
    one.step(2)
    one.step(3)
    other_node(tmp_path)
    shutil.move(tmp_path / "kept", tmp_path / "here")
    for path in (tmp_path / "here").rglob("*"):
        path.touch()  # later file dates must not matter
    assert make(**away).restore(0) == 3


def test_a_newer_local_save_wins_over_the_save_at_the_remote(make, tmp_path, away):
    make(**away).step(1)
    local = make()
    local.step(2)
    assert make(**away).restore(0) == 2


def test_local_files_are_removed_only_if_the_remote_has_the_newest_save(make, tmp_path, away):
    one = make(**away)
    one.step(1)
    one._archive.write(lambda path: write(path, 2), counter=9, step=9, metric=None)
    one.clean_up_local_checkpoint_files()
    assert (tmp_path / "here/a b.pt").exists()
    one.transfer_checkpoint_files()
    one.clean_up_local_checkpoint_files()
    assert list((tmp_path / "here").iterdir()) == []
    assert make(**away).restore(0) == 2


def test_without_a_place_away_local_files_stay(make, tmp_path):
    one = make()
    one.step(1)
    one.clean_up_local_checkpoint_files()
    assert (tmp_path / "here/a b.pt").exists()


def test_a_damaged_save_at_the_remote_is_reported_and_the_save_before_it_is_restored(
    make, tmp_path
):
    options = {"checkpoint_transfer_target": tmp_path / "far" / "x"}
    one = make(**options)
    one.step(1)
    one.step(2)
    newest = one._archive.folder.saves()[0]
    (tmp_path / "far/x.saves" / newest.id / "a b.pt").write_text("9")
    other_node(tmp_path)
    with pytest.warns(CheckpointerWarning, match="is damaged"):
        assert make(**options).restore(0) == 1


def test_a_damaged_local_save_is_fetched_again_from_the_remote(make, tmp_path):
    options = {"checkpoint_transfer_target": tmp_path / "far" / "x"}
    one = make(**options)
    one.step(1)
    newest = one._archive.folder.saves()[0]
    (one._archive.folder.folder / newest.id / "a b.pt").write_text("9")
    assert make(**options).restore(0) == 1


def test_a_job_that_never_restores_still_saves_the_newest(make, tmp_path):
    options = {"checkpoint_transfer_target": tmp_path / "far" / "x"}
    one = make(**options)
    for value in range(5):
        one.step(value)
    other_node(tmp_path)
    make(**options).step(100)
    other_node(tmp_path)
    assert make(**options).restore(0) == 100


def test_the_published_file_at_a_shared_target_is_taken_over(make, tmp_path):
    (tmp_path / "far.pt").write_text("41")
    options = {
        "checkpoint_transfer_mode": "shared",
        "checkpoint_transfer_target": tmp_path / "far.pt",
    }
    assert make(**options).checkpoint_exists
    assert make(**options).restore(0) == 41


# when the place away fails


class Away(FolderRemote):
    broken = False

    def _size(self, key):
        if self.broken:
            raise ConnectionError("unplugged")
        return super()._size(key)

    def _keys(self, prefix):
        if self.broken:
            raise ConnectionError("unplugged")
        return super()._keys(prefix)


def test_a_target_that_never_worked_is_an_error_at_the_first_step(make, tmp_path):
    remote = Away(tmp_path / "far", retry=ONCE)
    remote.broken = True
    with pytest.raises(RemoteError, match="unplugged"):
        make(checkpoint_transfer_target=remote).step(1)


def test_a_target_that_fails_later_is_a_warning_and_the_next_save_goes_there(make, tmp_path):
    remote = Away(tmp_path / "far", retry=ONCE)
    one = make(checkpoint_transfer_target=remote)
    one.step(1)
    remote.broken = True
    with pytest.warns(CheckpointerWarning, match="not at the target.*unplugged"):
        one.step(2)
    assert read(tmp_path / "here/a b.pt") == 2
    with pytest.raises(RemoteError):
        one.transfer_checkpoint()
    remote.broken = False
    one.step(3)
    other_node(tmp_path)
    assert make(checkpoint_transfer_target=remote).restore(0) == 3


def test_an_unreachable_target_does_not_count_as_empty(make, tmp_path):
    remote = Away(tmp_path / "far", retry=ONCE)
    make(checkpoint_transfer_target=remote).step(1)
    remote.broken = True
    with pytest.raises(RemoteError):
        make(checkpoint_transfer_target=remote).restore(0)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_transfer_mode": "carrier pigeon"},
        {"checkpoint_transfer_mode": "shared"},
        {"checkpoint_transfer_mode": "xrootd", "checkpoint_transfer_target": "/pnfs/x"},
        {"checkpoint_transfer_mode": "manual"},
        {"checkpoint_transfer_mode": "htcondor"},
        {"asynchronous": "maybe"},
        {"keep_last": 0},
    ],
)
def test_parameters_that_cannot_work_are_refused_at_once(make, options, monkeypatch):
    monkeypatch.delenv("_CONDOR_JOB_AD", raising=False)
    with pytest.raises(UsageError):
        make(**options)


def test_leftovers_of_killed_transfers_at_the_remote_are_removed(make, tmp_path):
    remote = open_remote(tmp_path / "far", retry=ONCE)
    one = make(checkpoint_transfer_target=remote)
    half = Path(tmp_path / "far/a b.pt.saves/00000000-abcdef")
    half.mkdir(parents=True)
    (half / "a b.pt").write_text("half")
    (half / ".rv-123-x").write_text("less")
    one.step(1)
    assert not half.exists()
