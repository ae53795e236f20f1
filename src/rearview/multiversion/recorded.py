"""Open a study: recorded runs, or scripts and notebooks on disk, as versions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rearview.config import Settings
from rearview.errors import UsageError
from rearview.model import Run
from rearview.multiversion.execution_tree import Measurements
from rearview.multiversion.ro_crate import from_crate
from rearview.multiversion.study import (
    FileRef,
    Study,
    StudyCell,
    StudyVersion,
    digest_of,
    from_files,
    program_cells,
)
from rearview.source.cells import imported_modules
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.files import fingerprint, make_folder
from rearview.store.printed_lines import printed
from rearview.store.project import Project
from rearview.store.recorded_inputs import read_environment
from rearview.store.runs import Runs
from rearview.store.versions.versions import Versions

UNSET_BY_REPLAY = ("HOME", "PATH", "PWD", "LANG", "TERM", "PYTHON", "XDG_", "TMP", "LC_", "SHELL")
"""Beginnings of the names of variables that describe the machine rather than the program."""
READ_BY_LIBRARIES = (
    *(".parquet", ".feather", ".arrow", ".h5", ".hdf5", ".nc", ".safetensors", ".npy", ".npz"),
    *(".csv", ".tsv", ".duckdb", ".db", ".sqlite", ".png", ".jpg", ".jpeg", ".tif", ".tiff"),
)
"""Ends of names of files that libraries read without Python noticing: always counted as inputs."""


PROGRAMS = (".py", ".ipynb")
"""Ends of names of files that can be versions."""


@dataclass(frozen=True, slots=True)
class OpenedStudy:
    """A study with its programs, and where its measurements and states are kept."""

    study: Study
    programs: Mapping[str, bytes]
    known: Measurements
    store: Path | None
    title: str


def names_programs(words: Sequence[str]) -> bool:
    """Return True if words name packages, programs or RO-Crate folders rather than runs."""
    return any(
        word.endswith((".rvz", *PROGRAMS)) or (Path(word) / "ro-crate-metadata.json").is_file()
        for word in words
    )


def open_programs(words: Sequence[str]) -> OpenedStudy:
    """Return the study of scripts and notebooks, or of an RO-Crate folder."""
    title = ""
    if Path(words[0]).is_dir():
        root = Path(words[0]).absolute()
        study, title = from_crate(root)
    else:
        files = [Path(word).absolute() for word in words]
        study = from_files(files)
        root = Path(os.path.commonpath([file.parent for file in files]))
    first = study.versions[0].program
    base = next(f for f in (root, *root.glob("*/"), *root.parents) if (f / first).is_file())
    programs = {v.name: (base / v.program).read_bytes() for v in study.versions}
    return _opened(Project.find(root) or Project.create(root), study, programs, title)


def open_runs(project: Project, runs: Sequence[Run]) -> OpenedStudy:
    """Return the study of recorded runs."""
    study = from_runs(project, runs)
    versions = Versions(project, Settings.read(project.store))
    source = {run.name or run.id: run.version for run in runs}
    programs = {v.name: versions.read(source[v.name], v.program) for v in study.versions}
    return _opened(project, study, programs, "")


def _opened(
    project: Project, study: Study, programs: Mapping[str, bytes], title: str
) -> OpenedStudy:
    folder = project.store / "multiversion"
    known = Measurements(folder / "cells.jsonl")
    return OpenedStudy(study, programs, known, folder / "states", title or project.root.name)


def from_runs(project: Project, runs: Sequence[Run]) -> Study:
    """Return the study of recorded runs, oldest first, each a version."""
    if not runs:
        raise UsageError(
            f"{project.root} has no runs yet. Record one with `rearview run`.", slug="no-runs"
        )
    store = Versions(project, Settings.read(project.store))
    cache: dict[str, dict[str, bytes]] = {}
    return Study(tuple(_version(project, store, run, cache) for run in runs))


def _version(
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
        if not name.startswith(UNSET_BY_REPLAY)
    }
    end = run.end
    files = _files(project, run, {n: data for n, data in sources.items() if n != script})
    loaded = {os.path.normpath(name) for name in end.files or ()}
    inputs = {
        name
        for name in files
        if name in loaded or name not in sources or name.endswith(READ_BY_LIBRARIES)
    }
    read = {run.now(path, str(project.root)) for path in end.inputs}
    inputs |= {name for name in files if str(project.root / name) in read}
    lines = [line for line in printed(folder) if line.stream == "out"]
    return StudyVersion(
        name=run.name or run.id,
        program=script,
        cells=_with_costs(project, run, program_cells(sources[script], script)),
        notebook=script.endswith(".ipynb"),
        cwd=_below(run.now(run.cwd, str(project.root)), project.root),
        argv=run.argv,
        environment=values,
        files=files,
        inputs=frozenset(inputs) if end else None,
        printed="\n".join(line.text for line in lines),
        run=run.id,
    )


def _below(folder: str, root: Path) -> str:
    path = Path(folder)
    if path == root or not path.is_relative_to(root):
        return ""
    return path.relative_to(root).as_posix()


def _files(project: Project, run: Run, sources: dict[str, bytes]) -> dict[str, FileRef]:
    kept = project.cache / "multiversion"
    make_folder(kept)
    files: dict[str, FileRef] = {}
    for name, data in sources.items():
        digest = hashlib.sha256(data).hexdigest()
        place = kept / digest
        if not place.exists():
            part = place.with_suffix(f".{os.getpid()}")
            part.write_bytes(data)
            part.rename(place)
        files[name] = FileRef(digest, len(data), place)
    root = str(project.root)
    for path, (size, _, digest) in run.end.inputs.items():
        now = Path(run.now(path, root))
        try:
            name = now.relative_to(root).as_posix()
        except ValueError:
            continue  # outside the project: read in place
        if name in files:
            continue
        same = now.is_file() and fingerprint(now)[2] == digest
        files[name] = (
            FileRef(digest_of(now), now.stat().st_size, now)
            if same
            else FileRef(f"recorded:{digest}", int(size), None)
        )
    return files


def _with_costs(project: Project, run: Run, cells: tuple[StudyCell, ...]) -> tuple[StudyCell, ...]:
    """Return the cells with estimated seconds and sizes: what the run measured, cell by cell.

    Imports and loops were measured; the rest of the run is divided equally over the other cells.
    """
    end = run.end
    total = end.seconds
    imports = end.imports
    loops = {
        site.rpartition(":")[2]: totals.seconds
        for site, totals in end.loops.items()
        if ":<module>:" in site and totals.outermost
    }
    known: list[float | None] = []
    for cell in cells:
        mine = sum(imports.pop(name, 0.0) for name in imported_modules(cell.text) & set(imports))
        for name in list(loops):
            if cell.text.lstrip().startswith((f"for {name} ", f"for {name},", "while ")):
                mine += loops.pop(name)
        known.append(mine or None)
    rest = max(0.0, total - sum(seconds or 0.0 for seconds in known))
    unknown = sum(seconds is None for seconds in known)
    sizes = [c.nbytes for c in Checkpoints(project).of(run.id)]
    return tuple(
        replace(
            cell,
            seconds=seconds if seconds is not None else rest / max(1, unknown),
            size=max(sizes, default=None),
        )
        for cell, seconds in zip(cells, known, strict=True)
    )
