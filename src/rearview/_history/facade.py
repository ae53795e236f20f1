"""`History`, the facade of one project: its runs, logged values, states and backfills.

Each method of `History` parses its arguments, calls the room that does the work, and returns the result.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from rearview._history.checkpoint_state import (
    PastRun,
    PastState,
    nearest,
    parse_point,
    warn_if_not_exact,
    with_history,
)
from rearview._history.run_reports import Comparison, Removal, RunReport, compare, run_report
from rearview._history.save_values import SavedValue, save_values, single_value
from rearview._history.start_and_resume_commands import Preemption
from rearview._history.text_and_svg_plots import Plot, plot_of
from rearview.config import Settings
from rearview.errors import RearviewError, UsageError
from rearview.execute.backfill_status import (
    BackfillStatus,
    Progress,
    request_workers,
    running_backfills,
)
from rearview.execute.program_command import (
    LaunchCommand,
)
from rearview.model import Checkpoint, Origin, Run
from rearview.model.run import UNASKED
from rearview.plan.facts import Machine
from rearview.source.log_calls import names_logged
from rearview.store import trust
from rearview.store.checkpoints.checkpoints import (
    Checkpoints,
    RunFile,
    written_content,
    written_files,
)
from rearview.store.create_files import write_error
from rearview.store.maintenance.removal import (
    drop_empty_packs,
    finish_removals,
    removal_of,
    remove,
    unfinished,
)
from rearview.store.maintenance.thin_and_collect import Freed, recorded_objects
from rearview.store.maintenance.thin_and_collect import gc as sweep
from rearview.store.maintenance.verify import VerifyReport, verify
from rearview.store.printed_lines import PrintedLine, read_printed_lines
from rearview.store.project import FOLDER, Project
from rearview.store.runs import NAME, NOTE, TAG, UNTAG, Runs, check_name, check_note, check_tag
from rearview.store.tables.answer_queries import Tables
from rearview.store.tables.result_table import Table
from rearview.store.versions.versions import WORKTREE, Versions

if TYPE_CHECKING:
    from rearview.backfill.backfill import Backfiller
    from rearview.backfill.examine_run import Choices, Question
    from rearview.backfill.manual_placement import Correction
    from rearview.backfill.propagation import Probing, Propagated
    from rearview.backfill.reports import BackfillReport, PlanReport
    from rearview.source.propagate.statement_diff import StatementChange


def history(start: Path | str | None = None) -> History:
    """Return the history of the project that contains the folder `start`.

    If `start` is None, the folder is that of the environment variable `REARVIEW_ROOT`, or else the current folder.
    """
    return History(Project.open(Path(start or os.environ.get("REARVIEW_ROOT") or Path.cwd())))


def repair_format(start: Path) -> Path:
    """Repair the store in `start` or in a folder above it, if its file `format` is unreadable; return the file's path."""
    folders = (start.resolve(), *start.resolve().parents)
    root = next(folder for folder in folders if (folder / FOLDER / "format").exists())
    verify(Project(root), repair=True)
    return root / FOLDER / "format"


class History:
    """The runs of one project, with their values and states, and the backfills that add values."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.settings = Settings.read(project.store)
        self._runs = Runs(project)
        self._versions = Versions(project, self.settings)
        self._checkpoints = Checkpoints(project)

    def __repr__(self) -> str:
        count = len(self._runs.ids())
        return f"<History of {self.project.root}: {count} {'run' if count == 1 else 'runs'}>"

    def runs(
        self, where: str | None = None, *, order: str | Sequence[str] | None = None
    ) -> list[Run]:
        """Return all runs, oldest first, or only the runs for which the SQL condition `where` holds.

        The condition may use facts of runs (`status`, `name`, `tag`, `seconds`, …), arguments, and logged
        names, which stand for the last logged value: "tag = 'baseline' and acc > 0.9". `order` sorts the runs
        by columns of the same kinds: "acc desc, started".
        """
        runs = self._runs.all()
        if where is not None or order:
            self._tables.refresh()
            positions = {run: k for k, run in enumerate(self._tables.matching(where, order))}
            if where is not None:
                runs = [run for run in runs if run.id in positions]
            runs.sort(key=lambda run: positions.get(run.id, len(positions)))
        return [with_history(run, self.at, self.value) for run in runs]

    def run(self, which: str = "latest") -> PastRun:
        """Return one run: by id, by name, by the beginning or end of its id, or by age: `latest` or -1, -2, ….

        The method `at(epoch=3)` of the result returns the state of the run at this point; `value("w", epoch=3)`
        returns the value that the run logged at this point.
        """
        return with_history(self._runs.find(which), self.at, self.value)

    def at(
        self, which: str = "latest", point: str = "", /, *, end: bool = False, **loops: Any
    ) -> PastState:
        """Return the variables of a run at the checkpoint nearest to a point: `at(run, epoch=3)`.

        The values are those at the start of the iteration or, with `end`, at its end. Without a point, they are
        those of the last checkpoint. The program does not run, and nothing is unpickled. If there is no
        checkpoint at the point, the variables at the nearest checkpoint are returned with a warning, and `exact`
        of the result is False.
        """
        run = self._runs.find(which)
        point_values = parse_point(point, loops)
        checkpoint, exact = nearest(run.id, self._checkpoints.of(run.id), point_values, end=end)
        state = PastState(run.id, checkpoint, self._checkpoints.load(checkpoint), exact=exact)
        warn_if_not_exact(state, point_values)
        return state

    def value(
        self, which: str, name: str, point: str = "", /, *, unproved: bool = False, **loops: Any
    ) -> Any:
        """Return the value that a run logged under `name` at a point: `value(run, "w", epoch=3)`.

        Tensors, arrays, images and histograms are loaded. A point gives a value for loops around the log call;
        raise if not exactly one value was logged at the point. With `unproved`, the value may come from a replay
        that was not exact.
        """
        run = self._runs.find(which)
        point_values = parse_point(point, loops)
        table = self.table(name, runs=[run.id], unproved=unproved)
        return single_value(table, run.id, name, point_values)

    def save_values(self, which: str, folder: Path, names: Sequence[str] = ()) -> list[SavedValue]:
        """Write the values that a run logged under `names` to files in `folder`; return the files.

        Without `names`, all arrays, tensors, images and histograms of the run are written.
        """
        run = self._runs.find(which)
        return save_values(self.table(*names, runs=[run.id]), folder, every=bool(names))

    def name(self, which: str, name: str | None) -> Run:
        """Give a run a name, by which the user can refer to the run; None removes the name. Return the run."""
        run = self._runs.find_id(which)
        checked_name = check_name(name) if name is not None else ""
        holders = [holder for holder in self._runs.ids_by_name(checked_name) if holder != run]
        if holders:
            raise UsageError(
                f"Run {holders[-1]} already has the name {checked_name!r}. Choose another, or remove "
                f"it first: `rearview name {holders[-1]} --remove`.",
                slug="name-taken",
            )
        return self._labelled(run, NAME, {"name": checked_name})

    def tag(self, which: str, *tags: str) -> Run:
        """Add tags to a run and return the run; tags that the run has already are skipped."""
        run, checked = self._runs.find_id(which), _some_tags(tags)
        new = [tag for tag in checked if tag not in self._runs.labels(run).tags]
        return self._labelled(run, TAG, {"tags": new}) if new else self._runs.get(run)

    def untag(self, which: str, *tags: str) -> Run:
        """Remove tags from a run and return the run; raise if the run lacks any of these tags."""
        run, checked = self._runs.find_id(which), _some_tags(tags)
        present = self._runs.labels(run).tags
        absent_tags = [tag for tag in checked if tag not in present]
        if absent_tags:
            raise UsageError(
                f"Run {run} has no tag {absent_tags[0]!r}. "
                + (f"It has {', '.join(present)}." if present else "It has none."),
                slug="no-tag",
            )
        return self._labelled(run, UNTAG, {"tags": checked})

    def note(self, which: str, text: str | None) -> Run:
        """Add a note to a run, after its other notes; None removes all notes of the run. Return the run."""
        run = self._runs.find_id(which)
        return self._labelled(run, NOTE, {"text": check_note(text) if text is not None else None})

    def _labelled(self, run: str, event: str, facts: dict[str, object]) -> Run:
        try:
            self._runs.append_event(run, event, facts)
        except OSError as exc:
            raise write_error(exc, f"The label of run {run}", self.project.store) from exc
        return self._runs.get(run)

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.project, checkpoints=self._all_checkpoints, versions=self._versions)

    def _all_checkpoints(self) -> list[Checkpoint]:
        return [
            checkpoint
            for run in self._checkpoints.runs()
            for checkpoint in self._checkpoints.of(run)
        ]

    def names(self) -> list[str]:
        """Return, sorted, every name that has values or that the work tree logs."""
        return sorted({*self._tables.loops_by_name(), *(name for name, _ in self.virtual())})

    def captured(self) -> dict[str, Origin]:
        """Return column -> origin, for columns with values that the program did not log with Rearview."""
        return self._tables.captured()

    def empty(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that the work tree logs and that have no value yet."""
        captured = self._tables.captured().items()
        unasked = {name for name, origin in captured if origin in UNASKED}
        logged = self._tables.loops_by_name().keys() - unasked
        virtual = {name for name, _ in self.virtual()} - logged
        return [name for name in dict.fromkeys(names) if name in virtual]

    def table(
        self,
        *names: str,
        where: str | None = None,
        runs: Sequence[str] | None = None,
        limit: int | None = None,
        order: str | Sequence[str] | None = None,
        unproved: bool = False,
        interpolate: bool = False,
    ) -> Table:
        """Return one row per point with `names` as columns; without names, with a column for every name.

        `where` is an SQL condition for the rows, `limit` the maximum number of rows. `order` sorts the rows ("acc
        desc, epoch"); without `order`, rows are in the order in which they were logged. Values of replays that were
        not exact are left out unless `unproved` is True. Values of replays that could be neither proved nor
        refuted are included; the column `unproved` lists their names in each row. With `interpolate`, missing
        numbers between two numbers of the same run and loop are interpolated; the column `interpolated` lists
        their names in each row.
        """
        run_ids = [self.run(which).id for which in runs] if runs else None
        self._tables.refresh()
        return self._tables.table(
            names,
            where=where,
            runs=run_ids,
            order=order,
            limit=limit,
            fillable=self.virtual(),
            unproved=unproved,
            interpolate=interpolate,
        )

    def plot(
        self,
        *names: str,
        where: str | None = None,
        runs: Sequence[str] | None = None,
        by: str | None = None,
    ) -> Plot:
        """Return a plot of `names` over the iterations of their loop, with one line per run; a notebook draws it.

        If `by` is the name of an argument, there is one line per value of this argument: the mean of the runs
        with this value. The method `save("loss.svg")` of the result writes a picture.
        """
        return plot_of(self, names, where=where, runs=runs, by=by)

    def sql(self, query: str, *, unproved: bool = False) -> Table:
        """Return the result of one SQL query over the tables of docs/schema.md.

        With `unproved`, the views with a column per logged name also contain values of replays that were not exact.
        Arrays, tensors and images are objects that load their content; `.arrow()` of the result has them as text.
        """
        self._tables.refresh()
        return self._tables.sql(query, unproved=unproved, values=True)

    def virtual(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return (name, loops around the log call) for each name that log calls of the work tree spell out.

        Every table has a column for each of these names; the column is empty where no value was logged or filled in.
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
        """Return the changes in the source from run `a` to run `b` or to the work tree, as a unified diff."""
        return self._versions.diff(self._version(a), self._version(b))

    def source(self, which: str = WORKTREE) -> dict[str, bytes]:
        """Return file path -> content of the source files of a run, or of the work tree."""
        return self._versions.files(self._version(which))

    def statement_diff(self, a: str, b: str = WORKTREE) -> list[StatementChange]:
        """Return how each statement changed from run `a` to run `b` or to the work tree.

        A statement of `a` is matched with one of `b` by the rules of `propagate`. File paths in the result are
        those of `b`.
        """
        probing = self._probing(self.runs())
        old, new = probing.text(self._version(a)), probing.text(self._version(b))
        from rearview.source.moved_files import renames
        from rearview.source.propagate.statement_diff import statement_diff

        renamed_paths = renames(old, new).unique_new_paths(old)
        return statement_diff(
            {renamed_paths.get(path, path): text for path, text in old.items()}, new
        )

    def files(self, which: str = "latest") -> list[RunFile]:
        """Return the files that a run wrote, and where their contents are."""
        return written_files(self.run(which), self.project.root, self._runs, self._checkpoints)

    def fetch_file(self, which: str, path: str, *, at: str | None = None) -> tuple[bytes, str]:
        """Return the content of a file that a run wrote, and a text that says where the content was found.

        With `at` ("epoch=3"), return the content that the file had at the checkpoint at this point.
        """
        run = self.run(which)
        written = [file.path for file in self.files(run.id)]
        if path not in written:
            files = f"It wrote {', '.join(written[:6])}." if written else "It wrote none."
            raise UsageError(f"Run {run.id} did not write {path!r}. {files}", slug="no-file")
        return written_content(run, path, self.project.root, self._checkpoints, at)

    def compare(self, a: str, b: str = "latest") -> Comparison:
        """Return the runs `a` and `b` side by side: arguments, last values, source files, machine and libraries."""
        run_a, run_b = self.run(a), self.run(b)
        self._tables.refresh()
        return compare(run_a, run_b, runs=self._runs, versions=self._versions, tables=self._tables)

    def _version(self, which: str) -> str:
        if which == WORKTREE:
            return self._versions.save(WORKTREE)
        version = self.run(which).version
        if not version:
            raise UsageError(f"The source of run {which} was not kept.", slug="no-source")
        return version

    def show(self, which: str = "latest", *, names: bool = True) -> RunReport:
        """Return a report on one run; if `names` is False, its records are not read, and the report has no names."""
        run = self.run(which)
        return run_report(run, self._runs, self._checkpoints, self._tables, names=names)

    def printed(self, which: str = "latest") -> list[PrintedLine]:
        """Return the lines that a run printed, with the points at which it printed them."""
        return list(read_printed_lines(self._runs.folder(self.run(which).id)))

    @cached_property
    def _backfiller(self) -> Backfiller:
        from rearview.backfill.backfill import Backfiller

        return Backfiller(
            self.project,
            self.settings,
            self._runs,
            self._versions,
            self._checkpoints,
            self._tables,
        )

    def _probing(self, runs: Sequence[Run], sure: float | None = None) -> Probing:
        return self._backfiller.probing(runs, sure)

    def propagate(
        self,
        names: Sequence[str],
        *,
        to: Sequence[str] | None = None,
        sure: float | None = None,
    ) -> list[Propagated]:
        """Return, for each past version that does not log `names`, where the statements that log them belong.

        The statements are those of the work tree or, if the work tree does not log the names, of the newest
        version that does. `to` limits the result to the versions of these runs. Positions less certain than `sure`
        (from 0 to 1) are refused; None takes the setting `propagation`.
        """
        statements = self._backfiller.statements(self.runs(), sure)
        past = statements.past(names)
        if past is not None:
            return _of_runs(past.propagated(), self, to)
        probing = statements.probing.carrying(names)
        unknown = [
            name for name in names if not any(name in probe.names for probe in probing.added)
        ]
        if unknown:
            from rearview.backfill.find_statements import logged_outside_project

            raise UsageError(
                f"{', '.join(unknown)}: nothing in the work tree logs this beyond what the newest "
                f"run logged. Add a statement such as rearview.log({unknown[0]!r}, value)."
                + logged_outside_project(unknown[0], self.project.root),
                slug="no-probe",
            )
        return _of_runs(probing.propagated(), self, to)

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
        """Store the user's decision where the statements that log `names` belong in the version of a run.

        The statements go before `line` of the file `path` or, if `after` is True, after the statement on this line.
        `renames` maps variables of the statements to their names in this version; Rearview finds the names that
        are not given. `statement` (file and line in the work tree) picks a statement if several log a name.
        """
        from rearview.source.propagate.versions import HandPlace

        place = HandPlace(path, line, after, renames or {})
        run = self.run(which)
        statements = self._backfiller.statements(self.runs())
        past = statements.past(names)
        if past is not None and past.probings_for(run):
            return past.probings_for(run)[0].correct(run, place, names, statement)
        return statements.probing.carrying(names).correct(run, place, names, statement)

    def corrections(self, names: Sequence[str] = ()) -> list[Correction]:
        """Return the positions stored by `correct`: for all statements, or only for statements that log `names`."""
        stored = self._backfiller.corrections.all
        return [correction for correction in stored if not names or correction.concerns(names)]

    @property
    def correction_note(self) -> str:
        """A sentence about corrections in the store that cannot be used, or '' if there are none."""
        return self._backfiller.corrections.note

    def undo(self, which: str, names: Sequence[str] = ()) -> list[Correction]:
        """Delete the positions that `correct` stored for the version of a run; return the deleted positions.

        If `names` is given, only positions of statements that log one of these names are deleted.
        """
        version = self.run(which).version
        removed = [
            correction for correction in self.corrections(names) if correction.version == version
        ]
        if removed:
            self._backfiller.corrections.remove(removed)
        return removed

    def plan(self, names: Sequence[str] | Question, **choices: Unpack[Choices]) -> PlanReport:
        """Return the segments that must run again to fill `names`, and their cost, without running any.

        The keyword arguments are those of `Question`: `runs`, `where`, `at`, `workers`, `budget`,
        `again`, `on` and `gpus`.
        """
        question = _question(names, choices)
        return self._backfiller.plan(
            question, self._backfiller.missing(question, self._selected(question.runs))
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

        The keyword arguments are those of the method `plan`. `progress` is called with events while segments run.
        The parameter `plan` may pass the result of the method `plan` for the same question, which is then not
        computed again.
        """
        self.check_trust("A backfill")
        question = _question(names, choices)
        runs = self._selected(question.runs) if plan is None else ()
        return self._backfiller.backfill(question, runs, progress, plan)

    def replay(
        self,
        which: str = "latest",
        *,
        at: str | None = None,
        workers: int | None = None,
        progress: Progress | None = None,
    ) -> BackfillReport:
        """Replay a run with its recorded source and any probes of the work tree; compare with what was recorded."""
        self.check_trust("A replay")
        from rearview.backfill.examine_run import Question

        question = Question((), at=at, workers=workers)
        return self._backfiller.replay(self.run(which), question, progress)

    def check_trust(self, doing: str) -> None:
        """Raise if the store was created elsewhere, or is a copy, and the user has not said to trust it.

        `doing` names the refused action in the message: "A backfill".
        """
        trust.check_trust(self.project.store, self.settings.trust, doing)

    def trust(self) -> Path:
        """Remember that the user trusts the store at its present path; return the file that says so."""
        return trust.remember(self.project.store)

    @property
    def trusted(self) -> bool:
        """Whether the store is trusted, so that programs from it may be run."""
        return trust.is_trusted(self.project.store, self.settings.trust)

    def problems(self) -> list[str]:
        """Return one sentence for each damaged file of records or facts of runs."""
        return self._tables.problems

    def running_backfills(self) -> list[BackfillStatus]:
        """Return the backfills that run in this project now, started from any terminal."""
        return running_backfills(self.project)

    def set_workers(self, workers: int, *, of: str | None = None) -> BackfillStatus:
        """Ask a running backfill to work with this number of workers; return the backfill.

        `of` is a part of the id of the backfill; it is needed if several backfills are running.
        """
        running = [
            backfill for backfill in self.running_backfills() if of is None or of in backfill.id
        ]
        if len(running) != 1:
            count_text = "No backfill is" if not running else f"{len(running)} backfills are"
            which = ", ".join(backfill.id for backfill in running)
            raise UsageError(
                f"{count_text} under way in {self.project.root}"
                f"{f' that {of!r} means' if of else ''}{f': {which}' if which else ''}. "
                "`rearview workers` shows them; name one with `--of ID`.",
                slug="which-backfill",
            )
        request_workers(self.project, running[0].id, workers)
        return running[0]

    def machine(self, *, measure: bool = False) -> Machine:
        """Return the measured speeds of this machine; with `measure`, measure again if the last results are old."""
        machines = self._backfiller.machines
        return machines.measure() if measure and machines.due() else machines.this_machine()

    def _selected(self, runs: Sequence[str] | None) -> tuple[Run, ...]:
        return tuple(self.run(which) for which in runs) if runs else tuple(self.runs())

    def resume(
        self, which: str = "latest", preemption: Preemption | None = None, *, source: str = "run"
    ) -> LaunchCommand:
        """Return the command that continues a stopped run, in the folder in which the run was started.

        With `preemption`, the run can be stopped again, and is copied to `preemption.remote`.
        `source` is "run" for the source that the run had, or "worktree" for the work tree, which may
        differ only in code that runs after the last checkpoint.
        """
        from rearview._history.start_and_resume_commands import RunResumer

        resumer = RunResumer(
            self.project, self.settings, self._runs, self._versions, self._checkpoints
        )
        return resumer.command(self.run(which), preemption, from_worktree=source == WORKTREE)

    def notebook(self, which: str = "latest") -> bytes:
        """Return the content of the notebook file that a run executed, from the recorded version."""
        run = self.run(which)
        name = os.path.relpath(os.path.join(run.cwd, run.script), run.recorded_root(run.cwd))  # noqa: PTH118
        return self._versions.files(run.source)[name]

    def remove(self, *which: str, dry: bool = False) -> Removal:
        """Remove runs: their records, checkpoints, replays and versions, and the objects that no other run needs.

        Raise, without removing anything, if one of the runs is running, if another run was started from it, or if
        a backfill is running. With `dry`, remove nothing and return what would be removed. A removal that was
        interrupted is completed by the next call.
        """
        pending = unfinished(self.project)
        if not dry:
            finish_removals(self.project, self._versions)
        run_ids: dict[str, None] = {}
        for text in which:
            try:
                run_ids[self._runs.find_id(text)] = None
            except UsageError:
                if not any(text in {run, name} or run.endswith(text) for run, name in pending):
                    raise
        if run_ids and self.running_backfills():
            raise UsageError(
                "Nothing is removed while a backfill is under way: it may be replaying these runs. "
                "`rearview workers` shows it; wait for its end.",
                slug="run-in-use",
            )
        removals = [removal_of(self.project, run, together=run_ids) for run in run_ids]
        if not dry:
            # newest first: a run is removed before the run from which it was started
            for run in sorted(run_ids, reverse=True):
                remove(self.project, self._versions, run)
        freed = sweep(
            self.project,
            referenced=lambda: recorded_objects(self._tables, tuple(run_ids)),
            without=tuple(run_ids),
            dry=dry,
        )
        removed_ids = (*(run for run, _ in pending), *run_ids)
        if not dry:
            drop_empty_packs(self.project, removed_ids)
        return Removal(removed_ids, removals, freed)

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Check every byte of the store and return the problems; with `repair`, rebuild the files that can be rebuilt."""
        return verify(self.project, repair=repair, versions=self._versions)

    def gc(
        self, *, budget: int | None = None, keep: Collection[str] = (), dry: bool = False
    ) -> Freed:
        """Delete unreferenced objects, and thin out checkpoints until they fit into `budget` bytes.

        If `budget` is None, the setting `budget` counts. With `dry`, delete nothing and return what would be deleted.
        """
        if not dry:
            finish_removals(self.project, self._versions)
        max_bytes = budget if budget is not None else self.settings.budget or None
        return sweep(
            self.project,
            referenced=lambda: recorded_objects(self._tables),
            budget=max_bytes,
            keep=keep,
            dry=dry,
        )


def _question(names: Sequence[str] | Question, choices: Choices) -> Question:
    from rearview.backfill.examine_run import Question

    if isinstance(names, Question):
        return replace(names, **choices)
    return Question(tuple(names), **choices)


def _of_runs(
    versions: list[Propagated], history: History, which: Sequence[str] | None
) -> list[Propagated]:
    """Return those of `versions` that the runs `which` have, or all `versions` if `which` is empty or None."""
    runs = {history.run(run).id for run in which} if which else None
    return [version for version in versions if runs is None or runs & set(version.runs)]


def _some_tags(tags: Sequence[str]) -> list[str]:
    if not tags:
        raise UsageError(
            "No tag was given. Name one or more: `rearview tag RUN baseline`.", slug="bad-label"
        )
    return list(dict.fromkeys(map(check_tag, tags)))
