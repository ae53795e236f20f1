"""Copy a run to its remote after each save, so that it can be resumed if this machine is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rearview.runtime.saving.background_threads import abandon_in_child, lower_priority


class RemoteCopy:
    """Calls `push` on a background thread after each save, one call at a time.

    Saves that happen during a call are pushed together by the next one. `share` bounds the processor
    time, as a fraction of the time that passes. `warn` is called for the first of several failures
    in a row; the next save tries again.
    """

    def __init__(
        self, push: Callable[[], object], *, share: float, warn: Callable[[str], None]
    ) -> None:
        self._push, self._share, self._warn = push, max(share, 0.01), warn
        self._requested, self._closed = threading.Event(), threading.Event()
        self._pushing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failing = False
        abandon_in_child(self)

    def saved(self) -> None:
        """Start a push: a new checkpoint is durable."""
        self._requested.set()
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._work, name="rearview-remote", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Push now, on this thread; raise if that fails."""
        self._closed.set()
        self._requested.set()
        with self._pushing:
            self._push()

    def abandon(self) -> None:
        """In a forked child: do nothing, the parent pushes the run."""
        self._closed.set()
        self._thread = None

    def _work(self) -> None:
        lower_priority()
        while True:
            self._requested.wait()
            self._requested.clear()
            began = time.thread_time()
            with self._pushing:
                if self._closed.is_set():
                    return
                try:
                    self._push()
                    self._failing = False
                except Exception as exc:
                    if not self._failing:
                        self._failing = True
                        self._warn(
                            f"The last checkpoints are not at the remote: {exc} The next save tries again."
                        )
            if self._closed.wait((time.thread_time() - began) / self._share):
                return
