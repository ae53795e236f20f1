import os
from pathlib import Path

import pytest

from rearview.errors import DamagedError, StoreError
from rearview.model import Edge, Part, Point, Snapshot
from rearview.store.checkpoints.checkpoints import OBJECT_FROM, Checkpoints, save_in_flight
from rearview.store.maintenance import thin_and_collect as gc_module
from rearview.store.maintenance.thin_and_collect import gc, usage


@pytest.fixture
def old(project):
    """Make everything in the store look old, so that it is not spared for its youth."""

    def age():
        for folder, _, names in os.walk(project.store):
            for name in names:
                os.utime(Path(folder, name), (1e9, 1e9))

    return age


def test_unreferenced_objects_are_removed(project, checkpoints, save, holds, old):
    for seq in range(3):
        save(seq)
    checkpoints.delete("r/1")
    old()
    before = usage(project)
    freed = gc(project, referenced=tuple)
    assert freed.checkpoints == ()
    assert freed.nbytes > 2 * OBJECT_FROM
    assert usage(project) == freed.left == before - freed.nbytes
    assert holds(0)
    assert holds(2)
    assert gc(project, referenced=tuple).nbytes == 0


def test_objects_of_records_stay(project, checkpoints, old):
    ref = checkpoints.objects.put(b"an image")
    checkpoints.objects.put(b"nobody's")
    old()
    assert gc(project, referenced=lambda: [ref.oid]).nbytes == len(b"nobody's")
    assert checkpoints.objects.get(ref) == b"an image"


def test_dry_changes_nothing(project, checkpoints, save, old):
    for seq in range(4):
        save(seq)
    checkpoints.delete("r/1")
    old()
    before = usage(project)
    dry = gc(project, referenced=tuple, budget=before // 2, dry=True)
    assert usage(project) == before
    assert len(checkpoints.of("r")) == 3
    assert gc(project, referenced=tuple, budget=before // 2) == dry


def test_a_budget_thins_until_it_is_met(project, checkpoints, save, holds, old):
    for seq in range(10):
        save(seq)
    old()
    budget = usage(project) // 2
    freed = gc(project, referenced=tuple, budget=budget)
    assert usage(project) <= budget
    assert 4 <= len(freed.checkpoints) <= 6
    left = [each.seq for each in checkpoints.of("r")]
    assert left[-1] == 9
    assert all(holds(seq) for seq in left)


def test_promises_are_kept_with_any_budget(project, checkpoints, save, holds, old):
    for run in ("mine", "other"):
        for seq in range(4):
            save(seq, run=run, seed=seq + (100 if run == "mine" else 0))
    old()
    freed = gc(project, referenced=tuple, budget=0, keep={"mine", "other/1"})
    assert set(freed.checkpoints) == {"other/0", "other/2"}
    assert [each.seq for each in checkpoints.of("other")] == [1, 3]
    assert all(holds(seq, run="mine", seed=seq + 100) for seq in range(4))


def test_shared_bytes_are_freed_with_their_last_user(project, checkpoints, old):
    frozen = b"f" * OBJECT_FROM
    first = checkpoints.save(
        Snapshot("r", 0, Point(), Edge.START), [Part("frozen", frozen), Part("a", b"1")]
    )
    for seq in range(1, 4):
        parts = [Part("frozen", b"", first.parts["frozen"]), Part("a", b"%d" % seq)]
        checkpoints.save(Snapshot("r", seq, Point(), Edge.START), parts)
    old()
    freed = gc(project, referenced=tuple, budget=0)
    assert set(freed.checkpoints) == {"r/0", "r/1", "r/2"}
    last = checkpoints.of("r")
    assert [each.seq for each in last] == [3]
    assert checkpoints.load(last[0])["frozen"] == frozen


def test_a_save_in_flight_is_spared(project, checkpoints, old, monkeypatch):
    monkeypatch.setattr(gc_module, "SLACK", 0.01)
    with save_in_flight(project):
        ref = checkpoints.objects.put(b"on its way")
        freed = gc(project, referenced=tuple)
        assert (freed.nbytes, freed.spared) == (0, len(b"on its way"))
        assert checkpoints.objects.get(ref) == b"on its way"
    old()
    assert gc(project, referenced=tuple).nbytes == len(b"on its way")


def test_the_save_of_a_dead_process_does_not_hold_up_a_sweep(project, checkpoints, old):
    checkpoints.objects.put(b"left")
    pid = os.fork()
    if not pid:
        with save_in_flight(project):
            os._exit(0)
    os.waitpid(pid, 0)
    assert len(list(project.writing.iterdir())) == 1
    old()
    assert gc(project, referenced=tuple).nbytes == len(b"left")
    assert list(project.writing.iterdir()) == []


def test_a_mark_set_during_the_sweep_saves_the_object(project, checkpoints, old, monkeypatch):
    ref = checkpoints.objects.put(b"wanted again")
    old()

    def marked(store, now):
        checkpoints.objects.touch(ref)  # a save begins right after the files were listed
        return now

    monkeypatch.setattr(gc_module, "earliest_start", marked)
    gc(project, referenced=tuple)
    assert checkpoints.objects.get(ref) == b"wanted again"


def test_fresh_objects_are_spared_while_a_run_records(project, checkpoints, monkeypatch):
    monkeypatch.setattr(gc_module, "SLACK", -10.0)
    folder = project.runs / "r"
    folder.mkdir(parents=True)
    (folder / "heartbeat").touch()
    checkpoints.objects.put(b"waits for its record")
    assert gc(project, referenced=tuple).nbytes == 0
    (folder / "end.json").write_text("{}")
    assert gc(project, referenced=tuple).nbytes > 0


def test_an_unreadable_manifest_stops_the_sweep(project, checkpoints, save, old):
    save(0)
    save(1)
    path = project.checkpoints / "r" / "00000001.json"
    path.write_bytes(b"{}")
    old()
    before = usage(project)
    with pytest.raises(DamagedError, match="verify --repair"):
        gc(project, referenced=tuple, budget=0)
    assert usage(project) == before


def test_a_sweep_of_a_read_only_store_says_so(project, save, monkeypatch):
    save(0)
    monkeypatch.setattr(
        "pathlib.Path.touch", lambda self: (_ for _ in ()).throw(PermissionError(13, "denied"))
    )
    with pytest.raises(StoreError, match="Make it writable"):
        gc(project, referenced=tuple)


def test_leftovers_of_killed_saves_go(project, checkpoints, save, old):
    save(0)
    (project.objects / "ab").mkdir(exist_ok=True)
    (project.objects / "ab" / ".part-1-2").write_bytes(b"half")
    (project.checkpoints / "r" / ".00000005.json.1.2").write_bytes(b"half")
    old()
    assert gc(project, referenced=tuple).files == 2
    assert len(Checkpoints(project).of("r")) == 1


def test_a_checkpoint_that_another_process_deletes_at_the_same_time_is_no_failure(
    project, save, holds, monkeypatch
):
    for seq in range(2):
        save(seq)
    listed, got = Checkpoints.of, Checkpoints.get

    def deleted(self, name):
        if name == "r/1":
            self.delete(name)
        return got(self, name)

    monkeypatch.setattr(Checkpoints, "of", lambda self, run: listed(self, run)[:1])
    monkeypatch.setattr(Checkpoints, "get", deleted)
    gc(project, referenced=tuple)
    assert holds(0)
