"""What became of each statement of a recorded text in an edited one: the values `compare` gives."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from rearview.source.named import Given


@dataclass(frozen=True, slots=True)
class Added:
    """A statement that only the edited text has, with the nodes around it, outermost first."""

    node: ast.stmt
    parents: tuple[ast.AST, ...]


@dataclass(frozen=True, slots=True)
class Lost:
    """A recorded statement that the edited text lacks; `instead` stands in its place, if any."""

    node: ast.stmt
    instead: ast.stmt | None
    line: int
    """Line of the edited text where it was expected."""
    why: str = ""
    """What keeps `instead` from computing the same, where it comes close."""
    inside: ast.stmt | None = None
    """The added statement that it was put into, whole as it was."""
    held: bool = False
    """`instead` contains all that it evaluates."""
    moved: bool = False
    """`instead` is the very statement, at another place."""


@dataclass(slots=True)
class Comparison:
    """What became of each statement of two texts."""

    old: ast.Module
    new: ast.Module
    matched: list[tuple[ast.stmt, ast.stmt]] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    widened: list[tuple[ast.stmt, tuple[ast.alias, ...]]] = field(default_factory=list)
    """Recorded imports that bring in further names now."""
    given: list[tuple[Given, tuple[ast.AST, ...]]] = field(default_factory=list)
    """Names that recorded statements give to their values now, with the nodes around them."""

    @property
    def changed(self) -> list[ast.stmt]:
        """Statements of the edited text that stand in place of recorded ones."""
        return [lost.instead for lost in self.lost if lost.instead is not None]
