import random

import pytest

from rearview.errors import RemoteError, UsageError
from rearview.remote.base import Retry


class Clock:
    def __init__(self):
        self.now, self.slept = 0.0, []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def __call__(self):
        return self.now


def failing(times, error=ConnectionError):
    calls = []

    def action():
        calls.append(1)
        if len(calls) <= times:
            raise error(f"call {len(calls)}")
        return len(calls)

    return action


def test_a_retry_returns_as_soon_as_one_attempt_succeeds():
    clock = Clock()
    retry = Retry(attempts=5, first=1, spread=0, sleep=clock.sleep, clock=clock)
    assert retry.call("x", failing(2)) == 3
    assert clock.slept == [1, 2]


def test_the_error_after_all_attempts_says_what_was_tried_and_why_it_failed():
    clock = Clock()
    retry = Retry(attempts=3, sleep=clock.sleep, clock=clock)
    with pytest.raises(RemoteError, match=r"Sending a did not succeed after 3 attempts.*call 3"):
        retry.call("Sending a", failing(9))


def test_pauses_grow_to_a_limit_and_are_spread():
    pauses = list(Retry(attempts=12, first=1, limit=10, spread=0.5).pauses())
    assert max(pauses) <= 10
    assert all(p >= 0.5 * min(10, 2**n) for n, p in enumerate(pauses))


def test_a_failure_that_would_repeat_is_not_retried():
    clock = Clock()
    with pytest.raises(RemoteError, match=r"1 attempt.*credentials"):
        Retry(sleep=clock.sleep, clock=clock).call("x", failing(1, PermissionError))
    assert clock.slept == []


def test_an_error_of_rearview_passes_through_without_a_retry():
    with pytest.raises(UsageError):
        Retry().call("x", failing(1, UsageError))


def test_no_attempt_begins_after_patience_has_run_out():
    clock = Clock()
    retry = Retry(attempts=100, first=1, spread=0, patience=10, sleep=clock.sleep, clock=clock)
    with pytest.raises(RemoteError):
        retry.call("x", failing(1000))
    assert clock.now <= 10


def test_waiting_draws_no_number_from_the_program_that_trains():
    random.seed(3)
    expected = random.random()
    random.seed(3)
    list(Retry(attempts=9).pauses())
    assert random.random() == expected
