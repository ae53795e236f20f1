"""Whether what fills a column is still the same, whatever else was added beside it."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence

from rearview.source.blocks import blocks, parse
from rearview.source.probe import Kind, Probe, Probes
from rearview.source.scopes import bound_by

_REBINDS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_TELLS = (Kind.LOG, Kind.PRINT)


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
        made = {name for probe in kept if probe.kind is not Kind.IMPORT for name in binds[probe]}
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
    kept |= {probe for probe in nodes if probe.kind is Kind.VALUE and not binds[probe]}
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
