"""The Checkpointer in one process: what is saved, what is kept, what comes back."""

import multiprocessing
import signal
import threading
import warnings

import pytest

from checkpointers import make, other_node, read, write
from limits import HUNG
from rearview import Checkpointer
from rearview.checkpointer.mirrored_saves import CheckpointerWarning
from rearview.errors import DamagedError, UsageError
from rearview.remote.folder import FolderRemote

__all__ = ["make"]


# what comes back


def test_without_a_save_the_default_comes_back(make):
    assert make().restore(7) == 7
    assert make().restore() is None
    assert not make().checkpoint_exists


def test_the_last_save_comes_back(make):
    first = make()
    for value in range(5):
        first.step(value)
    assert make().checkpoint_exists
    assert make().restore(0) == 4


def test_it_saves_at_the_first_and_then_every_nth_step(make):
    one = make(checkpoint_every=3, keep_last=99)
    for value in range(8):
        one.step(value)
    assert [save.step for save in one._archive.folder.saves()] == [6, 3, 0]


def test_it_saves_by_the_clock(make):
    now = [0.0]
    one = make(checkpoint_every="10s", keep_last=99, clock=lambda: now[0])
    for value in range(8):
        now[0] += 4
        one.step(value)
    assert [save.step for save in one._archive.folder.saves()] == [5, 2]


def test_the_checkpoint_file_itself_holds_the_newest_save(make, tmp_path):
    one = make()
    one.step(1)
    one.step(2)
    assert (tmp_path / "here/a b.pt").read_text() == "2"


def test_without_functions_values_are_pickled(tmp_path):
    with Checkpointer(tmp_path / "x", checkpoint_every=1) as one:
        one.step({"a": [1, 2]})
    with Checkpointer(tmp_path / "x") as two:
        assert two.restore() == {"a": [1, 2]}


def test_the_published_parameters_can_be_given_by_position(tmp_path):
    one = Checkpointer(tmp_path / "x", write, read, "None", None, None, None, None, 1, None, None)
    one.step(1)
    assert one.restore(0) == 1
    assert one.checkpoint_exit_code == 85
    one.close()


def test_a_damaged_save_is_reported_and_the_save_before_it_is_restored(make, tmp_path):
    one = make()
    one.step(1)
    one.step(2)
    newest = one._archive.folder.saves()[0]
    (one._archive.folder.folder / newest.id / "a b.pt").write_text("3")
    with pytest.warns(CheckpointerWarning, match=f"{newest.id}.*damaged"):
        assert make().restore(0) == 1


def test_if_every_save_is_damaged_restore_raises_and_does_not_start_from_the_beginning(make):
    one = make()
    one.step(1)
    for save in one._archive.folder.saves():
        (one._archive.folder.folder / save.id / "a b.pt").write_text("")
    with pytest.warns(CheckpointerWarning), pytest.raises(DamagedError, match="None of the 1"):
        make().restore(0)


def test_a_checkpoint_of_the_published_class_is_taken_over(make, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here/a b.pt").write_text("41")
    one = make()
    assert one.checkpoint_exists
    assert one.restore(0) == 41
    one.step(42)
    assert make().restore(0) == 42


def test_checkpoint_without_any_value_is_refused(make):
    with pytest.raises(UsageError, match="no value"):
        make().checkpoint()


def test_the_working_folder_may_change_after_the_checkpointer_was_made(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpointer("rel.pt", write, read, checkpoint_every=1) as one:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        one.step(3)
    assert (tmp_path / "rel.pt").read_text() == "3"


# what is kept


def test_it_keeps_the_last_and_the_best_here_and_there(make, tmp_path):
    one = make(
        keep_last=2, keep_best=1, best="max", checkpoint_transfer_target=tmp_path / "far" / "x"
    )
    for value, metric in enumerate([0.1, 0.9, 0.3, 0.2, 0.4]):
        one.step(value, metric=metric)
    archive = one._archive
    assert [save.step for save in archive.folder.saves()] == [4, 3, 1]
    assert [archive.mirror.manifest(i).step for i in archive.mirror.ids()] == [4, 3, 1]


def test_old_saves_are_still_removed_after_a_move_to_another_node(make, tmp_path):
    options = {"keep_last": 1, "keep_best": 1, "checkpoint_transfer_target": tmp_path / "far/x"}
    one = make(**options)
    for value, metric in enumerate([0.1, 0.9]):
        one.step(value, metric=metric)
    other_node(tmp_path)
    two = make(**options)
    two.restore()
    two.step(2, metric=0.5)
    mirror = two._archive.mirror
    assert [mirror.manifest(i).metric for i in mirror.ids()] == [0.5, 0.1]


# in the background


def test_a_background_save_holds_the_value_of_its_step_not_a_later_one(make):
    gate = threading.Event()

    def slow(path, value):
        gate.wait(HUNG)
        path.write_text(str(value["n"]))

    one = make(asynchronous=True)
    one.checkpoint_function = slow
    value = {"n": 1}
    one.step(value)
    value["n"] = 2
    one.step(value)  # still busy: not saved, not waited for
    assert one._archive.folder.saves() == ()
    gate.set()
    one.wait()
    assert [save.step for save in one._archive.folder.saves()] == [0]
    assert one.restore(0) == 1


def test_only_the_transfer_can_be_in_the_background(make, tmp_path):
    gate = threading.Event()

    class Slow(FolderRemote):
        def _send(self, local, staged):
            gate.wait(HUNG)
            super()._send(local, staged)

    one = make(asynchronous="transfer", checkpoint_transfer_target=Slow(tmp_path / "far"))
    one.step(5)
    assert read(tmp_path / "here/a b.pt") == 5
    assert one._archive.mirror.ids() == ()
    gate.set()
    one.wait()
    assert len(one._archive.mirror.ids()) == 1


def test_an_error_in_the_background_is_raised_at_the_next_step(make):
    one = make(asynchronous=True)
    one.checkpoint_function = lambda *_: 1 / 0
    one.step(1)
    one._writer.wait()
    with pytest.raises(ZeroDivisionError):
        one.step(2)


# when saving fails


def full(path, value):
    raise OSError(28, "No space left on device")


def test_a_first_save_that_fails_is_an_error(make):
    one = make()
    one.checkpoint_function = full
    with pytest.raises(OSError, match="No space"):
        one.step(1)


def test_a_later_save_that_fails_gives_a_warning_and_the_save_before_it_stays(make):
    one = make()
    one.step(1)
    one.checkpoint_function = full
    with pytest.warns(CheckpointerWarning, match="No space left"):
        one.step(2)
    assert make().restore(0) == 1
    one.checkpoint_function = write
    one.step(3)
    assert make().restore(0) == 3


def test_the_third_failure_in_a_row_is_an_error(make):
    one = make()
    one.step(1)
    one.checkpoint_function = full
    for value in (2, 3):
        with pytest.warns(CheckpointerWarning):
            one.step(value)
    with pytest.raises(OSError, match="No space"):
        one.step(4)


def test_if_the_last_save_fails_the_process_exits_with_the_save_before_it(make):
    one = make()
    one.step(1)
    one.checkpoint_function = full
    one.signals.request()
    with pytest.warns(CheckpointerWarning), pytest.raises(SystemExit) as left:
        one.step(2)
    assert left.value.code == 85
    assert make().restore(0) == 1


# several, and in threads


def test_several_checkpointers_in_one_process_do_not_mix(make):
    one, two = make("here/one.pt"), make("here/two.pt")
    one.step(1)
    two.step(2)
    assert (make("here/one.pt").restore(0), make("here/two.pt").restore(0)) == (1, 2)


def test_it_works_off_the_main_thread(make):
    found = []

    def work():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = make()
        one.step(1)
        found.append(one.restore(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [1]


def test_a_pause_asked_for_saves_and_leaves_with_the_code(make):
    one = make(checkpoint_every=None, pause_when=lambda: True)
    with pytest.raises(SystemExit) as left:
        one.step(6)
    assert left.value.code == 85
    assert make().restore(0) == 6


def test_processes_that_train_together_leave_at_the_same_step(make):
    asked = []
    others = iter([False, False, True])

    def agree(mine):
        asked.append(mine)
        return mine or next(others)

    one = make(checkpoint_every=None, agree=agree)
    one.step(0)
    one.step(1)
    with pytest.raises(SystemExit):
        one.step(2)
    assert asked == [False, False, False]
    assert make().restore(0) == 2


def test_a_worker_of_multiprocessing_does_not_trap_signals(make, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert make().signals.numbers == ()
    assert make(signals=(signal.SIGUSR1,)).signals.numbers == (signal.SIGUSR1,)


def test_an_interrupt_in_a_notebook_saves_and_ends_the_cell_only(make, monkeypatch):
    from types import SimpleNamespace

    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(__import__("sys").modules, "IPython", kernel)
    one = make(checkpoint_every=None)
    one.step(0)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        one.step(1)
    assert one.restore(0) == 1
    one.step(2)  # the next cell goes on
    assert one.signals.requested is None


def test_a_kernel_that_sets_its_own_handler_in_every_cell_is_followed(make):
    one = make(checkpoint_every=None)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    one.step(1)
    signal.raise_signal(signal.SIGINT)
    assert one.signals.requested is signal.SIGINT
    signal.signal(signal.SIGINT, before)
    one.signals.clear()
