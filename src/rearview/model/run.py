"""One execution of a version."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

NOTEBOOK = ".ipynb"
"""How the name of a notebook ends."""


def is_notebook(path: str) -> bool:
    """Return True if a path is that of a notebook.

    >>> is_notebook("study.ipynb"), is_notebook("train.py")
    (True, False)
    """
    return path.endswith(NOTEBOOK)


class Status(StrEnum):
    """What became of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    """Ended with an exception or a non-zero exit code."""
    PAUSED = "paused"
    """Ended with exit code 85: saved, to be continued."""
    DEAD = "dead"
    """Its process is gone and it never said how it ended."""


@dataclass(frozen=True, slots=True, repr=False)
class Run:
    """Facts of one execution, as its folder tells them."""

    id: str
    version: str
    """Tree hash of the source, as kept by `store.versions`."""
    script: str
    """Path of the script relative to the project, or `-m module`."""
    argv: tuple[str, ...]
    started: float
    status: Status
    ended: float | None = None
    exit_code: int | None = None
    host: str = ""
    pid: int = 0
    cwd: str = ""
    parent: str | None = None
    """The run this one replays or resumes, if any."""
    args: dict[str, Any] = field(default_factory=dict)
    """Hyper-parameters."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Entropy and environment, as `runtime.entropy` wrote them."""
    name: str = ""
    """What the user called it later; empty if nothing."""
    tags: tuple[str, ...] = ()
    """Tags that the user gave it later, in the order given."""
    note: str = ""
    """What the user wrote about it later, one line or paragraph per note."""

    def __repr__(self) -> str:
        command = " ".join((self.script, *self.argv))
        took = "" if self.ended is None else f", {self.ended - self.started:.1f} s"
        name = f" {self.name!r}" if self.name else ""
        return f"<Run {self.id}{name}: {command}, {self.status}{took}>"

    @property
    def source(self) -> str:
        """The version that the run goes on with: its own, or the last that it was continued with."""
        continued = self.facts.get("continued")
        return str(continued[-1]["version"]) if continued else self.version

    def home(self, root: str) -> str:
        """Return the folder that the project was in; `root` is where it is now."""
        return str(self.facts.get("root") or root)

    def now(self, path: str, root: str) -> str:
        """Return where a file that the run named is, should the project have moved to `root`.

        >>> run = Run("", "", "", (), 0.0, Status.DEAD, facts={"root": "/old"})
        >>> run.now("/old/data.txt", "/new"), run.now("/older/data.txt", "/new")
        ('/new/data.txt', '/older/data.txt')
        """
        then = self.home(root)
        return f"{root}{path[len(then) :]}" if f"{path}/".startswith(f"{then}/") else path
