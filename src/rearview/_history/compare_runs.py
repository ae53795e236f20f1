"""Compare two runs: arguments, results, surroundings and source, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rearview.model import Run
from rearview.store.recorded_inputs import read_environment
from rearview.store.runs import Runs
from rearview.store.tables.tables import Tables
from rearview.store.versions.versions import Versions


class Row(NamedTuple):
    """One fact in which two runs may differ; None where a run does not have it."""

    name: str
    a: Any
    b: Any

    @property
    def differs(self) -> bool:
        """Whether the two runs differ in it; two NaNs count as equal."""
        both_nan = self.a != self.a and self.b != self.b
        return not both_nan and bool(self.a != self.b)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side."""

    a: Run
    b: Run
    arguments: list[Row]
    results: list[Row]
    """The last value of every name that was logged."""
    environment: list[Row]
    source: list[Row]
    """Files whose content differs between the runs, each as the two git hashes."""


def compare(a: Run, b: Run, *, runs: Runs, versions: Versions, tables: Tables) -> Comparison:
    """Return two runs side by side; a run whose source was not stored has no source files."""
    last = tables.last_values([a.id, b.id])
    hashes = [versions.hashes(run.source) if run.source else {} for run in (a, b)]
    return Comparison(
        a,
        b,
        arguments=_rows(a.args, b.args),
        results=[Row(name, values.get(a.id), values.get(b.id)) for name, values in last.items()],
        environment=_rows(*(_surroundings(run, runs) for run in (a, b))),
        source=[row for row in _rows(*hashes) if row.differs],
    )


def _rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    return [Row(name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])]


def _surroundings(run: Run, runs: Runs) -> dict[str, Any]:
    hardware = run.facts.hardware
    facts: dict[str, Any] = {
        "command": " ".join((run.script, *run.argv)),
        "host": run.host,
        "machine": run.facts.machine,
        "cpu": hardware.get("cpu"),
        "cores": hardware.get("cores"),
        "gpus": ", ".join(map(str, hardware.get("gpus") or ())) or None,
    }
    facts |= run.end.surroundings
    environment = read_environment(runs.folder(run.id))
    variables = environment.values if environment is not None else {}
    return facts | {f"${name}": value for name, value in sorted(variables.items())}
