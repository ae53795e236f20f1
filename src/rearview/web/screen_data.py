"""The data of the page's screens: one run, the versions of the source, the execution tree, running work."""

from __future__ import annotations

import difflib
import itertools
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from rearview._history import History
from rearview.errors import RearviewError, UsageError
from rearview.model import Run, Status
from rearview.model.program_environment_variables import is_restored
from rearview.model.run import name_of
from rearview.multiversion.replay_study import ReplayOptions, StudyPlan, plan_study
from rearview.multiversion.study_sources import open_runs
from rearview.plan.versions.tree import START, Do
from rearview.store.tables.duckdb_connection import quoted
from rearview.web.rows import plain
from rearview.web.run_index import Index

MOST_LINES = 4000
"""Maximum number of printed lines in one answer."""
MOST_CHECKPOINTS = 400
MOST_CHANGES = 12
"""Maximum number of objects of a checkpoint that are listed as changed."""
COMPARED = 20
"""Maximum number of earlier runs from which the number of iterations of a running run is estimated."""
MOST_FORKS = 200
"""Maximum number of runs that are listed as started from a run."""
CONTEXT = 4
"""Number of unchanged lines shown before and after a change in a diff."""


def run_details(history: History, index: Index, which: str) -> dict[str, Any]:
    """Return the data of the screen that shows one run, as values for JSON."""
    report = history.show(which, names=False)  # without names, because the index has them
    run = report.run
    names = index.ask(
        "SELECT name, path, n, last, low, high, mean, kind, text, unproved, asked FROM page.stats "
        f"WHERE run = {quoted(run.id)} ORDER BY name"
    ).fetchall()
    columns = (
        *("name", "path", "n", "last", "low", "high", "mean", "kind", "text", "unproved", "asked"),
    )
    forks = [
        fork.id for fork in index.matching_runs(f"parent = {quoted(run.id)}", limit=MOST_FORKS)
    ]
    environment = report.environment.values if report.environment is not None else {}
    return {
        "run": run.id,
        "name": run.name,
        "tags": list(run.tags),
        "note": run.note,
        "status": run.status.value,
        "exit_code": run.exit_code,
        "command": " ".join((run.script, *run.argv)),
        "script": run.script,
        "started": run.started,
        "ended": run.ended,
        "host": run.host,
        "pid": run.pid,
        "cwd": run.cwd,
        "version": run.version,
        "parent": run.parent,
        "forks": forks,
        "args": {name: _shown(value) for name, value in run.args.items()},
        "python": run.facts.python,
        "machine": run.facts.machine,
        "hardware": _shown(run.facts.hardware),
        "environment": [
            [name, value, is_restored(name)] for name, value in sorted(environment.items())
        ][:200],
        "environment_differences": report.environment_differences,
        "packages": _packages(run),
        "inputs": [
            [path, *(plain(fact) for fact in list(about)[:3])]
            for path, about in sorted(run.end.inputs.items())
        ][:500],
        "files": _files(history, run),
        "loops": report.loops,
        "names": [dict(zip(columns, map(plain, row), strict=True)) for row in names],
        "costs": _shown(report.costs),
        "logical": report.logical,
        "stored": report.stored,
        "partial": report.partial,
        "checkpoints": _checkpoints(report.checkpoints),
        "checkpoint_count": len(report.checkpoints),
        "exact": report.exact,
        "verdict": report.verdict.value if report.verdict is not None else None,
        "replays": [
            {
                "id": replay.id,
                "started": replay.started,
                "ended": replay.ended,
                "names": list(replay.names),
                "verdict": replay.proof.verdict.value,
                "why": replay.proof.why,
            }
            for replay in report.replays[-100:]
        ],
        "commands": _commands(run),
        "damaged": run.damaged,
    }


def _commands(run: Run) -> list[list[str]]:
    """Return [purpose, command line] of useful commands for a run, the most useful first."""
    commands = []
    if run.status in {Status.PAUSED, Status.DEAD, Status.FAILED}:
        commands.append(["resume it", f"rearview resume {run.id}"])
    commands += [
        ["prove it exact", f"rearview replay {run.id}"],
        ["its values", f"rearview table --runs {run.id}"],
        ["its source", f"rearview diff {run.id}"],
        ["run it again", f"rearview run {shlex.join((run.script, *run.argv))}"],
    ]
    return commands


def _shown(value: Any) -> Any:
    """Return `value` as a value for JSON; values of types that JSON does not have become text."""
    if isinstance(value, dict):
        return {str(key): _shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_shown(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return plain(value) if isinstance(value, float) else str(value)


def _packages(run: Run) -> list[list[str]]:
    return [[name, version] for name, version in sorted(run.end.surroundings.items())]


def _files(history: History, run: Run) -> list[dict[str, Any]]:
    try:
        return [
            _shown({k: getattr(file, k) for k in file.__slots__}) for file in history.files(run.id)
        ][:500]
    except (RearviewError, OSError):
        return []


def _checkpoints(checkpoints: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the checkpoints of a run with their sizes and with the parts that changed since the checkpoint before."""
    out = []
    oids_before: dict[str, str] = {}
    for checkpoint in checkpoints[-MOST_CHECKPOINTS:]:
        oids = {key: ref.oid for key, ref in checkpoint.parts.items()}
        changed_parts = [key for key, oid in oids.items() if oids_before.get(key) != oid]
        out.append(
            {
                "id": checkpoint.id,
                "point": str(checkpoint.point) or "start",
                "edge": checkpoint.edge,
                "bytes": checkpoint.nbytes,
                "stored": checkpoint.stored,
                "complete": checkpoint.complete,
                "missing": list(checkpoint.missing),
                "time": checkpoint.time,
                "parts": len(oids),
                "changed": len(changed_parts),
                "which": sorted(changed_parts, key=lambda key: -checkpoint.parts[key].nbytes)[
                    :MOST_CHANGES
                ],
            }
        )
        oids_before = oids
    return out


def printed_lines(history: History, run: str, search: str) -> dict[str, Any]:
    """Return the lines that a run printed, with their points.

    If `search` is not empty, only lines with this text in the line or in its point are returned.
    """
    lines = history.printed(run)
    lowered_search = search.lower()
    matching_lines = [
        [k, line.where, line.stream, line.text[:2000]]
        for k, line in enumerate(lines)
        if not lowered_search
        or lowered_search in line.text.lower()
        or lowered_search in line.where.lower()
    ]
    return {"total": len(lines), "found": len(matching_lines), "lines": matching_lines[:MOST_LINES]}


def versions(
    history: History, index: Index, fillable_names: Sequence[tuple[str, Sequence[str]]]
) -> dict[str, Any]:
    """Return the versions of the source in the order of their first run, each with its newest runs.

    `fillable_names` has (name, loops) of the names that the work tree logs.
    """
    answer = index.ask(
        "SELECT version, min(started) AS began, max(started), count(*), arg_max(script, started), "
        "list({run: run, name: name, status: status} ORDER BY started DESC, run DESC)[1:40] "
        "FROM page.runs WHERE version <> '' GROUP BY version ORDER BY began"
    )
    out = [
        {
            "version": version,
            "started": began,
            "last": last,
            "count": count,
            "runs": list(reversed(runs)),
            "script": script,
        }
        for version, began, last, count, script, runs in answer.fetchall()
    ]
    by_hand = [
        {"version": correction.version, "names": list(correction.statement.logs)}
        for correction in history.corrections()
    ]
    return {"versions": out, "logged": [name for name, _ in fillable_names], "by_hand": by_hand}


def compare_sources(history: History, a: str, b: str) -> dict[str, Any]:
    """Return the source of `a` and `b` side by side: for each file that differs, rows of old and new lines.

    `a` and `b` are ids of runs, or `worktree`.
    """
    old, new = _texts(history, a), _texts(history, b)
    out = []
    for path in sorted({*old, *new}):
        if old.get(path) != new.get(path):
            rows, added, removed = side_by_side(old.get(path, ""), new.get(path, ""))
            out.append({"path": path, "rows": rows, "added": added, "removed": removed})
    return {"a": a, "b": b, "files": out[:200]}


def _texts(history: History, which: str) -> dict[str, str]:
    return {
        path: data.decode("utf-8", "replace")
        for path, data in history.source(which).items()
        if b"\x00" not in data[:4096]
    }


def side_by_side(old: str, new: str) -> tuple[list[list[Any]], int, int]:
    r"""Return (rows, number of added lines, number of removed lines) for two texts.

    A row is [kind, old line number, old line, new line number, new line].

    >>> side_by_side("a\nb\n", "a\nc\n")[0]
    [['same', 1, 'a', 1, 'a'], ['change', 2, 'b', 2, 'c']]
    """
    a, b = old.splitlines(), new.splitlines()
    rows: list[list[Any]] = []
    added = removed = 0
    groups = difflib.SequenceMatcher(None, a, b, autojunk=False).get_grouped_opcodes(CONTEXT)
    for number, group in enumerate(groups):
        if number or group[0][1] > 0:
            rows.append(["gap", None, "", None, ""])
        for _, i1, i2, j1, j2 in group:
            if a[i1:i2] == b[j1:j2]:
                rows += [
                    ["same", i + 1, a[i], j + 1, b[j]]
                    for i, j in zip(range(i1, i2), range(j1, j2), strict=True)
                ]
                continue
            added, removed = added + j2 - j1, removed + i2 - i1
            for k in range(max(i2 - i1, j2 - j1)):
                i, j = i1 + k, j1 + k
                left, right = i < i2, j < j2
                kind = "change" if left and right else "remove" if left else "add"
                rows.append(
                    [
                        kind,
                        i + 1 if left else None,
                        a[i] if left else "",
                        j + 1 if right else None,
                        b[j] if right else "",
                    ]
                )
    return rows, added, removed


def propagated_statements(history: History, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each version where the statements that log `names` are inserted, and why there or why not."""
    by_hand = {propagated.version for propagated in history.corrections(list(names))}
    return [
        {
            "version": propagated.version,
            "runs": list(propagated.runs),
            "diff": propagated.diff,
            "confidence": propagated.confidence,
            "reasons": list(propagated.reasons),
            "refused": propagated.reason,
            "by_hand": propagated.version in by_hand,
        }
        for propagated in history.propagate(list(names))
    ]


def running_work(history: History, index: Index) -> dict[str, Any]:
    """Return the running runs with their progress, and the running backfills of this project."""
    running = index.matching_runs("status = 'running'")
    out = [
        {
            "run": run.id,
            "name": run.name,
            "command": " ".join((run.script, *run.argv)),
            "started": run.started,
            "host": run.host,
            "pid": run.pid,
            **_pace(index, run),
        }
        for run in running
    ]
    backfills = [
        {
            name: getattr(backfill, name)
            for name in backfill.__struct_fields__
            if name not in {"format", "process"}
        }
        for backfill in history.running_backfills()
    ]
    return {"runs": out, "backfills": backfills}


def _pace(index: Index, run: Run) -> dict[str, Any]:
    """Return the progress of a running run: iteration, seconds per iteration, expected number of iterations.

    The result is empty if the run has logged nothing inside a loop.
    """
    rows = index.ask(
        "SELECT path, indices[1] AS i, min(time) AS t FROM own.live WHERE "
        f"run = {quoted(run.id)} AND len(indices) > 0 AND replay IS NULL GROUP BY ALL ORDER BY i"
    ).fetchall()
    if not rows:
        return {}
    loop = max({row[0].split("/")[0] for row in rows}, key=lambda loop: _times(rows, loop)[-1][1])
    times = _times(rows, loop)
    recent = times[-20:]
    steps = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in itertools.pairwise(recent)
        if later[0] > earlier[0]
    ]
    seconds_per_iteration = statistics.median(steps) if steps else None
    earlier_lengths = [
        totals.iterations
        for earlier_run in index.matching_runs(
            f"status = 'finished' AND script = {quoted(run.script)}", limit=COMPARED
        )
        for site, totals in earlier_run.end.loops.items()
        if name_of(site) == loop and totals.iterations
    ]
    lengths = [
        value for name, value in run.args.items() if name in {"epochs", "max_epochs", "steps"}
    ]
    total = next((int(v) for v in lengths if isinstance(v, int) and v > times[-1][0]), None)
    guessed = total is None
    if total is None and earlier_lengths:
        total = int(statistics.median(earlier_lengths))
    iterations_done = times[-1][0] + 1
    seconds_left = (
        None
        if seconds_per_iteration is None or total is None
        else max(0, total - iterations_done) * seconds_per_iteration
    )
    return {
        "loop": loop,
        "iteration": times[-1][0],
        "each": seconds_per_iteration,
        "total": total,
        "guessed": guessed,
        "left": seconds_left,
        "paces": steps,
    }


def _times(rows: Sequence[tuple[str, int, float]], loop: str) -> list[tuple[int, float]]:
    """Return (iteration, time of its first logged value) for each iteration of the outermost loop `loop`, sorted.

    `rows` has (loops, iteration of the outermost loop, time).
    """
    first: dict[int, float] = {}
    for path, i, t in rows:
        if path.split("/")[0] == loop:
            first[i] = min(t, first.get(i, t))
    return sorted(first.items())


def check_run(index: Index, run: str) -> str:
    """Return `run` if it is the id of a run in `index`, else raise."""
    if run not in index.entries:
        raise UsageError(f"There is no run {run!r}.", slug="no-run")
    return run


MOST_VERSIONS = 40
"""Maximum number of runs in one execution tree."""
MOST_CODE = 1500
"""Maximum number of characters of a cell's code that are shown."""


def execution_tree(index: Index, runs: Sequence[str]) -> dict[str, Any]:
    """Return the execution tree of `runs`, or of the newest runs if none are given; see `rearview tree`."""
    if runs:
        # `whole_run`, because the runs in the index have only the facts that screens with many runs need
        whole_runs = [index.whole_run(run) for run in runs[:MOST_VERSIONS] if run in index.entries]
    else:
        newest = index.matching_runs("status <> 'running'", limit=MOST_VERSIONS)
        whole_runs = [index.whole_run(run.id) for run in newest if not run.script.startswith("-m ")]
    opened = open_runs(index.project, whole_runs)
    plan = plan_study(opened.study, ReplayOptions(), opened.measurements, opened.store)
    return {**_drawn(plan), "runs": {run.name or run.id: run.id for run in whole_runs}}


def _drawn(plan: StudyPlan) -> dict[str, Any]:
    tree = plan.tree.tree
    checkpointed_nodes = {step.node for step in plan.order.steps if step.do is Do.CHECKPOINT}
    seconds_alone = sum(
        tree.start + sum(tree.cells[node].seconds for node in path)
        for path in plan.tree.paths.values()
    )
    return {
        "nodes": [
            {
                "parent": None if parent == START else parent,
                "number": tree_node.number,
                "title": tree_node.cell.title,
                "code": tree_node.cell.text[:MOST_CODE],
                "seconds": cell.seconds if tree_node.measured else None,
                "bytes": cell.size if tree_node.measured else None,
                "versions": list(tree_node.versions),
                "stored": cell.has_checkpoint,
                "kept": node in checkpointed_nodes,
            }
            for node, (parent, cell, tree_node) in enumerate(
                zip(tree.parent, tree.cells, plan.tree.nodes, strict=True)
            )
        ],
        "ends": [
            [version.name, end]
            for version, end in zip(plan.tree.study.versions, tree.versions, strict=True)
        ],
        "unavailable": dict(plan.tree.unavailable),
        "seconds": plan.order.seconds,
        "alone": seconds_alone,
        "planner": plan.order.by,
        "gap": plan.order.gap,
    }
