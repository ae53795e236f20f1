"""Ask about the past: the one room that knows every other. Returns values, never prints.

Names are loaded when first used: starting a run needs a twentieth of what asking about it does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rearview.execute.crew import Crew
    from rearview.execute.events import ENDED, Event, Progress, UnderWay
    from rearview.execute.replays import Outcome
    from rearview.execute.start import Start
    from rearview.past.ask import History, history
    from rearview.past.corrections import Correction
    from rearview.past.inspecting import inspect_script
    from rearview.past.probing import Propagated
    from rearview.past.reports import (
        BackfillReport,
        Missing,
        PlanReport,
        Refusal,
        RunReport,
        Unproved,
    )
    from rearview.past.start import Preempt, begin, fetch, usual
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
    "Outcome",
    "PlanReport",
    "Preempt",
    "Progress",
    "Propagated",
    "Refusal",
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
    "rearview.execute.crew": ("Crew",),
    "rearview.execute.events": ("ENDED", "Event", "Progress", "UnderWay"),
    "rearview.execute.replays": ("Outcome",),
    "rearview.execute.start": ("Start",),
    "rearview.past.ask": ("History", "history"),
    "rearview.past.corrections": ("Correction",),
    "rearview.past.inspecting": ("inspect_script",),
    "rearview.past.probing": ("Propagated",),
    "rearview.past.reports": (
        *("BackfillReport", "Missing", "PlanReport"),
        *("Refusal", "RunReport", "Unproved"),
    ),
    "rearview.past.start": ("Preempt", "begin", "fetch", "usual"),
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
    raise AttributeError(f"module 'rearview.past' has no attribute {name!r}")
