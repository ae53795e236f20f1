"""Measure the costs of recording, in time and disk space, while training runs.

`Overhead` measures for one run how long training computes and how long it waits for Rearview, asks
the policy at each boundary whether to save, and stores the measurements for the next run of the
same script. `SlowdownMeter` measures how much slower training steps are while a checkpoint is
written: one epoch has many steps with and without a save, so that one save suffices to know what the next one
costs. `DiskBudget` keeps the checkpoints of a project within the size that the user set.

A site is a place where checkpoints are saved: the start of the iterations of one loop, or the end of this loop.
"""

from __future__ import annotations

import contextlib
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
    WHOLE_RUN,
    BoundaryFacts,
    Iteration,
    Policy,
    Reason,
    Saved,
    SaveDecision,
)
from rearview.store.create_files import make_folder, publish
from rearview.store.machine_and_process import cores
from rearview.store.project import Project

CLEANUP_TARGET = 0.8
"""Fraction of the disk budget that a clean-up leaves in use, so that the next checkpoints fit."""
CLEANUP_PAUSE = 30.0
"""Minimum seconds between the starts of two clean-ups: examining a store takes about a processor second."""
RECENT_STEPS = 64
"""Number of last steps during a save, and of last steps without a save, that are remembered: as states grow, the
durations of older steps no longer say much."""
SHORTEST_STEP = 0.001
"""Steps that took fewer seconds are not measured."""
PRIOR_STEPS = 3
"""If this many steps during a save and as many without a save were measured, they count as much as assumptions."""
WAIT_SHARE = 0.1
"""A step that waited for Rearview for more than this fraction of its duration does not count."""
_RATE_FROM = 0.05
"""Minimum seconds of computing from which the number of busy cores is measured."""
_RATE_WINDOW = 10.0
"""Seconds over which the number of busy cores is averaged."""
_CORES = cores()
_SIMILAR_SIZE = 2.0
"""Measurements of the previous run are used if the state sizes of the two runs differ by at most this factor."""
_MOST_IN_FLIGHT = 2
"""Maximum number of saves under way: one at the end of an inner loop, one at the next boundary of the outer loop."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of saving checkpoints, one or several: numbers of checkpoints, seconds and bytes."""

    saved: int = 0
    skipped: int = 0
    failed: int = 0
    blocking: float = 0.0
    """Seconds that training waited for saves, including saves that were skipped or failed."""
    background: float = 0.0
    """Seconds that background threads worked, including the preparation of memory."""
    cpu: float = 0.0
    """Processor seconds that background threads used."""
    logical: int = 0
    """Bytes of state in the checkpoints."""
    copied: int = 0
    """Number of bytes that were copied for saves, most of them while training waited."""
    stored: int = 0
    """Bytes written to disk."""

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )


@dataclass
class DiskBudget:
    """Measures the disk space of a project's checkpoints; if it exceeds `limit`, starts a clean-up process."""

    project: Project
    run: str
    limit: int
    """Bytes of disk space that checkpoints may use; 0: no limit."""
    used: int = -1
    """Bytes of disk space that checkpoints use; -1 if not measured yet."""
    _child: subprocess.Popen[str] | None = None
    _next_start: float = 0.0

    def saved(self, costs: Costs) -> None:
        """Count the disk space of a checkpoint that has become durable; called on the writer thread."""
        if not self.limit:
            return
        if self.used < 0:
            from rearview.store.maintenance.thin_and_collect import (
                usage,  # imported here: few runs have a budget
            )

            self.used = usage(self.project)
        else:
            self.used += costs.stored
        if self._is_idle() and self.used > self.limit and monotonic() >= self._next_start:
            self._start()

    def close(self) -> None:
        """Start a final clean-up if the store is still over budget; do not wait for it."""
        self._is_idle()
        if self.limit and self.used > self.limit:
            self._detach()  # a running clean-up ignores checkpoints saved after its start: start another one
            self._start(subprocess.DEVNULL)
        self._detach()

    def _detach(self) -> None:
        if self._child is not None:
            self._child.returncode = 0  # avoids a ResourceWarning: the child outlives this process
            self._child = None

    def _is_idle(self) -> bool:
        """Return True if no clean-up is running; if one has just ended, set `used` to the size that it reported."""
        if self._child is None:
            return True
        if self._child.poll() is None:
            return False
        reported_size = self._child.communicate()[0].strip()
        if reported_size.isdecimal():
            self.used = int(reported_size)
        self._child = None
        return True

    def _start(self, out: int = subprocess.PIPE) -> None:
        self._next_start = monotonic() + CLEANUP_PAUSE
        target = str(int(self.limit * CLEANUP_TARGET))
        command = [
            "-P",
            "-m",
            "rearview.store.maintenance.thin_and_collect",
            str(self.project.root),
            target,
            self.run,
        ]
        env = {k: v for k, v in os.environ.items() if not k.startswith("REARVIEW_")}
        # if no process can be started, a later save or the next run cleans up
        with contextlib.suppress(OSError):
            self._child = subprocess.Popen(
                [sys.executable, *command],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )


@dataclass(slots=True)
class StepTimes:
    """Durations of the steps of one loop, during a save and without a save."""

    alone: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    during_save: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=RECENT_STEPS)
    )
    """Recent steps during a save, each (duration in seconds, seconds of it in which the checkpoint was written)."""
    written: float = 0.0
    """Seconds in which checkpoints were written, summed over all steps so far."""

    @property
    def pairs(self) -> int:
        """Number of recent steps during a save, or of steps without a save if there are fewer of these."""
        return min(len(self.alone), len(self.during_save))

    def seconds_lost(self) -> tuple[float, float]:
        """Return by how many seconds the recent steps during a save were slower, and the seconds of writing in them."""
        usual = _trimmed_mean(self.alone)
        return sum(seconds - usual for seconds, _ in self.during_save), sum(
            writing for _, writing in self.during_save
        )


@dataclass(slots=True)
class SlowdownMeter:
    """Measures how much slower the steps of inner loops are while a checkpoint is written."""

    loops: dict[str, StepTimes] = field(default_factory=dict)
    _last: tuple[str, int, float, float, float] = ("", 0, 0.0, 0.0, 0.0)

    def begin_step(self, loop: str, index: int, now: float, written: float, waited: float) -> None:
        """Measure the step that ends now, at time `now`, because iteration `index` of the loop `loop` begins.

        `written` and `waited` are totals since the start of the run: seconds in which checkpoints were written, and
        seconds that the program waited for Rearview. Steps with a long wait do not count.
        """
        previous, self._last = self._last, (loop, index, now, written, waited)
        # the first step of a loop is not measured: it may start the workers of a data loader
        if previous[0] != loop or not 0 < previous[1] < index:
            return
        lasted, waiting = now - previous[2], waited - previous[4]
        if lasted < SHORTEST_STEP or waiting > WAIT_SHARE * lasted:
            return
        steps = self.loops.setdefault(loop, StepTimes())
        count, writing = index - previous[1], written - previous[3]
        steps.written += writing
        if writing > 0:
            steps.during_save.append(((lasted - waiting) / count, writing / count))
        else:
            steps.alone.append((lasted - waiting) / count)

    def slowdown(self) -> tuple[float, float]:
        """Return the fraction of its time that training loses while a save runs, and a confidence from 0 to 1.

        Confidence is low if few training steps overlapped a save, or if checkpoints were mostly written while no
        training step ran, such as during an evaluation.
        """
        compared = [steps for steps in self.loops.values() if steps.pairs]
        losses = [steps.seconds_lost() for steps in compared]
        writing = sum(seconds for _, seconds in losses)
        share = sum(seconds for seconds, _ in losses) / writing if writing > 0 else 0.0
        pairs, written = sum(steps.pairs for steps in compared), self._last[3]
        covered = sum(steps.written for steps in compared) / written if written > 0 else 0.0
        return min(1.0, max(0.0, share)), min(1.0, covered) * pairs / (pairs + PRIOR_STEPS)


def _trimmed_mean(seconds: deque[float]) -> float:
    """Return the mean of `seconds` without the longest tenth, whose length has other reasons than a save."""
    typical = sorted(seconds)[: max(1, len(seconds) - len(seconds) // 10)]
    return sum(typical) / len(typical) if typical else 0.0


@dataclass
class Overhead:
    """The policy of one run, and the time measurements from which the policy decides."""

    policy: Policy
    file: Path
    """File in which measurements are stored for the next run of the same script."""
    counted_until: float = field(default_factory=perf_counter)
    """Time up to which the computing of the program has been counted."""
    waited: float = 0.0
    """Seconds since `counted_until` that the program waited for Rearview."""
    total_wait: float = 0.0
    """Seconds that the program waited for Rearview in the whole run."""
    lost: float = 0.0
    """Estimated seconds that training lost to background work."""
    nbytes: int = 0
    """Bytes of the state; 0 if not known yet."""
    size: int = 0
    """Bytes of the state at the entry of the first loop; until this run enters it, the value of the previous run."""
    in_flight: int = 0
    """Number of saves that were begun and whose end has not been counted."""
    captures: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Number of a checkpoint -> its site, and the seconds that capturing its state took."""
    finished_saves: deque[tuple[int, Costs, Reason | None]] = field(default_factory=deque)
    """(number of the checkpoint, costs, reason if given up) of each save that has ended but is not counted yet."""
    slowdown: SlowdownMeter = field(default_factory=SlowdownMeter)
    disk_budget: DiskBudget | None = None
    refusals: Counter[Reason] = field(default_factory=Counter)
    """Reason -> number of checkpoints that were not saved for this reason."""
    _entered: bool = False
    _began: float = field(default_factory=perf_counter)
    _allowed_beyond_budget: float = 0.0
    """Expected seconds of the saves that `affords` has allowed beyond the budget."""
    _writing: float = 0.0
    """Seconds of background work of saves that were counted in the current iteration."""
    _wait_at_iteration: float = 0.0
    """Value of `total_wait` when the current iteration began."""
    _cpu_counted: float = field(default_factory=process_time)
    """Processor seconds of this process up to `counted_until`."""
    _busy_cores: float = 1.0
    """Number of cores that training keeps busy."""
    _window_cpu: float = 0.0
    """Processor seconds of training in the recent period from which `_busy_cores` is computed."""
    _window_seconds: float = 0.0
    """Length in seconds of the recent period from which `_busy_cores` is computed."""

    @classmethod
    def begin(cls, settings: Settings, project: Project, run: str, script: str) -> Overhead:
        """Return the `Overhead` of `run`, which begins now, with the stored measurements of earlier runs of `script`."""
        folder = project.cache / "policy"
        file = folder / f"{hashlib.sha256(script.encode()).hexdigest()[:16]}.json"
        try:
            earlier_facts = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            earlier_facts = {}
        budget = DiskBudget(project, run, settings.budget) if settings.budget else None
        policy = Policy.from_facts(settings.epsilon, settings.every, earlier_facts)
        size = earlier_facts.get("size")
        return cls(policy, file, disk_budget=budget, size=size if isinstance(size, int) else 0)

    def end_iteration(self, site: str, seconds: float) -> None:
        """Report to the policy that an iteration at `site` took `seconds`.

        The depth in the report is 1, because `_update_policy` counts the computing time of the run, which must be
        counted only once.
        """
        self._update_policy()
        alone = max(0.0, seconds - (self.total_wait - self._wait_at_iteration))
        writing, self._writing, self._wait_at_iteration = self._writing, 0.0, self.total_wait
        event = Iteration(alone, depth=1, overlap=min(writing, alone))
        self.policy = self.policy.observe(site, event)

    def begin_step(self, loop: str, index: int, written: float) -> None:
        """Measure the step that ends because iteration `index` of `loop`, directly inside the outermost loop, begins.

        `written` is the number of seconds for which checkpoints were being written since the start of the run.
        """
        self.slowdown.begin_step(loop, index, perf_counter(), written, self.total_wait)

    def _update_policy(self) -> None:
        """Report to the policy the computing time since the last call, and the saves that have ended."""
        now = perf_counter()
        seconds = max(0.0, now - self.counted_until - self.waited)
        self.counted_until, self.waited = now, 0.0
        self._measure_rate(seconds)
        writing = 0.0
        while self.finished_saves:
            writing += self._count_save(*self.finished_saves.popleft())
        self._writing += writing
        computing = Iteration(seconds, depth=0, overlap=min(writing, seconds))
        self.policy = self.policy.observe(WHOLE_RUN, computing)

    def _measure_rate(self, seconds: float) -> None:
        """Update the average number of cores that training keeps busy; it has computed for `seconds` since the last call.

        It is averaged over some seconds, because a save reports its processor time only at its end.
        """
        used = process_time()
        background = sum(costs.cpu for _, costs, _ in self.finished_saves)
        spent, self._cpu_counted = used - self._cpu_counted - background, used
        self._window_cpu += spent
        self._window_seconds += seconds
        if self._window_seconds > _RATE_FROM:
            self._busy_cores = max(0.0, self._window_cpu) / self._window_seconds
        if self._window_seconds > _RATE_WINDOW:
            self._window_cpu /= 2
            self._window_seconds /= 2

    def _count_save(self, seq: int, costs: Costs, skipped: Reason | None) -> float:
        """Report to the policy that the save of checkpoint `seq` has ended; return its seconds of background work."""
        self.in_flight -= 1
        site, capture = self.captures.pop(seq, (WHOLE_RUN, 0.0))
        if costs.saved:
            blocking, slowdown = costs.blocking + capture, self.slowdown.slowdown()
            event = Saved(blocking, costs.background, costs.cpu, self.crowded, *slowdown)
            paid = self.policy.paid
            self.policy = self.policy.observe(site, event)
            self.lost += self.policy.paid - paid - event.blocking
        else:
            self.policy = self.policy.with_spent(costs.blocking + capture)
            if skipped is not None:
                self.refusals[skipped] += 1
        return costs.background

    @property
    def crowded(self) -> float:
        """Fraction of a core that training does not leave free for a background thread: 0 if a whole core is free."""
        return min(1.0, max(0.0, self._busy_cores + 1 - _CORES))

    def decide(self, site: str, since: float, depth: int, *, ends: bool = False) -> SaveDecision:
        """Return the policy's decision whether to save a checkpoint at `site` now.

        `since`, `depth` and `ends` are as in `BoundaryFacts`: the seconds that a checkpoint here would spare a replay,
        the number of loops around the loop of the boundary, and whether a loop inside the outermost one has ended.
        """
        self._update_policy()
        busy = self.in_flight >= _MOST_IN_FLIGHT
        facts = BoundaryFacts(since, depth, self.nbytes, ends, self.crowded, busy)
        decision = self.policy.decide(site, facts)
        if not decision.save:
            self.refusals[decision.reason] += 1
        return decision

    def affords(self, site: str) -> bool:
        """Return True if a checkpoint at `site`, the end of a loop, may be saved although the policy refuses it.

        Without such a checkpoint, a short program would leave no state to compare a replay with. All checkpoints
        against the policy together may cost a tenth of a second or, if this is more, a fraction of the run so far:
        a twentieth, or epsilon if that is smaller.
        """
        cost = self.policy.cost(site)
        share = min(0.05, self.policy.epsilon)
        allowed = max(0.1, share * (perf_counter() - self._began)) - self._allowed_beyond_budget
        if not self.policy.epsilon or cost > allowed:
            return False
        self._allowed_beyond_budget += cost
        return True

    def begin_save(self, seq: int, site: str, seconds: float) -> None:
        """Count that checkpoint `seq` at `site` is about to be submitted to the writer; its capture took `seconds`."""
        self.captures[seq] = (site, seconds)
        self.in_flight += 1

    def skip_save(self, seq: int, reason: Reason) -> None:
        """Count that the writer refused checkpoint `seq`; the time of its capture counts as a cost."""
        _, seconds = self.captures.pop(seq, (WHOLE_RUN, 0.0))
        self.policy = self.policy.with_spent(seconds)
        self.in_flight -= 1
        self.refusals[reason] += 1

    def end_save(self, seq: int, costs: Costs, skipped: Reason | None = None) -> None:
        """Count that the save of checkpoint `seq` has ended, with or without success; called on the writer thread.

        `skipped` is the reason if the save was given up without a failure, else None.
        """
        if costs.saved:
            self.nbytes = costs.logical
            if self.disk_budget is not None:
                self.disk_budget.saved(costs)
        self.finished_saves.append((seq, costs, skipped))

    def add_wait(self, seconds: float) -> None:
        """Count that the program waited for Rearview for `seconds`."""
        self.waited += seconds
        self.total_wait += seconds

    def enter_loop(self, seconds: float, nbytes: int) -> None:
        """Count the walk over the program's objects at the entry of an outermost loop.

        The walk took `seconds` and found `nbytes` of state. If the state of the previous run had a very different
        size, as after a change of arguments, the measurements of the previous run are dropped.
        """
        self._update_policy()
        # start averaging again: the code before the loop keeps other numbers of cores busy than training
        self._window_cpu = self._window_seconds = 0.0
        self.add_wait(seconds)
        if not self._entered:
            small, large = sorted((self.size or nbytes, nbytes))
            if large > _SIMILAR_SIZE * small:
                self.policy = replace(self.policy, sites={})
            self._entered, self.size = True, nbytes
        self.policy = self.policy.with_spent(seconds)
        self.nbytes = nbytes

    def close(self) -> None:
        """Store the measurements for the next run of the same script."""
        self._update_policy()
        make_folder(self.file.parent)
        if self.disk_budget is not None:
            self.disk_budget.close()
        facts = {**self.policy.facts(), "size": self.size}
        publish(self.file, msgspec.json.encode(facts), durable=False)

    def report(self, costs: Costs) -> dict[str, Any]:
        """Return name -> value of the costs of recording that `rearview show` prints; `costs` are those of the writer."""
        computed = self.policy.computed or 1e-9
        return {
            **asdict(costs),
            "skipped": sum(self.refusals.values()),
            "waited": self.total_wait,
            "computed": self.policy.computed,
            "lost": self.lost,
            "overhead": (self.total_wait + self.lost) / computed,
            "skipped_because": dict(self.refusals.most_common(5)),
        }
