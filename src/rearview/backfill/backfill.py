"""Fill missing values of past runs. A `Backfiller` does this in four steps.

1. `missing` finds the runs that lack values, and the statements that log these values.
2. `plan` chooses the segments that must run again, and predicts their cost; nothing runs.
3. `run` runs the segments on an executor, and corrects later predictions by the seconds that replays really took.
4. `report` says which values were filled, and whether the replays were exact.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from rearview.backfill.coverage import SelectedIterations, merge_ranges
from rearview.backfill.examine_run import PreparedRun, Question, RunPreparer, changed_inputs
from rearview.backfill.find_statements import StatementSources
from rearview.backfill.machine_speed import (
    WORTH_MEASURING,
    Machines,
    cores_of,
    read_cost_corrections,
    save_cost_corrections,
)
from rearview.backfill.manual_placement import Corrections
from rearview.backfill.propagation import Probing
from rearview.backfill.reports import (
    BackfillReport,
    Insertion,
    MissingCells,
    PlanReport,
    Refusal,
    Unproved,
)
from rearview.backfill.segment_claims import SegmentClaims
from rearview.backfill.setup_sharing import (
    SharedStages,
    read_obstacles,
    runs_with_earlier_imports,
    save_obstacles,
    shared_stages,
)
from rearview.config import Settings
from rearview.errors import RearviewError, StoreError, UsageError
from rearview.execute.backfill_status import Progress, StatusFile, running_backfills
from rearview.execute.executor import Executor
from rearview.execute.local import FORK_SERVER_SUPPORTED, Local
from rearview.execute.replay_jobs import ReplayJobs, ReplayOutcome
from rearview.execute.run_plan import Pool
from rearview.model import Plan, Run, Segment
from rearview.model.process_messages import ReplayFailure
from rearview.model.wording import plural
from rearview.plan.cost import refine, speed
from rearview.plan.divide_work import divide
from rearview.plan.explain_cost import explain
from rearview.plan.facts import Machine, parse_at
from rearview.plan.survey_work import Survey, survey
from rearview.source.propagate.versions import difference
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.create_files import FULL
from rearview.store.machine_and_process import cores
from rearview.store.project import EVENT_FILES, Project
from rearview.store.recorded_inputs import environment_differences
from rearview.store.runs import Runs
from rearview.store.tables.answer_queries import Tables
from rearview.store.tables.duckdb_connection import quoted
from rearview.store.tables.read_record_files import has_long_lines, recorded_names
from rearview.store.values_as_json import FAMILIES
from rearview.store.versions.versions import Versions

FEW_RUNS = 3
"""Most runs that a message lists by id; for more runs, the message gives only their number."""
MAX_PLACES = 3
"""Most lines at which an added statement is tried in a past version; after each replay that fails, the next is tried."""
GROWTH = 4
"""Most segments per worker into which a plan divides the work so that workers can be added while it runs."""


@dataclass(frozen=True, slots=True)
class MissingValues:
    """Runs that lack requested values, prepared for `Backfiller.plan`, and runs that cannot be replayed."""

    prepared: dict[str, PreparedRun] = field(default_factory=dict)
    """Id of a run -> the prepared run."""
    refusals: list[Refusal] = field(default_factory=list)
    statements: StatementSources | None = None
    """The statements that log the requested names, and the lines at which they are inserted in each version."""
    other_scripts: list[Run] = field(default_factory=list)
    """Runs that are left out because they ran another script than the one that logs the requested names."""


@dataclass(frozen=True, slots=True)
class _PoolResult:
    outcomes: list[ReplayOutcome]
    filled_elsewhere: int
    """Number of segments of the plan that another backfill filled, wholly or in part."""


@dataclass
class Backfiller:
    """Fills missing values in the runs of one project by replaying parts of them."""

    project: Project
    settings: Settings
    runs: Runs
    versions: Versions
    checkpoints: Checkpoints
    tables: Tables

    @cached_property
    def machines(self) -> Machines:
        """The measured speed of this machine and of the machines that recorded runs."""
        return Machines(self.project.cache)

    @cached_property
    def corrections(self) -> Corrections:
        """Where the user put added statements: lines of past versions (`rearview propagate --correct`)."""
        return Corrections(self.project.store / "corrections.json")

    @cached_property
    def _preparer(self) -> RunPreparer:
        return RunPreparer(self.project, self.runs, self.versions, self.checkpoints, self.machines)

    def probing(self, runs: Sequence[Run], sure: float | None = None) -> Probing:
        """Return the `Probing` that inserts the probes of the work tree into the versions of `runs`.

        `sure` is the least confidence, from 0 to 1, of an insertion; it overrides the setting `propagation`.
        """
        least_confidence = self.settings.propagation if sure is None else sure
        return Probing(self.versions, runs, self.corrections, sure=least_confidence)

    def statements(self, runs: Sequence[Run], sure: float | None = None) -> StatementSources:
        """Return the source of log statements for `runs`: the work tree, and past versions for names it does not log.

        `sure` is explained at `probing`.
        """
        return StatementSources(self.probing(runs, sure))

    def backfill(
        self,
        question: Question,
        runs: Sequence[Run],
        progress: Progress | None = None,
        planned: PlanReport | None = None,
    ) -> BackfillReport:
        """Fill the names of `question` in `runs`, and return a report; `planned` is the plan if it was already made."""
        started = time.monotonic()
        if planned is None:
            planned = self.plan(question, self.missing(question, runs))
        result = self.run(planned, question, progress)
        report = self.report(planned, question, result, time.monotonic() - started)
        for _ in range(MAX_PLACES - 1):
            retried = self._try_other_places(question, planned, report, runs, progress)
            if retried is None:
                break
            report, planned = retried
        return replace(report, seconds=time.monotonic() - started)

    def _try_other_places(
        self,
        question: Question,
        planned: PlanReport,
        report: BackfillReport,
        runs: Sequence[Run],
        progress: Progress | None,
    ) -> tuple[BackfillReport, PlanReport] | None:
        """Move each inserted statement at which a replay failed to the next likely line, and replay its runs again.

        Return (report, plan) of both attempts together, or None if no statement was moved. A statement is moved if it
        read a name that does not exist at its line, or logged another kind of value than in other versions. If no
        other line is likely, the run is refused.
        """
        statements = planned.statements
        failed = {
            each.run: each.report
            for each in report.outcomes
            if each.report.failure is ReplayFailure.WRONG_PLACE and each.report.probe is not None
        }
        if statements is None or not failed or not question.names:
            return None
        errors_of_moved: dict[str, str] = {}
        moved_versions: set[str] = set()
        for run in (run for run in runs if run.id in failed):
            prepared, outcome = planned.prepared[run.id], failed[run.id]
            assert outcome.probe is not None
            names = prepared.request.names
            if run.version in moved_versions or (
                statements.is_carried(run, names, prepared.request.probes.source)
                and statements.disprove(run, names, outcome.probe, f"it raised {outcome.raised}")
            ):
                moved_versions.add(run.version)
                errors_of_moved[run.id] = (
                    f"{outcome.probe[0]}:{outcome.probe[1]} raised {outcome.raised}"
                )
        if not errors_of_moved:
            return None
        moved_runs = [run for run in runs if run.id in errors_of_moved]
        replanned = self.plan(question, self.missing(question, moved_runs, statements))
        result = self.run(replanned, question, progress)
        second_report = self.report(replanned, question, result, 0.0)
        replayed_runs = {segment.run for segment in replanned.plan.segments}
        combined_report = replace(
            report,
            outcomes=[
                *(each for each in report.outcomes if each.run not in errors_of_moved),
                *second_report.outcomes,
            ],
            refusals=[*report.refusals, *second_report.refusals],
            replaced=(
                *report.replaced,
                *(
                    f"run {run}: the statement at {error}; it was put at the next likely place"
                    for run, error in errors_of_moved.items()
                    if run in replayed_runs
                ),
            ),
            event_files=tuple(dict.fromkeys((*report.event_files, *second_report.event_files))),
        )
        prepared_runs = {**planned.prepared, **replanned.prepared}
        return combined_report, replace(replanned, prepared=prepared_runs, statements=statements)

    def replay(self, run: Run, question: Question, progress: Progress | None) -> BackfillReport:
        """Replay `run` with its recorded source and the probes of the work tree; report whether it was exact."""
        started = time.monotonic()
        if question.at:
            parse_at(question.at)
        statements = StatementSources(self.probing([run]))
        prepared = self._preparer.prepare(statements, run, (), question)
        planned = self.plan(question, MissingValues({run.id: prepared}))
        result = self.run(planned, question, progress)
        return self.report(planned, question, result, time.monotonic() - started)

    def missing(
        self, question: Question, runs: Sequence[Run], statements: StatementSources | None = None
    ) -> MissingValues:
        """Return those of `runs` that lack values of the names in `question`, prepared for `plan`.

        Only the iterations that `question` selects count. Runs that cannot be replayed are returned as refusals.
        """
        if question.at:
            parse_at(question.at)  # raises if the text is invalid: here once, below for every run
        selected = self._select(question.where, runs)
        if statements is None:
            statements = self.statements(self.runs.all(), question.sure)
        kinds: dict[str, str] | None = None
        recorded = self._recorded_names(question.names, runs)
        result = MissingValues(statements=statements)
        failures: list[tuple[Run, RearviewError]] = []
        for order, run in enumerate(runs):
            names = tuple(name for name in question.names if (run.id, name) not in recorded)
            if not names or (selected is not None and run.id not in selected):
                continue
            iterations = None if selected is None else selected[run.id]
            try:
                prepared = self._preparer.prepare(statements, run, names, question, iterations)
            except RearviewError as exc:
                failures.append((run, exc))
                continue
            if question.runs:  # the user listed the most important run first
                facts = replace(prepared.facts, priority=float(order))
                prepared = replace(prepared, facts=facts)
            source = prepared.request.probes.source
            if recorded and statements.is_carried(run, prepared.request.names, source):
                if kinds is None:
                    kinds = self._value_families({name for _, name in recorded})
                prepared = replace(prepared, request=replace(prepared.request, kinds=kinds))
            result.prepared[run.id] = prepared
        scripts = {each.run.script for each in result.prepared.values()}
        scripts |= {run.script for run in runs if any(run.id == run_id for run_id, _ in recorded)}
        for run, failure in failures:
            if not question.runs and scripts and self._ran_other_script(run, scripts):
                result.other_scripts.append(run)
            else:
                result.refusals.append(Refusal(run.id, str(failure), failure.general))
        return result

    def _value_families(self, names: Collection[str]) -> dict[str, str]:
        """Return name -> kind of its recorded values, such as "a number"; names with several kinds are left out."""
        self.tables.refresh()
        quoted_names = ", ".join(map(quoted, sorted(names)))
        rows = self.tables.sql(
            f"SELECT DISTINCT name, kind FROM records WHERE name IN ({quoted_names}) "  # noqa: S608
            "AND origin = 'recorded'"
        )
        families: dict[str, set[str]] = {}
        for row in rows:
            if row["kind"] in FAMILIES:
                families.setdefault(row["name"], set()).add(FAMILIES[row["kind"]])
        return {
            name: next(iter(of_name)) for name, of_name in families.items() if len(of_name) == 1
        }

    def _ran_other_script(self, run: Run, scripts: Collection[str]) -> bool:
        """Return True if the script of `run` is none of `scripts` and still exists in the project.

        If it does not exist any more, it may have been renamed to one of `scripts`.
        """
        return run.script not in scripts and (self.project.root / run.script).is_file()

    def plan(self, question: Question, missing: MissingValues) -> PlanReport:
        """Return the segments to run to fill the values in `missing`, with their predicted cost; nothing runs."""
        prepared = dict(missing.prepared)
        incomplete = [
            each
            for each in prepared.values()
            if each.request.missing_iterations is None or each.request.missing_iterations
        ]
        if self._may_share_start(question):
            sharing_runs = runs_with_earlier_imports(
                {each.run.id: each.leading_imports for each in incomplete}
            )
            incomplete = [
                each.with_shared_start()
                if each.run.id in sharing_runs
                else each.with_shareable_start()
                for each in incomplete
            ]
            prepared |= {each.run.id: each for each in incomplete}
        surveyed = self._survey(incomplete)
        refusals = [
            *missing.refusals,
            *(Refusal(run, reason, reason) for run, reason in surveyed.refusals),
        ]
        workers = self._workers(question.workers, (each.run for each in incomplete))
        # a question without names is to prove that restoring checkpoints works, so checkpoints must be restored
        rerun = self.settings.rerun and bool(question.names)
        plan = divide(surveyed, workers=workers, budget=question.budget, growth=GROWTH, rerun=rerun)
        replayed_runs = {segment.run for segment in plan.segments}
        shared = SharedStages({})
        if self._may_share_start(question):
            obstacles = read_obstacles(self.project.cache)
            shared = shared_stages(prepared, plan.segments, obstacles)
        return PlanReport(
            plan,
            refusals,
            MissingCells(
                sum(work.cells for work in surveyed.work),
                approximate=any(work.approximate for work in surveyed.work),
                at_least=any(work.at_least for work in surveyed.work),
            ),
            changed_inputs=self._changed_inputs(incomplete),
            environment_differences=self._environment_differences(incomplete),
            notes=[*_rerun_notes(plan), *self._notes(question, missing, incomplete, replayed_runs)],
            unproved=[
                Unproved(run, each.unproved) for run, each in prepared.items() if each.unproved
            ],
            explaining=partial(explain, surveyed, plan, rerun=rerun),
            insertions=_insertions(
                missing.statements, [each for run, each in prepared.items() if run in replayed_runs]
            ),
            prepared=prepared,
            statements=missing.statements,
            shared=shared,
        )

    def run(
        self, planned: PlanReport, question: Question, progress: Progress | None
    ) -> _PoolResult:
        """Run the segments of a plan, and return their outcomes.

        The records and the verdict of each segment are stored as soon as it ends.
        """
        segments, prepared = planned.plan.segments, planned.prepared
        local = question.on == "local"
        replays = ReplayJobs(self.project, self.versions, self.runs, fold=local)
        import_counts = Counter(
            prepared[segment.run].leading_imports
            for segment in segments
            if self._may_share_start(question)
        )
        shared = {
            leading for leading, count in import_counts.items() if leading is not None and count > 1
        }
        runs = {segment.run: prepared[segment.run].run for segment in segments}
        executor = self._executor(question, runs.values())
        with StatusFile(self.project, question.names, question.on).open() as status:
            stages = planned.shared.stages
            claims = SegmentClaims(replays, status, prepared, segments, shared, stages)
            pool = Pool(replays, executor, claims, progress, status)
            try:
                outcomes = pool.run(segments, runs)
            except OSError as exc:
                if exc.errno in FULL:
                    raise self._disk_full(exc) from exc
                raise
        self._correct_predictions(claims.planned, outcomes, prepared)
        # only `Local` runs shared set-ups and says why one could not be shared
        if unshared := getattr(executor, "unshared", None):
            save_obstacles(self.project.cache, unshared)
        return _PoolResult(outcomes, len(pool.filled_elsewhere))

    def report(
        self, planned: PlanReport, question: Question, result: _PoolResult, seconds: float
    ) -> BackfillReport:
        """Return the report on a backfill that took `seconds` and had the outcomes in `result`."""
        runs = {segment.run for segment in planned.plan.segments}
        return BackfillReport(
            outcomes=result.outcomes,
            refusals=planned.refusals,
            seconds=seconds,
            recorded_seconds=sum(float(planned.prepared[run].run.end.seconds) for run in runs),
            elsewhere=result.filled_elsewhere,
            environment_differences=planned.environment_differences,
            names=tuple(question.names),
            event_files=self._event_files(result.outcomes),
        )

    def _event_files(self, outcomes: Sequence[ReplayOutcome]) -> tuple[str, ...]:
        """Return the folders with TensorBoard event files that the replays in `outcomes` wrote, one for each run."""
        folder = self.project.store / EVENT_FILES
        runs = {each.run for each in outcomes if (folder / each.run / each.replay).is_dir()}
        return tuple(str(folder / run) for run in sorted(runs))

    def _select(
        self, where: str | None, runs: Sequence[Run]
    ) -> dict[str, SelectedIterations | None] | None:
        """Return run id -> iterations that the SQL condition `where` selects; runs without any are left out.

        A value of None means all iterations of the run. If `where` is None, return None for all runs.
        """
        if where is None:
            return None
        self.tables.refresh()
        selected: dict[str, SelectedIterations | None] = {}
        spans = [
            span
            for skip in (0, 1)
            if (run_ids := [run.id for run in runs if run.has_cells == bool(skip)])
            for span in self.tables.iteration_ranges(where, run_ids, skip=skip)
        ]
        for span in spans:
            iterations = selected.setdefault(span.run, {})
            if not span.loops:
                selected[span.run] = None
            elif iterations is not None:
                iterations[span.outer] = merge_ranges(iterations.get(span.outer), span)
        return selected

    def _recorded_names(self, names: Sequence[str], runs: Sequence[Run]) -> set[tuple[str, str]]:
        """Return (run id, name) for each of `names` that one of `runs` logged when it was recorded."""
        folders = {run.id: self.runs.folder(run.id) for run in runs}
        if any(map(has_long_lines, folders.values())):
            self.tables.refresh()  # seals the record files, which are then read faster
        return {
            (run, name)
            for run, folder in folders.items()
            for name in recorded_names(folder).intersection(names)
        }

    def _survey(self, incomplete: Sequence[PreparedRun]) -> Survey:
        """Return the work that must run again in the `incomplete` runs, with predicted seconds.

        This machine is measured first if that makes predictions better and is worth the time.
        """
        corrections = read_cost_corrections(self.project.cache, self.machines.name)
        questions = [each.question() for each in incomplete]
        this_machine = self.machines.this_machine()
        surveyed = survey(questions, machine=this_machine, corrections=corrections)
        if self._is_worth_measuring(surveyed, this_machine):
            surveyed = survey(questions, machine=self.machines.measure(), corrections=corrections)
        return surveyed

    def _is_worth_measuring(self, surveyed: Survey, this_machine: Machine) -> bool:
        """Return True if the speed of this machine should be measured before the plan is shown.

        A short plan needs no measurement if all its runs were recorded on this machine.
        """
        recorded_elsewhere = any(
            work.facts.machine and work.facts.machine.name != this_machine.name
            for work in surveyed.work
        )
        long = sum(work.seconds for work in surveyed.work) > WORTH_MEASURING
        return (recorded_elsewhere or long) and self.machines.due()

    def _notes(
        self,
        question: Question,
        missing: MissingValues,
        incomplete: Sequence[PreparedRun],
        replayed_runs: set[str],
    ) -> list[str]:
        """Return sentences that the user should read before the plan runs, such as which runs are left out."""
        notes: list[str] = []
        if missing.other_scripts:
            scripts = ", ".join(sorted({run.script for run in missing.other_scripts}))
            notes.append(
                f"{plural(len(missing.other_scripts), 'run')} of {scripts} left out: the statement is in "
                "another script"
            )
        if missing.statements is not None:
            if replayed_runs or missing.refusals:
                notes += map(str, missing.statements.used)
            with_probes = [
                (each.run.version, each.request.probes)
                for run, each in missing.prepared.items()
                if run in replayed_runs
            ]
            if with_probes:
                notes += missing.statements.probing.renaming.sentences(with_probes)
            if self.corrections.note:
                notes.append(self.corrections.note)
        notes += self.machines.unmeasured(each.run for each in incomplete)
        if incomplete:
            notes += self._simultaneous_backfills(question.names)
        return notes

    def _simultaneous_backfills(self, names: Sequence[str]) -> list[str]:
        """Return a sentence for each other backfill that is running and fills some of `names`."""
        return [
            f"backfill {running.id} is filling {', '.join(common)} now; its cells are not filled twice"
            for running in running_backfills(self.project)
            if (common := [name for name in names if name in running.names])
        ]

    def _changed_inputs(self, prepared: Iterable[PreparedRun]) -> list[str]:
        """Return a sentence for each input file that changed after runs in `prepared` read it."""
        runs_by_path: dict[str, list[str]] = {}
        for each in prepared:
            for path in changed_inputs(each.run, *self._preparer.stored_files(each.run)):
                runs_by_path.setdefault(str(path), []).append(each.run.id)
        return [f"{path} is not what {_listed(runs)} read" for path, runs in runs_by_path.items()]

    def _environment_differences(self, prepared: Iterable[PreparedRun]) -> list[str]:
        """Return a phrase for each environment variable that runs in `prepared` read with another value than now."""
        runs_by_phrase: dict[str, list[str]] = {}
        for each in prepared:
            for phrase in environment_differences(self.runs.folder(each.run.id), os.environ):
                runs_by_phrase.setdefault(phrase, []).append(each.run.id)
        return [f"{phrase} ({_listed(runs)})" for phrase, runs in sorted(runs_by_phrase.items())]

    def _may_share_start(self, question: Question) -> bool:
        """Return True if replays whose programs begin with equal imports may be forked from one process."""
        return self.settings.shared_start and question.on == "local" and FORK_SERVER_SUPPORTED

    def _workers(self, workers: int | None, runs: Iterable[Run]) -> int:
        """Return how many replays of `runs` run at once; `workers` is the number that the user asked for.

        The default is the number of cores divided by the most cores that one of `runs` used.
        """
        cores_per_run = max(map(cores_of, runs), default=1)
        return workers or self.settings.workers or max(1, cores() // cores_per_run)

    def _executor(self, question: Question, runs: Iterable[Run]) -> Executor:
        if question.on == "local":
            return Local(self._workers(question.workers, runs))
        if question.on == "ray":
            from rearview.execute.ray import Ray  # imports ray

            gpus = self.settings.gpus if question.gpus is None else question.gpus
            return Ray(question.workers, gpus=gpus)
        raise UsageError(
            f"There is no executor {question.on!r}. Use `local` or `ray`.", slug="no-executor"
        )

    def _disk_full(self, exc: OSError) -> StoreError:
        return StoreError(
            f"The disk of {self.project.store} is full: {exc.strerror}. What was filled so far is "
            "kept. Free some space (`rearview gc --dry-run` shows what it would free) and run the "
            "backfill again: it continues where it stopped.",
            slug="disk-full",
        )

    def _correct_predictions(
        self,
        planned: Mapping[str, Segment],
        outcomes: Sequence[ReplayOutcome],
        prepared: Mapping[str, PreparedRun],
    ) -> None:
        """Store how the real seconds of replays compare with the predicted seconds, to correct later predictions.

        `planned` is replay id -> segment, for replays that ran a whole segment. Replays may save seconds because they
        are forked after the imports. The seconds really saved are added to the real seconds, and the seconds that were
        expected to be saved are subtracted.
        """
        cache, machine = self.project.cache, self.machines.name
        corrections = read_cost_corrections(cache, machine)
        this_machine = self.machines.this_machine()
        for outcome in outcomes:
            segment = planned.get(outcome.replay.removesuffix("-again"))
            if segment and outcome.report.finished and not outcome.report.error:
                each = prepared[segment.run]
                expected = each.spared * speed(each.facts.machine, this_machine).compute
                real = outcome.seconds + outcome.report.spared - expected
                corrections = refine(corrections, segment, real)
        save_cost_corrections(cache, machine, corrections)


def _rerun_notes(plan: Plan) -> list[str]:
    """Return a sentence about the runs that the plan runs again from the start, without restoring checkpoints."""
    runs = [segment.run for segment in plan.segments if segment.rerun]
    if not runs:
        return []
    verb, each = ("run", " each") if len(runs) > 1 else ("runs", "")
    why = "restoring checkpoints would not be noticeably faster"
    return [f"{_listed(runs)} {verb} again from the start, in one process{each}: {why}"]


def _listed(runs: Sequence[str]) -> str:
    return f"run {', '.join(runs)}" if len(runs) <= FEW_RUNS else f"{len(runs)} runs"


def _insertions(
    statements: StatementSources | None, prepared: Sequence[PreparedRun]
) -> list[Insertion]:
    """Return the statements that are inserted into the source of each run, as diffs; equal diffs are listed once."""
    if statements is None:
        return []
    runs: dict[str, list[str]] = {}
    for each in prepared:
        old = statements.probing.text(each.run.version)
        source = each.request.probes.source
        changed = {path: text for path, text in source.items() if text != old.get(path)}
        diff = difference({**dict.fromkeys(changed, ""), **old}, changed)
        runs.setdefault(diff, []).append(each.run.id)
    return [Insertion(tuple(run_ids), diff) for diff, run_ids in runs.items() if diff]
