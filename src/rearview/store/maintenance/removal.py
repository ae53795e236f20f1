"""Remove runs: their records, checkpoints, replays and versions, and nothing that other runs need.

First the folder of the run is renamed into `.rearview/removed/`; from then on readers do not find the run. Its
other files are removed afterwards. If a removal is interrupted, the next removal or garbage collection
completes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rearview.errors import DamagedError, RearviewError, UsageError
from rearview.model import Status
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.create_files import make_folder, write_error
from rearview.store.json_files import read_lines
from rearview.store.project import EVENT_FILES, Project
from rearview.store.runs import FORMAT, Runs, labels_of
from rearview.store.versions.versions import Versions

FOLDER = "removed"
"""Folder of a store that holds the folders of runs whose removal is not complete."""


@dataclass(frozen=True, slots=True)
class RunRemoval:
    """A run that can be removed, with its checkpoints, replays and bytes."""

    run: str
    checkpoints: int
    replays: tuple[str, ...]
    nbytes: int
    """Bytes of the run's records and replays; garbage collection frees the bytes of its checkpoints later."""


def removal_of(project: Project, run: str, *, together: Collection[str] = ()) -> RunRemoval:
    """Return how much the removal of a run would remove; raise if the run is in use.

    A run is in use if it is running, if another run was started from it, or if its folder holds files of the user's
    project. Runs in `together` are removed at the same time; that they were started from this run does not matter.
    """
    runs = Runs(project)
    _refuse_if_used(runs, run, together)
    folder = runs.folder(run)
    replays = tuple(_replays(folder))
    folders = [folder, *(project.replays / replay for replay in replays)]
    checkpoints = Checkpoints(project).of(run)
    return RunRemoval(run, len(checkpoints), replays, sum(map(_size, folders)))


def remove(project: Project, versions: Versions, run: str) -> None:
    """Remove a run for which `removal_of` did not raise; garbage collection later frees objects that only this run used."""
    removed_runs = project.store / FOLDER
    try:
        make_folder(removed_runs)
        Runs(project).folder(run).rename(removed_runs / run)
        finish_removals(project, versions)
    except OSError as exc:
        raise write_error(exc, f"The removal of run {run}", project.store) from exc


def unfinished(project: Project) -> list[tuple[str, str]]:
    """Return (id, name that the user gave) of each run whose removal was interrupted."""
    removed_runs = project.store / FOLDER
    folders = sorted(removed_runs.iterdir()) if removed_runs.is_dir() else []
    return [
        (folder.name, labels_of(read_lines(folder / "events.jsonl", FORMAT)).name)
        for folder in folders
    ]


def finish_removals(project: Project, versions: Versions) -> None:
    """Remove the replays, checkpoints, versions and folders of the runs whose folders are in `.rearview/removed/`."""
    for run, _ in unfinished(project):
        folder = project.store / FOLDER / run
        derived = {str(line.get("version")) for line in _replay_lines(folder)}
        for replay in _replays(folder):
            _delete(project.replays / replay)
        _delete(project.checkpoints / run)
        _delete(project.store / EVENT_FILES / run)
        _delete(project.cache / "printed" / run)
        versions.drop(run)
        for version in sorted(derived - _derived_in_use(project)):
            versions.drop_derived(version)
        _delete(folder)


def drop_empty_packs(project: Project, runs: Collection[str]) -> None:
    """Remove the folders of packs of the removed `runs`, if garbage collection has emptied them."""
    for run in runs:
        with contextlib.suppress(OSError):  # the folder still holds packs, or does not exist
            (project.packs / run).rmdir()


def _refuse_if_used(runs: Runs, run: str, together: Collection[str]) -> None:
    """Raise if a run is in use, as the docstring of `removal_of` defines it."""
    with contextlib.suppress(DamagedError):  # a damaged run can be removed, too
        if runs.get(run).status is Status.RUNNING:
            raise UsageError(
                f"Run {run} is running and is not removed. Wait for its end, or stop it first.",
                slug="run-in-use",
            )
    children = [
        child.id for child in runs.all() if child.parent == run and child.id not in together
    ]
    if children:
        raise UsageError(
            f"Run {run} is not removed: {', '.join(children[:4])} came from it and would lose "
            "their origin. Remove those runs first.",
            slug="run-in-use",
        )
    aside_folder = runs.folder(run) / "aside"
    project_file = next((path for path in aside_folder.rglob("*") if not path.is_dir()), None)
    if project_file is not None:
        raise UsageError(
            f"Run {run} is not removed: {aside_folder} holds files of your project, such as {project_file.name}, "
            f"which were put there while the run was resumed. Resume it (`rearview resume {run}`), "
            "or move those files back yourself.",
            slug="run-in-use",
        )


def _replay_lines(folder: Path) -> Iterator[dict[str, object]]:
    with contextlib.suppress(RearviewError):  # a newer Rearview wrote the file: keep the replays
        yield from read_lines(folder / "replays.jsonl", FORMAT)


def _replays(folder: Path) -> list[str]:
    """Return the ids of the replays of the run in `folder`, without ids that are a path to another folder."""
    ids = dict.fromkeys(str(line.get("replay", "")) for line in _replay_lines(folder))
    return [name for name in ids if name and name == Path(name).name and name != ".."]


def _derived_in_use(project: Project) -> set[str]:
    """Return the derived versions (with probes added) that the remaining runs or their replays use."""
    runs = Runs(project)
    used: set[str] = set()
    for run in runs.ids():
        used.update(str(line.get("version")) for line in _replay_lines(runs.folder(run)))
        with contextlib.suppress(RearviewError):
            used.update(
                str(event.get("version"))
                for event in read_lines(runs.folder(run) / "events.jsonl", FORMAT)
            )
    return used


def _size(folder: Path) -> int:
    total = 0
    for subfolder, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(Path(subfolder, name)).st_size
    return total


def _delete(path: Path) -> None:
    """Remove the folder at `path` with its content; if `path` is a link or file, remove only the link or file."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        for subfolder, folders, _ in os.walk(path):  # a program may have made folders read-only
            for name in folders:
                inner_folder = Path(subfolder, name)
                if not inner_folder.is_symlink():
                    with contextlib.suppress(OSError):
                        inner_folder.chmod(0o700)
        with contextlib.suppress(FileNotFoundError):  # another process completes this removal, too
            shutil.rmtree(path)
