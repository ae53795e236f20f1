"""Lay out the tree a replay runs in: the version's source, and links to the run's inputs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from rearview.model.segment import TEXTS
from rearview.store.private import close_to_others, make_folder
from rearview.store.project import FOLDER
from rearview.store.versions import Versions

_NOT_INPUTS = {FOLDER, ".git", ".hg", "__pycache__", "node_modules", ".venv", ".tox"}
_MOST = 100_000
"""Files to link before folders are linked whole."""


def lay_out(
    root: Path,
    versions: Versions,
    version: str,
    before: float,
    tree: Path,
    made: tuple[Collection[str], Collection[str]] = ((), ()),
) -> None:
    """Make `tree` look like the project at `root` when a run started at time `before`.

    A file that has not been touched since is linked: neither the run nor anybody later wrote it.
    What the run wrote itself is not there, as it was not there then: `made` names the files and the
    folders that it made, whatever time they carry (those of an archive carry that of its maker).
    """
    files, folders = made
    make_folder(tree)
    versions.export(version, tree)
    count = 0
    for relative, entry in _files(root):
        target = tree / relative
        if os.path.lexists(target) or relative in files or _is_below(relative, folders):
            continue
        if _is_older(entry, before):
            make_folder(target.parent)
            target.symlink_to(_aim(entry, root, tree))
            count += 1
            if count >= _MOST:
                break


def keep_texts(versions: Versions, recorded: str, version: str, tree: Path) -> None:
    """Keep, beside the tree of `version`, the text of files as it was `recorded`.

    A program that reads its own source, to log it with its results, must not find the probes.
    """
    if not recorded or recorded == version:
        return
    then = versions.hashes(recorded)
    for path, name in versions.hashes(version).items():
        if then.get(path, name) != name:
            target = texts_of(tree) / path
            make_folder(target.parent)
            target.write_bytes(versions.read(recorded, path))
            close_to_others(target)


def texts_of(tree: Path) -> Path:
    """Return the folder of recorded texts of a tree."""
    return tree.parent / TEXTS


def _is_below(relative: str, folders: Collection[str]) -> bool:
    return bool(folders) and any(str(above) in folders for above in Path(relative).parents)


def _is_older(entry: os.DirEntry[str], before: float) -> bool:
    """Say whether a file was there as it is; of a link to a folder only the link can tell."""
    made = entry.stat(follow_symlinks=False).st_mtime
    return made <= before and (entry.is_dir() or entry.stat().st_mtime <= before)


def _aim(entry: os.DirEntry[str], root: Path, tree: Path) -> str:
    """Return what to link to: for a link from folder to folder within the project, that of the tree."""
    home, led = os.path.realpath(root), os.path.realpath(entry.path)
    if entry.is_dir() and led.startswith(home + os.sep):
        return str(tree / led[len(home) + 1 :])
    return entry.path


def _files(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
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
                    continue  # a dangling link is nobody's input
                yield relative, entry
