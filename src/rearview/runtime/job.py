"""One checkpoint on its way from the training thread to the disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rearview.model import ObjectRef, Point
from rearview.runtime.device import Fetch
from rearview.runtime.staged import Staged
from rearview.runtime.staging import Lease


@dataclass(frozen=True, slots=True)
class Job:
    """A state as it was taken, and what its copies hold."""

    run: str
    seq: int
    point: Point
    edge: str
    meta: dict[str, Any]
    complete: bool
    missing: tuple[str, ...]
    skeleton: bytes
    same: dict[str, ObjectRef]
    staged: Staged
    lease: Lease
    fetch: Fetch | None
    blocking: float
    soon: bool
    """The state is about to be looked at again."""
