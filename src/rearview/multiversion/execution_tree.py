"""Build the execution tree of a study: cells of several versions with equal code and lineage become one node."""

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
"""Seconds that a cell is assumed to take if it was never measured."""
UNKNOWN_BYTES = 64 << 20
"""Size in bytes that is assumed for the state after a cell that was never measured."""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """Measurements of one execution of a cell: its seconds, the size of the state after it, and the files it read."""

    seconds: float
    size: int
    reads: tuple[str, ...] = ()
    complete: bool = False
    """Whether `reads` includes files that C code and child processes read."""


def cells_as_written(
    version: StudyVersion, measurements: Measurements
) -> list[tuple[CellFacts | None, tuple[dict[str, Any], ...] | None]]:
    """Return (measurements, outputs of the last replay) for each cell that the author wrote; None for unknown ones.

    If a loop was split into several cells of `version`, their measurements are added up.
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
            part_outputs = [o for _, o in parts if o is not None]
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
                    tuple(item for part in part_outputs for item in part)
                    if len(part_outputs) == len(parts)
                    else None,
                )
            )
    return rows


class Measurements:
    """Measurements of cells in earlier replays and recorded runs.

    A cell is identified by its `chain`: the hash of the code up to and including the cell (`chain_of`). Measurements
    by replays are appended to a file of JSON lines; the last line about a cell counts.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self._facts: dict[str, CellFacts] = {}
        if file is not None and file.exists():
            for line in file.read_text("utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    facts = CellFacts(
                        float(entry["seconds"]),
                        int(entry["size"]),
                        tuple(entry["reads"]),
                        complete=bool(entry.get("complete")),
                    )
                    self._facts[str(entry["chain"])] = facts
                except (ValueError, KeyError, TypeError):
                    continue  # a crash has cut off the line: the cell will be measured again

    def get(self, chain: str) -> CellFacts | None:
        """Return the measurements of the cell with the hash `chain`, or None if the cell was never measured."""
        return self._facts.get(chain)

    def add_recorded(self, chain: str, facts: CellFacts) -> None:
        """Set the measurements of a recorded run, unless the cell has measurements; do not write them to the file."""
        self._facts.setdefault(chain, facts)

    def add(self, chain: str, facts: CellFacts) -> None:
        """Set the measurements of a cell; write them to the file if they differ by over 20 % from the previous ones."""
        previous_facts = self._facts.get(chain)
        self._facts[chain] = facts
        similar = (
            previous_facts is not None
            and (previous_facts.reads, previous_facts.complete) == (facts.reads, facts.complete)
            and (
                0.8 <= (facts.seconds + 0.01) / (previous_facts.seconds + 0.01) <= 1.25
                and 0.8 <= (facts.size + 1) / (previous_facts.size + 1) <= 1.25
            )
        )
        if self.file is None or similar:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        line = {"chain": chain, "seconds": round(facts.seconds, 6), "size": facts.size}
        line |= {"complete": True} if facts.complete else {}
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line | {"reads": list(facts.reads)}) + "\n")

    def keep_outputs(self, chain: str, outputs: Sequence[dict[str, Any]]) -> None:
        """Store the outputs of a script's cell in a file. Notebooks contain their outputs already."""
        if self.file is not None:
            folder = self.file.parent / "outputs"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{chain}.json").write_text(json.dumps(list(outputs)), "utf-8")

    def outputs(self, chain: str) -> tuple[dict[str, Any], ...] | None:
        """Return the outputs of a script's cell in the last replay, or None if they were not stored."""
        if self.file is None:
            return None
        try:
            outputs = json.loads(
                (self.file.parent / "outputs" / f"{chain}.json").read_text("utf-8")
            )
        except (OSError, ValueError):
            return None
        return tuple(outputs)


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the execution tree: a cell, and the versions that share it."""

    cell: StudyCell
    chain: str
    """Hash of the code of the cell and of all cells before it."""
    number: int
    """Number of the cell in each of its versions, from 1."""
    versions: tuple[str, ...]
    """Names of the versions that contain the cell."""
    measured: bool
    """Whether the seconds of the cell and the size of the state after the cell were measured."""


@dataclass(frozen=True, slots=True)
class ExecutionTree:
    """The versions of a study merged into a tree, in which versions share their first cells as far as possible."""

    tree: Tree
    nodes: tuple[Node, ...]
    study: Study
    paths: Mapping[str, tuple[int, ...]]
    """Name of a version -> indices of the nodes of its cells, in order."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Name of a version that cannot be replayed -> the reason."""
    unshared: tuple[str, ...] = ()
    """Sentences that say why versions with the same code up to a cell do not share the state after the cell."""

    @property
    def cells_in_all(self) -> int:
        """Number of cells of all versions; a shared cell counts once for each version that contains it."""
        return sum(map(len, self.paths.values()))


def chain_of(before: str, code: str) -> str:
    """Return the chain hash of a cell from the hash `code` of its code and the chain hash of the cell before it."""
    return hashlib.sha256(f"{before} {code}".encode()).hexdigest()[:32]


def build_tree(
    study: Study, measurements: Measurements | None = None, *, start: float = 0.0
) -> ExecutionTree:
    """Return the execution tree of `study`; starting a process for a version takes `start` seconds.

    Cells of several versions become one node if their lineage is equal. The lineage of cell i is
    g_i = (g_{i-1}, h_i, E_i): the lineage of the previous cell, the hash of the code, and the inputs of the cell that
    differ between versions (files by content, arguments, environment variables). If it is not recorded which cell
    reads an input, the input is counted for the earliest cell that may read it, so that no state is shared wrongly.
    """
    if not study.versions:
        raise UsageError("There are no versions to put into a tree.", slug="no-versions")
    measurements = measurements or Measurements()
    study = split_loops(study)
    differing = _differing_inputs(study.versions)
    chains: list[list[str]] = []
    rows: list[list[Cell]] = []
    unavailable: dict[str, str] = {}
    groups, unshared = _recorded_groups(study.versions)
    for version in study.versions:
        missing_files = [
            n for n, ref in version.files.items() if ref.file is None and n != version.program
        ]
        if missing_files:
            unavailable[version.name] = (
                f"it read {missing_files[0]}, which is gone or has changed since it was recorded"
            )
        version_chains: list[str] = []
        lineage = f"{'notebook' if version.notebook else 'script'} in {version.cwd}"
        chain = ""
        events = _inputs_by_cell(version, differing, measurements)
        row: list[Cell] = []
        for i, cell in enumerate(version.cells):
            chain = chain_of(chain, cell.code)
            version_chains.append(chain)
            inputs = [*events.get(i, []), *groups.get((version.name, i), [])]
            text = json.dumps([lineage, cell.code, inputs])
            lineage = hashlib.sha256(text.encode()).hexdigest()[:32]
            row.append(_planned_cell(cell, lineage, measurements.get(chain)))
        chains.append(version_chains)
        rows.append(row)
    tree = merge(rows, start=start)
    return replace(
        _execution_tree(tree, study, chains, measurements, unavailable), unshared=tuple(unshared)
    )


def _recorded_groups(
    versions: Sequence[StudyVersion],
) -> tuple[dict[tuple[str, int], list[Any]], list[str]]:
    """Return artificial inputs that keep versions apart whose recorded runs differ, and the reasons as sentences.

    The first result is (name of the version, index of the cell) -> inputs to add to the cell's lineage. Two versions
    share the state after a cell only if both runs read the same inputs, had similar costs, and left equal values in
    the variables that have a fingerprint.
    """
    recorded: dict[str, list[tuple[str, CellLineage]]] = {}
    groups: dict[tuple[str, int], list[Any]] = {}
    reasons: list[str] = []
    for version in versions:
        chain = ""
        for i, cell in enumerate(version.cells):
            if cell.lineage is None:
                break
            chain = chain_of(chain, cell.code)
            peers = recorded.setdefault(chain, [])
            why = [(name, difference(peer, cell.lineage)) for name, peer in peers]
            index = next((number for number, (_, text) in enumerate(why) if not text), len(peers))
            if index == len(peers):
                peers.append((version.name, cell.lineage))
            if index:
                # this keeps later cells apart, too: their lineage contains the lineage of this cell
                groups[version.name, i] = [["recorded", index]]
                name, text = why[0]
                reasons.append(
                    f"{version.name} shares no state with {name} after cell {i + 1}: {text}"
                )
                chain = f"{chain} {index}"
    return groups, reasons


def _planned_cell(cell: StudyCell, lineage: str, facts: CellFacts | None) -> Cell:
    seconds = facts.seconds if facts else cell.seconds
    size = facts.size if facts else cell.size
    return Cell(
        cell.code,
        lineage,
        UNKNOWN_SECONDS if seconds is None else seconds,
        UNKNOWN_BYTES if size is None else max(1, size),
    )


def _execution_tree(
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
        if entry is None:  # impossible: each node that `merge` makes belongs to a version
            raise AssertionError
        cell, chain, number = entry
        measured = measurements.get(chain) is not None or cell.seconds is not None
        nodes.append(Node(cell, chain, number, tuple(names), measured))
    return ExecutionTree(tree, tuple(nodes), study, paths, unavailable)


@dataclass(frozen=True, slots=True)
class _Differences:
    """Which inputs differ between the versions of a study."""

    files: tuple[str, ...]
    absent: frozenset[str]
    """The members of `files` that at least one version does not have."""
    variables: frozenset[str]
    programs: bool
    """Whether the programs of the versions have different file paths."""
    folders: bool
    """Whether the programs are in different folders, and the project has modules that they may import from there."""


def _differing_inputs(versions: Sequence[StudyVersion]) -> _Differences:
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
        frozenset(
            variable
            for variable, values_of_versions in values.items()
            if len(values_of_versions) > 1
        ),
        programs=len(programs) > 1,
        folders=modules and len({Path(program).parent for program in programs}) > 1,
    )


def _content(version: StudyVersion, name: str) -> str:
    """Return the hash of the file `name` in a version, or "" if the file is no input of the version.

    Return `here` if the file exists and has no hash, and `absent` if the version lacks the file but may depend on that.
    """
    if name == version.program:
        return ""  # programs are compared cell by cell
    if version.inputs is None:
        return version.files[name].digest or "here" if name in version.files else "absent"
    if name in version.inputs:
        return version.files[name].digest
    if name in version.files or name.endswith(".py"):
        return ""
    # the version lacks the file, and a program that lists the folder may depend on that
    folder = name.rpartition("/")[0]
    suffix = Path(name).suffix
    peers = (peer for peer in version.inputs if peer.rpartition("/")[0] == folder)
    return "absent" if any(Path(peer).suffix == suffix for peer in peers) else ""


def _inputs_by_cell(
    version: StudyVersion, differing: _Differences, measurements: Measurements
) -> dict[int, list[Any]]:
    """Return index of a cell -> those of `differing` that count as inputs of this cell, with their contents."""
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
    may_read = [_may_read(cell, modules) for cell in version.cells]
    for name in differing.files:
        content = _content(version, name)
        if content:
            absent_in_some = name in differing.absent
            index = _first_reader(name, reads, may_read, absent_in_some, absent=content == "absent")
            if index is not None:
                events.setdefault(index, []).append(["file", name, content])
    first = _first_from(may_read, 0)
    if version.argv:
        events.setdefault(first, []).append(["arguments", *version.argv])
    if differing.programs:
        uses = next(
            (i for i, cell in enumerate(version.cells) if uses_its_file_name(cell.text)), None
        )
        if uses is not None:
            # the file name may be used in a function that only a later cell calls
            index = _first_from(may_read, uses)
            events.setdefault(index, []).append(["program", version.program])
    if differing.folders and not version.notebook:
        events.setdefault(first, []).append(["folder", str(Path(version.program).parent)])
    variables = sorted(differing.variables & set(version.environment))
    if variables:
        # libraries read environment variables when they are imported: assume that the first cell reads them
        settings = [[name, version.environment[name]] for name in variables]
        events.setdefault(0, []).append(["environment", settings])
    return events


class _CellReads(NamedTuple):
    """The names of the files that a cell read, and whether this list is complete."""

    names: tuple[str, ...]
    complete: bool


def project_modules(version: StudyVersion) -> frozenset[str]:
    """Return the names of modules and packages that a version may import from its project's files."""
    names: set[str] = set()
    for name in version.files:
        if name.endswith(".py") and name != version.program:
            path = Path(name)
            names.update((*path.parts[:-1], path.stem))
    return frozenset(names)


def _may_read(cell: StudyCell, modules: frozenset[str]) -> bool:
    """Return True if a cell may read files.

    Only a cell that just imports and defines cannot, unless it imports one of the project's `modules`.
    """
    return not only_defines(cell.text) or not modules.isdisjoint(imported_modules(cell.text))


def _first_from(may_read: Sequence[bool], start: int) -> int:
    """Return the index of the first cell at or after `start` that may read files; the last cell's if there is none."""
    return next((i for i in range(start, len(may_read)) if may_read[i]), len(may_read) - 1)


def _first_reader(
    name: str,
    reads: Sequence[_CellReads | None],
    may_read: Sequence[bool],
    absent_in_some: bool,
    *,
    absent: bool,
) -> int | None:
    """Return the index of the first cell that may read the file `name`, or None if no cell reads it.

    `absent_in_some` says that some version lacks the file, `absent` that this version does.
    """
    names = {name, f"{name.rpartition('/')[0]}/"}
    if absent_in_some and name.endswith(".py"):
        # a cell that searched one of these folders for modules depends on whether the file exists
        above = [str(folder) for folder in Path(name).parents]
        names |= {"*.py" if folder == "." else f"{folder}/*.py" for folder in above}
    unmeasured = len(reads)
    for i, cell_reads in enumerate(reads):
        if cell_reads is None:
            unmeasured = min(unmeasured, i)
            if may_read[i]:
                return i
        elif not names.isdisjoint(cell_reads.names):
            return i
    if unmeasured < len(reads):
        return unmeasured
    # no cell is known to have read the file, but if a list of reads is incomplete, a library may have read it
    all_complete = all(cell_reads is not None and cell_reads.complete for cell_reads in reads)
    return None if absent or all_complete else 0


def same_inputs(a: StudyVersion, b: StudyVersion, reads: Sequence[str]) -> bool:
    """Return True if the files `reads`, which a cell of one version read, are equal in both versions.

    `reads` may contain folders that the cell listed (`data/`), and folders that Python searched for modules (`*.py`).
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
    """Return the sorted files of a version directly in a folder, without `programs`.

    For a `name` that ends with `*.py`, return the names of the Python files, else (name, content id) of all files.
    """
    folder = Path(name.removesuffix("*.py").removesuffix("/"))
    folder_names = [
        each for each in version.files if Path(each).parent == folder and each not in programs
    ]
    if name.endswith("*.py"):
        return sorted(each for each in folder_names if each.endswith(".py"))
    return sorted((each, _bytes_of(version, each)) for each in folder_names)


def _bytes_of(version: StudyVersion, name: str) -> str:
    """Return a text that identifies the content of the file `name` in a version; '' if the version lacks the file."""
    ref = version.files.get(name)
    if ref is not None and ref.digest:
        return ref.digest
    if name == version.program and ref is None:
        return "".join(cell.code for cell in version.cells)
    return str(ref.file) if ref is not None else ""


def tree_to_json(tree: ExecutionTree) -> dict[str, Any]:
    """Return an execution tree as data for JSON, in under 100 bytes per node."""
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


def without_versions(tree: ExecutionTree, names: Sequence[str]) -> ExecutionTree:
    """Return the execution tree without the versions `names`."""
    versions = tuple(v for v in tree.study.versions if v.name not in names)
    rows = [[tree.tree.cells[n] for n in tree.paths[v.name]] for v in versions]
    chains = [[tree.nodes[n].chain for n in tree.paths[v.name]] for v in versions]
    smaller = merge(rows, start=tree.tree.start)
    return _execution_tree(
        smaller, replace(tree.study, versions=versions), chains, Measurements(), {}
    )
