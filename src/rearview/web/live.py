"""Server-sent events that tell open pages which runs changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from rearview.web.run_index import Index

MOST_LISTENERS = 12
"""Most pages that can listen at the same time; any further page is refused."""
MOST_WAITING = 200
"""Most events that wait for one page. If a slow page has more, they are dropped and the page loads all data again."""
BEAT = 20.0
"""Seconds between empty messages, which keep the connection open while nothing happens."""
LISTENING_PAUSE, IDLE_PAUSE = 1.0, 10.0
"""Seconds between refreshes while a page listens, and while no page listens."""
SHARE = 20
"""A pause is at least this many times as long as the refresh before it."""


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
        """Wait until the current refresh has ended."""
        if self._thread.is_alive():
            self._thread.join(30.0)

    def look_now(self, runs: Iterable[str] = ()) -> None:
        """Refresh the index at once; read the folders of `runs` even if they seem unchanged."""
        self._runs_to_check.update(runs)
        self._wake.set()

    @property
    def full(self) -> bool:
        """Whether no more pages can listen."""
        return len(self._listeners) >= MOST_LISTENERS

    def _refreshed(self) -> list[str] | None:
        """Refresh the index; return the runs that changed, or None if the refresh failed.

        A run folder may be removed while it is read. The next refresh reads it again, so a failure is
        shown as a problem and does not end the thread.
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
        """Yield the events for one page, each when it happens."""
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
