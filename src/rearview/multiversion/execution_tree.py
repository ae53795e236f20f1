"""Build the execution tree of a study: cells merged on code and lineage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rearview.errors import UsageError
from rearview.model.cell_lineage import CellLineage, difference
from rearview.multiversion.study import Study, StudyCell, StudyVersion, split_loops
from rearview.plan.versions.tree import START, Cell, Tree, merge
from rearview.source.cells import imported_modules, only_defines

UNKNOWN_SECONDS = 1.0
"""Assumed for a cell that was never measured."""
UNKNOWN_BYTES = 64 << 20
"""Assumed for the state after a cell that was never measured."""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """Measurements of one execution of a cell."""

    seconds: float
    size: int
    reads: tuple[str, ...] = ()


def cells_as_written(
    version: StudyVersion, measurements: Measurements
) -> list[tuple[CellFacts | None, tuple[dict[str, Any], ...] | None]]:
    """Return (facts, outputs of the last replay) for each cell of the author.

    Loops of `version` may have been cut into parts; their facts are added up.
    """
    chain = ""
    rows: list[tuple[CellFacts | None, tuple[dict[str, Any], ...] | None]] = []
    for cell in version.cells:
        chain = chain_of(chain, cell.code)
        rows.append((measurements.get(chain), measurements.outputs(chain)))
        if cell.parts > 1:
            parts = rows[-cell.parts :]
            del rows[-cell.parts :]
            facts = [f for f, _ in parts if f is not None]
            shown = [o for _, o in parts if o is not None]
            whole = len(facts) == len(parts)
            rows.append(
                (
                    CellFacts(
                        sum(f.seconds for f in facts),
                        facts[-1].size,
                        tuple(sorted({name for f in facts for name in f.reads})),
                    )
                    if whole
                    else None,
                    tuple(item for part in shown for item in part)
                    if len(shown) == len(parts)
                    else None,
                )
            )
    return rows


class Measurements:
    """Facts that earlier replays measured, by the code of a cell and of all cells before it.

    An append-only file of JSON lines; the last line about a cell counts.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._facts: dict[str, CellFacts] = {}
        if file is not None and file.exists():
            for line in file.read_text("utf-8").splitlines():
                try:
                    about = json.loads(line)
                    facts = CellFacts(
                        float(about["seconds"]), int(about["size"]), tuple(about["reads"])
                    )
                    self._facts[str(about["chain"])] = facts
                except (ValueError, KeyError, TypeError):
                    continue  # a line cut short by a crash: that cell is measured again

    def get(self, chain: str) -> CellFacts | None:
        """Return the facts of the cell that ends a chain of cells; None if it was never measured."""
        return self._facts.get(chain)

    def learn(self, chain: str, facts: CellFacts) -> None:
        """Use facts from a recorded run, unless a replay has measured the cell; they are not written."""
        self._facts.setdefault(chain, facts)

    def add(self, chain: str, facts: CellFacts) -> None:
        """Store the facts of a cell."""
        before = self._facts.get(chain)
        self._facts[chain] = facts
        close = (
            before is not None
            and before.reads == facts.reads
            and (
                0.8 <= (facts.seconds + 0.01) / (before.seconds + 0.01) <= 1.25
                and 0.8 <= (facts.size + 1) / (before.size + 1) <= 1.25
            )
        )
        if self.file is None or close:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        line = {"chain": chain, "seconds": round(facts.seconds, 6), "size": facts.size}
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line | {"reads": list(facts.reads)}) + "\n")

    def keep_outputs(self, chain: str, outputs: Sequence[dict[str, Any]]) -> None:
        """Store the outputs of a script's cell, because only notebooks store outputs themselves."""
        if self.file is not None:
            folder = self.file.parent / "outputs"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{chain}.json").write_text(json.dumps(list(outputs)), "utf-8")

    def outputs(self, chain: str) -> tuple[dict[str, Any], ...] | None:
        """Return the outputs of a cell of a script in the last replay; None if they are not stored."""
        if self.file is None:
            return None
        try:
            kept = json.loads((self.file.parent / "outputs" / f"{chain}.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return tuple(kept)


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the tree, for people and for the engine."""

    cell: StudyCell
    chain: str
    """Hash of the code of the cell and of all cells before it."""
    number: int
    """Number of the cell in its version, from 1."""
    versions: tuple[str, ...]
    """Names of the versions that go through it."""
    measured: bool
    """Whether seconds and size were measured."""


@dataclass(frozen=True, slots=True)
class ExecutionTree:
    """The tree of the planner, with the cell of each node."""

    tree: Tree
    nodes: tuple[Node, ...]
    study: Study
    paths: Mapping[str, tuple[int, ...]]
    """Version -> its nodes, in order."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Version -> why it cannot be replayed."""
    unshared: tuple[str, ...] = ()
    """For each cell whose state versions with the same code do not share, a sentence with the reason."""

    @property
    def cells_in_all(self) -> int:
        """Number of cells of all versions; a cell that several versions share counts for each of them."""
        return sum(map(len, self.paths.values()))


def chain_of(before: str, code: str) -> str:
    """Return the hash of a cell's code and of the code before it."""
    return hashlib.sha256(f"{before} {code}".encode()).hexdigest()[:32]


def build_tree(
    study: Study, measurements: Measurements | None = None, *, start: float = 0.0
) -> ExecutionTree:
    """Return the execution tree of a study.

    The lineage of a cell is g_i = (g_{i-1}, h_i, E_i). E_i are the inputs of the cell that are not the
    same for all versions: files by content, arguments, environment variables. If it is not recorded
    which cell reads an input, it counts for the earliest cell that could, so that a state is never shared
    wrongly.
    """
    if not study.versions:
        raise UsageError("There are no versions to put into a tree.", slug="no-versions")
    measurements = measurements or Measurements()
    study = split_loops(study)
    programs = {version.program for version in study.versions}
    differing = _differing(study.versions, programs)
    chains: list[list[str]] = []
    rows: list[list[Cell]] = []
    unavailable: dict[str, str] = {}
    groups, unshared = _recorded_groups(study.versions)
    for version in study.versions:
        gone = [n for n, ref in version.files.items() if ref.place is None and n not in programs]
        if gone:
            unavailable[version.name] = (
                f"it read {gone[0]}, which is gone or has changed since it was recorded"
            )
        version_chains: list[str] = []
        lineage = f"{'notebook' if version.notebook else 'script'} in {version.cwd}"
        chain = ""
        events = _events(version, differing, measurements)
        row: list[Cell] = []
        for i, cell in enumerate(version.cells):
            chain = chain_of(chain, cell.code)
            version_chains.append(chain)
            inputs = [*events.get(i, []), *groups.get((version.name, i), [])]
            text = json.dumps([lineage, cell.code, inputs])
            lineage = hashlib.sha256(text.encode()).hexdigest()[:32]
            row.append(_planned(cell, lineage, measurements.get(chain)))
        chains.append(version_chains)
        rows.append(row)
    tree = merge(rows, start=start)
    return replace(
        _described(tree, study, chains, measurements, unavailable), unshared=tuple(unshared)
    )


def _recorded_groups(
    versions: Sequence[StudyVersion],
) -> tuple[dict[tuple[str, int], list[Any]], list[str]]:
    """Return marks that separate recorded states after the same code, and the reasons as sentences.

    Two versions share the state after a cell only if both runs read the same inputs, at similar cost, and left
    the same values in variables that have a fingerprint.
    """
    seen: dict[str, list[tuple[str, CellLineage]]] = {}
    groups: dict[tuple[str, int], list[Any]] = {}
    reasons: list[str] = []
    for version in versions:
        chain = ""
        for i, cell in enumerate(version.cells):
            if cell.lineage is None:
                break
            chain = chain_of(chain, cell.code)
            peers = seen.setdefault(chain, [])
            why = [(name, difference(peer, cell.lineage)) for name, peer in peers]
            at = next((number for number, (_, text) in enumerate(why) if not text), len(peers))
            if at == len(peers):
                peers.append((version.name, cell.lineage))
            if at:
                # later cells differ by this as well, because their lineage begins with it
                groups[version.name, i] = [["recorded", at]]
                name, text = why[0]
                reasons.append(
                    f"{version.name} shares no state with {name} after cell {i + 1}: {text}"
                )
                chain = f"{chain} {at}"
    return groups, reasons


def _planned(cell: StudyCell, lineage: str, facts: CellFacts | None) -> Cell:
    seconds = facts.seconds if facts else cell.seconds
    size = facts.size if facts else cell.size
    return Cell(
        cell.code,
        lineage,
        UNKNOWN_SECONDS if seconds is None else seconds,
        UNKNOWN_BYTES if size is None else max(1, size),
    )


def _described(
    tree: Tree,
    study: Study,
    chains: Sequence[Sequence[str]],
    measurements: Measurements,
    unavailable: Mapping[str, str],
) -> ExecutionTree:
    paths: dict[str, tuple[int, ...]] = {}
    members: list[list[str]] = [[] for _ in range(len(tree))]
    cells: list[tuple[StudyCell, str, int] | None] = [None] * len(tree)
    for version, end, version_chains in zip(study.versions, tree.versions, chains, strict=True):
        path = tuple(tree.path(START, end))
        paths[version.name] = path
        for i, node in enumerate(path):
            members[node].append(version.name)
            if cells[node] is None:
                cells[node] = (version.cells[i], version_chains[i], i + 1)
    nodes = []
    for entry, names in zip(cells, members, strict=True):
        if entry is None:  # merge makes no node without a version
            raise AssertionError
        cell, chain, number = entry
        measured = measurements.get(chain) is not None or cell.seconds is not None
        nodes.append(Node(cell, chain, number, tuple(names), measured))
    return ExecutionTree(tree, tuple(nodes), study, paths, unavailable)


@dataclass(frozen=True, slots=True)
class _Differences:
    """Inputs that are not the same for all versions."""

    files: tuple[str, ...]
    variables: frozenset[str]


def _differing(versions: Sequence[StudyVersion], programs: set[str]) -> _Differences:
    names = {name for version in versions for name in version.files} - programs
    files = []
    for name in sorted(names):
        contents = {_content(version, name) for version in versions} - {""}
        if len(contents) > 1:
            files.append(name)
    values: dict[str, set[str | None]] = {}
    for version in versions:
        for variable, value in version.environment.items():
            values.setdefault(variable, set()).add(value)
    return _Differences(
        tuple(files), frozenset(variable for variable, seen in values.items() if len(seen) > 1)
    )


def _content(version: StudyVersion, name: str) -> str:
    """Return the content of a file for a version: a hash, `absent`, or "" if it is no input."""
    if version.inputs is None:
        return version.files[name].digest or "here" if name in version.files else "absent"
    if name in version.inputs:
        return version.files[name].digest
    if name in version.files or name.endswith(".py"):
        return ""
    # absent, but a program that lists the folder may depend on its absence
    folder = name.rpartition("/")[0]
    suffix = Path(name).suffix
    peers = (other for other in version.inputs if other.rpartition("/")[0] == folder)
    return "absent" if any(Path(other).suffix == suffix for other in peers) else ""


def _events(
    version: StudyVersion, differing: _Differences, measurements: Measurements
) -> dict[int, list[Any]]:
    """Return, per cell, the inputs by which this version may differ from others."""
    events: dict[int, list[Any]] = {}
    if not version.cells:
        return events
    reads: list[tuple[str, ...] | None] = []
    chain = ""
    for cell in version.cells:
        chain = chain_of(chain, cell.code)
        facts = measurements.get(chain)
        reads.append(facts.reads if facts else cell.reads)
    for name in differing.files:
        content = _content(version, name)
        if content:
            at = _reader(version, name, reads, absent=content == "absent")
            if at is not None:
                events.setdefault(at, []).append(["file", name, content])
    working = next(
        (i for i, cell in enumerate(version.cells) if not only_defines(cell.text)),
        len(version.cells) - 1,
    )
    if version.argv:
        events.setdefault(working, []).append(["arguments", *version.argv])
    variables = sorted(differing.variables & set(version.environment))
    if variables:
        # libraries read variables when they are imported: the first cell
        settings = [[name, version.environment[name]] for name in variables]
        events.setdefault(0, []).append(["environment", settings])
    return events


def _reader(
    version: StudyVersion, name: str, reads: Sequence[tuple[str, ...] | None], *, absent: bool
) -> int | None:
    """Return the index of the first cell that may read a file; None if no cell does."""
    listed = f"{name.rpartition('/')[0]}/"
    module = name.removesuffix(".py").split("/")[0] if name.endswith(".py") else None
    unseen = len(reads)
    for i, (cell, seen) in enumerate(zip(version.cells, reads, strict=True)):
        if seen is None:
            unseen = min(unseen, i)
            if module and not (
                only_defines(cell.text) and module not in imported_modules(cell.text)
            ):
                return i
            if not module and not only_defines(cell.text):
                return i
        elif name in seen or listed in seen:
            return i
    if unseen < len(reads):
        return unseen
    # no measured cell read it through Python; a library may have read it, if it exists
    traced = all(cell.lineage is not None for cell in version.cells)
    return None if absent or traced else 0


def to_json(tree: ExecutionTree) -> dict[str, Any]:
    """Return the tree as plain data, in under 100 bytes per node."""
    plan = tree.tree
    return {
        "format": 1,
        "nodes": [
            [
                plan.parent[i],
                plan.cells[i].code[:10],
                plan.cells[i].lineage[:10],
                float(f"{plan.cells[i].seconds:.4g}"),
                plan.cells[i].size if node.measured else None,
                node.cell.title[:24],
            ]
            for i, node in enumerate(tree.nodes)
        ],
        "versions": {
            version.name: end
            for version, end in zip(tree.study.versions, plan.versions, strict=True)
        },
    }


def without(tree: ExecutionTree, names: Sequence[str]) -> ExecutionTree:
    """Return the tree without some versions."""
    keep = tuple(v for v in tree.study.versions if v.name not in names)
    rows = [[tree.tree.cells[n] for n in tree.paths[v.name]] for v in keep]
    chains = [[tree.nodes[n].chain for n in tree.paths[v.name]] for v in keep]
    smaller = merge(rows, start=tree.tree.start)
    return _described(smaller, replace(tree.study, versions=keep), chains, Measurements(), {})
