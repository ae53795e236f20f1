"""How far a replay is, read from the records that it has written so far.

Workers that come and go: a backfill under way says how it is, and is told how many to use.

Both are small files in `.rearview/backfills`, so that any terminal that sees the store can look and
tell: `<id>.json` is the backfill's own, `<id>.workers` holds the number that is asked for.

Signs of progress, for whoever watches a backfill.

How far a replay is, read from the records that it has written so far.
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

from rearview.store.files import make_folder
from rearview.store.machine import alive, identity
from rearview.store.project import Project, publish

EVERY = 0.5
"""Seconds between looks at what is asked for."""
BEAT = 5.0
"""Seconds between signs of life."""
SILENT = 60.0
"""Seconds without one after which nobody waits for what a backfill has under way."""
FORMAT = 1


class Crew(msgspec.Struct, frozen=True):
    """A backfill under way, as it says itself."""

    id: str
    names: tuple[str, ...]
    started: float
    workers: int
    """How many segments run at once now, at most."""
    busy: int
    segments: int
    ended: int
    left: float | None = None
    on: str = "local"
    process: dict[str, Any] = {}
    heartbeat: float = BEAT
    format: int = FORMAT


def folder_of(project: Project) -> Path:
    """Return where backfills say how they are."""
    return project.store / "backfills"


def under_way(project: Project) -> list[Crew]:
    """Return the backfills that run now, oldest first; what dead ones left is removed."""
    found = []
    for file in sorted(folder_of(project).glob("*.json")):
        try:
            crew = msgspec.json.decode(file.read_bytes(), type=Crew)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if crew.format == FORMAT and alive({**crew.process, "heartbeat": BEAT}, file):
            found.append(crew)
        else:
            _remove(file)
    return sorted(found, key=lambda crew: crew.started)


def at_work(project: Project) -> frozenset[str]:
    """Return the ids of backfills that live and go on; one that is suspended does not."""
    found = set()
    for crew in under_way(project):
        with contextlib.suppress(OSError):
            said = (folder_of(project) / f"{crew.id}.json").stat().st_mtime
            if time.time() - said < SILENT:
                found.add(crew.id)
    return frozenset(found)


def ask_for(project: Project, crew: str, workers: int) -> None:
    """Tell a backfill how many workers to use from now on."""
    publish(folder_of(project) / f"{crew}.workers", b"%d\n" % workers, durable=False)


@dataclass
class Post:
    """Where one backfill says how it is and hears what is asked of it."""

    project: Project
    names: Sequence[str]
    on: str = "local"
    _asked: int | None = None
    _looked: float = 0.0
    _said: float = 0.0
    _last: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        self._started = time.time()
        self.id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        self._file = folder_of(self.project) / f"{self.id}.json"

    @contextlib.contextmanager
    def open(self) -> Iterator[Post]:
        """Say that a backfill is under way as long as the body runs.

        At once: what it claims counts only while it is known to live.
        """
        self.say(workers=0, busy=0, segments=0, ended=0, left=None)
        try:
            yield self
        finally:
            _remove(self._file)

    def asked(self) -> int | None:
        """Return how many workers are asked for; None: as many as at the beginning."""
        now = time.monotonic()
        if now - self._looked >= EVERY:
            self._looked = now
            with contextlib.suppress(OSError, ValueError):
                self._asked = max(1, int(self._file.with_suffix(".workers").read_text("ascii")))
        return self._asked

    def say(
        self, *, workers: int, busy: int, segments: int, ended: int, left: float | None
    ) -> None:
        """Tell how it is; at once when that has changed, else now and then."""
        now, what = time.monotonic(), (workers, busy, ended)
        if what == self._last and now - self._said < BEAT:
            return
        self._last, self._said = what, now
        crew = Crew(
            id=self.id,
            names=tuple(self.names),
            started=self._started,
            workers=workers,
            busy=busy,
            segments=segments,
            ended=ended,
            left=left,
            on=self.on,
            process=identity(),
        )
        # nobody can look at it then, and it goes on
        with contextlib.suppress(OSError):
            make_folder(self._file.parent)
            publish(self._file, msgspec.json.encode(crew), durable=False)


def _remove(file: Path) -> None:
    for one in (file, file.with_suffix(".workers")):
        with contextlib.suppress(OSError):
            one.unlink()


@dataclass(frozen=True, slots=True)
class UnderWay:
    """What one worker does now."""

    worker: int
    segment: int
    run: str
    done: float
    """Share of the segment: what its records show where they do, else what was predicted."""
    spent: float
    """Seconds since it began."""
    predicted: float
    """Seconds that were to be left by the plan."""
    left: float
    """Seconds that are left by how it really goes."""
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """A sign of progress."""

    kind: str
    """`started`; `progress`, several times a second; `rows`, when records have come; then one of
    `proved` and `failed`, or `filled`: another backfill has done it. Also `again`: it differed or
    could not be restored, and runs once more from the start of the run; `lost`: its worker is gone;
    `returned`: its worker was taken away; `workers`: their number has changed."""
    segment: int
    total: int
    """How many segments there are."""
    run: str
    done: float = 0.0
    """Share of all predicted seconds that is done."""
    seconds: float = 0.0
    """What it took, once it has ended; predicted when it starts."""
    left: float | None = None
    """Seconds until all is done."""
    message: str = ""
    worker: int | None = None
    rows: int = 0
    """Records that it has written so far."""
    workers: int = 0
    under_way: tuple[UnderWay, ...] = ()
    """With `progress`: one for each worker that is busy."""
    held: int = 0
    """With `progress`: segments that wait for what another backfill has under way."""


Progress = Callable[[Event], None]

ENDED = frozenset({"proved", "failed", "filled"})
"""Kinds of events that end a segment."""


_LONGER = 0.1
"""Share of the time so far that is taken to be left at least."""
_MOST = 1 << 20
"""Bytes that are read at once."""


class _Head(msgspec.Struct):
    origin: str = ""


class _Where(msgspec.Struct):
    l: list[str] = []  # noqa: E741 - as the record files spell it
    i: list[int] = []


@dataclass
class RecordTail:
    """Follows the record files of one replay; its memory does not grow with them."""

    folder: Path
    """Of the run."""
    replay: str
    loop: str | None = None
    wanted: Sequence[int] = ()
    """Iterations of `loop` that the replay is to run, in order."""
    rows: int = 0
    """Lines that were written: log calls."""
    reached: float | None = None
    """Share of the wanted iterations that records were seen of; None before the first."""
    _others: set[str] = field(default_factory=set)
    _files: dict[str, int] = field(default_factory=dict)
    """Name -> bytes that were read."""

    def look(self) -> bool:
        """Read what is new; say whether there was anything."""
        before = self.rows
        with contextlib.suppress(OSError):
            self._discover()
            for name in self._files:
                self._read(name)
        return self.rows > before

    def _discover(self) -> None:
        with os.scandir(self.folder) as entries:
            names = [e.name for e in entries if e.name.startswith("records-")]
        for name in names:
            if name in self._others or name in self._files or not name.endswith(".jsonl"):
                continue
            with (self.folder / name).open("rb") as file:
                head = file.readline(_MOST)
            if not head.endswith(b"\n"):
                continue  # it is being written
            try:
                mine = msgspec.json.decode(head, type=_Head).origin == self.replay
            except (msgspec.MsgspecError, UnicodeDecodeError):
                mine = False
            if mine:
                self._files[name] = len(head)
            else:
                self._others.add(name)

    def _read(self, name: str) -> None:
        with (self.folder / name).open("rb") as file:
            file.seek(self._files[name])
            data = file.read(_MOST)
        whole = data[: data.rfind(b"\n") + 1]
        self._files[name] += len(whole)
        lines = [line for line in whole.splitlines() if not line.startswith(b'{"end"')]
        self.rows += len(lines)
        for line in reversed(lines):
            try:
                at = msgspec.json.decode(line, type=_Where)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
            if at.l and at.l[0] == self.loop and self.wanted:
                place = bisect_left(self.wanted, at.i[0])
                share = min(place + 0.5, len(self.wanted)) / len(self.wanted)
                self.reached = max(share, self.reached or 0.0)
                return


@dataclass(slots=True)
class Eta:
    """How long something takes that is under way, by what was predicted and by how it goes.

    >>> pace = Eta(predicted=100.0, begun=0.0)
    >>> pace.left(30.0, None), pace.left(40.0, 0.25), pace.left(60.0, 0.5)
    (70.0, 60.0, 40.0)
    """

    predicted: float
    begun: float
    _first: tuple[float, float] | None = None
    """When the first iteration was seen, and which share: before it lies the set-up."""

    def left(self, now: float, reached: float | None, factor: float = 1.0) -> float:
        """Return the seconds left; `factor`: how much longer than predicted others took."""
        spent = now - self.begun
        # what takes longer than predicted is not over for that
        by_plan = max(_LONGER * spent, self.predicted * factor - spent)
        if reached is None:
            return by_plan
        if self._first is None:
            self._first = (now, reached)
        when, share = self._first
        if reached <= share or now <= when:
            return by_plan
        return (1.0 - reached) * (now - when) / (reached - share)
