"""Server-sent events that tell the pages open in browsers which runs changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from rearview.web.run_index import Index

MOST_LISTENERS = 12
"""Maximum number of pages that listen at the same time; any further page is refused."""
MOST_WAITING = 200
"""Maximum number of events that wait for one slow page. Beyond it, its events are dropped, and it reloads all data."""
BEAT = 20.0
"""Seconds without an event after which an empty message is sent, so that the connection stays open."""
LISTENING_PAUSE, IDLE_PAUSE = 1.0, 10.0
"""Seconds between refreshes of the index while a page listens, and while no page listens."""
SHARE = 20
"""The pause after a refresh is at least this many times as long as the refresh took."""


class Live:
    """Refreshes the index of runs at intervals, and tells the pages that listen which runs changed."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._listeners: set[asyncio.Queue[bytes | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = threading.Event()
        self._runs_to_check: set[str] = set()
        self._failure: list[str] = []
        self._ended = False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Start the thread that refreshes the index; call this in the server's event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def close(self) -> None:
        """Stop refreshing the index, and end the connections of all pages."""
        self._ended = True
        self._wake.set()
        for queue in self._listeners:
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)

    def join(self) -> None:
        """Wait until the thread has ended, after `close`; at most 30 seconds."""
        if self._thread.is_alive():
            self._thread.join(30.0)

    def look_now(self, runs: Iterable[str] = ()) -> None:
        """Make the thread refresh the index now; the refresh checks the files of `runs` in any case."""
        self._runs_to_check.update(runs)
        self._wake.set()

    @property
    def full(self) -> bool:
        """Whether `MOST_LISTENERS` pages listen, so that no further page can."""
        return len(self._listeners) >= MOST_LISTENERS

    def _refreshed(self) -> list[str] | None:
        """Refresh the index; return the ids of the runs that changed, or None if the refresh failed.

        A refresh may fail, for example because a run folder is removed while it is read. The failure is shown as a
        problem and does not end the thread; the next refresh tries again.
        """
        runs_to_check, self._runs_to_check = self._runs_to_check, set()
        try:
            changed = self._index.refresh(runs_to_check)
        except Exception as exc:
            self._runs_to_check |= runs_to_check
            self._failure = [f"The runs could not be read, and will be read again: {exc!r}."]
            self._index.problems = self._failure
            return None
        if self._index.problems is self._failure:
            self._index.problems = []
        return changed

    def _watch(self) -> None:
        while not self._ended:
            changed = self._refreshed()
            if changed:
                self.tell(
                    {
                        "type": "changed",
                        "revision": self._index.revision,
                        "runs": changed[:100],
                        "count": len(self._index.entries),
                        "pending": self._index.pending,
                    }
                )
            if self._index.pending and changed is not None:
                continue
            pause = max(
                LISTENING_PAUSE if self._listeners else IDLE_PAUSE, SHARE * self._index.scanned
            )
            self._wake.wait(pause)
            self._wake.clear()

    def tell(self, event: dict[str, Any]) -> None:
        """Send an event to every page that listens; may be called from any thread."""
        data = b"data: " + msgspec.json.encode(event) + b"\n\n"
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._spread, data)

    def _spread(self, data: bytes) -> None:
        for queue in self._listeners:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(b'data: {"type":"resync"}\n\n')
            else:
                queue.put_nowait(data)

    async def listen(self) -> AsyncIterator[bytes]:
        """Yield the events for one page as bytes to send, each when it happens, until `close` is called."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        self._listeners.add(queue)
        self._wake.set()
        try:
            yield b'retry: 3000\ndata: {"type":"hello","revision":%d}\n\n' % self._index.revision
            while not self._ended:
                try:
                    data = await asyncio.wait_for(queue.get(), BEAT)
                except TimeoutError:
                    data = b":\n\n"
                if data is None:
                    return
                yield data
        finally:
            self._listeners.discard(queue)
