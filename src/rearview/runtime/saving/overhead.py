"""Feed the policy: what a run computed, what saving cost it, and what was learnt for next time.

What saving has cost.

Keep the checkpoints of a project within the size that the user set, while a run goes on.

How much slower training is while a checkpoint is being written, seen step by step.

An epoch beside a save and one alone are few, and differ by chance. Within one epoch there are many
steps of both kinds, so after the first save it is known what the second costs.

Feed the policy: what a run computed, what saving cost it, and what was learnt for next time.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter, deque
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from time import monotonic, perf_counter, process_time
from typing import Any

import msgspec

from rearview.config import Settings
from rearview.runtime.saving.policy import (
    RUNNING,
    BoundaryFacts,
    Iteration,
    Policy,
    Saved,
    SaveDecision,
)
from rearview.store.files import make_folder, publish
from rearview.store.machine import cores
from rearview.store.maintenance.gc import usage
from rearview.store.project import Project


@dataclass(frozen=True, slots=True)
class Costs:
    """What saving has cost so far, or one save of it. Seconds and bytes."""

    saved: int = 0
    skipped: int = 0
    failed: int = 0
    blocking: float = 0.0
    """Seconds that training waited, also for checkpoints that were skipped or failed."""
    background: float = 0.0
    """Seconds from the hand-over of a checkpoint to its being durable."""
    cpu: float = 0.0
    """Processor seconds that background threads used."""
    logical: int = 0
    """Bytes of state in the checkpoints."""
    copied: int = 0
    """Bytes copied, most of them while training waited."""
    stored: int = 0
    """Bytes written to disk."""

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )


ROOM = 0.8
"""Share of the budget that is aimed at, so that not every checkpoint has to make room anew."""
PAUSE = 30.0
"""Seconds between two starts: looking through a store takes a processor second or so."""


@dataclass
class Budget:
    """Watches what a project's checkpoints take; has them thinned by another process."""

    project: Project
    run: str
    most: int
    """Bytes; 0 is no bound."""
    used: int = -1
    """Bytes, as far as known; -1 before anybody looked."""
    _child: subprocess.Popen[str] | None = None
    _next: float = 0.0

    def saved(self, costs: Costs) -> None:
        """Take note of a checkpoint that is durable; called on the writer's thread."""
        if not self.most:
            return
        if self.used < 0:
            self.used = usage(self.project)
        else:
            self.used += costs.stored
        if self._settled() and self.used > self.most and monotonic() >= self._next:
            self._start()

    def close(self) -> None:
        """Have what is still too much thinned after the run; nobody waits for it."""
        self._settled()
        if self.most and self.used > self.most:
            self._forget()  # one that is at work does not see what came after it began
            self._start(subprocess.DEVNULL)
        self._forget()

    def _forget(self) -> None:
        if self._child is not None:
            self._child.returncode = 0  # it outlives us, which is no reason for a warning
            self._child = None

    def _settled(self) -> bool:
        """Say whether nobody is thinning now, and learn what the last one left."""
        if self._child is None:
            return True
        if self._child.poll() is None:
            return False
        told = self._child.communicate()[0].strip()
        if told.isdecimal():
            self.used = int(told)
        self._child = None
        return True

    def _start(self, out: int = subprocess.PIPE) -> None:
        self._next = monotonic() + PAUSE
        target = str(int(self.most * ROOM))
        command = [
            "-P",
            "-m",
            "rearview.store.maintenance.gc",
            str(self.project.root),
            target,
            self.run,
        ]
        env = {k: v for k, v in os.environ.items() if not k.startswith("REARVIEW_")}
        self._child = subprocess.Popen(
            [sys.executable, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )


RECENT = 64
"""Steps of each kind that are remembered: the machine gets busy, the state grows."""
LEAST = 0.001
"""Seconds of a step below which its time tells little."""
PRIOR = 3
"""Steps that it takes for what they tell to outweigh what was assumed."""
OURS = 0.1
"""Share of a step above which it was spent on a checkpoint."""


@dataclass(slots=True)
class StepTimes:
    """Seconds per step of one loop."""

    alone: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    beside: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The same beside a save, with the seconds of it during which that was under way."""
    over: float = 0.0
    """Seconds of writing in all steps so far."""

    @property
    def seen(self) -> int:
        """Steps of either kind that can be compared."""
        return min(len(self.alone), len(self.beside))

    def lost(self) -> tuple[float, float]:
        """Return the seconds lost in the steps beside a save, and those of writing in them."""
        usual = _middle(self.alone)
        return sum(took - usual for took, _ in self.beside), sum(over for _, over in self.beside)


@dataclass(slots=True)
class Paces:
    """Steps of the loops just inside the outermost ones."""

    loops: dict[str, StepTimes] = field(default_factory=dict)
    _last: tuple[str, int, float, float, float] = ("", 0, 0.0, 0.0, 0.0)

    def step(self, loop: str, index: int, now: float, written: float, waited: float) -> None:
        """Count a step: iteration `index` of a loop begins `now`.

        `written` is for how long checkpoints have been written so far. A step in which the program
        has `waited` for us by more than a look at the clock is not its own.
        """
        before, self._last = self._last, (loop, index, now, written, waited)
        # the first step of a loop may wake the workers of a loader: it tells nothing
        if before[0] != loop or not 0 < before[1] < index:
            return
        lasted, ours = now - before[2], waited - before[4]
        if lasted < LEAST or ours > OURS * lasted:
            return
        steps = self.loops.setdefault(loop, StepTimes())
        count, over = index - before[1], written - before[3]
        steps.over += over
        if over > 0:
            steps.beside.append(((lasted - ours) / count, over / count))
        else:
            steps.alone.append((lasted - ours) / count)

    def slowed(self) -> tuple[float, float]:
        """Return the share of time beside a save that is lost, and how sure that is.

        Few steps tell little; and where most of the writing goes on beside something else, such as
        an evaluation, they tell little of that.
        """
        told = [steps for steps in self.loops.values() if steps.seen]
        losses = [steps.lost() for steps in told]
        over = sum(seconds for _, seconds in losses)
        share = sum(seconds for seconds, _ in losses) / over if over > 0 else 0.0
        seen, written = sum(steps.seen for steps in told), self._last[3]
        covered = sum(steps.over for steps in told) / written if written > 0 else 0.0
        return min(1.0, max(0.0, share)), min(1.0, covered) * seen / (seen + PRIOR)


def _middle(seconds: deque[float]) -> float:
    """Return the mean without the longest tenth, which is mostly not ours."""
    kept = sorted(seconds)[: max(1, len(seconds) - len(seconds) // 10)]
    return sum(kept) / len(kept) if kept else 0.0


_TELLING = 0.05
"""Seconds of computing that tell how many cores it keeps busy."""
_LATELY = 10.0
"""Seconds that are looked back for that."""
_CORES = cores()
_ALIKE = 2.0
"""Times that a state may be larger or smaller than in the run before, and saving it cost the same."""
_IN_FLIGHT = 2
"""Saves that may be under way at once: the end of an inner loop and the boundary after it."""


@dataclass
class Overhead:
    """The policy of one run, with its clock."""

    policy: Policy
    file: Path
    now: float = field(default_factory=perf_counter)
    """Up to when computing time has been counted."""
    waited: float = 0.0
    """Seconds since then that the program waited for us."""
    total: float = 0.0
    """Seconds that it waited for us in all."""
    lost: float = 0.0
    """Seconds that it lost, about, to what went on beside it."""
    nbytes: int = 0
    """Bytes of state, as far as known."""
    size: int = 0
    """Bytes of state when the first loop was entered, in the run before and then in this one."""
    inflight: int = 0
    captured: dict[int, tuple[str, float]] = field(default_factory=dict)
    done: deque[tuple[int, Costs, str]] = field(default_factory=deque)
    """Saves that the writer's thread is done with, not yet told to the policy."""
    paces: Paces = field(default_factory=Paces)
    budget: Budget | None = None
    """Keeps the store within its size."""
    reasons: Counter[str] = field(default_factory=Counter)
    _entered: bool = False
    _began: float = field(default_factory=perf_counter)
    _extra: float = 0.0
    """Seconds spent on saves that did not pay by themselves."""
    _beside: float = 0.0
    """Seconds of the present iteration during which a checkpoint was being written."""
    _turned: float = 0.0
    """How long the program had waited for us when the iteration began."""
    _used: float = field(default_factory=process_time)
    """Processor seconds up to `now`."""
    _rate: float = 1.0
    """Cores that training keeps busy, of late."""
    _spent: float = 0.0
    """Processor seconds of training, of late."""
    _over: float = 0.0
    """Seconds in which they were spent."""

    @classmethod
    def begin(cls, settings: Settings, project: Project, run: str, script: str) -> Overhead:
        """Return a pulse that knows what earlier runs of `script` learnt."""
        folder = project.cache / "policy"
        file = folder / f"{hashlib.sha256(script.encode()).hexdigest()[:16]}.json"
        try:
            learnt = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            learnt = {}
        budget = Budget(project, run, settings.budget) if settings.budget else None
        policy = Policy.learnt(settings.epsilon, settings.every, learnt)
        known = learnt.get("size")
        return cls(policy, file, budget=budget, size=known if isinstance(known, int) else 0)

    def turn(self, site: str, seconds: float) -> None:
        """Count an iteration of a loop, or a loop as a whole, that took `seconds`.

        Its depth is given as 1: the run's own time is counted once, by the clock.
        """
        self._count()
        alone = max(0.0, seconds - (self.total - self._turned))
        beside, self._beside, self._turned = self._beside, 0.0, self.total
        event = Iteration(alone, depth=1, overlap=min(beside, alone))
        self.policy = self.policy.observe(site, event)

    def step(self, loop: str, index: int, written: float) -> None:
        """Count a step of a loop inside the outermost one; so long was `written` until now."""
        self.paces.step(loop, index, perf_counter(), written, self.total)

    def _count(self) -> None:
        now = perf_counter()
        seconds = max(0.0, now - self.now - self.waited)
        self.now, self.waited = now, 0.0
        used, beside = process_time(), 0.0
        spent, self._used = used - self._used - sum(costs.cpu for _, costs, _ in self.done), used
        # over some seconds: what a save used is told when it is over, long after most of it was used
        self._spent, self._over = self._spent + spent, self._over + seconds
        if self._over > _TELLING:
            self._rate = max(0.0, self._spent) / self._over
        if self._over > _LATELY:
            self._spent, self._over = self._spent / 2, self._over / 2
        while self.done:
            seq, costs, skipped = self.done.popleft()
            self.inflight -= 1
            site, capture = self.captured.pop(seq, (RUNNING, 0.0))
            beside += costs.background
            if not costs.saved:
                self.policy = self.policy.wasted(costs.blocking + capture)
                if skipped:
                    self.refused(skipped)
                continue
            blocking, slowed = costs.blocking + capture, self.paces.slowed()
            event = Saved(blocking, costs.background, costs.cpu, self.crowded, *slowed)
            paid = self.policy.paid
            self.policy = self.policy.observe(site, event)
            self.lost += self.policy.paid - paid - event.blocking
        self._beside += beside
        event_of_time = Iteration(seconds, depth=0, overlap=min(beside, seconds))
        self.policy = self.policy.observe(RUNNING, event_of_time)

    @property
    def crowded(self) -> float:
        """Share of a core that training leaves too few for a thread beside it."""
        return min(1.0, max(0.0, self._rate + 1 - _CORES))

    def decide(self, site: str, since: float, depth: int, *, ends: bool = False) -> SaveDecision:
        """Say whether to save at a site now; `ends` is after an inner loop."""
        self._count()
        busy = self.inflight >= _IN_FLIGHT
        facts = BoundaryFacts(since, depth, self.nbytes, ends, self.crowded, busy)
        decision = self.policy.decide(site, facts)
        if not decision.save:
            self.refused(decision.reason)
        return decision

    def affords(self, site: str) -> bool:
        """Say whether to save, though it does not pay, where a short program would leave nothing else.

        It is bounded: a tenth of a second in all, or a twentieth of the time so far.
        """
        cost = self.policy.cost(site)
        allowed = max(0.1, 0.05 * (perf_counter() - self._began)) - self._extra
        if not self.policy.epsilon or cost > allowed:
            return False
        self._extra += cost
        return True

    def refused(self, reason: str) -> None:
        """Count a checkpoint that is not taken, by the kind of reason."""
        self.reasons[_kind(reason)] += 1

    def saving(self, seq: int, site: str, seconds: float) -> None:
        """Note that a checkpoint is being handed over, whose capture took `seconds`."""
        self.captured[seq] = (site, seconds)
        self.inflight += 1

    def skipped(self, seq: int, reason: str) -> None:
        """Note that it was not taken after all; what looking at the state cost is paid."""
        _, seconds = self.captured.pop(seq, (RUNNING, 0.0))
        self.policy = self.policy.wasted(seconds)
        self.inflight -= 1
        self.refused(reason)

    def paid(self, seconds: float) -> None:
        """Note that the program waited for us."""
        self.waited += seconds
        self.total += seconds

    def enter(self, seconds: float, nbytes: int) -> None:
        """Note that the program waited for a walk over its objects, as a loop begins: `nbytes` of state.

        If the run before had another state, as with other arguments, what it learnt is forgotten.
        """
        self._count()
        self._spent = self._over = 0.0  # the set-up does not tell how many cores training uses
        self.paid(seconds)
        if not self._entered:
            small, large = sorted((self.size or nbytes, nbytes))
            if large > _ALIKE * small:
                self.policy = replace(self.policy, sites={})
            self._entered, self.size = True, nbytes
        self.policy = self.policy.wasted(seconds)
        self.nbytes = nbytes

    def ended(self, seq: int, costs: Costs, skipped: str = "") -> None:
        """Take the writer's word that a checkpoint is durable, or never will be; called on its thread."""
        if costs.saved:
            self.nbytes = costs.logical
            if self.budget is not None:
                self.budget.saved(costs)
        self.done.append((seq, costs, skipped))

    def keep(self) -> None:
        """Keep what was learnt for the next run of the same script."""
        self._count()
        make_folder(self.file.parent)
        if self.budget is not None:
            self.budget.close()
        learnt = {**self.policy.facts(), "size": self.size}
        publish(self.file, msgspec.json.encode(learnt), durable=False)

    def report(self, costs: Costs) -> dict[str, Any]:
        """Return what recording cost, for `rearview show`."""
        computed = self.policy.computed or 1e-9
        return {
            **asdict(costs),
            "skipped": sum(self.reasons.values()),
            "waited": self.total,
            "computed": self.policy.computed,
            "lost": self.lost,
            "overhead": (self.total + self.lost) / computed,
            "skipped_because": dict(self.reasons.most_common(5)),
        }


def _kind(reason: str) -> str:
    """Return a reason without its numbers, so that like ones are counted together.

    >>> _kind("it would cost 2.5 s; 10 % of the 10 s computed so far leave 1 s")
    'the budget is used up'
    """
    for words, kind in _KINDS.items():
        if words in reason:
            return kind
    return reason.partition(":")[2].strip() or reason


_KINDS = {
    "computed so far": "the budget is used up",
    "that this loop has computed": "the budget is used up",
    "kept for the outer loop": "the budget is kept for the outer loop",
    "is no slower than saving": "computing again is no slower than saving and restoring",
    "too little of the": "it would save too little of the run",
    "too little for the": "it would save too little for what it costs",
    "an inner boundary is worth": "inner boundaries are saved at long intervals only",
    "exceed the staging bound": "the changed bytes exceed the bound on staging memory",
    "saves failed": "waiting after saves that failed",
}
