"""The gate a green run goes through: wait to start, pause when power turns, note it all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from rearview.energy.account import Account
from rearview.energy.decide import Decision, Rule, decide
from rearview.energy.meter import Meter
from rearview.energy.sources import Source
from rearview.energy.used import Used


class Gate:
    """Says when to run. `Checkpointer(pause_when=gate.closed)` pauses by it.

    ::

        gate = Gate(open_source("energy-charts:de"), Rule(hours=8, deadline=tomorrow))
        gate.wait()
        checkpointer = Checkpointer(..., pause_when=gate.closed)

    With `meter=None` somebody else writes down the energy, in the process that computes.
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
        self._used: Used | None = None
        self._begun: float | None = None
        self._due = float("-inf")
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
            done = self._done + (now - self._begun if running and self._begun is not None else 0.0)
            rule = replace(rule, hours=max(0.0, rule.hours - done / 3600))
        self.decision = decide(outlook, now, rule, running=running)
        self._due = now + self.patience
        if self.account is not None and outlook.fetched > self._noted_grid:
            self._noted_grid = outlook.fetched
            self.account.grid(outlook)
        return self.decision

    @property
    def patience(self) -> float:
        """Seconds for which the decision need not be asked again."""
        until = self.decision.until
        if until is None:
            return self._every
        return min(self._every, max(until - self._clock(), 0.05))

    def wait(self, told: Callable[[Decision], None] = lambda _: None) -> None:
        """Return when it is time to run; `told` hears of each new reason to wait."""
        if self.account is not None:
            self.account.asked(self._clock())
        last = None
        while not self.ask(running=False).run:
            if self.decision != last:
                last = self.decision
                told(last)
            self._sleep(self.patience)
        self.started()

    def started(self) -> None:
        """Begin to account for energy."""
        self._begun = self._clock()
        self._due = self._begun + self.patience
        if self.account is not None and self._new_meter is not None:
            self._used = Used(
                self.account, every=self._every, meter=self._new_meter, clock=self._clock
            )

    def closed(self) -> bool:
        """Say whether to pause; asks when the last decision is due, so it may be called often."""
        if self._clock() < self._due:
            return False
        if self._begun is None:
            self.started()
        self.note()
        return not self.ask(running=True).run

    def note(self) -> None:
        """Write down the energy used since the last note."""
        if self._used is not None:
            self._used.note()
