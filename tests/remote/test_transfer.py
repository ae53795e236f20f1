"""Transfers that break in the middle, at every place, in every way."""

import os

import pytest

from rearview.errors import RemoteError
from rearview.remote.base import Retry, checksum
from rearview.remote.folder import FolderRemote

STEPS = ["_send", "_read", "_publish", "_size", "_checksum"]


class Faulty(FolderRemote):
    """A folder whose operations fail on the calls given, before or after doing their work."""

    def __init__(self, root, fails, *, attempts=1, after=False):
        super().__init__(root, retry=Retry(attempts=attempts, sleep=lambda _: None))
        self.fails, self.after, self.count = set(fails), after, 0


def _wrap(name):
    def method(self, *args):
        self.count += 1
        number = self.count
        if number in self.fails and not self.after:
            raise ConnectionError(f"{name} broke at call {number}")
        result = getattr(FolderRemote, name)(self, *args)
        if number in self.fails:
            raise ConnectionError(f"{name} broke after call {number}")
        return result

    return method


for _name in STEPS:
    setattr(Faulty, _name, _wrap(_name))


@pytest.fixture
def files(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(os.urandom(70_000))
    new.write_bytes(os.urandom(90_000))
    return old, new


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", range(1, 9))
def test_a_put_that_fails_at_any_step_leaves_the_old_or_the_new_object_whole(
    tmp_path, files, step, after
):
    old, new = files
    FolderRemote(tmp_path / "far").put(old, "a/b")
    faulty = Faulty(tmp_path / "far", {step}, after=after)
    try:
        faulty.put(new, "a/b")
        failed = False
    except RemoteError:
        failed = True
    held = (tmp_path / "far/a/b").read_bytes()
    assert held in ({old.read_bytes(), new.read_bytes()} if failed else {new.read_bytes()})
    assert [p.name for p in (tmp_path / "far/a").iterdir()] == ["b"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", range(1, 9))
def test_a_second_attempt_mends_a_fault_at_any_step(tmp_path, files, step, after):
    old, new = files
    FolderRemote(tmp_path / "far").put(old, "a")
    Faulty(tmp_path / "far", {step}, attempts=2, after=after).put(new, "a")
    assert (tmp_path / "far/a").read_bytes() == new.read_bytes()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", range(1, 5))
def test_a_get_that_fails_at_any_step_leaves_the_local_file_or_brings_all(
    tmp_path, files, step, after
):
    old, new = files
    FolderRemote(tmp_path / "far").put(new, "a")
    local = tmp_path / "here" / "a"
    local.parent.mkdir()
    local.write_bytes(old.read_bytes())
    try:
        Faulty(tmp_path / "far", {step}, after=after).get("a", local)
    except RemoteError:
        assert local.read_bytes() == old.read_bytes()
    else:
        assert local.read_bytes() == new.read_bytes()
    assert [p.name for p in local.parent.iterdir()] == ["a"]


class Flipping(FolderRemote):
    """A folder that stores one wrong byte, for the first `times` sends."""

    def __init__(self, root, times, **options):
        super().__init__(root, **options)
        self.times = times

    def _send(self, local, staged):
        super()._send(local, staged)
        if self.times:
            self.times -= 1
            path = self.root / staged
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


def test_one_wrong_byte_at_the_far_end_is_noticed_and_sent_again(tmp_path, files):
    remote = Flipping(tmp_path / "far", 1, retry=Retry(attempts=2, sleep=lambda _: None))
    remote.put(files[1], "a")
    assert (tmp_path / "far/a").read_bytes() == files[1].read_bytes()


def test_a_far_end_that_always_damages_never_loses_the_old_copy(tmp_path, files):
    old, new = files
    remote = Flipping(tmp_path / "far", 0, retry=Retry(attempts=3, sleep=lambda _: None))
    remote.put(old, "a")
    remote.times = 99
    with pytest.raises(RemoteError, match=f"{checksum(new)} .* was sent"):
        remote.put(new, "a")
    assert remote.list() == ("a",)
    assert (tmp_path / "far/a").read_bytes() == old.read_bytes()


class Stopping(FolderRemote):
    """A folder whose sends break off after half of what is left, and which counts the bytes."""

    def __init__(self, root, breaks, **options):
        super().__init__(root, **options)
        self.breaks, self.read_from = breaks, []

    def _send(self, local, staged):
        target = self.root / staged
        have = target.stat().st_size if target.exists() else 0
        self.read_from.append(have)
        if self.breaks:
            self.breaks -= 1
            target.parent.mkdir(parents=True, exist_ok=True)
            data = local.read_bytes()
            upto = have + (len(data) - have) // 2
            with target.open("ab") as file:
                file.write(data[have:upto])
            raise ConnectionResetError("broken off")
        super()._send(local, staged)


def test_a_put_continues_an_interrupted_put(tmp_path, files):
    remote = Stopping(tmp_path / "far", 2, retry=Retry(attempts=3, sleep=lambda _: None))
    remote.put(files[1], "a")
    assert remote.read_from == [0, 45_000, 67_500]
    assert (tmp_path / "far/a").read_bytes() == files[1].read_bytes()


def test_a_get_continues_an_interrupted_get(tmp_path, files):
    offsets = []

    class Breaking(FolderRemote):
        def _read(self, key, offset):
            offsets.append(offset)
            data = (self.root / key).read_bytes()[offset:]
            if len(offsets) < 3:
                yield data[: len(data) // 2]
                raise ConnectionResetError("broken off")
            yield data

    FolderRemote(tmp_path / "far").put(files[1], "a")
    remote = Breaking(tmp_path / "far", retry=Retry(attempts=3, sleep=lambda _: None))
    remote.get("a", tmp_path / "back")
    assert offsets == [0, 45_000, 67_500]
    assert (tmp_path / "back").read_bytes() == files[1].read_bytes()


def test_a_file_that_changes_while_it_is_sent_is_not_published(tmp_path, files):
    class Meanwhile(FolderRemote):
        def _send(self, local, staged):
            local.write_bytes(os.urandom(90_000))
            super()._send(local, staged)

    remote = Meanwhile(tmp_path / "far", retry=Retry(attempts=2, sleep=lambda _: None))
    with pytest.raises(RemoteError, match="change"):
        remote.put(files[1], "a")
    assert remote.list() == ()


def test_leftovers_of_a_killed_transfer_are_removed_and_never_listed(tmp_path, files):
    remote = FolderRemote(tmp_path / "far")
    remote.put(files[0], "a/b")
    (tmp_path / "far/a/.rv-1234-b").write_bytes(b"half")
    assert remote.list() == ("a/b",)
    assert remote.sweep("a/") == ("a/.rv-1234-b",)
    assert [p.name for p in (tmp_path / "far/a").iterdir()] == ["b"]
