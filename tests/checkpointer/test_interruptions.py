"""The Checkpointer in processes that get signals: what they leave, and with which code."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from limits import HUNG

SRC = Path(__file__).parents[2] / "src"

PROGRAM = """
import os, signal, sys, threading, time
from pathlib import Path
from rearview import Checkpointer
from rearview.remote.base import Retry

def write(path, value):
    path.write_text(str(value))

def read(path):
    return int(path.read_text())

def make(**options):
    options = {"checkpoint_every": None, "retry": Retry(1), **options}
    return Checkpointer(Path("here/a b.pt"), write, read, **options)

def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "here").mkdir()
    started = []

    def start(body, **env):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM + textwrap.dedent(body)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(SRC), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def end(process):
    out, err = process.communicate(timeout=HUNG)
    return process.returncode, out, err


LOOP = """
    one = make(checkpoint_transfer_target="far/x")
    for value in range(one.restore(-1) + 1, 10**6):
        if value % 10 == 0:
            say(value)
        time.sleep(0.01)
        one.step(value)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_at_the_next_step_and_exits_85(start, tmp_path, number):
    process = start(LOOP)
    process.stdout.readline()
    process.send_signal(number)
    code, _, err = end(process)
    assert (code, err) == (85, "")
    saved = list((tmp_path / "far/x.saves").iterdir())
    assert len(saved) == 1
    assert list((tmp_path / "here").iterdir()) == []  # it is away, so nothing stays here
    again = start(LOOP)
    assert int(again.stdout.readline()) > 0


def test_many_signals_at_once_save_once(start, tmp_path):
    process = start(LOOP)
    process.stdout.readline()
    for _ in range(20):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGUSR1)
    assert end(process)[0] == 85
    assert len(list((tmp_path / "far/x.saves").iterdir())) == 1


def test_a_signal_before_the_first_step_saves_the_first_step(start):
    process = start("""
        one = make()
        say("ready")
        time.sleep(0.3)
        one.step(5)
        say("not reached")
    """)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert end(process) == (85, "", "")
    assert start("say(make().restore(0))").stdout.readline() == "5\n"


def test_a_half_updated_state_is_never_saved(start):
    process = start("""
        one = make()
        one.checkpoint_function = lambda path, v: path.write_text(f"{v[0]} {v[1]}")
        state = [0, 0]
        say("ready")
        while True:
            state[0] += 1
            time.sleep(0.02)  # a signal most likely arrives here
            state[1] += 1
            one.step(state)
    """)
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 85
    out = start("""
        one = make()
        one.restore_function = lambda path: path.read_text()
        say(one.restore())
    """).stdout.readline()
    first, second = out.split()
    assert first == second != "0"


def test_a_program_that_only_calls_checkpoint_leaves_too(start):
    process = start("""
        one = make()
        for value in range(10**6):
            time.sleep(0.01)
            one.checkpoint(value)
            if value == 0:
                say("ready")
    """)
    process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    assert end(process)[0] == 85


def test_the_deadline_leaves_with_the_last_complete_save_brought_away(start, tmp_path):
    process = start("""
        one = make(grace=0.3)
        one.checkpoint(1)
        one._archive.mirror = None
        one.close()
        one = make(grace=0.3, checkpoint_transfer_target="far/x")
        say("ready")
        time.sleep(60)   # a step that takes far too long
    """)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 85
    assert len(list((tmp_path / "far/x.saves").iterdir())) == 1


def test_the_prehook_runs_at_the_step_and_may_fail(start):
    process = start("""
        def hook(word):
            say(word)
            raise ValueError("no")
        one = make(on_SIGTERM_prehook=hook, on_SIGTERM_prehook_kwargs={"word": "hooked"})
        signal.raise_signal(signal.SIGTERM)
        say("between")
        one.step(1)
    """)
    code, out, err = end(process)
    assert (code, out) == (85, "between\nhooked\n")
    assert "on_SIGTERM_prehook failed (ValueError: no)" in err


def test_a_failed_last_transfer_is_reported_and_the_local_copy_stays(start, tmp_path):
    process = start("""
        one = make(checkpoint_transfer_target="far/x")
        one.checkpoint(1)
        os.rename("far", "gone")
        Path("far").write_text("a file where the folder was")
        signal.raise_signal(signal.SIGTERM)
        one.step(2)
    """)
    code, _, err = end(process)
    assert code == 85
    assert "not at the target" in err
    assert (tmp_path / "here/a b.pt").read_text() == "2"


def test_a_target_that_never_worked_is_a_failure_not_85(start, tmp_path):
    (tmp_path / "far").write_text("no folder")
    process = start("""
        one = make(checkpoint_transfer_target="far/x")
        signal.raise_signal(signal.SIGTERM)
        one.step(2)
    """)
    code, _, err = end(process)
    assert code == 1
    assert "RemoteError" in err
    assert (tmp_path / "here/a b.pt").read_text() == "2"


def test_two_checkpointers_in_one_loop_save_the_same_iteration(start):
    process = start("""
        one = make()
        two = Checkpointer(Path("here/two.pt"), write, read, checkpoint_every=None)
        say("ready")
        for value in range(10**6):
            time.sleep(0.005)
            one.step(value)
            time.sleep(0.005)
            two.step(value)
    """)
    process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 85
    out, _ = start("""
        say(make().restore(), Checkpointer(Path("here/two.pt"), write, read).restore())
    """).communicate(timeout=HUNG)
    first, second = map(int, out.split())
    assert first - second in {0, 1}  # the signal may fall between the two


def test_a_second_checkpointer_that_is_idle_does_not_keep_the_process_alive(start):
    process = start("""
        one = make()
        two = Checkpointer(Path("here/two.pt"), write, read, checkpoint_every=None)
        two.step(0)
        say("ready")
        for value in range(10**6):
            time.sleep(0.005)
            one.step(value)
    """)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 85


def test_from_another_thread_the_whole_process_leaves_with_the_code(start):
    process = start("""
        holder = make()    # the main thread traps the signals
        def work():
            one = Checkpointer(Path("here/two.pt"), write, read, checkpoint_every=None)
            say("ready")
            for value in range(10**6):
                time.sleep(0.005)
                one.step(value)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 85
    out, _ = start("""
        say(Checkpointer(Path("here/two.pt"), write, read).restore(-1) >= 0)
    """).communicate(timeout=HUNG)
    assert out == "True\n"


def test_ranks_that_agree_leave_at_the_same_step_when_one_is_signalled(start, tmp_path):
    process = start("""
        import socket
        ends = socket.socketpair()
        other = os.fork()
        rank = int(other != 0)
        mine = ends[rank]
        mine.settimeout(30)

        def agree(flag):
            mine.send(bytes([flag]))
            return bool(mine.recv(1)[0] or flag)

        one = Checkpointer(f"here/rank{rank}", write, read, checkpoint_every=None, agree=agree)
        if rank:
            say(other)
        try:
            for value in range(10**6):
                time.sleep(0.002 * (1 + rank))
                one.step(value)
        finally:
            if rank:
                say(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
    """)
    rank0 = int(process.stdout.readline())
    time.sleep(0.1)
    os.kill(rank0, signal.SIGUSR1)
    code, out, _ = end(process)
    assert (code, out) == (85, "85\n")
    assert (tmp_path / "here/rank0").read_text() == (tmp_path / "here/rank1").read_text()


def test_children_of_a_data_loader_are_not_checkpointers(start):
    process = start("""
        import multiprocessing
        one = make()
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        time.sleep(0.1)
        worker.terminate()
        worker.join()
        say(worker.exitcode, one.signals.requested)
    """)
    _, out, _ = end(process)
    assert out == f"{-signal.SIGTERM} None\n"


CONDOR = 'CheckpointExitCode = 77\nTransferCheckpoint = "a b.pt.saves"\nJobMaxVacateTime = 30\n'


def condor(tmp_path, ad=CONDOR):
    (tmp_path / "ad").write_text(ad)
    return {
        "_CONDOR_JOB_AD": str(tmp_path / "ad"),
        "_CONDOR_SCRATCH_DIR": str(tmp_path / "here"),
    }


def test_under_htcondor_a_job_exits_from_time_to_time_with_its_checkpoint_code(start, tmp_path):
    process = start(
        """
        one = make(checkpoint_transfer_mode="htcondor", checkpoint_every=1, exit_every="0.1s")
        for value in range(one.restore(-1) + 1, 10**6):
            time.sleep(0.02)
            one.step(value)
    """,
        **condor(tmp_path),
    )
    assert end(process)[0] == 77
    assert (tmp_path / "here/a b.pt.saves").is_dir()


def test_under_htcondor_a_job_without_a_save_does_not_exit_with_the_checkpoint_code(
    start, tmp_path
):
    ad = CONDOR.replace("30", "1")
    process = start(
        """
        one = make(checkpoint_transfer_mode="htcondor")
        say("ready")
        time.sleep(60)
    """,
        **condor(tmp_path, ad),
    )
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 128 + signal.SIGTERM


def test_under_htcondor_the_single_file_of_the_published_class_is_enough(start, tmp_path):
    env = condor(tmp_path, 'CheckpointExitCode = 85\nTransferCheckpoint = "a b.pt"\n')
    body = """
        one = make(checkpoint_transfer_mode="htcondor")
        value = one.restore(-1) + 1
        say(value)
        signal.raise_signal(signal.SIGUSR1)
        one.step(value)
    """
    for expected in range(3):
        assert end(start(body, **env))[:2] == (85, f"{expected}\n")
        for path in (tmp_path / "here").iterdir():  # only what is listed travels
            if path.name != "a b.pt":
                subprocess.run(["rm", "-r", path], check=True)


def test_under_htcondor_a_list_that_forgets_the_file_is_refused(start, tmp_path):
    process = start(
        'make(checkpoint_transfer_mode="htcondor")', **condor(tmp_path, "CheckpointExitCode = 85\n")
    )
    code, _, err = end(process)
    assert code == 1
    assert "transfer_checkpoint_files = a b.pt.saves" in err


SLOW_SAVE = """
    def slowly(path, value):
        say("saving")
        while not Path("go").exists():
            time.sleep(0.005)
        path.write_text(str(value))

    one = Checkpointer(
        Path("here/a b.pt"), slowly, read, checkpoint_every=EVERY, retry=Retry(1),
        checkpoint_transfer_target="far/x",
    )
    import atexit
    def at_exit():
        say("leaving")
        while not Path("gone").exists():
            time.sleep(0.005)
    atexit.register(at_exit)
    say("ready")
    if not EVERY:
        os.kill(os.getpid(), signal.FIRST)
    for value in range(10**6):
        one.step(value)
"""
ASKING = ["SIGTERM", "SIGUSR1", "SIGINT"]


@pytest.mark.parametrize("second", [*ASKING, "SIGHUP", "SIGUSR2", "SIGXCPU"])
@pytest.mark.parametrize("first", ASKING)
def test_more_signals_during_the_save_and_after_it_change_nothing(start, tmp_path, first, second):
    body = SLOW_SAVE.replace("EVERY", "None").replace("FIRST", first)
    process = start(body)
    for word, event in (("saving", "go"), ("leaving", "gone")):
        while process.stdout.readline().strip() != word:
            assert process.poll() is None
        for _ in range(3):
            process.send_signal(getattr(signal, second))
            time.sleep(0.01)  # lets the interpreter see them one by one
        (tmp_path / event).touch()
    code, _, err = end(process)
    assert (code, err) == (85, "")
    assert len(list((tmp_path / "far/x.saves").iterdir())) == 1


@pytest.mark.parametrize("number", ASKING)
def test_signals_during_a_save_by_interval_are_answered_at_the_next_step(start, tmp_path, number):
    process = start(SLOW_SAVE.replace("EVERY", "10").replace("FIRST", number))
    while process.stdout.readline().strip() != "saving":
        assert process.poll() is None
    for _ in range(3):
        process.send_signal(getattr(signal, number))
        time.sleep(0.01)
    (tmp_path / "go").touch()
    (tmp_path / "gone").touch()
    code, _, err = end(process)
    assert (code, err) == (85, "")
