"""The folder that a replay runs in: the version's source, and links to the files the run read.

A replay never runs in the user's own folder. Its scratch tree looks like the project did when the run
started; what the replay writes stays in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rearview.model.messages import TEXTS
from rearview.store.files import close_to_others, make_folder
from rearview.store.project import FOLDER
from rearview.store.versions.versions import Versions

FOLD_FROM = 100
"""A folder with at least this many files is linked as a whole, because making a link can take a millisecond."""
_NOT_INPUTS = {FOLDER, ".git", ".hg", "__pycache__", "node_modules", ".venv", ".tox"}


def make_tree(
    root: Path,
    versions: Versions,
    version: str,
    before: float,
    tree: Path,
    written_by_run: tuple[Collection[str], Collection[str]] = ((), ()),
    inputs: Collection[str] = (),
    *,
    fold: bool = False,
    working_folder: str = "",
) -> tuple[str, ...]:
    """Make `tree` look like the project at `root` when a run started at time `before`.

    A file that has not changed since then is linked. `written_by_run` names the files and the folders
    that the run created: they are left out whatever their time is, because files from an archive carry
    the time at which the archive was made. `inputs` are files that the run read and did not write: they
    are linked even if they were changed since, and the proof of the replay says so.

    With `fold`, a folder of many files that nothing has touched since then is one link. Return these
    folders, relative to the tree: a replay must show them as folders (`FileView.folded`). The
    `working_folder`, relative to the project, is none of them.
    """
    files, folders = written_by_run
    make_folder(tree)
    versions.export(version, tree)
    layout = _Layout(
        before,
        frozenset(files).union(_files_below(str(tree))),
        frozenset(folders),
        os.path.realpath(root),
        tree,
        os.path.join(working_folder, ""),  # noqa: PTH118 - with a separator at its end
        frozenset(inputs),
    )
    project = layout.read(str(root))
    if project is not None:
        layout.link(project, fold=fold)
    return tuple(layout.folded)


@dataclass(slots=True)
class _Folder:
    """A folder of the project, with the files that a replay may read in it."""

    path: str
    prefix: str
    """Relative to the project: empty, or with a separator at its end."""
    whole: bool = True
    """Whether a link to it would show exactly its content when the run started."""
    count: int = 0
    """Files in it and below."""
    files: list[tuple[str, os.DirEntry[str]]] = field(default_factory=list)
    """Paths relative to the project, and entries."""
    folders: list[_Folder] = field(default_factory=list)


@dataclass(slots=True)
class _Layout:
    """Reads a project and links its inputs into a scratch tree."""

    before: float
    taken: frozenset[str]
    """Files that are not linked: source, and files that the run wrote."""
    written: frozenset[str]
    """Folders that the run created."""
    home: str
    tree: Path
    working_folder: str = ""
    inputs: frozenset[str] = frozenset()
    """Files that the run read and did not write; they are linked even if they were changed since."""
    folded: list[str] = field(default_factory=list)
    changing: set[str] = field(init=False)
    """Folders with something in them, or below, that is not linked."""

    def __post_init__(self) -> None:
        paths = self.taken | self.written
        self.changing = {str(above) for path in paths for above in Path(path).parents}
        self.changing |= self.written

    def read(self, path: str, prefix: str = "") -> _Folder | None:
        """Return the inputs in a folder and below it; None for a folder that cannot be read or is an environment."""
        try:
            entries = list(os.scandir(path))
        except OSError:
            return None
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            return None
        folder = _Folder(path, prefix, whole=prefix.removesuffix(os.sep) not in self.changing)
        folder.whole = folder.whole and not self.working_folder.startswith(prefix)
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            if not entry.is_dir(follow_symlinks=False):
                if self._is_input(relative, entry):
                    folder.files.append((relative, entry))
                    folder.whole = folder.whole and entry.is_file(follow_symlinks=False)
                else:
                    folder.whole = False
                continue
            below = None
            if entry.name not in _NOT_INPUTS:
                below = self.read(entry.path, relative + os.sep)
            if below is not None:
                folder.folders.append(below)
                folder.count += below.count
            # a folder whose own time is later has lost a file, or got one
            still = entry.stat(follow_symlinks=False).st_mtime <= self.before
            folder.whole = folder.whole and below is not None and below.whole and still
        folder.count += len(folder.files)
        return folder

    def _is_input(self, relative: str, entry: os.DirEntry[str]) -> bool:
        return (
            relative not in self.taken
            and not _is_below(relative, self.written)
            and (relative in self.inputs or _is_older(entry, self.before))
        )

    def link(self, folder: _Folder, *, fold: bool) -> None:
        """Link the files of a folder, and fold the folders in it that may be."""
        if folder.files:
            make_folder(self.tree / folder.prefix)
        for relative, entry in folder.files:
            target = _link_target(entry, self.home, self.tree)
            os.symlink(target, f"{self.tree}{os.sep}{relative}")  # noqa: PTH211 - one of many
        for below in folder.folders:
            name = below.prefix.removesuffix(os.sep)
            still = os.stat(below.path).st_mtime <= self.before  # noqa: PTH116
            if fold and below.whole and still and below.count >= FOLD_FROM:
                make_folder(self.tree / folder.prefix)
                os.symlink(below.path, f"{self.tree}{os.sep}{name}")  # noqa: PTH211
                self.folded.append(name)
            else:
                self.link(below, fold=fold)


def keep_recorded_texts(versions: Versions, recorded: str, version: str, tree: Path) -> None:
    """Store, next to the tree of `version`, the text of its files as it was `recorded`.

    A program that reads its own source, to log it with its results, must not find the probes.
    """
    if not recorded or recorded == version:
        return
    recorded_hashes = versions.hashes(recorded)
    for path, oid in versions.hashes(version).items():
        if recorded_hashes.get(path, oid) != oid:
            target = recorded_texts(tree) / path
            make_folder(target.parent)
            target.write_bytes(versions.read(recorded, path))
            close_to_others(target)


def recorded_texts(tree: Path) -> Path:
    """Return the folder of recorded texts that belongs to a tree."""
    return tree.parent / TEXTS


def remove_links_and_source(tree: Path) -> None:
    """Leave in a scratch tree only the files that the replay wrote itself."""
    try:
        started = (tree.parent / "output.txt").stat().st_ctime
        laid_out = (tree.parent / "segment.json").stat().st_mtime
    except OSError:
        return
    _remove_unwritten(str(tree), min(started, laid_out))


def _remove_unwritten(folder: str, started: float) -> None:
    """Remove the links below a folder, the files not written since `started`, and empty folders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _remove_unwritten(entry.path, started)
            elif entry.is_symlink() or entry.stat().st_mtime <= started:
                os.unlink(entry.path)  # noqa: PTH108 - one of many thousands
    with contextlib.suppress(OSError):
        Path(folder).rmdir()


def _is_below(relative: str, folders: Collection[str]) -> bool:
    return bool(folders) and any(str(above) in folders for above in Path(relative).parents)


def _is_older(entry: os.DirEntry[str], before: float) -> bool:
    """Return True if a file existed with its present content at time `before`.

    For a link to a folder, the time of the link itself counts. A dangling link is no input.
    """
    if entry.stat(follow_symlinks=False).st_mtime > before:
        return False
    if not entry.is_symlink():
        return True
    try:
        return entry.is_dir() or entry.stat().st_mtime <= before
    except OSError:
        return False


def _link_target(entry: os.DirEntry[str], home: str, tree: Path) -> str:
    """Return the target of the link to an entry; a link between folders of the project leads to the tree's own folder."""
    if entry.is_symlink() and entry.is_dir():
        target = os.path.realpath(entry.path)
        if target.startswith(home + os.sep):
            return str(tree / target[len(home) + 1 :])
    return entry.path


def _files_below(folder: str, prefix: str = "") -> Iterator[str]:
    """Yield the files below a folder, relative to it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path, f"{prefix}{entry.name}{os.sep}")
            else:
                yield f"{prefix}{entry.name}"
