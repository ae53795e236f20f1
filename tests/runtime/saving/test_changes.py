"""What waits in staging memory, what need not be copied into it, and what it may take."""

import ctypes
import errno
import threading

import numpy as np
import pytest

from limits import HUNG
from rearview.runtime.saving import changes
from rearview.runtime.saving.changes import Changes, CopyHints
from rearview.runtime.saving.dirty_pages import Pages
from rearview.runtime.saving.policy import Reason
from rearview.runtime.saving.staging import Staging
from runtime.saving.writers import MB, ONE, arrays, equal, stalled, submit


def test_on_a_busy_disk_the_writer_skips_a_checkpoint_and_does_not_wait(make, checkpoints):
    go, writer = stalled(checkpoints), make(staging=ONE)
    state = arrays()
    assert submit(writer, 0, state)
    state["weights"] += 1
    assert not submit(writer, 1, state)
    assert writer.reason is Reason.BUSY
    assert not writer.drain(0.01)
    go.set()
    assert writer.drain(30)
    assert submit(writer, 2, state)
    assert writer.drain(30)
    assert [each.seq for each in checkpoints.of("r")] == [0, 2]
    assert (writer.costs.saved, writer.costs.skipped) == (2, 1)


def test_waiting_waits(make, checkpoints):
    go, writer = stalled(checkpoints), make(staging=ONE)
    state = arrays()
    assert submit(writer, 0, state)
    threading.Timer(0.05, go.set).start()
    assert submit(writer, 1, state, wait=True)
    assert writer.drain(30)
    assert len(checkpoints.of("r")) == 2


def test_a_buffer_of_a_save_in_flight_is_not_copied_again(make, checkpoints):
    go, writer = stalled(checkpoints), make(staging=ONE)
    state = arrays()
    assert submit(writer, 0, state)
    state["bias"] += 1
    assert submit(writer, 1, state)
    later = {key: value.copy() for key, value in state.items()}
    state["weights"] += 1  # training goes on at once
    go.set()
    assert writer.drain(30)
    equal(checkpoints, 1, later)
    one, two = checkpoints.of("r")
    assert one.parts["weights"] == two.parts["weights"]
    assert two.stored < state["shared"].nbytes
    assert submit(writer, 2, state)
    assert writer.drain(30)
    equal(checkpoints, 2, state)


def test_a_checkpoint_that_refers_to_a_failed_one_is_not_saved(make, checkpoints, warned):
    go, real = threading.Event(), checkpoints.save

    def save(snapshot, parts):
        assert go.wait(HUNG)
        if not snapshot.seq:
            raise OSError(errno.ENOSPC, "full")
        return real(snapshot, parts)

    checkpoints.save = save
    writer = make(staging=ONE)
    state = arrays()
    assert submit(writer, 0, state)
    assert submit(writer, 1, state)
    go.set()
    assert writer.drain(30)
    assert checkpoints.of("r") == []
    assert writer.costs.failed == 2
    while not submit(writer, 2, state):
        pass  # some boundaries are let pass after a failure
    assert writer.drain(30)
    equal(checkpoints, 2, state)


def test_a_state_that_stays_every_other_time_is_copied_once(writer, checkpoints):
    state, copied = arrays(), []
    for seq in range(8):
        state["weights"] += seq % 2
        before = writer.costs.copied
        assert submit(writer, seq, state, wait=True)
        assert writer.drain(30)
        equal(checkpoints, seq, state)
        copied.append(writer.costs.copied - before)
    assert all(each < state["weights"].nbytes for each in copied[4::2])


def test_memory_is_made_ready_before_a_large_state_is_copied(make, checkpoints, monkeypatch):
    monkeypatch.setattr("rearview.runtime.saving.staging.MOST_NEW_BYTES", 2 * MB)
    writer = make()
    state = {"w": np.zeros(MB)}
    assert not submit(writer, 0, state)
    assert writer.reason is Reason.PREPARING
    while writer.refusal() or not submit(writer, 1, state):
        pass
    assert writer.drain(30)
    equal(checkpoints, 1, state)


def test_if_memory_cannot_be_prepared_the_checkpoint_is_saved_all_the_same(
    make, checkpoints, monkeypatch
):
    monkeypatch.setattr("rearview.runtime.saving.staging.MOST_NEW_BYTES", 2 * MB)

    def no_memory(self, nbytes):
        raise MemoryError

    monkeypatch.setattr("rearview.runtime.saving.staging.Staging.warm", no_memory)
    writer, state = make(), {"w": np.zeros(MB)}
    assert not submit(writer, 0, state)
    while writer.refusal() or not submit(writer, 1, state):
        pass
    assert writer.drain(30)
    equal(checkpoints, 1, state)


def test_a_checkpoint_that_must_be_taken_does_not_wait_for_memory(make, checkpoints, monkeypatch):
    monkeypatch.setattr("rearview.runtime.saving.staging.MOST_NEW_BYTES", 2 * MB)
    writer, state = make(), {"w": np.zeros(MB)}
    assert submit(writer, 0, state, wait=True)
    assert writer.drain(30)
    equal(checkpoints, 0, state)


def test_a_checkpoint_that_must_be_taken_waits_while_its_memory_is_written_with_zeros(
    make, checkpoints, monkeypatch
):
    monkeypatch.setattr("rearview.runtime.saving.staging.MOST_NEW_BYTES", 2 * MB)
    begun, go_on = threading.Event(), threading.Event()
    warm = Staging.warm

    def slow(self, nbytes):
        begun.set()
        go_on.wait()
        warm(self, nbytes)

    monkeypatch.setattr("rearview.runtime.saving.staging.Staging.warm", slow)
    writer, state = make(), {"w": np.arange(MB, dtype=float)}
    writer.prepare(8 * MB)
    begun.wait()
    assert not submit(writer, 0, state)
    assert writer.reason is Reason.PREPARING
    threading.Timer(0.05, go_on.set).start()
    assert submit(writer, 1, state, wait=True)
    assert go_on.is_set()
    assert writer.drain()
    equal(checkpoints, 1, state)


def test_a_state_that_would_exhaust_the_machine_is_refused(make, warned, monkeypatch):
    monkeypatch.setattr("rearview.runtime.saving.staging.MOST_NEW_BYTES", MB)
    monkeypatch.setattr("rearview.runtime.saving.writer.free_memory", lambda: 10 * MB)
    writer, state = make(), {"w": np.zeros(MB)}
    assert not submit(writer, 0, state, wait=True)
    assert writer.reason is Reason.OVER_MEMORY
    assert not submit(writer, 1, state)
    assert len(warned) == 1


def test_a_larger_bound_lets_several_wait_for_the_disk(make, checkpoints):
    state = {"w": np.zeros(MB // 8)}
    go, writer = stalled(checkpoints), make(staging=3 * (MB + 8192))
    taken = []
    for seq in range(6):
        state["w"] += 1
        taken.append(submit(writer, seq, state))
    assert taken == [True, True, True, False, False, False]
    assert writer.staging <= 3 * (MB + 8192)
    go.set()
    assert writer.drain(30)
    for seq in range(3):
        equal(checkpoints, seq, {"w": np.full(MB // 8, seq + 1.0)})


def test_small_checkpoints_wait_for_the_disk_together(make, checkpoints):
    go, writer = stalled(checkpoints), make()
    state = {"w": np.zeros(1000)}
    taken = []
    for seq in range(10):
        state["w"] += 1
        taken.append(submit(writer, seq, state))
    assert taken == [True] * 8 + [False] * 2
    go.set()
    assert writer.drain(30)
    for seq in range(8):
        equal(checkpoints, seq, {"w": np.full(1000, seq + 1.0)})


def test_a_state_beyond_the_bound_is_refused_with_the_reason(make, warned, checkpoints):
    writer = make(staging=MB)
    assert not submit(writer, 0, {"w": np.zeros(MB)})
    assert writer.reason is Reason.OVER_STAGING
    assert not submit(writer, 1, {"w": np.zeros(MB)}, wait=True)
    assert len(warned) == 1
    assert submit(writer, 2, {"w": np.zeros(MB // 16)})


def test_memory_stays_within_the_bound(make):
    state, writer = arrays(), make(staging=ONE)
    for seq in range(8):
        state["weights"] += 1
        submit(writer, seq, state, wait=True)
        assert writer.staging <= ONE


def test_memory_that_only_the_first_checkpoint_needed_is_given_back(writer):
    state = {"weights": np.zeros(MB // 8), "frozen": np.ones(5 * MB)}
    for seq in range(8):
        state["weights"] += 1
        submit(writer, seq, state, wait=True)
        writer.drain(30)
        if not seq:
            assert 41 * MB < writer.staging < 42 * MB
    assert writer.staging <= 16 * MB


@pytest.mark.parametrize("landed", [False, True], ids=["in flight", "durable"])
def test_a_buffer_submitted_again_soon_is_copied_only_if_it_was_written(
    make, checkpoints, monkeypatch, landed
):
    go, writer = stalled(checkpoints), make(staging=ONE)
    if not Pages().available:
        pytest.skip("this system does not note writes to pages")
    monkeypatch.setattr(changes, "_equals_copy", lambda *_: pytest.fail("compared byte by byte"))
    monkeypatch.setattr(Changes, "_unchanged", lambda *_: pytest.fail("hashed"))
    state = {key: np.arange(MB, dtype=np.uint8) for key in ("weights", "shared")}
    assert submit(writer, 0, state, hints=CopyHints(recapture=True))
    if landed:
        go.set()
        assert writer.drain(30)
    assert submit(writer, 1, state)
    go.set()
    assert writer.drain(30)
    equal(checkpoints, 1, state)
    one, two = checkpoints.of("r")
    assert one.parts["weights"] == two.parts["weights"]


def test_a_write_by_foreign_code_between_two_submissions_is_seen(make, checkpoints):
    writer = make()
    state = {"weights": np.zeros(MB, np.uint8)}
    assert submit(writer, 0, state, hints=CopyHints(recapture=True))
    assert writer.drain(30)
    ctypes.memset(state["weights"].ctypes.data + MB // 2, 7, 1)  # as a library in C would
    assert submit(writer, 1, state)
    writer.training_resumes()
    assert writer.drain(30)
    equal(checkpoints, 1, state)


def test_a_buffer_that_probably_stays_the_same_is_not_hashed(make, checkpoints, monkeypatch):
    if not Pages().available:
        pytest.skip("this system does not note writes to pages")
    monkeypatch.setattr(Changes, "_unchanged", lambda *_: pytest.fail("hashed"))
    writer, frozen, data = make(), np.ones(MB, np.uint8), np.zeros(MB, np.uint8)
    hints = CopyHints(likely_unchanged={"frozen", "data"})
    for seq in range(3):
        assert submit(writer, seq, {"frozen": frozen, "data": data}, hints=hints)
        writer.training_resumes()
        assert writer.drain(30)
    assert writer.costs.copied < 3 * MB
    monkeypatch.undo()
    data[-1] = 1
    assert submit(writer, 3, {"frozen": frozen, "data": data}, hints=hints)
    assert writer.drain(30)
    equal(checkpoints, 3, {"frozen": frozen, "data": data})


def test_writing_waits_until_the_state_was_looked_at_again(make, checkpoints, monkeypatch):
    monkeypatch.setattr("rearview.runtime.saving.writer.RECAPTURE_WAIT", 30)
    begun, real = threading.Event(), checkpoints.save

    def save(*args, **kwargs):
        begun.set()
        return real(*args, **kwargs)

    checkpoints.save = save
    writer, state = make(), arrays()
    assert submit(writer, 0, state, hints=CopyHints(recapture=True))
    assert not begun.wait(0.2)
    assert submit(writer, 1, state)
    writer.training_resumes()
    assert begun.wait(HUNG)
    assert writer.drain(30)
    for seq in range(2):
        equal(checkpoints, seq, state)


@pytest.mark.parametrize("wait", ["drain", "submit"])
def test_training_does_not_wait_for_a_write_that_is_held_back(make, checkpoints, monkeypatch, wait):
    monkeypatch.setattr("rearview.runtime.saving.writer.RECAPTURE_WAIT", 60)
    writer, state = make(), arrays()
    assert submit(writer, 0, state, hints=CopyHints(recapture=True), wait=True)
    if wait == "submit":
        for seq in range(1, 12):  # more than may be in flight at once
            state["weights"] += 1
            assert submit(writer, seq, state, hints=CopyHints(recapture=True), wait=True)
    assert writer.drain(30)
    equal(checkpoints, 0 if wait == "drain" else 11, state)


def test_unchanged_buffers_are_watched_in_one_call_and_saved_if_written_afterwards(
    make, checkpoints, monkeypatch
):
    asked = []
    watch_all = Pages.watch_all
    monkeypatch.setattr(
        Pages, "watch_all", lambda self, views: asked.append(len(views)) or watch_all(self, views)
    )
    writer = make()
    if not writer._changes._pages.available:
        pytest.skip("this kernel does not offer tracking of writes (Linux 6.7, userfaultfd)")
    state = {f"w{i}": np.full(100_000, float(i)) for i in range(8)}
    for seq in range(5):
        assert submit(writer, seq, state)
        assert writer.drain(30)
    assert asked == [8]  # once each was found unchanged by its hash
    assert len(writer._changes._watched) == 8
    state["w3"] += 1
    assert submit(writer, 5, state)
    assert writer.drain(30)
    equal(checkpoints, 5, state)
    assert checkpoints.of("r")[-1].parts["w2"] == checkpoints.of("r")[0].parts["w2"]
