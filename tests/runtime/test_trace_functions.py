"""What the program does behind our back while we work: its signal handlers, its profile function."""

import os
import signal
import sys

import pytest

from rearview.runtime.program_frames import unobserved
from rearview.runtime.recorder import _raised_by_handler


class LateError(Exception):
    pass


def handle(number, frame):
    raise LateError


def test_an_exception_of_a_signal_handler_does_not_count_as_a_failure_of_rearview():
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(LateError) as caught:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert _raised_by_handler(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not _raised_by_handler(ValueError("ours"))


def test_a_profile_function_does_not_see_our_work_and_is_set_again():
    seen = []

    def profiler(frame, event, arg):
        seen.append(frame.f_code.co_name)

    def work():
        return len(seen)

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        unobserved(work)()
        kept = sys.getprofile()
    finally:
        sys.setprofile(before)
    assert kept is profiler
    assert "work" not in seen
