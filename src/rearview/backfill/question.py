"""What is asked of past runs: the one value that the public API, the command line and the planner share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict


class Choices(TypedDict, total=False):
    """Keyword arguments of a question; `Question` explains each."""

    runs: Sequence[str] | None
    where: str | None
    at: str | None
    workers: int | None
    budget: float | None
    on: str
    gpus: float | None
    again: bool
    sure: float | None


@dataclass(frozen=True, slots=True)
class Question:
    """Which names are to have values, in which runs and iterations, and how replays may run."""

    names: Sequence[str]
    runs: Sequence[str] | None = None
    """Runs as the user names them, in the order in which their values are needed; None: all runs."""
    where: str | None = None
    """SQL condition on runs or rows: `acc < 0.9`."""
    at: str | None = None
    """Iterations: `epoch=3:5`."""
    workers: int | None = None
    """Replays at once; None: as many as there are cores for."""
    budget: float | None = None
    """Seconds of computing that the plan may take."""
    on: str = "local"
    """Executor: `local` or `ray`."""
    gpus: float | None = None
    """Accelerators that each segment gets on Ray; 0.5 for half of one."""
    again: bool = False
    """Also run again what has values that could not be proved."""
    sure: float | None = None
    """Least certainty of a statement's place in a past version; None: the setting `propagation`."""
