"""What `History` returns about one run, and about runs that it removes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rearview.model import Checkpoint, Run, Verdict
from rearview.model.environment import Environment
from rearview.store.maintenance.gc import Freed
from rearview.store.maintenance.removal import RunRemoval
from rearview.store.runs import Replay


@dataclass(frozen=True, slots=True)
class RunReport:
    """All that is known of one run."""

    run: Run
    names: dict[str, int]
    loops: list[tuple[str, int]]
    checkpoints: list[Checkpoint]
    partial: list[str]
    logical: int
    stored: int
    costs: dict[str, Any]
    replays: list[Replay]
    exact: str
    """How far its replays can be trusted, in words."""
    verdict: Verdict | None = None
    """The same as a value; None if the run was not replayed."""
    environment: Environment | None = None
    """The environment variables that it read; None: it was recorded without them."""
    environment_differences: list[str] = field(default_factory=list)
    """A phrase for each variable that differs now and that a replay does not restore."""
    captured: dict[str, str] = field(default_factory=dict)
    """Names that it did not log with Rearview, and what their values were taken from."""


@dataclass(frozen=True)
class Removal:
    """What was removed with some runs, or would be."""

    runs: tuple[str, ...]
    """The runs, including those whose removal was interrupted earlier."""
    removed: list[RunRemoval]
    freed: Freed
    """Objects and packs that no other run needs."""

    @property
    def nbytes(self) -> int:
        """All bytes that it freed, or would free."""
        return self.freed.nbytes + sum(each.nbytes for each in self.removed)
