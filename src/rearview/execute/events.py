"""Signs of progress, for whoever watches a backfill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
