"""One logged value at a point."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rearview.model.point import Point


class Origin(StrEnum):
    """Where a record comes from, and how far it can be trusted."""

    RECORDED = "recorded"
    """Logged by the run itself."""
    REPLAYED = "replayed"
    """Logged by a replay that was proved exact."""
    UNPROVED = "unproved"
    """Logged by a replay that was interrupted, or that nothing could be compared with."""
    REDONE = "redone"
    """Logged by a first try that a second one, from the start of the run, stands in for."""
    INEXACT = "not exact"
    """Logged by a replay that differed from the recording."""


@dataclass(frozen=True, slots=True)
class Record:
    """One value under one name at one point.

    `value` is a JSON scalar, or a dict with the key `"$object"` that names the stored bytes of
    an array, tensor, image or histogram.
    """

    run: str
    seq: int
    point: Point
    name: str
    value: Any
    origin: Origin = Origin.RECORDED
    time: float = 0.0
