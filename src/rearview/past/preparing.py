"""Make a run ready to be asked: its probes, its facts, and what it lacks of what is asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rearview.errors import UsageError
from rearview.model import Run, Status
from rearview.model.point import name_of
from rearview.model.run import is_notebook
from rearview.past.chosen import Chosen, within
from rearview.past.covered import Asked, narrowed, uncompared
from rearview.past.inputs import gone
from rearview.past.machines import Machines
from rearview.past.packages import lost
from rearview.past.probing import Probing
from rearview.past.segments import Prepared, as_run, run_facts
from rearview.past.sharing import lead_of
from rearview.past.unwatched import unparsed, unwatched
from rearview.plan.at import At, parse_at
from rearview.plan.facts import LoopFacts
from rearview.source.notebooks import as_programs, in_cells_of, with_text
from rearview.source.probes import Probes
from rearview.source.sameness import sameness
from rearview.store.checkpoints import Checkpoints
from rearview.store.project import Project
from rearview.store.runs import Runs
from rearview.store.versions import Versions


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of the past."""

    names: tuple[str, ...]
    runs: tuple[Run, ...]
    where: str | None = None
    at: str | None = None
    workers: int | None = None
    budget: float | None = None
    on: str = "local"
    gpus: float | None = None
    ordered: bool = False
    """The runs are named in the order in which they are wanted."""
    again: bool = False
    """What is there and could not be proved is to run again."""


@dataclass
class Preparing:
    """Makes runs of one project ready."""

    project: Project
    runs: Runs
    versions: Versions
    checkpoints: Checkpoints
    machines: Machines
    _sameness: dict[tuple[str, str], str] = field(default_factory=dict)

    def of(
        self,
        probing: Probing,
        run: Run,
        names: tuple[str, ...],
        asked: Question,
        only: Chosen | None = None,
    ) -> Prepared:
        """Return a run with what it lacks of `names`, in the iterations that are chosen."""
        continued = run.facts.get("continued")
        if continued:
            raise UsageError(
                f"Run {run.id} went on with another source at {continued[0]['point'] or 'its end'}: "
                "no one source repeats it, so it is not replayed. What it recorded is in the table.",
                slug="two-sources",
            )
        probes = probing.of(run, names)
        unknown = [name for name in names if not probes.of(name)]
        if unknown:
            raise UsageError(
                f"{', '.join(unknown)}: nothing in the work tree logs this beyond what run "
                f"{run.id} logged. Add a statement such as rearview.log({unknown[0]!r}, value)."
                + unparsed(unknown[0], probing.edited)
                + unwatched(unknown[0], self.project.root),
                slug="no-probe",
            )
        probes = as_run(probes, run)
        meant = tuple(probe for probe in probes.probes if probe.names)
        old = self.versions.files(run.version)
        version, files = self._derived(run, dict(probes.source), old)
        facts = run_facts(
            run,
            version,
            self.checkpoints.of(run.id),
            blocked=gone(*self.kept(run)) or self._lost(run, old),
            machine=self.machines.of(run),
        )
        limits = tuple(parse_at(asked.at)) if asked.at else ()
        alone = run.facts.get("end", {}).get("main", {}).get("alone", True)
        loop = facts.loops[0] if facts.loops else None
        main = loop.name if loop is not None and alone else None
        about = Asked(
            version,
            main=main,
            count=len(loop.seconds) if loop is not None else 0,
            at=limits,
            settled=math.inf if asked.again else self._settled(run),
            within=within(only, probes, names, facts.loops) if only and main else None,
        )
        same = partial(self._same, version, probes)
        replays = self.runs.replays(run.id)
        picked = _picked(limits, loop, only)
        unproved: tuple[str, ...] = ()
        if any(map(uncompared, replays)) and about.settled < math.inf:
            strictly = replace(about, settled=math.inf)
            unproved = tuple(
                name
                for name in names
                if narrowed(about, replays, probes, (name,), same, picked)
                != narrowed(strictly, replays, probes, (name,), same, picked)
            )
        names, missing = narrowed(about, replays, probes, names, same, picked)
        if names:
            meant = tuple(dict.fromkeys(probe for name in names for probe in probes.of(name)))
        if only is not None:
            missing = frozenset(only if missing is None else only.keys() & missing)
        told = {"limits": about.limits, "same": {name: same(name) for name in names}}
        return Prepared(
            *(run, version, probes, meant, names, facts, about, missing, limits, told),
            known=frozenset(replay.id for replay in replays if replay.ended is not None),
            unproved=unproved,
            lead=lead_of(run, files, run.home(os.path.realpath(self.project.root))),
        )

    def _settled(self, run: Run) -> float:
        """Return when a run recorded its last, as far as it is not going on."""
        if run.status is Status.RUNNING or run.ended is not None:
            return math.inf if run.ended is None else run.ended
        try:
            return (self.runs.folder(run.id) / "heartbeat").stat().st_mtime
        except OSError:
            return math.inf

    def _same(self, version: str, probes: Probes, name: str) -> str:
        """Return what tells one way of logging a name from another, once per source."""
        known = self._sameness.get((version, name))
        if known is None:
            known = self._sameness[version, name] = sameness(probes, name)
        return known

    def _lost(self, run: Run, files: Mapping[str, bytes]) -> str:
        return lost(as_programs(files), run.facts.get("end", {}).get("files") or [run.script])

    def _derived(
        self, run: Run, source: dict[str, str], old: Mapping[str, bytes]
    ) -> tuple[str, Mapping[str, bytes]]:
        """Return the version in which a run's probes stand, and its files."""
        recorded = as_programs(old)
        changes = {}
        for path, text in source.items():
            if recorded.get(path) == text.encode():
                continue
            home = path.removesuffix(".py")
            if is_notebook(home) and home in old:
                divided = in_cells_of(recorded[path].decode(), text, home)
                changes[home] = with_text(old[home], divided, home)
            else:
                changes[path] = text.encode()
        if not changes:
            return run.version, old
        return self.versions.derive(run.version, changes), {**old, **changes}

    def kept(self, run: Run) -> tuple[Run, Path, set[str]]:
        """Return a run with the project's folder, and the files kept with the run's source."""
        kept = set(self.versions.hashes(run.version)) if run.version else set()
        return run, self.project.root.resolve(), kept


def _picked(
    limits: Sequence[At], loop: LoopFacts | None, only: Chosen | None
) -> frozenset[int] | None:
    """Return the iterations of the main loop that are asked for; None: all."""
    picked = None if only is None else frozenset(only)
    for at in limits:
        if loop is not None and at.loop == name_of(loop.name):
            meant = frozenset(at.indices(len(loop.seconds), loop.values))
            # of a number that it does not have, the planner says so
            picked = meant if picked is None else picked & meant
            return picked if meant else None
    return picked
