"""When to checkpoint: the joint invariant of the Flor paper, with everything it needs measured.

What is known of one loop: how long it computes, what saving at its boundaries costs.

When to checkpoint: the joint invariant of the Flor paper, with everything it needs measured.

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

RECENT = 0.3
"""Weight of the newest observation: states grow and machines get busy, so the past fades."""
PRIOR = 3
"""Iterations of either kind that it takes for what was measured to outweigh what was assumed."""
SHARED = 0.1
"""Share of background processor time assumed to be lost to training where a core was free for it:
memory and caches are shared still."""
CROWDED = 1.5
"""The same where none was free: threads of training wait for the one that had to go."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of the loop has ended."""

    seconds: float
    """Computing time, without the time that it waited for us."""
    depth: int = 0
    overlap: float = 0.0
    """Seconds of it during which a checkpoint was being written."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of this loop is durable."""

    blocking: float
    """Seconds that training waited, the walk over the state included, and what else it lost."""
    background: float = 0.0
    """Seconds that threads beside the training took."""
    cpu: float = 0.0
    """Processor seconds of those."""
    crowded: float = 1.0
    """Share of a core that training leaves too few for them: 0 when one was free."""
    slowed: float = 0.0
    """Share of such time that training loses, as its steps tell."""
    sure: float = 0.0
    """How much of the time they tell of: 1 is all."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint of this loop was loaded and restored."""

    seconds: float


Event = Iteration | Saved | Restored


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Statistics of one loop; n, k, C, M and R of the invariant."""

    n: int = 0
    """Iterations in this run."""
    k: int = 0
    """Checkpoints in this run."""
    computed: float = 0.0
    """Computing seconds in this run: n times the mean C."""
    save: float | None = None
    """M: recent mean of the slowdown that a save causes."""
    restores: float | None = None
    """R: recent mean of a restore."""
    alone: float = 0.0
    """Mean seconds of iterations with nothing in the background."""
    alone_count: int = 0
    beside: float = 0.0
    """Mean seconds of iterations beside a save."""
    beside_count: int = 0
    overlap: float = 0.0
    """Mean seconds of such iterations during which the save was under way."""

    def observe(self, event: Event) -> LoopStats:
        """Return these statistics with one event more."""
        if isinstance(event, Iteration):
            return self._iterated(event)
        if isinstance(event, Saved):
            cost = event.blocking
            mean = _mix(self.save, cost)
            if self.k == 1:
                # the first of a run also stored what never changes, and tells little of the others
                mean = min(mean, cost)
            return replace(self, k=self.k + 1, save=mean)
        return replace(self, restores=_mix(self.restores, event.seconds))

    @property
    def seen(self) -> int:
        """Iterations of either kind that can be compared."""
        return min(self.alone_count, self.beside_count)

    def contention(self, event: Saved) -> float:
        """Return the seconds that training loses to the background part of a save.

        An honest estimate: steps beside a save are compared with steps alone; where a loop has
        none, its iterations are, per second of overlap. Until enough of both were seen, the
        processor time is assumed, and a small part of it where training left a core free.
        """
        found = event.cpu * (SHARED + (CROWDED - SHARED) * event.crowded)
        if self.seen and self.overlap > 0:
            rate = min(1.0, max(0.0, (self.beside - self.alone) / self.overlap))
            sure = self.seen / (self.seen + PRIOR)
            found = (1 - sure) * found + sure * rate * event.background
        return (1 - event.sure) * found + event.sure * event.slowed * event.background

    def facts(self) -> dict[str, Any]:
        """Return what holds for the next run as well, as plain values."""
        return {
            "save": self.save,
            "restores": self.restores,
            "alone": self.alone,
            "alone_count": min(self.alone_count, PRIOR),
            "beside": self.beside,
            "beside_count": min(self.beside_count, PRIOR),
            "overlap": self.overlap,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> LoopStats:
        """Return the site that `facts` tell of; what is not a number there is left out."""
        known = cls().facts()
        found: dict[str, Any] = {
            name: value
            for name, value in facts.items()
            if name in known and isinstance(value, int | float) and value >= 0
        }
        return cls(**found)

    def _iterated(self, event: Iteration) -> LoopStats:
        grown = replace(self, n=self.n + 1, computed=self.computed + event.seconds)
        if not self.n:
            return grown  # the first iteration warms caches and tells little about the others
        if event.overlap > 0:
            count = self.beside_count + 1
            weight = max(RECENT, 1 / count)
            return replace(
                grown,
                beside=self.beside + weight * (event.seconds - self.beside),
                overlap=self.overlap + weight * (event.overlap - self.overlap),
                beside_count=count,
            )
        count = self.alone_count + 1
        weight = max(RECENT, 1 / count)
        return replace(
            grown, alone=self.alone + weight * (event.seconds - self.alone), alone_count=count
        )


def _mix(mean: float | None, value: float) -> float:
    return value if mean is None else (1 - RECENT) * mean + RECENT * value


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
class BoundaryFacts:
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
class SaveDecision:
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
    >>> policy.decide("epoch", BoundaryFacts(since=10.0, nbytes=10**9)).save
    True
    >>> policy.decide("epoch", BoundaryFacts(since=10.0, nbytes=10**10)).reason
    'it would cost 2.5 s; 10 % of the 10 s computed so far leave 1 s'
    """

    epsilon: float
    every: bool = False
    sites: Mapping[str, LoopStats] = field(default_factory=dict)
    paid: float = 0.0
    """Seconds of slowdown in this run, at all sites."""
    computed: float = 0.0
    """Computing seconds in this run, in all outermost loops."""

    @classmethod
    def learnt(cls, epsilon: float, every: bool, facts: Mapping[str, Any]) -> Policy:
        """Return a policy that starts with what `facts`, kept by an earlier run, tells."""
        sites = {
            name: LoopStats.from_facts(site)
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
        site = self.sites.get(name, LoopStats())
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

    def decide(self, name: str, facts: BoundaryFacts) -> SaveDecision:
        """Say whether to save at site `name` now."""
        if self.every and facts.depth == 0 and not facts.ends:
            return SaveDecision(True, "every boundary of the outermost loop was asked for")
        if self.epsilon <= 0:
            return SaveDecision(False, "checkpoints are off: epsilon is 0")
        if facts.busy:
            return SaveDecision(False, "the previous checkpoint is still being written")
        if facts.since <= 0:
            return SaveDecision(False, "a replay can start here without it")
        cost = self.cost(name, facts.nbytes, facts.crowded)
        restore = self.restore(name, facts.nbytes)
        refusal = (
            self._over_budget(name, facts, cost, restore)
            or self._no_gain(facts, cost, restore)
            or (self._inner(facts, cost) if facts.depth else None)
            or (self._kept(facts, cost) if facts.ends and not facts.depth else None)
        )
        if refusal:
            return SaveDecision(False, refusal, cost)
        return SaveDecision(
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

    def _over_budget(
        self, name: str, facts: BoundaryFacts, cost: float, restore: float
    ) -> str | None:
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

    def _no_gain(self, facts: BoundaryFacts, cost: float, restore: float) -> str | None:
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

    def _inner(self, facts: BoundaryFacts, cost: float) -> str | None:
        """Keep inner boundaries for iterations so long that outer ones leave wide gaps."""
        period = max(INNER_LEAST, cost / self.epsilon)
        if facts.since < period:
            return (
                f"an inner boundary is worth saving every {_s(period)}, not after {_s(facts.since)}"
            )
        return self._kept(facts, cost)

    def _kept(self, facts: BoundaryFacts, cost: float) -> str | None:
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
