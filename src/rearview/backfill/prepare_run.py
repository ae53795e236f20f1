"""A `Question`, and one run prepared to answer it: its probes, its measurements, the values it lacks."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TypedDict

from rearview.backfill.coverage import (
    CoverageQuery,
    SelectedIterations,
    inner_spans,
    is_unproved,
    missing_values,
)
from rearview.backfill.machine_speed import Machines
from rearview.backfill.obstacles import (
    logged_in_unparsable_file,
    logged_outside_project,
    missing_input,
    missing_packages,
    script_is_gone,
)
from rearview.backfill.run_facts import RunRequest, run_facts, with_run_loop_ids
from rearview.backfill.shared_setup import Lead, SetupText, import_seconds, lead_of, setup_text
from rearview.backfill.statement_sources import StatementSources
from rearview.errors import UsageError
from rearview.model import Run, Status
from rearview.model.run import columns_of, is_notebook, name_of
from rearview.plan.facts import At, LoopFacts, RunFacts, RunQuestion, ValueRequest, parse_at
from rearview.source.log_calls import names_logged
from rearview.source.notebooks import as_programs, divide_into_cells, with_text
from rearview.source.probes.loop_carried import START
from rearview.source.probes.probe import Position, Probe, Probes, logging_fingerprint
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project
from rearview.store.runs import Replay, Runs
from rearview.store.versions.versions import Versions


class Choices(TypedDict, total=False):
    """Keyword arguments of a question; `Question` explains each."""

    runs: Sequence[str] | None
    where: str | None
    at: str | None
    workers: int | None
    budget: float | None
    on: str
    gpus: float | None
    again: bool
    sure: float | None


@dataclass(frozen=True, slots=True)
class Question:
    """Which names are to have values, in which runs and iterations, and how replays may run."""

    names: Sequence[str]
    runs: Sequence[str] | None = None
    """Runs as the user names them, in the order in which their values are needed; None: all runs."""
    where: str | None = None
    """SQL condition on runs or rows: `acc < 0.9`."""
    at: str | None = None
    """Iterations: `epoch=3:5`."""
    workers: int | None = None
    """Replays at once; None: as many as there are cores for."""
    budget: float | None = None
    """Seconds of computing that the plan may take."""
    on: str = "local"
    """Executor: `local` or `ray`."""
    gpus: float | None = None
    """Accelerators that each segment gets on Ray; 0.5 for half of one."""
    again: bool = False
    """Also fill values again that could not be proved."""
    sure: float | None = None
    """Least certainty of a statement's place in a past version; None: the setting `propagation`."""


FORK_SECONDS = 0.04
"""Seconds that a replay takes to start if it is forked from a process that has its imports."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A request for one run, with the facts of the run that the planner needs."""

    request: RunRequest
    facts: RunFacts
    ended_replays: frozenset[str] = frozenset()
    """Replays that had ended when the run was prepared."""
    unproved: tuple[str, ...] = ()
    """Names with values that cannot be proved, because the run recorded nothing to compare with."""
    lead: Lead | None = None
    """How its replays start; None if they cannot share their start with others."""
    setup: SetupText = field(default_factory=SetupText)
    """The statements before its main loop, to compare with those of other runs."""
    setup_seconds: float = 0.0
    """Seconds of its set-up, without the imports of `lead`."""
    spared: float = 0.0
    """Seconds that `facts` leave out because the start will be shared."""

    @property
    def run(self) -> Run:
        """The run that the request is for."""
        return self.request.run

    def with_shared_start(self) -> PreparedRun:
        """Return the run without the seconds of its start that are saved by sharing it."""
        if self.lead is None:
            return self
        start, imports = self._shareable(self.lead)
        shorter = replace(
            self.facts, start=self.facts.start - start, setup=self.facts.setup - imports
        )
        return replace(self, facts=shorter, spared=start + imports)

    def with_shareable_start(self) -> PreparedRun:
        """Return the run with the seconds of its start that several of its processes can share."""
        if self.lead is None:
            return self
        return replace(self, facts=replace(self.facts, shareable=sum(self._shareable(self.lead))))

    def _shareable(self, lead: Lead) -> tuple[float, float]:
        """Return the seconds of interpreter start and of imports that a forked process saves."""
        imports = min(import_seconds(self.run, lead), self.facts.setup)
        return self.facts.start - min(self.facts.start, FORK_SECONDS), imports

    def question(self) -> RunQuestion:
        """Return the question for the planner."""
        request = self.request
        if not request.requested:
            return RunQuestion(
                self.facts, (ValueRequest((), self._deepest_loops(), at=request.at),)
            )
        if not request.main_entered_once and not request.at:
            return RunQuestion(self.facts, (self._until_the_end(),))
        requests: list[ValueRequest] = []
        for probe in request.requested:
            if not probe.paths:
                # no caller of its function is known: it may be called after the loops
                requests.append(self._until_the_end())
            paths = probe.paths or (self._deepest_loops(),)
            requests.extend(self._request(probe, path) for path in paths)
        return RunQuestion(self.facts, tuple(requests))

    def _request(self, probe: Probe, path: tuple[str, ...]) -> ValueRequest:
        """Return the request for a statement inside the loops `path`."""
        request = self.request
        main = self.facts.loops[0].name if self.facts.loops else None
        if path and path[0] != main and not (main is None and request.at):
            # in another loop than the main one, or in a coroutine, which cannot be divided:
            # run to the end and skip the main loop
            other = tuple(at for at in request.at if at.loop not in columns_of(path))
            return self._until_the_end(other)
        depth = len(path) - len(probe.loops) + probe.depth
        return ValueRequest(
            names=request.names,
            loops=path,
            place=self._position(probe, path),
            depth=-1 if probe.depth == START else depth,
            feeds=bool(probe.feeding_loops),
            at=request.at,
            missing=request.missing,
            within=request.coverage.within,
        )

    def _until_the_end(self, at: tuple[At, ...] = ()) -> ValueRequest:
        """Return a request for values that may be logged anywhere up to the end of the run."""
        return ValueRequest(
            self.request.names,
            (),
            Position.AFTER.value,
            at=at,
            missing=self.request.missing,
            several=True,
        )

    def _position(self, probe: Probe, path: tuple[str, ...]) -> str:
        """Return where a statement is among the loops inside `path`.

        Inner loops in functions that its function calls are not seen in the text, but the run had
        them: the statement may be before or after them.
        """
        if not path:
            return (Position.BEFORE if probe.runs_first else Position.AFTER).value
        if probe.place is Position.ALONE and 0 < len(path) < len(self.facts.loops):
            return Position.BETWEEN.value
        return probe.place.value

    def _deepest_loops(self) -> tuple[str, ...]:
        """Return the loops that may be around a statement whose callers are not known."""
        return tuple(loop.name for loop in self.facts.loops[:2])


@dataclass
class RunPreparer:
    """Prepares the runs of one project."""

    project: Project
    runs: Runs
    versions: Versions
    checkpoints: Checkpoints
    machines: Machines
    _digests: dict[tuple[str, str], str] = field(default_factory=dict)

    def prepare(
        self,
        statements: StatementSources,
        run: Run,
        names: tuple[str, ...],
        question: Question,
        selected: SelectedIterations | None = None,
    ) -> PreparedRun:
        """Return a run with the values of `names` that it lacks, in the `selected` iterations (None: all)."""
        _refuse_if_two_sources(run)
        probes = self._probes(statements, run, names)
        logging_probes = tuple(probe for probe in probes.probes if probe.names)
        recorded_files = self.versions.files(run.version)
        version, files = self._derived_version(run, dict(probes.source), recorded_files)
        executed = run.end.files or [run.script]
        facts = run_facts(
            run,
            version,
            self.checkpoints.of(run.id),
            blocked=missing_input(run, *self.stored_files(run))
            or missing_packages(as_programs(recorded_files), executed),
            machine=self.machines.of(run),
        )
        coverage = self._coverage_query(run, version, facts, probes, names, question, selected)
        digest_of = partial(self._digest, version, probes)
        replays = self.runs.replays(run.id)
        iterations = _selected_iterations(
            coverage.at, facts.loops[0] if facts.loops else None, selected
        )
        find_missing = partial(
            missing_values, replays=replays, probes=probes, digest_of=digest_of, selected=iterations
        )
        unproved = self._unproved_names(coverage, replays, names, find_missing)
        names, missing = find_missing(coverage, names=names)
        if names:
            logging_probes = tuple(
                dict.fromkeys(probe for name in names for probe in probes.of(name))
            )
        if selected is not None:
            missing = frozenset(selected if missing is None else selected.keys() & missing)
        request = RunRequest(
            *(run, version, probes, logging_probes, names, coverage, missing),
            digests={name: digest_of(name) for name in names},
        )
        home = run.home(os.path.realpath(self.project.root))
        lead = lead_of(run, files, home)
        return PreparedRun(
            request,
            facts,
            ended_replays=frozenset(replay.id for replay in replays if replay.ended is not None),
            unproved=unproved,
            lead=lead,
            setup=setup_text(run, files, home) if lead is not None else SetupText(),
            setup_seconds=facts.setup - (import_seconds(run, lead) if lead is not None else 0.0),
        )

    def _probes(self, statements: StatementSources, run: Run, names: tuple[str, ...]) -> Probes:
        """Return the probes for a run; raise if no probe logs one of `names`."""
        probes = statements.of(run, names)
        unknown = [name for name in names if not probes.of(name)]
        if unknown:
            text = _no_probe_text(unknown[0], run, names_logged(statements.edited)).format
            hint = script_is_gone(run, self.project.root)
            hint += logged_in_unparsable_file(unknown[0], statements.edited)
            hint += logged_outside_project(unknown[0], self.project.root)
            raise UsageError(
                text(run=f"run {run.id}") + hint,
                general=text(run="the run") + hint,
                slug="no-probe",
            )
        return with_run_loop_ids(probes, run)

    def _coverage_query(
        self,
        run: Run,
        version: str,
        facts: RunFacts,
        probes: Probes,
        names: tuple[str, ...],
        question: Question,
        selected: SelectedIterations | None,
    ) -> CoverageQuery:
        entered_once = run.end.main.alone
        loop = facts.loops[0] if facts.loops else None
        main = loop.name if loop is not None and entered_once else None
        return CoverageQuery(
            version,
            main=main,
            count=len(loop.seconds) if loop is not None else 0,
            at=tuple(parse_at(question.at)) if question.at else (),
            settled=math.inf if question.again else self._last_recorded(run),
            within=inner_spans(selected, probes, names, facts.loops) if selected and main else None,
        )

    def _unproved_names(
        self,
        coverage: CoverageQuery,
        replays: Sequence[Replay],
        names: tuple[str, ...],
        find_missing: partial[tuple[tuple[str, ...], frozenset[int] | None]],
    ) -> tuple[str, ...]:
        """Return the names with values that count although they are not proved: nothing can prove them."""
        if coverage.settled == math.inf or not any(map(is_unproved, replays)):
            return ()
        strict = replace(coverage, settled=math.inf)
        return tuple(
            name
            for name in names
            if find_missing(coverage, names=(name,)) != find_missing(strict, names=(name,))
        )

    def _last_recorded(self, run: Run) -> float:
        """Return when a run recorded its last value; `inf` if it may still record."""
        if run.status is Status.RUNNING or run.ended is not None:
            return math.inf if run.ended is None else run.ended
        try:
            return (self.runs.folder(run.id) / "heartbeat").stat().st_mtime
        except OSError:
            return math.inf

    def _digest(self, version: str, probes: Probes, name: str) -> str:
        """Return a digest of how `name` is logged, computed once for each version."""
        digest = self._digests.get((version, name))
        if digest is None:
            digest = self._digests[version, name] = logging_fingerprint(probes, name)
        return digest

    def _derived_version(
        self, run: Run, source: dict[str, str], recorded: Mapping[str, bytes]
    ) -> tuple[str, Mapping[str, bytes]]:
        """Return the version of a run with its probes in it, and its files."""
        programs = as_programs(recorded)
        changes = {}
        for path, text in source.items():
            if programs.get(path) == text.encode():
                continue
            home = path.removesuffix(".py")
            if is_notebook(home) and home in recorded:
                divided = divide_into_cells(programs[path].decode(), text, home)
                changes[home] = with_text(recorded[home], divided, home)
            else:
                changes[path] = text.encode()
        if not changes:
            return run.version, recorded
        return self.versions.derive(run.version, changes), {**recorded, **changes}

    def stored_files(self, run: Run) -> tuple[Path, set[str]]:
        """Return the project's folder, and the files that are stored with the source of a run."""
        stored = set(self.versions.hashes(run.version)) if run.version else set()
        return self.project.root.resolve(), stored


def _no_probe_text(name: str, run: Run, logged: Collection[str]) -> str:
    """Return why nothing can be filled for a name that no statement of the work tree logs."""
    lower_case = {each.lower(): each for each in logged}
    if near := get_close_matches(name.lower(), lower_case, n=1):
        return f"{name}: no statement logs this. Did you mean `rearview backfill {lower_case[near[0]]}`?"
    if name in run.end.captured.get("names", {}):
        return (
            f"{{run}} has {name} already, captured from a variable of that name: `rearview table {name}` "
            "shows it, and nothing has to run again."
        )
    if name.endswith(".py"):
        return (
            f"{name} is a file. Give the name that a log statement in it logs: for "
            "rearview.log('grad_norm', value) write `rearview backfill grad_norm`."
        )
    if "," in name:
        return f"{name}: separate names by spaces: `rearview backfill {' '.join(name.split(','))}`."
    return (
        f"{name}: nothing in the newest source logs this beyond what {{run}} logged. Add the statement "
        f"rearview.log({name!r}, value) to the script where the value is, save the file, and ask again."
    )


def _refuse_if_two_sources(run: Run) -> None:
    if run.continued:
        point = run.continued[0].point or "its end"
        text = (
            f"{{run}} continued with another source at {point}: no single source repeats it, so it is not "
            "replayed. Its recorded values are in the table."
        ).format
        raise UsageError(text(run=f"Run {run.id}"), general=text(run="The run"), slug="two-sources")


def _selected_iterations(
    at: Sequence[At], loop: LoopFacts | None, selected: SelectedIterations | None
) -> frozenset[int] | None:
    """Return the requested iterations of the main loop; None: all."""
    iterations = None if selected is None else frozenset(selected)
    for each in at:
        if loop is not None and each.loop == name_of(loop.name):
            named = frozenset(each.indices(len(loop.seconds), loop.values))
            iterations = named if iterations is None else iterations & named
            # the planner refuses iterations that the loop does not have
            return iterations if named else None
    return iterations
