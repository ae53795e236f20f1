"""A job for a batch system, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass, field

EXIT_CODE = 85
"""Exit code that says: state is saved, start me again."""


@dataclass(frozen=True, slots=True)
class Job:
    """A program that saves when it is asked to leave, and goes on when it is started again."""

    name: str
    command: tuple[str, ...]
    """Interpreter and all its arguments, word by word."""
    folder: str
    """Where it is started from, in full."""
    retries: int = 1000
    """How often it may be started again."""
    inputs: tuple[str, ...] = ()
    """Files and folders that it needs, in full, where no disk is shared."""
    results: tuple[str, ...] = ()
    """What it makes that is brought back; empty: everything."""
    settings: dict[str, str] = field(default_factory=dict)
    """Lines of the batch system's own that the user gave; they win over ours."""
