"""One added statement (`Probe`) and all statements that an edit adds (`Probes`): the result of `find`.

`logging_fingerprint` is equal for two edits that log a name in the same way, even if they also add other statements.
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
    """The statement logs named values, to Rearview or to a tracker."""
    PRINT = "print"
    """The statement prints, or logs a line of text."""
    IMPORT = "import"
    DEFINITION = "definition"
    VALUE = "value"
    """The statement computes a value that other probes read."""


class Position(StrEnum):
    """Position of a statement relative to the recorded loops in the same body of a loop, function or module."""

    BEFORE = "before"
    BETWEEN = "between"
    AFTER = "after"
    ALONE = "alone"
    """The body that contains the probe contains no recorded loop."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One statement that an edit adds, with the facts that a replay needs."""

    path: str
    first: int
    last: int
    """First and last line of the statement in the edited text, with its decorators."""
    column: int
    line: int
    """Line of the statement without its decorators."""
    kind: ProbeKind
    names: tuple[str, ...]
    """The names that the probe logs; `*` replaces parts that are known only at run time."""
    function: str
    loops: tuple[str, ...]
    """Names of the recorded loops of its function that enclose the probe, from the outermost in."""
    place: Position
    chains: tuple[tuple[str, ...], ...]
    """All sequences of names of nested loops, with loops of callers, that may enclose the probe at run time.

    Empty if the callers of its function are unknown."""
    depth: int
    """Number of `loops`, from the outermost in, of which a replay may skip first iterations. The other `loops` must
    run from their first iteration. START: the replay must start with the program."""
    feeding_loops: tuple[tuple[str, ...], ...] = ()
    """Other loops of its function that must run because they assign what the probe reads, each as the names of the
    nested loops from the outermost in."""
    paths: tuple[tuple[str, ...], ...] = ()
    """The loop paths in which the probe may run: `chains` with ids of loops, because two loops may have one name."""
    feeding_paths: tuple[tuple[str, ...], ...] = ()
    """The loop paths of `feeding_loops`, with loops of callers."""
    runs_first: bool = False
    """Whether the probe is before all loops in the same body, and its function is not called after a loop has run."""
    generators: tuple[str, ...] = ()
    """Expressions of random generators of the run that the probe uses; a replay restores their states afterwards."""
    cautions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VariableExtraction:
    """A recorded statement from which an edit extracted variables; lines are of the edited text."""

    path: str
    line: int
    """Line of the statement that assigns the variables."""
    names: tuple[str, ...]
    into: int | None = None
    """Line of the recorded statement that reads the variable, if a separate statement assigns it; otherwise None."""

    def shifted(self, path: str, line: int, count: int) -> VariableExtraction:
        """Return the extraction with its line numbers after `count` lines were inserted before `line` of `path`."""
        if path != self.path:
            return self
        into = self.into
        if into is not None and into >= line:
            into += count
        return replace(self, line=self.line + (count if self.line >= line else 0), into=into)


@dataclass(frozen=True, slots=True)
class Probes:
    """All probes that an edit adds, with the edited source."""

    probes: tuple[Probe, ...]
    source: Mapping[str, str]
    """File path -> text of the recorded version with the probes added, as a replay runs it."""
    variables: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """(path, function) -> variables of the function that only probes bind, so that the recorded state lacks them."""
    loops: Mapping[str, Mapping[int, LoopId]] = field(default_factory=dict)
    """Path of an edited file -> {line of a recorded loop: its recorded id}."""
    modules: tuple[str, ...] = ()
    """Paths of the new files, which only probes import."""
    extractions: tuple[VariableExtraction, ...] = ()
    """Recorded statements from which the edit extracted variables."""
    known_loops: frozenset[LoopId] = frozenset()
    """The recorded loops at the top level of files, and in functions whose callers are all known."""

    def __bool__(self) -> bool:
        return bool(self.probes)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that the probes log, in the order of the text."""
        return tuple(dict.fromkeys(name for probe in self.probes for name in probe.names))

    def of(self, name: str) -> tuple[Probe, ...]:
        """Return the probes that log `name`, literally or by a pattern with `*`."""
        return tuple(p for p in self.probes if any(fits(pattern, name) for pattern in p.names))

    def places(self, path: str) -> Places:
        """Return {(line, column) of a probe: its random generators} for one file, as `isolate_probes` expects it."""
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
    """Return a hash that is equal for two edits of one version if they log `name` in the same way.

    Log statements of other names, statements that only these need, layout and comments do not count. In doubt, the
    hashes differ.
    """
    trees, nodes = _nodes(probes)
    affecting_probes = _affecting_probes(nodes, probes.of(name))
    dropped_ids = {id(node) for probe, node in nodes.items() if probe not in affecting_probes}
    extraction_paths = {extraction.path for extraction in probes.extractions}
    digest = hashlib.sha256()
    for path, tree in trees.items():
        if path in extraction_paths or any(probe.path == path for probe in affecting_probes):
            _drop(tree, dropped_ids)
            digest.update(f"{path}\0{ast.dump(tree)}\0".encode("utf-8", "surrogatepass"))
    for path in sorted({*probes.modules, *(extraction_paths - set(trees))}):
        digest.update(f"{path}\0{probes.source[path]}\0".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:32]


def needed_probes(probes: Probes, names: Sequence[str]) -> set[Probe]:
    """Return the probes that log `names`, the probes that bind the variables which these read, and so on.

    Variables that recorded code binds need no probe. Another probe that mentions a variable which one of the
    returned probes binds may change the variable, so it is included, unless it only logs or prints. If such a
    statement is refused, the edit is refused.
    """
    _, nodes = _nodes(probes)
    selected_probes = {probe for name in names for probe in probes.of(name)}
    own_names = {(path, name) for (path, _), bound in probes.variables.items() for name in bound}
    binds = {
        probe: {name for name, _ in bound_by(node) if (probe.path, name) in own_names}
        for probe, node in nodes.items()
    }
    mentions = {probe: _mentioned(node) for probe, node in nodes.items()}
    while True:
        read_names = {name for probe in selected_probes for name in mentions[probe]}
        bound_names = {
            name
            for probe in selected_probes
            if probe.kind is not ProbeKind.IMPORT
            for name in binds[probe]
        }
        further_probes = {
            probe
            for probe in nodes
            if probe not in selected_probes
            and (
                binds[probe] & read_names
                or (probe.kind not in _WRITES_ONLY and mentions[probe] & bound_names)
            )
        }
        if not further_probes:
            return selected_probes
        selected_probes |= further_probes


def _nodes(probes: Probes) -> tuple[dict[str, ast.Module], dict[Probe, ast.stmt]]:
    """Return ({path: syntax tree} of the files that have probes, {probe: its syntax node})."""
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


def _affecting_probes(nodes: dict[Probe, ast.stmt], logging: tuple[Probe, ...]) -> set[Probe]:
    """Return the probes `logging`, and all other probes that may affect the values that `logging` log.

    A probe may affect a value if it binds a name that an affecting probe mentions, if it mentions a variable that
    an affecting probe binds (and so may change it), or if it neither logs, prints nor binds anything.
    """
    selected_probes = {probe for probe in nodes if probe in logging}
    binds = {probe: {name for name, _ in bound_by(node)} for probe, node in nodes.items()}
    selected_probes |= {
        probe for probe in nodes if probe.kind is ProbeKind.VALUE and not binds[probe]
    }
    mentions = {probe: _mentioned(node) for probe, node in nodes.items()}
    while True:
        read_names = {name for probe in selected_probes for name in mentions[probe]}
        own_names = {
            name
            for probe in selected_probes
            if not isinstance(nodes[probe], _REBINDS)
            for name in binds[probe]
        }
        further_probes = {
            probe
            for probe in nodes
            if probe not in selected_probes
            and (binds[probe] & read_names or mentions[probe] & own_names)
        }
        if not further_probes:
            return selected_probes
        selected_probes |= further_probes


def _mentioned(node: ast.stmt) -> set[str]:
    return {sub.id for sub in ast.walk(node) if isinstance(sub, ast.Name)}


def _drop(node: ast.AST, dropped_ids: set[int]) -> None:
    for block in blocks(node):
        block[:] = [stmt for stmt in block if id(stmt) not in dropped_ids]
        for stmt in block:
            _drop(stmt, dropped_ids)
