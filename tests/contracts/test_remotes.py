"""What every remote promises, checked on every implementation and on real servers."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from rearview.errors import RemoteError, UsageError
from rearview.remote.base import Remote, Retry, checksum
from rearview.remote.open import open_remote

KINDS = ["folder", "condor", "function", "file-url", "memory", "s3", "webdav", "xrootd", "sftp"]


def quick(attempts=3):
    return Retry(attempts=attempts, sleep=lambda _: None)


def copy(source, destination):
    Path(destination).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, destination)


def make(kind, tmp_path, server, monkeypatch):
    at = hashlib.md5(str(tmp_path).encode()).hexdigest()[:8]  # the same for the same test
    if kind == "folder":
        return open_remote(tmp_path / "far away", retry=quick())
    if kind == "condor":
        (tmp_path / "ad").write_text('TransferCheckpoint = "far"\nCheckpointExitCode = 85\n')
        monkeypatch.setenv("_CONDOR_SCRATCH_DIR", str(tmp_path))
        monkeypatch.setenv("_CONDOR_JOB_AD", str(tmp_path / "ad"))
        return open_remote("htcondor:far", retry=quick())
    if kind == "function":
        return open_remote(copy, at=tmp_path / "far" / "object", retry=quick())
    if kind == "file-url":
        return open_remote(f"file://{tmp_path}/far", mode="fsspec", retry=quick())
    if kind == "memory":
        return open_remote(f"memory://{at}", retry=quick())
    found = server(kind)
    return open_remote(f"{found.url.rstrip('/')}/{at}", retry=quick(), **found.options)


@pytest.fixture(params=KINDS)
def again(request, tmp_path, server, monkeypatch):
    """Return a function that opens the same remote, each time anew."""
    return lambda: make(request.param, tmp_path, server, monkeypatch)


@pytest.fixture
def remote(again):
    return again()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "here it is.bin"
    path.write_bytes(os.urandom(300_000))
    return path


def test_it_has_the_five_methods(remote):
    assert isinstance(remote, Remote)


def test_get_returns_the_bytes_that_were_put(remote, file, tmp_path):
    put = remote.put(file, "saves/1/model.pt")
    got = remote.get("saves/1/model.pt", tmp_path / "back" / "model.pt")
    assert (tmp_path / "back" / "model.pt").read_bytes() == file.read_bytes()
    assert put.size == got.size == 300_000
    assert put.checksum == got.checksum == checksum(file)


def test_an_empty_file_travels_too(remote, tmp_path):
    (tmp_path / "empty").touch()
    remote.put(tmp_path / "empty", "nothing")
    remote.get("nothing", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b""


def test_a_name_with_spaces_and_accents_is_a_name(remote, file, tmp_path):
    remote.put(file, "my saves/état 1.pt")
    assert remote.list() == ("my saves/état 1.pt",)
    remote.get("my saves/état 1.pt", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == file.read_bytes()


def test_stat_describes_existing_keys_and_returns_none_for_others(remote, file):
    assert remote.stat("a") is None
    remote.put(file, "a")
    assert remote.stat("a").size == 300_000
    assert remote.stat("a/b") is None


def test_list_gives_sorted_keys_under_a_prefix_only(remote, file):
    assert remote.list() == ()
    for key in ["b/2", "a", "b/1", "b2"]:
        remote.put(file, key)
    assert remote.list() == ("a", "b/1", "b/2", "b2")
    assert remote.list("b/") == ("b/1", "b/2")
    assert remote.list("b") == ("b/1", "b/2", "b2")
    assert remote.list("c/d/") == ()


def test_a_second_put_replaces_the_first(remote, file, tmp_path):
    remote.put(file, "a/b")
    file.write_bytes(b"second")
    remote.put(file, "a/b")
    remote.get("a/b", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"second"
    assert remote.list() == ("a/b",)


def test_a_deleted_key_is_gone_and_deleting_it_again_is_no_error(remote, file):
    remote.put(file, "a/b")
    remote.put(file, "a/c")
    remote.delete("a/b")
    remote.delete("a/b")
    assert remote.list() == ("a/c",)
    assert remote.stat("a/b") is None


def test_getting_a_missing_key_raises_and_keeps_the_local_file(remote, tmp_path):
    local = tmp_path / "local"
    local.write_bytes(b"mine")
    with pytest.raises(RemoteError, match="does not exist at") as caught:
        remote.get("absent", local)
    assert caught.value.slug == "remote-missing"
    assert local.read_bytes() == b"mine"


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/./b", "a/.rv-b", "a/"])
def test_a_key_cannot_leave_the_remote(remote, file, key):
    with pytest.raises(UsageError):
        remote.put(file, key)


def test_putting_leaves_nothing_else_behind(remote, file, tmp_path):
    remote.put(file, "a/b")
    remote.get("a/b", tmp_path / "got" / "b")
    assert [p.name for p in (tmp_path / "got").iterdir()] == ["b"]
    if hasattr(remote, "sweep"):
        assert remote.sweep() == ()


def test_two_of_them_see_the_same_objects(remote, again, file):
    other = again()
    assert other.list() == ()
    remote.put(file, "a")
    assert other.list() == ("a",)
    other.delete("a")
    assert remote.stat("a") is None
