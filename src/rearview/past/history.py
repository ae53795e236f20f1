"""Ask about the past: the one module that knows every room. Returns values, never prints."""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rearview.config import Settings
from rearview.errors import RearviewError, SourceError, UsageError
from rearview.execute.executor import Task
from rearview.execute.local import Local
from rearview.execute.replays import Outcome, Progress, Replays
from rearview.execute.start import Start, start
from rearview.model import Checkpoint, Control, Run, Status, Wanted
from rearview.source.probes import START, Place, Probe, Probes, find
from rearview.store.checkpoints import Checkpoints
from rearview.store.project import Project, root_of
from rearview.store.runs import Replay, Runs
from rearview.store.versions import Versions

WORKTREE = "worktree"
"""Stands for the source as it is now, where a run is asked for."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A run that cannot be answered, and why."""

    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunReport:
    """All there is to say of one run."""

    run: Run
    names: dict[str, int]
    loops: list[tuple[str, int]]
    checkpoints: list[Checkpoint]
    partial: list[str]
    logical: int
    stored: int
    costs: dict[str, Any]
    replays: list[Replay]
    exact: str


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """What a backfill did."""

    outcomes: list[Outcome] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    seconds: float = 0.0
    recorded_seconds: float = 0.0
    """What the runs themselves took."""

    @property
    def written(self) -> int:
        """New records."""
        return sum(outcome.report.written for outcome in self.outcomes)

    @property
    def proved(self) -> bool:
        """Whether every replay was exact."""
        return bool(self.outcomes) and all(outcome.proved for outcome in self.outcomes)

    @property
    def speedup(self) -> float | None:
        """How many times faster this was than running everything again."""
        if not self.outcomes or self.seconds <= 0:
            return None
        return self.recorded_seconds / self.seconds

    @property
    def proof(self) -> str:
        """One line that says how far the answer can be trusted."""
        if not self.outcomes:
            return "nothing was replayed"
        reports = [outcome.report for outcome in self.outcomes]
        states = sum(report.states for report in reports)
        restored = sum(report.restored for report in reports)
        repeated = sum(report.repeated for report in reports)
        said = f"{restored} states restored, {states} states and {repeated} recorded values equal"
        if self.proved:
            return f"exact: {said}"
        for outcome in self.outcomes:
            report = outcome.report
            if outcome.proved:
                continue
            if report.error:
                return f"not proved: {outcome.run}: {report.error}"
            if report.difference:
                return f"not exact: {report.difference} (run {outcome.run})"
            if report.differing:
                return f"not exact: {', '.join(report.differing)} came out differently"
        return f"not proved: nothing could be compared ({said})"


def history(start: Path | str | None = None) -> History:
    """Return the history of the project that `start` (or the current folder) lies in."""
    return History(Project.open(Path(start) if start is not None else Path.cwd()))


class History:
    """The recorded past of one project."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.settings = Settings.read(project.store)
        self._runs = Runs(project)
        self._versions = Versions(project, self.settings)
        self._checkpoints = Checkpoints(project)

    def runs(self) -> list[Run]:
        """Return all runs, oldest first."""
        return self._runs.all()

    def run(self, which: str = "latest") -> Run:
        """Return one run: by id, the beginning or end of one, `latest`, or `-1`, `-2`, …"""
        return self._runs.find(which)

    def diff(self, a: str, b: str = "worktree") -> str:
        """Return what changed in the source from run `a` to run `b` or to the work tree."""
        return self._versions.diff(self._version(a), self._version(b))

    def _version(self, which: str) -> str:
        if which == "worktree":
            return self._versions.save(WORKTREE)
        version = self.run(which).version
        if not version:
            raise UsageError(f"The source of run {which} was not kept.", slug="no-source")
        return version

    def _text(self, version: str) -> dict[str, str]:
        """Return the readable Python files of a version."""
        found = {}
        for path, data in self._versions.files(version).items():
            if path.endswith(".py"):
                try:
                    found[path] = importlib.util.decode_source(data)
                except (SyntaxError, UnicodeDecodeError):
                    continue
        return found

    def probes(self, run: Run) -> Probes:
        """Return what the work tree adds to the source of `run`; raises where it does more."""
        if not run.version:
            raise SourceError(
                f"The source of run {run.id} was not kept, so it cannot be replayed.",
                slug="no-source",
            )
        used = run.facts.get("end", {}).get("files")
        return find(self._text(run.version), self._text(self._version("worktree")), used=used)

    def backfill(
        self,
        names: Sequence[str],
        *,
        runs: Sequence[str] | None = None,
        at: str | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> BackfillReport:
        """Fill the columns `names` of past runs from the probes in the work tree."""
        begun = time.monotonic()
        chosen = [self.run(which) for which in runs] if runs else self.runs()
        refusals: list[Refusal] = []
        work: list[tuple[Run, Task]] = []
        replays = Replays(self.project, self._versions, self._runs)
        for run in chosen:
            try:
                segment = self._segment(run, tuple(names), at)
            except RearviewError as exc:
                refusals.append(Refusal(run.id, str(exc)))
                continue
            if segment is not None:
                version, wanted = segment
                work.append((run, replays.prepare(run, version, wanted)))
        outcomes = replays.carry_out(work, Local(workers or 1), progress)
        return BackfillReport(
            outcomes=outcomes,
            refusals=refusals,
            seconds=time.monotonic() - begun,
            recorded_seconds=sum(_seconds(run) for run, _ in work),
        )

    def replay(
        self, which: str = "latest", *, at: str | None = None, progress: Progress | None = None
    ) -> BackfillReport:
        """Replay a run as it was recorded, with any probes of the work tree, and prove it."""
        run = self.run(which)
        begun = time.monotonic()
        replays = Replays(self.project, self._versions, self._runs)
        probes = self.probes(run)
        wanted = self._wanted(run, probes, probes.probes, at)
        version = self._derived(run, probes)
        task = replays.prepare(run, version, wanted)
        outcomes = replays.carry_out([(run, task)], Local(1), progress)
        return BackfillReport(
            outcomes, [], time.monotonic() - begun, recorded_seconds=_seconds(run)
        )

    def resume(self, which: str = "latest") -> Start:
        """Return how to go on with a run that was stopped, in the place where it ran."""
        run = self.run(which)
        if run.status in {Status.RUNNING, Status.FINISHED}:
            raise UsageError(
                f"Run {run.id} is {run.status.value}; there is nothing to go on with. "
                "`rearview runs` shows which were stopped.",
                slug="not-stopped",
            )
        if not run.facts.get("watched", True):
            raise UsageError(
                f"Run {run.id} was started with plain `python`, which cannot be resumed hands-free. "
                "Start it with `rearview run`.",
                slug="not-watched",
            )
        control = Control(
            root=str(self.project.root),
            target=str(run.facts["target"]),
            module=bool(run.facts.get("module")),
            args=run.argv,
            resume=run.id,
            given=dict(run.facts.get("given", {})),
        )
        env = {**os.environ, **run.facts.get("threads", {})}
        return start(control, env, Path(run.cwd), hash_seed=str(run.facts["hash_seed"]))

    def _segment(self, run: Run, names: tuple[str, ...], at: str | None) -> tuple[str, Wanted] | None:
        probes = self.probes(run)
        asked = [probe for name in names for probe in probes.of(name)]
        unknown = [name for name in names if not probes.of(name)]
        if unknown:
            raise UsageError(
                f"{', '.join(unknown)}: no statement in the work tree logs this beyond what run "
                f"{run.id} logged. Add one, such as rearview.log({unknown[0]!r}, value).",
                slug="no-probe",
            )
        version = self._derived(run, probes)
        if self._covered(run, version, names):
            return None
        return version, self._wanted(run, probes, asked, at, names)

    def _covered(self, run: Run, version: str, names: tuple[str, ...]) -> bool:
        done: set[str] = set()
        for replay in self._runs.replays(run.id):
            report = replay.facts.get("report", {})
            if replay.version == version and replay.proved and report.get("finished"):
                done.update(replay.names)
        return set(names) <= done

    def _derived(self, run: Run, probes: Probes) -> str:
        old = self._versions.files(run.version)
        changes = {
            path: text.encode()
            for path, text in probes.source.items()
            if old.get(path) != text.encode()
        }
        return self._versions.derive(run.version, changes) if changes else run.version

    def _wanted(
        self,
        run: Run,
        probes: Probes,
        asked: Iterable[Probe],
        at: str | None,
        names: tuple[str, ...] = (),
    ) -> Wanted:
        asked = list(asked)
        chains = [list(chain) for probe in asked for chain in probe.chains]
        chains += [list(chain) for probe in asked for chain in probe.feeds]
        everywhere = not asked or any(not probe.chains for probe in asked)
        outer = {chain[0] for chain in chains if chain}
        before = all(probe.place is Place.BEFORE and not probe.loops for probe in asked)
        main = self._main_loop(run)
        outside = any(() in probe.chains for probe in asked)
        levels = min(
            (
                0 if probe.depth == START else len(chain) - len(probe.loops) + probe.depth
                for probe in asked
                for chain in probe.chains
            ),
            default=99,
        )
        return Wanted(
            run=run.id,
            replay=f"{run.id}.{secrets.token_hex(3)}",
            report="",
            names=names,
            chains=chains,
            everywhere=everywhere,
            levels=levels,
            ranges=_ranges(at),
            after=not before and (outside or everywhere or len(outer) != 1),
            until=main if asked and before and outside and not outer else None,
            probes={
                path: [(line, column, list(drawn)) for (line, column), drawn in places.items()]
                for path in {probe.path for probe in probes.probes}
                if (places := probes.places(path))
            },
            ids={
                path: {line: str(one) for line, one in ids.items()}
                for path, ids in probes.loops.items()
            },
        )

    def _main_loop(self, run: Run) -> str | None:
        loops = run.facts.get("end", {}).get("loops", {})
        outermost = {key: loop for key, loop in loops.items() if loop.get("outermost")}
        return max(outermost, key=lambda key: outermost[key]["seconds"], default=None)


def _ranges(at: str | None) -> dict[str, list[tuple[int, int]]]:
    """Return the iterations that `--at` names.

    >>> _ranges("epoch=3:5/step=7")
    {'epoch': [(3, 5)], 'step': [(7, 8)]}
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for part in (at or "").split("/"):
        if not part:
            continue
        loop, _, span = part.partition("=")
        first, colon, last = span.partition(":")
        low = int(first or 0)
        high = (int(last) if last else 1 << 62) if colon else low + 1
        found.setdefault(loop, []).append((low, high))
    return found


def _seconds(run: Run) -> float:
    return float(run.facts.get("end", {}).get("seconds", 0.0))


def begin(
    target: str,
    args: Sequence[str],
    *,
    module: bool = False,
    given: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Start:
    """Return how to start recording a script or module from the current folder."""
    here = Path.cwd()
    root = Path(os.environ["REARVIEW_ROOT"]) if "REARVIEW_ROOT" in os.environ else here
    if not module:
        script = Path(target)
        if not script.is_file():
            raise UsageError(
                f"There is no script {target} in {here}. Give the path of a Python file, or "
                "`-m module`.",
                slug="no-script",
            )
        root = root_of(script)
    control = Control(
        root=str(root.resolve()),
        target=target,
        module=module,
        args=tuple(args),
        given=dict(given or {}),
        settings=dict(settings or {}),
    )
    return start(control, os.environ, here)
