"""The protocols `Executor` and `Job`: how segments are started, on this machine or elsewhere.

A task is a command line with a segment file, so a person can also start it by hand (`by_hand`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rearview.model.process_messages import SetupStart


@dataclass(frozen=True, slots=True)
class SetupStage:
    """A part of the set-up that several tasks share: it runs once, and each of them continues from there."""

    key: str
    """Equal for tasks that share this part and everything before it."""
    start: SetupStart


@dataclass(frozen=True, slots=True)
class Task:
    """One segment, ready to be started on any machine that sees the store."""

    id: str
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    """Working folder."""
    log: Path
    """File for the output of the process."""
    report: Path
    """File that the process publishes when it has finished."""
    seconds: float = 0.0
    """Predicted seconds."""
    threads: int | None = None
    """Threads that the run was set to use; None if the task may use every core."""
    accelerators: int = 0
    """How many accelerators the run could use."""
    imports: tuple[str, ...] | None = None
    """Import statements at the head of the program. An executor may execute them once for all tasks that
    begin with the same ones. None if the task shares no start with others.
    """
    stages: tuple[SetupStage, ...] = ()
    """Parts of the set-up that other tasks have in common with this one, in order. An executor may run each once,
    in the process of a task that `shared_setup` returns."""
    shared_setup: Callable[[], Task] | None = None
    """Returns a task with a separate folder that runs only the set-up, for this task and others."""
    module_folder: Path | None = None
    """Folder in which the program looks for its own modules; None means the working folder."""


class Job(Protocol):
    """A started task."""

    task: Task

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code; None if it still runs after `timeout` seconds."""
        ...

    def stop(self) -> None:
        """Kill it at once."""
        ...


class Executor(Protocol):
    """Starts tasks, several at once."""

    @property
    def slots(self) -> int:
        """How many tasks can run at once; it may change while tasks run."""
        ...

    def resize(self, slots: int) -> None:
        """Use that many slots from now on, at most as many as exist; running tasks continue."""
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
