import shutil
import subprocess

import pytest

from rearview.errors import RemoteError
from rearview.remote.base import Retry
from rearview.remote.user_copy_function import FunctionRemote


@pytest.fixture
def far(tmp_path):
    folder = tmp_path / "far"
    folder.mkdir()
    return folder


def quick():
    return Retry(attempts=2, sleep=lambda _: None)


def test_the_function_gets_source_destination_and_its_keywords(far, tmp_path):
    calls = []

    def copy(source, destination, *, server):
        calls.append((source, destination, server))
        shutil.copyfile(source, destination)

    file = tmp_path / "f"
    file.write_bytes(b"x")
    FunctionRemote(copy, far / "ck.pt", kwargs={"server": "s"}, retry=quick()).put(file, "a")
    assert (file, far / "ck.pt.0", "s") in calls
    assert {server for *_, server in calls} == {"s"}


def test_places_are_used_again_so_that_space_is_bounded(far, tmp_path):
    remote = FunctionRemote(shutil.copyfile, far / "ck", retry=quick())
    file = tmp_path / "f"
    for number in range(12):
        file.write_text(str(number))
        remote.put(file, f"saves/{number}")
        for key in remote.list()[:-2] if number > 1 else ():
            remote.delete(key)
    assert len(list(far.iterdir())) <= 3 + 2


def test_a_half_written_index_leaves_the_index_before_it(far, tmp_path):
    remote = FunctionRemote(shutil.copyfile, far / "ck", retry=quick())
    file = tmp_path / "f"
    for name in "abc":
        file.write_text(name)
        remote.put(file, name)
    newest = far / "ck.index.1"
    newest.write_bytes(newest.read_bytes()[:-10])
    assert remote.list() == ("a", "b")


def command(source, destination):
    """Fails alike for a file that is not there and for a place out of reach."""
    subprocess.run(["cp", source, destination], check=True, capture_output=True)


def test_a_copy_function_that_fails_for_missing_files_means_an_empty_remote(far, tmp_path):
    remote = FunctionRemote(command, far / "ck", retry=quick())
    assert remote.list() == ()
    file = tmp_path / "f"
    file.write_text("x")
    remote.put(file, "a")
    assert remote.list() == ("a",)


def test_a_place_out_of_reach_is_an_error_not_an_empty_remote(tmp_path):
    remote = FunctionRemote(command, tmp_path / "nowhere" / "ck", retry=quick())
    with pytest.raises(RemoteError, match="cannot be read"):
        remote.list()


def test_the_error_about_a_function_that_only_sends_says_to_copy_both_ways(far, tmp_path):
    def send(source, destination):
        if str(destination).startswith(str(far)):
            shutil.copyfile(source, destination)

    file = tmp_path / "f"
    file.write_text("x")
    with pytest.raises(RemoteError, match="both directions"):
        FunctionRemote(send, far / "ck", retry=quick()).put(file, "a")


def test_a_copy_function_that_ignores_its_destination_is_detected(far, tmp_path):
    def one_place(source, destination):
        inward = str(source).startswith(str(far))
        shutil.copyfile(far / "same" if inward else source, destination if inward else far / "same")

    remote = FunctionRemote(one_place, far / "ck", retry=quick())
    for name, keys in [("a", ("a",))]:
        file = tmp_path / name
        file.write_text(name)
        remote.put(file, name)
        with pytest.raises(RemoteError, match="did not arrive as it was sent"):
            remote.get(keys[0], tmp_path / "back")
