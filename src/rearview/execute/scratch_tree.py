"""The folder that a replay runs in: the version's source, and links to the files the run read.

A replay never runs in the user's own folder. Its scratch tree looks like the project did when the run
started; what the replay writes stays in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from rearview.model.plan import TEXTS
from rearview.store.files import close_to_others, make_folder
from rearview.store.project import FOLDER
from rearview.store.versions.versions import Versions

_NOT_INPUTS = {FOLDER, ".git", ".hg", "__pycache__", "node_modules", ".venv", ".tox"}


def make_tree(
    root: Path,
    versions: Versions,
    version: str,
    before: float,
    tree: Path,
    written_by_run: tuple[Collection[str], Collection[str]] = ((), ()),
    inputs: Collection[str] = (),
) -> None:
    """Make `tree` look like the project at `root` when a run started at time `before`.

    A file that has not changed since then is linked. `written_by_run` names the files and the folders
    that the run created: they are left out whatever their time is, because files from an archive carry
    the time at which the archive was made. `inputs` are files that the run read and did not write: they
    are linked even if they were changed since, and the proof of the replay says so.
    """
    files, folders = written_by_run
    make_folder(tree)
    versions.export(version, tree)
    exported = {relative for _, entries in _folders(tree) for relative, _ in entries}
    home = os.path.realpath(root)
    for prefix, entries in _folders(root):
        targets = [
            (relative, _link_target(entry, home, tree))
            for relative, entry in entries
            if relative not in exported
            and relative not in files
            and not _is_below(relative, folders)
            and (_is_older(entry, before) or relative in inputs)
        ]
        if targets:
            make_folder(tree / prefix)
        for relative, target in targets:
            os.symlink(target, f"{tree}{os.sep}{relative}")  # noqa: PTH211 - one of many thousands


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
    """Return True if a file existed, as it is, at time `before`.

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
    """Return what to link to: a link between folders of the project leads to the tree's own folder."""
    if entry.is_symlink() and entry.is_dir():
        target = os.path.realpath(entry.path)
        if target.startswith(home + os.sep):
            return str(tree / target[len(home) + 1 :])
    return entry.path


def _folders(root: Path) -> Iterator[tuple[str, list[tuple[str, os.DirEntry[str]]]]]:
    """Yield each folder below `root`, relative to it, with its files: their paths and entries."""
    remaining = [(str(root), "")]
    while remaining:
        folder, prefix = remaining.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        files = []
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            if not entry.is_dir(follow_symlinks=False):
                files.append((relative, entry))
            elif entry.name not in _NOT_INPUTS:
                remaining.append((entry.path, relative + os.sep))
        yield prefix, files
