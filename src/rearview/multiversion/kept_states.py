"""Keep states between cells for later restores: as forked processes that wait, or as files with the variables."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rearview.multiversion.cell_process_control import CellHandle, CellProcesses, ProcessDied
from rearview.multiversion.study import StudyVersion
from rearview.multiversion.work_folder import WorkFolders, remove_folder

FORMAT = 2
"""Number of the file format of a stored state; states with other numbers are not used."""
SAVING = 600.0
"""Seconds within which a cell process must save or load the variables of a program."""


@dataclass(frozen=True, slots=True)
class WorkPlace:
    """The work folder of a cell process, and the file path at which this folder is mounted for the process."""

    folder: Path
    mount: Path | None
    """File path at which `folder` is mounted for the process; None if the process uses `folder` itself."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """The process that runs the next cells after a state was kept, and the size of this state in bytes."""

    process: CellHandle
    size: int


class StateStore(Protocol):
    """Keeps and restores states between cells. A state is identified by the tree node of the cell before it."""

    def keep(self, node: int, process: CellHandle, place: WorkPlace) -> KeptState | str:
        """Keep the state of `process` in `place` as that of `node`; return the reason as text if that fails."""
        ...

    def restore(self, node: int, version: StudyVersion, place: WorkPlace) -> CellHandle | str:
        """Return a process in `place` with the state kept for `node`, or the reason as text if that fails."""
        ...

    def evict(self, node: int) -> None:
        """Delete the state kept for `node`."""
        ...

    def used(self) -> int:
        """Measure and return the total size in bytes of all kept states."""
        ...


class ForkedStates:
    """Keeps each state as a waiting process; a fork takes milliseconds and copies the whole state of a process."""

    def __init__(self, processes: CellProcesses, folders: WorkFolders) -> None:
        self._processes = processes
        self._folders = folders
        self._waiting: dict[int, tuple[CellHandle, Path]] = {}

    def keep(self, node: int, process: CellHandle, place: WorkPlace) -> KeptState | str:
        """Fork `process`: it waits with the state, and the returned child runs the next cells in the same folder."""
        image = self._folders.keep_image(f"forked-{node}", place.folder)
        try:
            # the child can use its parent's folder and mount, because the parent runs no more cells
            child = self._processes.fork(process, place.folder, None, first=True)
        except ProcessDied as exc:
            child = str(exc)
        if isinstance(child, str):
            remove_folder(image)
            return child
        self._waiting[node] = (process, image)
        return KeptState(child, process.memory()[1])

    def restore(self, node: int, version: StudyVersion, place: WorkPlace) -> CellHandle | str:  # noqa: ARG002
        """Fork the process that waits with the state of `node`; the child works in a copy of the kept work folder."""
        waiting = self._waiting.get(node)
        if waiting is None:
            return "it was evicted"
        process, image = waiting
        try:
            self._folders.restore_image(image, place.folder)
            return self._processes.fork(process, place.folder, place.mount, first=False)
        except (ProcessDied, OSError) as exc:
            self.evict(node)
            return str(exc)

    def evict(self, node: int) -> None:
        """Kill the process that waits with the state of `node`, and remove the copy of its work folder."""
        if node in self._waiting:
            process, image = self._waiting.pop(node)
            process.kill()
            remove_folder(image)

    def used(self) -> int:
        """Return the memory of all waiting processes in bytes; a page that several processes share counts once."""
        return sum(process.memory()[0] for process, _ in self._waiting.values())


def stored_size(store: Path, name: str) -> int | None:
    """Return the size in bytes of the state `name` that an earlier replay stored, or None if it cannot be used.

    A state cannot be used if it is incomplete, or if it depends on a file outside the project (data, modules,
    installed packages) that has changed since.
    """
    try:
        facts = json.loads((store / name / "complete.json").read_text())
        if facts["format"] != FORMAT:
            return None
        for path, (size, changed) in facts["outside"].items():
            status = os.stat(path)  # noqa: PTH116 - thousands of them
            if (status.st_size, status.st_mtime_ns) != (size, changed):
                return None
        return int(facts["bytes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class StoredStates:
    """Keeps each state as a file with the program's variables, which later replays can load, even after a crash."""

    def __init__(self, processes: CellProcesses, folders: WorkFolders, store: Path) -> None:
        self._processes = processes
        self._folders = folders
        self._store = store
        self._names: dict[int, str] = {}

    def set_name(self, node: int, name: str) -> None:
        """Set the name of the folder in which the state of `node` is stored."""
        self._names[node] = name

    def _folder(self, node: int) -> Path:
        return self._store / self._names[node]

    def keep(self, node: int, process: CellHandle, place: WorkPlace) -> KeptState | str:
        """Save the variables of `process` and a copy of the work folder; the same process runs the next cells."""
        folder = self._folder(node)
        remove_folder(folder)
        folder.mkdir(parents=True)
        try:
            answer = process.ask({"do": "save", "file": str(folder / "namespace")}, seconds=SAVING)
        except ProcessDied as exc:
            answer = {"refused": str(exc)}
        if "refused" in answer:
            remove_folder(folder)
            return str(answer["refused"])
        inputs = self._folders.save_written(place.folder, folder / "files")
        size = int(answer["saved"])
        facts = {
            "format": FORMAT,
            "bytes": size,
            "inputs": inputs,
            "outside": answer["outside"],
            "path": str(self._folders.work),
        }
        part = folder / "complete.part"
        part.write_text(json.dumps(facts))
        part.rename(folder / "complete.json")
        return KeptState(process, size)

    def restore(self, node: int, version: StudyVersion, place: WorkPlace) -> CellHandle | str:
        """Start a new process in `place`, load the stored variables of `node` into it, and return it."""
        folder = self._folder(node)
        try:
            facts = json.loads((folder / "complete.json").read_text())
            self._folders.load_written(version, folder / "files", facts["inputs"], place.folder)
            self._folders.link_former_path(Path(facts["path"]))
        except (OSError, ValueError, KeyError) as exc:
            return f"it is damaged: {exc}"
        try:
            process = self._processes.start(version, place.folder, place.mount)
            answer = process.ask({"do": "load", "file": str(folder / "namespace")}, seconds=SAVING)
        except ProcessDied as exc:
            return str(exc)
        if "refused" in answer:
            process.kill()
            return str(answer["refused"])
        return process

    def evict(self, node: int) -> None:
        """Remove the stored files of the state of `node`."""
        remove_folder(self._folder(node))

    def used(self) -> int:
        """Return the total size in bytes of the files with variables that this replay has stored or can load."""
        return sum(
            file.stat().st_size
            for node in self._names
            for file in [self._folder(node) / "namespace"]
            if file.exists()
        )
