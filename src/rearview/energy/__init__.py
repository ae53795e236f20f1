"""Run when power is green: fetch data about the power grid, decide when to run, measure the energy of a run.

An error in this package, such as a server that does not answer, never ends a run.
"""

from rearview.energy.grid import (
    ElectricityMaps,
    EnergyCharts,
    Forecast,
    GridSample,
    Source,
    WattTime,
    open_source,
)
from rearview.energy.meter import (
    Account,
    EnergyLog,
    EnergyReading,
    EnergyReport,
    Meter,
    RunInterval,
    report,
)
from rearview.energy.schedule import Gate, GridDecision, Rule, decide

__all__ = [
    "Account",
    "ElectricityMaps",
    "EnergyCharts",
    "EnergyLog",
    "EnergyReading",
    "EnergyReport",
    "Forecast",
    "Gate",
    "GridDecision",
    "GridSample",
    "Meter",
    "Rule",
    "RunInterval",
    "Source",
    "WattTime",
    "decide",
    "open_source",
    "report",
]
