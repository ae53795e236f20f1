"""Ask about the past: the one room that knows every other. Returns values, never prints."""

from rearview.execute.pool import Event, Progress
from rearview.execute.replays import Outcome
from rearview.execute.start import Start
from rearview.past.ask import History, history
from rearview.past.probing import Propagated
from rearview.past.reports import BackfillReport, PlanReport, Refusal, RunReport
from rearview.past.start import Preempt, begin, usual

__all__ = [
    "BackfillReport",
    "Event",
    "History",
    "Outcome",
    "PlanReport",
    "Preempt",
    "Progress",
    "Propagated",
    "Refusal",
    "RunReport",
    "Start",
    "begin",
    "history",
    "usual",
]
