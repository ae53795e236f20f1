"""Ask about the past: the one room that knows every other. Returns values, never prints."""

from rearview.execute.crew import Crew
from rearview.execute.events import ENDED, Event, Progress, UnderWay
from rearview.execute.replays import Outcome
from rearview.execute.start import Start
from rearview.past.ask import History, history
from rearview.past.probing import Propagated
from rearview.past.reports import BackfillReport, PlanReport, Refusal, RunReport
from rearview.past.start import Preempt, begin, usual
from rearview.plan.facts import Machine

__all__ = [
    "ENDED",
    "BackfillReport",
    "Crew",
    "Event",
    "History",
    "Machine",
    "Outcome",
    "PlanReport",
    "Preempt",
    "Progress",
    "Propagated",
    "Refusal",
    "RunReport",
    "Start",
    "UnderWay",
    "begin",
    "history",
    "usual",
]
