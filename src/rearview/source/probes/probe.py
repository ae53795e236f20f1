"""One added statement (`Probe`), and all that an edit adds (`Probes`): the values that `find` returns.

`sameness` tells if two edits log a name in the same way, whatever else they add.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rearview.source.loops import LoopId
from rearview.source.scopes import bound_by
from rearview.source.text import blocks, parse
from rearview.source.wrap_probes import Places


class ProbeKind(StrEnum):
    """What an added statement is there for."""

    LOG = "log"
    """It logs names: to Rearview or to a tracker."""
    PRINT = "print"
    """It prints, or logs a line of text."""
    IMPORT = "import"
    DEFINITION = "definition"
    VALUE = "value"
    """It computes something that other probes read."""


class Position(StrEnum):
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
    kind: ProbeKind
    names: tuple[str, ...]
    """What it logs; `*` stands for a part that only the run knows."""
    function: str
    loops: tuple[str, ...]
    """Recorded loops around it in its function, outermost first."""
    place: Position
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
class Naming:
    """A recorded statement that an edit rewrote to give names to a value it computes."""

    path: str
    line: int
    """Line of the statement that binds the names."""
    names: tuple[str, ...]
    into: int | None = None
    """Line of the recorded statement below that reads the value by its name, if there is one."""

    def pushed(self, path: str, line: int, count: int) -> Naming:
        """Return the naming after `count` lines were inserted before `line` of the file `path`."""
        if path != self.path:
            return self
        into = self.into
        if into is not None and into >= line:
            into += count
        return replace(self, line=self.line + (count if self.line >= line else 0), into=into)


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
    """Return True if a logged name is one that a pattern stands for.

    >>> fits("norm/*", "norm/fc1"), fits("norm", "norms")
    (True, False)
    """
    parts = (re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(".*".join(parts), name, re.DOTALL) is not None


_REBINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_TELLS = (ProbeKind.LOG, ProbeKind.PRINT)


def sameness(probes: Probes, name: str) -> str:
    """Return a text that two edits of one version share if `name` is logged alike in both.

    Other log statements may come and go, with what only they need; layout and comments do not
    count. Where in doubt, the texts differ.
    """
    trees, nodes = _nodes(probes)
    kept = _kept(nodes, probes.of(name))
    dropped = {id(node) for probe, node in nodes.items() if probe not in kept}
    named = {naming.path for naming in probes.namings}
    digest = hashlib.sha256()
    for path, tree in trees.items():
        if path in named or any(probe.path == path for probe in kept):
            _drop(tree, dropped)
            digest.update(f"{path}\0{ast.dump(tree)}\0".encode("utf-8", "surrogatepass"))
    for path in sorted({*probes.modules, *(named - set(trees))}):
        digest.update(f"{path}\0{probes.source[path]}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def needed(probes: Probes, names: Sequence[str]) -> set[Probe]:
    """Return the statements that log `names`, those that bind what they read, and so on.

    What recorded code binds, too, is there without them. What else mentions a variable that comes
    with them may change it, and comes as well: if it is no probe, the answer is a refusal.
    """
    _, nodes = _nodes(probes)
    kept = {probe for name in names for probe in probes.of(name)}
    own = {(path, name) for (path, _), bound in probes.variables.items() for name in bound}
    binds = {
        probe: {name for name, _ in bound_by(node) if (probe.path, name) in own}
        for probe, node in nodes.items()
    }
    mentions = {probe: _mentioned(node) for probe, node in nodes.items()}
    while True:
        read = {name for probe in kept for name in mentions[probe]}
        made = {
            name for probe in kept if probe.kind is not ProbeKind.IMPORT for name in binds[probe]
        }
        more = {
            probe
            for probe in nodes
            if probe not in kept
            and (binds[probe] & read or (probe.kind not in _TELLS and mentions[probe] & made))
        }
        if not more:
            return kept
        kept |= more


def _nodes(probes: Probes) -> tuple[dict[str, ast.Module], dict[Probe, ast.stmt]]:
    """Return the files that have probes, and the statement of each probe."""
    trees = {
        path: parse(probes.source[path], path)
        for path in sorted({probe.path for probe in probes.probes})
    }
    found = {
        (path, node.lineno, node.col_offset): node
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
    }
    return trees, {probe: found[probe.path, probe.line, probe.column] for probe in probes.probes}


def _kept(nodes: dict[Probe, ast.stmt], asked: tuple[Probe, ...]) -> set[Probe]:
    """Return the asked statements and all that may have a part in their values.

    What binds a name that they mention has; so has what mentions a variable that only probes have,
    since it may change it; and so has what neither logs, prints nor binds anything.
    """
    kept = {probe for probe in nodes if probe in asked}
    binds = {probe: {name for name, _ in bound_by(node)} for probe, node in nodes.items()}
    kept |= {probe for probe in nodes if probe.kind is ProbeKind.VALUE and not binds[probe]}
    mentions = {probe: _mentioned(node) for probe, node in nodes.items()}
    while True:
        read = {name for probe in kept for name in mentions[probe]}
        own = {
            name
            for probe in kept
            if not isinstance(nodes[probe], _REBINDS)
            for name in binds[probe]
        }
        more = {
            probe
            for probe in nodes
            if probe not in kept and (binds[probe] & read or mentions[probe] & own)
        }
        if not more:
            return kept
        kept |= more


def _mentioned(node: ast.stmt) -> set[str]:
    return {sub.id for sub in ast.walk(node) if isinstance(sub, ast.Name)}


def _drop(node: ast.AST, dropped: set[int]) -> None:
    for block in blocks(node):
        block[:] = [stmt for stmt in block if id(stmt) not in dropped]
        for stmt in block:
            _drop(stmt, dropped)
