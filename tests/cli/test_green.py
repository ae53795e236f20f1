import os
import signal
import subprocess
import sys
from datetime import datetime

import click
import pytest

from limits import HUNG
from rearview.checkpointer.supervisor import Supervisor
from rearview.cli.green import parse_time
from rearview.model.run import EXIT_PAUSED

NOON = datetime(2026, 5, 1, 12, 0).astimezone().timestamp()


def test_a_time_of_day_is_the_next_one():
    assert parse_time("18:30", NOON) == NOON + 6.5 * 3600
    assert parse_time("08:00", NOON) == NOON + 20 * 3600


def test_a_date_is_that_date_and_a_span_counts_from_when_it_was_asked_for():
    assert parse_time("2026-05-02T12:00", NOON) == NOON + 24 * 3600
    assert parse_time("90m", NOON) == NOON + 5400


def test_a_text_that_is_no_time_is_reported(command, tmp_path, monkeypatch):
    with pytest.raises(click.BadParameter, match="'tomorrow' is not a time"):
        parse_time("tomorrow", NOON)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    code, _, err = command("run", "--green", "--by", "tomorrow", "train.py")
    assert code == 2
    assert "is not a time" in err


def test_options_of_a_green_run_need_the_option_green(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    code, _, err = command("run", "--share", "60", "train.py")
    assert code == 2
    assert "go with --green" in err


TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.fixture
def interruptible():
    """Python's own handler of Ctrl-C, which a shell's background jobs are started without."""
    before = signal.signal(INT, signal.default_int_handler)
    yield
    signal.signal(INT, before)


@pytest.mark.parametrize(
    ("number", "left"), [(TERM, SystemExit), (INT, KeyboardInterrupt)], ids=["TERM", "INT"]
)
def test_a_signal_that_comes_where_exceptions_are_lost_is_heard_by_the_next_wait(
    interruptible, number, left
):
    class Last:
        def __del__(self):
            signal.raise_signal(number)

    with Supervisor((TERM,)) as supervisor:
        last = Last()
        del last  # what is raised in there nobody hears
        with pytest.raises(left):
            supervisor.sleep(600)


def test_handlers_are_given_back():
    signal.set_wakeup_fd(-1)  # an event loop of another test may have left its own
    before = signal.getsignal(TERM), signal.getsignal(INT)
    with Supervisor((TERM,)):
        assert signal.getsignal(TERM) != before[0]
    assert (signal.getsignal(TERM), signal.getsignal(INT)) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_second_signal_insists():
    with Supervisor((TERM,)) as supervisor:
        signal.raise_signal(TERM)
        with pytest.raises(SystemExit) as left:
            signal.raise_signal(TERM)
        assert supervisor.pause_requested
    assert left.value.code == EXIT_PAUSED


WAITS = """
import os, random, signal, sys, threading, time
from rearview.checkpointer.supervisor import Supervisor

shots = random.Random(7)
for k in range(400):
    number = (signal.SIGTERM, signal.SIGINT)[k % 2]
    with Supervisor((signal.SIGTERM,)) as supervisor:
        ready = threading.Event()

        def shoot():
            ready.wait()
            until = time.perf_counter() + shots.random() * 1e-4
            while time.perf_counter() < until:
                pass
            os.kill(os.getpid(), number)

        thread = threading.Thread(target=shoot)
        thread.start()
        try:
            ready.set()
            while True:
                supervisor.sleep(600)
        except (SystemExit, KeyboardInterrupt) as left:
            print(type(left).__name__, end=" ")
        thread.join()
"""


def test_no_signal_is_lost_just_as_a_wait_begins(interruptible):
    done = subprocess.run(
        [sys.executable, "-c", WAITS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )
    assert done.stdout.split() == ["SystemExit", "KeyboardInterrupt"] * 200, done.stderr
