"""How far a replay is, read from the records that it has written so far."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

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
class Watch:
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
class Pace:
    """How long something takes that is under way, by what was predicted and by how it goes.

    >>> pace = Pace(predicted=100.0, begun=0.0)
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
