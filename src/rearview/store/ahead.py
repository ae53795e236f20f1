"""Names of large buffers, found by a thread that runs ahead of the one that writes them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Self

from rearview.model import ObjectRef
from rearview.store.objects import named


class Ahead:
    """References to `views`, in order. Hashing holds no interpreter lock, nor does writing."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self.cpu = 0.0
        """Processor seconds that the thread has used."""
        self._views = views
        self._given = 0
        self._stopped = False
        self._found: queue.SimpleQueue[ObjectRef | BaseException] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def next(self) -> ObjectRef:
        """Return the reference of the next buffer."""
        view = self._views[self._given]
        self._given += 1
        if self._thread is None:
            return named(view)
        found = self._found.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def __enter__(self) -> Self:
        if len(self._views) > 1:
            thread = threading.Thread(target=self._work, name="rearview-hash", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return self  # the interpreter is ending: no new threads, hash in between
            self._thread = thread
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        began = time.thread_time()
        try:
            for view in self._views:
                if self._stopped:
                    break
                self._found.put(named(view))
        except BaseException as exc:
            self._found.put(exc)
        self.cpu = time.thread_time() - began
