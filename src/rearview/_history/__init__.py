"""Ask about the past: the one room that knows every other. Returns values, never prints.

Names are loaded when first used: starting a run needs a twentieth of what asking about it does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rearview._history.facade import History, history
    from rearview._history.inspected_script import inspect_script
    from rearview._history.reports import RunReport
    from rearview._history.start_run import Preemption, fetch_run, similar_run, start_run
    from rearview.backfill.corrections import Correction
    from rearview.backfill.propagation import Propagated
    from rearview.backfill.question import Question
    from rearview.backfill.reports import (
        BackfillReport,
        Missing,
        PlanReport,
        Refusal,
        Unproved,
    )
    from rearview.execute.replay_jobs import ReplayOutcome
    from rearview.execute.start_command import StartCommand
    from rearview.execute.status import ENDED, BackfillStatus, Event, Progress, SegmentProgress
    from rearview.plan.facts import Machine
    from rearview.source.inspection import Inspection

__all__ = [
    "ENDED",
    "BackfillReport",
    "BackfillStatus",
    "Correction",
    "Event",
    "History",
    "Inspection",
    "Machine",
    "Missing",
    "PlanReport",
    "Preemption",
    "Progress",
    "Propagated",
    "Question",
    "Refusal",
    "ReplayOutcome",
    "RunReport",
    "SegmentProgress",
    "StartCommand",
    "Unproved",
    "fetch_run",
    "history",
    "inspect_script",
    "similar_run",
    "start_run",
]

_HOMES = {
    "rearview.execute.status": (
        *("ENDED", "BackfillStatus", "Event", "Progress", "SegmentProgress"),
    ),
    "rearview.execute.replay_jobs": ("ReplayOutcome",),
    "rearview.execute.start_command": ("StartCommand",),
    "rearview._history.start_run": ("Preemption", "fetch_run", "similar_run", "start_run"),
    "rearview._history.facade": ("History", "history"),
    "rearview.backfill.corrections": ("Correction",),
    "rearview._history.inspected_script": ("inspect_script",),
    "rearview.backfill.propagation": ("Propagated",),
    "rearview.backfill.reports": (
        *("BackfillReport", "Missing", "PlanReport"),
        *("Refusal", "Unproved"),
    ),
    "rearview.backfill.question": ("Question",),
    "rearview._history.reports": ("RunReport",),
    "rearview.plan.facts": ("Machine",),
    "rearview.source.inspection": ("Inspection",),
}


def __getattr__(name: str) -> Any:
    """Load a name from its module on first use."""
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'rearview._history' has no attribute {name!r}")
