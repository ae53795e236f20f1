import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from rearview.runtime.saving.dirty_pages import PAGE, TRACK_FROM, Pages, address_of


@pytest.fixture
def buffer():
    return np.arange(200_000, dtype="f8")


@pytest.fixture
def watched(pages, buffer):
    if not pages.available:
        pytest.skip("this kernel does not offer tracking of writes (Linux 6.7, userfaultfd)")
    view = memoryview(buffer).cast("B")
    watch = pages.watch(view)
    assert watch is not None
    return watch, view


def test_untouched_memory_is_known_to_be_unchanged(pages, watched, buffer):
    watch, view = watched
    assert pages.unwritten(watch, view)
    assert buffer.sum() > 0  # reading is not writing
    assert pages.unwritten(watch, view)


@pytest.mark.parametrize("at", [0, 1, 511, 512, 513, 100_000, 199_999])
def test_a_write_anywhere_is_seen(pages, watched, buffer, at):
    watch, view = watched
    buffer[at] += 1
    assert not pages.unwritten(watch, view)
    again = pages.watch(view)
    assert pages.unwritten(again, view)


def test_writes_by_c_code_and_by_the_kernel_are_seen(pages, watched, buffer):
    watch, view = watched
    ctypes.memset(buffer.ctypes.data + 80_000, 1, 1)
    assert not pages.unwritten(watch, view)
    watch = pages.watch(view)
    with Path("/dev/zero").open("rb", buffering=0) as source:
        source.readinto(view[90_000:90_001])
    assert not pages.unwritten(watch, view)


def test_memory_at_another_address_or_of_another_size_is_not_the_watched_memory(
    pages, watched, buffer
):
    watch, view = watched
    assert not pages.unwritten(watch, view[:-1])
    assert not pages.unwritten(watch, memoryview(buffer.copy()).cast("B"))


def test_memory_that_is_mapped_again_at_the_same_address_is_not_trusted(pages):
    if not pages.available:
        pytest.skip("this kernel does not offer tracking of writes (Linux 6.7, userfaultfd)")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
    size, private = 64 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    place = libc.mmap(None, size, 3, private, 2**64 - 1, 0)
    view = memoryview((ctypes.c_char * size).from_address(place)).cast("B")
    view[:] = b"a" * size
    watch = pages.watch(view)
    assert pages.unwritten(watch, view)
    assert libc.mmap(place, size, 3, private | 0x10, 2**64 - 1, 0) == place
    assert not pages.unwritten(watch, view)
    libc.munmap(ctypes.c_void_p(place), size)


def test_dropped_pages_are_seen(pages):
    if not pages.available:
        pytest.skip("this kernel does not offer tracking of writes (Linux 6.7, userfaultfd)")
    memory = mmap.mmap(-1, 64 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = memoryview(memory)
    view[:] = b"a" * len(view)
    watch = pages.watch(view)
    memory.madvise(mmap.MADV_DONTNEED)
    assert not pages.unwritten(watch, view)
    view.release()


def test_shared_file_backed_and_small_memory_is_not_watched(pages, tmp_path):
    assert pages.watch(memoryview(mmap.mmap(-1, 64 * PAGE))) is None
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * PAGE))
    with path.open("r+b") as file:
        for access in (mmap.ACCESS_COPY, mmap.ACCESS_WRITE, mmap.ACCESS_READ):
            assert pages.watch(memoryview(mmap.mmap(file.fileno(), 0, access=access))) is None
    assert pages.watch(memoryview(bytearray(TRACK_FROM - 1))) is None


def test_a_write_in_a_forked_child_is_not_ours(pages, watched, buffer):
    watch, view = watched
    pid = os.fork()
    if not pid:
        buffer[1000] = -1
        os._exit(0 if not pages.available else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert buffer[1000] == 1000
    buffer[150_000] = 7
    assert not pages.unwritten(watch, view)


def test_a_forgotten_watch_is_no_longer_believed(pages, watched):
    watch, view = watched
    pages.forget(watch)
    assert not pages.unwritten(watch, view)
    assert pages.unwritten(pages.watch(view), view)


def test_watches_are_few_enough_to_leave_mappings_for_the_program(pages, watched, monkeypatch):
    watch, view = watched
    other = memoryview(bytearray(TRACK_FROM + PAGE))
    monkeypatch.setattr("rearview.runtime.saving.dirty_pages.MOST_WATCHES", 1)
    assert pages.watch(other) is None
    assert pages.unwritten(watch, view)
    pages.forget(watch)
    assert pages.watch(other) is not None


def test_a_written_buffer_is_distinguished_from_its_unwritten_neighbours(pages, watched, buffer):
    _, view = watched
    sizes = range(0, len(view) - TRACK_FROM, TRACK_FROM + 100)
    parts = [view[at : at + TRACK_FROM] for at in sizes]
    watches = pages.watch_all(parts)
    assert None not in watches
    parts[3][TRACK_FROM // 2] ^= 1
    found = [pages.unwritten(*pair) for pair in zip(watches, parts, strict=True)]
    assert found == [number != 3 for number in range(len(parts))]
    pages.forget(*watches[:2])
    assert not pages.unwritten(watches[0], parts[0])
    assert pages.unwritten(watches[2], parts[2])


def test_watching_neighbours_does_not_hide_writes_between_them(pages, watched):
    _, view = watched
    size = TRACK_FROM + PAGE
    first, middle, last = (view[at : at + size] for at in (0, size, 2 * size))
    watch = pages.watch(middle)
    middle[size // 2] ^= 1
    assert None not in pages.watch_all([first, last])
    assert not pages.unwritten(watch, middle)


def test_watching_the_same_memory_otherwise_ends_the_earlier_watch(pages, watched):
    watch, view = watched
    view[len(view) // 2] ^= 1
    assert pages.watch(view[PAGE:]) is not None
    assert not pages.unwritten(watch, view)


def test_where_the_system_offers_nothing_nothing_is_watched(monkeypatch, buffer):
    monkeypatch.setattr("rearview.runtime.saving.dirty_pages._USERFAULTFD", {})
    pages = Pages()
    assert not pages.available
    assert pages.watch(memoryview(buffer).cast("B")) is None
    pages.close()


def test_the_address_of_read_only_memory_is_known():
    data = b"x" * 100
    assert ctypes.string_at(address_of(memoryview(data)) + 1, 3) == b"xxx"
    array = np.arange(10)
    assert address_of(memoryview(array).cast("B")) == array.ctypes.data
