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
    """Logged by a replay whose proof failed or was impossible."""


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
