"""Keep states between cells: in parked processes, or as namespaces in files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rearview.multiversion.cell_process_control import CellHandle, CellProcesses, Died
from rearview.multiversion.study import StudyVersion
from rearview.multiversion.work_folder import WorkFolders, remove

FORMAT = 2
"""Format of a stored state; others are not used."""
SAVING = 600.0
"""Seconds in which a namespace must be saved or loaded."""


@dataclass(frozen=True, slots=True)
class WorkPlace:
    """The folder of a process, and the path under which the process sees it."""

    folder: Path
    mount: Path | None
    """None: the folder is already at that path."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """Result of keeping a state: the process that continues, and the bytes that the state takes."""

    process: CellHandle
    size: int


class StateStore(Protocol):
    """Keeps and restores states; a state is identified by its node in the tree."""

    def keep(self, node: int, process: CellHandle, place: WorkPlace) -> KeptState | str:
        """Keep the state of a process, or return the reason why that is impossible."""
        ...

    def restore(self, node: int, version: StudyVersion, place: WorkPlace) -> CellHandle | str:
        """Return a process with a kept state, in `place`, or the reason why that is impossible."""
        ...

    def evict(self, node: int) -> None:
        """Delete a state."""
        ...

    def used(self) -> int:
        """Return the bytes that all kept states take, measured now."""
        ...


class ForkedStates:
    """StateStore as forked processes that wait: the whole process state, in milliseconds."""

    def __init__(self, processes: CellProcesses, folders: WorkFolders) -> None:
        self._processes = processes
        self._folders = folders
        self._parked: dict[int, tuple[CellHandle, Path]] = {}

    def keep(self, node: int, process: CellHandle, place: WorkPlace) -> KeptState | str:
        """Fork: this process stays parked, its child continues in the same folder."""
        image = self._folders.keep_image(f"parked-{node}", place.folder)
        try:
            # the child takes over the folder and the mount of its parent, which no longer uses them
            child = self._processes.fork(process, place.folder, None, first=True)
        except Died as exc:
            child = str(exc)
        if isinstance(child, str):
            remove(image)
            return child
        self._parked[node] = (process, image)
        return KeptState(child, process.memory()[1])

    def restore(self, node: int, version: StudyVersion, place: WorkPlace) -> CellHandle | str:  # noqa: ARG002
        """Fork the parked process again, in a copy of its folder."""
        parked = self._parked.get(node)
        if parked is None:
            return "it was evicted"
        process, image = parked
        try:
            self._folders.restore_image(image, place.folder)
            return self._processes.fork(process, place.folder, place.mount, first=False)
        except (Died, OSError) as exc:
            self.evict(node)
            return str(exc)

    def evict(self, node: int) -> None:
        """Kill the parked process and remove its folder."""
        if node in self._parked:
            process, image = self._parked.pop(node)
            process.kill()
            remove(image)

    def used(self) -> int:
        """Return the sum of the Pss of the parked processes, in which shared pages count once."""
        return sum(process.memory()[0] for process, _ in self._parked.values())


def stored_size(store: Path, name: str) -> int | None:
    """Return the bytes of a complete state that an earlier replay stored; None if there is none.

    A state does not count if a file outside the project that it depends on is no longer as it was: data,
    modules, installed packages.
    """
    try:
        about = json.loads((store / name / "complete.json").read_text())
        if about["format"] != FORMAT:
            return None
        for path, (size, changed) in about["outside"].items():
            now = os.stat(path)  # noqa: PTH116 - thousands of them
            if (now.st_size, now.st_mtime_ns) != (size, changed):
                return None
        return int(about["bytes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


class StoredStates:
    """StateStore as files with the namespace: they survive a crash and serve the next replay."""

    def __init__(self, processes: CellProcesses, folders: WorkFolders, store: Path) -> None:
        self._processes = processes
        self._folders = folders
        self._store = store
        self._names: dict[int, str] = {}

    def name(self, node: int, name: str) -> None:
        """Set the name under which the state of a node is stored."""
        self._names[node] = name

    def _folder(self, node: int) -> Path:
        return self._store / self._names[node]

    def keep(self, node: int, process: CellHandle, place: WorkPlace) -> KeptState | str:
        """Save the namespace and a copy of the work folder; the process continues."""
        folder = self._folder(node)
        remove(folder)
        folder.mkdir(parents=True)
        try:
            answer = process.ask({"do": "save", "file": str(folder / "namespace")}, seconds=SAVING)
        except Died as exc:
            answer = {"refused": str(exc)}
        if "refused" in answer:
            remove(folder)
            return str(answer["refused"])
        inputs = self._folders.save_written(place.folder, folder / "files")
        size = int(answer["saved"])
        about = {
            "format": FORMAT,
            "bytes": size,
            "inputs": inputs,
            "outside": answer["outside"],
            "path": str(self._folders.work),
        }
        part = folder / "complete.part"
        part.write_text(json.dumps(about))
        part.rename(folder / "complete.json")
        return KeptState(process, size)

    def restore(self, node: int, version: StudyVersion, place: WorkPlace) -> CellHandle | str:
        """Load the namespace into a fresh process."""
        folder = self._folder(node)
        try:
            about = json.loads((folder / "complete.json").read_text())
            self._folders.load_written(version, folder / "files", about["inputs"], place.folder)
            self._folders.show_at(Path(about["path"]))
        except (OSError, ValueError, KeyError) as exc:
            return f"it is damaged: {exc}"
        try:
            process = self._processes.start(version, place.folder, place.mount)
            answer = process.ask({"do": "load", "file": str(folder / "namespace")}, seconds=SAVING)
        except Died as exc:
            return str(exc)
        if "refused" in answer:
            process.kill()
            return str(answer["refused"])
        return process

    def evict(self, node: int) -> None:
        """Remove the stored state."""
        remove(self._folder(node))

    def used(self) -> int:
        """Return the bytes of all stored namespaces of this replay."""
        return sum(
            file.stat().st_size
            for node in self._names
            for file in [self._folder(node) / "namespace"]
            if file.exists()
        )
