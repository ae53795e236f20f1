"""Errands in a background thread, one at a time; what goes wrong there is raised in front."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Courier:
    """Runs errands in a thread, one after the other; at most one waits for its turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._next: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether an errand is under way."""
        return self._thread is not None

    def send(self, errand: Callable[[], None]) -> None:
        """Begin `errand` after the one under way has ended; it replaces one that still waits."""
        with self._lock:
            self._next = errand
            if self._thread is None:
                # not a daemon: a program that ends by itself waits for the save it began
                self._thread = threading.Thread(target=self._run, name=self.name)
                self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is under way and nothing waits; return True if that is so."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        return not self.busy

    def check(self) -> None:
        """Raise what went wrong since the last check."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._lock:
                errand, self._next = self._next, None
                if errand is None:
                    self._thread = None
                    return
            try:
                errand()
            except BaseException as exc:
                self._error = exc
