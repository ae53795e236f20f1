"""Decide when a run should start, pause or wait for green power.

`decide` is a pure function of a forecast, the time and a rule. A `Gate` fetches forecasts, waits until the run may
start, decides when the run should pause, and records the energy that the run used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rearview.energy.grid import GAS, WIND, Forecast, GridSample, Source
from rearview.energy.meter import Account, EnergyLog, Meter

HALF_RENEWABLE = (WIND + GAS) / 2
"""Grams of CO2 per kWh if half of the power is renewable. By default, this much or less counts as green."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The user's rule for green power: which power counts as green, until when to finish, and when to pause."""

    share: float | None = None
    """Lowest renewable share in percent that counts as green; if None, the traffic light of the source decides."""
    grams: float | None = None
    """Highest grams of CO2 per kWh that count as green; if given, `share` and the traffic light are ignored."""
    hours: float | None = None
    """Hours of computing that the run still needs, or None if not known."""
    deadline: float | None = None
    """Time (seconds since 1970) at which the run must be finished, or be started if `hours` is not known."""
    margin: float = 0.1
    """Time to reserve before the deadline, as a fraction of `hours`."""
    switch: float = 900.0
    """Seconds that a stop and a new start of the run cost; pauses shorter than this are avoided."""
    pieces: bool = True
    """Whether the run may pause and continue, because it saves checkpoints; if not, it needs one unbroken window."""

    @property
    def latest(self) -> float | None:
        """Time at which the run must start even if power is not green, or None if there is no deadline."""
        if self.deadline is None:
            return None
        return self.deadline - (self.hours or 0.0) * 3600 * (1 + self.margin)


@dataclass(frozen=True, slots=True)
class GridDecision:
    """Whether to run now, until when this decision holds, and the reason."""

    run: bool
    until: float | None
    """Time at which to decide again (seconds since 1970), or None if the next change is not known."""
    reason: str


def decide(outlook: Forecast, now: float, rule: Rule, *, running: bool) -> GridDecision:
    """Return whether to compute now, and why; `running` says whether the run computes already.

    If the rule has `deadline` and `hours`, the run uses the greenest hours before the deadline. If not,
    `is_green` decides. The decision is always to run if the deadline is at risk or no sample is valid now: a
    run does not wait because of a guess.

    >>> from rearview.energy.grid import GridSample
    >>> forecast = Forecast.of("x", "", [GridSample(h * 3600, share=s) for h, s in
    ...                                 enumerate([20, 30, 90, 95, 40, 30])], fetched=0)
    >>> decide(forecast, 0, Rule(hours=2, deadline=6 * 3600), running=False)
    GridDecision(run=False, until=7200, reason='2.0 h are needed; the greenest begin then')
    """
    latest = rule.latest
    if latest is not None and now >= latest:
        # this decision does not change any more: no time to decide again
        return GridDecision(run=True, until=None, reason="the deadline leaves no time to wait")
    decision = _by_grid(outlook, now, rule, running=running)
    if not decision.run and latest is not None and decision.until is not None:
        return replace(decision, until=min(decision.until, latest))
    return decision


def _by_grid(outlook: Forecast, now: float, rule: Rule, *, running: bool) -> GridDecision:
    sample = outlook.at(now)
    if sample is None:
        problem = outlook.problem or "the state of the grid is not known for this time"
        return GridDecision(run=True, until=None, reason=f"not held back: {problem}")
    if sample.light == -1:
        return _wait_for_green(outlook, now, rule, "the grid is congested")
    if rule.deadline is not None and rule.hours is not None:
        return _by_forecast(outlook, now, rule, running=running)
    return _by_threshold(outlook, now, rule, sample, running=running)


def is_green(sample: GridSample, rule: Rule, *, running: bool) -> bool:
    """Return True if `sample` is green enough by `rule`; if the run is `running`, a yellow traffic light is enough."""
    if rule.grams is not None:
        return (sample.intensity or 0.0) <= rule.grams
    if rule.share is not None and sample.share is not None:
        return sample.share >= rule.share
    if sample.light is not None:
        return sample.light >= (1 if running else 2)
    return (sample.intensity or 0.0) <= HALF_RENEWABLE


def _by_threshold(
    outlook: Forecast, now: float, rule: Rule, sample: GridSample, *, running: bool
) -> GridDecision:
    description = _describe(sample)
    if is_green(sample, rule, running=running):
        changes = _next_change(outlook, now, rule, target=False, running=True)
        return GridDecision(run=True, until=changes, reason=f"green enough: {description}")
    changes = _next_change(outlook, now, rule, target=True, running=False)
    if running and changes is not None and changes - now < rule.switch:
        return GridDecision(
            run=True, until=changes, reason=f"{description}, but the pause would not be worth it"
        )
    return GridDecision(
        run=False, until=changes or outlook.end, reason=f"not green enough: {description}"
    )


def _by_forecast(outlook: Forecast, now: float, rule: Rule, *, running: bool) -> GridDecision:
    slots = _slots(outlook, now, rule)
    known_seconds = sum(end - begin for begin, end, _ in slots)
    needed_seconds = (rule.hours or 0.0) * 3600
    if known_seconds < needed_seconds:
        sample = outlook.at(now)
        assert sample is not None
        return _by_threshold(outlook, now, rule, sample, running=running)
    windows = (
        _greenest(slots, needed_seconds) if rule.pieces else _best_window(slots, needed_seconds)
    )
    begin, end = next((b, e) for b, e in windows if e > now)
    text = f"{needed_seconds / 3600:.1f} h are needed; the greenest begin then"
    if begin <= now:
        return GridDecision(
            run=True, until=end, reason="these are the greenest hours before the deadline"
        )
    if running and begin - now < rule.switch:
        return GridDecision(run=True, until=begin, reason="the pause would not be worth it")
    return GridDecision(run=False, until=begin, reason=text)


def _slots(outlook: Forecast, now: float, rule: Rule) -> list[tuple[float, float, float]]:
    """Return (begin, end, intensity) of each sample between `now` and the deadline, without congested times."""
    assert rule.deadline is not None
    slots = []
    for index, sample in enumerate(outlook.samples):
        begin, end = max(now, sample.start), min(rule.deadline, outlook.end_of(index))
        if end > begin and sample.light != -1:
            slots.append((begin, end, sample.intensity or 0.0))
    return slots


def _greenest(
    slots: list[tuple[float, float, float]], needed_seconds: float
) -> list[tuple[float, float]]:
    remaining, windows = needed_seconds, []
    for begin, end, _ in sorted(slots, key=lambda slot: (slot[2], slot[0])):
        windows.append((begin, end))
        remaining -= end - begin
        if remaining <= 0:
            break
    return _join(windows)


def _best_window(
    slots: list[tuple[float, float, float]], needed_seconds: float
) -> list[tuple[float, float]]:
    """Return a list with the one unbroken window (begin, end) of `needed_seconds` that has the least CO2."""
    last = max(end for _, end, _ in slots)
    first = slots[0][0]
    edges = [*(begin for begin, _, _ in slots), *(end - needed_seconds for _, end, _ in slots)]
    starts = [start for start in edges if first <= start <= last - needed_seconds] or [first]

    def cost(start: float) -> float:
        overlaps = [
            (min(end, start + needed_seconds) - max(begin, start), grams)
            for begin, end, grams in slots
            if begin < start + needed_seconds and end > start
        ]
        gap = needed_seconds - sum(length for length, _ in overlaps)
        return sum(length * grams for length, grams in overlaps) + gap * 1e6

    best = min(starts, key=lambda start: (cost(start), start))
    return [(best, best + needed_seconds)]


def _join(windows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined_windows: list[tuple[float, float]] = []
    for begin, end in sorted(windows):
        if joined_windows and begin <= joined_windows[-1][1]:
            joined_windows[-1] = (joined_windows[-1][0], max(end, joined_windows[-1][1]))
        else:
            joined_windows.append((begin, end))
    return joined_windows


def _wait_for_green(outlook: Forecast, now: float, rule: Rule, reason: str) -> GridDecision:
    changes = _next_change(outlook, now, rule, target=True, running=False)
    return GridDecision(run=False, until=changes or outlook.end, reason=reason)


def _next_change(
    outlook: Forecast, now: float, rule: Rule, *, target: bool, running: bool
) -> float | None:
    for sample in outlook.samples:
        is_green_now = is_green(sample, rule, running=running) and sample.light != -1
        if sample.start > now and is_green_now is target:
            return sample.start
    return None


def _describe(sample: GridSample) -> str:
    if sample.grams is not None:
        return f"{sample.grams:.0f} g CO2 per kWh"
    if sample.share is not None:
        return f"{sample.share:.0f} % renewable"
    return {-1: "grid congested", 0: "red", 1: "yellow", 2: "green"}.get(sample.light or 0, "red")


class Gate:
    """Waits until a run may start, and says when the run should pause: `Checkpointer(pause_when=gate.closed)`.

    ::

        gate = Gate(open_source("energy-charts:de"), Rule(hours=8, deadline=tomorrow))
        gate.wait()
        checkpointer = Checkpointer(..., pause_when=gate.closed)

    Pass `meter=None` if the run computes in another process, which records its energy itself.
    """

    def __init__(
        self,
        source: Source,
        rule: Rule | None = None,
        *,
        account: Account | None = None,
        meter: Callable[[], Meter] | None = Meter,
        every: float = 60.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.source, self.rule, self.account = source, rule or Rule(), account
        self._every, self._clock, self._sleep = every, clock, sleep
        self._new_meter = meter
        self._energy_log: EnergyLog | None = None
        self._began_at: float | None = None
        self._due = float("-inf")
        self._grid_recorded_at = 0.0
        self.decision = GridDecision(run=True, until=None, reason="not asked yet")
        # time that earlier executions of this job have computed is subtracted from the hours that the rule needs
        earlier = account.report().intervals if account is not None else ()
        self._computed_seconds = sum(interval.end - interval.begin for interval in earlier)

    def ask(self, *, running: bool) -> GridDecision:
        """Return whether to run now, by the newest forecast of the source; `running` is as for `decide`."""
        outlook = self.source.outlook()
        now = self._clock()
        rule = self.rule
        if rule.hours is not None:
            computed_seconds = self._computed_seconds + (
                now - self._began_at if running and self._began_at is not None else 0.0
            )
            rule = replace(rule, hours=max(0.0, rule.hours - computed_seconds / 3600))
        self.decision = decide(outlook, now, rule, running=running)
        self._due = now + self.recheck_after
        if self.account is not None and outlook.fetched > self._grid_recorded_at:
            self._grid_recorded_at = outlook.fetched
            self.account.grid(outlook)
        return self.decision

    @property
    def recheck_after(self) -> float:
        """Seconds after which to decide again: until the last decision expires, but at most `every` seconds."""
        until = self.decision.until
        if until is None:
            return self._every
        return min(self._every, max(until - self._clock(), 0.05))

    def wait(self, on_reason: Callable[[GridDecision], None] = lambda _: None) -> None:
        """Wait until the run may start; `on_reason` is called with each new reason to wait."""
        if self.account is not None:
            self.account.note_request(self._clock())
        last = None
        while not self.ask(running=False).run:
            if self.decision != last:
                last = self.decision
                on_reason(last)
            self._sleep(self.recheck_after)
        self.started()

    def started(self) -> None:
        """Record that the run starts now, and start to record its energy."""
        self._began_at = self._clock()
        self._due = self._began_at + self.recheck_after
        if self.account is not None and self._new_meter is not None:
            self._energy_log = EnergyLog(
                self.account, every=self._every, meter=self._new_meter, clock=self._clock
            )

    def closed(self) -> bool:
        """Return True if the run should pause. Until it is time to decide again, return False at almost no cost."""
        if self._clock() < self._due:
            return False
        if self._began_at is None:
            self.started()
        self.note()
        return not self.ask(running=True).run

    def note(self) -> None:
        """Record the energy used since the last call, or since the run started."""
        if self._energy_log is not None:
            self._energy_log.note()
