"""What starts segments. A job is a segment file and a command line, so it can be run by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """One segment, ready to be started anywhere that sees the store."""

    id: str
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    """Working folder."""
    log: Path
    """Where its output goes."""
    report: Path
    """File that it publishes when it is through."""
    seconds: float = 0.0
    """Predicted."""
    threads: int | None = None
    """Threads that the run was told to use; None: it must be free to use every core."""
    accelerators: int = 0
    """How many the run saw."""
    imports: tuple[str, ...] | None = None
    """Import statements it begins with, as others do: an executor may have them executed once for
    all. None: it is to share nothing."""
    beside: Path | None = None
    """Folder in which its program looks for modules of its own; None: its working folder."""


class Job(Protocol):
    """A task that was started."""

    task: Task

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it still runs after `timeout` seconds."""
        ...

    def stop(self) -> None:
        """End it, now."""
        ...


class Executor(Protocol):
    """Starts tasks somewhere, several at once."""

    @property
    def slots(self) -> int:
        """How many can run at once now; asked again and again, so it may change."""
        ...

    def resize(self, slots: int) -> None:
        """Use that many slots from now on, as far as there are; what runs is left alone."""
        ...

    def start(self, task: Task, slot: int) -> Job:
        """Start a task on a slot that is free."""
        ...

    def close(self) -> None:
        """Stop what still runs and give everything back."""
        ...


def by_hand(task: Task) -> Sequence[str]:
    """Return the shell words that start `task` by hand, for debugging."""
    control = [f"{key}={value}" for key, value in task.environment.items() if "REARVIEW" in key]
    return ["env", "-C", str(task.folder), *control, *task.command]
