"""What threads beside training keep to: they stand back behind it, and are not there after a fork."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from typing import Protocol

NICE = 10
"""How far background threads stand back behind training when cores are short."""


PREFIX = "rearview-"
"""How the name of every background thread begins."""


def hide_background_threads() -> None:
    """Leave our threads out of `threading.enumerate()` and `active_count()`.

    Programs wait for their threads by these numbers; ours would make them wait for ever.
    """
    listed = threading.enumerate

    @functools.wraps(listed)
    def enumerate() -> list[threading.Thread]:  # noqa: A001 - the name that a program sees
        return [thread for thread in listed() if not thread.name.startswith(PREFIX)]

    @functools.wraps(threading.active_count)
    def active_count() -> int:
        return len(enumerate())

    threading.enumerate, threading.active_count = enumerate, active_count


class Abandons(Protocol):
    """Something whose threads a forked child does not have."""

    def abandon(self) -> None:
        """Let go of everything, in a child."""


def stand_back() -> None:
    """Let training go first when cores are short; a thread has its own priority on Linux."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, now + NICE))


def abandon_in_child(owner: Abandons) -> None:
    """Have `owner` let go in every child that is forked while it lives."""
    known = weakref.ref(owner)

    def after() -> None:
        here = known()
        if here is not None:
            here.abandon()

    os.register_at_fork(after_in_child=after)
