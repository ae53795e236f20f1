"""Files as they were before the run wrote them, so that a resumed run can start from them.

A resumed run sets itself up once more. A program that looks for a checkpoint of its own, creates a
folder or appends to a log must then find the same files as the first time. So the previous content of
each file is recorded before its first write, and put back before the program starts again; the files
that it had written come back with the checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rearview.runtime.sandbox.file_patches import replace_builtin
from rearview.store.files import append_line, close_to_others, make_folder, read_lines
from rearview.store.runs import ABSENT, TRACES, TRACES_FORMAT

FORMAT = TRACES_FORMAT
FILE = TRACES
LIMIT = 64 << 20
"""Bytes of previous contents that are kept; larger files are not restored."""
_LARGE = "large"
_LINK = "link"


@dataclass
class OverwrittenFiles:
    """The files and folders that one run has changed; kept in the run's folder.

    Files outside the project have their full path, and count only if the run created or truncated
    them.
    """

    folder: Path
    root: str
    looping: Callable[[], bool] = lambda: False
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    folders: dict[str, None] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    """Files outside the project that another program has written."""
    kept: int = 0
    """Bytes kept so far."""

    @classmethod
    def of(cls, folder: Path, root: str, looping: Callable[[], bool]) -> OverwrittenFiles:
        """Return the files of a run, with those that an earlier process of it recorded."""
        files = cls(folder, root, looping)
        for line in read_lines(folder / FILE, FORMAT):
            if "folder" in line:
                files.folders.setdefault(str(line["folder"]))
            elif "read" in line:
                files.read.add(str(line["read"]))
            else:
                files.files.setdefault(str(line["path"]), line)
        return files

    @property
    def aside(self) -> Path:
        """Folder for files of the run while a resumed run repeats its set-up."""
        return self.folder / "aside"

    def was_created(self, name: str) -> bool:
        """Return True if the run created this file."""
        return bool(self.files.get(name, {}).get("was") == ABSENT)

    def owns(self, name: str) -> bool:
        """Return True if only the run has written this file."""
        return self.was_created(name) or bool(self.files.get(name, {}).get("emptied"))

    def absent(self) -> list[str]:
        """Return the full paths of files and folders that did not exist before the run."""
        names = [*self.folders, *(name for name in self.files if self.was_created(name))]
        return [os.path.join(self.root, name) for name in names]  # noqa: PTH118

    def _home(self, name: str) -> Path:
        """Return the path at which a file is kept meanwhile, on its own disk: it may be large."""
        path = Path(name)
        return path.with_name(f".{path.name}.rearview") if path.is_absolute() else self.aside / path

    def emptying(self, relative: str) -> None:
        """Record a file before it is truncated for the first time."""
        self.writing(relative, emptied=True)

    def writing(self, relative: str, *, emptied: bool = False) -> None:
        """Record a file before it is written for the first time."""
        if relative in self.files or "__pycache__" in relative:
            return
        line: dict[str, Any] = {"format": FORMAT, "path": relative, "loop": self.looping()}
        if emptied:
            line["emptied"] = True
        self.files[relative] = line
        path = Path(self.root, relative)
        try:
            line["size"] = size = path.lstat().st_size
        except OSError:
            line["was"] = ABSENT
        else:
            line["was"] = _LARGE
            belongs_to_run = emptied or relative[0] != os.sep
            if path.is_symlink() and belongs_to_run:
                line |= {"was": _LINK, "led": str(path.readlink())}
            elif path.is_file() and self.kept + size <= LIMIT and belongs_to_run:
                self.kept += size
                line["was"] = f"{len(self.files)}"
                make_folder(self.folder / "before")
                shutil.copyfile(path, self.folder / "before" / line["was"])
                close_to_others(self.folder / "before" / line["was"])
        append_line(self.folder / FILE, line)

    def making(self, relative: str) -> None:
        """Record a folder that is about to be created."""
        if relative not in self.folders and not Path(self.root, relative).exists():
            self.folders[relative] = None
            append_line(self.folder / FILE, {"format": FORMAT, "folder": relative})

    def reading(self, relative: str) -> None:
        """Record that the program reads a file that it has written."""
        if relative in self.files and relative not in self.read:
            self.read.add(relative)
            append_line(self.folder / FILE, {"format": FORMAT, "read": relative})

    def take_away(self, *, data: bool, last_sign_of_life: float = float("inf")) -> set[str]:
        """Restore the files to what the run found when it started.

        A file that the program wrote before its first loop and read again, such as a downloaded data
        set, is removed only with `data`: creating it again may take long, and a run that continues
        from a checkpoint does not need that. A file outside the project that was written after
        `last_sign_of_life` of the run stays too: another program wrote it. Return the folders that the run created and that still exist.
        """
        for relative, line in self.files.items():
            path, home = Path(self.root, relative), self._home(relative)
            kept_in_place = line["was"] == _LARGE and not line.get("emptied")
            if kept_in_place or (not data and self._is_data(relative)):
                continue
            if (
                relative[0] == os.sep
                and path.is_file()
                and path.stat().st_mtime > last_sign_of_life
            ):
                self.shared.add(relative)
                continue
            exists = path.is_file() or path.is_symlink()
            if exists and os.path.lexists(home):
                path.unlink()  # written by a process that got less far than the one before it
            elif exists:
                home.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, home)
            if line["was"] == _LINK:
                path.symlink_to(line["led"])
            elif line["was"] not in {ABSENT, _LARGE}:
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / "before" / line["was"], path)
        for relative in sorted(self.folders, key=len, reverse=True):
            try:
                Path(self.root, relative).rmdir()
            except OSError:
                continue  # not empty, or absent
        return {folder for folder in self.folders if Path(self.root, folder).is_dir()}

    def data(self) -> list[str]:
        """Return the files that were written before the first loop and read again."""
        return [name for name in self.files if self._is_data(name)]

    def _is_data(self, name: str) -> bool:
        return not self.files[name]["loop"] and name in self.read

    def bring_back(self, relatives: Iterable[str]) -> None:
        """Restore files that are too large for a checkpoint, when the checkpoint is reached."""
        for relative in relatives:
            home, path = self._home(relative), Path(self.root, relative)
            if home.is_file() or home.is_symlink():
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.exists() and not home.is_symlink():
                    shutil.copyfile(home, path)  # in place: the program may have the file open
                else:
                    shutil.move(home, path)
        self._delete_set_aside()

    def ended(self, *, well: bool) -> None:
        """Delete the kept files if the run has ended for good; else put back the ones it lacks."""
        if well:
            self._delete_set_aside()
            shutil.rmtree(self.folder / "before", ignore_errors=True)
        elif any(os.path.lexists(self._home(name)) for name in self.files):
            self.bring_back([n for n in self.files if not os.path.lexists(Path(self.root, n))])

    def _delete_set_aside(self) -> None:
        shutil.rmtree(self.aside, ignore_errors=True)
        for name in self.files:
            if name[0] == os.sep and self.owns(name):
                self._home(name).unlink(missing_ok=True)


def allow_making_again(folders: set[str], root: str) -> None:
    """Let the program create each of these folders once more, although it exists."""

    def make(real: Any) -> Any:
        def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
            if folders and not isinstance(path, int):
                full = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links stay as spelt
                name = full.removeprefix(root)
                if name in folders:
                    folders.discard(name)
                    return
            real(path, *args, **kwargs)

        return mkdir

    replace_builtin(os, "mkdir", make)
