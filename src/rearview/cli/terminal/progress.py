"""Signs that work goes on, for anything over two seconds, on stderr."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from rearview.cli.terminal import output
from rearview.cli.terminal.output import duration, plural
from rearview.model.wording import printable

if TYPE_CHECKING:
    from rearview._history import Event

PATIENCE = 2.0
"""Seconds of silence that need no explanation."""
PLAIN_EVERY = 10.0
"""Seconds between lines where stderr is no terminal."""
LINES_EVERY = 1.0
"""Seconds between events that only say how far it is, for programs."""
MOST_BARS = 16
"""Workers that have a bar of their own."""
TOTAL = -1
"""Where the bar of all workers together stands among theirs."""


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
        output.said(f"{text} …")
        return
    from rich.console import Console
    from rich.text import Text

    start = time.monotonic()
    text = printable(text, line=True)
    with Console(stderr=True).status(Text(f"{text} …")) as status:
        while not done.wait(0.5):
            since = duration(round(PATIENCE + time.monotonic() - start))
            status.update(Text(f"{text} … {since}"))


class Bar:
    """Turns the events of a backfill into bars: one for each busy worker, and one for all of it.

    Without a terminal, or where colours are not wanted, it says a line now and then. A thread of
    its own shows that time passes while no event comes; only it draws. What is kept does not grow
    with the number of segments.
    """

    def __init__(self, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet
        self._clock = clock
        self._start = self._last = clock()
        self._event: Event | None = None
        self._ended = 0
        self._rich: Any = None
        self._bars: dict[int, Any] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        self._ended += event.kind in {"proved", "failed", "filled"}
        if event.kind == "progress" or self._event is None or event.done > self._event.done:
            self._event = event

    def tick(self) -> None:
        """Show how far it is, if it has gone on for long enough."""
        now, event = self._clock(), self._event
        if event is None or now - self._start < PATIENCE:
            return
        if sys.stderr.isatty() and output.colored(sys.stderr):
            self._draw(event)
        elif now - self._last >= PLAIN_EVERY:
            self._last = now
            left = "" if event.left is None else f", about {duration(event.left)} left"
            busy = f" on {plural(event.workers, 'worker')}" if event.workers else ""
            output.said(
                f"{event.done:.0%} done, {self._ended} of {plural(event.total, 'segment')}"
                f"{_held(event)}{busy}{left}"
            )

    def _draw(self, event: Event) -> None:
        if self._rich is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._rich = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[left]}", markup=False),
                console=Console(stderr=True),
                transient=True,
            )
            self._rich.start()
            self._bars[TOTAL] = self._rich.add_task("", total=1.0, left="")
        known = {one.worker: one for one in event.under_way[:MOST_BARS]}
        for worker in [w for w in self._bars if w != TOTAL and w not in known]:
            self._rich.remove_task(self._bars.pop(worker))
        for worker, one in known.items():
            if worker not in self._bars:
                self._bars[worker] = self._rich.add_task("", total=1.0, left="")
            self._rich.update(
                self._bars[worker],
                completed=min(one.done, 1.0),
                description=f"  worker {worker + 1}: {printable(one.run, line=True)}",
                left=f"{duration(one.left)} left, {duration(one.predicted)} predicted",
            )
        more = len(event.under_way) - len(known)
        self._rich.update(
            self._bars[TOTAL],
            completed=event.done,
            description=f"{self._ended} of {plural(event.total, 'segment')}"
            + _held(event)
            + (f", {plural(more, 'more worker')}" if more > 0 else ""),
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


def _held(event: Event) -> str:
    return f", {event.held} wait for another backfill" if event.held else ""


class Lines:
    """Turns the events of a backfill into lines of JSON, for programs; docs/backfill.md has them."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    def __call__(self, event: Event) -> None:
        """Print one event; of those that only say how far it is, one a second."""
        if event.kind == "progress":
            now = self._clock()
            if self._last is not None and now - self._last < LINES_EVERY:
                return
            self._last = now
            output.json_line(
                {
                    "event": "progress",
                    "done": event.done,
                    "left": event.left,
                    "workers": event.workers,
                    "under_way": event.under_way,
                    "held": event.held,
                }
            )
            return
        told: dict[str, Any] = {"event": event.kind}
        if event.kind == "workers":
            output.json_line({**told, "workers": event.workers})
            return
        told |= {"segment": event.segment, "run": event.run, "worker": event.worker}
        if event.kind == "started":
            told["predicted"] = event.seconds
        if event.kind in {"rows", "proved", "failed"}:
            told["rows"] = event.rows
        if event.kind in {"proved", "failed"}:
            told |= {"seconds": event.seconds, "done": event.done}
        if event.kind == "again":
            told["seconds"] = event.seconds
        if event.kind == "filled":
            told["done"] = event.done
        if event.message:
            told["message"] = event.message
        output.json_line(told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return
