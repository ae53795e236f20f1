"""Build the execution tree of a study: cells merged on code and lineage."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from rearview.errors import UsageError
from rearview.model.cell_lineage import CellLineage, difference
from rearview.multiversion.study import Study, StudyCell, StudyVersion, split_loops
from rearview.plan.versions.tree import START, Cell, Tree, merge
from rearview.source.cells import imported_modules, only_defines, uses_its_file_name

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
    complete: bool = False
    """Whether reads of C code and of child processes are among `reads`, too."""


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
                        all(f.complete for f in facts),
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
                        float(about["seconds"]),
                        int(about["size"]),
                        tuple(about["reads"]),
                        complete=bool(about.get("complete")),
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
            and (before.reads, before.complete) == (facts.reads, facts.complete)
            and (
                0.8 <= (facts.seconds + 0.01) / (before.seconds + 0.01) <= 1.25
                and 0.8 <= (facts.size + 1) / (before.size + 1) <= 1.25
            )
        )
        if self.file is None or close:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        line = {"chain": chain, "seconds": round(facts.seconds, 6), "size": facts.size}
        line |= {"complete": True} if facts.complete else {}
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
    differing = _differing(study.versions)
    chains: list[list[str]] = []
    rows: list[list[Cell]] = []
    unavailable: dict[str, str] = {}
    groups, unshared = _recorded_groups(study.versions)
    for version in study.versions:
        gone = [n for n, ref in version.files.items() if ref.place is None and n != version.program]
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
    absent: frozenset[str]
    """Those of them that some version does not have."""
    variables: frozenset[str]
    programs: bool
    """Whether the programs have different names."""
    folders: bool
    """Whether the programs lie in different folders, from which they may import modules."""


def _differing(versions: Sequence[StudyVersion]) -> _Differences:
    names = {name for version in versions for name in version.files}
    files = []
    absent = set()
    for name in sorted(names):
        contents = {_content(version, name) for version in versions} - {""}
        if len(contents) > 1:
            files.append(name)
            if "absent" in contents:
                absent.add(name)
    values: dict[str, set[str | None]] = {}
    for version in versions:
        for variable, value in version.environment.items():
            values.setdefault(variable, set()).add(value)
    programs = {version.program for version in versions}
    modules = any(name.endswith(".py") for name in names - programs)
    return _Differences(
        tuple(files),
        frozenset(absent),
        frozenset(variable for variable, seen in values.items() if len(seen) > 1),
        programs=len(programs) > 1,
        folders=modules and len({Path(program).parent for program in programs}) > 1,
    )


def _content(version: StudyVersion, name: str) -> str:
    """Return the content of a file for a version: a hash, `absent`, or "" if it is no input."""
    if name == version.program:
        return ""  # its code is compared cell by cell
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
    reads: list[_CellReads | None] = []
    chain = ""
    modules = project_modules(version)
    for cell in version.cells:
        chain = chain_of(chain, cell.code)
        facts = measurements.get(chain)
        if cell.reads is not None and (cell.lineage is not None or facts is None):
            reads.append(_CellReads(cell.reads, complete=cell.lineage is not None))
        else:
            reads.append(_CellReads(facts.reads, facts.complete) if facts is not None else None)
    working = [_works(cell, modules) for cell in version.cells]
    for name in differing.files:
        content = _content(version, name)
        if content:
            somewhere_absent = name in differing.absent
            at = _reader(name, reads, working, somewhere_absent, absent=content == "absent")
            if at is not None:
                events.setdefault(at, []).append(["file", name, content])
    first = _first_from(working, 0)
    if version.argv:
        events.setdefault(first, []).append(["arguments", *version.argv])
    if differing.programs:
        uses = next(
            (i for i, cell in enumerate(version.cells) if uses_its_file_name(cell.text)), None
        )
        if uses is not None:
            # a function that uses it may be called by a later cell
            at = _first_from(working, uses)
            events.setdefault(at, []).append(["program", version.program])
    if differing.folders and not version.notebook:
        events.setdefault(first, []).append(["folder", str(Path(version.program).parent)])
    variables = sorted(differing.variables & set(version.environment))
    if variables:
        # libraries read variables when they are imported: the first cell
        settings = [[name, version.environment[name]] for name in variables]
        events.setdefault(0, []).append(["environment", settings])
    return events


class _CellReads(NamedTuple):
    """The files that a cell was seen to read."""

    names: tuple[str, ...]
    complete: bool


def project_modules(version: StudyVersion) -> frozenset[str]:
    """Return the names by which a version may import files of its project."""
    names: set[str] = set()
    for name in version.files:
        if name.endswith(".py") and name != version.program:
            path = Path(name)
            names.update((*path.parts[:-1], path.stem))
    return frozenset(names)


def _works(cell: StudyCell, modules: frozenset[str]) -> bool:
    """Return True if a cell may read something: modules of the project may do so when they are imported."""
    return not only_defines(cell.text) or not modules.isdisjoint(imported_modules(cell.text))


def _first_from(working: Sequence[bool], start: int) -> int:
    """Return the index of the first cell from `start` on that does something."""
    return next((i for i in range(start, len(working)) if working[i]), len(working) - 1)


def _reader(
    name: str,
    reads: Sequence[_CellReads | None],
    working: Sequence[bool],
    somewhere_absent: bool,
    *,
    absent: bool,
) -> int | None:
    """Return the index of the first cell that may read a file; None if no cell does."""
    ways = {name, f"{name.rpartition('/')[0]}/"}
    if somewhere_absent and name.endswith(".py"):
        # where Python looked for modules, it would have come upon this one
        above = [str(folder) for folder in Path(name).parents]
        ways |= {"*.py" if folder == "." else f"{folder}/*.py" for folder in above}
    unseen = len(reads)
    for i, seen in enumerate(reads):
        if seen is None:
            unseen = min(unseen, i)
            if working[i]:
                return i
        elif not ways.isdisjoint(seen.names):
            return i
    if unseen < len(reads):
        return unseen
    # no cell was seen to read it; a library may have read it unseen, if it exists
    everything = all(seen is not None and seen.complete for seen in reads)
    return None if absent or everything else 0


def same_inputs(a: StudyVersion, b: StudyVersion, reads: Sequence[str]) -> bool:
    """Return True if all that a cell of one version was seen to read is the same for the other version.

    `reads` may name folders that were listed (`data/`), and folders in which Python looked for modules (`*.py`).
    """
    if a.files is b.files and a.program == b.program and a.cells == b.cells:
        return True
    programs = {a.program, b.program}
    for name in reads:
        if name.endswith(("/", "*.py")):
            if _listing(a, name, programs) != _listing(b, name, programs):
                return False
        elif _bytes_of(a, name) != _bytes_of(b, name):
            return False
    return True


def _listing(version: StudyVersion, name: str, programs: set[str]) -> list[Any]:
    """Return what a version finds in a folder, without the programs that are compared."""
    folder = Path(name.removesuffix("*.py").removesuffix("/"))
    inside = [
        each for each in version.files if Path(each).parent == folder and each not in programs
    ]
    if name.endswith("*.py"):
        return sorted(each for each in inside if each.endswith(".py"))
    return sorted((each, _bytes_of(version, each)) for each in inside)


def _bytes_of(version: StudyVersion, name: str) -> str:
    """Return what identifies the content of a file for a version; '' if it has none."""
    ref = version.files.get(name)
    if ref is not None and ref.digest:
        return ref.digest
    if name == version.program and ref is None:
        return "".join(cell.code for cell in version.cells)
    return str(ref.place) if ref is not None else ""


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
