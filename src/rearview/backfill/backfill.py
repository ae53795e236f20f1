"""Fill what is missing: a question becomes a plan, the plan runs, the verdicts are kept."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from rearview.backfill.calibration import (
    WORTH,
    Machines,
    cores_of,
    keep_corrections,
    read_corrections,
)
from rearview.backfill.claims import Turns
from rearview.backfill.corrections import Corrections
from rearview.backfill.coverage import Chosen, joined
from rearview.backfill.prepare import Preparing, Question, changed
from rearview.backfill.propagation import Probing
from rearview.backfill.reports import (
    BackfillReport,
    Insertion,
    Missing,
    PlanReport,
    Refusal,
    Unproved,
)
from rearview.backfill.segments import Prepared
from rearview.backfill.shared_imports import following
from rearview.config import Settings
from rearview.errors import RearviewError, StoreError, UsageError
from rearview.execute.executor import Executor
from rearview.execute.local import OFFERED, Local
from rearview.execute.pool import Pool
from rearview.execute.replay_jobs import ReplayOutcome, Replays
from rearview.execute.status import Post, Progress, under_way
from rearview.model import Run, Segment
from rearview.plan.cost import refine, speed
from rearview.plan.explain import explain
from rearview.plan.facts import Machine, parse_at
from rearview.plan.replay import Survey, survey
from rearview.plan.schedule import divide
from rearview.source.propagate.versions import difference
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.machine import cores
from rearview.store.project import EVENT_FILES, Project
from rearview.store.recorded_inputs import environment_differences
from rearview.store.runs import Runs
from rearview.store.tables.connection import quoted
from rearview.store.tables.tables import Tables
from rearview.store.versions.versions import Versions

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
FEW = 3
"""Runs that are named one by one."""
GROWTH = 4
"""How many times the workers a plan has work for, where that costs next to nothing."""


@dataclass
class Filling:
    """Answers questions about one project by replaying."""

    project: Project
    settings: Settings
    runs: Runs
    versions: Versions
    checkpoints: Checkpoints
    tables: Tables

    @cached_property
    def machines(self) -> Machines:
        """What is known of how fast machines are."""
        return Machines(self.project.cache)

    @cached_property
    def _preparing(self) -> Preparing:
        return Preparing(self.project, self.runs, self.versions, self.checkpoints, self.machines)

    def probing(self, runs: Sequence[Run]) -> Probing:
        """Return the probes in the work tree, as the versions of `runs` take them."""
        return Probing(self.versions, runs, self.corrections, sure=self.settings.propagation)

    @cached_property
    def corrections(self) -> Corrections:
        """Places that the user gave to statements."""
        return Corrections(self.project.store / "corrections.json")

    def plan(self, asked: Question) -> PlanReport:
        """Return what has to run again, and each run with what is wanted of it."""
        if asked.at:
            parse_at(asked.at)  # a form that cannot be read is wrong for every run
        meant = self._meant(asked.where, asked.runs)
        probing = self.probing(self.runs.all())
        logged = self._logged(asked.names)
        refusals: list[Refusal] = []
        prepared: dict[str, Prepared] = {}
        for order, run in enumerate(asked.runs):
            lacking = tuple(name for name in asked.names if (run.id, name) not in logged)
            if not lacking or (meant is not None and run.id not in meant):
                continue
            try:
                only = None if meant is None else meant[run.id]
                one = self._preparing.of(probing, run, lacking, asked, only)
                if asked.ordered:
                    one = replace(one, facts=replace(one.facts, priority=float(order)))
                prepared[run.id] = one
            except RearviewError as exc:
                refusals.append(Refusal(run.id, str(exc)))
        report = self._report(prepared, refusals, asked)
        if self.corrections.note:
            report = replace(report, notes=[self.corrections.note, *report.notes])
        again = {segment.run for segment in report.plan.segments}
        taken = [(one.run.version, one.probes) for run, one in prepared.items() if run in again]
        if not taken:
            return report
        return replace(
            report,
            notes=[*probing.renaming.told(taken), *report.notes],
            insertions=_insertions(probing, [prepared[run] for run in prepared if run in again]),
        )

    def replay(
        self, run: Run, at: str | None, workers: int | None, progress: Progress | None
    ) -> BackfillReport:
        """Replay a run as it was recorded, with any probes of the work tree, and prove it."""
        begun = time.monotonic()
        if at:
            parse_at(at)
        asked = Question((), (run,), at=at, workers=workers)
        one = self._preparing.of(self.probing([run]), run, (), asked)
        report = self._report({run.id: one}, [], asked)
        return self.carry_out(report, asked, progress, begun)

    def _report(
        self, prepared: dict[str, Prepared], refusals: list[Refusal], asked: Question
    ) -> PlanReport:
        """Return the plan for what is prepared, with its cost."""
        lacking = [one for one in prepared.values() if one.missing is None or one.missing]
        if self._shares(asked):
            after = following({one.run.id: one.lead for one in lacking})
            lacking = [one.led() if one.run.id in after else one for one in lacking]
            prepared |= {one.run.id: one for one in lacking}
        known = read_corrections(self.project.cache, self.machines.name)
        questions = [one.question() for one in lacking]
        here = self.machines.here()
        found = survey(questions, here=here, known=known)
        if self._worth_measuring(found, here):
            found = survey(questions, here=self.machines.measure(), known=known)
        refusals += [Refusal(run, reason) for run, reason in found.refusals]
        workers = self._workers(asked.workers, (one.run for one in lacking))
        plan = divide(found, workers=workers, budget=asked.budget, growth=GROWTH)
        missing = Missing(
            sum(work.cells for work in found.work),
            about=any(work.about for work in found.work),
            least=any(work.least for work in found.work),
        )
        inputs = sorted(
            {text for one in lacking for text in changed(*self._preparing.kept(one.run))}
        )
        notes = self.machines.unmeasured(one.run for one in lacking)
        notes += self._beside(asked.names) if lacking else []
        explaining = partial(explain, found, plan)
        unproved = [Unproved(run, one.unproved) for run, one in prepared.items() if one.unproved]
        return PlanReport(
            *(plan, refusals, missing, inputs, self._differing_environment(lacking)),
            *(notes, unproved, explaining),
            prepared=prepared,
        )

    def _differing_environment(self, prepared: Iterable[Prepared]) -> list[str]:
        """Return which variables differ from those that runs read, each phrase once."""
        found: dict[str, list[str]] = {}
        for one in prepared:
            for phrase in environment_differences(self.runs.folder(one.run.id), os.environ):
                found.setdefault(phrase, []).append(one.run.id)
        return [f"{phrase} ({_named(runs)})" for phrase, runs in sorted(found.items())]

    def _beside(self, names: Sequence[str]) -> list[str]:
        """Return a sentence for each backfill under way that fills some of the same names."""
        return [
            f"backfill {crew.id} is filling {', '.join(both)} now; what it does is not done twice"
            for crew in under_way(self.project)
            if (both := [name for name in names if name in crew.names])
        ]

    def _worth_measuring(self, found: Survey, here: Machine) -> bool:
        """Say whether this machine is to be measured before the plan is shown.

        A short plan for runs of this machine needs no measurement.
        """
        elsewhere = any(w.facts.machine and w.facts.machine.name != here.name for w in found.work)
        worth = elsewhere or sum(work.seconds for work in found.work) > WORTH
        return worth and self.machines.due()

    def _workers(self, workers: int | None, runs: Iterable[Run]) -> int:
        """Return how many replays to run at once: as many as there are cores for, if not told."""
        needed = max(map(cores_of, runs), default=1)
        return workers or self.settings.workers or max(1, cores() // needed)

    def _logged(self, names: Sequence[str]) -> set[tuple[str, str]]:
        """Return (run, name) for what runs logged themselves."""
        self.tables.refresh()
        if not names or not set(names) & set(self.tables.names()):
            return set()
        some = ", ".join(map(quoted, names))
        rows = self.tables.sql(
            "SELECT DISTINCT run, name FROM records "  # noqa: S608
            f"WHERE origin = 'recorded' AND name IN ({some})"
        )
        return {(row["run"], row["name"]) for row in rows}

    def _meant(self, where: str | None, runs: Sequence[Run]) -> dict[str, Chosen | None] | None:
        """Return the runs, and iterations in them, that a predicate selects."""
        if where is None:
            return None
        self.tables.refresh()
        found: dict[str, Chosen | None] = {}
        for one in self.tables.stretches(where, [run.id for run in runs]):
            known = found.setdefault(one.run, {})
            if not one.loops:
                found[one.run] = None
            elif known is not None:
                known[one.outer] = joined(known.get(one.outer), one)
        return found

    def carry_out(
        self,
        report: PlanReport,
        asked: Question,
        progress: Progress | None,
        begun: float,
    ) -> BackfillReport:
        """Run a plan, keep its verdicts, and say what it did."""
        replays = Replays(self.project, self.versions, self.runs)
        segments, prepared = report.plan.segments, report.prepared
        firsts = {segment.run: segment for segment in reversed(segments)}
        leads = Counter(prepared[one.run].lead for one in segments if self._shares(asked))
        alike = {lead for lead, count in leads.items() if lead is not None and count > 1}
        executor = self._executor(asked, [prepared[one].run for one in firsts])
        with Post(self.project, asked.names, asked.on).open() as post:
            turns, pool = Turns(replays, post, alike), Pool(replays, executor, progress, post)
            pieces = [
                turns.piece(prepared[one.run], one, first=firsts[one.run] is one)
                for one in segments
            ]
            try:
                outcomes = pool.carry_out(pieces)
            except OSError as exc:
                if exc.errno in FULL:
                    raise self._full(exc) from exc
                raise
        self._learn(turns.planned, outcomes, prepared)
        return BackfillReport(
            outcomes=outcomes,
            refusals=report.refusals,
            seconds=time.monotonic() - begun,
            recorded_seconds=sum(
                float(prepared[run].run.facts.get("end", {}).get("seconds", 0.0))
                for run in {segment.run for segment in segments}
            ),
            elsewhere=len(pool.elsewhere),
            environment_differences=report.environment_differences,
            names=tuple(asked.names),
            event_files=self._event_files(outcomes),
        )

    def _event_files(self, outcomes: Sequence[ReplayOutcome]) -> tuple[str, ...]:
        """Return the folders in which replays left event files, one for each run."""
        place = self.project.store / EVENT_FILES
        runs = {one.run for one in outcomes if (place / one.run / one.replay).is_dir()}
        return tuple(str(place / run) for run in sorted(runs))

    def _shares(self, asked: Question) -> bool:
        """Say whether replays that begin alike may share their start."""
        return self.settings.shared_start and asked.on == "local" and OFFERED

    def _full(self, exc: OSError) -> StoreError:
        return StoreError(
            f"The disk of {self.project.store} is full: {exc.strerror}. What was filled so far is "
            "kept. Free some space (`rearview gc --dry-run` shows what it would free) and ask "
            "again: the backfill goes on where it stopped.",
            slug="disk-full",
        )

    def _learn(
        self,
        planned: Mapping[str, Segment],
        outcomes: Sequence[ReplayOutcome],
        prepared: Mapping[str, Prepared],
    ) -> None:
        """Let what replays really took correct the next predictions.

        A start that was shared, or was expected to be, counts as it was predicted.
        """
        cache, machine = self.project.cache, self.machines.name
        known = read_corrections(cache, machine)
        here = self.machines.here()
        for outcome in outcomes:
            segment = planned.get(outcome.replay.removesuffix("-again"))
            if segment and outcome.report.finished and not outcome.report.error:
                one = prepared[segment.run]
                expected = one.spared * speed(one.facts.machine, here).compute
                real = outcome.seconds + outcome.report.spared - expected
                known = refine(known, segment, real)
        keep_corrections(cache, machine, known)

    def _executor(self, asked: Question, runs: Iterable[Run]) -> Executor:
        if asked.on == "local":
            return Local(self._workers(asked.workers, runs))
        if asked.on == "ray":
            from rearview.execute.ray import Ray

            gpus = self.settings.gpus if asked.gpus is None else asked.gpus
            return Ray(asked.workers, gpus=gpus)
        raise UsageError(
            f"There is no executor {asked.on!r}. Use `local` or `ray`.", slug="no-executor"
        )


def _named(runs: Sequence[str]) -> str:
    return f"run {', '.join(runs)}" if len(runs) <= FEW else f"{len(runs)} runs"


def _insertions(probing: Probing, prepared: Sequence[Prepared]) -> list[Insertion]:
    """Return what is put into the source of runs, told once for those with the same source."""
    runs: dict[str, list[str]] = {}
    for one in prepared:
        old = probing.text(one.run.version)
        changed = {p: t for p, t in one.probes.source.items() if t != old.get(p)}
        runs.setdefault(difference({**dict.fromkeys(changed, ""), **old}, changed), []).append(
            one.run.id
        )
    return [Insertion(tuple(those), diff) for diff, those in runs.items() if diff]
