"""Signals are noticed and earlier handlers keep working; each case in its own process."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest

from limits import HUNG
from rearview.checkpointer.signals import Signals, SignalsWarning

SRC = Path(__file__).parents[2] / "src"


def run(body, *, timeout=HUNG):
    program = (
        "import os, signal, sys, threading, time\nfrom rearview.checkpointer.signals import *\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_a_signal_is_remembered_and_nothing_else_happens():
    with Signals((signal.SIGUSR1,)) as signals:
        assert signals.requested is None
        signal.raise_signal(signal.SIGUSR1)
        assert signals.requested is signal.SIGUSR1


def test_the_handlers_from_before_are_back_afterwards():
    before = signal.getsignal(signal.SIGUSR1)
    with Signals((signal.SIGUSR1,)):
        assert signal.getsignal(signal.SIGUSR1) is not before
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_first_signal_counts():
    with Signals((signal.SIGUSR1, signal.SIGTERM)) as signals:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        assert signals.requested is signal.SIGUSR1
        signals.clear()
        assert signals.requested is None


@pytest.fixture
def earlier():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGUSR1, before)


def test_an_earlier_handler_is_called_too(earlier):
    with Signals((signal.SIGUSR1,)) as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert earlier == [signal.SIGUSR1]
        assert signals.requested


def test_an_earlier_handler_that_exits_is_held_back():
    done = run("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        with Signals() as signals:
            signal.raise_signal(signal.SIGTERM)
            print("still here", signals.requested.name)
    """)
    assert (done.stdout, done.returncode) == ("still here SIGTERM\n", 0)


def test_a_handler_set_after_ours_that_calls_ours_does_not_go_round_in_circles():
    done = run("""
        signals = Signals().start()
        ours = signal.getsignal(signal.SIGTERM)
        calls = []
        def theirs(number, frame):
            calls.append(number)
            ours(number, frame)
        signal.signal(signal.SIGTERM, theirs)
        signals.rearm()
        signal.raise_signal(signal.SIGTERM)
        print(len(calls), signals.requested.name)
    """)
    assert done.stdout == "1 SIGTERM\n"


def test_several_notice_the_same_signal_and_stop_in_any_order(earlier):
    first = Signals((signal.SIGUSR1,)).start()
    second = Signals((signal.SIGUSR1,)).start()
    first.stop()
    signal.raise_signal(signal.SIGUSR1)
    assert first.requested is None
    assert second.requested is signal.SIGUSR1
    second.stop()
    signal.raise_signal(signal.SIGUSR1)
    assert len(earlier) == 2


def test_when_all_were_let_go_without_a_stop_the_signal_kills_as_before():
    done = run("""
        Signals().start()
        signal.raise_signal(signal.SIGTERM)
        print("survived")
    """)
    assert (done.stdout, done.returncode) == ("", -signal.SIGTERM)


def test_a_second_interrupt_gets_through():
    done = run("""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
        with Signals((signal.SIGINT,)) as signals:
            signal.raise_signal(signal.SIGINT)
            print("first", signals.requested.name)
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                print("second")
    """)
    assert done.stdout == "first SIGINT\nsecond\n"


def test_a_forked_child_dies_of_a_signal_that_its_parent_does_not_notice():
    done = run("""
        signals = Signals(grace=60, on_deadline=print).start()
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(1)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        time.sleep(0.2)
        print(signals.requested, flush=True)
        os._exit(0)
    """)
    assert done.stdout == f"{-signal.SIGTERM}\nNone\n"


def test_outside_the_main_thread_a_warning_says_that_signals_are_not_noticed():
    caught = []

    def work():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            signals = Signals((signal.SIGUSR2,)).start()
            caught.extend(found)
            assert not signals.armed
            signals.stop()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [w.category for w in caught] == [SignalsWarning]
    assert "main thread" in str(caught[0].message)


def test_outside_the_main_thread_signals_that_the_main_thread_handles_are_noticed():
    joined = []
    with Signals((signal.SIGUSR1,)):
        thread = threading.Thread(target=lambda: joined.append(Signals((signal.SIGUSR1,)).start()))
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGUSR1)
        assert joined[0].requested is signal.SIGUSR1
        joined[0].stop()


def test_the_deadline_holds_even_inside_native_code():
    # one hash over much memory is native code that no Python handler can interrupt
    done = run("""
        import zlib
        def late(number):
            print("deadline", number.name, flush=True)
            os._exit(85)
        signals = Signals(grace=0.2, on_deadline=late).start()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        data = bytes(1 << 30)
        while True:
            zlib.crc32(data)
    """)
    assert (done.stdout, done.returncode) == ("deadline SIGTERM\n", 85)


def test_a_request_that_is_settled_in_time_passes_the_deadline_unused():
    late = []
    clock = iter(range(100)).__next__
    with Signals((signal.SIGUSR1,), grace=0.05, on_deadline=late.append, clock=clock) as signals:
        signals.request(signal.SIGUSR1)
        assert signals.remaining is not None
        signals.settle()
        threading.Event().wait(0.15)
    assert late == []


def test_a_wakeup_descriptor_from_before_still_gets_its_bytes():
    done = run("""
        import socket
        mine, theirs = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        with Signals(grace=60, on_deadline=print):
            signal.raise_signal(signal.SIGTERM)
            mine.settimeout(10)
            print(mine.recv(1)[0])
            os._exit(0) if sys.stdout.flush() is None else None
    """)
    assert done.stdout == f"{int(signal.SIGTERM)}\n"
