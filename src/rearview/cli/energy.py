"""Commands about power: energy now, energy report."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from rearview.cli import show
from rearview.cli.formats import duration, plain
from rearview.cli.green import clock, grid_setting
from rearview.cli.options import TakesRuns, asked, json_option, one_run
from rearview.errors import UsageError

if TYPE_CHECKING:
    from rearview.energy import Decision, Outlook, Report

_LIGHTS = {-1: "grid congested", 0: "red", 1: "yellow", 2: "green"}
_MARGIN = 3600.0
"""Seconds of the grid asked for on either side of a run."""


def grid_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --grid."""
    return click.option(
        "--grid",
        metavar="SOURCE",
        help="Who is asked, and for which place (default: the setting `grid`): energy-charts:de, "
        "electricity-maps:FR, watttime:CAISO_NORTH; another address after an @.",
    )(command)


@click.group()
def energy() -> None:
    """Show the power in the grid, and what a run used of it."""


@energy.command()
@grid_option
@click.option("--share", type=float, metavar="PERCENT", help="The least renewable share.")
@click.option("--grams", type=float, metavar="G", help="The most grams of CO2 per kWh.")
@json_option
def now(grid: str | None, share: float | None, grams: float | None, as_json: bool) -> int:
    """Show the power in the grid now, and whether a green run would start.

    Exit code 0: it would start now. 1: it would wait.
    """
    from rearview.energy import Rule, decide, open_source

    outlook = open_source(grid or grid_setting()).outlook()
    decision = decide(outlook, time.time(), Rule(share=share, grams=grams), running=False)
    if as_json:
        show.json_document(_facts(outlook, decision))
    else:
        _tell(outlook, decision)
    return 0 if decision.run else 1


def _facts(outlook: Outlook, decision: Decision) -> dict[str, Any]:
    sample = outlook.at(time.time())
    return {
        "green": decision.run,
        "reason": decision.reason,
        "until": decision.until,
        "known": sample is not None,
        "share": sample.share if sample is not None else None,
        "light": sample.light if sample is not None else None,
        "grams_per_kwh": sample.intensity if sample is not None else None,
        "stated": sample is not None and sample.grams is not None,
        "source": outlook.source,
        "problem": outlook.problem,
        "attribution": outlook.attribution,
        "samples": [plain(one) for one in outlook.samples],
    }


def _tell(outlook: Outlook, decision: Decision) -> None:
    sample = outlook.at(time.time())
    lines = []
    if sample is not None and sample.share is not None:
        lines.append(("renewable", f"{sample.share:.0f} %"))
    if sample is not None and sample.light is not None:
        lines.append(("light", _LIGHTS[sample.light]))
    if sample is not None and sample.intensity is not None:
        how = "" if sample.grams is not None else " (estimated from the share)"
        lines.append(("CO2", f"{sample.intensity:.0f} g per kWh{how}"))
    until = "" if decision.until is None else f", until {clock(decision.until)}"
    lines.append(
        ("green run", f"{'starts' if decision.run else 'waits'}: {decision.reason}{until}")
    )
    if outlook.problem:
        lines.append(("problem", outlook.problem))
    show.block(lines)
    if outlook.samples:
        show.out(outlook.attribution)


@energy.command(cls=TakesRuns)
@one_run
@grid_option
@click.option("--offline", is_flag=True, help="Ask nobody; use what the run noted of the grid.")
@json_option
def report(which: str, grid: str | None, offline: bool, as_json: bool) -> None:
    """Show when a run was on, the energy it used, and the CO2 that waiting saved.

    Energy is measured (RAPL, NVML) where the machine lets us, else a stated estimate. CO2 is that
    of the hours it ran in, against as many hours from when it was asked for.
    """
    from rearview.energy import Account
    from rearview.store.runs import ACCOUNT

    past = asked()
    run = past.run(which)
    account = Account(past.project.runs / run.id / ACCOUNT)
    noted = account.report()
    if not noted.intervals:
        raise UsageError(
            f"Run {run.id} kept no account of its energy: it was recorded by an earlier Rearview, "
            "or killed in its first minute. Run it again to see.",
            slug="no-account",
        )
    measured = None if offline else _measured(grid or grid_setting(), noted)
    found = account.report(measured)
    problem = "" if measured is None or measured.samples else measured.problem
    if as_json:
        show.json_document(_reported(run.id, found, problem))
        return
    _print(run.id, found, problem)


def _measured(grid: str, noted: Report) -> Outlook:
    from rearview.energy import open_source

    begin = min(noted.intervals[0].begin, noted.asked or float("inf"))
    end = max(noted.intervals[-1].end, begin + noted.seconds)
    return open_source(grid).measured(begin - _MARGIN, min(end + _MARGIN, time.time()))


def _reported(run: str, found: Report, problem: str) -> dict[str, Any]:
    return {
        "run": run,
        "asked": found.asked,
        "on": [plain(one) for one in found.stretches],
        "seconds": found.seconds,
        "kwh": found.kwh,
        "how": list(found.how),
        "grams": found.grams,
        "grams_at_once": found.grams_at_once,
        "grams_saved": found.saved,
        "problem": problem,
        "attribution": list(found.attribution),
    }


def _print(run: str, found: Report, problem: str) -> None:
    lines = [("run", run)]
    first = found.stretches[0].begin
    if found.asked is not None and first - found.asked > 1:
        lines.append(("asked for", clock(found.asked)))
    spans = [f"{clock(one.begin)} to {clock(one.end)}  {_kwh(one.kwh)}" for one in found.stretches]
    lines += [
        ("on", "\n".join(spans)),
        ("energy", f"{_kwh(found.kwh)} in {duration(found.seconds)} ({', '.join(found.how)})"),
    ]
    if found.grams is None:
        lines.append(("CO2", "not known" + (f": {problem}" if problem else " for those hours")))
    else:
        lines.append(("CO2", f"{_g(found.grams)}"))
    if found.saved is not None and found.grams_at_once is not None:
        word = "saved" if found.saved >= 0 else "lost"
        lines.append(
            (word, f"{_g(abs(found.saved))} against {_g(found.grams_at_once)} had it run at once")
        )
    show.block(lines)
    for one in found.attribution:
        show.out(one)


def _kwh(value: float) -> str:
    return f"{value:.3g} kWh" if value >= 0.01 else f"{value * 1000:.3g} Wh"


def _g(value: float) -> str:
    return f"{value / 1000:.3g} kg" if value >= 1000 else f"{value:.3g} g"
