"""The recorded past of one project."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

from rearview.config import Settings
from rearview.errors import RearviewError, UsageError
from rearview.execute.crew import Crew, ask_for, under_way
from rearview.execute.events import Progress
from rearview.execute.start import Start, start
from rearview.model import Checkpoint, Control, Run, Status
from rearview.past.filling import Filling
from rearview.past.preparing import Question
from rearview.past.probing import WORKTREE, Probing, Propagated
from rearview.past.reports import BackfillReport, PlanReport, RunReport
from rearview.plan.facts import Machine
from rearview.source.logged import names_logged
from rearview.store.checkpoints import Checkpoints
from rearview.store.printed import Line, printed
from rearview.store.project import Project
from rearview.store.runs import Runs
from rearview.store.sweep import Freed
from rearview.store.sweep import gc as sweep
from rearview.store.tables.check import check_records
from rearview.store.tables.duck import quoted
from rearview.store.tables.table import Table
from rearview.store.thinning import named
from rearview.store.verify import Report, verify
from rearview.store.versions import Versions
from rearview.store.views import Tables


def history(start: Path | str | None = None) -> History:
    """Return the history of the project that `start` lies in.

    Without `start`: that of the folder `REARVIEW_ROOT` names, or of the current folder.
    """
    return History(Project.open(Path(start or os.environ.get("REARVIEW_ROOT") or Path.cwd())))


class History:
    """Ask what was recorded; fill in what was not."""

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
        """Return one run: by id, the beginning or end of one, `latest`, or -1, -2 and so on."""
        return self._runs.find(which)

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.project, checkpoints=self._all_checkpoints, versions=self._versions)

    def _all_checkpoints(self) -> list[Checkpoint]:
        return [one for run in self._checkpoints.runs() for one in self._checkpoints.of(run)]

    def names(self) -> list[str]:
        """Return every name that has values, or that the newest source logs."""
        return sorted({*self._tables.names(), *(name for name, _ in self._virtual())})

    def empty(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that the newest source logs and that have no value yet."""
        virtual = {name for name, _ in self._virtual()} - set(self._tables.names())
        return [name for name in dict.fromkeys(names) if name in virtual]

    def table(
        self,
        *names: str,
        where: str | None = None,
        runs: Sequence[str] | None = None,
        limit: int | None = None,
        order: Sequence[str] | None = None,
    ) -> Table:
        """Return one row per point with `names` as columns; without names, all of them."""
        chosen = [self.run(which).id for which in runs] if runs else None
        self._tables.refresh()
        return self._tables.table(
            names, where=where, runs=chosen, order=order, limit=limit, virtual=self._virtual()
        )

    def sql(self, query: str) -> Table:
        """Return the answer to one SQL question over the tables of docs/schema.md."""
        self._tables.refresh()
        return self._tables.sql(query)

    def _virtual(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return names that the work tree logs at constant names, with the loops around them."""
        try:
            edited = self._probing([]).edited
        except RearviewError:
            return []
        return [
            (name, places[0].loops)
            for name, places in names_logged(edited).items()
            if "*" not in name and not name.startswith("$")
        ]

    def diff(self, a: str, b: str = WORKTREE) -> str:
        """Return what changed in the source from run `a` to run `b` or to the work tree."""
        return self._versions.diff(self._version(a), self._version(b))

    def _version(self, which: str) -> str:
        if which == WORKTREE:
            return self._versions.save(WORKTREE)
        version = self.run(which).version
        if not version:
            raise UsageError(f"The source of run {which} was not kept.", slug="no-source")
        return version

    def show(self, which: str = "latest") -> RunReport:
        """Return all there is to say of one run."""
        run = self.run(which)
        checkpoints = self._checkpoints.of(run.id)
        end = run.facts.get("end", {})
        counts = self.sql(
            f"SELECT name, count(*) AS n FROM records WHERE run = {quoted(run.id)} "  # noqa: S608
            "GROUP BY name ORDER BY name"
        )
        loops = {
            key.rpartition(":")[2]: int(loop["iterations"])
            for key, loop in end.get("loops", {}).items()
        }
        replays = self._runs.replays(run.id)
        return RunReport(
            run=run,
            names={row["name"]: row["n"] for row in counts if not row["name"].startswith("$")},
            loops=list(loops.items()),
            checkpoints=checkpoints,
            partial=sorted({reason for one in checkpoints for reason in one.missing}),
            logical=sum(one.nbytes for one in checkpoints),
            stored=sum(one.stored for one in checkpoints),
            costs=end.get("costs", {}),
            replays=replays,
            exact=_exact([replay.facts.get("report", {}) for replay in replays]),
        )

    def printed(self, which: str = "latest") -> list[Line]:
        """Return the lines that a run printed, with the points at which it printed them."""
        return list(printed(self._runs.folder(self.run(which).id)))

    @cached_property
    def _filling(self) -> Filling:
        return Filling(
            self.project,
            self.settings,
            self._runs,
            self._versions,
            self._checkpoints,
            self._tables,
        )

    def _probing(self, runs: Sequence[Run]) -> Probing:
        return self._filling.probing(runs)

    def propagate(
        self, names: Sequence[str], *, to: Sequence[str] | None = None
    ) -> list[Propagated]:
        """Return where the statements that the work tree adds belong in each past version."""
        probing = self._probing(self.runs()).carrying(names)
        unknown = [n for n in names if not any(n in probe.names for probe in probing.added)]
        if unknown:
            raise UsageError(
                f"{', '.join(unknown)}: nothing in the work tree logs this beyond what the newest "
                f"run logged. Add a statement such as rearview.log({unknown[0]!r}, value).",
                slug="no-probe",
            )
        wanted = {self.run(which).id for which in to} if to else None
        return [one for one in probing.propagated() if wanted is None or wanted & set(one.runs)]

    def correct(self, which: str, path: str, line: int, names: Sequence[str] = ()) -> None:
        """Keep by hand where the added statements go in the version of a run.

        `names` are what they log, where the newest run logged that already.
        """
        self._probing(self.runs()).carrying(names).correct(self.run(which), path, line)

    def plan(
        self,
        names: Sequence[str],
        *,
        runs: Sequence[str] | None = None,
        where: str | None = None,
        at: str | None = None,
        workers: int | None = None,
        budget: float | None = None,
        again: bool = False,
    ) -> PlanReport:
        """Return what has to run again for `names`, and what it costs; nothing runs.

        `again`: also what is there and could not be proved.
        """
        asked = Question(
            *(tuple(names), self._chosen(runs), where, at, workers, budget),
            ordered=bool(runs),
            again=again,
        )
        return self._filling.plan(asked)

    def backfill(
        self,
        names: Sequence[str],
        *,
        runs: Sequence[str] | None = None,
        where: str | None = None,
        at: str | None = None,
        workers: int | None = None,
        budget: float | None = None,
        again: bool = False,
        on: str = "local",
        gpus: float | None = None,
        progress: Progress | None = None,
        plan: PlanReport | None = None,
    ) -> BackfillReport:
        """Fill the columns `names` of past runs from the probes in the work tree.

        `gpus` is the share of an accelerator that each segment gets on Ray; `again` runs what is
        there and could not be proved, too; `plan` is what `plan` answered to the same question, if
        that was asked.
        """
        begun = time.monotonic()
        chosen = self._chosen(runs)
        asked = Question(
            *(tuple(names), chosen, where, at, workers, budget, on, gpus),
            ordered=bool(runs),
            again=again,
        )
        report = plan if plan is not None else self._filling.plan(asked)
        return self._filling.carry_out(report, asked, progress, begun)

    def replay(
        self,
        which: str = "latest",
        *,
        at: str | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> BackfillReport:
        """Replay a run as it was recorded, with any probes of the work tree, and prove it."""
        return self._filling.replay(self.run(which), at, workers, progress)

    def crews(self) -> list[Crew]:
        """Return the backfills that are under way in this project, from whatever terminal."""
        return under_way(self.project)

    def employ(self, workers: int, *, of: str | None = None) -> Crew:
        """Let a backfill that is under way use that many workers; returns which one."""
        found = [crew for crew in self.crews() if of is None or of in crew.id]
        if len(found) != 1:
            what = "No backfill is" if not found else f"{len(found)} backfills are"
            which = ", ".join(crew.id for crew in found)
            raise UsageError(
                f"{what} under way in {self.project.root}"
                f"{f' that {of!r} means' if of else ''}{f': {which}' if which else ''}. "
                "`rearview workers` shows them; name one with `--of ID`.",
                slug="which-backfill",
            )
        ask_for(self.project, found[0].id, workers)
        return found[0]

    def machine(self, *, measure: bool = False) -> Machine:
        """Return how fast the machine we are on is; with `measure`, measured if that is due."""
        machines = self._filling.machines
        return machines.measure() if measure and machines.due() else machines.here()

    def _chosen(self, runs: Sequence[str] | None) -> tuple[Run, ...]:
        return tuple(self.run(which) for which in runs) if runs else tuple(self.runs())

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
        folder = Path(run.now(run.cwd, os.path.realpath(self.project.root)))
        return start(control, env, folder, hash_seed=str(run.facts["hash_seed"]))

    def verify(self, *, repair: bool = False) -> Report:
        """Check every byte of the store; with `repair`, rebuild what can be."""
        bad = list(check_records(self.project))
        return verify(
            self.project,
            repair=repair,
            records=lambda folder: [text for text in bad if str(folder) in text],
        )

    def gc(
        self, *, budget: int | None = None, keep: Collection[str] = (), dry: bool = False
    ) -> Freed:
        """Free what nothing refers to, and thin checkpoints until `budget` bytes suffice."""
        bound = budget if budget is not None else self.settings.budget or None
        return sweep(
            self.project, referenced=lambda: named(self._tables), budget=bound, keep=keep, dry=dry
        )


def _exact(reports: list[dict[str, object]]) -> str:
    """Return one line on whether the replays so far repeated the run."""
    if not reports:
        return "not replayed yet"
    for report in reports:
        changed = report.get("surroundings")
        about = f"; {'; '.join(changed)}" if isinstance(changed, list) and changed else ""
        if report.get("difference"):
            return f"not exact: {report['difference']}{about}"
        if report.get("differing"):
            return f"not exact: {report['differing']} came out differently{about}"
    states = sum(int(str(report.get("states", 0))) for report in reports)
    restored = sum(int(str(report.get("restored", 0))) for report in reports)
    return f"exact: {len(reports)} replays, {states} states equal, {restored} restored"
