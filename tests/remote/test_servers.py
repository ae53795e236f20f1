"""Transfers to real servers that stop, come back, or hold half of what was sent."""

import gc
import os
import time
import warnings

import pytest

from limits import HUNG
from rearview.errors import RemoteError
from rearview.remote.base import HIDDEN, Retry, checksum
from rearview.remote.open import open_remote
from servers.daemons import SERVERS, UnavailableError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(os.urandom(12 << 20))
    return path


def staged(file, name):
    return f"{HIDDEN}{checksum(file)[-16:]}-{name}"


def test_a_large_object_goes_to_s3_in_pieces_and_an_interrupted_put_continues(
    server, file, tmp_path
):
    found = server("s3")
    # 5 MiB is the least an S3 server takes as a part
    remote = open_remote(f"{found.url}/pieces", piece=5 << 20, retry=Retry(1), **found.options)
    sent = []
    fs = remote._fs
    real = fs.pipe_file

    def breaking(path, data, **options):
        sent.append(path)
        if len(sent) == 3:
            raise ConnectionResetError("broken off")
        return real(path, data, **options)

    fs.pipe_file = breaking
    remote._remove, kept = (lambda key: None), remote._remove  # as if the process were killed
    try:
        with pytest.raises(RemoteError, match="broken off"):
            remote.put(file, "model.pt")
        remote._remove = kept
        remote.put(file, "model.pt")
    finally:
        fs.pipe_file = real
    assert [path.rpartition(".")[2] for path in sent] == ["00000", "00001", "00002", "00002"]
    remote.get("model.pt", tmp_path / "back")
    assert checksum(tmp_path / "back") == checksum(file)
    assert remote.list() == ("model.pt",)
    assert remote.sweep() == ()


def test_xrootd_continues_a_partial_file(server, file):
    found = server("xrootd")
    remote = open_remote(f"{found.url}/half", retry=Retry(1))
    half = file.with_name("half")
    half.write_bytes(file.read_bytes()[: 5 << 20])
    remote._copy(f"file://{half}", remote._url(staged(file, "model.pt")), resume=False)
    resumes = []
    real = remote._copy

    def watched(source, target, *, resume: bool, seen=resumes):
        seen.append(resume)
        real(source, target, resume=resume)

    remote._copy = watched
    assert remote.put(file, "model.pt").checksum == checksum(file)
    assert resumes == [True]


def test_sftp_continues_a_partial_file(server, file, tmp_path):
    found = server("sftp")
    remote = open_remote(f"{found.url}/half", retry=Retry(1), **found.options)
    (found.folder / "half").mkdir()
    half = found.folder / "half" / staged(file, "model.pt")
    half.write_bytes(file.read_bytes()[: 5 << 20])
    remote._fs.put_file = lambda *_: pytest.fail("it began again")
    assert remote.put(file, "model.pt").checksum == checksum(file)
    remote.get("model.pt", tmp_path / "back")
    assert checksum(tmp_path / "back") == checksum(file)


def test_xrootd_begins_again_when_the_half_that_is_there_is_wrong(server, file, tmp_path):
    found = server("xrootd")
    remote = open_remote(f"{found.url}/wrong", retry=Retry(2, sleep=lambda _: None))
    half = file.with_name("half")
    half.write_bytes(bytes(5 << 20))
    remote._copy(f"file://{half}", remote._url(staged(file, "model.pt")), resume=False)
    remote.put(file, "model.pt")
    remote.get("model.pt", tmp_path / "back")
    assert checksum(tmp_path / "back") == checksum(file)


def test_xrootd_states_its_own_checksum(server, file):
    found = server("xrootd")
    remote = open_remote(f"{found.url}/sum", retry=Retry(1))
    remote.put(file, "model.pt")
    assert remote.stat("model.pt").checksum == checksum(file, "adler32")


def test_s3_states_its_own_checksum(server, file):
    found = server("s3")
    remote = open_remote(f"{found.url}/sum", retry=Retry(1), **found.options)
    remote.put(file, "model.pt")
    assert remote.stat("model.pt").checksum == checksum(file, "md5")


def test_a_remote_that_is_no_longer_used_has_no_open_connection(server, file):
    found = server("webdav")
    gc.collect()
    remote = open_remote(f"{found.url}/unused", retry=Retry(1), **found.options)
    remote.put(file, "model.pt")
    del remote
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        gc.collect()
    assert not [each for each in warned if issubclass(each.category, ResourceWarning)]


@pytest.mark.parametrize("kind", ["webdav"])
def test_a_server_that_went_away_is_an_error_and_that_came_back_is_none(kind, file, tmp_path):
    try:
        with SERVERS[kind]() as found:
            away = open_remote(found.url + "x", retry=Retry(1), **found.options)
            away.put(file, "kept")
            found.process.terminate()
            found.process.wait()
            with pytest.raises(RemoteError, match="reached"):
                away.list()
            with pytest.raises(RemoteError, match="reached"):
                away.put(file, "model.pt")
    except UnavailableError as exc:
        pytest.skip(f"NOT TESTED on a real {kind} server: {exc}")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
def test_a_forked_process_can_use_a_remote_that_its_parent_opened(server, file):
    found = server("s3")
    remote = open_remote(f"{found.url}/forked", retry=Retry(1), **found.options)
    remote.put(file, "parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            remote.put(file, "child")
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + HUNG
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert done[0] == child
    assert os.waitstatus_to_exitcode(done[1]) == 0
    assert remote.list() == ("child", "parent")
