"""Publish the progress of a running backfill: its status file, and events for the terminal that runs it.

A backfill publishes its status in `.rearview/backfills/<id>.json`. Any terminal that sees the store may write to
`<id>.workers` how many workers the backfill should use. For each change, the process that runs the backfill also
passes an `Event` to a function of the command line. `RecordTail` reads how far a replay is from the records that it
writes.
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
from rearview.store.machine_and_process import is_alive, process_identity
from rearview.store.project import Project

READ_EVERY = 0.5
"""Seconds between reads of the requested number of workers."""
HEARTBEAT = 5.0
"""Seconds after which a status file is written again if no count has changed."""
SILENT = 60.0
"""If a backfill has not updated its status file for this many seconds, other backfills ignore its claims."""
FORMAT = 1
"""Number of the format of status files."""


class BackfillStatus(msgspec.Struct, frozen=True):
    """The status of a running backfill: the content of its status file."""

    id: str
    names: tuple[str, ...]
    """Names whose values the backfill fills."""
    started: float
    """Unix time of the start of the backfill."""
    workers: int
    """Number of segments that may run at once."""
    busy: int
    """Number of running segments."""
    segments: int
    """Number of all segments."""
    ended: int
    """Number of segments that have ended."""
    left: float | None = None
    """Predicted seconds until all segments have ended."""
    on: str = "local"
    """The executor: `local` or `ray`."""
    process: dict[str, Any] = {}
    """Facts that identify the process that runs the backfill (`store.machine.process_identity`)."""
    heartbeat: float = HEARTBEAT
    format: int = FORMAT


def folder_of(project: Project) -> Path:
    """Return the folder in the store of `project` that contains the status files of backfills."""
    return project.store / "backfills"


def running_backfills(project: Project) -> list[BackfillStatus]:
    """Return the status of each running backfill, oldest first; remove the files of backfills that were killed."""
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
    """Return the ids of the running backfills that updated their status within the last `SILENT` seconds."""
    active = set()
    for status in running_backfills(project):
        with contextlib.suppress(OSError):
            updated = (folder_of(project) / f"{status.id}.json").stat().st_mtime
            if time.time() - updated < SILENT:
                active.add(status.id)
    return frozenset(active)


def request_workers(project: Project, backfill: str, workers: int) -> None:
    """Request that the running backfill with the id `backfill` uses `workers` workers from now on."""
    publish(folder_of(project) / f"{backfill}.workers", b"%d\n" % workers, durable=False)


@dataclass
class StatusFile:
    """Publishes the status of one backfill, and reads how many workers the backfill should use."""

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
        """Publish the status before the body of the `with` statement runs, and remove the status file after it.

        Other backfills respect the claims of a backfill only if it has a status file.
        """
        self.update(workers=0, busy=0, segments=0, ended=0, seconds_left=None)
        try:
            yield self
        finally:
            _remove(self._file)

    def requested_workers(self) -> int | None:
        """Return the number of workers that another terminal has requested last, or None if none was requested."""
        now = time.monotonic()
        if now - self._last_read >= READ_EVERY:
            self._last_read = now
            with contextlib.suppress(OSError, ValueError):
                self._requested = max(1, int(self._file.with_suffix(".workers").read_text("ascii")))
        return self._requested

    def update(
        self, *, workers: int, busy: int, segments: int, ended: int, seconds_left: float | None
    ) -> None:
        """Publish the status if `workers`, `busy` or `ended` has changed, or if `HEARTBEAT` seconds have passed."""
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
            left=seconds_left,
            on=self.on,
            process=process_identity(),
        )
        # without a status file the backfill still runs, but other terminals do not see the backfill
        with contextlib.suppress(OSError):
            make_folder(self._file.parent)
            publish(self._file, msgspec.json.encode(status), durable=False)


def _remove(file: Path) -> None:
    for path in (file, file.with_suffix(".workers")):
        with contextlib.suppress(OSError):
            path.unlink()


@dataclass(frozen=True, slots=True)
class SegmentProgress:
    """The progress of one running segment; `worker` and `segment` are numbers from 0."""

    worker: int
    segment: int
    run: str
    fraction: float
    """Fraction of the segment that is done, from 0 to 1. It is computed from the records of the replay, or from the
    prediction before the first record. It never decreases, not even if the segment runs again.
    """
    spent: float
    """Seconds since the segment started."""
    predicted: float
    """Remaining seconds of the segment according to the plan."""
    seconds_left: float
    """Remaining seconds of the segment, estimated from its real speed (`Eta`)."""
    rows: int = 0
    """Number of records that the segment has written."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a running backfill or of one of its segments, for the display of progress."""

    kind: str
    """Of a segment: `started`; `rows` (it has new records); at its end `proved` (exact), `failed`, or `filled`
    (another backfill filled it); `again` (the replay may be wrong, so it is repeated from the start of the run);
    `lost` (its process was killed); `returned` (it was stopped because there are fewer workers). Of the backfill:
    `progress` (several times a second) and `workers` (their number has changed).
    """
    segment: int
    """Number of the segment in the plan."""
    total: int
    """Number of all segments."""
    run: str
    fraction: float = 0.0
    """Fraction of the predicted seconds of all segments that is done; it never decreases from one event to the next."""
    seconds: float = 0.0
    """Predicted seconds of the segment for the kind `started`; its real seconds for `proved`, `failed` and `again`."""
    seconds_left: float | None = None
    """Predicted seconds until all segments have ended, for the kind `progress`."""
    message: str = ""
    """Reason for `failed`, `again` and `lost`, in words."""
    worker: int | None = None
    """Number of the worker that runs the segment; None if no worker runs it."""
    rows: int = 0
    """Number of records that the segment has written."""
    workers: int = 0
    """Number of segments that may run at once."""
    under_way: tuple[SegmentProgress, ...] = ()
    """The progress of each running segment, if the kind is `progress`."""
    claimed_elsewhere: int = 0
    """Number of segments that wait because another backfill has claimed them, if the kind is `progress`."""


Progress = Callable[[Event], None]

ENDED = frozenset({"proved", "failed", "filled"})
"""Kinds of events that end a segment."""


_LEAST_LEFT = 0.1
"""Before the first record, the remaining seconds of a segment are at least this fraction of the seconds it has run."""
_MAX_READ = 1 << 20
"""Most bytes of a record file that are read in one call."""


class _FileHead(msgspec.Struct):
    origin: str = ""


class _RecordPoint(msgspec.Struct):
    l: list[str] = []  # noqa: E741 - as the record files spell it
    i: list[int] = []


@dataclass
class RecordTail:
    """Reads the record files of a replay while the replay writes them, in constant memory."""

    folder: Path
    """Folder of the run."""
    replay: str
    loop: str | None = None
    iterations: Sequence[int] = ()
    """Iterations of `loop` that the replay runs, in order."""
    rows: int = 0
    """Number of record lines of the replay that were read; each log call writes one line."""
    reached: float | None = None
    """Fraction of `iterations` up to the last record that was read, or None before the first record."""
    _other_files: set[str] = field(default_factory=set)
    _files: dict[str, int] = field(default_factory=dict)
    """Name of a record file of the replay -> number of bytes that were read."""

    def read(self) -> bool:
        """Read the records that the replay has written since the last call; return True if there are any."""
        rows_before = self.rows
        with contextlib.suppress(OSError):
            self._find_files()
            for name in self._files:
                self._read(name)
        return self.rows > rows_before

    def _find_files(self) -> None:
        with os.scandir(self.folder) as entries:
            names = [e.name for e in entries if e.name.startswith("records-")]
        for name in names:
            if name in self._other_files or name in self._files or not name.endswith(".jsonl"):
                continue
            with (self.folder / name).open("rb") as file:
                head = file.readline(_MAX_READ)
            if not head.endswith(b"\n"):
                continue  # the first line is not written completely
            try:
                of_replay = msgspec.json.decode(head, type=_FileHead).origin == self.replay
            except (msgspec.MsgspecError, UnicodeDecodeError):
                of_replay = False
            if of_replay:
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
    """Estimates the seconds to the end of a running segment, from the prediction and from the real speed.

    >>> eta = Eta(predicted=100.0, started=0.0)
    >>> eta.seconds_left(30.0, None), eta.seconds_left(40.0, 0.25), eta.seconds_left(60.0, 0.5)
    (70.0, 60.0, 40.0)
    """

    predicted: float
    started: float
    _first: tuple[float, float] | None = None
    """(time of the first record, fraction that it reached). The speed is measured from this record on."""

    def seconds_left(self, now: float, reached: float | None, slowdown: float = 1.0) -> float:
        """Return the estimated seconds from the time `now` to the end of the segment.

        `reached` is the fraction of its iterations up to the last record, or None if there is no record. `slowdown` is
        the number of real seconds per predicted second in the segments that have ended.
        """
        spent = now - self.started
        # the segment is still running, so some seconds remain even if it takes longer than predicted
        by_plan = max(_LEAST_LEFT * spent, self.predicted * slowdown - spent)
        if reached is None:
            return by_plan
        if self._first is None:
            self._first = (now, reached)
        when, fraction = self._first
        if reached <= fraction or now <= when:
            return by_plan
        return (1.0 - reached) * (now - when) / (reached - fraction)
