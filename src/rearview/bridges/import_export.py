"""Import runs of other trackers into a project, and yield runs of a project for export to other trackers.

The values of an imported run become records, and its parameters become arguments. A second import of a run adds only
new values. The modules `mlflow_runs`, `tensorboard_files` and `wandb_files` read and write the trackers' formats.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from rearview._history import History
from rearview.errors import UsageError
from rearview.model import Point, Run, Step
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project
from rearview.store.records import RecordFile, encode_point
from rearview.store.runs import NAME, TAG, Runs, check_name
from rearview.store.stored_arrays_and_media import StoredValue, value_in_text

LOOP = "step"
"""Name of the loop in the points of imported values, such as `step=20`."""


@dataclass(frozen=True)
class TrackedValue:
    """A value that a run logged to another tracker."""

    name: str
    value: Any
    step: int | None
    """Step at which the value was logged; None if it belongs to the whole run."""
    time: float


@dataclass(frozen=True)
class TrackedRun:
    """A run in another tracker, with its values."""

    tracker: str
    key: str
    """Id of the run in the tracker, which does not depend on where the files of the run are."""
    started: float
    values: Iterable[TrackedValue]
    ended: float | None = None
    exit_code: int | None = 0
    """Exit code of the run; None if the run has not ended, or its end is not known."""
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    """Folder, file or address from which the run was read."""


@dataclass(frozen=True)
class Imported:
    """The result of importing one run."""

    run: str
    key: str
    source: str
    records: int
    """Number of values that this import added."""
    is_new: bool


def project_at(folder: Path) -> Project:
    """Return the project that contains `folder`; create a project in `folder` if there is none."""
    return Project.find(folder) or Project.create(folder)


def import_runs(project: Project, tracked_runs: Iterable[TrackedRun]) -> list[Imported]:
    """Store `tracked_runs` in `project`; return one result per run. For a run imported before, add only new values."""
    runs = Runs(project)
    imported_before = {
        (run.facts.imported.get("from"), run.facts.imported.get("key")): run.id
        for run in runs.all()
        if run.facts.imported
    }
    history = History(project)
    imported = []
    for tracked in tracked_runs:
        run = imported_before.get((tracked.tracker, tracked.key))
        is_new = run is None
        if run is None:
            run = _create_run(runs, tracked)
            imported_before[tracked.tracker, tracked.key] = run
        added = _add_values(project, runs, history, run, tracked, is_new=is_new)
        if tracked.exit_code is not None and runs.get(run).ended is None:
            ended = tracked.ended or tracked.started
            runs.end(run, tracked.exit_code, moment=ended)
        imported.append(Imported(run, tracked.key, tracked.source, added, is_new))
    return imported


def _create_run(runs: Runs, tracked: TrackedRun) -> str:
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
    runs.append_event(run, TAG, {"tags": [tracked.tracker]})
    _set_name(runs, run, tracked.name)
    return run


def _set_name(runs: Runs, run: str, name: str) -> None:
    """Give an imported run its name in the tracker, if the name is valid and no other run of the project has it."""
    try:
        name = check_name(name)
    except UsageError:
        return
    if not runs.ids_by_name(name):
        runs.append_event(run, NAME, {"name": name})


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
    stored_steps = set() if is_new else _stored_steps(history, run)
    rows: dict[int | None, dict[str, TrackedValue]] = {}
    for value in tracked.values:
        if (
            (value.name, value.step) not in stored_steps
            and value.name.strip()
            and value.name[0] != "$"
        ):
            rows.setdefault(value.step, {})[value.name] = value  # keep the last value of each step
    if not rows:
        return 0
    attempt, since = (0, 0) if is_new else _next_attempt(history, run)
    put_object = Checkpoints(project).objects.put
    record_file = RecordFile(runs.folder(run), run, put=put_object, attempt=attempt, since=since)
    try:
        for step in sorted(rows, key=lambda each: (each is None, each or 0)):
            values = rows[step]
            moment = max(value.time for value in values.values())
            record_file.append(
                encode_point(_point(step)),
                [(name, value.value) for name, value in values.items()],
                moment=moment,
            )
    finally:
        record_file.close()
    return sum(map(len, rows.values()))


def _point(step: int | None) -> Point:
    if step is None:
        return Point()
    return Point((Step(LOOP, max(0, step), step if step < 0 else None),))


def _stored_steps(history: History, run: str) -> set[tuple[str, int | None]]:
    """Return (name, step) of all stored values of a run; step is None for a value outside loops."""
    rows = history.sql(
        f"SELECT name, path, indices FROM records WHERE run = '{run}'"  # noqa: S608 - our own id
    ).rows()
    return {(row["name"], row["indices"][0] if row["path"] else None) for row in rows}


def _next_attempt(history: History, run: str) -> tuple[int, int]:
    """Return (attempt, sequence number) with which new records of a run are ordered after its existing records."""
    row = history.sql(
        "SELECT max(attempt) AS attempt, max(seq) AS seq FROM records "  # noqa: S608 - our own id
        f"WHERE run = '{run}'"
    ).rows()[0]
    return (0, 0) if row["seq"] is None else (int(row["attempt"]) + 1, int(row["seq"]) + 1)


def missing_library(library: str, extra: str, doing: str) -> UsageError:
    """Return the error that `doing` needs `library`, which `pip install 'rearview[<extra>]'` installs."""
    return UsageError(
        f"{doing} needs {library}, which is not installed. Install it with "
        f"`pip install 'rearview[{extra}]'`.",
        slug="missing-library",
    )


def nothing_found(tracker: str, path: Path | str, looked_for: str) -> UsageError:
    """Return the error that `path` contains nothing to import from `tracker`; `looked_for` is what was searched."""
    return UsageError(
        f"{path} has no data of {tracker}: no {looked_for} was found. Name the folder that {tracker} "
        "wrote to.",
        slug="import-nothing",
    )


@dataclass(frozen=True)
class ExportedValue:
    """A value of a run, as it is exported to another tracker."""

    name: str
    step: int
    value: Any
    """A number, a text, plain data, or a `StoredValue` (an image, a table, …)."""
    time: float


@dataclass(frozen=True)
class ExportedRun:
    """A run to export, with its values ordered by name and step."""

    run: Run
    values: tuple[ExportedValue, ...]


@dataclass(frozen=True)
class Exported:
    """The result of exporting one run."""

    run: str
    place: str
    """Path of the folder to which the run was written, or id of the run in the tracker."""
    values: int
    """Number of values that this export wrote; 0 if an earlier export has written all of them."""
    left_out: int = 0
    """Number of values that were not exported, because the tracker cannot store them."""


def exported_runs(
    history: History,
    names: Sequence[str] = (),
    *,
    where: str | None = None,
    runs: Sequence[str] | None = None,
    unproved: bool = False,
) -> Iterator[ExportedRun]:
    """Yield runs with their values, for export.

    `where` and `runs` select runs, `names` selects values; all if they are empty. A value at a point is the value that
    the run logged, or else the value of a replay. The step of a value is the iteration of its loop. In nested loops the
    points are numbered without a gap: `epoch=1/step=0` comes right after the last step of epoch 0. Other trackers cannot
    mark doubtful values, so values of replays that were not proved exact are left out unless `unproved` is True.
    """
    run_ids = {history.run(name).id for name in runs} if runs else None
    for run in history.runs(where):
        if run_ids is None or run.id in run_ids:
            yield ExportedRun(
                run, tuple(_exported_values(history, run.id, names, unproved=unproved))
            )


def _exported_values(
    history: History, run: str, names: Sequence[str], *, unproved: bool
) -> Iterator[ExportedValue]:
    origins = ["recorded", "replayed", *(["unproved", "not exact"] if unproved else [])]
    quoted_names = ", ".join("'" + name.replace("'", "''") + "'" for name in names)
    name_condition = f"AND name IN ({quoted_names})" if names else ""
    rank = " ".join(f"WHEN '{origin}' THEN {k}" for k, origin in enumerate(origins))
    query = f"""
        SELECT name, path, indices, kind, number, whole, text, time FROM records
        WHERE run = '{run}' AND NOT starts_with(name, '$') {name_condition}
          AND origin IN ({", ".join(f"'{origin}'" for origin in origins)})
        QUALIFY row_number() OVER (
          PARTITION BY name, path, indices
          ORDER BY CASE origin {rank} END, attempt DESC, process DESC, seq DESC
        ) = 1
        ORDER BY name, path, indices
    """  # noqa: S608 - names are quoted
    table = history.sql(query)
    for _, rows in groupby(table.described(), key=lambda row: (row["name"], row["path"])):
        for number, row in enumerate(rows):
            single_loop = "/" not in row["path"] and row["path"]
            step = int(row["indices"][0]) if single_loop else number
            value = _value_in_row(row)
            if value is not None:
                yield ExportedValue(row["name"], step, value, row["time"])


def _value_in_row(row: dict[str, Any]) -> Any:
    kind = row["kind"]
    if kind in {"int", "long"}:
        return int(row["whole"])
    if kind in {"float", "bool"}:
        return float(row["number"])
    text = row["text"]
    if isinstance(text, StoredValue) or kind == "null":
        return None if kind == "null" else text
    if kind == "object":
        return value_in_text(text)
    return text if kind in {"str", "json"} else None
