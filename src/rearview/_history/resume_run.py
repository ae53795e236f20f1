"""Resume a stopped run from its last checkpoint, with its own source or with that of the work tree."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rearview._history.run_command import Preemption, edited_source, environment_note, source_note
from rearview.config import Settings
from rearview.errors import DamagedError, UsageError
from rearview.execute.start_command import (
    StartCommand,
    arg_values_of,
    arguments_of,
    start_command,
)
from rearview.model import Control, Run, Status
from rearview.model.run import is_notebook
from rearview.source.probes.resume_edits import resume_edit
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project
from rearview.store.recorded_inputs import environment_of
from rearview.store.runs import Runs
from rearview.store.trust import check_trust
from rearview.store.versions.versions import Versions


@dataclass(frozen=True)
class RunResumer:
    """Makes the commands that resume the runs of one project."""

    project: Project
    settings: Settings
    runs: Runs
    versions: Versions
    checkpoints: Checkpoints

    def command(
        self, run: Run, preemption: Preemption | None, *, from_worktree: bool
    ) -> StartCommand:
        """Return the command that continues `run`; see `History.resume`."""
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
        folder = Path(run.now(run.cwd, os.path.realpath(self.project.root)))
        command = start_command(control, env, folder, hash_seed=run.facts.hash_seed)
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
        """Return a version with the edits of the work tree, or None if there are none.

        Raise if an edit changes code that has run before the last checkpoint.
        """
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
            loop for ids in resume_edit(recorded, old, new).ids.values() for loop in ids.values()
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
