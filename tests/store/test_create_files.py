import errno
import mmap
import os

import pytest

from rearview.store.create_files import ALIGN, CHUNK, DIRECT_FROM, Sink

SIZES = [
    0,
    1,
    ALIGN - 1,
    ALIGN,
    DIRECT_FROM,
    DIRECT_FROM + 1,
    CHUNK - 7,
    CHUNK,
    CHUNK + ALIGN,
    2 * CHUNK + 3,
]


def written(path, pieces):
    size = sum(map(len, pieces))
    with Sink(path, size=size) as sink:
        for piece in pieces:
            sink.write(memoryview(piece))
        sink.finish()
        sink.sync()
        sink.publish()
    return path.read_bytes()


def pattern(size):
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_any_size_holds_the_written_bytes(tmp_path, size):
    data = pattern(size)
    assert written(tmp_path / "file", [data]) == data


@pytest.mark.parametrize("offset", [0, 1, 64, 4095])
def test_memory_of_any_alignment_can_be_written(tmp_path, offset):
    memory = mmap.mmap(-1, 2 * CHUNK + 2 * ALIGN)
    view = memoryview(memory)[offset : offset + CHUNK + 100]
    view[:] = pattern(len(view))
    assert written(tmp_path / "file", [view]) == bytes(view)


def test_pieces_of_odd_sizes_follow_each_other(tmp_path):
    pieces = [pattern(size) for size in (13, CHUNK, 1, ALIGN, 0, 3 * ALIGN + 5, DIRECT_FROM)]
    assert written(tmp_path / "file", pieces) == b"".join(pieces)


def test_padding_fills_with_zeros(tmp_path):
    with Sink(tmp_path / "file", size=DIRECT_FROM) as sink:
        sink.write(memoryview(b"abc"))
        assert sink.pad(64) == 64
        assert sink.pad(64) == 64
        sink.finish()
        sink.publish()
    assert (tmp_path / "file").read_bytes() == b"abc" + bytes(61)


def test_nothing_is_there_before_it_is_published(tmp_path):
    with Sink(tmp_path / "file", size=10) as sink:
        sink.write(memoryview(b"0123456789"))
        sink.finish()
        assert not (tmp_path / "file").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refused", ["open", "unaligned", "every"])
def test_a_file_system_that_refuses_direct_writes_gets_buffered_ones(
    tmp_path, monkeypatch, refused
):
    real_open, real_pwrite, direct = os.open, os.pwrite, set()

    def open_(path, flags, *rest):
        if flags & os.O_DIRECT:
            if refused == "open":
                raise OSError(errno.EINVAL, "no direct writes here")
            fd = real_open(path, flags & ~os.O_DIRECT, *rest)
            direct.add(fd)
            return fd
        return real_open(path, flags, *rest)

    def pwrite(fd, data, at):
        if fd in direct and refused == "every" and len(calls) < 2:
            calls.append(fd)
            raise OSError(errno.EINVAL, "not this way")
        if fd in direct and refused == "unaligned" and not isinstance(data.obj, mmap.mmap):
            calls.append(fd)
            raise OSError(errno.EINVAL, "unaligned")
        return real_pwrite(fd, data, at)

    calls = []
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwrite", pwrite)
    data = pattern(2 * CHUNK + 77)
    assert written(tmp_path / "file", [data]) == data
    assert calls or refused == "open"


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: 3 * ALIGN], at))
    data = pattern(DIRECT_FROM + 5)
    assert written(tmp_path / "file", [data]) == data


def test_pieces_that_the_system_takes_only_in_part_arrive_whole_and_in_order(tmp_path, monkeypatch):
    pieces = [bytes([n % 251]) * (n % 97) for n in range(1500)]
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, some, at: real(fd, some[: len(some) // 2], at))
    path = tmp_path / "file"
    with Sink(path, size=0) as sink:
        sink.write_many(pieces[:700])
        sink.write_many(pieces[700:])
        sink.finish()
        assert sink.position == sum(map(len, pieces))
        sink.publish()
    assert path.read_bytes() == b"".join(pieces)
