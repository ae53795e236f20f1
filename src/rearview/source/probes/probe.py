"""One added statement (`Probe`) and all statements that an edit adds (`Probes`): the result of `find`.

`logging_fingerprint` is equal for two edits that log a name in the same way, even if they also add different statements.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rearview.source.isolate_probes import Places
from rearview.source.loops import LoopId
from rearview.source.scopes import bound_by
from rearview.source.text import blocks, parse


class ProbeKind(StrEnum):
    """The purpose of an added statement."""

    LOG = "log"
    """It logs names, to Rearview or to a tracker."""
    PRINT = "print"
    """It prints, or logs a line of text."""
    IMPORT = "import"
    DEFINITION = "definition"
    VALUE = "value"
    """It computes a value that other probes read."""


class Position(StrEnum):
    """Where a statement is relative to the recorded loops at the same depth."""

    BEFORE = "before"
    BETWEEN = "between"
    AFTER = "after"
    ALONE = "alone"
    """There is no recorded loop at the same depth."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One added statement."""

    path: str
    first: int
    last: int
    """Lines in the edited text, inclusive."""
    column: int
    line: int
    """Line of the statement itself, after its decorators."""
    kind: ProbeKind
    names: tuple[str, ...]
    """The names that it logs; `*` stands for a part that is known only at run time."""
    function: str
    loops: tuple[str, ...]
    """Recorded loops around it in its function, outermost first."""
    place: Position
    chains: tuple[tuple[str, ...], ...]
    """Loops that may run around it, including those of callers; empty if no call names its function."""
    depth: int
    """How many of `loops` a replay may enter in the middle; START: the replay starts with the program."""
    feeds: tuple[tuple[str, ...], ...] = ()
    """Other loops of its function whose iterations must run for it."""
    paths: tuple[tuple[str, ...], ...] = ()
    """Like `chains`, with the ids of the loops, because names may be shared."""
    fed_by: tuple[tuple[str, ...], ...] = ()
    """Like `feeds`, with ids, including the loops of callers."""
    runs_first: bool = False
    """Outside all loops, it certainly runs only before the loops that the text shows."""
    generators: tuple[str, ...] = ()
    """Random generators of the run that it draws from; they are saved and restored around it."""
    cautions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Naming:
    """A recorded statement that an edit rewrote to give names to a value it computes."""

    path: str
    line: int
    """Line of the statement that binds the names."""
    names: tuple[str, ...]
    into: int | None = None
    """Line of the recorded statement after it that reads the value by its name, if there is one."""

    def pushed(self, path: str, line: int, count: int) -> Naming:
        """Return the naming as it is after `count` lines were inserted before `line` of the file `path`."""
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
    """The recorded version with the probes in it: the source that is replayed."""
    variables: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """(path, function) -> names that only probes bind there; they are not part of the recorded state."""
    loops: Mapping[str, Mapping[int, LoopId]] = field(default_factory=dict)
    """Edited file -> line of each recorded loop -> its recorded id."""
    modules: tuple[str, ...] = ()
    """Files that only probes import."""
    namings: tuple[Naming, ...] = ()
    """Recorded statements that now name their values for probes."""
    known_loops: frozenset[LoopId] = frozenset()
    """The loops in modules, and in functions whose callers are all known."""

    def __bool__(self) -> bool:
        return bool(self.probes)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name the probes log, in the order of the text."""
        return tuple(dict.fromkeys(name for probe in self.probes for name in probe.names))

    def of(self, name: str) -> tuple[Probe, ...]:
        """Return the probes that log `name`, literally or by a pattern."""
        return tuple(p for p in self.probes if any(fits(pattern, name) for pattern in p.names))

    def places(self, path: str) -> Places:
        """Return the positions of probes in one file, for `isolate_probes`."""
        return {(p.line, p.column): p.generators for p in self.probes if p.path == path}


def fits(pattern: str, name: str) -> bool:
    """Return True if a pattern with `*` matches a logged name.

    >>> fits("norm/*", "norm/fc1"), fits("norm", "norms")
    (True, False)
    """
    parts = (re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(".*".join(parts), name, re.DOTALL) is not None


_REBINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_WRITES_ONLY = (ProbeKind.LOG, ProbeKind.PRINT)


def logging_fingerprint(probes: Probes, name: str) -> str:
    """Return a text that is equal for two edits of one version if they log `name` in the same way.

    Other log statements, and statements that only they need, do not count; nor do layout and comments.
    In doubt, the texts differ.
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
    """Return the statements that log `names`, the statements that bind their variables, and so on.

    Names that recorded code binds need no added statement. Other added statements that mention one of the
    variables may change it, so they are included; if such a statement is no probe, the edit is refused.
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
        bound_names = {
            name for probe in kept if probe.kind is not ProbeKind.IMPORT for name in binds[probe]
        }
        further = {
            probe
            for probe in nodes
            if probe not in kept
            and (
                binds[probe] & read
                or (probe.kind not in _WRITES_ONLY and mentions[probe] & bound_names)
            )
        }
        if not further:
            return kept
        kept |= further


def _nodes(probes: Probes) -> tuple[dict[str, ast.Module], dict[Probe, ast.stmt]]:
    """Return the files that have probes, and the syntax tree of each probe."""
    trees = {
        path: parse(probes.source[path], path)
        for path in sorted({probe.path for probe in probes.probes})
    }
    nodes_by_position = {
        (path, node.lineno, node.col_offset): node
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
    }
    return trees, {
        probe: nodes_by_position[probe.path, probe.line, probe.column] for probe in probes.probes
    }


def _kept(nodes: dict[Probe, ast.stmt], logging: tuple[Probe, ...]) -> set[Probe]:
    """Return the `logging` statements and all statements that may affect their values.

    These are statements that bind a name they mention; statements that mention a variable of probes,
    because they may change it; and statements that neither log, print nor bind anything.
    """
    kept = {probe for probe in nodes if probe in logging}
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
        further = {
            probe
            for probe in nodes
            if probe not in kept and (binds[probe] & read or mentions[probe] & own)
        }
        if not further:
            return kept
        kept |= further


def _mentioned(node: ast.stmt) -> set[str]:
    return {sub.id for sub in ast.walk(node) if isinstance(sub, ast.Name)}


def _drop(node: ast.AST, dropped: set[int]) -> None:
    for block in blocks(node):
        block[:] = [stmt for stmt in block if id(stmt) not in dropped]
        for stmt in block:
            _drop(stmt, dropped)
