"""What threads beside training keep to: they stand back behind it, and are not there after a fork."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol

NICE = 10
"""How far background threads stand back behind training when cores are short."""


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
