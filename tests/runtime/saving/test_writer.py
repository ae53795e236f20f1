import errno
import mmap
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

from faults import Faults
from limits import HUNG
from rearview.config import Settings
from rearview.runtime.saving.policy import Reason
from rearview.runtime.saving.writer import Writer
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.maintenance.thin_and_collect import gc
from rearview.store.maintenance.verify import verify
from rearview.store.project import Project
from runtime.saving.writers import MB, ONE, arrays, equal, stalled, submit


def test_a_submitted_state_is_saved_with_its_values_at_submission(writer, checkpoints):
    state, history = arrays(), []
    for seq in range(6):
        state["weights"] += 1
        state["bias"] *= 1.5
        assert submit(writer, seq, state, wait=True)
        history.append({key: value.copy() for key, value in state.items()})
        state["weights"][:] = -1  # training goes on at once
        state["weights"][:] = history[-1]["weights"]
    assert writer.drain(30)
    for seq, expected in enumerate(history):
        equal(checkpoints, seq, expected)


def test_training_may_overwrite_the_state_at_once(make, checkpoints):
    go, writer = stalled(checkpoints), make()
    state = arrays()
    expected = {key: value.copy() for key, value in state.items()}
    assert submit(writer, 0, state)
    for value in state.values():
        value[:] = 0
    go.set()
    assert writer.drain(30)
    equal(checkpoints, 0, expected)


def test_frozen_buffers_are_neither_copied_nor_stored_again(writer, checkpoints):
    state = arrays()
    copied = []
    for seq in range(5):
        state["weights"] += 1
        before = writer.costs.copied
        assert submit(writer, seq, state, wait=True)
        assert writer.drain(30)
        copied.append(writer.costs.copied - before)
        equal(checkpoints, seq, state)
    frozen = state["frozen"].nbytes
    assert copied[0] > frozen + state["weights"].nbytes
    assert all(each < copied[0] - frozen + 8192 for each in copied[1:])
    changed = 5 * state["weights"].nbytes + frozen
    assert writer.costs.stored < 1.1 * changed
    assert writer.costs.logical > 5 * frozen


@pytest.mark.parametrize("where", [0, 1, 1000, -1])
def test_a_frozen_buffer_that_changes_in_one_place_is_saved_again(writer, checkpoints, where):
    state = arrays()
    for seq in range(8):
        if seq in {3, 5, 6}:
            state["frozen"][where] += 1
        assert submit(writer, seq, state, wait=True)
        assert writer.drain(30)
        equal(checkpoints, seq, state)


def test_a_change_that_no_library_announces_is_seen(writer, checkpoints):
    state = arrays()
    for seq in range(3):
        assert submit(writer, seq, state, wait=True)
        assert writer.drain(30)
    view = memoryview(state["frozen"]).cast("B")
    with Path("/dev/urandom").open("rb", buffering=0) as source:
        source.readinto(view[500_000:500_001])  # the kernel writes, not the program
    assert submit(writer, 3, state, wait=True)
    assert writer.drain(30)
    equal(checkpoints, 3, state)


def test_memory_shared_with_another_process_is_seen_to_change(writer, checkpoints):
    memory = mmap.mmap(-1, MB)
    state = {"shared": np.frombuffer(memory, dtype="u1")}
    for seq in range(4):
        if seq == 3:
            pid = os.fork()
            if not pid:
                memory[5000] = 77
                os._exit(0)
            os.waitpid(pid, 0)
        assert submit(writer, seq, state, wait=True)
        assert writer.drain(30)
        equal(checkpoints, seq, state)
    assert checkpoints.load(checkpoints.get("r/3"))["shared"][5000] == 77
    assert checkpoints.load(checkpoints.get("r/2"))["shared"][5000] == 0


def test_a_buffer_that_moves_or_changes_size_is_saved_as_it_is(writer, checkpoints):
    for seq in range(8):
        state = {"moving": np.full(100_000 + 1000 * (seq // 3), float(seq // 2))}
        assert submit(writer, seq, state, wait=True)
        assert writer.drain(30)
        equal(checkpoints, seq, state)


def test_a_state_that_grows_is_saved_at_every_size(writer, checkpoints):
    state = {}
    for seq in range(30):
        state[f"epoch{seq}"] = np.full(3000 * seq, float(seq))
        assert submit(writer, seq, state, wait=True)
    assert writer.drain(30)
    equal(checkpoints, 29, state)
    assert verify(checkpoints.project).problems == ()


def test_a_hundred_thousand_tiny_buffers_are_saved(writer, checkpoints):
    state = {f"t{i}": np.float32([i]) for i in range(100_000)}
    assert submit(writer, 0, state)
    assert writer.drain(60)
    state["t5"] += 1
    assert submit(writer, 1, state)
    assert writer.drain(60)
    found = checkpoints.of("r")
    loaded = checkpoints.load(found[1])
    assert len(loaded) == 100_001
    assert np.frombuffer(loaded["t5"], "f4") == 6
    assert np.frombuffer(loaded["t99999"], "f4") == 99999
    assert len(list(checkpoints.objects.packs())) == 2


def test_small_parts_lean_on_few_old_packs(writer, checkpoints):
    state = {f"s{i}": np.full(50, -1.0) for i in range(40)}
    for seq in range(40):
        state[f"s{seq}"][:] = seq
        assert submit(writer, seq, state, wait=True)
    assert writer.drain(30)
    last = checkpoints.of("r")[-1]
    assert len({ref.pack for ref in last.parts.values()}) <= 10
    equal(checkpoints, 39, state)


def test_a_full_disk_becomes_one_warning_and_training_continues(
    make, warned, checkpoints, monkeypatch
):
    writer = make()
    state = arrays()
    assert submit(writer, 0, state)
    assert writer.drain(30)
    before = {key: value.copy() for key, value in state.items()}
    with monkeypatch.context() as patch:
        Faults(patch, at=1, times=10**6, error=errno.ENOSPC)
        for seq in range(1, 10):
            state["weights"] += 1
            submit(writer, seq, state)
            assert writer.drain(30)
    assert len(warned) == 1
    assert "disk" in warned[0]
    assert "training continues" in warned[0]
    assert 1 <= writer.costs.failed < 9
    equal(checkpoints, 0, before)
    for seq in range(10, 20):
        state["weights"] += 1
        submit(writer, seq, state)
        assert writer.drain(30)
    last = checkpoints.of("r")[-1]
    assert last.seq == 19
    equal(checkpoints, 19, state)
    assert verify(checkpoints.project).problems == ()


def test_a_disk_that_fails_at_any_step_never_reaches_training(make, checkpoints, monkeypatch):
    state = arrays()
    for step in range(1, 10**6):
        writer = make()
        with monkeypatch.context() as patch:
            faults = Faults(patch, at=step, error=errno.EIO)
            state["weights"] += 1
            submit(writer, 2 * step, state)
            assert writer.drain(30)
        state["weights"] += 1
        writer._failures.pause = 0
        assert submit(writer, 2 * step + 1, state)
        assert writer.drain(30)
        equal(checkpoints, 2 * step + 1, state)
        if not faults.failed:
            break
    assert step > 15
    assert verify(checkpoints.project).problems == ()


def test_objects_swept_under_a_running_writer_are_written_again(make, warned, checkpoints):
    writer = make()
    state = arrays()
    for seq in range(4):
        assert submit(writer, seq, state, wait=True)
    assert writer.drain(30)
    for each in checkpoints.of("r"):
        checkpoints.delete(each.id)
    for folder, _, names in os.walk(checkpoints.project.store):
        for name in names:
            os.utime(Path(folder, name), (1e9, 1e9))
    assert gc(checkpoints.project, referenced=tuple).nbytes > 0
    assert submit(writer, 4, state)  # leans on what is gone
    assert writer.drain(30)
    assert len(warned) == 1
    assert submit(writer, 5, state)
    assert writer.drain(30)
    equal(checkpoints, 5, state)
    assert [each.seq for each in checkpoints.of("r")] == [5]


def test_bad_input_never_reaches_training(writer, warned):
    assert not submit(writer, 0, {"x": object()})
    assert not submit(writer, 1, {"x": np.zeros((10, 10))[:, ::2]})
    assert len(warned) >= 1
    assert writer.reason is Reason.FAILED


def test_a_copy_that_fails_gives_its_memory_back(writer, checkpoints, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(writer._changes, "copy", lambda *_: 1 / 0)
        assert not submit(writer, 0, arrays())
    writer._failures.pause = 0
    assert submit(writer, 1, arrays())
    assert writer.drain(30)


def test_a_forked_child_saves_nothing_and_ends(writer, checkpoints):
    state = arrays()
    go = stalled(checkpoints)
    assert submit(writer, 0, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if not pid:
        ok = not submit(writer, 1, state) and writer.drain(5) and writer.close(5)
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    go.set()
    assert writer.drain(30)
    equal(checkpoints, 0, state)


def test_a_closed_writer_says_so(make):
    writer = make()
    assert writer.close()
    assert not submit(writer, 0, arrays())
    assert writer.reason is Reason.CLOSED
    assert writer.close()


def test_saved_checkpoints_are_reported_with_their_cost(checkpoints):
    told = []
    writer = Writer(checkpoints, Settings(), on_end=lambda *facts: told.append(facts))
    writer.prepare(4 * MB)
    assert submit(writer, 0, arrays())
    assert writer.close(30)
    ((seq, cost, _),) = told
    assert seq == 0
    assert cost.saved == 1
    assert cost.blocking > 0
    assert cost.background > 0
    assert cost.cpu > 0
    assert cost.logical == checkpoints.get("r/0").nbytes
    assert cost == writer.costs


def test_a_slow_store_costs_checkpoints_not_training(make, checkpoints, monkeypatch):
    real = os.fsync
    waits = threading.Semaphore(0)

    def slow(fd):
        waits.acquire(timeout=HUNG)
        return real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    writer = make(staging=ONE)
    state = arrays()
    taken = []
    for seq in range(10):
        state["weights"] += 1
        taken.append(submit(writer, seq, state))
    assert taken == [True] + [False] * 9
    for _ in range(1000):
        waits.release()
    assert writer.drain(30)


def test_a_store_on_a_full_file_system_stays_whole(tmp_path, warned):
    """A real file system of 6 MB, where this process may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    if os.system(f"mount -t tmpfs -o size=6m tmpfs {place} 2>/dev/null"):
        pytest.skip("mounting needs root; the injected version of this test has run")
    try:
        store = Checkpoints(Project.create(place))
        writer = Writer(store, Settings(), warn=warned.append)
        state = {"w": np.zeros(MB // 8)}
        for seq in range(12):
            state["w"] += 1
            submit(writer, seq, state)
            assert writer.drain(30)
        assert writer.close(30)
        found = store.of("r")
        assert 3 <= len(found) <= 6
        for each in found:
            equal(store, each.seq, {"w": np.full(MB // 8, each.seq + 1.0)})
        assert len(warned) == 1
        assert "full" in warned[0]
        assert verify(store.project).problems == ()
    finally:
        os.system(f"umount {place}")


def test_a_checkpoint_in_flight_at_the_end_of_the_program_is_saved(tmp_path):
    program = """
import atexit, sys
from pathlib import Path
from rearview.config import Settings
from rearview.model import Edge, Point, Snapshot
from rearview.runtime.saving.policy import Reason
from rearview.runtime.saving.writer import Writer
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project
writer = Writer(Checkpoints(Project.create(Path(sys.argv[1]))), Settings())
atexit.register(writer.close)
big = {f"b{i}": bytes([i]) * (1 << 20) for i in range(30)}
for seq in range(2):
    assert writer.submit(Snapshot("r", seq, Point(), Edge.START, b"", big), wait=True)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "error", "-c", program, tmp_path], check=True, env=env)
    found = Checkpoints(Project.open(tmp_path)).of("r")
    assert [each.seq for each in found] == [0, 1]
