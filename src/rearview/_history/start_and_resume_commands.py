"""Prepare the command that starts a run in the current folder, or that resumes a stopped run.

`start_run` returns the command that starts and records a run. `RunResumer` returns the command that resumes a run
from its last checkpoint, with the source of the run or of the work tree. The caller, such as the command line, runs
the command. `rearview run` imports this module and little else, so this module must not import the rest of
`_history`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rearview.config import Settings
from rearview.errors import DamagedError, RearviewError, StoreError, UsageError
from rearview.execute.program_command import (
    LaunchCommand,
    arg_values_of,
    arguments_of,
    program_command,
)
from rearview.model import Run, Status
from rearview.model.process_messages import Control
from rearview.model.run import NOTEBOOK, is_notebook
from rearview.model.secrets import redact, redact_words
from rearview.model.wording import plural
from rearview.store.create_files import make_folder, publish
from rearview.store.project import Project, root_of
from rearview.store.recorded_inputs import environment_differences, environment_of
from rearview.store.runs import Runs
from rearview.store.trust import check_trust
from rearview.store.versions.versions import WORKTREE, Versions

if TYPE_CHECKING:
    from rearview.store.checkpoints.checkpoints import Checkpoints


@dataclass(frozen=True, slots=True)
class Preemption:
    """How a run may be stopped and resumed: by which signals, how often, and to which remote it is copied."""

    signals: tuple[int, ...] = (signal.SIGTERM, signal.SIGUSR1)
    remote: str | None = None
    retries: int = 1000
    exit_every: float | None = None
    """Seconds after its start at which the run saves and exits; None for no limit."""
    waits: bool = False
    """Whether the run may have to wait before it starts; the id of the run is then reserved before the wait."""


def start_run(
    target: str,
    args: Sequence[str],
    *,
    module: bool = False,
    given: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    preemption: Preemption | None = None,
    cells: bool = False,
) -> LaunchCommand:
    """Return the command that records a script or module, started from the current folder.

    `given` has the values of arguments by name, `settings` replaces settings of the project. With `cells`, the script
    is divided into cells, and each point names its cell. With `preemption`, the command resumes the last run of this
    program with these arguments if that run was stopped.
    """
    folder = Path.cwd()
    root = Path(os.environ["REARVIEW_ROOT"]) if "REARVIEW_ROOT" in os.environ else folder
    if not module:
        root = _root_of_script(target, folder)
    notebook = not module and is_notebook(target)
    if notebook:
        # like Jupyter, run the notebook in its own folder
        folder, target = Path(target).resolve().parent, Path(target).name
    control = Control(
        root=str(root.resolve()),
        target=target,
        module=module,
        args=tuple(args),
        given=dict(given or {}),
        settings=dict(settings or {}),
        cells=cells,
    )
    if preemption is None and notebook:
        return _start_notebook(control, folder)
    if preemption is None:
        return program_command(control, os.environ, folder)
    return _start_or_resume(control, preemption, folder)


def _start_notebook(control: Control, folder: Path) -> LaunchCommand:
    """Return the command that starts a kernel for the notebook `control.target`.

    The id of the run is reserved first, because the outputs of the notebook go to the folder of the run.
    """
    try:
        runs = Runs(Project.create(Path(control.root)))
        control = msgspec.structs.replace(control, run=runs.reserve())
    except (StoreError, OSError):
        # the started program warns that nothing is recorded
        return program_command(control, os.environ, folder)
    command = program_command(control, os.environ, folder)
    return replace(command, run_folder=runs.folder(str(control.run)))


def _root_of_script(target: str, folder: Path) -> Path:
    script = Path(target)
    if not script.is_file():
        raise UsageError(
            f"There is no script {target} in {folder}. Give the path of a Python file, or "
            "`-m module`.",
            slug="no-script",
        )
    root = root_of(script)
    if root.resolve() not in script.resolve().parents:
        raise UsageError(
            f"{target} is outside the project {root}; only files inside it are recorded. "
            "Set REARVIEW_ROOT to a folder above the script, or unset it.",
            slug="outside-project",
        )
    return root


def _start_or_resume(control: Control, preemption: Preemption, folder: Path) -> LaunchCommand:
    try:
        project = Project.create(Path(control.root))
    except StoreError:
        # the started program warns that nothing is recorded
        return program_command(control, os.environ, folder)
    control = msgspec.structs.replace(
        control,
        signals=preemption.signals,
        remote=preemption.remote,
        exit_every=preemption.exit_every,
    )
    pulled = None
    if preemption.remote is not None:
        from rearview.remote.open import open_remote
        from rearview.store.maintenance.sync import command_key, pull

        pulled = pull(
            project, open_remote(preemption.remote), command_key(control.target, control.args)
        )
    runs = Runs(project)
    run = stopped_run(runs.all(), control)
    if run is None and preemption.waits:
        control = msgspec.structs.replace(control, run=_reserved_id(project, control))
        command = program_command(control, os.environ, folder)
        return replace(command, run_folder=runs.folder(str(control.run)))
    if run is None:
        return program_command(control, os.environ, folder)
    if run.attempts >= preemption.retries:
        raise UsageError(
            f"Run {run.id} was resumed {plural(preemption.retries, 'time')} and never ended. Look at its "
            "output; raise --retries to let it try again.",
            slug="too-many-attempts",
        )
    if run.id != pulled:  # a run pulled from a remote that the user has named is trusted
        check_trust(project.store, Settings.read(project.store).trust, "Resuming a run")
    control = msgspec.structs.replace(control, resume=run.id)
    run_folder = runs.folder(run.id)
    env = environment_of(run, run_folder, os.environ, resumes=True)
    command = program_command(control, env, folder, hash_seed=run.facts.hash_seed)
    versions = Versions(project, Settings.read(project.store))
    notes = (*source_note(versions, run), *environment_note(run_folder))
    return replace(command, run_folder=run_folder, notes=notes)


def stopped_run(runs: Sequence[Run], control: Control) -> Run | None:
    """Return the newest run with the command of `control` if it was stopped before its end, else None."""
    words = tuple(redact_words(control.args))
    for run in reversed(runs):
        same_target = run.facts.target == control.target and run.argv == words
        if same_target and run.facts.module == control.module:
            return run if run.status in {Status.PAUSED, Status.DEAD} else None
    return None


def _reserved_id(project: Project, control: Control) -> str:
    """Return the id reserved earlier for the command of `control` if that run has not started; else reserve an id."""
    from rearview.store.maintenance.sync import command_key

    key = command_key(f"{int(control.module)}{control.target}", control.args)
    file = project.cache / "asked" / Path(key).name
    runs = Runs(project)
    if file.is_file():
        run = file.read_text("utf-8").strip()
        if runs.folder(run).is_dir() and run not in runs.ids():
            return run
    run = runs.reserve()
    make_folder(file.parent)
    publish(file, run.encode(), durable=False)
    return run


def similar_run(
    target: str, args: Sequence[str], *, module: bool = False
) -> tuple[Run, Path] | None:
    """Return the newest finished run of the program `target`, and the folder of the run; None if there is none.

    If there are finished runs with the arguments `args`, the newest of these is returned.
    """
    root = Path(os.environ.get("REARVIEW_ROOT") or Path.cwd()) if module else root_of(Path(target))
    project = Project.find(root)
    if project is None:
        return None
    runs = Runs(project)
    finished = [
        run
        for run in runs.all()
        if run.status is Status.FINISHED
        and run.facts.target == target
        and run.facts.module == module
    ]
    same_arguments = [run for run in finished if run.argv == tuple(redact_words(args))]
    newest = (same_arguments or finished)[-1:]
    return (newest[0], runs.folder(newest[0].id)) if newest else None


def edited_source(versions: Versions, run: Run) -> dict[str, bytes]:
    """Return path -> content of the Python files and notebooks of the work tree that differ from the run's source."""
    if not run.source:
        return {}
    old, new = versions.files(run.source), versions.files(versions.save(WORKTREE))
    return {
        path: text
        for path, text in new.items()
        if path.endswith((".py", NOTEBOOK)) and old.get(path) != text
    }


def source_note(versions: Versions, run: Run) -> tuple[str, ...]:
    """Return one sentence if the work tree differs from the source of the run to resume, else ()."""
    try:
        edited = sorted(edited_source(versions, run))
    except RearviewError:  # the work tree cannot be saved: resume the run without this note
        return ()
    if not edited:
        return ()
    more_files = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
    text = f"the run continues with the source that it ran; {edited[0]}{more_files} differs in the work tree"
    return (f"{text} (`rearview resume --source worktree` continues with the work tree)",)


def environment_note(folder: Path) -> tuple[str, ...]:
    """Return one sentence if environment variables differ from those of the run in `folder`, else ()."""
    differing = environment_differences(folder, os.environ, resumes=True)
    return (f"environment variables differ: {'; '.join(differing)}",) if differing else ()


def fetch_run(remote: str, which: str = "latest") -> tuple[Run, tuple[str, ...]]:
    """Copy the run `which` from a remote into the project that contains the current folder.

    Return the run, and the paths of its source files that were missing in the project and are now written.
    """
    from rearview.remote.open import open_remote
    from rearview.store.maintenance.sync import pending_runs, pull

    project = Project.create(_project_root())
    place = open_remote(remote)
    keys = pending_runs(place)
    matching = [
        run for run in keys if which == "latest" or run.startswith(which) or run.endswith(which)
    ]
    if not matching or (which != "latest" and len(matching) > 1):
        some = ", ".join(list(keys)[-5:]) or "none"
        raise UsageError(
            f"There is no single run {which!r} at {redact(remote)}. It holds: {some}.",
            slug="no-run",
        )
    pull(project, place, keys[matching[-1]])
    run = Runs(project).get(matching[-1])
    return run, _write_missing_source(project, run)


def _project_root() -> Path:
    if "REARVIEW_ROOT" in os.environ:
        return Path(os.environ["REARVIEW_ROOT"])
    project = Project.find(Path.cwd())
    return project.root if project is not None else Path.cwd()


def _write_missing_source(project: Project, run: Run) -> tuple[str, ...]:
    """Write the source files of a run that are missing in the project's folder; return their paths."""
    if not run.version:
        return ()
    written = []
    for name, data in Versions(project, Settings()).files(run.version).items():
        file = project.root / name
        if os.path.lexists(file) or ".." in Path(name).parts or ".git" in Path(name).parts:
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        written.append(name)
    return tuple(written)


@dataclass(frozen=True)
class RunResumer:
    """Makes the commands that resume the stopped runs of one project."""

    project: Project
    settings: Settings
    runs: Runs
    versions: Versions
    checkpoints: Checkpoints

    def command(
        self, run: Run, preemption: Preemption | None, *, from_worktree: bool
    ) -> LaunchCommand:
        """Return the command that continues `run`, with the source of the work tree if `from_worktree`.

        See `History.resume`.
        """
        self._check_resumable(run)
        control = Control(
            root=str(self.project.root),
            target=run.facts.target or "",
            module=run.facts.module,
            args=arguments_of(run),
            resume=run.id,
            source=self._version_with_edits(run) if from_worktree else None,
            given=arg_values_of(run),
            signals=preemption.signals if preemption is not None else (),
            remote=preemption.remote if preemption is not None else None,
        )
        run_folder = self.runs.folder(run.id)
        env = environment_of(run, run_folder, os.environ, resumes=True)
        folder = Path(run.current_path(run.cwd, os.path.realpath(self.project.root)))
        command = program_command(control, env, folder, hash_seed=run.facts.hash_seed)
        if control.source:
            text = f"the run continues with the source of the work tree ({control.source[:12]})"
            source_notes: tuple[str, ...] = (
                f"{text}; up to the last checkpoint it had {run.source[:12]}",
            )
        else:
            source_notes = source_note(self.versions, run)
        notes = (*source_notes, *environment_note(run_folder))
        outputs = run_folder if is_notebook(run.script) else None
        return replace(command, run_folder=outputs, notes=notes)

    def _check_resumable(self, run: Run) -> None:
        """Raise if a run cannot be resumed: it runs, has finished, is damaged or is not trusted."""
        if run.status is Status.RUNNING:
            self.runs.refuse_if_held(run.id)
        if run.status is Status.FINISHED:
            raise UsageError(
                f"Run {run.id} is {run.status.value}; there is nothing to resume. "
                "`rearview runs` shows which were stopped.",
                slug="not-stopped",
            )
        if run.damaged or run.facts.rebuilt or run.facts.target is None:
            why = run.damaged or "The facts of its start were damaged and are lost."
            raise DamagedError(f"Run {run.id} cannot be resumed. {why}", slug="damaged")
        check_trust(self.project.store, self.settings.trust, "Resuming a run")
        if not run.facts.watched:
            raise UsageError(
                f"Run {run.id} was started with plain `python`, which cannot be resumed hands-free. "
                "Start it with `rearview run`.",
                slug="not-watched",
            )

    def _version_with_edits(self, run: Run) -> str | None:
        """Return a version of the run's source with the edits of the work tree, or None if there are no edits.

        Raise if an edit changes code that has run before the last checkpoint.
        """
        from rearview.source.probes.edit_before_resume import edit_before_resume

        edited = edited_source(self.versions, run)
        if not edited:
            return None
        if not run.version:
            raise UsageError(f"The source of run {run.id} was not kept.", slug="no-source")
        if is_notebook(run.script) and any(map(is_notebook, edited)):
            raise UsageError(
                f"Run {run.id} is of a notebook, which can only be resumed with the cells that it ran. "
                "Resume it without --source, or start a new run with `rearview run`.",
                slug="mend-too-early",
            )
        last = max(
            (checkpoint for checkpoint in self.checkpoints.of(run.id) if checkpoint.complete),
            key=lambda checkpoint: checkpoint.seq,
            default=None,
        )
        if last is None:
            raise UsageError(
                f"Run {run.id} has no checkpoint from which it could continue with another source. "
                "Start a new run: `rearview run`.",
                slug="no-checkpoint",
            )
        recorded, old = self.versions.files(run.version), self.versions.files(run.source)
        new = {**old, **edited}
        unchanged_loops = {
            loop
            for ids in edit_before_resume(recorded, old, new).ids.values()
            for loop in ids.values()
        }
        for loop, *_ in last.meta.path:
            if loop not in unchanged_loops and loop.partition(":")[0] in new:
                raise UsageError(
                    f"The loop {loop.rpartition(':')[2]} of {loop.partition(':')[0]} was changed, and "
                    f"the last checkpoint of run {run.id} is inside it ({last.point}), so the run "
                    "cannot continue with the edited source. Undo that change, or start a new run with "
                    "`rearview run`.",
                    slug="mend-too-early",
                )
        return self.versions.derive(run.source, edited)
