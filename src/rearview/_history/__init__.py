"""Ask about the past: the one room that knows every other. Returns values, never prints.

Names are loaded when first used: starting a run needs a twentieth of what asking about it does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rearview._history.facade import History, history
    from rearview._history.inspected_script import inspect_script
    from rearview.backfill.corrections import Correction
    from rearview.backfill.propagation import Propagated
    from rearview.backfill.reports import (
        BackfillReport,
        Missing,
        PlanReport,
        Refusal,
        RunReport,
        Unproved,
    )
    from rearview.execute.replay_jobs import ReplayOutcome
    from rearview.execute.start import Preempt, Start, begin, fetch, usual
    from rearview.execute.status import ENDED, Crew, Event, Progress, UnderWay
    from rearview.plan.facts import Machine
    from rearview.source.inspection import Inspection

__all__ = [
    "ENDED",
    "BackfillReport",
    "Correction",
    "Crew",
    "Event",
    "History",
    "Inspection",
    "Machine",
    "Missing",
    "PlanReport",
    "Preempt",
    "Progress",
    "Propagated",
    "Refusal",
    "ReplayOutcome",
    "RunReport",
    "Start",
    "UnderWay",
    "Unproved",
    "begin",
    "fetch",
    "history",
    "inspect_script",
    "usual",
]

_HOMES = {
    "rearview.execute.status": ("ENDED", "Crew", "Event", "Progress", "UnderWay"),
    "rearview.execute.replay_jobs": ("ReplayOutcome",),
    "rearview.execute.start": ("Preempt", "Start", "begin", "fetch", "usual"),
    "rearview._history.facade": ("History", "history"),
    "rearview.backfill.corrections": ("Correction",),
    "rearview._history.inspected_script": ("inspect_script",),
    "rearview.backfill.propagation": ("Propagated",),
    "rearview.backfill.reports": (
        *("BackfillReport", "Missing", "PlanReport"),
        *("Refusal", "RunReport", "Unproved"),
    ),
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
