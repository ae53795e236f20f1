"""Open recorded runs, or scripts and notebooks on disk, as the versions of a study."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rearview.config import Settings
from rearview.errors import SourceError, UsageError
from rearview.model import Run
from rearview.model.cell_lineage import CellLineage, Event
from rearview.multiversion.execution_tree import CellFacts, Measurements, chain_of
from rearview.multiversion.package_metadata import study_from_crate
from rearview.multiversion.study import (
    FileRef,
    Study,
    StudyCell,
    StudyVersion,
    digest_of,
    program_cells,
    study_from_files,
)
from rearview.source.cells import imported_modules
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.create_files import make_folder
from rearview.store.printed_lines import read_printed_lines
from rearview.store.project import Project
from rearview.store.recorded_inputs import fingerprint, read_cells, read_environment
from rearview.store.runs import Runs
from rearview.store.versions.versions import Versions

MACHINE_VARIABLES = (
    *("HOME", "PATH", "PWD", "OLDPWD", "LANG", "TERM", "PYTHON", "XDG_", "TMP", "LC_", "SHELL"),
    *("LD_", "DYLD_", "GLIBC_", "GCONV_", "BASH_"),
    *(
        "SHLVL",
        "SSH_",
        "JPY_",
        "REARVIEW",
        "_",
        "PYDEVD",
        "COLUMNS",
        "LINES",
        "HOSTNAME",
        "LOGNAME",
    ),
)
"""Prefixes of the names of environment variables that a replay takes from this machine, not from the run."""
EXECUTED = "executed.ipynb"
"""Name of the file in a run's folder with the executed notebook and its outputs."""
MOST_RUNS = 500
"""Largest number of runs, the newest ones, from which the costs of cells are read."""
LEAST_STATE = 1 << 20
"""Lower limit, in bytes, for the assumed size of the state after a cell."""
READ_BY_LIBRARIES = (
    *(".parquet", ".feather", ".arrow", ".h5", ".hdf5", ".nc", ".safetensors", ".npy", ".npz"),
    *(".csv", ".tsv", ".duckdb", ".db", ".sqlite", ".png", ".jpg", ".jpeg", ".tif", ".tiff"),
)
"""Suffixes of files that always count as inputs of a run: libraries read them in C, which Python cannot observe."""


PROGRAMS = (".py", ".ipynb")
"""Suffixes of files that can be programs of a study."""


@dataclass(frozen=True, slots=True)
class OpenedStudy:
    """A study with the contents of its programs, measurements of its cells, and the folders that a replay uses."""

    study: Study
    programs: Mapping[str, bytes]
    measurements: Measurements
    store: Path | None
    title: str
    author_folder: Path | None = None
    """The author's folder; None if it does not exist on this machine."""
    contents: Path | None = None
    """Temporary folder with the contents of a study package; None if the study does not come from a package."""


def names_programs(words: Sequence[str]) -> bool:
    """Return True if one of the arguments `words` names a study package, a program or an RO-Crate folder, not a run."""
    return any(
        word.endswith((".rvz", *PROGRAMS)) or (Path(word) / "ro-crate-metadata.json").is_file()
        for word in words
    )


def open_programs(words: Sequence[str]) -> OpenedStudy:
    """Open the scripts and notebooks `words`, or the programs of an RO-Crate folder, as the versions of a study."""
    title = ""
    if Path(words[0]).is_dir():
        root = Path(words[0]).absolute()
        study, title = study_from_crate(root)
    else:
        files = [Path(word).absolute() for word in words]
        study = study_from_files(files)
        root = Path(os.path.commonpath([file.parent for file in files]))
    first = study.versions[0].program
    base = next(f for f in (root, *root.glob("*/"), *root.parents) if (f / first).is_file())
    programs = {v.name: (base / v.program).read_bytes() for v in study.versions}
    project = Project.find(root) or Project.create(root)
    author_folder = base if project.root.is_relative_to(base) else project.root
    return replace(_open_study(project, study, programs, title), author_folder=author_folder)


def open_runs(project: Project, runs: Sequence[Run]) -> OpenedStudy:
    """Open the recorded runs `runs` as the versions of a study."""
    study = study_from_runs(project, runs)
    versions = Versions(project, Settings.read(project.store))
    source = {run.name or run.id: run.version for run in runs}
    programs = {v.name: versions.read(source[v.name], v.program) for v in study.versions}
    return _open_study(project, study, programs, "")


def _open_study(
    project: Project, study: Study, programs: Mapping[str, bytes], title: str
) -> OpenedStudy:
    folder = project.store / "multiversion"
    measurements = Measurements(folder / "cells.jsonl")
    _learn_from_runs(project, measurements)
    return OpenedStudy(
        study,
        programs,
        measurements,
        folder / "states",
        title or project.root.name,
        project.root,
    )


def _learn_from_runs(project: Project, measurements: Measurements) -> None:
    """Add costs and read files from recorded runs to `measurements`, for cells that no replay has measured."""
    runs = Runs(project)
    for run in sorted(runs.ids())[-MOST_RUNS:]:
        chain = ""
        for number, cell in enumerate(read_cells(runs.folder(run)), 1):
            if cell.cell != number:
                break  # a resumed run has skipped cells, so the code that ran before this cell is not known
            chain = chain_of(chain, cell.code)
            if not any(event[0] in {"unseen", "more"} for event in cell.events):
                size = max(LEAST_STATE, cell.size - cell.before)
                reads = _project_files_read(cell.events, str(project.root))
                measurements.add_recorded(
                    chain, CellFacts(cell.seconds, size, reads, complete=True)
                )


def study_from_runs(project: Project, runs: Sequence[Run]) -> Study:
    """Return the study with one version for each of `runs`; raise if there are no runs."""
    if not runs:
        raise UsageError(
            f"{project.root} has no runs yet. Record one with `rearview run`.", slug="no-runs"
        )
    store = Versions(project, Settings.read(project.store))
    cache: dict[str, dict[str, bytes]] = {}
    return Study(tuple(_version_of_run(project, store, run, cache) for run in runs))


def _version_of_run(
    project: Project, store: Versions, run: Run, cache: dict[str, dict[str, bytes]]
) -> StudyVersion:
    if run.script.startswith("-m "):
        raise UsageError(
            f"Run {run.id} is of a module ({run.script}), which has no top-level cells. "
            "Runs of scripts and notebooks can be put into a tree.",
            slug="tree-module",
        )
    if run.version not in cache:
        cache[run.version] = store.files(run.version)
    sources = cache[run.version]
    script = os.path.normpath(run.script)
    if script not in sources:
        raise UsageError(
            f"The script {script} of run {run.id} is not in its version: it was ignored, or lies "
            "outside the project.",
            slug="tree-script",
        )
    folder = Runs(project).folder(run.id)
    environment = read_environment(folder)
    values = {
        name: value
        for name, value in (environment.values if environment else {}).items()
        if not name.startswith(MACHINE_VARIABLES)
    }
    end = run.end
    files = _files_of_run(project, run, {n: data for n, data in sources.items() if n != script})
    loaded = {os.path.normpath(name) for name in end.files or ()}
    inputs = {
        name
        for name in files
        if name in loaded or name not in sources or name.endswith(READ_BY_LIBRARIES)
    }
    read_paths = {run.current_path(path, str(project.root)) for path in end.inputs}
    inputs |= {name for name in files if str(project.root / name) in read_paths}
    lines = [line for line in read_printed_lines(folder) if line.stream == "out"]
    notebook = script.endswith(".ipynb")
    cells = program_cells(sources[script], script)
    executed_cells = _executed_cells(folder, cells) if notebook else None
    cells = _with_lineage(folder, executed_cells or cells, project)
    return StudyVersion(
        name=run.name or run.id,
        program=script,
        cells=cells
        if cells[:1] and cells[0].lineage
        else _with_estimated_costs(project, run, cells),
        notebook=notebook,
        cwd=_relative_folder(run.current_path(run.cwd, str(project.root)), project.root),
        argv=run.argv,
        environment=values,
        files=files,
        inputs=frozenset(inputs) if end else None,
        printed=None if executed_cells else "\n".join(line.text for line in lines),
        run=run.id,
    )


def _executed_cells(folder: Path, cells: tuple[StudyCell, ...]) -> tuple[StudyCell, ...] | None:
    """Return `cells` with the outputs that the run in `folder` displayed, or None if they were not stored."""
    try:
        executed = program_cells((folder / EXECUTED).read_bytes(), EXECUTED)
    except (OSError, SourceError):
        return None
    is_same = [cell.code for cell in executed] == [cell.code for cell in cells]
    return executed if is_same else None


def _with_lineage(
    folder: Path, cells: tuple[StudyCell, ...], project: Project
) -> tuple[StudyCell, ...]:
    """Return `cells` with the seconds, sizes, read files and lineages that the run in `folder` recorded.

    Cells are unchanged from the first cell that has no complete record, or whose record is about different code.
    """
    recorded: dict[int, CellLineage] = {}
    for line in read_cells(folder):
        # a resumed run may have recorded a cell several times: use the first record
        recorded.setdefault(line.cell, line)
    cells_with_lineage: list[StudyCell] = []
    for number, cell in enumerate(cells, 1):
        lineage = recorded.get(number)
        if lineage is None and not _has_statements(cell.text):
            cells_with_lineage.append(
                replace(
                    cell, seconds=0.0, reads=(), lineage=_empty_lineage(number, cells_with_lineage)
                )
            )
            continue
        if lineage is None or lineage.code != cell.code:
            break
        events = tuple(event for event in lineage.events if _is_input(event))
        if any(event[0] in {"unseen", "more"} for event in events):
            break
        cells_with_lineage.append(
            replace(
                cell,
                seconds=lineage.seconds,
                size=max(LEAST_STATE, lineage.size - lineage.before),
                reads=_project_files_read(events, str(project.root)),
                lineage=replace(lineage, events=events),
            )
        )
    return (*cells_with_lineage, *cells[len(cells_with_lineage) :])


def _has_statements(text: str) -> bool:
    return any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())


def _empty_lineage(number: int, earlier_cells: Sequence[StudyCell]) -> CellLineage:
    """Return a lineage for a cell without statements, which leaves the state of the previous cell unchanged."""
    last = earlier_cells[-1].lineage if earlier_cells else None
    return CellLineage(number, "", (), last.lineage if last else "", 0.0, last.size if last else 0)


def _is_input(event: Event) -> bool:
    """Return True if a recorded event is an input for a study: no variable of the machine, no read of the clock."""
    if event[0] == "environment":
        return not event[1].startswith(MACHINE_VARIABLES)
    return event[0] != "clock"


def _project_files_read(events: Sequence[Event], root: str) -> tuple[str, ...]:
    """Return the paths, relative to `root`, of the project's files that recorded events name.

    For a module, both files that may contain it are returned: `name.py` and `name/__init__.py`.
    """
    names: set[str] = set()
    for kind, name, *_ in events:
        if kind == "file":
            path = Path(root) / name
            if path.is_relative_to(root):
                names.add(path.relative_to(root).as_posix())
        elif kind == "module":
            names.add(f"{name.replace('.', '/')}.py")
            names.add(f"{name.replace('.', '/')}/__init__.py")
    return tuple(sorted(names))


def _relative_folder(folder: str, root: Path) -> str:
    path = Path(folder)
    if path == root or not path.is_relative_to(root):
        return ""
    return path.relative_to(root).as_posix()


def _files_of_run(project: Project, run: Run, sources: dict[str, bytes]) -> dict[str, FileRef]:
    contents_folder = project.cache / "multiversion"
    make_folder(contents_folder)
    files: dict[str, FileRef] = {}
    for name, data in sources.items():
        digest = hashlib.sha256(data).hexdigest()
        place = contents_folder / digest
        if not place.exists():
            part = place.with_suffix(f".{os.getpid()}")
            part.write_bytes(data)
            part.rename(place)
        files[name] = FileRef(digest, len(data), place)
    root = str(project.root)
    for path, (size, _, digest) in run.end.inputs.items():
        path_now = Path(run.current_path(path, root))
        try:
            name = path_now.relative_to(root).as_posix()
        except ValueError:
            continue  # a replay reads a file outside the project at its original path
        if name in files:
            continue
        is_same = path_now.is_file() and fingerprint(path_now)[2] == digest
        files[name] = (
            FileRef(digest_of(path_now), path_now.stat().st_size, path_now)
            if is_same
            else FileRef(f"recorded:{digest}", int(size), None)
        )
    return files


def _with_estimated_costs(
    project: Project, run: Run, cells: tuple[StudyCell, ...]
) -> tuple[StudyCell, ...]:
    """Return `cells` with seconds and state sizes, estimated from the measurements of the whole run.

    Imports and loops were measured; the remaining time of the run is divided equally among the other cells. Each
    cell gets the size of the run's largest checkpoint.
    """
    end = run.end
    total = end.seconds
    imports = end.imports
    loops = {
        site.rpartition(":")[2]: totals.seconds
        for site, totals in end.loops.items()
        if ":<module>:" in site and totals.outermost
    }
    measured: list[float | None] = []
    for cell in cells:
        own_seconds = sum(
            imports.pop(name, 0.0) for name in imported_modules(cell.text) & set(imports)
        )
        for name in list(loops):
            if cell.text.lstrip().startswith((f"for {name} ", f"for {name},", "while ")):
                own_seconds += loops.pop(name)
        measured.append(own_seconds or None)
    remaining_seconds = max(0.0, total - sum(seconds or 0.0 for seconds in measured))
    unmeasured = sum(seconds is None for seconds in measured)
    sizes = [c.nbytes for c in Checkpoints(project).of(run.id)]
    return tuple(
        replace(
            cell,
            seconds=seconds if seconds is not None else remaining_seconds / max(1, unmeasured),
            size=max(sizes, default=None),
        )
        for cell, seconds in zip(cells, measured, strict=True)
    )
