"""One added statement, and all that an edit adds: the values that `probes.find` gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rearview.source.loops import LoopId
from rearview.source.naming import Naming
from rearview.source.shield import Places


class Kind(StrEnum):
    """What an added statement is there for."""

    LOG = "log"
    """It logs names: to Rearview or to a tracker."""
    PRINT = "print"
    """It prints, or logs a line of text."""
    IMPORT = "import"
    DEFINITION = "definition"
    VALUE = "value"
    """It computes something that other probes read."""


class Place(StrEnum):
    """Where a statement stands among the recorded loops of its own level."""

    BEFORE = "before"
    BETWEEN = "between"
    AFTER = "after"
    ALONE = "alone"
    """No recorded loop stands at its level."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One added statement."""

    path: str
    first: int
    last: int
    """Lines in the edited text, both inclusive."""
    column: int
    line: int
    """Line of the statement itself, below its decorators."""
    kind: Kind
    names: tuple[str, ...]
    """What it logs; `*` stands for a part that only the run knows."""
    function: str
    loops: tuple[str, ...]
    """Recorded loops around it in its function, outermost first."""
    place: Place
    chains: tuple[tuple[str, ...], ...]
    """Loops that may run around it, callers' included; empty when nobody calls it by name."""
    depth: int
    """How many of `loops` replay may enter in the middle; START: begin with the program."""
    feeds: tuple[tuple[str, ...], ...] = ()
    """Loops of its function, besides its own, whose iterations must run for it."""
    paths: tuple[tuple[str, ...], ...] = ()
    """The same as `chains`, by the ids of the loops: names may be shared."""
    fed_by: tuple[tuple[str, ...], ...] = ()
    """The same as `feeds`, by ids, callers' loops included."""
    generators: tuple[str, ...] = ()
    """Live random generators that it draws from, to be shielded with the global ones."""
    cautions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probes:
    """Everything that an edit adds."""

    probes: tuple[Probe, ...]
    source: Mapping[str, str]
    """The recorded version with the probes in it: what is to be replayed."""
    variables: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """(path, function) -> names that only probes bind there: no part of the recorded state."""
    loops: Mapping[str, Mapping[int, LoopId]] = field(default_factory=dict)
    """Edited file -> line of each recorded loop -> the id it was recorded under."""
    modules: tuple[str, ...] = ()
    """Files that only probes import."""
    namings: tuple[Naming, ...] = ()
    """Recorded statements that give their values names for probes."""

    def __bool__(self) -> bool:
        return bool(self.probes)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name the probes log, in the order of the text."""
        return tuple(dict.fromkeys(name for probe in self.probes for name in probe.names))

    def of(self, name: str) -> tuple[Probe, ...]:
        """Return the probes that log `name`, be it spelled out or by a pattern."""
        return tuple(p for p in self.probes if any(fits(pattern, name) for pattern in p.names))

    def places(self, path: str) -> Places:
        """Return where `shield_tree` has to put shields in one file."""
        return {(p.line, p.column): p.generators for p in self.probes if p.path == path}


def fits(pattern: str, name: str) -> bool:
    """Say whether a logged name is one that a pattern stands for.

    >>> fits("norm/*", "norm/fc1"), fits("norm", "norms")
    (True, False)
    """
    parts = (re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(".*".join(parts), name, re.DOTALL) is not None
