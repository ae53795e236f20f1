"""The history of a project: the class `History` answers questions about runs and backfills them. Nothing here prints.

The package `rearview`, the command line and the web page import `History`, and the classes that it takes and
returns, from here. Names are loaded on first use, because the command that starts a run needs few of these names.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rearview._history.facade import History, history, repair_format
    from rearview._history.run_reports import Comparison, Removal, Row, RunReport
    from rearview._history.script_inspection import inspect_script, script_of_module
    from rearview._history.start_and_resume_commands import (
        Preemption,
        fetch_run,
        similar_run,
        start_run,
    )
    from rearview.backfill.examine_run import Question
    from rearview.backfill.manual_placement import Correction
    from rearview.backfill.propagation import Propagated
    from rearview.backfill.reports import (
        BackfillReport,
        MissingCells,
        PlanReport,
        Refusal,
        Unproved,
    )
    from rearview.execute.backfill_status import (
        ENDED,
        BackfillStatus,
        Event,
        Progress,
        SegmentProgress,
    )
    from rearview.execute.program_command import LaunchCommand
    from rearview.execute.replay_jobs import ReplayOutcome
    from rearview.plan.facts import Machine
    from rearview.source.inspection.inspection import Answer, Inspection, LoopReport
    from rearview.store.machine_and_process import cores
    from rearview.store.maintenance.verify import Problem
    from rearview.store.project import FOLDER, Project
    from rearview.store.runs import ACCOUNT, Replay
    from rearview.store.tables.result_table import Table

__all__ = [
    "ACCOUNT",
    "ENDED",
    "FOLDER",
    "Answer",
    "BackfillReport",
    "BackfillStatus",
    "Comparison",
    "Correction",
    "Event",
    "History",
    "Inspection",
    "LaunchCommand",
    "LoopReport",
    "Machine",
    "MissingCells",
    "PlanReport",
    "Preemption",
    "Problem",
    "Progress",
    "Project",
    "Propagated",
    "Question",
    "Refusal",
    "Removal",
    "Replay",
    "ReplayOutcome",
    "Row",
    "RunReport",
    "SegmentProgress",
    "Table",
    "Unproved",
    "cores",
    "fetch_run",
    "history",
    "inspect_script",
    "repair_format",
    "script_of_module",
    "similar_run",
    "start_run",
]

_HOMES = {
    "rearview._history.facade": ("History", "history", "repair_format"),
    "rearview._history.script_inspection": ("inspect_script", "script_of_module"),
    "rearview._history.run_reports": ("Comparison", "Removal", "Row", "RunReport"),
    "rearview._history.start_and_resume_commands": (
        "Preemption",
        "fetch_run",
        "similar_run",
        "start_run",
    ),
    "rearview.backfill.manual_placement": ("Correction",),
    "rearview.backfill.propagation": ("Propagated",),
    "rearview.backfill.examine_run": ("Question",),
    "rearview.backfill.reports": (
        "BackfillReport",
        "MissingCells",
        "PlanReport",
        "Refusal",
        "Unproved",
    ),
    "rearview.execute.replay_jobs": ("ReplayOutcome",),
    "rearview.execute.program_command": ("LaunchCommand",),
    "rearview.execute.backfill_status": (
        "ENDED",
        "BackfillStatus",
        "Event",
        "Progress",
        "SegmentProgress",
    ),
    "rearview.plan.facts": ("Machine",),
    "rearview.source.inspection.inspection": ("Answer", "Inspection", "LoopReport"),
    "rearview.store.machine_and_process": ("cores",),
    "rearview.store.project": ("FOLDER", "Project"),
    "rearview.store.runs": ("ACCOUNT", "Replay"),
    "rearview.store.tables.result_table": ("Table",),
    "rearview.store.maintenance.verify": ("Problem",),
}


def __getattr__(name: str) -> Any:
    """Import the module that defines `name`, on first use, and return the object with this name."""
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'rearview._history' has no attribute {name!r}")
