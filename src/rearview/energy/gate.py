"""The gate a green run goes through: wait to start, pause when power turns, note it all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from rearview.energy.account import Account, Interval
from rearview.energy.decide import Decision, Rule, decide
from rearview.energy.meter import Meter
from rearview.energy.sources import Source


class Gate:
    """Says when to run. `Checkpointer(pause_when=gate.closed)` pauses by it.

    ::

        gate = Gate(open_source("energy-charts:de"), Rule(hours=8, deadline=tomorrow))
        gate.wait()
        checkpointer = Checkpointer(..., pause_when=gate.closed)
    """

    def __init__(
        self,
        source: Source,
        rule: Rule | None = None,
        *,
        account: Account | None = None,
        meter: Callable[[], Meter] = Meter,
        every: float = 60.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.source, self.rule, self.account = source, rule or Rule(), account
        self._every, self._clock, self._sleep = every, clock, sleep
        self._new_meter = meter
        self._meter: Meter | None = None
        self._begun = self._noted = 0.0
        self._kwh = 0.0
        self._asked = float("-inf")
        self._noted_grid = 0.0
        self.decision = Decision(run=True, until=None, reason="not asked yet")
        # what earlier executions of the same job have done need not be done again
        earlier = account.report().intervals if account is not None else ()
        self._done = sum(one.end - one.begin for one in earlier)

    def ask(self, *, running: bool) -> Decision:
        """Return what to do now, asking the source as seldom as it wants to be asked."""
        outlook = self.source.outlook()
        now = self._clock()
        rule = self.rule
        if rule.hours is not None:
            done = self._done + (now - self._begun if running else 0.0)
            rule = replace(rule, hours=max(0.0, rule.hours - done / 3600))
        self.decision = decide(outlook, now, rule, running=running)
        if self.account is not None and outlook.fetched > self._noted_grid:
            self._noted_grid = outlook.fetched
            self.account.grid(outlook)
        return self.decision

    def wait(self, told: Callable[[Decision], None] = lambda _: None) -> None:
        """Return when it is time to run; `told` hears of each new reason to wait."""
        if self.account is not None:
            self.account.asked(self._clock())
        last = ""
        while not self.ask(running=False).run:
            if self.decision.reason != last:
                last = self.decision.reason
                told(self.decision)
            self._sleep(self._every)
        self.started()

    def started(self) -> None:
        """Begin to account for energy."""
        self._meter = self._new_meter()
        self._begun = self._noted = self._asked = self._clock()
        self._kwh = 0.0

    def closed(self) -> bool:
        """Say whether to pause; asks at most every `every` seconds, so it may be called often."""
        now = self._clock()
        if now - self._asked < self._every:
            return False
        self._asked = now
        if self._meter is None:
            self.started()
        self.note()
        return not self.ask(running=True).run

    def note(self) -> None:
        """Write down the energy used since the last note."""
        if self.account is None or self._meter is None:
            return
        reading, now = self._meter.read(), self._clock()
        if now > self._noted:
            used = reading.kwh - self._kwh
            self.account.on(Interval(self._noted, now, used, reading.how))
            self._noted, self._kwh = now, reading.kwh
