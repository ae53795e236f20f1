"""Import runs of other trackers as runs of this project: records at their steps, parameters as arguments.

Importing again adds only what is new.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rearview._history import History
from rearview.errors import UsageError
from rearview.model import Point, Step
from rearview.store import labels
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project
from rearview.store.records import RecordFile, encode_point
from rearview.store.runs import Runs

LOOP = "step"
"""The loop whose iterations are the steps of imported values."""


@dataclass(frozen=True)
class TrackedValue:
    """One value of another tracker."""

    name: str
    value: Any
    step: int | None
    """None: logged once for the whole run."""
    time: float


@dataclass(frozen=True)
class TrackedRun:
    """A run of another tracker."""

    tracker: str
    key: str
    """The identity of the run there, wherever its files are."""
    started: float
    values: Iterable[TrackedValue]
    ended: float | None = None
    exit_code: int | None = 0
    """None: it has not ended."""
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    """Where it was read from."""


@dataclass(frozen=True)
class Imported:
    """The result of importing one run."""

    run: str
    key: str
    source: str
    records: int
    """Records that were added now."""
    is_new: bool


def project_at(folder: Path) -> Project:
    """Return the project that contains a folder; create one there if there is none."""
    return Project.find(folder) or Project.create(folder)


def import_runs(project: Project, tracked_runs: Iterable[TrackedRun]) -> list[Imported]:
    """Store runs of another tracker; add what is new to runs that were imported before."""
    runs = Runs(project)
    imported_before = {
        (run.facts.imported.get("from"), run.facts.imported.get("key")): run.id
        for run in runs.all()
        if run.facts.imported
    }
    history = History(project)
    out = []
    for tracked in tracked_runs:
        run = imported_before.get((tracked.tracker, tracked.key))
        is_new = run is None
        if run is None:
            run = _start(runs, tracked)
            imported_before[tracked.tracker, tracked.key] = run
        added = _add_values(project, runs, history, run, tracked, is_new=is_new)
        if tracked.exit_code is not None and runs.get(run).ended is None:
            ended = tracked.ended or tracked.started
            runs.end(run, tracked.exit_code, moment=ended)
        out.append(Imported(run, tracked.key, tracked.source, added, is_new))
    return out


def _start(runs: Runs, tracked: TrackedRun) -> str:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(tracked.started))
    text = hashlib.sha256(f"{tracked.tracker}\0{tracked.key}".encode()).hexdigest()
    ids = (f"{stamp}-{text[k : k + 4]}" for k in range(60))
    run = next(each for each in ids if not (runs.folder(each) / "run.json").exists())
    runs.start(
        run,
        {
            "version": "",
            "script": f"{tracked.tracker}:{tracked.name or tracked.key}",
            "argv": [],
            "started": tracked.started,
            "imported": {
                "from": tracked.tracker,
                "key": tracked.key,
                "name": tracked.name,
                "source": tracked.source,
            },
        },
    )
    runs.note(run, labels.TAG, {"tags": [tracked.tracker]})
    _give_name(runs, run, tracked.name)
    return run


def _give_name(runs: Runs, run: str, name: str) -> None:
    """Give a run the name that it had, unless another run has that name."""
    try:
        name = labels.check_name(name)
    except UsageError:
        return
    if not runs.named(name):
        runs.note(run, labels.NAME, {"name": name})


def _add_values(
    project: Project, runs: Runs, history: History, run: str, tracked: TrackedRun, *, is_new: bool
) -> int:
    arguments = dict(tracked.arguments)
    stored_arguments = {} if is_new else dict(runs.get(run).args)
    changed = {
        name: value for name, value in arguments.items() if stored_arguments.get(name) != value
    }
    if changed:
        runs.update_args(run, changed)
    stored = set() if is_new else _stored_places(history, run)
    rows: dict[int | None, dict[str, TrackedValue]] = {}
    for value in tracked.values:
        if (value.name, value.step) not in stored and value.name.strip() and value.name[0] != "$":
            rows.setdefault(value.step, {})[value.name] = value  # the last one of a step counts
    if not rows:
        return 0
    attempt, since = (0, 0) if is_new else _next_attempt(history, run)
    put_object = Checkpoints(project).objects.put
    out = RecordFile(runs.folder(run), run, put=put_object, attempt=attempt, since=since)
    try:
        for step in sorted(rows, key=lambda each: (each is None, each or 0)):
            values = rows[step]
            moment = max(value.time for value in values.values())
            out.append(
                encode_point(_point(step)),
                [(name, value.value) for name, value in values.items()],
                moment=moment,
            )
    finally:
        out.close()
    return sum(map(len, rows.values()))


def _point(step: int | None) -> Point:
    if step is None:
        return Point()
    return Point((Step(LOOP, max(0, step), step if step < 0 else None),))


def _stored_places(history: History, run: str) -> set[tuple[str, int | None]]:
    """Return the names and steps of which a run has values."""
    rows = history.sql(
        f"SELECT name, path, indices FROM records WHERE run = '{run}'"  # noqa: S608 - our own id
    ).rows()
    return {(row["name"], row["indices"][0] if row["path"] else None) for row in rows}


def _next_attempt(history: History, run: str) -> tuple[int, int]:
    """Return the attempt number with which new records come after those that a run has."""
    row = history.sql(
        "SELECT max(attempt) AS attempt, max(seq) AS seq FROM records "  # noqa: S608 - our own id
        f"WHERE run = '{run}'"
    ).rows()[0]
    return (0, 0) if row["seq"] is None else (int(row["attempt"]) + 1, int(row["seq"]) + 1)


def missing_library(library: str, extra: str, doing: str) -> UsageError:
    """Return the error that names the missing library and how to install it."""
    return UsageError(
        f"{doing} needs {library}, which is not installed. Install it with "
        f"`pip install 'rearview[{extra}]'`.",
        slug="missing-library",
    )


def nothing_found(what: str, path: Path | str, looked_for: str) -> UsageError:
    """Return the error for a path with nothing to import."""
    return UsageError(
        f"{path} holds nothing of {what}: no {looked_for} was found. Name the folder that {what} "
        "wrote to.",
        slug="import-nothing",
    )
