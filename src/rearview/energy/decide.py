"""Run, pause or wait: decided from facts alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rearview.energy.outlook import GAS, WIND, Outlook, Sample

HALF = (WIND + GAS) / 2
"""Grams of CO2 per kWh that count as green where nobody said: those of half renewable power."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What counts as green, and how much switching costs."""

    share: float | None = None
    """Least renewable share in percent; None goes by the source's own traffic light."""
    grams: float | None = None
    """Most grams of CO2 per kWh, for sources that state them."""
    hours: float | None = None
    """Hours of computing still needed, if known."""
    deadline: float | None = None
    """When it must be finished (seconds since 1970); begun, if the hours are not known."""
    margin: float = 0.1
    """Share of the needed hours that is kept in reserve before the deadline."""
    switch: float = 900.0
    """Seconds that stopping and starting again costs; shorter pauses are not made."""
    pieces: bool = True
    """Whether the work may be spread over several windows (it is checkpointed)."""

    @property
    def latest(self) -> float | None:
        """When waiting must end, whatever the colour; None if it need not."""
        if self.deadline is None:
            return None
        return self.deadline - (self.hours or 0.0) * 3600 * (1 + self.margin)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, until when that can stand, and why."""

    run: bool
    until: float | None
    """When the decision is due to change; None if that is not known."""
    reason: str


def decide(outlook: Outlook, now: float, rule: Rule, *, running: bool) -> Decision:
    """Say whether to compute now.

    With a deadline and the hours needed, the greenest hours before the deadline are taken; without,
    the light or the rule's threshold decides. A deadline that could otherwise be missed always
    runs, and so does everything when nothing is known of the grid: we never stop work on a guess.

    >>> from rearview.energy.outlook import Sample
    >>> forecast = Outlook.of("x", "", [Sample(h * 3600, share=s) for h, s in
    ...                                 enumerate([20, 30, 90, 95, 40, 30])], fetched=0)
    >>> decide(forecast, 0, Rule(hours=2, deadline=6 * 3600), running=False)
    Decision(run=False, until=7200, reason='2.0 h are needed; the greenest begin then')
    """
    latest = rule.latest
    if latest is not None and now >= latest:
        # it stands whatever comes; only one that finished early could ask again
        return Decision(run=True, until=None, reason="the deadline leaves no time to wait")
    decision = _by_grid(outlook, now, rule, running=running)
    if not decision.run and latest is not None and decision.until is not None:
        return replace(decision, until=min(decision.until, latest))
    return decision


def _by_grid(outlook: Outlook, now: float, rule: Rule, *, running: bool) -> Decision:
    sample = outlook.at(now)
    if sample is None:
        problem = outlook.problem or "nothing is known of the grid at this time"
        return Decision(run=True, until=None, reason=f"not held back: {problem}")
    if sample.light == -1:
        return _hold(outlook, now, rule, "the grid is congested")
    if rule.deadline is not None and rule.hours is not None:
        return _by_forecast(outlook, now, rule, running=running)
    return _by_threshold(outlook, now, rule, sample, running=running)


def green(sample: Sample, rule: Rule, *, running: bool) -> bool:
    """Say whether `sample` is green enough; what runs already may go on at yellow."""
    if rule.grams is not None:
        return (sample.intensity or 0.0) <= rule.grams
    if rule.share is not None and sample.share is not None:
        return sample.share >= rule.share
    if sample.light is not None:
        return sample.light >= (1 if running else 2)
    return (sample.intensity or 0.0) <= HALF


def _by_threshold(
    outlook: Outlook, now: float, rule: Rule, sample: Sample, *, running: bool
) -> Decision:
    what = _describe(sample)
    if green(sample, rule, running=running):
        changes = _next(outlook, now, rule, wanted=False, running=True)
        return Decision(run=True, until=changes, reason=f"green enough: {what}")
    changes = _next(outlook, now, rule, wanted=True, running=False)
    if running and changes is not None and changes - now < rule.switch:
        return Decision(
            run=True, until=changes, reason=f"{what}, but the pause would not be worth it"
        )
    return Decision(run=False, until=changes or outlook.end, reason=f"not green enough: {what}")


def _by_forecast(outlook: Outlook, now: float, rule: Rule, *, running: bool) -> Decision:
    slots = _slots(outlook, now, rule)
    known = sum(end - begin for begin, end, _ in slots)
    needed = (rule.hours or 0.0) * 3600
    if known < needed:
        sample = outlook.at(now)
        assert sample is not None
        return _by_threshold(outlook, now, rule, sample, running=running)
    chosen = _greenest(slots, needed) if rule.pieces else _best_window(slots, needed)
    begin, end = next((b, e) for b, e in chosen if e > now)
    text = f"{needed / 3600:.1f} h are needed; the greenest begin then"
    if begin <= now:
        return Decision(
            run=True, until=end, reason="these are the greenest hours before the deadline"
        )
    if running and begin - now < rule.switch:
        return Decision(run=True, until=begin, reason="the pause would not be worth it")
    return Decision(run=False, until=begin, reason=text)


def _slots(outlook: Outlook, now: float, rule: Rule) -> list[tuple[float, float, float]]:
    """Return (begin, end, intensity) of the time from now to the deadline that is known."""
    assert rule.deadline is not None
    found = []
    for index, sample in enumerate(outlook.samples):
        begin, end = max(now, sample.start), min(rule.deadline, outlook.end_of(index))
        if end > begin and sample.light != -1:
            found.append((begin, end, sample.intensity or 0.0))
    return found


def _greenest(slots: list[tuple[float, float, float]], needed: float) -> list[tuple[float, float]]:
    left, chosen = needed, []
    for begin, end, _ in sorted(slots, key=lambda slot: (slot[2], slot[0])):
        chosen.append((begin, end))
        left -= end - begin
        if left <= 0:
            break
    return _joined(chosen)


def _best_window(
    slots: list[tuple[float, float, float]], needed: float
) -> list[tuple[float, float]]:
    """Return the contiguous stretch of `needed` seconds with the least CO2."""
    last = max(end for _, end, _ in slots)
    first = slots[0][0]
    edges = [*(begin for begin, _, _ in slots), *(end - needed for _, end, _ in slots)]
    starts = [start for start in edges if first <= start <= last - needed] or [first]

    def cost(start: float) -> float:
        covered = [
            (min(end, start + needed) - max(begin, start), grams)
            for begin, end, grams in slots
            if begin < start + needed and end > start
        ]
        gap = needed - sum(length for length, _ in covered)
        return sum(length * grams for length, grams in covered) + gap * 1e6

    best = min(starts, key=lambda start: (cost(start), start))
    return [(best, best + needed)]


def _joined(windows: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(windows):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _hold(outlook: Outlook, now: float, rule: Rule, reason: str) -> Decision:
    changes = _next(outlook, now, rule, wanted=True, running=False)
    return Decision(run=False, until=changes or outlook.end, reason=reason)


def _next(outlook: Outlook, now: float, rule: Rule, *, wanted: bool, running: bool) -> float | None:
    for sample in outlook.samples:
        fine = green(sample, rule, running=running) and sample.light != -1
        if sample.start > now and fine is wanted:
            return sample.start
    return None


def _describe(sample: Sample) -> str:
    if sample.grams is not None:
        return f"{sample.grams:.0f} g CO2 per kWh"
    if sample.share is not None:
        return f"{sample.share:.0f} % renewable"
    return {-1: "grid congested", 0: "red", 1: "yellow", 2: "green"}.get(sample.light or 0, "red")
