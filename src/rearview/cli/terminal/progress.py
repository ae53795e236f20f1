"""Show progress on stderr for work that takes more than two seconds, and print events of a backfill as JSON."""

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
    from rearview._history import Event, SegmentProgress

SHOW_AFTER = 2.0
"""Seconds that work must have taken before its progress is shown."""
PLAIN_EVERY = 10.0
"""Seconds between printed lines of progress if stderr is not a terminal."""
LINES_EVERY = 1.0
"""Minimum number of seconds between `progress` events in the JSON output."""
MAX_BARS = 16
"""Maximum number of workers that get a bar."""
TOTAL = -1
"""Key in `_bars` of the bar for the whole backfill; other keys are numbers of workers."""


@contextlib.contextmanager
def waiting(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Show `text` and the elapsed time if the body of the `with` statement runs for more than two seconds."""
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
    if done.wait(SHOW_AFTER):
        return
    if not sys.stderr.isatty():
        output.prefixed_note(f"{text} …")
        return
    from rich.console import Console
    from rich.text import Text

    start = time.monotonic()
    text = printable(text, line=True)
    with Console(stderr=True).status(Text(f"{text} …")) as status:
        while not done.wait(0.5):
            since = duration(round(SHOW_AFTER + time.monotonic() - start))
            status.update(Text(f"{text} … {since}"))


class Bar:
    """Shows the progress of a backfill as bars: one for each busy worker, and one for the whole backfill.

    If stderr is no coloured terminal, a line is printed every ten seconds. A thread of this object draws, so that the
    times shown change between events too. The memory needed does not grow with the number of segments.
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
        """Remember `event` of the backfill; the thread shows it later."""
        self._ended += event.kind in {"proved", "failed", "filled"}
        if event.kind == "progress" or self._event is None or event.fraction > self._event.fraction:
            self._event = event

    def tick(self) -> None:
        """Draw the bars, or print a line if one is due; do nothing in the first `SHOW_AFTER` seconds."""
        now, event = self._clock(), self._event
        if event is None or now - self._start < SHOW_AFTER:
            return
        if sys.stderr.isatty() and output.colored(sys.stderr):
            self._draw(event)
        elif now - self._last >= PLAIN_EVERY:
            self._last = now
            time_left = (
                "" if event.seconds_left is None else f", about {duration(event.seconds_left)} left"
            )
            busy = f" on {plural(event.workers, 'worker')}" if event.workers else ""
            output.prefixed_note(
                f"{event.fraction:.0%} done, {self._ended} of {plural(event.total, 'segment')}"
                f"{_waiting_text(event)}{busy}{time_left}"
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
        by_worker = {progress.worker: progress for progress in event.under_way[:MAX_BARS]}
        for worker in [w for w in self._bars if w != TOTAL and w not in by_worker]:
            self._rich.remove_task(self._bars.pop(worker))
        for worker, progress in by_worker.items():
            if worker not in self._bars:
                self._bars[worker] = self._rich.add_task("", total=1.0, left="")
            self._rich.update(
                self._bars[worker],
                completed=min(progress.fraction, 1.0),
                description=f"  worker {worker + 1}: {printable(progress.run, line=True)}",
                left=f"{duration(progress.seconds_left)} left, {duration(progress.predicted)} predicted",
            )
        more = len(event.under_way) - len(by_worker)
        self._rich.update(
            self._bars[TOTAL],
            completed=event.fraction,
            description=f"{self._ended} of {plural(event.total, 'segment')}"
            + _waiting_text(event)
            + (f", {plural(more, 'more worker')}" if more > 0 else ""),
            left="" if event.seconds_left is None else f"about {duration(event.seconds_left)} left",
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


def _waiting_text(event: Event) -> str:
    return (
        f", {event.claimed_elsewhere} wait for another backfill" if event.claimed_elsewhere else ""
    )


class Lines:
    """Prints each event of a backfill as a line of JSON, for programs; docs/backfill.md describes the events."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: float | None = None

    def __call__(self, event: Event) -> None:
        """Print `event`; skip a `progress` event that follows the last one within `LINES_EVERY` seconds."""
        if event.kind == "progress":
            now = self._clock()
            if self._last is not None and now - self._last < LINES_EVERY:
                return
            self._last = now
            output.json_line(
                {
                    "event": "progress",
                    "done": event.fraction,
                    "left": event.seconds_left,
                    "workers": event.workers,
                    "under_way": [_segment_fields(segment) for segment in event.under_way],
                    "held": event.claimed_elsewhere,
                }
            )
            return
        fields: dict[str, Any] = {"event": event.kind}
        if event.kind == "workers":
            output.json_line({**fields, "workers": event.workers})
            return
        fields |= {"segment": event.segment, "run": event.run, "worker": event.worker}
        if event.kind == "started":
            fields["predicted"] = event.seconds
        if event.kind in {"rows", "proved", "failed"}:
            fields["rows"] = event.rows
        if event.kind in {"proved", "failed"}:
            fields |= {"seconds": event.seconds, "done": event.fraction}
        if event.kind == "again":
            fields["seconds"] = event.seconds
        if event.kind == "filled":
            fields["done"] = event.fraction
        if event.message:
            fields["message"] = event.message
        output.json_line(fields)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return


def _segment_fields(progress: SegmentProgress) -> dict[str, Any]:
    """Return the progress of a running segment as a dictionary with the names of docs/backfill.md."""
    return {
        "worker": progress.worker,
        "segment": progress.segment,
        "run": progress.run,
        "done": progress.fraction,
        "spent": progress.spent,
        "predicted": progress.predicted,
        "left": progress.seconds_left,
        "rows": progress.rows,
    }
