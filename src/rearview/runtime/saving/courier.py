"""One errand at a time in the background; what goes wrong there is raised in front."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Courier:
    """Runs errands in a thread, one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether an errand is under way."""
        return self._thread is not None and self._thread.is_alive()

    def send(self, errand: Callable[[], None]) -> None:
        """Begin `errand` after the one under way has ended."""
        self.wait()
        # not a daemon: a program that ends by itself waits for the save it began
        self._thread = threading.Thread(target=self._run, args=(errand,), name=self.name)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is under way; say whether that is so."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        return not self.busy

    def check(self) -> None:
        """Raise what went wrong since the last check."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, errand: Callable[[], None]) -> None:
        try:
            errand()
        except BaseException as exc:
            self._error = exc
