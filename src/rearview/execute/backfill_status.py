"""How a running backfill is getting on: its status file, its events, and how far each replay is.

A backfill publishes its status in `.rearview/backfills/<id>.json`, and any terminal that sees the store
may write the number of workers it should use to `<id>.workers`. The process that runs the backfill also
passes events to a listener; how far a replay is, it reads from the records that the replay has written.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rearview.store.create_files import make_folder, publish
from rearview.store.machine import is_alive, process_identity
from rearview.store.project import Project

READ_EVERY = 0.5
"""Seconds between reads of the requested number of workers."""
HEARTBEAT = 5.0
"""Seconds between updates of an unchanged status file."""
SILENT = 60.0
"""Seconds without an update after which other backfills ignore the claims of a backfill."""
FORMAT = 1


class BackfillStatus(msgspec.Struct, frozen=True):
    """The status that a running backfill publishes about itself."""

    id: str
    names: tuple[str, ...]
    started: float
    workers: int
    """How many segments may run at once now."""
    busy: int
    """How many segments run now."""
    segments: int
    ended: int
    left: float | None = None
    """Predicted seconds until all segments have ended."""
    on: str = "local"
    process: dict[str, Any] = {}
    heartbeat: float = HEARTBEAT
    format: int = FORMAT


def folder_of(project: Project) -> Path:
    """Return the folder with the status files of backfills."""
    return project.store / "backfills"


def running_backfills(project: Project) -> list[BackfillStatus]:
    """Return the backfills that run now, oldest first; remove the files that dead ones left."""
    running = []
    for file in sorted(folder_of(project).glob("*.json")):
        try:
            status = msgspec.json.decode(file.read_bytes(), type=BackfillStatus)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if status.format == FORMAT and is_alive({**status.process, "heartbeat": HEARTBEAT}, file):
            running.append(status)
        else:
            _remove(file)
    return sorted(running, key=lambda status: status.started)


def active_backfills(project: Project) -> frozenset[str]:
    """Return the ids of the backfills that run and are not suspended."""
    active = set()
    for status in running_backfills(project):
        with contextlib.suppress(OSError):
            updated = (folder_of(project) / f"{status.id}.json").stat().st_mtime
            if time.time() - updated < SILENT:
                active.add(status.id)
    return frozenset(active)


def request_workers(project: Project, backfill: str, workers: int) -> None:
    """Tell a running backfill how many workers to use from now on."""
    publish(folder_of(project) / f"{backfill}.workers", b"%d\n" % workers, durable=False)


@dataclass
class StatusFile:
    """Publishes the status of one backfill and reads how many workers it should use."""

    project: Project
    names: Sequence[str]
    on: str = "local"
    _requested: int | None = None
    _last_read: float = 0.0
    _last_write: float = 0.0
    _last_counts: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        self._started = time.time()
        self.id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        self._file = folder_of(self.project) / f"{self.id}.json"

    @contextlib.contextmanager
    def open(self) -> Iterator[StatusFile]:
        """Publish the status as long as the body runs.

        It is published at once, because claims of a backfill count only while its status is there.
        """
        self.update(workers=0, busy=0, segments=0, ended=0, left=None)
        try:
            yield self
        finally:
            _remove(self._file)

    def requested_workers(self) -> int | None:
        """Return how many workers another terminal has requested; None if no number was requested."""
        now = time.monotonic()
        if now - self._last_read >= READ_EVERY:
            self._last_read = now
            with contextlib.suppress(OSError, ValueError):
                self._requested = max(1, int(self._file.with_suffix(".workers").read_text("ascii")))
        return self._requested

    def update(
        self, *, workers: int, busy: int, segments: int, ended: int, left: float | None
    ) -> None:
        """Publish the status: at once if the counts have changed, else every few seconds."""
        now, counts = time.monotonic(), (workers, busy, ended)
        if counts == self._last_counts and now - self._last_write < HEARTBEAT:
            return
        self._last_counts, self._last_write = counts, now
        status = BackfillStatus(
            id=self.id,
            names=tuple(self.names),
            started=self._started,
            workers=workers,
            busy=busy,
            segments=segments,
            ended=ended,
            left=left,
            on=self.on,
            process=process_identity(),
        )
        # without a status file the backfill still runs; other terminals just do not see it
        with contextlib.suppress(OSError):
            make_folder(self._file.parent)
            publish(self._file, msgspec.json.encode(status), durable=False)


def _remove(file: Path) -> None:
    for path in (file, file.with_suffix(".workers")):
        with contextlib.suppress(OSError):
            path.unlink()


@dataclass(frozen=True, slots=True)
class SegmentProgress:
    """How far one running segment is."""

    worker: int
    segment: int
    run: str
    done: float
    """Fraction of the segment that is done, from its records if there are any, else predicted. It never
    decreases, not even if the segment runs again."""
    spent: float
    """Seconds since it started."""
    predicted: float
    """Seconds left according to the plan."""
    left: float
    """Seconds left according to its real speed."""
    rows: int = 0
    """Records that it has written so far."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a segment of a running backfill."""

    kind: str
    """`started`; `progress`, several times a second; `rows`, when there are new records; at the end
    `proved`, `failed`, or `filled` (by another backfill). Also `again`: it differed or could not be
    restored, and runs once more from the start of the run; `lost`: its process was killed;
    `returned`: its worker was taken away; `workers`: their number has changed."""
    segment: int
    total: int
    """How many segments there are."""
    run: str
    done: float = 0.0
    """Fraction of all predicted seconds that is done; it never decreases from one event to the next."""
    seconds: float = 0.0
    """Predicted seconds when a segment starts; real seconds when it has ended."""
    left: float | None = None
    """Predicted seconds until all segments have ended."""
    message: str = ""
    worker: int | None = None
    rows: int = 0
    """Records that it has written so far."""
    workers: int = 0
    under_way: tuple[SegmentProgress, ...] = ()
    """With `progress`: one for each running segment."""
    held: int = 0
    """With `progress`: segments that wait because another backfill has claimed them."""


Progress = Callable[[Event], None]

ENDED = frozenset({"proved", "failed", "filled"})
"""Kinds of events that end a segment."""


_LEAST_LEFT = 0.1
"""A running segment has at least this fraction of its seconds so far left."""
_MAX_READ = 1 << 20
"""Bytes that are read at once."""


class _FileHead(msgspec.Struct):
    origin: str = ""


class _RecordPoint(msgspec.Struct):
    l: list[str] = []  # noqa: E741 - as the record files spell it
    i: list[int] = []


@dataclass
class RecordTail:
    """Reads the record files of one replay as they grow, in constant memory."""

    folder: Path
    """Folder of the run."""
    replay: str
    loop: str | None = None
    iterations: Sequence[int] = ()
    """Iterations of `loop` that the replay runs, in order."""
    rows: int = 0
    """Lines that were written: one for each log call."""
    reached: float | None = None
    """Fraction of `iterations` up to the last record; None before the first record."""
    _other_files: set[str] = field(default_factory=set)
    _files: dict[str, int] = field(default_factory=dict)
    """Name -> bytes that were read."""

    def read(self) -> bool:
        """Read the new records; return True if there are any."""
        before = self.rows
        with contextlib.suppress(OSError):
            self._find_files()
            for name in self._files:
                self._read(name)
        return self.rows > before

    def _find_files(self) -> None:
        with os.scandir(self.folder) as entries:
            names = [e.name for e in entries if e.name.startswith("records-")]
        for name in names:
            if name in self._other_files or name in self._files or not name.endswith(".jsonl"):
                continue
            with (self.folder / name).open("rb") as file:
                head = file.readline(_MAX_READ)
            if not head.endswith(b"\n"):
                continue  # its first line is still being written
            try:
                own = msgspec.json.decode(head, type=_FileHead).origin == self.replay
            except (msgspec.MsgspecError, UnicodeDecodeError):
                own = False
            if own:
                self._files[name] = len(head)
            else:
                self._other_files.add(name)

    def _read(self, name: str) -> None:
        with (self.folder / name).open("rb") as file:
            file.seek(self._files[name])
            data = file.read(_MAX_READ)
        whole = data[: data.rfind(b"\n") + 1]
        self._files[name] += len(whole)
        lines = [line for line in whole.splitlines() if not line.startswith(b'{"end"')]
        self.rows += len(lines)
        for line in reversed(lines):
            try:
                point = msgspec.json.decode(line, type=_RecordPoint)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if point.l and point.l[0] == self.loop and self.iterations:
                position = bisect_left(self.iterations, point.i[0])
                fraction = min(position + 0.5, len(self.iterations)) / len(self.iterations)
                self.reached = max(fraction, self.reached or 0.0)
                return


@dataclass(slots=True)
class Eta:
    """How many seconds a running segment has left, from the prediction and from its real speed.

    >>> eta = Eta(predicted=100.0, started=0.0)
    >>> eta.left(30.0, None), eta.left(40.0, 0.25), eta.left(60.0, 0.5)
    (70.0, 60.0, 40.0)
    """

    predicted: float
    started: float
    _first: tuple[float, float] | None = None
    """When the first record was seen, and the fraction then: the set-up comes before it."""

    def left(self, now: float, reached: float | None, slowdown: float = 1.0) -> float:
        """Return the seconds left; `slowdown`: real seconds per predicted second of other segments."""
        spent = now - self.started
        # a segment that takes longer than predicted is not at its end yet
        by_plan = max(_LEAST_LEFT * spent, self.predicted * slowdown - spent)
        if reached is None:
            return by_plan
        if self._first is None:
            self._first = (now, reached)
        when, fraction = self._first
        if reached <= fraction or now <= when:
            return by_plan
        return (1.0 - reached) * (now - when) / (reached - fraction)
