"""Signs that work goes on, for anything over two seconds, on stderr."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from rearview.cli import show
from rearview.cli.formats import duration

if TYPE_CHECKING:
    from rearview.past import Event

PATIENCE = 2.0
"""Seconds of silence that need no explanation."""
PLAIN_EVERY = 10.0
"""Seconds between lines where stderr is no terminal."""


@contextlib.contextmanager
def waiting(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Show `text` with a clock while the body runs, once it has run for two seconds."""
    if quiet:
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_spin, args=(text, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _spin(text: str, done: threading.Event) -> None:
    if done.wait(PATIENCE):
        return
    if not sys.stderr.isatty():
        show.said(f"{text} …")
        return
    from rich.console import Console

    start = time.monotonic()
    with Console(stderr=True).status(f"{text} …") as status:
        while not done.wait(0.5):
            status.update(f"{text} … {duration(round(PATIENCE + time.monotonic() - start))}")


class Bar:
    """Turns the events of a backfill into one progress bar, or into lines without a terminal."""

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet
        self._clock = clock
        self._start = self._last = clock()
        self._rich: Any = None
        self._task: Any = None
        self._parts: dict[int, float] = {}

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        self._parts[event.segment] = 1.0 if event.kind == "finished" else event.done
        now = self._clock()
        if self._quiet or now - self._start < PATIENCE:
            return
        share = min(1.0, sum(self._parts.values()) / max(event.total, 1))
        if sys.stderr.isatty():
            self._draw(event, share)
        elif now - self._last >= PLAIN_EVERY:
            self._last = now
            show.said(f"{share:.0%} of {event.total} segments{_left(event)}")

    def _draw(self, event: Event, share: float) -> None:
        if self._rich is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

            self._rich = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[left]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._rich.start()
            self._task = self._rich.add_task("replaying", total=1.0, left="")
        finished = sum(done >= 1.0 for done in self._parts.values())
        self._rich.update(
            self._task,
            completed=share,
            description=f"segment {min(finished + 1, event.total)} of {event.total}",
            left=_left(event).removeprefix(", "),
        )

    def close(self) -> None:
        """Take the bar away."""
        if self._rich is not None:
            self._rich.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _left(event: Event) -> str:
    return "" if event.left is None else f", about {duration(event.left)} left"
