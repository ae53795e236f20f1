"""Feed the policy: what a run computed, what saving cost it, and what was learnt for next time."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from rearview.config import Settings
from rearview.model import Checkpoint
from rearview.runtime.costs import Costs
from rearview.runtime.policy import Decision, Facts, Policy
from rearview.runtime.sites import Iteration, Saved
from rearview.store.project import publish

_RUNNING = ""
"""Site under which computing time is counted that no finished iteration accounts for yet."""
_IN_FLIGHT = 2
"""Saves that may be under way at once: the end of an inner loop and the boundary after it."""


@dataclass
class Pulse:
    """The policy of one run, with its clock."""

    policy: Policy
    file: Path
    now: float = field(default_factory=perf_counter)
    """Up to when computing time has been counted."""
    waited: float = 0.0
    """Seconds since then that the program waited for us."""
    total: float = 0.0
    """Seconds that it waited for us in all."""
    inflight: int = 0
    captured: dict[int, tuple[str, float]] = field(default_factory=dict)
    done: deque[tuple[int, Costs]] = field(default_factory=deque)
    """Saves that the writer's thread has finished, not yet told to the policy."""
    reasons: Counter[str] = field(default_factory=Counter)

    @classmethod
    def begin(cls, settings: Settings, folder: Path, script: str) -> Pulse:
        """Return a pulse that knows what earlier runs of `script` learnt."""
        file = folder / f"{hashlib.sha256(script.encode()).hexdigest()[:16]}.json"
        try:
            learnt = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError):
            learnt = {}
        return cls(Policy.learnt(settings.epsilon, settings.every, learnt), file)

    def turn(self, site: str, seconds: float) -> None:
        """Count an iteration of a loop, or a loop as a whole, that took `seconds`.

        Its depth is given as 1: the run's own time is counted once, by the clock.
        """
        self._count()
        self.policy = self.policy.observe(site, Iteration(seconds, depth=1))

    def _count(self) -> None:
        now = perf_counter()
        seconds = max(0.0, now - self.now - self.waited)
        self.now, self.waited = now, 0.0
        beside = 0.0
        while self.done:
            seq, costs = self.done.popleft()
            self.inflight -= 1
            site, capture = self.captured.pop(seq, (_RUNNING, 0.0))
            beside += costs.background
            event = Saved(costs.blocking + capture, costs.background, costs.cpu)
            self.policy = self.policy.observe(site, event)
        event_of_time = Iteration(seconds, depth=0, overlap=min(beside, seconds))
        self.policy = self.policy.observe(_RUNNING, event_of_time)

    def decide(self, site: str, since: float, depth: int) -> Decision:
        """Say whether to save at a site now."""
        self._count()
        decision = self.policy.decide(site, Facts(since, depth, busy=self.inflight >= _IN_FLIGHT))
        if not decision.save:
            self.reasons[decision.reason.partition(";")[0].split(" of ")[0]] += 1
        return decision

    def saving(self, seq: int, site: str, seconds: float) -> None:
        """Note that a checkpoint is being handed over, whose capture took `seconds`."""
        self.captured[seq] = (site, seconds)
        self.inflight += 1

    def skipped(self, seq: int) -> None:
        """Note that it was not taken after all."""
        self.captured.pop(seq, None)
        self.inflight -= 1

    def paid(self, seconds: float) -> None:
        """Note that the program waited for us."""
        self.waited += seconds
        self.total += seconds

    def saved(self, checkpoint: Checkpoint, costs: Costs) -> None:
        """Take the writer's word that a checkpoint is durable; called on its thread."""
        self.done.append((checkpoint.seq, costs))

    def keep(self) -> None:
        """Keep what was learnt for the next run of the same script."""
        self._count()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        publish(self.file, msgspec.json.encode(self.policy.facts()), durable=False)

    def report(self, costs: Costs) -> dict[str, Any]:
        """Return what recording cost, for `rearview show`."""
        computed = self.policy.computed or 1e-9
        return {
            **asdict(costs),
            "waited": self.total,
            "computed": self.policy.computed,
            "overhead": self.policy.paid / computed,
            "skipped_because": dict(self.reasons.most_common(5)),
        }
