"""The recorded past of one project."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from rearview._history.begin_run import Preemption, edited_source, environment_note, source_note
from rearview._history.checkpoint_state import (
    PastRun,
    PastState,
    asked_point,
    nearest,
    of_history,
    tell_nearest,
)
from rearview._history.compare_runs import Comparison, compare
from rearview._history.export_values import SavedValue, loaded, save_values
from rearview._history.plots import Plot, plot_of
from rearview._history.reports import Removal, RunReport
from rearview.backfill.backfill import Backfiller
from rearview.backfill.corrections import Correction
from rearview.backfill.coverage import is_superseded
from rearview.backfill.obstacles import logged_outside_project
from rearview.backfill.propagation import Probing, Propagated
from rearview.backfill.question import Choices, Question
from rearview.backfill.reports import BackfillReport, PlanReport
from rearview.config import Settings
from rearview.errors import DamagedError, RearviewError, UsageError
from rearview.execute.start_command import (
    StartCommand,
    arg_values_of,
    arguments_of,
    start_command,
)
from rearview.execute.status import (
    BackfillStatus,
    Progress,
    request_workers,
    running_backfills,
)
from rearview.model import Checkpoint, Control, Origin, Run, Status, Verdict
from rearview.model.proof import WITHHELD, compared, worst
from rearview.model.run import CAPTURED, UNASKED, is_notebook, name_of
from rearview.model.wording import plural
from rearview.plan.facts import Machine
from rearview.source.log_calls import names_logged
from rearview.source.moved_files import renames
from rearview.source.probes.mended_source import mend
from rearview.source.propagate.statement_diff import StatementChange, statement_diff
from rearview.source.propagate.versions import HandPlace
from rearview.store import labels, trust
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.run_files import RunFile, content_of, files_of
from rearview.store.files import write_error
from rearview.store.labels import check_name, check_note, check_tag
from rearview.store.maintenance.gc import Freed, recorded_objects
from rearview.store.maintenance.gc import gc as sweep
from rearview.store.maintenance.removal import (
    drop_empty_packs,
    finish_removals,
    removal_of,
    remove,
    unfinished,
)
from rearview.store.maintenance.verify import VerifyReport, verify
from rearview.store.printed_lines import PrintedLine, printed
from rearview.store.project import FOLDER, Project
from rearview.store.recorded_inputs import environment_differences, environment_of, read_environment
from rearview.store.runs import Replay, Runs
from rearview.store.tables.connection import quoted
from rearview.store.tables.result_table import Table
from rearview.store.tables.tables import Tables
from rearview.store.versions.versions import WORKTREE, Versions


def history(start: Path | str | None = None) -> History:
    """Return the history of the project that `start` lies in.

    Without `start`: that of the folder `REARVIEW_ROOT` names, or of the current folder.
    """
    return History(Project.open(Path(start or os.environ.get("REARVIEW_ROOT") or Path.cwd())))


def repair_format(start: Path) -> Path:
    """Write the format file of the store above `start` anew, if it is unreadable; return its path."""
    folders = (start.resolve(), *start.resolve().parents)
    root = next(folder for folder in folders if (folder / FOLDER / "format").exists())
    verify(Project(root), repair=True)
    return root / FOLDER / "format"


class History:
    """Ask what was recorded; fill in what was not."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.settings = Settings.read(project.store)
        self._runs = Runs(project)
        self._versions = Versions(project, self.settings)
        self._checkpoints = Checkpoints(project)

    def __repr__(self) -> str:
        count = len(self._runs.ids())
        return f"<History of {self.project.root}: {count} {'run' if count == 1 else 'runs'}>"

    def runs(self, where: str | None = None) -> list[Run]:
        """Return all runs, oldest first, or those for which the SQL condition `where` holds.

        It may speak of facts of runs (`status`, `name`, `tag`, `seconds`, …), of arguments, and of
        names that were logged, which stand for their last value: "tag = 'baseline' and acc > 0.9".
        """
        found = self._runs.all()
        if where is not None:
            self._tables.refresh()
            matching = set(self._tables.matching(where))
            found = [run for run in found if run.id in matching]
        return [of_history(run, self.at, self.value) for run in found]

    def run(self, which: str = "latest") -> PastRun:
        """Return one run: by id or name, the beginning or end of an id, `latest`, or -1, -2, ….

        `.at(epoch=3)` is its state there, `.value("w", epoch=3)` what it logged there.
        """
        return of_history(self._runs.find(which), self.at, self.value)

    def at(
        self, which: str = "latest", point: str = "", /, *, end: bool = False, **loops: Any
    ) -> PastState:
        """Return the variables of a run at the checkpoint nearest to a point: `at(run, epoch=3)`.

        That is the state at the start of the iteration, before any of it ran; with `end` the state at
        its end. Without a point: the last checkpoint. The program does not run, and nothing of it is
        unpickled. If there is no checkpoint just there, the nearest one is given, a warning says so,
        and `exact` is False.
        """
        run = self._runs.find(which)
        asked = asked_point(point, loops)
        found, exact = nearest(run.id, self._checkpoints.of(run.id), asked, end=end)
        state = PastState(run.id, found, self._checkpoints.load(found), exact=exact)
        tell_nearest(state, asked)
        return state

    def value(
        self, which: str, name: str, point: str = "", /, *, unproved: bool = False, **loops: Any
    ) -> Any:
        """Return what a run logged under `name` at a point: `value(run, "w", epoch=3)`.

        Tensors, arrays, images and histograms are what they were. A point is the value of each loop
        around the name; without one the name must have been logged once.
        """
        run = self._runs.find(which)
        asked = asked_point(point, loops)
        table = self.table(name, runs=[run.id], unproved=unproved)
        unknown = [loop for loop in asked if loop not in table.columns]
        if unknown:
            raise UsageError(
                f"{name} is not logged in a loop {unknown[0]!r}. Its row has the columns "
                f"{', '.join(table.columns)}.",
                slug="no-point",
            )
        label = name if name in table.columns[:-1] and name not in asked else f"{name}_logged"
        label = label if label in table.columns else name
        rows = [
            row
            for row in table.described()
            if row[label] is not None and all(_equal(row[k], v) for k, v in asked.items())
        ]
        if len(rows) != 1:
            where = "/".join(f"{loop}={value}" for loop, value in asked.items()) or "the whole run"
            raise UsageError(
                f"Run {run.id} has {len(rows) or 'no'} {'value' if len(rows) == 1 else 'values'} of "
                f"{name} at {where}, not one. Name the loops to say which; "
                f"`rearview table {name}` shows all.",
                slug="no-single-value",
            )
        return loaded(rows[0][label])

    def save_values(self, which: str, folder: Path, names: Sequence[str] = ()) -> list[SavedValue]:
        """Write logged values of a run to files in `folder`; return what was written.

        Without names: all arrays, tensors, images and histograms.
        """
        run = self._runs.find(which)
        return save_values(self.table(*names, runs=[run.id]), folder, every=bool(names))

    def name(self, which: str, name: str | None) -> Run:
        """Give a run a name, by which it can be found from now on; None takes its name away."""
        run = self._runs.find_id(which)
        chosen = check_name(name) if name is not None else ""
        others = [other for other in self._runs.named(chosen) if other != run]
        if others:
            raise UsageError(
                f"Run {others[-1]} has the name {chosen!r} already. Choose another, or take it away "
                f"first: `rearview name {others[-1]} --remove`.",
                slug="name-taken",
            )
        return self._labelled(run, labels.NAME, {"name": chosen})

    def tag(self, which: str, *tags: str) -> Run:
        """Give a run tags; those that it has stay."""
        run, checked = self._runs.find_id(which), _some_tags(tags)
        new = [tag for tag in checked if tag not in self._runs.labels(run).tags]
        return self._labelled(run, labels.TAG, {"tags": new}) if new else self._runs.get(run)

    def untag(self, which: str, *tags: str) -> Run:
        """Take tags away from a run; an error if it does not have them."""
        run, checked = self._runs.find_id(which), _some_tags(tags)
        have = self._runs.labels(run).tags
        missing = [tag for tag in checked if tag not in have]
        if missing:
            raise UsageError(
                f"Run {run} has no tag {missing[0]!r}. "
                + (f"It has {', '.join(have)}." if have else "It has none."),
                slug="no-tag",
            )
        return self._labelled(run, labels.UNTAG, {"tags": checked})

    def note(self, which: str, text: str | None) -> Run:
        """Add a note to a run, after those that it has; None takes all of them away."""
        run = self._runs.find_id(which)
        return self._labelled(
            run, labels.NOTE, {"text": check_note(text) if text is not None else None}
        )

    def _labelled(self, run: str, event: str, facts: dict[str, object]) -> Run:
        try:
            self._runs.note(run, event, facts)
        except OSError as exc:
            raise write_error(exc, f"The label of run {run}", self.project.store) from exc
        return self._runs.get(run)

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.project, checkpoints=self._all_checkpoints, versions=self._versions)

    def _all_checkpoints(self) -> list[Checkpoint]:
        return [one for run in self._checkpoints.runs() for one in self._checkpoints.of(run)]

    def names(self) -> list[str]:
        """Return every name that has values, or that the newest source logs."""
        return sorted({*self._tables.names(), *(name for name, _ in self.virtual())})

    def captured(self) -> dict[str, Origin]:
        """Return the columns that no run logged with Rearview, and what each was taken from."""
        return self._tables.captured()

    def empty(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that the newest source logs and that have no value yet."""
        captured = self._tables.captured().items()
        unasked = {name for name, origin in captured if origin in UNASKED}
        logged = self._tables.names().keys() - unasked
        virtual = {name for name, _ in self.virtual()} - logged
        return [name for name in dict.fromkeys(names) if name in virtual]

    def table(
        self,
        *names: str,
        where: str | None = None,
        runs: Sequence[str] | None = None,
        limit: int | None = None,
        order: Sequence[str] | None = None,
        unproved: bool = False,
    ) -> Table:
        """Return one row per point with `names` as columns; without names, all of them.

        Values of replays that were not exact are left out unless `unproved` is True. Values that
        are merely unproved are there; the column `unproved` then names those of each row.
        """
        chosen = [self.run(which).id for which in runs] if runs else None
        self._tables.refresh()
        return self._tables.table(
            names,
            where=where,
            runs=chosen,
            order=order,
            limit=limit,
            virtual=self.virtual(),
            unproved=unproved,
        )

    def plot(
        self,
        *names: str,
        where: str | None = None,
        runs: Sequence[str] | None = None,
        by: str | None = None,
    ) -> Plot:
        """Return the values of `names` as lines over their loop, one per run; a notebook draws them.

        `by` is an argument: one line per value of it, the mean of its runs. `.save("loss.svg")` writes it.
        """
        return plot_of(self, names, where=where, runs=runs, by=by)

    def sql(self, query: str, *, unproved: bool = False) -> Table:
        """Return the answer to one SQL question over the tables of docs/schema.md.

        With `unproved`, the pivoted views hold values of replays that were not exact, too. A column
        of arrays, tensors or images comes back as those; `.arrow()` keeps their text.
        """
        self._tables.refresh()
        return self._tables.sql(query, unproved=unproved, values=True)

    def virtual(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the constant names that the work tree logs, each with the loops around it.

        These are columns of every table, empty where no value was logged or filled.
        """
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

    def source(self, which: str = WORKTREE) -> dict[str, bytes]:
        """Return the files of the source that a run had, or of the work tree, by their paths."""
        return self._versions.files(self._version(which))

    def statement_diff(self, a: str, b: str = WORKTREE) -> list[StatementChange]:
        """Return what became of each statement from run `a` to run `b` or to the work tree.

        This is how propagation matches the two versions. Files go by the names that `b` has.
        """
        probing = self._probing(self.runs())
        old, new = probing.text(self._version(a)), probing.text(self._version(b))
        now = renames(old, new).as_now(old)
        return statement_diff({now.get(path, path): text for path, text in old.items()}, new)

    def files(self, which: str = "latest") -> list[RunFile]:
        """Return the files that a run wrote, and where their contents are."""
        return files_of(self.run(which), self.project.root, self._runs, self._checkpoints)

    def fetch_file(self, which: str, path: str, *, at: str | None = None) -> tuple[bytes, str]:
        """Return the content of a file that a run wrote, and in words where it comes from.

        With `at`, as it was at the checkpoint of that point: "epoch=3".
        """
        run = self.run(which)
        known = [file.path for file in self.files(run.id)]
        if path not in known:
            some = f"It wrote {', '.join(known[:6])}." if known else "It wrote none."
            raise UsageError(f"Run {run.id} did not write {path!r}. {some}", slug="no-file")
        return content_of(run, path, self.project.root, self._checkpoints, at)

    def compare(self, a: str, b: str = "latest") -> Comparison:
        """Return two runs side by side: arguments, last values, source files, surroundings."""
        one, two = self.run(a), self.run(b)
        self._tables.refresh()
        return compare(one, two, runs=self._runs, versions=self._versions, tables=self._tables)

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
        withheld = ", ".join(map(quoted, sorted({*WITHHELD, *CAPTURED})))
        counts = self.sql(
            f"SELECT name, count(*) AS n FROM records WHERE run = {quoted(run.id)} "  # noqa: S608
            f"AND origin NOT IN ({withheld}) GROUP BY name ORDER BY name"
        )
        loops = [(name_of(site), loop.iterations) for site, loop in run.end.loops.items()]
        replays = self._runs.replays(run.id)
        verdict, text = _trust(replays)
        return RunReport(
            run=run,
            names={row["name"]: row["n"] for row in counts if not row["name"].startswith("$")},
            captured={name: str(one) for name, one in self._tables.captured([run.id]).items()},
            loops=loops,
            checkpoints=checkpoints,
            partial=sorted({str(part) for one in checkpoints for part in one.missing}),
            logical=sum(one.nbytes for one in checkpoints),
            stored=sum(one.stored for one in checkpoints),
            costs=run.end.costs,
            replays=replays,
            exact=text,
            verdict=verdict,
            environment=read_environment(self._runs.folder(run.id)),
            environment_differences=environment_differences(self._runs.folder(run.id), os.environ),
        )

    def printed(self, which: str = "latest") -> list[PrintedLine]:
        """Return the lines that a run printed, with the points at which it printed them."""
        return list(printed(self._runs.folder(self.run(which).id)))

    @cached_property
    def _backfiller(self) -> Backfiller:
        return Backfiller(
            self.project,
            self.settings,
            self._runs,
            self._versions,
            self._checkpoints,
            self._tables,
        )

    def _probing(self, runs: Sequence[Run]) -> Probing:
        return self._backfiller.probing(runs)

    def propagate(
        self, names: Sequence[str], *, to: Sequence[str] | None = None
    ) -> list[Propagated]:
        """Return where the statements that the work tree adds belong in each past version."""
        probing = self._probing(self.runs()).carrying(names)
        unknown = [n for n in names if not any(n in probe.names for probe in probing.added)]
        if unknown:
            raise UsageError(
                f"{', '.join(unknown)}: nothing in the work tree logs this beyond what the newest "
                f"run logged. Add a statement such as rearview.log({unknown[0]!r}, value)."
                + logged_outside_project(unknown[0], self.project.root),
                slug="no-probe",
            )
        wanted = {self.run(which).id for which in to} if to else None
        return [one for one in probing.propagated() if wanted is None or wanted & set(one.runs)]

    def correct(
        self,
        which: str,
        path: str,
        line: int,
        names: Sequence[str] = (),
        *,
        after: bool = False,
        renames: Mapping[str, str] | None = None,
        statement: tuple[str, int] | None = None,
    ) -> list[Correction]:
        """Keep by hand where the statements that log `names` go in the version of a run.

        Before `line` of `path`, or behind the statement on it. `renames` says what variables of the
        statement are called there; the others are looked for. `statement` (file and line of the
        work tree) picks one where several statements log a name.
        """
        place = HandPlace(path, line, after, renames or {})
        probing = self._probing(self.runs()).carrying(names)
        return probing.correct(self.run(which), place, names, statement)

    def corrections(self, names: Sequence[str] = ()) -> list[Correction]:
        """Return the places given by hand, of all statements or of those that log `names`."""
        kept = self._backfiller.corrections.kept
        return [one for one in kept if not names or one.concerns(names)]

    @property
    def correction_note(self) -> str:
        """A sentence on corrections that an older Rearview kept and that cannot be used, or ''."""
        return self._backfiller.corrections.note

    def undo(self, which: str, names: Sequence[str] = ()) -> list[Correction]:
        """Forget the places given by hand in the version of a run, and return them."""
        version = self.run(which).version
        gone = [one for one in self.corrections(names) if one.version == version]
        if gone:
            self._backfiller.corrections.remove(gone)
        return gone

    def plan(self, names: Sequence[str] | Question, **choices: Unpack[Choices]) -> PlanReport:
        """Return what has to run again for `names`, and what it costs; nothing runs.

        The keyword arguments are those of `Question`: `runs`, `where`, `at`, `workers`, `budget`,
        `again`, `on` and `gpus`.
        """
        question = _question(names, choices)
        return self._backfiller.plan(
            question, self._backfiller.missing(question, self._chosen(question.runs))
        )

    def backfill(
        self,
        names: Sequence[str] | Question,
        *,
        progress: Progress | None = None,
        plan: PlanReport | None = None,
        **choices: Unpack[Choices],
    ) -> BackfillReport:
        """Fill the columns `names` of past runs from the probes in the work tree.

        The keyword arguments are those of `plan`. `progress` is called with events while segments
        run; `plan` is the answer of `plan` to the same question, if there is one already.
        """
        self.check_trust("A backfill")
        question = _question(names, choices)
        runs = self._chosen(question.runs) if plan is None else ()
        return self._backfiller.backfill(question, runs, progress, plan)

    def replay(
        self,
        which: str = "latest",
        *,
        at: str | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> BackfillReport:
        """Replay a run as it was recorded, with any probes of the work tree, and prove it."""
        self.check_trust("A replay")
        question = Question((), at=at, workers=workers)
        return self._backfiller.replay(self.run(which), question, progress)

    def check_trust(self, doing: str) -> None:
        """Refuse to run anything of a store that was not made here, unless the user trusts it."""
        trust.check_trust(self.project.store, self.settings.trust, doing)

    def trust(self) -> Path:
        """Trust the store where it is now, from now on; return where that is remembered."""
        return trust.remember(self.project.store)

    @property
    def trusted(self) -> bool:
        """Whether what is in the store may be run."""
        return trust.is_trusted(self.project.store, self.settings.trust)

    def problems(self) -> list[str]:
        """Return one sentence for each file of records or facts that is damaged."""
        return self._tables.problems

    def running_backfills(self) -> list[BackfillStatus]:
        """Return the backfills that run in this project now, started from any terminal."""
        return running_backfills(self.project)

    def set_workers(self, workers: int, *, of: str | None = None) -> BackfillStatus:
        """Let a running backfill use that many workers; return which one.

        `of` is a part of its id, needed if several are running.
        """
        running = [each for each in self.running_backfills() if of is None or of in each.id]
        if len(running) != 1:
            what = "No backfill is" if not running else f"{len(running)} backfills are"
            which = ", ".join(each.id for each in running)
            raise UsageError(
                f"{what} under way in {self.project.root}"
                f"{f' that {of!r} means' if of else ''}{f': {which}' if which else ''}. "
                "`rearview workers` shows them; name one with `--of ID`.",
                slug="which-backfill",
            )
        request_workers(self.project, running[0].id, workers)
        return running[0]

    def machine(self, *, measure: bool = False) -> Machine:
        """Return how fast the machine we are on is; with `measure`, measured if that is due."""
        machines = self._backfiller.machines
        return machines.measure() if measure and machines.due() else machines.here()

    def _chosen(self, runs: Sequence[str] | None) -> tuple[Run, ...]:
        return tuple(self.run(which) for which in runs) if runs else tuple(self.runs())

    def resume(
        self, which: str = "latest", preemption: Preemption | None = None, *, source: str = "run"
    ) -> StartCommand:
        """Return how to go on with a run that was stopped, in the place where it ran.

        With `preemption` it can be stopped again, and is brought to a remote if that names one.
        `source` is "run" for the source that it ran, or "worktree" for the one that is there now,
        which must differ only in what runs after the last checkpoint.
        """
        run = self.run(which)
        if run.status is Status.RUNNING:
            Runs(self.project).refuse_if_held(run.id)
        if run.status is Status.FINISHED:
            raise UsageError(
                f"Run {run.id} is {run.status.value}; there is nothing to go on with. "
                "`rearview runs` shows which were stopped.",
                slug="not-stopped",
            )
        _check_whole(run)
        self.check_trust("Resuming a run")
        if not run.facts.watched:
            raise UsageError(
                f"Run {run.id} was started with plain `python`, which cannot be resumed hands-free. "
                "Start it with `rearview run`.",
                slug="not-watched",
            )
        control = Control(
            root=str(self.project.root),
            target=run.facts.target or "",
            module=run.facts.module,
            args=arguments_of(run),
            resume=run.id,
            source=self._mended(run) if source == WORKTREE else None,
            given=arg_values_of(run),
            signals=preemption.signals if preemption is not None else (),
            remote=preemption.remote if preemption is not None else None,
        )
        home = self._runs.folder(run.id)
        env = environment_of(run, home, os.environ, resumes=True)
        folder = Path(run.now(run.cwd, os.path.realpath(self.project.root)))
        command = start_command(control, env, folder, hash_seed=run.facts.hash_seed)
        if control.source:
            now, then = control.source[:12], run.source[:12]
            text = f"going on with the source of the work tree ({now})"
            source_notes: tuple[str, ...] = (
                f"{text}; up to the last checkpoint the run had {then}",
            )
        else:
            source_notes = source_note(self._versions, run)
        kept = home if is_notebook(run.script) else None
        notes = (*source_notes, *environment_note(home))
        return replace(command, run_folder=kept, notes=notes)

    def notebook(self, which: str = "latest") -> bytes:
        """Return the notebook that a run executed, as its version has it."""
        run = self.run(which)
        name = os.path.relpath(os.path.join(run.cwd, run.script), run.home(run.cwd))  # noqa: PTH118
        return self._versions.files(run.source)[name]

    def _mended(self, run: Run) -> str | None:
        """Return the version with which a run goes on if the work tree is to be used."""
        edited = edited_source(self._versions, run)
        if not edited:
            return None
        if not run.version:
            raise UsageError(f"The source of run {run.id} was not kept.", slug="no-source")
        if is_notebook(run.script) and any(map(is_notebook, edited)):
            raise UsageError(
                f"Run {run.id} is of a notebook, which only goes on with the cells that it ran. Resume "
                "it without --source, or start anew with `rearview run`.",
                slug="mend-too-early",
            )
        target = max(
            (one for one in self._checkpoints.of(run.id) if one.complete),
            key=lambda one: one.seq,
            default=None,
        )
        if target is None:
            raise UsageError(
                f"Run {run.id} has no checkpoint that it could go on from with another source. "
                "Start anew: `rearview run`.",
                slug="no-checkpoint",
            )
        recorded, old = self._versions.files(run.version), self._versions.files(run.source)
        new = {**old, **edited}
        kept = {one for ids in mend(recorded, old, new).ids.values() for one in ids.values()}
        for loop, *_ in target.meta.path:
            if loop not in kept and loop.partition(":")[0] in new:
                raise UsageError(
                    f"The loop {loop.rpartition(':')[2]} of {loop.partition(':')[0]}, in which the "
                    f"last checkpoint of run {run.id} lies ({target.point}), was changed itself, so "
                    "the run cannot go on in it with the mended source. Undo that change, or start "
                    "anew with `rearview run`.",
                    slug="mend-too-early",
                )
        return self._versions.derive(run.source, edited)

    def remove(self, *which: str, dry: bool = False) -> Removal:
        """Remove runs: their records, checkpoints, replays and versions, and what only they needed.

        A run that is running, that other runs came from, or that a backfill may be replaying is
        refused, and nothing is removed then. With `dry` nothing is changed in any case. A removal
        that was interrupted is completed by the next.
        """
        pending = unfinished(self.project)
        if not dry:
            finish_removals(self.project, self._versions)
        chosen: dict[str, None] = {}
        for text in which:
            try:
                chosen[self._runs.find_id(text)] = None
            except UsageError:
                if not any(text in {run, name} or run.endswith(text) for run, name in pending):
                    raise
        if chosen and self.running_backfills():
            raise UsageError(
                "Nothing is removed while a backfill is under way: it may be replaying these runs. "
                "`rearview workers` shows it; wait for its end.",
                slug="run-in-use",
            )
        found = [removal_of(self.project, run, together=chosen) for run in chosen]
        if not dry:
            for run in sorted(chosen, reverse=True):  # runs that came from others go first
                remove(self.project, self._versions, run)
        freed = sweep(
            self.project,
            referenced=lambda: recorded_objects(self._tables, tuple(chosen)),
            without=tuple(chosen),
            dry=dry,
        )
        gone = (*(run for run, _ in pending), *chosen)
        if not dry:
            drop_empty_packs(self.project, gone)
        return Removal(gone, found, freed)

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Check every byte of the store; with `repair`, rebuild what can be."""
        return verify(self.project, repair=repair, versions=self._versions)

    def gc(
        self, *, budget: int | None = None, keep: Collection[str] = (), dry: bool = False
    ) -> Freed:
        """Free what nothing refers to, and thin checkpoints until `budget` bytes suffice."""
        if not dry:
            finish_removals(self.project, self._versions)
        bound = budget if budget is not None else self.settings.budget or None
        return sweep(
            self.project,
            referenced=lambda: recorded_objects(self._tables),
            budget=bound,
            keep=keep,
            dry=dry,
        )


def _question(names: Sequence[str] | Question, choices: Choices) -> Question:
    if isinstance(names, Question):
        return replace(names, **choices)
    return Question(tuple(names), **choices)


def _some_tags(tags: Sequence[str]) -> list[str]:
    if not tags:
        raise UsageError(
            "No tag was given. Name one or more: `rearview tag RUN baseline`.", slug="bad-label"
        )
    return list(dict.fromkeys(map(check_tag, tags)))


def _trust(replays: Sequence[Replay]) -> tuple[Verdict | None, str]:
    """Return how far the replays of a run can be trusted, as a value and in words.

    What a later exact replay did again does not count.
    """
    counted = [one for one in replays if not one.redone and not is_superseded(one, replays)]
    decisive = worst(replay.proof for replay in counted)
    if decisive is None:
        return None, "not replayed yet"
    reports = [one.report for one in counted if one.report is not None]
    if decisive.verdict is Verdict.EXACT:
        return decisive.verdict, f"exact: {_count(len(counted))}, {compared(reports)}"
    alike = sum(replay.proof.verdict is decisive.verdict for replay in counted)
    some = f" ({alike} of {_count(len(counted))})" if len(counted) > 1 else ""
    return decisive.verdict, f"{decisive.verdict}{some}: {decisive.why}"


def _equal(value: Any, asked: Any) -> bool:
    """Return True if a loop has the value asked for; a number may be asked for by its text."""
    return bool(value == asked) or (isinstance(value, str) and value == str(asked))


def _count(replays: int) -> str:
    return plural(replays, "replay")


def _check_whole(run: Run) -> None:
    """Refuse a run of which it is not known how it was started or how it ended."""
    if run.damaged or run.facts.rebuilt or run.facts.target is None:
        why = run.damaged or "What was known of its start was damaged and is lost."
        raise DamagedError(f"Run {run.id} cannot be resumed. {why}", slug="damaged")
