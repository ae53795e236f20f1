"""Record a run: take checkpoints where the policy says they pay, keep records, never interfere."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import FrameType
from typing import Any

import msgspec

from rearview.model import Point, Step
from rearview.runtime.loops import Entry
from rearview.runtime.policy import Policy
from rearview.runtime.session import Nest, Session, position
from rearview.runtime.state.capture import capture
from rearview.runtime.writer import Writer
from rearview.store.records import RecordFile, encode_point
from rearview.store.runs import Runs

START = "start"
END = "end"
_WALKING = 0.01
"""Share of the time so far that walking anchors may take."""
_FIRST = 0.1
"""Seconds of walking that are always allowed."""


@dataclass
class Recorder(Session):
    """A session that records."""

    runs: Runs = field(kw_only=True)
    records: RecordFile = field(kw_only=True)
    writer: Writer = field(kw_only=True)
    policy: Policy = field(kw_only=True)
    code: int | None = None
    seq: int = 0
    due: float = 0.0
    """No checkpoint is considered before this time."""
    failed: bool = False
    finished: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.began = perf_counter()
        self.walked = 0.0

    def boundary(self, entry: Entry, index: int, frame: FrameType) -> int:
        """Consider a checkpoint before iteration `index`."""
        if not self.checkpointing or entry.site.loose or self.failed:
            return index
        nest = self.nest
        if nest is None:
            return index
        try:
            if nest.anchors is None:
                if nest.entry is entry and self._may_walk(entry):
                    found, _ = self.roots(frame)
                    self.anchor(nest, index, found)
                    self.walked += nest.seconds
            elif index and perf_counter() >= self.due:
                self.consider(entry, index, START, frame)
        except Exception as exc:
            self.fail(exc)
        return index

    def _may_walk(self, entry: Entry) -> bool:
        now = perf_counter()
        allowed = _FIRST + _WALKING * (now - self.began)
        if self.walked <= allowed:
            return True
        return now - entry.started > 20 * self.walked

    def exhausted(self, entry: Entry, index: int, frame: FrameType) -> bool:
        """Consider a checkpoint after the loop."""
        self.ended(entry, index, frame)
        return True

    def broken(self, entry: Entry, frame: FrameType) -> None:
        """Consider a checkpoint after a loop that was left by `break`."""
        if position(frame) in entry.site.breaks:
            self.ended(entry, entry.now, frame)

    def ended(self, entry: Entry, index: int, frame: FrameType) -> None:
        """Consider a checkpoint after a loop that ended where its exhaustion would lead."""
        nest = self.nest
        if not self.checkpointing or self.failed or entry.site.loose or nest is None:
            return
        try:
            if nest.anchors is not None and (index > 0 or nest.entry is not entry):
                self.consider(entry, index, END, frame)
        except Exception as exc:
            self.fail(exc)

    def consider(self, entry: Entry, index: int, edge: str, frame: FrameType) -> None:
        """Save if the policy finds that it pays."""
        raise AssertionError
