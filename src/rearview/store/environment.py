"""What a run read of its environment: a file in its folder, and the environment of a replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rearview.model import Run
from rearview.model.environment import Environment
from rearview.store.lines import append_line, read_lines

FILE = "environment.jsonl"
FORMAT = 2
"""Every line carries a checksum, as in all files of facts from format 2 on."""


def append_environment(folder: Path, part: Environment) -> None:
    """Add what a run has read of its environment to its folder."""
    line: dict[str, Any] = {"format": FORMAT}
    line |= {"values": dict(part.values)} if part.values else {}
    line |= {"secrets": dict(part.secrets)} if part.secrets else {}
    line |= {"whole": True} if part.whole else {}
    append_line(folder / FILE, line)


def read_environment(folder: Path) -> Environment | None:
    """Return what a run read of its environment; None if it was recorded without that.

    Of two values of one variable the first holds: later ones are of resumed runs.
    """
    values: dict[str, str | None] = {}
    secrets: dict[str, bool] = {}
    whole = found = False
    for line in read_lines(folder / FILE, FORMAT):
        found = True
        for name, value in line.get("values", {}).items():
            values.setdefault(name, value)
        for name, was_set in line.get("secrets", {}).items():
            secrets.setdefault(name, bool(was_set))
        whole = whole or bool(line.get("whole"))
    return Environment(values, secrets, whole) if found else None


def environment_of(
    run: Run, folder: Path, now: Mapping[str, str], *, resumes: bool = False
) -> dict[str, str]:
    """Return the environment to start a replay of a run with, or to resume it in.

    Of a run that was recorded before environments were, only the numbers of threads are known.
    """
    then = read_environment(folder)
    if then is None:
        return {**now, **run.facts.get("threads", {})}
    return then.restored(now, resumes=resumes)


def environment_differences(
    folder: Path, now: Mapping[str, str], *, resumes: bool = False
) -> list[str]:
    """Return what differs from the environment of a run and is not restored, a phrase each."""
    then = read_environment(folder)
    return [] if then is None else then.differences(now, resumes=resumes)
