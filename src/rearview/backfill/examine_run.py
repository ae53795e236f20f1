"""Prepare a run to answer a `Question`: find its probes, its measurements and the values that it lacks.

Preparing also finds out why a run cannot be replayed: because input files no longer exist, or packages that it imports
are not installed.
"""

from __future__ import annotations

import ast
import contextlib
import math
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TypedDict

from rearview.backfill.coverage import (
    CoverageQuery,
    SelectedIterations,
    inner_spans,
    is_unproved,
    missing_values,
)
from rearview.backfill.facts_and_segments import RunRequest, run_facts, with_run_loop_ids
from rearview.backfill.find_statements import (
    StatementSources,
    logged_in_unparsable_file,
    logged_outside_project,
    script_is_gone,
)
from rearview.backfill.machine_speed import Machines
from rearview.backfill.setup_sharing import (
    LeadingImports,
    SetupText,
    import_seconds,
    leading_imports_of,
    setup_text,
)
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
from rearview.store.recorded_inputs import fingerprint
from rearview.store.runs import Replay, Runs
from rearview.store.versions.versions import Versions


class Choices(TypedDict, total=False):
    """The optional fields of `Question`, as types of keyword arguments; `Question` explains each field."""

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
    """A request of the user to fill missing values: which names, runs and iterations, and how replays may run."""

    names: Sequence[str]
    """Names of the logged values to fill."""
    runs: Sequence[str] | None = None
    """Runs as the user wrote them, the most important first; None means all runs."""
    where: str | None = None
    """SQL condition that selects runs or rows of the table of records, such as `acc < 0.9`; None means all."""
    at: str | None = None
    """Selection of iterations, such as `epoch=3:5`; None means all iterations."""
    workers: int | None = None
    """Number of replays at once; None means as many as there are cores for."""
    budget: float | None = None
    """Only segments that are predicted to end within this many seconds are run; None means all segments."""
    on: str = "local"
    """Where replays run: `local` or `ray`."""
    gpus: float | None = None
    """Accelerators that each segment gets on Ray; 0.5 means half an accelerator, None the setting `gpus`."""
    again: bool = False
    """Whether to fill values again that an earlier replay filled but that could not be proved."""
    sure: float | None = None
    """Least confidence, from 0 to 1, with which a statement is inserted into past versions; None: the setting
    `propagation`.
    """


FORK_SECONDS = 0.04
"""Seconds that a replay takes to start if it is forked from a process that has already imported its libraries."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run with the values that are requested of it, and the facts about it that the planner needs."""

    request: RunRequest
    facts: RunFacts
    ended_replays: frozenset[str] = frozenset()
    """Ids of the replays that had ended when the run was prepared."""
    unproved: tuple[str, ...] = ()
    """Names with values from earlier replays that can never be proved: the run recorded nothing to compare with."""
    leading_imports: LeadingImports | None = None
    """The imports with which the program begins; None if other replays cannot share them."""
    setup: SetupText = field(default_factory=SetupText)
    """Hashes of the statements before the main loop, to find runs that can share these statements."""
    setup_seconds: float = 0.0
    """Seconds of the statements before the main loop, without the leading imports."""
    spared: float = 0.0
    """Predicted seconds that `facts` leaves out, because the process from which the replay is forked spends them."""

    @property
    def run(self) -> Run:
        """The run of which values are requested."""
        return self.request.run

    def with_shared_start(self) -> PreparedRun:
        """Return the prepared run with less predicted time, for replays forked from a process of an earlier run.

        If the imports cannot be shared, return this prepared run unchanged.
        """
        if self.leading_imports is None:
            return self
        start, imports = self._shareable(self.leading_imports)
        shorter = replace(
            self.facts, start=self.facts.start - start, setup=self.facts.setup - imports
        )
        return replace(self, facts=shorter, spared=start + imports)

    def with_shareable_start(self) -> PreparedRun:
        """Return the prepared run with `facts.shareable` set: the seconds that all its replays but the first save.

        If the imports cannot be shared, return this prepared run unchanged.
        """
        if self.leading_imports is None:
            return self
        return replace(
            self, facts=replace(self.facts, shareable=sum(self._shareable(self.leading_imports)))
        )

    def _shareable(self, leading: LeadingImports) -> tuple[float, float]:
        """Return (seconds of interpreter start, seconds of imports) that a replay saves if it is forked."""
        imports = min(import_seconds(self.run, leading), self.facts.setup)
        return self.facts.start - min(self.facts.start, FORK_SECONDS), imports

    def question(self) -> RunQuestion:
        """Return the run's facts and the requested values of each probe, in the form that the planner takes."""
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
                # the callers of the function around the probe are not known: they may call it after the loops
                requests.append(self._until_the_end())
            paths = probe.paths or (self._deepest_loops(),)
            requests.extend(self._request(probe, path) for path in paths)
        return RunQuestion(self.facts, tuple(requests))

    def _request(self, probe: Probe, path: tuple[str, ...]) -> ValueRequest:
        """Return the request for the values that `probe` logs inside the loops `path`, outermost first."""
        request = self.request
        main = self.facts.loops[0].name if self.facts.loops else None
        if path and path[0] != main and not (main is None and request.at):
            # the statement is in another loop than the main loop, or in a coroutine, and such loops cannot be divided:
            # the replay skips the main loop and runs to the end
            further_selections = tuple(at for at in request.at if at.loop not in columns_of(path))
            return self._until_the_end(further_selections)
        depth = len(path) - len(probe.loops) + probe.depth
        return ValueRequest(
            names=request.names,
            loops=path,
            place=self._position(probe, path),
            depth=-1 if probe.depth == START else depth,
            feeds=bool(probe.feeding_loops),
            at=request.at,
            missing_iterations=request.missing_iterations,
            within=request.coverage.within,
        )

    def _until_the_end(self, at: tuple[At, ...] = ()) -> ValueRequest:
        """Return a request for which a replay runs to the end of the run, because values may be logged up to there.

        `at` selects iterations of loops.
        """
        return ValueRequest(
            self.request.names,
            (),
            Position.AFTER.value,
            at=at,
            missing_iterations=self.request.missing_iterations,
            uncounted=True,
        )

    def _position(self, probe: Probe, path: tuple[str, ...]) -> str:
        """Return the position (a value of `Position`) of `probe` relative to other loops directly inside `path`.

        The source around the probe may show no such loop, although the run recorded one, in a function that is called
        next to the probe. The probe may be before or after that loop, so return "between".
        """
        if not path:
            return (Position.BEFORE if probe.runs_first else Position.AFTER).value
        if probe.place is Position.ALONE and 0 < len(path) < len(self.facts.loops):
            return Position.BETWEEN.value
        return probe.place.value

    def _deepest_loops(self) -> tuple[str, ...]:
        """Return the main loop and the first loop inside it: the loop path of statements whose loops are not known."""
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
        """Return `run` prepared to be replayed for those of `names` that it lacks in the `selected` iterations.

        `selected` of None means all iterations. Raise if no statement logs a name, or the run had several sources.
        """
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
        names, missing_iterations = find_missing(coverage, names=names)
        if names:
            logging_probes = tuple(
                dict.fromkeys(probe for name in names for probe in probes.of(name))
            )
        if selected is not None:
            missing_iterations = frozenset(
                selected if missing_iterations is None else selected.keys() & missing_iterations
            )
        request = RunRequest(
            *(run, version, probes, logging_probes, names, coverage, missing_iterations),
            digests={name: digest_of(name) for name in names},
        )
        recorded_root = run.recorded_root(os.path.realpath(self.project.root))
        leading = leading_imports_of(run, files, recorded_root)
        return PreparedRun(
            request,
            facts,
            ended_replays=frozenset(replay.id for replay in replays if replay.ended is not None),
            unproved=unproved,
            leading_imports=leading,
            setup=setup_text(run, files, recorded_root) if leading is not None else SetupText(),
            setup_seconds=facts.setup
            - (import_seconds(run, leading) if leading is not None else 0.0),
        )

    def _probes(self, statements: StatementSources, run: Run, names: tuple[str, ...]) -> Probes:
        """Return the probes that log `names` in the source of `run`; raise if there is no probe for one of `names`."""
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
            recorded_until=math.inf if question.again else self._last_recorded(run),
            within=inner_spans(selected, probes, names, facts.loops) if selected and main else None,
        )

    def _unproved_names(
        self,
        coverage: CoverageQuery,
        replays: Sequence[Replay],
        names: tuple[str, ...],
        find_missing: partial[tuple[tuple[str, ...], frozenset[int] | None]],
    ) -> tuple[str, ...]:
        """Return those of `names` that count as filled only because of values that can never be proved."""
        if coverage.recorded_until == math.inf or not any(map(is_unproved, replays)):
            return ()
        strict = replace(coverage, recorded_until=math.inf)
        return tuple(
            name
            for name in names
            if find_missing(coverage, names=(name,)) != find_missing(strict, names=(name,))
        )

    def _last_recorded(self, run: Run) -> float:
        """Return the Unix time of a run's last record, or `inf` if the run may still record or the time is unknown."""
        if run.status is Status.RUNNING or run.ended is not None:
            return math.inf if run.ended is None else run.ended
        try:
            return (self.runs.folder(run.id) / "heartbeat").stat().st_mtime
        except OSError:
            return math.inf

    def _digest(self, version: str, probes: Probes, name: str) -> str:
        """Return a digest of the statements in `probes` that log `name`; for each version it is computed only once."""
        digest = self._digests.get((version, name))
        if digest is None:
            digest = self._digests[version, name] = logging_fingerprint(probes, name)
        return digest

    def _derived_version(
        self, run: Run, source: dict[str, str], recorded: Mapping[str, bytes]
    ) -> tuple[str, Mapping[str, bytes]]:
        """Return (id of the version of `run` with its probes inserted, files of that version).

        `source` are the Python files with the probes, `recorded` the files of the run's version.
        """
        programs = as_programs(recorded)
        changes = {}
        for path, text in source.items():
            if programs.get(path) == text.encode():
                continue
            notebook = path.removesuffix(".py")
            if is_notebook(notebook) and notebook in recorded:
                cells = divide_into_cells(programs[path].decode(), text, notebook)
                changes[notebook] = with_text(recorded[notebook], cells, notebook)
            else:
                changes[path] = text.encode()
        if not changes:
            return run.version, recorded
        return self.versions.derive(run.version, changes), {**recorded, **changes}

    def stored_files(self, run: Run) -> tuple[Path, set[str]]:
        """Return (folder of the project, paths in it of the files that are stored with the source of `run`)."""
        stored_paths = set(self.versions.hashes(run.version)) if run.version else set()
        return self.project.root.resolve(), stored_paths


def _no_probe_text(name: str, run: Run, logged: Collection[str]) -> str:
    """Return an error message for a `name` that no statement logs, with a hint for the user.

    The message contains the placeholder `{run}`; `logged` are the names that the work tree logs.
    """
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
    """Return the iterations of the main loop `loop` that `at` and `selected` both contain, or None for all."""
    iterations = None if selected is None else frozenset(selected)
    for each in at:
        if loop is not None and each.loop == name_of(loop.name):
            named = frozenset(each.indices(len(loop.seconds), loop.values))
            iterations = named if iterations is None else iterations & named
            # if `at` selects no existing iteration, the planner refuses the request
            return iterations if named else None
    return iterations


def missing_input(run: Run, root: Path, stored_paths: Collection[str] = ()) -> str:
    """Return a reason why `run` cannot be replayed if an input file of it no longer exists; else an empty text.

    Files below `root` whose paths are in `stored_paths` need not exist: they are stored with the source.
    """
    missing_paths = [
        path for path, _ in _recorded_inputs(run, root, stored_paths) if not path.exists()
    ]
    if not missing_paths:
        return ""
    more = f" and {len(missing_paths) - 1} more" if len(missing_paths) > 1 else ""
    return f"its input {missing_paths[0]}{more} is gone; bring it back"


def changed_inputs(run: Run, root: Path, stored_paths: Collection[str] = ()) -> list[Path]:
    """Return the paths of input files that changed since `run` read them; parameters as in `missing_input`."""
    changed = []
    for path, recorded in _recorded_inputs(run, root, stored_paths):
        try:
            current = fingerprint(path)
        except OSError:
            continue  # `missing_input` reports this file
        if list(current) != recorded and current[2] != recorded[2]:
            changed.append(path)
    return changed


def _recorded_inputs(
    run: Run, root: Path, stored_paths: Collection[str]
) -> Iterator[tuple[Path, list[object]]]:
    """Yield (present path, recorded fingerprint) of each input file of `run` that is not stored with its source.

    Files that were modified after the start of the run are left out: the run wrote them itself, but older versions of
    Rearview recorded them as inputs.
    """
    for recorded_path, recorded in run.end.inputs.items():
        if recorded[1] > run.started * 1e9:
            continue
        path = Path(run.current_path(recorded_path, str(root)))
        if not path.is_relative_to(root) or str(path.relative_to(root)) not in stored_paths:
            yield path, list(recorded)


def missing_packages(source: Mapping[str, bytes], executed: Collection[str]) -> str:
    """Return a reason why a run cannot be replayed if a package that it imports is not installed; else an empty text.

    `source` are the files of the run's version, `executed` the paths of the files that the run executed. Only
    top-level imports are checked, not imports in functions or under `try`. If an executed file mentions `sys.path`,
    nothing is checked, because the program may find the packages in other folders.
    """
    files = [source[path] for path in executed if path in source]
    if any(b"sys.path" in text or b"addsitedir" in text for text in files):
        return ""
    own_modules = {
        part.removesuffix(".py") for path in source for part in PurePosixPath(path).parts
    }
    imported = {name for text in files for name in _imported(text)} - own_modules
    missing_names = sorted(name for name in imported if not _is_installed(name))
    if not missing_names:
        return ""
    verb = "which is" if len(missing_names) == 1 else "which are"
    return (
        f"it imports {', '.join(missing_names)}, {verb} not installed here any more; install what it had "
        "(`pip install …`), or replay it in the environment it ran in"
    )


@lru_cache(maxsize=512)
def _imported(text: bytes) -> frozenset[str]:
    """Return the names of the packages that the top-level statements of a Python file import."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return frozenset()
    packages: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            packages.add(node.module.partition(".")[0])
    return frozenset(packages)


@lru_cache(maxsize=512)
def _is_installed(name: str) -> bool:
    if name in sys.builtin_module_names or name in sys.stdlib_module_names or name in sys.modules:
        return True
    with contextlib.suppress(ImportError, ValueError):
        # only `find_spec` finds editable installations; neither function imports the package
        return PathFinder.find_spec(name) is not None or find_spec(name) is not None
    return False
