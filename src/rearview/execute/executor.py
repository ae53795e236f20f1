"""The protocols `Executor` and `Job`, and the `Task` that an executor starts, on this machine or on another one.

A task is a command line with a segment file. For debugging, a person can start it in a shell (`by_hand`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rearview.model.process_messages import SetupStart


@dataclass(frozen=True, slots=True)
class SetupStage:
    """Statements of a script before its main loop that run once for several tasks, in a process that is then forked."""

    key: str
    """Text that is equal for tasks that can share these statements and all statements before them."""
    start: SetupStart
    """Message to the process that runs the statements: it says where they end."""


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
    """File that gets everything that the process prints."""
    report: Path
    """File that the process writes when it has finished: a `ReplayReport`."""
    seconds: float = 0.0
    """Predicted seconds of the task."""
    threads: int | None = None
    """Number of threads that the run was set to use, for pinning to cores; None if the task may use every core."""
    accelerators: int = 0
    """Number of accelerators that the run could use when it was recorded."""
    imports: tuple[str, ...] | None = None
    """Import statements with which the program begins. An executor may execute them once for all tasks with equal
    imports, and then fork these tasks. None if the task must be started as a new process.
    """
    stages: tuple[SetupStage, ...] = ()
    """Groups of statements before the main loop that this task shares with other tasks, in the order of execution. An
    executor may run each group once, in the process of a task that `shared_setup` returns.
    """
    shared_setup: Callable[[], Task] | None = None
    """Function that returns a task for the statements before the main loop, in a folder of its own. The process of that
    task is forked for each task that shares the statements.
    """
    module_folder: Path | None = None
    """Folder in which the program looks for its own modules (`sys.path[0]`); None means the working folder."""


class Job(Protocol):
    """A task that an executor has started."""

    task: Task

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for at most `timeout` seconds; return the exit code of the task, or None if the task still runs."""
        ...

    def stop(self) -> None:
        """Kill the processes of the task at once."""
        ...


class Executor(Protocol):
    """Starts tasks, up to `slots` at once; a slot is a number from 0 that chooses cores and accelerators for a task."""

    @property
    def slots(self) -> int:
        """Number of tasks that can run at once; it may change while tasks run."""
        ...

    def resize(self, slots: int) -> None:
        """Change the number of slots; running tasks continue."""
        ...

    def start(self, task: Task, slot: int) -> Job:
        """Start `task` on the free slot number `slot`, and return the job."""
        ...

    def close(self) -> None:
        """Stop the running tasks and release all resources."""
        ...


def by_hand(task: Task) -> Sequence[str]:
    """Return the words of the shell command with which a person can start `task`, for debugging."""
    variables = [f"{key}={value}" for key, value in task.environment.items() if "REARVIEW" in key]
    return ["env", "-C", str(task.folder), *variables, *task.command]
