"""Results of methods of `History`: a report on one run, two runs side by side, and removed runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rearview.model import Checkpoint, Run, Verdict
from rearview.model.program_environment_variables import Environment
from rearview.model.proof import WITHHELD, compared, worst
from rearview.model.run import CAPTURED, name_of
from rearview.model.wording import plural
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.maintenance.removal import RunRemoval
from rearview.store.maintenance.thin_and_collect import Freed
from rearview.store.recorded_inputs import environment_differences, read_environment
from rearview.store.runs import Replay, Runs
from rearview.store.tables.answer_queries import Tables
from rearview.store.tables.duckdb_connection import quoted
from rearview.store.versions.versions import Versions


@dataclass(frozen=True, slots=True)
class RunReport:
    """The facts, logged names, checkpoints and replays of one run."""

    run: Run
    names: dict[str, int]
    loops: list[tuple[str, int]]
    checkpoints: list[Checkpoint]
    partial: list[str]
    logical: int
    stored: int
    costs: dict[str, Any]
    replays: list[Replay]
    exact: str
    """A text that says how far the replays of the run can be trusted."""
    verdict: Verdict | None = None
    """The worst verdict of the run's replays, or None if the run was not replayed."""
    environment: Environment | None = None
    """The environment variables that the run read, or None if they were not recorded."""
    environment_differences: list[str] = field(default_factory=list)
    """A phrase for each environment variable that has another value now and that a replay does not restore."""
    captured: dict[str, str] = field(default_factory=dict)
    """Name with values that the run did not log with Rearview -> origin of the values."""


def run_report(
    run: Run, runs: Runs, checkpoints: Checkpoints, tables: Tables, *, names: bool = True
) -> RunReport:
    """Return a report on `run`; if `names` is False, its records are not read, and the report has no names."""
    if names:
        tables.refresh()
    listed = checkpoints.of(run.id)
    withheld = ", ".join(map(quoted, sorted({*WITHHELD, *CAPTURED})))
    counts = (
        tables.sql(
            f"SELECT name, count(*) AS n FROM records WHERE run = {quoted(run.id)} "  # noqa: S608
            f"AND origin NOT IN ({withheld}) GROUP BY name ORDER BY name",
            values=True,
        )
        if names
        else ()
    )
    captured = tables.captured([run.id]) if names else {}
    loops = [(name_of(site), loop.iterations) for site, loop in run.end.loops.items()]
    replays = runs.replays(run.id)
    verdict, text = _trust(replays)
    return RunReport(
        run=run,
        names={row["name"]: row["n"] for row in counts if not row["name"].startswith("$")},
        captured={name: str(origin) for name, origin in captured.items()},
        loops=loops,
        checkpoints=listed,
        partial=sorted({str(part) for checkpoint in listed for part in checkpoint.missing}),
        logical=sum(checkpoint.nbytes for checkpoint in listed),
        stored=sum(checkpoint.stored for checkpoint in listed),
        costs=run.end.costs,
        replays=replays,
        exact=text,
        verdict=verdict,
        environment=read_environment(runs.folder(run.id)),
        environment_differences=environment_differences(runs.folder(run.id), os.environ),
    )


def _trust(replays: Sequence[Replay]) -> tuple[Verdict | None, str]:
    """Return (worst verdict of the replays of a run, text that explains the verdict); the verdict may be None.

    Replays whose iterations a later exact replay has repeated do not count.
    """
    from rearview.backfill.coverage import is_superseded

    counted = [
        replay for replay in replays if not replay.redone and not is_superseded(replay, replays)
    ]
    decisive = worst(replay.proof for replay in counted)
    if decisive is None:
        return None, "not replayed yet"
    reports = [replay.report for replay in counted if replay.report is not None]
    if decisive.verdict is Verdict.EXACT:
        return decisive.verdict, f"exact: {_count(len(counted))}, {compared(reports)}"
    same_verdict = sum(replay.proof.verdict is decisive.verdict for replay in counted)
    share = f" ({same_verdict} of {_count(len(counted))})" if len(counted) > 1 else ""
    return decisive.verdict, f"{decisive.verdict}{share}: {decisive.why}"


def _count(replays: int) -> str:
    return plural(replays, "replay")


@dataclass(frozen=True)
class Removal:
    """The runs, files and bytes that a call of `History.remove` removed, or would remove."""

    runs: tuple[str, ...]
    """The removed runs, including runs whose removal was interrupted earlier."""
    removed: list[RunRemoval]
    freed: Freed
    """Objects and packs that were, or would be, deleted because no other run needs them."""

    @property
    def nbytes(self) -> int:
        """Total number of bytes that the removal freed, or would free."""
        return self.freed.nbytes + sum(removal.nbytes for removal in self.removed)


class Row(NamedTuple):
    """One fact `name` of two runs, with its values `a` and `b`; the value is None for a run without this fact."""

    name: str
    a: Any
    b: Any

    @property
    def differs(self) -> bool:
        """Whether the two runs differ in this fact; two NaNs count as equal."""
        both_nan = self.a != self.a and self.b != self.b
        return not both_nan and bool(self.a != self.b)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs side by side: arguments, last values, environment and source files."""

    a: Run
    b: Run
    arguments: list[Row]
    results: list[Row]
    """The last value that each run logged under each name."""
    environment: list[Row]
    source: list[Row]
    """Files whose content differs between the runs: path, and the git hash of the file in each run."""


def compare(a: Run, b: Run, *, runs: Runs, versions: Versions, tables: Tables) -> Comparison:
    """Return the runs `a` and `b` side by side; a run whose source was not stored has no source files."""
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
