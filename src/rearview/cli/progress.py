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
    """Turns the events of a backfill into one progress bar, or into lines without a terminal.

    A thread of its own shows that time passes while no event comes; only it draws.
    """

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet
        self._clock = clock
        self._start = self._last = clock()
        self._event: Event | None = None
        self._finished = 0
        self._rich: Any = None
        self._task: Any = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        self._finished += event.kind == "finished"
        self._event = event

    def tick(self) -> None:
        """Show how far it is, if it has gone on for long enough."""
        now, event = self._clock(), self._event
        if event is None or now - self._start < PATIENCE:
            return
        if sys.stderr.isatty():
            self._draw(event)
        elif now - self._last >= PLAIN_EVERY:
            self._last = now
            left = "" if event.left is None else f", about {duration(event.left)} left"
            show.said(f"{event.done:.0%} done, {self._finished} of {event.total} segments{left}")

    def _draw(self, event: Event) -> None:
        if self._rich is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._rich = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._rich.start()
            self._task = self._rich.add_task("", total=1.0, left="")
        self._rich.update(
            self._task,
            completed=event.done,
            description=f"segment {min(self._finished + 1, event.total)} of {event.total}",
            left="" if event.left is None else f"about {duration(event.left)} left",
        )

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            self.tick()

    def __enter__(self) -> Self:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._rich is not None:
            self._rich.stop()
