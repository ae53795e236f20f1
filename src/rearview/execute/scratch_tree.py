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
_MAX_LINKS = 100_000
"""Files that are linked at most."""


def make_tree(
    root: Path,
    versions: Versions,
    version: str,
    before: float,
    tree: Path,
    written_by_run: tuple[Collection[str], Collection[str]] = ((), ()),
) -> None:
    """Make `tree` look like the project at `root` when a run started at time `before`.

    A file that has not changed since then is linked. `written_by_run` names the files and the folders
    that the run created: they are left out whatever their time is, because files from an archive carry
    the time at which the archive was made.
    """
    files, folders = written_by_run
    make_folder(tree)
    versions.export(version, tree)
    count = 0
    for relative, entry in _files(root):
        target = tree / relative
        if os.path.lexists(target) or relative in files or _is_below(relative, folders):
            continue
        if _is_older(entry, before):
            make_folder(target.parent)
            target.symlink_to(_link_target(entry, root, tree))
            count += 1
            if count >= _MAX_LINKS:
                break


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
    for folder, _, names in os.walk(tree, topdown=False):
        for name in names:
            file = Path(folder, name)
            if file.is_symlink() or file.stat().st_mtime <= min(started, laid_out):
                file.unlink()
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def _is_below(relative: str, folders: Collection[str]) -> bool:
    return bool(folders) and any(str(above) in folders for above in Path(relative).parents)


def _is_older(entry: os.DirEntry[str], before: float) -> bool:
    """Return True if a file has not changed since `before`; for a linked folder only the link counts."""
    changed = entry.stat(follow_symlinks=False).st_mtime
    return changed <= before and (entry.is_dir() or entry.stat().st_mtime <= before)


def _link_target(entry: os.DirEntry[str], root: Path, tree: Path) -> str:
    """Return what to link to: a link between folders of the project leads to the tree's own folder."""
    home, target = os.path.realpath(root), os.path.realpath(entry.path)
    if entry.is_dir() and target.startswith(home + os.sep):
        return str(tree / target[len(home) + 1 :])
    return entry.path


def _files(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (relative path, entry) of the files of a project that a run could have read."""
    todo = [(str(root), "")]
    while todo:
        folder, prefix = todo.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _NOT_INPUTS:
                    todo.append((entry.path, relative + os.sep))
            else:
                try:
                    entry.stat()
                except OSError:
                    continue  # a dangling link is no input
                yield relative, entry
