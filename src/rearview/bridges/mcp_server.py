"""A server of the Model Context Protocol (MCP), through which coding agents ask about the runs of a project.

Its tools only read, unless replays are allowed: then there is also the tool `backfill`. It needs the consent text that
the tool `price` returns, so that an agent never starts hours of computing without having seen the price.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from rearview._history import History, PlanReport
from rearview.bridges.import_export import missing_library
from rearview.errors import RearviewError, UsageError
from rearview.model import Run
from rearview.store.stored_arrays_and_media import StoredValue

MOST_ROWS = 1000
"""Largest number of rows in one answer of a tool."""
INSTRUCTIONS = """\
Rearview keeps every training run of this project: its source, its logged values, its checkpoints.
`runs` lists runs, `show` describes one, `table` and `sql` read logged values. A value that was never
logged can be computed afterwards: add `rearview.log("name", value)` to the newest source where the value
exists, ask `price` what it costs to fill that column for past runs, then call `backfill`.
"""


def serve(history: History, *, allow_replay: bool) -> None:
    """Serve one client on standard input and output until it disconnects; `allow_replay` adds the tool `backfill`."""
    make_server(history, allow_replay=allow_replay).run("stdio")


def make_server(history: History, *, allow_replay: bool) -> Any:
    """Return the MCP server; it has the tool `backfill` only if `allow_replay` is True."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as exc:
        raise missing_library("mcp 2", "mcp", "`rearview mcp`") from exc
    server = MCPServer("rearview", instructions=INSTRUCTIONS)
    tools = Tools(history)
    read_only_tools: list[Callable[..., Any]] = [
        *(tools.runs, tools.show, tools.names, tools.table, tools.sql, tools.diff, tools.price),
    ]
    for tool in read_only_tools:
        server.tool(annotations=ToolAnnotations(read_only_hint=True))(_with_errors_as_answers(tool))
    if allow_replay:
        annotations = ToolAnnotations(read_only_hint=False, destructive_hint=False)
        server.tool(annotations=annotations)(_with_errors_as_answers(tools.backfill))
    return server


def _with_errors_as_answers(tool: Callable[..., Any]) -> Callable[..., Any]:
    """Return `tool`, wrapped to answer with the message and slug of an error of Rearview in place of raising it."""

    @functools.wraps(tool)
    def answer(*args: Any, **kwargs: Any) -> Any:
        try:
            return tool(*args, **kwargs)
        except RearviewError as exc:
            return {"error": str(exc), "slug": exc.slug}

    return answer


class Tools:
    """The tools that agents may call, one per method. Each method returns plain data for JSON."""

    def __init__(self, history: History) -> None:
        self._history = history

    def runs(self, where: str | None = None, limit: int = 50) -> dict[str, Any]:
        """List runs, newest first: id, script, arguments, status, times, name, tags.

        `where` is an SQL condition on facts, arguments and last values: "status = 'finished' and
        acc > 0.9 and lr < 0.1".
        """
        runs = self._history.runs(where)
        return {
            "total": len(runs),
            "runs": [_run_facts(run) for run in reversed(runs[-max(1, limit) :])],
        }

    def show(self, run: str = "latest") -> dict[str, Any]:
        """Describe one run: names and how many values each has, loops, checkpoints, cost, exactness.

        `run` is an id, a name, `latest`, or a number: -1 is the newest run, -2 the one before, and so on.
        """
        report = self._history.show(run)
        return {
            **_run_facts(report.run),
            "names": report.names,
            "loops": dict(report.loops),
            "checkpoints": len(report.checkpoints),
            "checkpoint_bytes": report.stored,
            "exact": report.exact,
            "replays": len(report.replays),
        }

    def names(self) -> dict[str, Any]:
        """List every name that has values, and names that the newest source logs and that have no values yet."""
        names = self._history.names()
        empty = self._history.empty(names)
        return {"names": [name for name in names if name not in empty], "without_values": empty}

    def table(
        self,
        names: list[str],
        runs: list[str] | None = None,
        where: str | None = None,
        limit: int = 100,
    ) -> dict[str, Any]:
        """Return logged values, one row per point: run, loops, then a column for each name.

        If there is a column `unproved`, it lists the columns whose value in the row comes from a replay that could
        not be proved exact.
        """
        table = self._history.table(
            *names, runs=runs, where=where, limit=max(1, min(limit, MOST_ROWS))
        )
        return {
            "columns": table.columns,
            "rows": [list(map(_json_value, row.values())) for row in table.described()],
            "total_rows": self._history.table(*names, runs=runs, where=where).count(),
        }

    def sql(self, query: str, limit: int = 100) -> dict[str, Any]:
        """Return the result of one read-only query in DuckDB's SQL.

        Tables: runs, arguments, records, points, loops, checkpoints, replays, versions, files, and the
        pivoted views; list them with `SHOW TABLES`, and their columns with `DESCRIBE records`.
        """
        table = self._history.sql(query)
        max_rows = max(1, min(limit, MOST_ROWS))
        rows = [
            list(map(_json_value, row.values())) for row in islice(table.described(), max_rows + 1)
        ]
        return {
            "columns": table.columns,
            "rows": rows[:max_rows],
            "complete": len(rows) <= max_rows,
        }

    def diff(self, first: str, second: str = "worktree") -> dict[str, Any]:
        """Show how the source changed from run `first` to run `second`, or to the present files (`worktree`)."""
        return {"diff": self._history.diff(first, second)}

    def price(
        self, names: list[str], runs: list[str] | None = None, where: str | None = None
    ) -> dict[str, Any]:
        """Return the cost of filling columns for past runs; nothing runs.

        The newest source must log the names. The answer contains a `consent`, which `backfill` needs.
        """
        report = self._history.plan(names, runs=runs, where=where)
        return _price_of(report, names, runs, where)

    def backfill(
        self,
        names: list[str],
        consent: str,
        runs: list[str] | None = None,
        where: str | None = None,
    ) -> dict[str, Any]:
        """Fill columns for past runs by running the smallest necessary part of them again; `consent` is from `price`.

        Show the user the price first, and call this tool only if the user agrees.
        """
        report = self._history.plan(names, runs=runs, where=where)
        priced = _price_of(report, names, runs, where)
        if consent != priced["consent"]:
            raise UsageError(
                f"The consent {consent!r} does not belong to this backfill, which takes "
                f"{priced['seconds']} s. Ask `price` with the same names, runs and condition, show "
                "the user what it costs, then pass the consent that it returned.",
                slug="mcp-consent",
            )
        backfill_report = self._history.backfill(names, runs=runs, where=where, plan=report)
        return {
            "values": backfill_report.written,
            "exact": backfill_report.proved,
            "seconds": round(backfill_report.seconds, 3),
            "speedup": backfill_report.speedup,
            "refused": [{"run": each.run, "why": each.reason} for each in backfill_report.refusals],
            "unproved": [each.run for each in backfill_report.outcomes if not each.proved],
        }


def _price_of(
    report: PlanReport, names: Sequence[str], runs: Sequence[str] | None, where: str | None
) -> dict[str, Any]:
    plan = report.plan
    segments = [(each.run, each.loop, each.first, each.last, each.only) for each in plan.segments]
    text = repr((sorted(names), sorted(runs or ()), where, segments))
    return {
        "seconds": round(plan.seconds, 3),
        "segments": len(plan.segments),
        "runs": sorted({segment.run for segment in plan.segments}),
        "nothing_to_do": report.nothing,
        "refused": [{"run": each.run, "why": each.reason} for each in report.refusals],
        "changed_inputs": list(report.changed_inputs),
        "notes": list(report.notes),
        "insertions": [each.diff for each in report.insertions],
        "consent": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def _run_facts(run: Run) -> dict[str, Any]:
    return {
        "run": run.id,
        "name": run.name,
        "tags": list(run.tags),
        "note": run.note,
        "script": " ".join((run.script, *run.argv)),
        "status": str(run.status),
        "started": run.started,
        "seconds": None if run.ended is None else round(run.ended - run.started, 3),
        "arguments": {name: _json_value(value) for name, value in run.args.items()},
    }


def _json_value(value: Any) -> Any:
    """Return `value` in types that JSON has; an image, table or other media value becomes a short description."""
    if isinstance(value, StoredValue):
        return f"<{value.describe()}>"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    return str(value)
