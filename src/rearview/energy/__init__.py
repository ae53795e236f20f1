"""When power is green: ask, decide, measure, account. Never a reason for a run to fail."""

from rearview.energy.account import Account, Interval, Report, report
from rearview.energy.decide import Decision, Rule, decide
from rearview.energy.gate import Gate
from rearview.energy.meter import Meter, Reading
from rearview.energy.outlook import Outlook, Sample
from rearview.energy.services import ElectricityMaps, EnergyCharts, WattTime, open_source
from rearview.energy.sources import Source
from rearview.energy.used import Used

__all__ = [
    "Account",
    "Decision",
    "ElectricityMaps",
    "EnergyCharts",
    "Gate",
    "Interval",
    "Meter",
    "Outlook",
    "Reading",
    "Report",
    "Rule",
    "Sample",
    "Source",
    "Used",
    "WattTime",
    "decide",
    "open_source",
    "report",
]
