"""A session that records nothing: the program runs where its store cannot be written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from rearview.config import Settings
from rearview.errors import RearviewError
from rearview.model.printable import printable
from rearview.runtime import api
from rearview.runtime.loops import Habit
from rearview.runtime.session import Session
from rearview.store.project import Project


@dataclass
class Unrecorded(Session):
    """Lets every call of the program pass; what it logs is not kept."""

    watching: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compiler = self

    def compile(self, data: bytes, path: str) -> CodeType:
        """Return the code of a source file, as plain Python compiles it."""
        code: CodeType = compile(data, path, "exec", dont_inherit=True)
        return code

    def enter(self, habit: Habit, iterable: Any, frame: FrameType) -> Iterator[Any]:
        """Iterate over what the program iterates over."""
        return iter(iterable)

    def log(self, items: Mapping[str, Any]) -> None:
        """Keep nothing."""

    def argument(self, values: Mapping[str, Any]) -> None:
        """Keep nothing."""

    def finish(self, code: int | None) -> None:
        """There is nothing to finish."""


def go_unrecorded(root: Path, given: Mapping[str, str], why: Exception) -> Unrecorded:
    """Say once why nothing is recorded; return the session with which the program runs all the same."""
    slug = why.slug if isinstance(why, RearviewError) else "store-unwritable"
    sys.stderr.write(
        f"rearview: this run is not recorded: {printable(str(why))} Your program runs all the same "
        f"(docs/errors.md#{slug})\n"
    )
    session = Unrecorded(Project(root), "", Settings(), given=dict(given))
    api.use(session)
    return session
