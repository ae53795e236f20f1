"""The values of runs in the form that other trackers take: a name, a step, a time, a value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rearview._history import History
from rearview.model import Run
from rearview.store.media import StoredValue, value_in_text


@dataclass(frozen=True)
class ExportedValue:
    """One value of a run."""

    name: str
    step: int
    value: Any
    """A number or text; a `StoredValue` for media."""
    time: float


@dataclass(frozen=True)
class ExportedRun:
    """A run and its values, each name in order."""

    run: Run
    values: tuple[ExportedValue, ...]


@dataclass(frozen=True)
class Exported:
    """What an export wrote for one run."""

    run: str
    place: str
    values: int
    """Values that were written now; 0 if all of them were there already."""
    left_out: int = 0
    """Values of kinds that the tracker cannot store."""


def exported_runs(
    history: History,
    names: Sequence[str] = (),
    *,
    where: str | None = None,
    runs: Sequence[str] | None = None,
    unproved: bool = False,
) -> Iterator[ExportedRun]:
    """Yield runs with their values: those that the run logged itself, else those of a proved replay.

    The step of a value is the iteration of its loop. In nested loops the points are counted continuously:
    `epoch=1/step=0` comes right after the last step of epoch 0. Other trackers cannot mark doubtful values:
    unproved ones are left out unless `unproved` is True.
    """
    run_ids = {history.run(which).id for which in runs} if runs else None
    for run in history.runs(where):
        if run_ids is None or run.id in run_ids:
            yield ExportedRun(run, tuple(_values(history, run.id, names, unproved=unproved)))


def _values(
    history: History, run: str, names: Sequence[str], *, unproved: bool
) -> Iterator[ExportedValue]:
    origins = ["recorded", "replayed", *(["unproved", "not exact"] if unproved else [])]
    listed = ", ".join("'" + name.replace("'", "''") + "'" for name in names)
    some = f"AND name IN ({listed})" if names else ""
    rank = " ".join(f"WHEN '{origin}' THEN {k}" for k, origin in enumerate(origins))
    query = f"""
        SELECT name, path, indices, kind, number, whole, text, time FROM records
        WHERE run = '{run}' AND NOT starts_with(name, '$') {some}
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
            flat = "/" not in row["path"] and row["path"]
            step = int(row["indices"][0]) if flat else number
            value = _value(row)
            if value is not None:
                yield ExportedValue(row["name"], step, value, row["time"])


def _value(row: dict[str, Any]) -> Any:
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
