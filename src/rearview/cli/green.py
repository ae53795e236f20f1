"""Green power: `rearview run --green`, and the commands energy now and energy report.

A green run starts, pauses and resumes depending on the power in the grid. To pause, the program saves and exits with
code 85; `run_green` waits for green power and starts the program again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from rearview.cli.options import (
    TakesRuns,
    json_option,
    not_started,
    open_history,
    project_folder,
    run_argument,
    span,
)
from rearview.cli.terminal import output
from rearview.cli.terminal.output import duration, plain
from rearview.errors import UsageError
from rearview.model.run import EXIT_PAUSED

if TYPE_CHECKING:
    from pathlib import Path

    from rearview._history import LaunchCommand
    from rearview.checkpointer.supervisor import Supervisor
    from rearview.energy import EnergyReport, Forecast, Gate, GridDecision, Rule


@dataclass(frozen=True, slots=True)
class Green:
    """The options of `--green`."""

    source: str
    by: str | None = None
    hours: float | None = None
    share: float | None = None
    grams: float | None = None
    exits_when_paused: bool = False
    """Whether a run that must pause exits with code 85 instead of waiting for green power."""

    def rule(self, requested: float) -> Rule:
        """Return the rule for a run that the user started at the time `requested`."""
        from rearview.energy import Rule

        deadline = None if self.by is None else parse_time(self.by, requested)
        return Rule(share=self.share, grams=self.grams, hours=self.hours, deadline=deadline)


def green_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a green run."""
    options = (
        click.option(
            "--green",
            is_flag=True,
            help="Run while power is green: wait, pause and continue with the grid. Implies "
            "--preemptible.",
        ),
        click.option(
            "--by",
            metavar="TIME",
            help="With --green: the time by which it must end: 18:00, 2026-05-01T08:00, or 12h from "
            "now. It runs in the greenest hours before that.",
        ),
        click.option(
            "--hours",
            type=click.FloatRange(0, min_open=True),
            metavar="H",
            help="With --by: how long it takes in all (default: as long as it took last time).",
        ),
        click.option(
            "--share",
            type=click.FloatRange(0),
            metavar="PERCENT",
            help="With --green: the least renewable share (default: the grid's traffic light).",
        ),
        click.option(
            "--grams",
            type=click.FloatRange(0),
            metavar="G",
            help="With --green: the most grams of CO2 per kWh.",
        ),
        click.option(
            "--exit-when-paused",
            is_flag=True,
            help="With --green: exit with code 85 instead of waiting, for cron and batch systems.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def parse_time(text: str, now: float) -> float:
    """Return the time that `text` means at the time `now`: "18:00", "12h" or an ISO date; in seconds since 1970.

    >>> parse_time("12h", 1000.0)
    44200.0
    >>> parse_time("2026-05-01T08:00+00:00", 0.0)
    1777622400.0
    """
    text = text.strip()
    try:
        clock = datetime.strptime(text, "%H:%M")  # noqa: DTZ007 - the local time of day
    except ValueError:
        pass
    else:
        local_now = datetime.fromtimestamp(now).astimezone()
        then = local_now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
        return (then if then > local_now else then + timedelta(days=1)).timestamp()
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    try:
        return now + span(text)
    except click.BadParameter:
        raise click.BadParameter(
            f"{text!r} is not a time. Write 18:00, 2026-05-01T08:00, or 12h for twelve hours "
            "from now.",
            param_hint="--by",
        ) from None


def clock(time_: float) -> str:
    """Return the time `time_` (seconds since 1970) as text in local time, with the day if it is not today."""
    then, now = datetime.fromtimestamp(time_).astimezone(), datetime.now().astimezone()
    return f"{then:%H:%M}" if then.date() == now.date() else f"{then:%a %d %b %H:%M}"


def run_green(
    start: Callable[[], LaunchCommand], green: Green, signals: tuple[int, ...], *, quiet: bool
) -> int:
    """Run a program while power is green and return its exit code; `start` returns the command of the program.

    The program pauses by saving and exiting, so that a paused run uses no memory and no accelerator. The next
    start of the program continues the same run. `signals` ask this process to pause the program and exit. Only
    this process, not the program, queries the grid service.
    """
    from rearview._history import ACCOUNT
    from rearview.energy import Account, Gate, open_source

    source = open_source(green.source)
    say = _ignore if quiet else output.prefixed_note
    word = "recording"
    from rearview.checkpointer.supervisor import Supervisor

    with Supervisor(signals) as supervisor:
        while True:
            command = start()
            assert command.run_folder is not None
            account = Account(command.run_folder / ACCOUNT)
            requested = account.report().requested
            rule = green.rule(time.time() if requested is None else requested)
            gate = Gate(source, rule, account=account, meter=None, sleep=supervisor.sleep)
            if not _may_start(gate, green, say):
                return EXIT_PAUSED
            supervisor.exit_if_requested()
            say(f"{word}: {gate.decision.reason}")
            word = "continuing"
            code = _run_child(supervisor, command, gate, say)
            if code != EXIT_PAUSED or supervisor.pause_requested or green.exits_when_paused:
                return code


def _ignore(_text: str) -> None:
    """Print nothing; `run_green` uses this function in place of a printing one if `quiet` is True."""


def _may_start(gate: Gate, green: Green, say: Callable[[str], None]) -> bool:
    if not green.exits_when_paused:
        gate.wait(lambda decision: say(f"waiting: {waiting_text(decision)}"))
        return True
    if gate.account is not None:
        gate.account.note_request(time.time())
    decision = gate.ask(running=False)
    if decision.run:
        gate.started()
        return True
    say(f"not now: {waiting_text(decision)}")
    return False


def waiting_text(decision: GridDecision) -> str:
    """Return a text that says why and until when a run waits."""
    until = "" if decision.until is None else f", until {clock(decision.until)}"
    return f"{decision.reason}{until} (Ctrl-C to stop waiting; nothing is lost)"


def _run_child(
    supervisor: Supervisor, command: LaunchCommand, gate: Gate, say: Callable[[str], None]
) -> int:
    """Run the program until it ends, or until it has paused because `gate` closed; return its exit code."""
    from rearview.checkpointer.supervisor import Child

    def pause() -> bool:
        if not gate.closed():
            return False
        say(f"pausing at the next point: {gate.decision.reason}")
        return True

    try:
        return supervisor.run(
            Child(command.command, command.environment, command.folder),
            pause=pause,
            interval=lambda: gate.recheck_after,
        )
    except OSError as exc:
        raise not_started(command, exc) from exc


def last_time(run_folder: Path) -> float | None:
    """Return the hours for which the run in `run_folder` computed, or None if they were not measured."""
    from rearview._history import ACCOUNT
    from rearview.energy import Account

    seconds = Account(run_folder / ACCOUNT).report().seconds
    return seconds / 3600 if seconds else None


def grid_setting() -> str:
    """Return the setting `grid` (from the project's settings or the environment): the grid service to query."""
    from rearview._history import Project
    from rearview.config import Settings

    project = Project.find(project_folder())
    return Settings.read(project.store if project is not None else None).grid


_LIGHTS = {-1: "grid congested", 0: "red", 1: "yellow", 2: "green"}
_MARGIN = 3600.0
"""Seconds before and after a run for which grid data are requested too."""


def grid_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option --grid."""
    return click.option(
        "--grid",
        metavar="SOURCE",
        help="The grid service and its region (default: the setting `grid`): energy-charts:de, "
        "electricity-maps:FR, watttime:CAISO_NORTH; another address after an @.",
    )(command)


@click.group()
def energy() -> None:
    """Show the power in the grid, and the energy that a run used."""


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
        output.json_document(_facts(outlook, decision))
    else:
        _print_outlook(outlook, decision)
    return 0 if decision.run else 1


def _facts(outlook: Forecast, decision: GridDecision) -> dict[str, Any]:
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
        "samples": [plain(sample) for sample in outlook.samples],
    }


def _print_outlook(outlook: Forecast, decision: GridDecision) -> None:
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
    output.block(lines)
    if outlook.samples:
        output.out(outlook.attribution)


@energy.command(cls=TakesRuns)
@run_argument
@grid_option
@click.option("--offline", is_flag=True, help="Use only the grid data that the run stored.")
@json_option
def report(which: str, grid: str | None, offline: bool, as_json: bool) -> None:
    """Show when a run was on, the energy it used, and the CO2 that waiting saved.

    Energy is measured (RAPL, NVML) if the machine allows it, or else estimated, and the report says which. The
    CO2 of the run is compared with the CO2 that it would have caused if it had started when it was requested and
    never paused.
    """
    from rearview._history import ACCOUNT
    from rearview.energy import Account

    history = open_history()
    run = history.run(which)
    account = Account(history.project.runs / run.id / ACCOUNT)
    noted = account.report()
    if not noted.intervals:
        raise UsageError(
            f"Run {run.id} kept no account of its energy: it was recorded by an earlier Rearview, "
            "or killed in its first minute. Run it again to see.",
            slug="no-account",
        )
    measured = None if offline else _measured(grid or grid_setting(), noted)
    energy_report = account.report(measured)
    problem = "" if measured is None or measured.samples else measured.problem
    if as_json:
        output.json_document(_report_as_json(run.id, energy_report, problem))
        return
    _print_report(run.id, energy_report, problem)


def _measured(grid: str, noted: EnergyReport) -> Forecast:
    from rearview.energy import open_source

    begin = min(noted.intervals[0].begin, noted.requested or float("inf"))
    end = max(noted.intervals[-1].end, begin + noted.seconds)
    return open_source(grid).measured(begin - _MARGIN, min(end + _MARGIN, time.time()))


def _report_as_json(run: str, energy_report: EnergyReport, problem: str) -> dict[str, Any]:
    return {
        "run": run,
        "asked": energy_report.requested,
        "on": [plain(interval) for interval in energy_report.joined_intervals],
        "seconds": energy_report.seconds,
        "kwh": energy_report.kwh,
        "how": list(energy_report.how),
        "grams": energy_report.grams,
        "grams_at_once": energy_report.grams_at_once,
        "grams_saved": energy_report.saved,
        "problem": problem,
        "attribution": list(energy_report.attribution),
    }


def _print_report(run: str, energy_report: EnergyReport, problem: str) -> None:
    lines = [("run", run)]
    first = energy_report.joined_intervals[0].begin
    if energy_report.requested is not None and first - energy_report.requested > 1:
        lines.append(("asked for", clock(energy_report.requested)))
    spans = [
        f"{clock(interval.begin)} to {clock(interval.end)}  {_kwh(interval.kwh)}"
        for interval in energy_report.joined_intervals
    ]
    lines += [
        ("on", "\n".join(spans)),
        (
            "energy",
            f"{_kwh(energy_report.kwh)} in {duration(energy_report.seconds)} ({', '.join(energy_report.how)})",
        ),
    ]
    if energy_report.grams is None:
        lines.append(("CO2", "not known" + (f": {problem}" if problem else " for those hours")))
    else:
        lines.append(("CO2", f"{_g(energy_report.grams)}"))
    if energy_report.saved is not None and energy_report.grams_at_once is not None:
        word = "saved" if energy_report.saved >= 0 else "lost"
        lines.append(
            (
                word,
                f"{_g(abs(energy_report.saved))} against {_g(energy_report.grams_at_once)} without waiting",
            )
        )
    output.block(lines)
    for interval in energy_report.attribution:
        output.out(interval)


def _kwh(value: float) -> str:
    return f"{value:.3g} kWh" if value >= 0.01 else f"{value * 1000:.3g} Wh"


def _g(value: float) -> str:
    return f"{value / 1000:.3g} kg" if value >= 1000 else f"{value:.3g} g"
