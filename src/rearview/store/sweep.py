"""Free space: thin checkpoints by policy, then remove what nothing refers to any more.

No lock: saves go on meanwhile, in any number of processes. What keeps them safe, in this order:

1. Every file is listed with its modification time.
2. Saves in flight are looked up (`presence`); what they could have put is spared.
3. Manifests are read. A save that ended before step 2 is among them.
4. A file that no manifest names, older than any save in flight, is renamed out of sight. If a
   save that began meanwhile has marked it as in use (its time differs from step 1), it is renamed
   back; one that comes later finds it missing and writes it anew. Only then is it removed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from rearview.errors import StoreError, UsageError
from rearview.model import Checkpoint
from rearview.plan.retention import Held, thin
from rearview.store.checkpoints import Checkpoints
from rearview.store.presence import earliest
from rearview.store.private import make_folder
from rearview.store.project import Project

GONE = ".gone-"
"""How the name of a file begins while it is being removed."""
SLACK = 2.0
"""Seconds that file times may lag behind the clock."""
RECORDING = 60.0
"""The same while a run is going on: an object may wait so long for the record that names it."""


@dataclass(frozen=True, slots=True)
class Freed:
    """What a sweep removed, or would remove."""

    checkpoints: tuple[str, ...] = ()
    files: int = 0
    nbytes: int = 0
    left: int = 0
    """Bytes that remain."""
    spared: int = 0
    """Bytes that nothing refers to, but a save in flight may be about to."""


def gc(
    project: Project,
    *,
    referenced: Callable[[], Iterable[str]],
    budget: int | None = None,
    keep: Collection[str] = (),
    without: Collection[str] = (),
    dry: bool = False,
) -> Freed:
    """Free what is not needed, and thin checkpoints until `budget` bytes suffice.

    `referenced` returns the oids that records name. `keep` holds ids of runs and checkpoints that
    are promised: they stay, whatever the budget. Checkpoints of the runs in `without` need nothing;
    those runs are about to be removed. With `dry` nothing is changed.
    """
    if not dry:
        bring_back(project)
    files = _files(project)
    now = _clock(project) if not dry else time.time()
    cutoff = earliest(project, now) - (RECORDING if _recording(project, now) else SLACK)
    checkpoints = Checkpoints(project)
    held = [checkpoint for run in checkpoints.runs() for checkpoint in _readable(checkpoints, run)]
    held = [checkpoint for checkpoint in held if checkpoint.run not in without]
    uses = {each.id: _uses(checkpoints, each) for each in held}
    recorded = {checkpoints.objects.path(oid) for oid in referenced()}
    gone: list[str] = []
    if budget is not None:
        gone = _choose(held, uses, recorded=recorded, files=files, budget=budget, keep=keep)
        if not dry:
            for each in gone:
                checkpoints.delete(each)
    lost = set(gone)
    needed = recorded.union(*(used for each, used in uses.items() if each not in lost))
    freed = count = spared = 0
    for path, (size, stamp) in files.items():
        if path in needed:
            continue
        if stamp / 1e9 >= cutoff:
            spared += size
        elif dry or _remove(path, stamp):
            freed += size
            count += 1
    total = sum(size for size, _ in files.values())
    return Freed(tuple(gone), count, freed, total - freed, spared)


def usage(project: Project) -> int:
    """Return the bytes that objects and packs take."""
    return sum(size for size, _ in _files(project).values())


def _choose(
    held: list[Checkpoint],
    uses: dict[str, frozenset[Path]],
    *,
    recorded: set[Path],
    files: dict[Path, tuple[int, int]],
    budget: int,
    keep: Collection[str],
) -> list[str]:
    """Return the checkpoints to give up so that what the rest needs fits the budget."""
    gone: list[str] = []
    left = dict(uses)
    clock = _moments(held)
    while True:
        users = Counter(path for used in left.values() for path in used)
        for path in recorded:
            users[path] += 1
        excess = sum(files[path][0] for path in users if path in files) - budget
        if excess <= 0:
            return gone
        rest = [
            Held(
                id=each.id,
                run=each.run,
                at=clock[each.id],
                frees=sum(
                    files[path][0] for path in left[each.id] if users[path] == 1 and path in files
                ),
                promised=each.run in keep or each.id in keep,
            )
            for each in held
            if each.id in left
        ]
        chosen = thin(rest, excess=excess)
        if not chosen:
            return gone
        for each in chosen:
            del left[each]
        gone += chosen


def _moments(held: list[Checkpoint]) -> dict[str, float]:
    """Return when in its run each checkpoint was taken; a clock set back never reverses order."""
    moments: dict[str, float] = {}
    for run in {each.run for each in held}:
        chain = [each for each in held if each.run == run]
        gap = (chain[-1].time - chain[0].time) / max(len(chain) - 1, 1)
        reached = 0.0
        for each in chain:
            reached = max(reached, each.time - chain[0].time + max(gap, 0.0))
            moments[each.id] = reached
    return moments


def _readable(checkpoints: Checkpoints, run: str) -> list[Checkpoint]:
    """Return the checkpoints of `run`; what an unreadable one refers to must not be guessed."""
    found = checkpoints.of(run)
    folder = checkpoints.project.checkpoints / run
    names = [name for name in folder.iterdir() if name.suffix == ".json"]
    names = [name for name in names if not name.name.startswith(".")]
    known = {f"{each.seq:08d}.json" for each in found}
    for path in names:
        if path.name not in known and path.exists():
            try:
                checkpoints.get(f"{run}/{int(path.stem)}")  # raises what is wrong with it
            except UsageError:
                if path.exists():
                    raise  # else somebody has deleted it meanwhile
    return found


def _uses(checkpoints: Checkpoints, checkpoint: Checkpoint) -> frozenset[Path]:
    files = {checkpoints.objects.file(ref) for ref in checkpoint.parts.values()}
    table = checkpoints.table(checkpoint)
    if table is not None:
        files.add(checkpoints.objects.file(table))
    return frozenset(files)


def _files(project: Project) -> dict[Path, tuple[int, int]]:
    """Return size and time of every object, pack and leftover of a dead save."""
    found: dict[Path, tuple[int, int]] = {}
    for root in (project.objects, project.packs, project.checkpoints):
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if root == project.checkpoints and not name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    found[path] = (stat.st_size, stat.st_mtime_ns)
    return found


def _remove(path: Path, stamp: int) -> bool:
    """Remove `path` unless somebody has marked it as in use since `stamp`."""
    if path.name.startswith("."):
        path.unlink(missing_ok=True)
        return True
    gone = path.with_name(GONE + path.name)
    try:
        path.rename(gone)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise StoreError(
            f"{path} cannot be removed: {exc.strerror or exc}. Make the store writable.",
            slug="store-unwritable",
        ) from exc
    with contextlib.suppress(FileNotFoundError):  # another sweep has brought it back
        if gone.stat().st_mtime_ns == stamp:
            gone.unlink()
            return True
        gone.rename(path)
    return False


def bring_back(project: Project) -> None:
    """Bring back what a sweep that was killed had renamed; this one judges it anew."""
    for root in (project.objects, project.packs):
        for gone in root.rglob(f"{GONE}*"):
            with contextlib.suppress(OSError):
                gone.rename(gone.with_name(gone.name.removeprefix(GONE)))


def _recording(project: Project, now: float) -> bool:
    for beat in project.runs.glob("*/heartbeat"):
        with contextlib.suppress(OSError):
            if now - beat.stat().st_mtime < RECORDING and not (beat.parent / "end.json").exists():
                return True
    return False


def _clock(project: Project) -> float:
    """Return the time as the store's file system tells it, which may be another machine's."""
    probe = project.writing / f".clock-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        make_folder(probe.parent)
        probe.touch()
        moment = probe.stat().st_mtime
        probe.unlink()
    except OSError as exc:
        raise StoreError(
            f"The store {project.store} cannot be changed: {exc.strerror or exc}. Make it "
            "writable, or look first with `rearview gc --dry`.",
            slug="store-unwritable",
        ) from exc
    return min(moment, time.time())
