"""Keep the states between cells for later restores: as forked processes that wait, or as namespaces in files."""

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
"""Format of a stored state; states of other formats are not used."""
SAVING = 600.0
"""Seconds within which a namespace must be saved or loaded."""


@dataclass(frozen=True, slots=True)
class WorkPlace:
    """The work folder of a cell process, and the file path at which the process sees this folder."""

    folder: Path
    mount: Path | None
    """File path at which the process sees the folder; None if the process uses `folder` itself."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """The result of keeping a state: the process that runs the next cells, and the bytes that the state takes."""

    process: CellHandle
    size: int


class StateStore(Protocol):
    """Keeps and restores states between cells; the number of its node in the tree identifies a state."""

    def keep(self, node: int, process: CellHandle, place: WorkPlace) -> KeptState | str:
        """Keep the state of a process; return the reason if this is impossible."""
        ...

    def restore(self, node: int, version: StudyVersion, place: WorkPlace) -> CellHandle | str:
        """Return a process with a kept state, in `place`; return the reason if this is impossible."""
        ...

    def evict(self, node: int) -> None:
        """Delete a state."""
        ...

    def used(self) -> int:
        """Return the bytes that all kept states take, measured now."""
        ...


class ForkedStates:
    """Keeps each state as a process that waits: a fork keeps the whole process state within milliseconds."""

    def __init__(self, processes: CellProcesses, folders: WorkFolders) -> None:
        self._processes = processes
        self._folders = folders
        self._waiting: dict[int, tuple[CellHandle, Path]] = {}

    def keep(self, node: int, process: CellHandle, place: WorkPlace) -> KeptState | str:
        """Fork: `process` waits and keeps the state, its child continues in the same folder."""
        image = self._folders.keep_image(f"forked-{node}", place.folder)
        try:
            # the child uses the folder and the mount of its parent, which runs no more cells
            child = self._processes.fork(process, place.folder, None, first=True)
        except ProcessDied as exc:
            child = str(exc)
        if isinstance(child, str):
            remove_folder(image)
            return child
        self._waiting[node] = (process, image)
        return KeptState(child, process.memory()[1])

    def restore(self, node: int, version: StudyVersion, place: WorkPlace) -> CellHandle | str:  # noqa: ARG002
        """Fork the process that keeps the state, in a copy of its folder."""
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
        """Kill the process that keeps the state, and remove the copy of its folder."""
        if node in self._waiting:
            process, image = self._waiting.pop(node)
            process.kill()
            remove_folder(image)

    def used(self) -> int:
        """Return the proportional set size of all waiting processes together: a shared page counts once."""
        return sum(process.memory()[0] for process, _ in self._waiting.values())


def stored_size(store: Path, name: str) -> int | None:
    """Return the bytes of a state that an earlier replay stored, or None if it cannot be used.

    A state cannot be used if it is incomplete, or if a file outside the project on which it depends (data,
    modules, installed packages) has changed since.
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
    """Keeps each state as a file with the namespace: it survives a crash, and a later replay can load it."""

    def __init__(self, processes: CellProcesses, folders: WorkFolders, store: Path) -> None:
        self._processes = processes
        self._folders = folders
        self._store = store
        self._names: dict[int, str] = {}

    def set_name(self, node: int, name: str) -> None:
        """Set the name under which the state of a node is stored."""
        self._names[node] = name

    def _folder(self, node: int) -> Path:
        return self._store / self._names[node]

    def keep(self, node: int, process: CellHandle, place: WorkPlace) -> KeptState | str:
        """Save the namespace and a copy of the work folder; the process continues."""
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
        """Load the namespace into a fresh process."""
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
        """Remove the files of a state."""
        remove_folder(self._folder(node))

    def used(self) -> int:
        """Return the bytes of all stored namespaces of this replay."""
        return sum(
            file.stat().st_size
            for node in self._names
            for file in [self._folder(node) / "namespace"]
            if file.exists()
        )
