"""The protocols `Executor` and `Job`, and the `Task` that an executor starts, on this machine or on another one.

A task is a command line with a segment file, so that a person can also start it by hand (`by_hand`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rearview.model.process_messages import SetupStart


@dataclass(frozen=True, slots=True)
class SetupStage:
    """A part of the set-up that several tasks share: it runs once, and each task continues from its end."""

    key: str
    """Equal for tasks that share this part and everything before it."""
    start: SetupStart
    """Message to the process that runs this part: where the part ends."""


@dataclass(frozen=True, slots=True)
class Task:
    """One segment, ready to be started on any machine that sees the store."""

    id: str
    """The id of the replay."""
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    """Working folder."""
    log: Path
    """File for the output of the process."""
    report: Path
    """File that the process publishes when it has finished."""
    seconds: float = 0.0
    """Predicted seconds of the task."""
    threads: int | None = None
    """Threads that the run was set to use; None if the task may use every core."""
    accelerators: int = 0
    """Number of accelerators that the run could use when it was recorded."""
    imports: tuple[str, ...] | None = None
    """Import statements with which the program begins. An executor may execute them once for all tasks with equal
    imports. None if the task must start alone.
    """
    stages: tuple[SetupStage, ...] = ()
    """Parts of the set-up that this task shares with other tasks, in order. An executor may run each part once, in the
    process of a task that `shared_setup` returns.
    """
    shared_setup: Callable[[], Task] | None = None
    """Returns a task that runs only the set-up, in a separate folder; other tasks are then forked from its process."""
    module_folder: Path | None = None
    """Folder in which the program looks for modules of the project; None means the working folder."""


class Job(Protocol):
    """A started task."""

    task: Task

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for at most `timeout` seconds; return the exit code of the task, or None if the task still runs."""
        ...

    def stop(self) -> None:
        """Kill the task at once."""
        ...


class Executor(Protocol):
    """Starts tasks, several at once."""

    @property
    def slots(self) -> int:
        """Number of tasks that can run at once; it may change while tasks run."""
        ...

    def resize(self, slots: int) -> None:
        """Set the number of slots, at most as many as the machines have; running tasks continue."""
        ...

    def start(self, task: Task, slot: int) -> Job:
        """Start a task on a free slot."""
        ...

    def close(self) -> None:
        """Stop the running tasks and release all resources."""
        ...


def by_hand(task: Task) -> Sequence[str]:
    """Return the shell words with which a person can start `task`, for debugging."""
    variables = [f"{key}={value}" for key, value in task.environment.items() if "REARVIEW" in key]
    return ["env", "-C", str(task.folder), *variables, *task.command]
