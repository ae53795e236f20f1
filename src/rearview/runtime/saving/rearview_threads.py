"""Background threads: low priority, invisible to the program, abandoned after a fork."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from typing import Protocol

NICENESS = 10
"""Added to the nice value of background threads, so that training goes first."""
THREAD_PREFIX = "rearview-"
"""Start of the name of every background thread."""


def hide_background_threads() -> None:
    """Leave Rearview's threads out of `threading.enumerate()` and `active_count()`.

    Some programs wait until these functions show no other thread; Rearview's threads would make them
    wait for ever.
    """
    original = threading.enumerate

    @functools.wraps(original)
    def enumerate() -> list[threading.Thread]:  # noqa: A001 - the name that a program sees
        return [thread for thread in original() if not thread.name.startswith(THREAD_PREFIX)]

    @functools.wraps(threading.active_count)
    def active_count() -> int:
        return len(enumerate())

    threading.enumerate, threading.active_count = enumerate, active_count


def lower_priority() -> None:
    """Let training go first when cores are short; on Linux each thread has its own priority."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, now + NICENESS))


class OwnsThreads(Protocol):
    """An object whose background threads do not exist in a forked child."""

    def abandon(self) -> None:
        """Drop threads, locks and memory; called in the child."""


def abandon_in_child(owner: OwnsThreads) -> None:
    """Call `owner.abandon()` in every child that is forked while `owner` lives."""
    reference = weakref.ref(owner)

    def after_fork() -> None:
        alive = reference()
        if alive is not None:
            alive.abandon()

    os.register_at_fork(after_in_child=after_fork)
