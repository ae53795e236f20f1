"""Garbage collection: thin checkpoints to a budget, then remove files that nothing refers to.

**Which checkpoints go.** A question about the past asks for some iteration of the run, and the replay computes
from the nearest checkpoint before it. If every iteration is equally likely, a gap of g seconds between two
checkpoints costs g/2 on average and is hit with probability proportional to g, so the expected cost of a
replay grows with the sum of g². Removing the checkpoint between gaps a and b adds 2ab; the one that adds least
per byte it frees goes first. That is exact for each single removal and needs no guess about the question.

**Why no lock is needed**, although any number of processes may save at the same time. In this order:

1. Every file is listed with its modification time.
2. Saves in flight are looked up (`earliest_start`); files they could have put are spared.
3. Manifests are read. A save that ended before step 2 is among them.
4. A file that no manifest names, older than any save in flight, is renamed out of sight. If a save that began
   since has marked it as in use (its time differs from step 1), it is renamed back; a later save finds it
   missing and writes it again. Only then is it removed.

A run that exceeds the budget of its project starts this module as a separate process, so that training
shares neither interpreter nor memory with it. It prints the bytes that are left::

    python -P -m rearview.store.maintenance.gc ROOT BUDGET RUN
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rearview.errors import RearviewError, StoreError, UsageError
from rearview.model import Checkpoint, Status
from rearview.store.checkpoints.checkpoints import Checkpoints, earliest_start
from rearview.store.create_files import make_folder
from rearview.store.project import Project
from rearview.store.runs import Runs

if TYPE_CHECKING:
    from rearview.store.tables.answer_queries import Tables

GONE = ".gone-"
"""Prefix of the name of a file while it is being removed."""
SLACK = 2.0
"""Seconds that file times may lag behind the clock."""
RECORDING = 60.0
"""The same while a run records: an object may be that much older than the record that names it."""


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint, as `thin` sees it."""

    id: str
    run: str
    at: float
    """Computing seconds into its run, or its number if the seconds are unknown."""
    frees: int
    """Bytes that only this checkpoint uses, approximately."""
    promised: bool = False
    """Whether it must never be removed."""


def thin(candidates: Iterable[KeptCheckpoint], *, excess: int) -> list[str]:
    """Return the ids to remove, in order, so that at least `excess` bytes are freed.

    The last checkpoint of a run, from which it would resume, and promised ones stay. Fewer bytes are
    freed if no others are left.

    >>> four = [KeptCheckpoint(str(i), "r", float(t), 10) for i, t in enumerate((10, 20, 21, 40))]
    >>> thin(four, excess=10)
    ['1']
    >>> thin(four, excess=1000)
    ['1', '0', '2']
    """
    runs: dict[str, list[KeptCheckpoint]] = {}
    for checkpoint in candidates:
        runs.setdefault(checkpoint.run, []).append(checkpoint)
    chains = [_Chain(sorted(run, key=lambda checkpoint: checkpoint.at)) for run in runs.values()]
    queue: list[tuple[float, int, int, int]] = []
    for number, chain in enumerate(chains):
        for index in range(len(chain.held)):
            chain.offer(queue, number, index)
    gone: list[str] = []
    while excess > 0 and queue:
        _, number, index, age = heapq.heappop(queue)
        chain = chains[number]
        if age != chain.ages[index]:
            continue  # its neighbours have changed; the queue has a newer entry
        checkpoint = chain.held[index]
        gone.append(checkpoint.id)
        excess -= checkpoint.frees
        for neighbour in chain.remove(index):
            chain.offer(queue, number, neighbour)
    return gone


class _Chain:
    """The checkpoints of one run as a linked list; a replay can also begin at the run's start."""

    def __init__(self, held: Sequence[KeptCheckpoint]) -> None:
        self.held = held
        self.before = [index - 1 for index in range(len(held))]
        self.after = [index + 1 for index in range(len(held))]
        self.ages = [0] * len(held)

    def offer(self, queue: list[tuple[float, int, int, int]], number: int, index: int) -> None:
        """Queue `index` with the cost of losing it per byte, if it may be removed."""
        if self.held[index].promised or self.after[index] >= len(self.held):
            return
        before = self.held[self.before[index]].at if self.before[index] >= 0 else 0.0
        at, after = self.held[index].at, self.held[self.after[index]].at
        loss = 2 * max(at - before, 0.0) * max(after - at, 0.0)
        per_byte = loss / max(self.held[index].frees, 1)
        heapq.heappush(queue, (per_byte, number, index, self.ages[index]))

    def remove(self, index: int) -> list[int]:
        """Unlink `index`; return its neighbours, which now cost more to lose."""
        before, after = self.before[index], self.after[index]
        self.ages[index] = -1
        if before >= 0:
            self.after[before] = after
        self.before[after] = before
        changed = [neighbour for neighbour in (before, after) if 0 <= neighbour < len(self.held)]
        for neighbour in changed:
            self.ages[neighbour] += 1
        return changed


def expected_replay(times: Sequence[float], end: float) -> float:
    """Return the mean computing seconds from the nearest checkpoint to a random moment of a run.

    >>> expected_replay([], 10.0), expected_replay([5.0], 10.0)
    (5.0, 2.5)
    """
    marks = [0.0, *sorted(times), end]
    return sum((b - a) ** 2 for a, b in itertools.pairwise(marks)) / (2 * end)


@dataclass(frozen=True, slots=True)
class Freed:
    """The result of a garbage collection: the removed parts, or those that it would remove."""

    checkpoints: tuple[str, ...] = ()
    files: int = 0
    nbytes: int = 0
    left: int = 0
    """Bytes that remain."""
    spared: int = 0
    """Unreferenced bytes that a save in flight may be about to use."""


def gc(
    project: Project,
    *,
    referenced: Callable[[], Iterable[str]],
    budget: int | None = None,
    keep: Collection[str] = (),
    without: Collection[str] = (),
    dry: bool = False,
) -> Freed:
    """Thin checkpoints until they fit `budget` bytes, and remove files that nothing refers to.

    `referenced` returns the oids that records name. Runs and checkpoints whose ids are in `keep` stay,
    whatever the budget. The runs in `without` are about to be removed; their checkpoints do not count.
    With `dry` nothing is changed.
    """
    if not dry:
        restore_renamed(project)
    files = _files(project)
    clock = _clock(project) if not dry else time.time()
    cutoff = earliest_start(project, clock) - (RECORDING if _recording(project, clock) else SLACK)
    checkpoints = Checkpoints(project)
    held = [checkpoint for run in checkpoints.runs() for checkpoint in _readable(checkpoints, run)]
    held = [checkpoint for checkpoint in held if checkpoint.run not in without]
    uses = {checkpoint.id: frozenset(checkpoints.files(checkpoint)) for checkpoint in held}
    recorded = {checkpoints.objects.path(oid) for oid in referenced()}
    gone: list[str] = []
    if budget is not None:
        gone = _choose(held, uses, recorded=recorded, files=files, budget=budget, keep=keep)
        if not dry:
            for checkpoint in gone:
                checkpoints.delete(checkpoint)
    lost = set(gone)
    in_use = recorded.union(*(used for checkpoint, used in uses.items() if checkpoint not in lost))
    freed = count = spared = 0
    for path, (size, stamp) in files.items():
        if path in in_use:
            continue
        if stamp / 1e9 >= cutoff:
            spared += size
        elif dry or _remove(path, stamp):
            freed += size
            count += 1
    total = sum(size for size, _ in files.values())
    room = None if budget is None else budget - (total - freed)
    for folder, size in _superfluous_states(project, room, cutoff):
        if not dry:
            shutil.rmtree(folder, ignore_errors=True)
        freed, count, total = freed + size, count + 1, total + size
    return Freed(tuple(gone), count, freed, total - freed, spared)


def _superfluous_states(
    project: Project, room: int | None, cutoff: float
) -> Iterator[tuple[Path, int]]:
    """Yield stored states of cells to remove, with their bytes: incomplete ones, and the oldest beyond `room`.

    A replay of many versions that needs a removed state computes it again.
    """
    states = project.store / "multiversion" / "states"
    complete: list[tuple[float, Path, int]] = []
    for folder in sorted(states.iterdir()) if states.is_dir() else ():
        stamp = folder.stat().st_mtime
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if (folder / "complete.json").is_file():
            complete.append((stamp, folder, size))
        elif stamp < cutoff:
            yield folder, size
    if room is None:
        return
    used = sum(size for _, _, size in complete)
    for _, folder, size in sorted(complete):
        if used <= room:
            break
        used -= size
        yield folder, size


def usage(project: Project) -> int:
    """Return the size of all objects and packs in bytes."""
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
    """Return the checkpoints to remove so that the files of the others fit the budget."""
    gone: list[str] = []
    left = dict(uses)
    clock = _times_in_run(held)
    while True:
        users = Counter(path for used in left.values() for path in used)
        for path in recorded:
            users[path] += 1
        excess = sum(files[path][0] for path in users if path in files) - budget
        if excess <= 0:
            return gone
        removable = [
            KeptCheckpoint(
                id=checkpoint.id,
                run=checkpoint.run,
                at=clock[checkpoint.id],
                frees=sum(
                    files[path][0]
                    for path in left[checkpoint.id]
                    if users[path] == 1 and path in files
                ),
                promised=checkpoint.run in keep or checkpoint.id in keep,
            )
            for checkpoint in held
            if checkpoint.id in left
        ]
        removed = thin(removable, excess=excess)
        if not removed:
            return gone
        for checkpoint in removed:
            del left[checkpoint]
        gone += removed


def _times_in_run(held: list[Checkpoint]) -> dict[str, float]:
    """Return the seconds into its run of each checkpoint; a clock set back does not reverse the order."""
    moments: dict[str, float] = {}
    for run in {checkpoint.run for checkpoint in held}:
        chain = [checkpoint for checkpoint in held if checkpoint.run == run]
        gap = (chain[-1].time - chain[0].time) / max(len(chain) - 1, 1)
        reached = 0.0
        for checkpoint in chain:
            reached = max(reached, checkpoint.time - chain[0].time + max(gap, 0.0))
            moments[checkpoint.id] = reached
    return moments


def _readable(checkpoints: Checkpoints, run: str) -> list[Checkpoint]:
    """Return the checkpoints of `run`; raise if one is unreadable, because its files are unknown then."""
    readable = checkpoints.of(run)
    folder = checkpoints.project.checkpoints / run
    names = [name for name in folder.iterdir() if name.suffix == ".json"]
    names = [name for name in names if not name.name.startswith(".")]
    read_names = {f"{checkpoint.seq:08d}.json" for checkpoint in readable}
    for path in names:
        if path.name not in read_names and path.exists():
            try:
                checkpoints.get(
                    f"{run}/{int(path.stem)}"
                )  # raises an error that says what is wrong
            except UsageError:
                if path.exists():
                    raise  # else it has just been deleted
    return readable


def _files(project: Project) -> dict[Path, tuple[int, int]]:
    """Return size and modification time of every object, pack and leftover of a killed save."""
    files: dict[Path, tuple[int, int]] = {}
    for root in (project.objects, project.packs, project.checkpoints):
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if root == project.checkpoints and not name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    files[path] = (stat.st_size, stat.st_mtime_ns)
    return files


def _remove(path: Path, stamp: int) -> bool:
    """Remove `path` unless a save has marked it as in use since `stamp`; return True if removed."""
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
    with contextlib.suppress(FileNotFoundError):  # another garbage collection has renamed it back
        if gone.stat().st_mtime_ns == stamp:
            gone.unlink()
            return True
        gone.rename(path)
    return False


def restore_renamed(project: Project) -> None:
    """Rename back the files that a killed garbage collection had renamed."""
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
    """Return the time by the clock of the store's file system, which may be another machine's."""
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


def fit_budget(project: Project, budget: int, run: str) -> Freed:
    """Collect garbage and thin checkpoints, also those of `run`, until they fit `budget` bytes.

    Other runs that are still recording keep all of theirs: their next saves refer to them.
    """
    recording = [other.id for other in Runs(project).all() if other.status is Status.RUNNING]
    from rearview.store.tables.answer_queries import Tables

    tables = Tables(project)
    try:
        return gc(
            project,
            referenced=lambda: recorded_objects(tables),
            budget=budget,
            keep=[run_id for run_id in recording if run_id != run],
        )
    finally:
        tables.close()


def recorded_objects(tables: Tables, without: Collection[str] = ()) -> list[str]:
    """Return the oids of objects that records refer to, also inside lists and dictionaries.

    Records of the runs in `without` do not count.
    """
    from rearview.store.tables.connection import quoted

    tables.refresh()
    exclusion = "".join(f" AND run <> {quoted(run)}" for run in without)
    rows = tables.sql(
        "SELECT DISTINCT text FROM records WHERE kind IN ('object', 'json') "
        f"AND contains(text, '$object'){exclusion}"
    )
    return [oid for row in rows for oid in _oids(json.loads(row["text"]))]


def _oids(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$object"), str):
            yield value["$object"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _oids(item)


def main() -> None:
    """Run `fit_budget` for the project on the command line, at the lowest priority."""
    root, budget, run = sys.argv[1:4]
    with contextlib.suppress(OSError):
        os.nice(19)
    try:
        freed = fit_budget(Project.open(Path(root)), int(budget), run)
    except RearviewError as exc:
        sys.exit(f"rearview: {exc}")
    sys.stdout.write(f"{freed.left}\n")


if __name__ == "__main__":
    main()
