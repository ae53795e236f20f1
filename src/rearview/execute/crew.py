"""Workers that come and go: a backfill under way says how it is, and is told how many to use.

Both are small files in `.rearview/backfills`, so that any terminal that sees the store can look and
tell: `<id>.json` is the backfill's own, `<id>.workers` holds the number that is asked for.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rearview.store.alive import alive, identity
from rearview.store.private import make_folder
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
