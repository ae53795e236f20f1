"""When to checkpoint: the joint invariant of the Flor paper, with everything it needs measured.

Equation 4 there: a block that takes C seconds and was run n times and saved k times may be saved
again if

    M / C  <  n / (k + 1) * min(1 / (1 + c), epsilon)

where M is what a save costs and R = c M what a restore costs. The first bound keeps a replay from
being slower than the run, the second keeps the run within its budget. Here M is the *whole*
slowdown: the time that training waits and the time that it loses to the threads that write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rearview.runtime.sites import Event, Iteration, Saved, Site

RUNNING = ""
"""Site under which computing time is counted that no finished iteration accounts for yet."""
NAIVE = 1.38
"""Restore over save time, before one was seen: the mean over the paper's workloads."""
COPY = 4e9
"""Bytes per second assumed for the copy, before one was seen."""
FIXED = 5e-4
"""Seconds assumed for what a save costs whatever its size, before one was seen."""
ASIDE = 5e8
"""Bytes per second lost that are assumed for writing where no core is free, before any was seen."""
RESERVE = 0.25
"""Share of the budget that is kept back where no core is free: what is lost there is known least."""
UNKNOWN = 2e-3
"""Seconds assumed for a save of which not even the size is known."""
OUTER_SHARE = 1e-4
"""A checkpoint must save at least this share of the run so far: 10^4 of them, then ever fewer."""
BRIEF = 0.25
"""Seconds that nobody minds to see computed again."""
BRIEF_SHARE = 0.01
"""What may be paid to save so little: far less than epsilon."""
INNER_SHARE = 5e-3
INNER_LEAST = 10.0
"""Inner boundaries are for long iterations: below so many seconds the outer ones are enough."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is true at one boundary."""

    since: float
    """Computing seconds since the last place that a replay could start from."""
    depth: int = 0
    """0 at a boundary of the outermost loop."""
    nbytes: int = 0
    """Bytes of state, as far as known."""
    ends: bool = False
    """An inner loop has ended here; the boundary of the outermost loop is still to come."""
    crowded: float = 0.0
    """Share of a core that training leaves too few for writing beside it."""
    busy: bool = False
    """The previous checkpoint is still being written and there is no room for another."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to save here, and why, in words for the user."""

    save: bool
    reason: str
    cost: float = 0.0
    """Seconds that the save is expected to cost."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Saves as often as makes replay faster, within `epsilon` of the computing time.

    >>> policy = Policy(epsilon=0.1)
    >>> policy = policy.observe("epoch", Iteration(seconds=10.0))
    >>> policy.decide("epoch", Facts(since=10.0, nbytes=10**9)).save
    True
    >>> policy.decide("epoch", Facts(since=10.0, nbytes=10**10)).reason
    'it would cost 2.5 s; 10 % of the 10 s computed so far leave 1 s'
    """

    epsilon: float
    every: bool = False
    sites: Mapping[str, Site] = field(default_factory=dict)
    paid: float = 0.0
    """Seconds of slowdown in this run, at all sites."""
    computed: float = 0.0
    """Computing seconds in this run, in all outermost loops."""

    @classmethod
    def learnt(cls, epsilon: float, every: bool, facts: Mapping[str, Any]) -> Policy:
        """Return a policy that starts with what `facts`, kept by an earlier run, tells."""
        sites = {
            name: Site.from_facts(site)
            for name, site in facts.get("sites", {}).items()
            if isinstance(site, Mapping)
        }
        return cls(epsilon, every, sites)

    def facts(self) -> dict[str, Any]:
        """Return what a later run of the same script can start with, as plain values."""
        return {"sites": {name: site.facts() for name, site in self.sites.items()}}

    def observe(self, name: str, event: Event) -> Policy:
        """Return this policy with one more thing seen at site `name`."""
        paid, computed = self.paid, self.computed
        site = self.sites.get(name, Site())
        if isinstance(event, Iteration) and event.depth == 0:
            computed += event.seconds
        elif isinstance(event, Saved):
            # the end of an inner loop has no iterations of its own that tell what is lost beside it
            turning = (other for key, other in self.sites.items() if key != RUNNING)
            telling = max((site, *turning), key=lambda each: each.seen)
            event = Saved(event.blocking + telling.contention(event))
            paid += event.blocking
        site = site.observe(event)
        return replace(self, sites={**self.sites, name: site}, paid=paid, computed=computed)

    def decide(self, name: str, facts: Facts) -> Decision:
        """Say whether to save at site `name` now."""
        if self.every and facts.depth == 0 and not facts.ends:
            return Decision(True, "every boundary of the outermost loop was asked for")
        if self.epsilon <= 0:
            return Decision(False, "checkpoints are off: epsilon is 0")
        if facts.busy:
            return Decision(False, "the previous checkpoint is still being written")
        if facts.since <= 0:
            return Decision(False, "a replay can start here without it")
        cost = self.cost(name, facts.nbytes, facts.crowded)
        restore = self.restore(name, facts.nbytes)
        refusal = (
            self._over_budget(name, facts, cost, restore)
            or self._no_gain(facts, cost, restore)
            or (self._inner(facts, cost) if facts.depth else None)
            or (self._kept(facts, cost) if facts.ends and not facts.depth else None)
        )
        if refusal:
            return Decision(False, refusal, cost)
        return Decision(
            True, f"costs {_s(cost)} and saves a replay {_s(facts.since)} of computing", cost
        )

    def cost(self, name: str, nbytes: int = 0, crowded: float = 0.0) -> float:
        """Return M: the slowdown that one more save at this site is expected to cause."""
        site = self.sites.get(name)
        if site is not None and site.save is not None:
            return site.save
        # another site of the same run saves about the same state
        known = [other.save for other in self.sites.values() if other.save is not None]
        if known:
            return max(known)
        return FIXED + nbytes / COPY + crowded * nbytes / ASIDE if nbytes else UNKNOWN

    def restore(self, name: str, nbytes: int = 0) -> float:
        """Return R: what a restore is expected to cost; c M until one was seen."""
        site = self.sites.get(name)
        if site is not None and site.restores is not None:
            return site.restores
        return NAIVE * self.cost(name, nbytes)

    def share(self, name: str) -> float:
        """Return the share of computing time that saving at this site may take."""
        cost = self.cost(name)
        scale = self.restore(name) / cost if cost else NAIVE
        return min(1 / (1 + scale), self.epsilon)

    def _over_budget(self, name: str, facts: Facts, cost: float, restore: float) -> str | None:
        allowed = self.epsilon * (1 - RESERVE * facts.crowded)
        share = min(cost / (cost + restore) if cost else 1.0, allowed)
        # equation 4 over all sites at once: loops within loops share one budget
        computed = max(self.computed, facts.since)
        left = share * computed - self.paid
        if cost > left:
            return (
                f"it would cost {_s(cost)}; {share * 100:.3g} % of the {_s(computed)} computed so far "
                f"leave {_s(max(left, 0))}"
            )
        site = self.sites.get(name)
        if site is not None and 0 < share * site.computed < cost * (site.k + 1):
            return (
                f"{site.k + 1} saves of {_s(cost)} exceed {share * 100:.3g} % of the "
                f"{_s(site.computed)} that this loop has computed"
            )
        return None

    def _no_gain(self, facts: Facts, cost: float, restore: float) -> str | None:
        if facts.since < cost + restore:
            return (
                f"computing {_s(facts.since)} again is no slower than saving and restoring "
                f"({_s(cost + restore)})"
            )
        # the end of an inner loop is another matter: thousands of short ones can be skipped
        brief = facts.since < BRIEF and not facts.ends
        if brief and cost > BRIEF_SHARE * facts.since:
            return f"it would save {_s(facts.since)}, too little for the {_s(cost)} that it costs"
        least = self.computed * (INNER_SHARE if facts.depth else OUTER_SHARE)
        if facts.since < least:
            return f"it would save {_s(facts.since)}, too little of the {_s(self.computed)} run"
        return None

    def _inner(self, facts: Facts, cost: float) -> str | None:
        """Keep inner boundaries for iterations so long that outer ones leave wide gaps."""
        period = max(INNER_LEAST, cost / self.epsilon)
        if facts.since < period:
            return (
                f"an inner boundary is worth saving every {_s(period)}, not after {_s(facts.since)}"
            )
        return self._kept(facts, cost)

    def _kept(self, facts: Facts, cost: float) -> str | None:
        """Leave the boundary of the outermost loop enough: that is where runs are continued."""
        if cost * 2 > self.epsilon * max(self.computed, facts.since) - self.paid:
            return f"what the budget leaves ({_s(cost)}) is kept for the outer loop"
        return None

    def wasted(self, seconds: float) -> Policy:
        """Return this policy with `seconds` paid for a save that did not come about."""
        return replace(self, paid=self.paid + seconds)


def _s(seconds: float) -> str:
    """Return seconds for people.

    >>> _s(0.0123), _s(2.5), _s(7200.0)
    ('12.3 ms', '2.5 s', '2 h')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 7200 else f"{seconds / 3600:.3g} h"
