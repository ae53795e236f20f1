"""Keep a project within its size: started beside a run that has outgrown it.

Which checkpoints to give up when space is short: those whose loss makes replay dearest last.

A question about the past falls on some iteration of the run; the replay computes from the nearest
checkpoint before it. With questions equally likely anywhere, a gap of g seconds between two
checkpoints costs g/2 on average and is hit with probability proportional to g, so the expected
replay cost grows with the sum of g². Taking out the checkpoint between gaps a and b adds 2ab:
per byte that it frees, the one with the least is taken first. That is exact for each single
removal and needs no guess about which run will be asked about.

Free space: thin checkpoints by policy, then remove what nothing refers to any more.

No lock: saves go on meanwhile, in any number of processes. What keeps them safe, in this order:

1. Every file is listed with its modification time.
2. Saves in flight are looked up (`presence`); what they could have put is spared.
3. Manifests are read. A save that ended before step 2 is among them.
4. A file that no manifest names, older than any save in flight, is renamed out of sight. If a
   save that began meanwhile has marked it as in use (its time differs from step 1), it is renamed
   back; one that comes later finds it missing and writes it anew. Only then is it removed.

Keep a project within its size: started beside a run that has outgrown it.

    python -P -m rearview.store.checkpoints.gc ROOT BUDGET RUN

A process of its own, so that training shares neither interpreter nor memory with it. It prints the
bytes that are left.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rearview.errors import RearviewError, StoreError, UsageError
from rearview.model import Checkpoint, Status
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.files import make_folder
from rearview.store.machine import earliest
from rearview.store.project import Project
from rearview.store.runs import Runs
from rearview.store.tables.connection import quoted
from rearview.store.tables.tables import Tables


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint as the plan sees it."""

    id: str
    run: str
    at: float
    """Computing seconds into its run, or its number where seconds are not known."""
    frees: int
    """Bytes that only this checkpoint uses, about."""
    promised: bool = False
    """Never to be given up."""


def thin(held: Iterable[KeptCheckpoint], *, excess: int) -> list[str]:
    """Return the ids to give up, in order, so that at least `excess` bytes are freed.

    The last checkpoint of a run, which it would resume from, and promised ones stay. Fewer bytes
    are freed when there is nothing else to give up.

    >>> four = [KeptCheckpoint(str(i), "r", float(t), 10) for i, t in enumerate((10, 20, 21, 40))]
    >>> thin(four, excess=10)
    ['1']
    >>> thin(four, excess=1000)
    ['1', '0', '2']
    """
    runs: dict[str, list[KeptCheckpoint]] = {}
    for each in held:
        runs.setdefault(each.run, []).append(each)
    chains = [_Chain(sorted(run, key=lambda each: each.at)) for run in runs.values()]
    queue: list[tuple[float, int, int, int]] = []
    for number, chain in enumerate(chains):
        for index in range(len(chain.held)):
            chain.offer(queue, number, index)
    gone: list[str] = []
    while excess > 0 and queue:
        _, number, index, age = heapq.heappop(queue)
        chain = chains[number]
        if age != chain.ages[index]:
            continue  # its neighbours have changed since; a newer entry stands in the queue
        each = chain.held[index]
        gone.append(each.id)
        excess -= each.frees
        for neighbour in chain.remove(index):
            chain.offer(queue, number, neighbour)
    return gone


class _Chain:
    """The checkpoints of one run as a linked list; the run's start is a place to begin, too."""

    def __init__(self, held: Sequence[KeptCheckpoint]) -> None:
        self.held = held
        self.before = [index - 1 for index in range(len(held))]
        self.after = [index + 1 for index in range(len(held))]
        self.ages = [0] * len(held)

    def offer(self, queue: list[tuple[float, int, int, int]], number: int, index: int) -> None:
        """Put `index` into the queue with the cost of its loss per byte, if it may go at all."""
        if self.held[index].promised or self.after[index] >= len(self.held):
            return
        before = self.held[self.before[index]].at if self.before[index] >= 0 else 0.0
        at, after = self.held[index].at, self.held[self.after[index]].at
        loss = 2 * max(at - before, 0.0) * max(after - at, 0.0)
        per_byte = loss / max(self.held[index].frees, 1)
        heapq.heappush(queue, (per_byte, number, index, self.ages[index]))

    def remove(self, index: int) -> list[int]:
        """Take `index` out and return the neighbours, whose loss is now greater."""
        before, after = self.before[index], self.after[index]
        self.ages[index] = -1
        if before >= 0:
            self.after[before] = after
        self.before[after] = before
        changed = [each for each in (before, after) if 0 <= each < len(self.held)]
        for each in changed:
            self.ages[each] += 1
        return changed


def expected(times: Sequence[float], end: float) -> float:
    """Return the mean computing seconds from the nearest checkpoint to a random moment of a run.

    >>> expected([], 10.0), expected([5.0], 10.0)
    (5.0, 2.5)
    """
    marks = [0.0, *sorted(times), end]
    return sum((b - a) ** 2 for a, b in itertools.pairwise(marks)) / (2 * end)


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
            KeptCheckpoint(
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


def fit(project: Project, budget: int, run: str) -> Freed:
    """Thin checkpoints, those of `run` too, until `budget` bytes suffice.

    Other runs that are going on keep all of theirs: their processes lean on them.
    """
    going = [one.id for one in Runs(project).all() if one.status is Status.RUNNING]
    tables = Tables(project)
    try:
        return gc(
            project,
            referenced=lambda: named(tables),
            budget=budget,
            keep=[each for each in going if each != run],
        )
    finally:
        tables.close()


def named(tables: Tables, without: Collection[str] = ()) -> list[str]:
    """Return the objects that records name, alone or inside lists and dictionaries.

    Records of the runs in `without` do not count.
    """
    tables.refresh()
    besides = "".join(f" AND run <> {quoted(run)}" for run in without)
    rows = tables.sql(
        "SELECT DISTINCT text FROM records WHERE kind IN ('object', 'json') "
        f"AND contains(text, '$object'){besides}"
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
    """Do it for the project named on the command line, when nobody else needs the processor."""
    root, budget, run = sys.argv[1:4]
    with contextlib.suppress(OSError):
        os.nice(19)
    try:
        freed = fit(Project.open(Path(root)), int(budget), run)
    except RearviewError as exc:
        sys.exit(f"rearview: {exc}")
    sys.stdout.write(f"{freed.left}\n")


if __name__ == "__main__":
    main()
