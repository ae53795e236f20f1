"""When power is green: ask, decide, measure, account. Never a reason for a run to fail."""

from rearview.energy.grid import (
    ElectricityMaps,
    EnergyCharts,
    Forecast,
    GridSample,
    Source,
    WattTime,
    open_source,
)
from rearview.energy.meter import Account, EnergyReading, EnergyReport, Meter, OnTime, Used, report
from rearview.energy.schedule import Gate, GridDecision, Rule, decide

__all__ = [
    "Account",
    "ElectricityMaps",
    "EnergyCharts",
    "EnergyReading",
    "EnergyReport",
    "Forecast",
    "Gate",
    "GridDecision",
    "GridSample",
    "Meter",
    "OnTime",
    "Rule",
    "Source",
    "Used",
    "WattTime",
    "decide",
    "open_source",
    "report",
]
