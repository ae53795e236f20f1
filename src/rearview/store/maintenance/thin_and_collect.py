"""Garbage collection: remove checkpoints until the rest fits a budget, then files that nothing refers to.

**Which checkpoints are removed.** A backfill asks for an iteration of a run, and a replay computes this
iteration from the nearest checkpoint before it. If every iteration is equally likely, a gap of g seconds
between two checkpoints costs g/2 on average and is hit with probability proportional to g, so the expected
cost of a replay grows with the sum of g². Removing the checkpoint between gaps a and b adds 2ab to that sum. The
checkpoint that adds least per freed byte is removed first. This is exact for each single removal, and needs no
guess about which iteration will be asked for.

**Why no lock is needed**, although any number of processes may save at the same time. In this order:

1. Every file is listed with its modification time.
2. Saves in flight are looked up (`earliest_start`); files that these saves could have written are spared.
3. Manifests are read; a save that had ended by step 2 has its manifest among them.
4. A file that no manifest names, and that is older than any save in flight, gets another name, under which no
   save finds it. If a save that began after step 1 has marked the file as in use (its time differs from
   step 1), the file gets its name back. Else the file is removed. A save that looks for the file after the
   renaming does not find it, and writes it again.

A run that exceeds the budget of its project starts this module as a separate process, so that training
shares neither interpreter nor memory with the collection. The process prints the bytes that remain::

    python -P -m rearview.store.maintenance.thin_and_collect ROOT BUDGET RUN
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
"""Prefix of the name of a file while garbage collection removes the file."""
SLACK = 2.0
"""Seconds that file times may lag behind the clock."""
RECORDING = 60.0
"""Seconds in place of `SLACK` while a run records, because an object may be older than the record that names it."""


@dataclass(frozen=True, slots=True)
class ThinningCandidate:
    """A checkpoint that `thin` may choose for removal."""

    id: str
    run: str
    at: float
    """Approximate seconds from the start of the run to this checkpoint."""
    frees: int
    """Approximate number of bytes that the removal of this checkpoint frees."""
    promised: bool = False
    """Whether the checkpoint must never be removed."""


def thin(candidates: Iterable[ThinningCandidate], *, excess: int) -> list[str]:
    """Return the ids of checkpoints whose removal, in this order, frees at least `excess` bytes.

    The last checkpoint of a run, from which the run would resume, and promised checkpoints are not among them. If
    too few checkpoints remain, fewer bytes are freed.

    >>> four = [ThinningCandidate(str(i), "r", float(t), 10) for i, t in enumerate((10, 20, 21, 40))]
    >>> thin(four, excess=10)
    ['1']
    >>> thin(four, excess=1000)
    ['1', '0', '2']
    """
    runs: dict[str, list[ThinningCandidate]] = {}
    for checkpoint in candidates:
        runs.setdefault(checkpoint.run, []).append(checkpoint)
    chains = [_Chain(sorted(run, key=lambda checkpoint: checkpoint.at)) for run in runs.values()]
    queue: list[tuple[float, int, int, int]] = []
    for number, chain in enumerate(chains):
        for index in range(len(chain.checkpoints)):
            chain.offer(queue, number, index)
    removed_ids: list[str] = []
    while excess > 0 and queue:
        _, number, index, age = heapq.heappop(queue)
        chain = chains[number]
        if age != chain.ages[index]:
            continue  # a neighbour was removed since; the queue has a newer entry
        checkpoint = chain.checkpoints[index]
        removed_ids.append(checkpoint.id)
        excess -= checkpoint.frees
        for neighbour in chain.remove(index):
            chain.offer(queue, number, neighbour)
    return removed_ids


class _Chain:
    """A linked list of the checkpoints of one run, given by their indices; index -1 is the start of the run."""

    def __init__(self, checkpoints: Sequence[ThinningCandidate]) -> None:
        self.checkpoints = checkpoints
        self.before = [index - 1 for index in range(len(checkpoints))]
        self.after = [index + 1 for index in range(len(checkpoints))]
        self.ages = [0] * len(checkpoints)
        """How often a neighbour of each checkpoint was removed; -1 for a removed checkpoint."""

    def offer(self, queue: list[tuple[float, int, int, int]], number: int, index: int) -> None:
        """Add the checkpoint at `index` to `queue`, sorted by cost of its removal per freed byte, unless it must be kept.

        `number` is the number of this chain, which is stored in the queue.
        """
        if self.checkpoints[index].promised or self.after[index] >= len(self.checkpoints):
            return
        before = self.checkpoints[self.before[index]].at if self.before[index] >= 0 else 0.0
        at, after = self.checkpoints[index].at, self.checkpoints[self.after[index]].at
        loss = 2 * max(at - before, 0.0) * max(after - at, 0.0)
        per_byte = loss / max(self.checkpoints[index].frees, 1)
        heapq.heappush(queue, (per_byte, number, index, self.ages[index]))

    def remove(self, index: int) -> list[int]:
        """Unlink the checkpoint at `index`; return the indices of its neighbours, whose removal now costs more."""
        before, after = self.before[index], self.after[index]
        self.ages[index] = -1
        if before >= 0:
            self.after[before] = after
        self.before[after] = before
        neighbours = [
            neighbour for neighbour in (before, after) if 0 <= neighbour < len(self.checkpoints)
        ]
        for neighbour in neighbours:
            self.ages[neighbour] += 1
        return neighbours


def expected_replay(times: Sequence[float], end: float) -> float:
    """Return the mean computing seconds from the last checkpoint before a random moment of a run to that moment.

    `times` are the seconds at which checkpoints were saved, `end` is the length of the run.

    >>> expected_replay([], 10.0), expected_replay([5.0], 10.0)
    (5.0, 2.5)
    """
    bounds = [0.0, *sorted(times), end]
    return sum((b - a) ** 2 for a, b in itertools.pairwise(bounds)) / (2 * end)


@dataclass(frozen=True, slots=True)
class Freed:
    """Checkpoints, files and bytes that a garbage collection removed, or would remove in a dry run."""

    checkpoints: tuple[str, ...] = ()
    files: int = 0
    nbytes: int = 0
    left: int = 0
    """Bytes of all files that remain."""
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
    """Remove checkpoints until the rest fits `budget` bytes, and remove files that nothing refers to.

    `referenced` returns the oids that records name. Checkpoints whose own id or run is in `keep` are never removed,
    even if the budget is exceeded. Runs in `without` are about to be removed: files that only their checkpoints use
    are removed. With `dry`, nothing is changed.
    """
    if not dry:
        restore_renamed(project)
    files = _files(project)
    clock = _clock(project) if not dry else time.time()
    cutoff = earliest_start(project, clock) - (
        RECORDING if _is_recording(project, clock) else SLACK
    )
    checkpoints = Checkpoints(project)
    all_checkpoints = [
        checkpoint for run in checkpoints.runs() for checkpoint in _readable(checkpoints, run)
    ]
    all_checkpoints = [
        checkpoint for checkpoint in all_checkpoints if checkpoint.run not in without
    ]
    uses = {
        checkpoint.id: frozenset(checkpoints.files(checkpoint)) for checkpoint in all_checkpoints
    }
    recorded = {checkpoints.objects.path(oid) for oid in referenced()}
    thinned_ids: list[str] = []
    if budget is not None:
        thinned_ids = _checkpoints_to_remove(
            all_checkpoints, uses, recorded=recorded, files=files, budget=budget, protected=keep
        )
        if not dry:
            for checkpoint in thinned_ids:
                checkpoints.delete(checkpoint)
    thinned = set(thinned_ids)
    in_use = recorded.union(
        *(used for checkpoint, used in uses.items() if checkpoint not in thinned)
    )
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
    room_for_states = None if budget is None else budget - (total - freed)
    for folder, size in _superfluous_states(project, room_for_states, cutoff):
        if not dry:
            shutil.rmtree(folder, ignore_errors=True)
        freed, count, total = freed + size, count + 1, total + size
    return Freed(tuple(thinned_ids), count, freed, total - freed, spared)


def _superfluous_states(
    project: Project, room: int | None, cutoff: float
) -> Iterator[tuple[Path, int]]:
    """Yield (folder, number of bytes) of each stored state of a cell that is to be removed.

    These are incomplete states older than the time `cutoff`, and, if all complete states have more than `room` bytes,
    the oldest of these. A replay of many versions that needs a removed state computes the state again.
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


def _checkpoints_to_remove(
    checkpoints: list[Checkpoint],
    uses: dict[str, frozenset[Path]],
    *,
    recorded: set[Path],
    files: dict[Path, tuple[int, int]],
    budget: int,
    protected: Collection[str],
) -> list[str]:
    """Return the ids of checkpoints to remove, so that the files of the remaining checkpoints fit the budget."""
    chosen_ids: list[str] = []
    remaining_uses = dict(uses)
    clock = _times_in_run(checkpoints)
    while True:
        users = Counter(path for used in remaining_uses.values() for path in used)
        for path in recorded:
            users[path] += 1
        excess = sum(files[path][0] for path in users if path in files) - budget
        if excess <= 0:
            return chosen_ids
        removable = [
            ThinningCandidate(
                id=checkpoint.id,
                run=checkpoint.run,
                at=clock[checkpoint.id],
                frees=sum(
                    files[path][0]
                    for path in remaining_uses[checkpoint.id]
                    if users[path] == 1 and path in files
                ),
                promised=checkpoint.run in protected or checkpoint.id in protected,
            )
            for checkpoint in checkpoints
            if checkpoint.id in remaining_uses
        ]
        removed = thin(removable, excess=excess)
        if not removed:
            return chosen_ids
        for checkpoint in removed:
            del remaining_uses[checkpoint]
        chosen_ids += removed


def _times_in_run(checkpoints: list[Checkpoint]) -> dict[str, float]:
    """Return a mapping: checkpoint id -> approximate seconds from the start of its run to the checkpoint.

    If the clock was set back during a run, the seconds still do not decrease from checkpoint to checkpoint.
    """
    seconds_by_id: dict[str, float] = {}
    for run in {checkpoint.run for checkpoint in checkpoints}:
        run_checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.run == run]
        gap = (run_checkpoints[-1].time - run_checkpoints[0].time) / max(
            len(run_checkpoints) - 1, 1
        )
        reached = 0.0
        for checkpoint in run_checkpoints:
            reached = max(reached, checkpoint.time - run_checkpoints[0].time + max(gap, 0.0))
            seconds_by_id[checkpoint.id] = reached
    return seconds_by_id


def _readable(checkpoints: Checkpoints, run: str) -> list[Checkpoint]:
    """Return the checkpoints of `run`; raise if a manifest is unreadable, because the files it names are unknown."""
    readable = checkpoints.of(run)
    folder = checkpoints.project.checkpoints / run
    manifests = [name for name in folder.iterdir() if name.suffix == ".json"]
    manifests = [name for name in manifests if not name.name.startswith(".")]
    readable_names = {f"{checkpoint.seq:08d}.json" for checkpoint in readable}
    for manifest in manifests:
        if manifest.name not in readable_names and manifest.exists():
            try:
                # raises an error that names the damage
                checkpoints.get(f"{run}/{int(manifest.stem)}")
            except UsageError:
                if manifest.exists():
                    raise  # else the manifest has just been deleted
    return readable


def _files(project: Project) -> dict[Path, tuple[int, int]]:
    """Return the files of all objects and packs, and files that killed saves left unfinished, as a mapping.

    It maps path -> (bytes, modification time in nanoseconds).
    """
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
    """Remove the file `path`, unless a save has marked it as in use; return True if it was removed.

    `stamp` is the time of the file when it was listed.
    """
    if path.name.startswith("."):
        path.unlink(missing_ok=True)
        return True
    hidden_path = path.with_name(GONE + path.name)
    try:
        path.rename(hidden_path)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise StoreError(
            f"{path} cannot be removed: {exc.strerror or exc}. Make the store writable.",
            slug="store-unwritable",
        ) from exc
    with contextlib.suppress(
        FileNotFoundError
    ):  # another garbage collection has given the file its name back
        if hidden_path.stat().st_mtime_ns == stamp:
            hidden_path.unlink()
            return True
        hidden_path.rename(path)
    return False


def restore_renamed(project: Project) -> None:
    """Give their names back to files that a killed garbage collection had renamed."""
    for root in (project.objects, project.packs):
        for hidden_path in root.rglob(f"{GONE}*"):
            with contextlib.suppress(OSError):
                hidden_path.rename(hidden_path.with_name(hidden_path.name.removeprefix(GONE)))


def _is_recording(project: Project, now: float) -> bool:
    """Return True if a run of the project has not ended and its heartbeat is less than a minute old at time `now`."""
    for beat in project.runs.glob("*/heartbeat"):
        with contextlib.suppress(OSError):
            if now - beat.stat().st_mtime < RECORDING and not (beat.parent / "end.json").exists():
                return True
    return False


def _clock(project: Project) -> float:
    """Return the time in seconds by the clock of the store's file system, which may run on another machine."""
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
    """Remove checkpoints until the rest fits `budget` bytes, and remove unreferenced files.

    Checkpoints of `run` may be removed although the run is recording. All other runs that are recording keep
    their checkpoints, because their next saves refer to files of earlier checkpoints.
    """
    recording_ids = [each.id for each in Runs(project).all() if each.status is Status.RUNNING]
    from rearview.store.tables.answer_queries import Tables

    tables = Tables(project)
    try:
        return gc(
            project,
            referenced=lambda: recorded_objects(tables),
            budget=budget,
            keep=[run_id for run_id in recording_ids if run_id != run],
        )
    finally:
        tables.close()


def recorded_objects(tables: Tables, without: Collection[str] = ()) -> list[str]:
    """Return the oids of objects that records refer to, also inside lists and dictionaries.

    Records of the runs in `without` are ignored.
    """
    from rearview.store.tables.duckdb_connection import quoted

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
