"""Many runs as one execution tree, for the page: what they share, what is stored, what replaying all of them costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rearview.multiversion.recorded import open_runs
from rearview.multiversion.replay import ReplayOptions, StudyPlan, plan_study
from rearview.plan.versions.tree import START, Do
from rearview.web.index import Index

MOST_VERSIONS = 40
"""Runs in one tree."""
MOST_CODE = 1500
"""Characters of a cell that are shown."""


def execution_tree(index: Index, runs: Sequence[str]) -> dict[str, Any]:
    """Return the tree of some runs, or of the newest; see `rearview tree`."""
    if runs:
        # whole runs: the index keeps only what screens of many runs need
        chosen = [index.whole_run(run) for run in runs[:MOST_VERSIONS] if run in index.entries]
    else:
        newest = index.chosen("status <> 'running'", limit=MOST_VERSIONS)
        chosen = [index.whole_run(run.id) for run in newest if not run.script.startswith("-m ")]
    opened = open_runs(index.project, chosen)
    plan = plan_study(opened.study, ReplayOptions(), opened.known, opened.store)
    return {**_drawn(plan), "runs": {run.name or run.id: run.id for run in chosen}}


def _drawn(plan: StudyPlan) -> dict[str, Any]:
    tree = plan.tree.tree
    parked = {step.node for step in plan.order.steps if step.do is Do.CHECKPOINT}
    alone = sum(
        tree.start + sum(tree.cells[node].seconds for node in path)
        for path in plan.tree.paths.values()
    )
    return {
        "nodes": [
            {
                "parent": None if above == START else above,
                "number": about.number,
                "title": about.cell.title,
                "code": about.cell.text[:MOST_CODE],
                "seconds": cell.seconds if about.measured else None,
                "bytes": cell.size if about.measured else None,
                "versions": list(about.versions),
                "stored": cell.kept,
                "kept": node in parked,
            }
            for node, (above, cell, about) in enumerate(
                zip(tree.parent, tree.cells, plan.tree.nodes, strict=True)
            )
        ],
        "ends": [
            [version.name, end]
            for version, end in zip(plan.tree.study.versions, tree.versions, strict=True)
        ],
        "unavailable": dict(plan.tree.unavailable),
        "seconds": plan.order.seconds,
        "alone": alone,
        "planner": plan.order.by,
        "gap": plan.order.gap,
    }
