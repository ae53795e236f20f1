"""Bring a run to its remote after each save, so that it goes on elsewhere if this machine is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rearview.runtime.saving.writer import abandon_in_child, stand_back


class Bringer:
    """Calls `push` in a background thread after each save: one at a time, the newest state only.

    `share` bounds the processor time that it may take from training. `warn` is called once for each
    row of failures; the save after one tries again.
    """

    def __init__(
        self, push: Callable[[], object], *, share: float, warn: Callable[[str], None]
    ) -> None:
        self._push, self._share, self._warn = push, max(share, 0.01), warn
        self._wanted, self._closed = threading.Event(), threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failing = False
        abandon_in_child(self)

    def saved(self) -> None:
        """Note that there is something new to bring away."""
        self._wanted.set()
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._work, name="rearview-bring", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Bring away what there is, now and in this thread; raise if that fails."""
        self._closed.set()
        self._wanted.set()
        with self._one_at_a_time:
            self._push()

    def abandon(self) -> None:
        """In a forked child: the run is the parent's to bring away."""
        self._closed.set()
        self._thread = None

    def _work(self) -> None:
        stand_back()
        while True:
            self._wanted.wait()
            self._wanted.clear()
            began = time.thread_time()
            with self._one_at_a_time:
                if self._closed.is_set():
                    return
                try:
                    self._push()
                    self._failing = False
                except Exception as exc:
                    if not self._failing:
                        self._failing = True
                        self._warn(
                            f"What was saved is not at the remote: {exc} The next save tries again."
                        )
            if self._closed.wait((time.thread_time() - began) / self._share):
                return
