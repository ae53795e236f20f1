"""Replay a study: build its tree, plan the order, run the cells, compare the outputs with the author's."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rearview.multiversion.compare_outputs import OutputMatch, OutputVerdict, Tolerance, compare
from rearview.multiversion.execution_tree import (
    ExecutionTree,
    Measurements,
    build_tree,
    chain_of,
    same_inputs,
    without_versions,
)
from rearview.multiversion.kept_states import stored_size
from rearview.multiversion.replay_tree import CellResult, ReplayEvent, ReplayResult, TreeReplay
from rearview.multiversion.study import Study, StudyVersion
from rearview.multiversion.study_sources import MACHINE_VARIABLES
from rearview.plan.versions.best_order import Order, order
from rearview.plan.versions.tree import START, CacheLevel, Tree
from rearview.source.cells import only_defines

START_SECONDS = 0.05
"""Estimated seconds to fork a process in which no cell has run yet, and to fill its work folder."""
FORK_SECONDS = 0.03
"""Estimated seconds of a fork; one fork keeps the state after a cell, another one restores the state."""
DISK_SECONDS_PER_BYTE = 1 / 400e6
"""Estimated seconds to pickle and write, or to read and unpickle, one byte of a stored state."""
_SESSION_VARIABLES = (
    *(
        "USER",
        "MAIL",
        "DISPLAY",
        "WAYLAND",
        "DBUS_",
        "XAUTHORITY",
        "WINDOWID",
        "TMUX",
        "STY",
        "VTE_",
    ),
    *(
        "VSCODE_",
        "GPG_",
        "LESS",
        "LS_COLORS",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "COLORTERM",
        "PYTEST_",
    ),
)
"""Prefixes of the names of environment variables that describe a terminal session."""
PLANNING_SECONDS = 0.8
"""Seconds after which the planner stops its search for a better order of the cells."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Limits and options for the replay of a study."""

    cache: float = 2e9
    """Bytes of memory that states kept between cells may take."""
    disk: float = 0.0
    """Bytes of disk that states kept between cells may take."""
    workers: int = 1
    planner: str = "auto"
    cell_limit: float | None = None
    backend: str = "auto"
    """`auto`: keep states as forked processes if possible; `stored`: always as files with the program's variables."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    keep_states: bool = False
    """Whether states on disk are not deleted, so that the next replay can use them."""


@dataclass(frozen=True, slots=True)
class CellReport:
    """Result of a replay for one cell of one version: its outputs, and how they compare with the author's."""

    number: int
    title: str
    verdict: OutputVerdict
    seconds: float
    shared: bool
    """Whether the replay computed the cell for another version that contains the same cell."""
    ended: str
    outputs: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class VersionReport:
    """Result of a replay for one version, with the results of its cells."""

    name: str
    program: str
    cells: tuple[CellReport, ...]
    problem: str = ""
    """Why the version could not be replayed, or why it ended early."""
    ended_by: int = 0
    """Number of the cell that ended the execution of the version early, from 1; 0 if none did."""

    @property
    def worst_match(self) -> OutputMatch:
        """The worst match of the cells' outputs; `DIFFERENT` also if there is a problem and no cell is `SAME`."""
        verdicts = [cell.verdict.match for cell in self.cells]
        if OutputMatch.DIFFERENT in verdicts or (self.problem and OutputMatch.SAME not in verdicts):
            return OutputMatch.DIFFERENT
        return (
            OutputMatch.NOT_COMPARABLE
            if OutputMatch.NOT_COMPARABLE in verdicts
            else OutputMatch.SAME
        )


@dataclass(frozen=True, slots=True)
class StudyReport:
    """The result of replaying a study: its tree and order, and the results of all versions."""

    tree: ExecutionTree
    order: Order
    versions: tuple[VersionReport, ...]
    result: ReplayResult

    @property
    def exact(self) -> bool:
        """Whether every version was replayed without a problem and no output differs from the author's."""
        return all(
            v.worst_match is not OutputMatch.DIFFERENT and not v.problem for v in self.versions
        )

    @property
    def computed_alone(self) -> float:
        """Seconds that the same cells would take if every version were replayed alone."""
        results = self.result.results
        return sum(
            results[node].seconds
            for path in self.tree.paths.values()
            for node in path
            if node in results
        )


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """An execution tree, the order in which it is replayed, and the cache levels in which states may be kept."""

    tree: ExecutionTree
    order: Order
    levels: tuple[CacheLevel, ...]
    names: Mapping[int, str]
    """Node -> name under which the state after the cell of the node is stored."""


def plan_study(
    study: Study,
    options: ReplayOptions,
    measurements: Measurements,
    store: Path | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> StudyPlan:
    """Return the execution tree of `study` and the best order found in which to replay this tree.

    `store` is a folder that may contain states of earlier replays, which are then loaded.
    """
    tree = build_tree(study, measurements, start=START_SECONDS)
    if tree.unavailable and len(tree.unavailable) < len(study.versions):
        smaller = without_versions(tree, list(tree.unavailable))
        tree = replace(smaller, unavailable=tree.unavailable)
    names = _state_names(tree)
    cells = []
    imports = _import_seconds(tree)
    for node, cell in enumerate(tree.tree.cells):
        size = stored_size(store, names[node]) if store is not None else None
        if size is not None:
            load = START_SECONDS + imports[node] + size * DISK_SECONDS_PER_BYTE
            cells.append(replace(cell, save=FORK_SECONDS, load=load, has_checkpoint=True))
        else:
            import_seconds = imports[node] if options.backend == "stored" else 0.0
            cells.append(replace(cell, save=FORK_SECONDS, load=FORK_SECONDS + import_seconds))
    planned = Tree.of(tree.tree.parent, cells, start=START_SECONDS, versions=tree.tree.versions)
    tree = replace(tree, tree=planned)
    levels = [CacheLevel(options.cache if options.backend != "stored" else 0.0)]
    room = options.disk if options.backend != "stored" else max(options.disk, options.cache)
    if room > 0:
        levels.append(
            CacheLevel(
                room, "disk", save_byte=DISK_SECONDS_PER_BYTE, load_byte=DISK_SECONDS_PER_BYTE
            )
        )
    end = clock() + PLANNING_SECONDS
    best_order = order(
        tree.tree,
        tuple(levels),
        planner=options.planner,
        workers=options.workers,
        patience=10**9,
        may_continue=lambda: clock() < end,
    )
    return StudyPlan(tree, best_order, tuple(levels), names)


def _import_seconds(tree: ExecutionTree) -> list[float]:
    """Return, for each node, the seconds of all cells up to the node that only import or define.

    Loading a stored state repeats the imports.
    """
    seconds: list[float] = []
    for node, tree_node in enumerate(tree.nodes):
        above = tree.tree.parent[node]
        own_seconds = tree.tree.cells[node].seconds if only_defines(tree_node.cell.text) else 0.0
        seconds.append(own_seconds + (seconds[above] if above != START else 0.0))
    return seconds


def _state_names(tree: ExecutionTree) -> dict[int, str]:
    """Return node -> name of its stored state; equal names imply equal lineage, interpreter, environment and files."""
    machine = f"{sys.version} {platform.machine()} {sorted(_state_variables(os.environ).items())}"
    version_hashes: dict[str, str] = {}
    for version in tree.study.versions:
        facts: list[list[Any]] = [[version.program, version.argv]]
        facts.append(sorted(version.environment.items()))
        for name, ref in sorted(version.files.items()):
            if ref.digest:
                facts.append([name, ref.digest])
            elif ref.file is not None:
                status = ref.file.stat()
                # with `st_ctime`, because a program can set the modification time of a changed file back
                times = f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"
                facts.append([name, f"{status.st_size} {times}"])
        version_hashes[version.name] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    names = {}
    for node, tree_node in enumerate(tree.nodes):
        text = f"{tree.tree.cells[node].lineage} {machine} {version_hashes[tree_node.versions[0]]}"
        names[node] = hashlib.sha256(text.encode()).hexdigest()[:40]
    return names


def _state_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environment` without those that describe the machine or the terminal session."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith((*MACHINE_VARIABLES, *_SESSION_VARIABLES))
    }


def replay_study(
    plan: StudyPlan,
    options: ReplayOptions,
    measurements: Measurements,
    *,
    programs: Mapping[str, bytes],
    environment: Mapping[str, str],
    python: str = sys.executable,
    store: Path | None = None,
    author_folder: Path | None = None,
    contents: Path | None = None,
    on_event: Callable[[ReplayEvent], None] = lambda _: None,
) -> StudyReport:
    """Replay a study as planned and compare the outputs of the cells with the author's.

    A cell that several versions share is computed for one of them. If the cell has read a file that differs in
    another of these versions, that other version is replayed again. No cell may change files in `author_folder`.
    `contents` is the folder with the contents of a study package; it is removed if this process is killed.
    """

    def run(plan: StudyPlan) -> ReplayResult:
        return TreeReplay(
            plan.tree,
            plan.order,
            plan.levels,
            programs=programs,
            measurements=measurements,
            workers=options.workers,
            python=python,
            environment=environment,
            store=store,
            author_folder=author_folder,
            contents=contents,
            cell_limit=options.cell_limit,
            backend=options.backend,
            names=plan.names,
            keep_stored=options.keep_states,
            on_event=on_event,
        ).run()

    result = run(plan)
    reports = _version_reports(plan.tree, result, options.tolerance)
    wrong_versions = versions_sharing_wrongly(plan.tree, result)
    replay_together = True
    while wrong_versions:
        result.notes.append(
            f"{', '.join(wrong_versions)}: computed again, because a shared cell read files that differ"
        )
        versions = [
            version for version in plan.tree.study.versions if version.name in wrong_versions
        ]
        groups = [versions] if replay_together else [[version] for version in versions]
        replay_together, wrong_versions = False, []
        for group in groups:
            smaller_plan = plan_study(Study(tuple(group)), options, measurements, store)
            more_results = run(smaller_plan)
            wrong_versions += versions_sharing_wrongly(smaller_plan.tree, more_results)
            reports |= _version_reports(smaller_plan.tree, more_results, options.tolerance)
            result.add(more_results)
        reports = {name: reports[name] for name in plan.tree.paths}
    for version in plan.tree.study.versions:
        if not version.notebook and version.name in reports:
            _keep_outputs(version, reports[version.name], measurements)
    unavailable = [
        VersionReport(name, "", (), f"It was not replayed: {why}.")
        for name, why in plan.tree.unavailable.items()
    ]
    return StudyReport(plan.tree, plan.order, (*reports.values(), *unavailable), result)


def versions_sharing_wrongly(tree: ExecutionTree, result: ReplayResult) -> list[str]:
    """Return the names of the versions that took over a cell's result wrongly.

    The cell was computed for another version, and read a file that differs between the two versions.
    """
    versions = {version.name: version for version in tree.study.versions}
    wrong_versions = []
    for name, path in tree.paths.items():
        for node in path:
            computed = result.results.get(node)
            if computed is None or computed.version in {"", name}:
                continue
            if not same_inputs(versions[computed.version], versions[name], computed.reads):
                wrong_versions.append(name)
                break
    return wrong_versions


def _keep_outputs(version: StudyVersion, report: VersionReport, measurements: Measurements) -> None:
    chain = ""
    for cell, replayed in zip(version.cells, report.cells, strict=True):
        chain = chain_of(chain, cell.code)
        if replayed.ended in {"done", "exit"}:
            measurements.keep_outputs(chain, replayed.outputs)


def _version_reports(
    tree: ExecutionTree, result: ReplayResult, tolerance: Tolerance
) -> dict[str, VersionReport]:
    return {
        version.name: _version_report(tree, version, result, tolerance)
        for version in tree.study.versions
        if version.name in tree.paths
    }


def _version_report(
    tree: ExecutionTree, version: StudyVersion, result: ReplayResult, tolerance: Tolerance
) -> VersionReport:
    cells: list[CellReport] = []
    problem, ended_by = "", 0
    nodes = tree.paths[version.name]
    stopped: CellResult | None = None
    for i, node in enumerate(nodes):
        cell = version.cells[i]
        cell_result = result.results.get(node)
        first = tree.nodes[node].versions[0] == version.name
        if stopped is not None or cell_result is None:
            verdict = OutputVerdict(
                OutputMatch.NOT_COMPARABLE, "it did not run: a cell before it ended the program"
            )
            if stopped is not None and stopped.ended == "exit":
                verdict = OutputVerdict(OutputMatch.SAME, "the program had ended")
            cells.append(CellReport(i + 1, cell.title, verdict, 0.0, not first, "not run"))
            continue
        verdict = _cell_verdict(version, nodes, i, result, tolerance)
        cells.append(
            CellReport(
                i + 1,
                cell.title,
                verdict,
                cell_result.seconds,
                not first,
                cell_result.ended,
                cell_result.outputs,
            )
        )
        if not cell_result.continues:
            stopped = cell_result
            if cell_result.ended != "exit":
                # if the verdict is `SAME`, the author's cell failed with the same error
                if verdict.match is not OutputMatch.SAME:
                    ended_by = i + 1
                    problem = f"Cell {ended_by} ({cell.title}) ended the branch: {_failure_text(cell_result)}."
    if version.printed is not None and not problem:
        cells = _with_printed(version, nodes, result, cells, tolerance)
    return VersionReport(version.name, version.program, tuple(cells), problem, ended_by)


def _failure_text(result: CellResult) -> str:
    error = next((o for o in result.outputs if o.get("output_type") == "error"), None)
    if error is not None:
        return f"{error.get('ename')}: {str(error.get('evalue'))[:200]}"
    return result.why or result.ended


def _cell_verdict(
    version: StudyVersion,
    nodes: tuple[int, ...],
    i: int,
    result: ReplayResult,
    tolerance: Tolerance,
) -> OutputVerdict:
    cell, cell_result = version.cells[i], result.results[nodes[i]]
    if cell.outputs is None and any(
        later_cell.parts > j and later_cell.outputs is not None
        for j, later_cell in enumerate(version.cells[i:])
    ):
        return OutputVerdict(OutputMatch.SAME, "a part of a loop: judged at its end")
    if cell.outputs is None and cell_result.ended in {"failed", "stopped"}:
        return OutputVerdict(
            OutputMatch.DIFFERENT, f"it {cell_result.ended}: {_failure_text(cell_result)}"
        )
    if cell_result.ended == "stopped":
        return OutputVerdict(OutputMatch.DIFFERENT, cell_result.why)
    outputs: list[dict[str, Any]] = []
    for node in nodes[i - cell.parts + 1 : i + 1]:
        outputs.extend(result.results[node].outputs if node in result.results else ())
    return compare(cell.outputs, outputs, tolerance)


def _with_printed(
    version: StudyVersion,
    nodes: tuple[int, ...],
    result: ReplayResult,
    cells: list[CellReport],
    tolerance: Tolerance,
) -> list[CellReport]:
    """Return `cells` with one verdict, at the last cell, about all text that the script printed.

    The printed text of a recorded script was not recorded per cell.
    """
    replayed_text = "".join(
        str(output.get("text", ""))
        for node in nodes
        if node in result.results
        for output in result.results[node].outputs
        if output.get("output_type") == "stream" and output.get("name") == "stdout"
    )
    author_outputs = [{"output_type": "stream", "name": "stdout", "text": version.printed}]
    replayed_outputs = [{"output_type": "stream", "name": "stdout", "text": replayed_text}]
    verdict = compare(
        author_outputs if version.printed else [],
        replayed_outputs if replayed_text else [],
        tolerance,
    )
    whole_verdict = OutputVerdict(
        verdict.match, verdict.why or "all that was printed is the same", verdict.diff
    )
    cell_verdict = OutputVerdict(
        OutputMatch.SAME, "judged by all that was printed, at the last cell"
    )
    if not cells:
        return cells
    return [
        *(replace(c, verdict=cell_verdict) for c in cells[:-1]),
        replace(cells[-1], verdict=whole_verdict),
    ]
