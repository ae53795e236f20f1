"""Decide whether to save a checkpoint at a boundary (pure: measurements come in as arguments).

The rule is the joint invariant of the Flor paper (equation 4): a block that takes C seconds and was
run n times and saved k times may be saved again if

    M / C  <  n / (k + 1) * min(1 / (1 + c), epsilon)

where M is the cost of a save and R = c M the cost of a restore. The first bound keeps a replay from
being slower than the run, the second keeps the run within its budget. Here M is the *whole*
slowdown: the time that training waits, and the time that training loses to the threads that write.

Costs are measured per *site*: the start of the iterations of one loop, or the end of this loop. Epsilon is the
fraction of the computing time that recording may cost, as set by the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

NEWEST_WEIGHT = 0.3
"""Weight of the newest observation in a mean; older ones count less, because states grow and machines get busy."""
PRIOR_ITERATIONS = 3
"""If this many iterations during a save and as many without a save were measured, they count as much as assumptions."""
LOSS_WITH_FREE_CORE = 0.1
"""Seconds that training is assumed to lose per processor second of background work if a core is free. It loses
some, because processor caches are shared."""
LOSS_WITHOUT_FREE_CORE = 1.5
"""Seconds that training is assumed to lose per processor second of background work if no core is free. It loses
more than a second, because all training threads wait for the one whose core is taken."""
WHOLE_RUN = ""
"""Name of an additional site, for the computing time of the run as a whole."""
RESTORE_PER_SAVE = 1.38
"""Restore time divided by save time, assumed until a restore was measured: the mean of the paper's workloads."""
COPY_SPEED = 4e9
"""Bytes copied per second, assumed until a save was measured."""
FIXED_COST = 5e-4
"""Seconds that a save of any size costs, assumed until a save was measured."""
WRITE_SPEED = 5e8
"""Bytes written for each second that training loses if no core is free, assumed until a save was measured."""
BUDGET_RESERVE = 0.25
"""Fraction of the budget that is left unused if no core is free, because the estimate of losses is then least sure."""
UNKNOWN_COST = 2e-3
"""Seconds that a save is assumed to cost if the size of the state is not known."""
OUTER_SHARE = 1e-4
"""A checkpoint must spare a replay at least this fraction of the computing time of the run so far. Therefore the
interval between checkpoints grows with the run."""
SMALL_GAIN = 0.25
"""A checkpoint that spares a replay fewer seconds of computing is saved only if it costs little."""
SMALL_GAIN_SHARE = 0.01
"""Fraction of the spared computing time that a checkpoint may cost if this time is below `SMALL_GAIN` seconds."""
INNER_SHARE = 5e-3
"""Like `OUTER_SHARE`, for boundaries of inner loops."""
INNER_LEAST = 10.0
"""Minimum seconds between checkpoints of inner loops; in shorter time, checkpoints of the outer loop are enough."""


class Reason(StrEnum):
    """Why a checkpoint was saved or not; the value is the text that `rearview show` prints."""

    EVERY = "every boundary of the outermost loop was asked for"
    PAYS = "it saves a replay more than it costs"
    OFF = "checkpoints are off: epsilon is 0"
    BUSY = "the previous checkpoint is still being written"
    NO_NEED = "a replay can start here without it"
    OVER_BUDGET = "the budget is used up"
    FOR_OUTER_LOOP = "the budget is kept for the outer loop"
    NO_GAIN = "computing again is no slower than saving and restoring"
    LITTLE_OF_RUN = "it would save too little of the run"
    LITTLE_FOR_COST = "it would save too little for its cost"
    INNER_INTERVAL = "inner boundaries are saved at long intervals only"
    PREPARING = "memory for the copy is still being made ready"
    OVER_STAGING = "the changed bytes exceed the bound on staging memory"
    OVER_MEMORY = "the changed bytes exceed half of the memory that this machine has left"
    OVERTAKEN = "the program changed its state while that was being copied"
    FAILED = "the save failed"
    AFTER_FAILURES = "waiting after saves that failed"
    CLOSED = "this process no longer saves"


@dataclass(frozen=True, slots=True)
class Iteration:
    """Event: one iteration at a site has ended."""

    seconds: float
    """Computing time, without the time that training waited for Rearview."""
    depth: int = 0
    """If 0, `seconds` are added to the computing time of the run."""
    overlap: float = 0.0
    """Seconds of the iteration during which a checkpoint was being written."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Event: a checkpoint at a site is durable."""

    blocking: float
    """Seconds that training waited or lost, including the capture of the state."""
    background: float = 0.0
    """Seconds that background threads worked on the save."""
    cpu: float = 0.0
    """Processor seconds that background threads used for the save."""
    crowded: float = 1.0
    """Fraction of a core that training did not leave free for background threads: 0 if a whole core was free."""
    slowdown: float = 0.0
    """Seconds that training loses per second of `background`, measured from its steps."""
    confidence: float = 0.0
    """Confidence in `slowdown`, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Restored:
    """Event: a checkpoint of a site was loaded and restored."""

    seconds: float


Event = Iteration | Saved | Restored


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Measurements at one site: n, k, C, M and R of the rule in the module's docstring."""

    n: int = 0
    """Number of iterations at this site in this run."""
    k: int = 0
    """Number of checkpoints at this site in this run."""
    computed: float = 0.0
    """Computing seconds of the iterations in this run: n times the mean of C."""
    save: float | None = None
    """M: seconds that a save costs training, mean of recent saves; None if not measured yet."""
    restores: float | None = None
    """R: seconds that a restore takes, mean of recent restores; None if not measured yet."""
    alone: float = 0.0
    """Mean seconds of iterations during which no checkpoint was written."""
    alone_count: int = 0
    beside: float = 0.0
    """Mean seconds of iterations during which a checkpoint was written."""
    beside_count: int = 0
    overlap: float = 0.0
    """Mean seconds for which a checkpoint was being written, over the iterations that `beside` is the mean of."""

    def observe(self, event: Event) -> LoopStats:
        """Return a copy of these measurements to which `event` is added."""
        if isinstance(event, Iteration):
            return self._with_iteration(event)
        if isinstance(event, Saved):
            cost = event.blocking
            mean = _updated_mean(self.save, cost)
            if self.k == 1:
                # the first save of a run is not typical: it also stored data that never changes
                mean = min(mean, cost)
            return replace(self, k=self.k + 1, save=mean)
        return replace(self, restores=_updated_mean(self.restores, event.seconds))

    @property
    def comparable_pairs(self) -> int:
        """Number of measured iterations during a save, or of iterations without a save if there are fewer of these."""
        return min(self.alone_count, self.beside_count)

    def contention(self, event: Saved) -> float:
        """Return the estimated seconds that training loses to the background work of the save `event`.

        This is a weighted mean of two values. The first is the slowdown measured from training steps
        (`event.slowdown`), with `event.confidence` as weight. The second compares iterations during a save with
        iterations without a save. Until enough of both were measured, the second is mostly the processor time of the
        save, times a factor from `LOSS_WITH_FREE_CORE` to `LOSS_WITHOUT_FREE_CORE`.
        """
        more_loss = (LOSS_WITHOUT_FREE_CORE - LOSS_WITH_FREE_CORE) * event.crowded
        estimate = event.cpu * (LOSS_WITH_FREE_CORE + more_loss)
        if self.comparable_pairs and self.overlap > 0:
            rate = min(1.0, max(0.0, (self.beside - self.alone) / self.overlap))
            confidence = self.comparable_pairs / (self.comparable_pairs + PRIOR_ITERATIONS)
            estimate = (1 - confidence) * estimate + confidence * rate * event.background
        measured = event.slowdown * event.background
        return (1 - event.confidence) * estimate + event.confidence * measured

    def facts(self) -> dict[str, Any]:
        """Return name -> value of the measurements that the next run can use."""
        return {
            "save": self.save,
            "restores": self.restores,
            "alone": self.alone,
            "alone_count": min(self.alone_count, PRIOR_ITERATIONS),
            "beside": self.beside,
            "beside_count": min(self.beside_count, PRIOR_ITERATIONS),
            "overlap": self.overlap,
        }

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> LoopStats:
        """Return the measurements in `facts` (name -> value); values that are no numbers or negative are left out."""
        names = cls().facts()
        numbers: dict[str, Any] = {
            name: value
            for name, value in facts.items()
            if name in names and isinstance(value, int | float) and value >= 0
        }
        return cls(**numbers)

    def _with_iteration(self, event: Iteration) -> LoopStats:
        counted = replace(self, n=self.n + 1, computed=self.computed + event.seconds)
        if not self.n:
            return counted  # do not measure the first iteration: it fills caches and is slower
        if event.overlap > 0:
            count = self.beside_count + 1
            weight = max(NEWEST_WEIGHT, 1 / count)
            return replace(
                counted,
                beside=self.beside + weight * (event.seconds - self.beside),
                overlap=self.overlap + weight * (event.overlap - self.overlap),
                beside_count=count,
            )
        count = self.alone_count + 1
        weight = max(NEWEST_WEIGHT, 1 / count)
        return replace(
            counted, alone=self.alone + weight * (event.seconds - self.alone), alone_count=count
        )


def _updated_mean(mean: float | None, value: float) -> float:
    return value if mean is None else (1 - NEWEST_WEIGHT) * mean + NEWEST_WEIGHT * value


@dataclass(frozen=True, slots=True)
class BoundaryFacts:
    """Measurements at one boundary from which the policy decides."""

    since: float
    """Seconds that a checkpoint here would spare a replay: since the last checkpoint between iterations, or since the
    loop was entered."""
    depth: int = 0
    """Number of loops around the loop of the boundary; 0 also if `ends` is True."""
    nbytes: int = 0
    """Bytes of the state; 0 if not known yet."""
    ends: bool = False
    """Whether a loop directly inside the outermost loop has just ended."""
    crowded: float = 0.0
    """Fraction of a core that training does not leave free for the writer: 0 if a whole core is free."""
    busy: bool = False
    """Whether earlier checkpoints are still being written, so that there is no room for another."""


@dataclass(frozen=True, slots=True)
class SaveDecision:
    """Decision of the policy whether to save at a boundary, and why."""

    save: bool
    reason: Reason
    text: str = ""
    """The reason as a sentence with numbers, for the user."""
    cost: float = 0.0
    """Seconds that the save is expected to cost."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Decides to save a checkpoint where it makes a replay faster, as long as all saves together cost little.

    They may cost at most the fraction `epsilon` of the computing time.

    >>> policy = Policy(epsilon=0.1)
    >>> policy = policy.observe("epoch", Iteration(seconds=10.0))
    >>> policy.decide("epoch", BoundaryFacts(since=10.0, nbytes=10**9)).save
    True
    >>> policy.decide("epoch", BoundaryFacts(since=10.0, nbytes=10**10)).text
    'it would cost 2.5 s; 10 % of the 10 s computed so far leave 1 s'
    """

    epsilon: float
    every: bool = False
    sites: Mapping[str, LoopStats] = field(default_factory=dict)
    paid: float = 0.0
    """Seconds that saving has cost in this run, summed over all sites."""
    computed: float = 0.0
    """Computing seconds of this run so far."""

    @classmethod
    def from_facts(cls, epsilon: float, every: bool, facts: Mapping[str, Any]) -> Policy:
        """Return a policy that begins with the measurements in `facts`, stored by an earlier run."""
        sites = {
            name: LoopStats.from_facts(site)
            for name, site in facts.get("sites", {}).items()
            if isinstance(site, Mapping)
        }
        return cls(epsilon, every, sites)

    def facts(self) -> dict[str, Any]:
        """Return the measurements that a later run of the same script can use, for `from_facts`."""
        return {"sites": {name: site.facts() for name, site in self.sites.items()}}

    def observe(self, name: str, event: Event) -> Policy:
        """Return a copy of this policy to which `event`, at the site `name`, is added."""
        paid, computed = self.paid, self.computed
        site = self.sites.get(name, LoopStats())
        if isinstance(event, Iteration) and event.depth == 0:
            computed += event.seconds
        elif isinstance(event, Saved):
            # a site at the end of a loop has no iterations: take the slowdown from the best measured site
            measured_sites = (stats for key, stats in self.sites.items() if key != WHOLE_RUN)
            best_measured = max((site, *measured_sites), key=lambda each: each.comparable_pairs)
            event = Saved(event.blocking + best_measured.contention(event))
            paid += event.blocking
        site = site.observe(event)
        return replace(self, sites={**self.sites, name: site}, paid=paid, computed=computed)

    def decide(self, name: str, facts: BoundaryFacts) -> SaveDecision:
        """Return the decision whether to save at the site `name` now."""
        if self.every and facts.depth == 0 and not facts.ends:
            return SaveDecision(True, Reason.EVERY)
        if self.epsilon <= 0:
            return SaveDecision(False, Reason.OFF)
        if facts.busy:
            return SaveDecision(False, Reason.BUSY)
        if facts.since <= 0:
            return SaveDecision(False, Reason.NO_NEED)
        cost = self.cost(name, facts.nbytes, facts.crowded)
        restore = self.restore(name, facts.nbytes)
        return (
            self._over_budget(name, facts, cost, restore)
            or self._no_gain(facts, cost, restore)
            or (self._inner(facts, cost) if facts.depth else None)
            or (self._for_outer_loop(facts, cost) if facts.ends and not facts.depth else None)
            or SaveDecision(
                True,
                Reason.PAYS,
                f"costs {_seconds(cost)} and saves a replay {_seconds(facts.since)} of computing",
                cost,
            )
        )

    def cost(self, name: str, nbytes: int = 0, crowded: float = 0.0) -> float:
        """Return M: the seconds that the next save at the site `name` is expected to cost."""
        site = self.sites.get(name)
        if site is not None and site.save is not None:
            return site.save
        # no save at this site was measured: saves at other sites store about the same state
        measured = [stats.save for stats in self.sites.values() if stats.save is not None]
        if measured:
            return max(measured)
        if not nbytes:
            return UNKNOWN_COST
        return FIXED_COST + nbytes / COPY_SPEED + crowded * nbytes / WRITE_SPEED

    def restore(self, name: str, nbytes: int = 0) -> float:
        """Return R: the seconds that a restore at the site `name` is expected to take.

        Until a restore was measured, this is a multiple of M.
        """
        site = self.sites.get(name)
        if site is not None and site.restores is not None:
            return site.restores
        return RESTORE_PER_SAVE * self.cost(name, nbytes)

    def share(self, name: str) -> float:
        """Return the fraction of computing time that saving at the site `name` may take."""
        cost = self.cost(name)
        scale = self.restore(name) / cost if cost else RESTORE_PER_SAVE
        return min(1 / (1 + scale), self.epsilon)

    def _over_budget(
        self, name: str, facts: BoundaryFacts, cost: float, restore: float
    ) -> SaveDecision | None:
        allowed = self.epsilon * (1 - BUDGET_RESERVE * facts.crowded)
        share = min(cost / (cost + restore) if cost else 1.0, allowed)
        # equation 4 over all sites together: nested loops share one budget
        computed = max(self.computed, facts.since)
        allowance = share * computed - self.paid
        if cost > allowance:
            text = (
                f"it would cost {_seconds(cost)}; {share * 100:.3g} % of the {_seconds(computed)} computed so far "
                f"leave {_seconds(max(allowance, 0))}"
            )
            return SaveDecision(False, Reason.OVER_BUDGET, text, cost)
        site = self.sites.get(name)
        if site is not None and 0 < share * site.computed < cost * (site.k + 1):
            text = (
                f"{site.k + 1} saves of {_seconds(cost)} exceed {share * 100:.3g} % of the "
                f"{_seconds(site.computed)} that this loop has computed"
            )
            return SaveDecision(False, Reason.OVER_BUDGET, text, cost)
        return None

    def _no_gain(self, facts: BoundaryFacts, cost: float, restore: float) -> SaveDecision | None:
        if facts.since < cost + restore:
            text = (
                f"computing {_seconds(facts.since)} again is no slower than saving and restoring "
                f"({_seconds(cost + restore)})"
            )
            return SaveDecision(False, Reason.NO_GAIN, text, cost)
        # not at the end of an inner loop: a replay can skip thousands of short loops, a small gain each
        is_small_gain = facts.since < SMALL_GAIN and not facts.ends
        if is_small_gain and cost > SMALL_GAIN_SHARE * facts.since:
            text = f"it would save {_seconds(facts.since)}, too little for the {_seconds(cost)} that it costs"
            return SaveDecision(False, Reason.LITTLE_FOR_COST, text, cost)
        least_seconds = self.computed * (INNER_SHARE if facts.depth else OUTER_SHARE)
        if facts.since < least_seconds:
            text = f"it would save {_seconds(facts.since)}, too little of the {_seconds(self.computed)} run"
            return SaveDecision(False, Reason.LITTLE_OF_RUN, text, cost)
        return None

    def _inner(self, facts: BoundaryFacts, cost: float) -> SaveDecision | None:
        """Return a refusal at a boundary of an inner loop, or None if saving there is worth its cost.

        It is not if too little time has passed since the last checkpoint from which a replay can start.
        """
        period = max(INNER_LEAST, cost / self.epsilon)
        if facts.since < period:
            text = f"an inner boundary is worth saving every {_seconds(period)}, not after {_seconds(facts.since)}"
            return SaveDecision(False, Reason.INNER_INTERVAL, text, cost)
        return self._for_outer_loop(facts, cost)

    def _for_outer_loop(self, facts: BoundaryFacts, cost: float) -> SaveDecision | None:
        """Return a refusal if this save would use up the budget for checkpoints of the outermost loop, else None.

        Runs are resumed from checkpoints of the outermost loop.
        """
        if cost * 2 > self.epsilon * max(self.computed, facts.since) - self.paid:
            text = f"what the budget leaves ({_seconds(cost)}) is kept for the outer loop"
            return SaveDecision(False, Reason.FOR_OUTER_LOOP, text, cost)
        return None

    def with_spent(self, seconds: float) -> Policy:
        """Return a copy of this policy that has spent `seconds` more, without a checkpoint that was saved."""
        return replace(self, paid=self.paid + seconds)


def _seconds(seconds: float) -> str:
    """Return a duration in seconds as text for the user.

    >>> _seconds(0.0123), _seconds(2.5), _seconds(7200.0)
    ('12.3 ms', '2.5 s', '2 h')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 7200 else f"{seconds / 3600:.3g} h"
