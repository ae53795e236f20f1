"""Copies that are made while training goes on: whole, or not at all."""

import ctypes
import mmap
import threading
import time

import numpy as np
import pytest

from limits import HUNG
from rearview.runtime.saving import changes, late_copy
from rearview.runtime.saving.changes import Changes, CopyHints, Selection, staging_size
from rearview.runtime.saving.dirty_pages import PAGE, Pages, address_of
from rearview.runtime.saving.late_copy import (
    CopyRange,
    LateCopy,
    WatchedCopy,
    copy_if_mapped,
    sample_memory,
)
from runtime.saving.writers import MB, equal, submit

if not Pages().available:
    pytest.skip("this system does not note writes to pages", allow_module_level=True)


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """Let it be worth it for little."""
    monkeypatch.setattr(changes, "LATE_COPY_FROM", 2 * MB)
    monkeypatch.setattr(changes, "LATE_SLOWDOWN", 0.0)


@pytest.fixture
def held_up(monkeypatch):
    """Let late copies wait until the returned event is set."""
    go, real = threading.Event(), late_copy.copy_if_mapped

    def wait(stretch):
        assert go.wait(HUNG)
        return real(stretch)

    monkeypatch.setattr(late_copy, "copy_if_mapped", wait)
    return go


@pytest.fixture
def here():
    """Buffers that are trusted to be left alone."""
    made = Changes()
    for key in weights():
        made._history.add(key, quiet=True)
    yield made
    made.close()


def weights(value=1.0):
    return {"one": np.full(MB // 4, value), "two": np.full(MB // 4, value), "b": np.zeros(100)}


def grow(state):
    for value in state.values():
        np.add(value, 1, out=value)


def known(writer, state):
    """Have the writer see that the state is left alone after a boundary; return the next number."""
    assert submit(writer, 0, state)
    assert writer.drain(30)
    grow(state)
    return 1


def test_a_buffer_that_training_leaves_alone_is_copied_after_training_resumes(
    writer, checkpoints, held_up
):
    state = weights()
    seq = known(writer, state)
    assert submit(writer, seq, state)
    assert not writer.drain(0.05)
    held_up.set()
    assert writer.drain(30)
    equal(checkpoints, seq, state)


def test_a_buffer_written_during_its_late_copy_is_not_saved_and_never_copied_late_again(
    writer, checkpoints, held_up, warned
):
    state = weights()
    seq = known(writer, state)
    assert submit(writer, seq, state)
    state["two"][MB // 8] += 1
    held_up.set()
    assert writer.drain(30)
    assert [each.seq for each in checkpoints.of("r")] == [0]
    assert (writer.costs.saved, writer.costs.skipped, writer.costs.failed) == (1, 1, 0)
    assert not warned
    held_up.clear()
    grow(state)
    before = {key: value.copy() for key, value in state.items()}
    assert submit(writer, seq + 1, state)
    state["two"] += 1  # what is left to be copied late is too little
    held_up.set()
    assert writer.drain(30)
    equal(checkpoints, seq + 1, before)


def test_a_buffer_that_is_seen_to_change_at_once_is_copied_at_once(
    make, checkpoints, held_up, monkeypatch
):
    monkeypatch.setattr(changes, "LATE_SLOWDOWN", 1e9)
    state = weights()

    def train(_seconds):
        state["one"] += 1
        state["two"] += 1

    monkeypatch.setattr(changes.time, "sleep", train)
    writer = make()
    assert submit(writer, 0, state)
    assert writer.drain(30)
    monkeypatch.undo()
    monkeypatch.setattr(changes, "LATE_COPY_FROM", 2 * MB)
    before = {key: value.copy() for key, value in state.items()}
    assert submit(writer, 1, state)
    grow(state)
    assert writer.drain(30)
    equal(checkpoints, 1, before)


def test_a_checkpoint_that_must_be_taken_is_copied_at_once(writer, checkpoints, held_up):
    state = weights()
    seq = known(writer, state)
    before = {key: value.copy() for key, value in state.items()}
    assert submit(writer, seq, state, wait=True)
    state["one"] += 1
    assert writer.drain(30)
    equal(checkpoints, seq, before)


def test_where_no_core_is_free_training_waits_for_the_copy(writer, checkpoints, held_up):
    state = weights()
    seq = known(writer, state)
    before = {key: value.copy() for key, value in state.items()}
    assert submit(writer, seq, state, hints=CopyHints(free_core=False))
    state["one"] += 1
    assert writer.drain(30)
    equal(checkpoints, seq, before)


@pytest.mark.parametrize("early", [False, True], ids=["in time", "overtaken"])
def test_the_next_boundary_leans_on_a_copy_that_is_still_made(
    make, checkpoints, held_up, warned, early
):
    writer, state = make(), weights()
    seq = known(writer, state)
    assert submit(writer, seq, state, hints=CopyHints(recapture=True))
    state["b"] += 1
    assert submit(writer, seq + 1, state)
    writer.training_resumes()
    then = {key: value.copy() for key, value in state.items()}
    if early:
        state["one"] += 1
    held_up.set()
    assert writer.drain(30)
    if early:
        assert [each.seq for each in checkpoints.of("r")] == [0]
        assert writer.costs.skipped == 2
        assert not warned
    else:
        equal(checkpoints, seq + 1, then)
        first, second = (checkpoints.get(f"r/{each}") for each in (seq, seq + 1))
        assert first.parts["one"] == second.parts["one"]


def test_pages_are_watched_no_longer_than_the_copy_takes(here):
    state = weights()
    views = {key: memoryview(value).cast("B") for key, value in state.items()}
    into = mmap.mmap(-1, staging_size(views))
    staged = here.copy(Selection({}, {}, views), memoryview(into), late=True)
    here.complete(staged)
    watches = [copy.watch for copy in staged.late.copies.values()]
    assert len(watches) == 2
    assert all(here._pages._written(watch.low, watch.high) for watch in watches)
    for key, value in state.items():
        if key in staged.views:
            assert bytes(staged.views[key]) == value.tobytes()
    here.training_resumes()
    assert not here._pages._watched


def test_pages_that_the_next_capture_asks_about_stay_watched(here):
    state = weights()
    views = {key: memoryview(value).cast("B") for key, value in state.items()}
    into = mmap.mmap(-1, staging_size(views))
    staged = here.copy(
        Selection({}, {}, views), memoryview(into), hints=CopyHints(recapture=True), late=True
    )
    here.complete(staged)
    selection = here.select(views)
    assert not selection.unchanged
    assert set(selection.in_flight) == {"one", "two"}
    assert set(selection.changed) == {"b"}
    here.training_resumes()
    assert not here._pages._watched


def test_a_watch_that_was_replaced_hides_nothing(pages):
    memory = np.zeros(MB)
    view = memoryview(memory).cast("B")
    first = pages.watch(view)
    memory[:] = 1
    again = pages.watch(view)
    assert pages.intact(again)
    assert not pages.intact(first)


def test_memory_that_is_gone_is_not_read():
    memory = mmap.mmap(-1, 16 * PAGE)
    address = address_of(memoryview(memory))
    into = ctypes.create_string_buffer(16 * PAGE)
    stretch = CopyRange(ctypes.addressof(into), address, 16 * PAGE)
    memory[:] = b"x" * len(memory)
    assert copy_if_mapped(stretch)
    assert into.raw == bytes(memory)
    assert sample_memory(address, [0, PAGE], 2) == b"xxxx"
    memory.close()
    assert not copy_if_mapped(stretch)
    assert sample_memory(address, [0], 2) == b""


def test_a_program_that_frees_its_memory_during_a_late_copy_continues(pages, held_up):
    memory = mmap.mmap(-1, 4 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * len(memory)
    watch = pages.watch(memoryview(memory))
    into = ctypes.create_string_buffer(4 * MB)
    stretch = CopyRange(ctypes.addressof(into), watch.low, watch.page_bytes)
    running = LateCopy(pages, {"w": WatchedCopy(stretch, watch)}, keep_watching=False).begin()
    memory.close()
    held_up.set()
    running.wait()
    assert running.overtaken == {"w"}


def test_training_that_writes_all_the_time_never_leaves_a_wrong_checkpoint(make, checkpoints):
    writer, state = make(), {"w": np.zeros(4 * MB // 8), "v": np.zeros(4 * MB // 8)}
    taken = {}
    for seq in range(60):
        state["w"] += 1
        state["v"] += 1
        if submit(writer, seq, state, hints=CopyHints(recapture=seq % 2 == 0)):
            taken[seq] = seq + 1.0
        if seq % 2:
            writer.training_resumes()
        time.sleep(0.001 * (seq % 5))
        if seq < 10:
            writer.drain(30)
    assert writer.drain(60)
    kept = checkpoints.of("r")
    assert kept
    for each in kept:
        loaded = checkpoints.load(each)
        for key in state:
            assert np.all(np.frombuffer(loaded[key]) == taken[each.seq]), (each.seq, key)
