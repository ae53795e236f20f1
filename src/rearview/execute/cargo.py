"""What a segment needs where the project's folder is not seen: its files, and no more."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rearview.execute.executor import Task
from rearview.execute.scratch import texts_of
from rearview.execute.stretch import Touch, Use, touched
from rearview.model import Control, Origin, Run, Wanted
from rearview.model.segment import VARIABLE
from rearview.store.alive import identity
from rearview.store.checkpoints import Checkpoints
from rearview.store.project import Project
from rearview.store.runs import ACCOUNT, Runs

_SMALL = ("roots", "skeleton", "anchors")
"""Parts that a comparison always reads."""
_NOT_READ = {"replays.jsonl", "heartbeat", ACCOUNT}
"""Files of a run that no replay of it reads."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or link, as it is to stand on the node."""

    path: str
    size: int
    mode: int
    mtime: int
    """Nanoseconds."""
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Cargo:
    """All that one segment needs."""

    root: Path
    run: str
    replay: str
    folders: tuple[Path, ...]
    """Folders of the replay; what it changes there is its own."""
    own: tuple[Entry, ...]
    """Its scratch tree and segment file."""
    shared: tuple[Entry, ...]
    """What other segments read too: the run, its checkpoints, inputs that the tree links to."""
    spared: tuple[Entry, ...]
    """Large parts of checkpoints that are only read if the replay differs from them."""
    outside: tuple[str, ...]
    """Files outside the project that the run read; they do not travel."""


def segment_of(task: Task) -> Path | None:
    """Return the segment file of a task; None for one that replays nothing."""
    told = task.environment.get(VARIABLE)
    if told is None:
        return None
    segment = msgspec.json.decode(told, type=Control).segment
    return None if segment is None else Path(segment)


def home_of(project: Project) -> str:
    """Return what tells this store from one that stands at the same path elsewhere."""
    about, here = project.store.stat(), identity(0)
    return f"{here['host']} {here['boot']} {about.st_dev} {about.st_ino}"


def pack(task: Task, checkpoints: Checkpoints) -> Cargo:
    """Return what `task` needs of the project that `checkpoints` belong to."""
    project = checkpoints.project
    segment = segment_of(task)
    assert segment is not None
    wanted = msgspec.json.decode(segment.read_bytes(), type=Wanted)
    run = Runs(project).get(wanted.run)
    tree = Path(wanted.tree)
    own = [_entry(segment), *_tree(tree), *_tree(texts_of(tree))]
    linked = [Path(one.link) for one in own if one.link and one.link.startswith(os.sep)]
    shared = {entry.path: entry for entry in _inside(project.root, linked)}
    needed, spared = _parts(checkpoints, touched(wanted, checkpoints.of(run.id)))
    for path in (*_store(project, run), *needed):
        shared[str(path)] = _entry(path)
    return Cargo(
        root=project.root,
        run=run.id,
        replay=wanted.replay,
        folders=tuple(dict.fromkeys((segment.parent, tree.parent))),
        own=tuple(own),
        shared=tuple(shared.values()),
        spared=tuple(_entry(path) for path in spared),
        outside=tuple(_outside(project.root, run)),
    )


def _store(project: Project, run: Run) -> Iterator[Path]:
    """Yield the files of the store that every replay of a run reads."""
    yield project.store / "format"
    if (project.store / "config.toml").is_file():
        yield project.store / "config.toml"
    for entry in sorted(os.scandir(project.runs / run.id), key=lambda entry: entry.name):
        if entry.name in _NOT_READ or entry.name.startswith(".") or not entry.is_file():
            continue
        if entry.name.endswith(".jsonl") and entry.name.startswith("records-"):
            with Path(entry.path).open("rb") as file:
                head = file.readline(1 << 20)
            if origin_of(head) != Origin.RECORDED:
                continue  # another replay's
        yield Path(entry.path)


def origin_of(head: bytes) -> str:
    """Return whose records a file holds, by its first line."""
    try:
        return str(msgspec.json.decode(head).get("origin", ""))
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError):
        return ""


def _parts(checkpoints: Checkpoints, touches: Iterable[Touch]) -> tuple[list[Path], list[Path]]:
    """Return the files of checkpoints that are read, and those that are read only in doubt."""
    needed: dict[Path, None] = {}
    doubtful: dict[Path, None] = {}
    folder, objects = checkpoints.project.checkpoints, checkpoints.objects
    for touch in touches:
        one = touch.checkpoint
        needed[folder / one.run / f"{one.seq:08d}.json"] = None
        table = checkpoints.table(one)
        if table is not None:
            needed[objects.file(table)] = None
        for key, ref in one.parts.items():
            read = touch.use is Use.RESTORED or key in _SMALL
            packed = ref.pack is not None and touch.use is Use.COMPARED
            (needed if read or packed else doubtful)[objects.file(ref)] = None
    return list(needed), [path for path in doubtful if path not in needed]


def _tree(tree: Path) -> Iterator[Entry]:
    for folder, folders, names in os.walk(tree):
        for name in sorted(
            (*names, *(name for name in folders if Path(folder, name).is_symlink()))
        ):
            entry = _entry(Path(folder, name))
            if stat.S_ISREG(entry.mode) or entry.link is not None:
                yield entry


def _inside(root: Path, linked: Iterable[Path]) -> Iterator[Entry]:
    """Yield the files that links lead to, as far as they lie in the project."""
    seen: set[Path] = set()
    todo = list(linked)
    while todo:
        path = todo.pop()
        if path in seen or root not in path.parents or not os.path.lexists(path):
            continue
        seen.add(path)
        entry = _entry(path)
        if stat.S_ISDIR(entry.mode):
            yield from _tree(path)
            continue
        yield entry
        if entry.link is not None:  # the user's own, which leads on
            todo.append(Path(os.path.normpath(path.parent / entry.link)))


def _entry(path: Path) -> Entry:
    about = path.lstat()
    link = str(path.readlink()) if stat.S_ISLNK(about.st_mode) else None
    return Entry(str(path), about.st_size, about.st_mode, about.st_mtime_ns, link)


def _outside(root: Path, run: Run) -> Iterator[str]:
    inputs: dict[str, Any] = run.facts.get("end", {}).get("inputs", {})
    for path in inputs:
        now = run.now(path, str(root))
        if root not in Path(now).parents:
            yield path
