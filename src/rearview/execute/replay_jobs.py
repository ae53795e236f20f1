"""Prepare each replay, and judge its report when it ends.

`ReplayJobs.prepare` makes the scratch tree and the segment file of a replay and returns the task that an
executor starts; `ReplayJobs.judge` reads its report and stores the verdict with the run.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rearview.execute.cores_and_accelerators import threads_of, visible_accelerators
from rearview.execute.executor import SetupStage, Task
from rearview.execute.scratch_tree import (
    keep_recorded_texts,
    make_tree,
    remove_links_and_source,
)
from rearview.execute.start_command import arg_values_of, arguments_of, start_command
from rearview.model import (
    Control,
    Proof,
    ReplayReport,
    Run,
    Segment,
    SegmentFile,
    Verdict,
    proof_of,
)
from rearview.model.messages import VARIABLE, ReplayFailure
from rearview.store.files import caused_by_full_disk, make_folder, publish
from rearview.store.project import Project
from rearview.store.recorded_inputs import environment_of
from rearview.store.records import count_records
from rearview.store.runs import Runs
from rearview.store.versions.versions import Versions

_INHERITED_FACTS = frozenset(
    ("covered", "only", "operator", "head", "tail", "limits", "inner", "same", "crew")
)
"""Facts that a replay from the start takes over from the replay that it repeats."""

_OWN_ERROR = re.compile(r"rearview\.errors\.(?:State|Replay)Error: (.+)")
"""The last line of a traceback if a replay itself stopped the program."""
_TRIAL_BYTES = 64 << 10
"""Bytes that are written to see if the disk is full."""


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The outcome of one segment."""

    run: str
    replay: str
    report: ReplayReport
    log: Path
    """Output of the replayed program."""
    tree: Path
    """Where it ran, with the files it wrote."""
    seconds: float = 0.0
    """From its start to its end, the start of the interpreter included."""
    redone: str = ""
    """Why a first try was run again from the start of the run; empty if there was one try."""

    @property
    def proof(self) -> Proof:
        """How far its values can be trusted, and why."""
        return proof_of(self.report)

    @property
    def proved(self) -> bool:
        """Whether the replay was found equal to the run."""
        return self.proof.verdict is Verdict.EXACT


def needs_rerun(report: ReplayReport, *, pinned: bool = False, shared: bool = False) -> bool:
    """Return True if a replay from the start, alone and free to use every core, would tell more.

    >>> needs_rerun(ReplayReport(retry=True))
    True
    >>> needs_rerun(ReplayReport(difference="w", restored=0))
    False
    >>> needs_rerun(ReplayReport(difference="w"), pinned=True)
    True
    >>> needs_rerun(ReplayReport(error="e"), shared=True)
    True
    """
    differs = report.difference is not None
    wrong = differs or bool(report.lacking) or report.error is not None
    suspicious = wrong or bool(report.differing) or not report.finished
    return (
        report.retry
        or (wrong and report.restored > 0)
        or (differs and pinned)
        or (suspicious and shared)
    )


@dataclass
class ReplayJobs:
    """The replays of one project."""

    project: Project
    versions: Versions
    runs: Runs
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    fold: bool = False
    """Whether large folders of inputs may be one link each: only a process of this machine can follow it."""

    def run_folder(self, run: str) -> Path:
        """Return the folder with the records of a run and of its replays."""
        return self.runs.folder(run)

    def prepare(
        self,
        run: Run,
        version: str,
        segment_file: SegmentFile,
        segment: Segment,
        extra_facts: Mapping[str, Any] | None = None,
        imports: tuple[str, ...] | None = None,
        stages: tuple[SetupStage, ...] = (),
    ) -> Task:
        """Return a task that replays one segment of `run` with the source `version`.

        `extra_facts` are stored with the replay. Its start is announced first, so that other
        backfills skip its iterations. `imports` are the leading imports that it may share, `stages`
        the parts of its set-up.
        """
        facts: dict[str, Any] = {
            "version": version,
            "names": segment_file.names,
            "operator": segment.operator.value,
            "covered": [segment.first, (1 << 62) if segment.last is None else segment.last],
            "only": segment.only,
            "predicted": segment.seconds,
            "head": segment_file.head,
            "tail": segment_file.tail,
            **(extra_facts or {}),
        }
        self.runs.start_replay(run.id, segment_file.replay, facts)
        folder = self.project.replays / segment_file.replay
        tree = folder / "tree"
        segment_file = msgspec.structs.replace(
            segment_file,
            tree=str(tree),
            folded=self._make_tree(run, version, tree),
            report=str(folder / "report.json"),
        )
        file = folder / "segment.json"
        publish(file, msgspec.json.encode(segment_file), durable=False)
        control = Control(
            root=str(self.project.root),
            target=run.facts.target or run.script,
            module=run.facts.module,
            args=arguments_of(run),
            segment=str(file),
            given=arg_values_of(run),
        )
        home = run.home(os.path.realpath(self.project.root))
        relative = os.path.relpath(run.cwd or home, home)
        inside = not relative.startswith("..")
        command = start_command(
            control,
            environment_of(run, self.runs.folder(run.id), self.environment),
            tree / relative if inside else Path(run.cwd),
            hash_seed=run.facts.hash_seed,
        )
        make_folder(command.folder)
        task = Task(
            id=segment_file.replay,
            command=command.command,
            environment=command.environment,
            folder=command.folder,
            log=folder / "output.txt",
            report=folder / "report.json",
            seconds=segment.seconds,
            threads=_threads_to_pin(run, segment),
            accelerators=visible_accelerators(run.facts.hardware),
            imports=imports,
            module_folder=command.folder
            if control.module
            else (tree / script_of(run, home)).parent,
        )
        if not stages:
            return task
        shared_setup = partial(self._setup_task, run, version, segment_file, task)
        return replace(task, stages=stages, shared_setup=shared_setup)

    def _setup_task(self, run: Run, version: str, segment_file: SegmentFile, task: Task) -> Task:
        """Return a task that runs the set-up of `task` in a separate folder; it is not a replay of a run."""
        name = f"{task.id}-setup-{secrets.token_hex(2)}"
        return self._moved_task(run, version, segment_file, task, name)

    def _moved_task(
        self,
        run: Run,
        version: str,
        segment_file: SegmentFile,
        task: Task,
        name: str,
        **changes: Any,
    ) -> Task:
        """Return `task` under another name, in a new tree, with `changes` to its segment file."""
        folder, old = self.project.replays / name, self.project.replays / task.id
        tree = folder / "tree"
        segment_file = msgspec.structs.replace(
            segment_file,
            replay=name,
            tree=str(tree),
            folded=self._make_tree(run, version, tree),
            report=str(folder / "report.json"),
            **changes,
        )
        publish(folder / "segment.json", msgspec.json.encode(segment_file), durable=False)
        control = msgspec.json.decode(task.environment[VARIABLE], type=Control)
        control = msgspec.structs.replace(control, segment=str(folder / "segment.json"))
        return replace(
            task,
            id=name,
            folder=_moved(task.folder, old / "tree", tree),
            environment={**task.environment, VARIABLE: msgspec.json.encode(control).decode()},
            log=folder / "output.txt",
            report=folder / "report.json",
            module_folder=task.module_folder and _moved(task.module_folder, old / "tree", tree),
        )

    def _make_tree(self, run: Run, version: str, tree: Path) -> tuple[str, ...]:
        """Lay out the scratch tree; return the folders in it that are links."""
        root, written = self.project.root, self.runs.created_paths(run.id)
        here = os.path.realpath(root)
        # a program that believes its project elsewhere would follow such a link out of it
        fold = self.fold and run.home(here) == here
        read = [run.now(path, here) for path in run.end.inputs]
        folded = make_tree(
            root,
            self.versions,
            version,
            run.started,
            tree,
            written,
            {os.path.relpath(path, here) for path in read},
            fold=fold,
            working_folder=os.path.relpath(run.cwd or here, here),
        )
        keep_recorded_texts(self.versions, run.version, version, tree)
        return folded

    def from_the_start(self, run: Run, task: Task, because: str) -> Task:
        """Return a task that repeats a replay from the start of the run, without any checkpoint.

        `because` says why; it is stored with the replay.
        """
        old = self.project.replays / task.id
        segment_file = msgspec.json.decode((old / "segment.json").read_bytes(), type=SegmentFile)
        name = f"{task.id}-again"
        first = next(replay for replay in self.runs.replays(run.id) if replay.id == task.id)
        facts = {key: fact for key, fact in first.facts.items() if key in _INHERITED_FACTS}
        facts |= {"version": first.version, "names": list(first.names)}
        facts |= {"redoes": task.id, "because": because}
        self.runs.start_replay(run.id, name, facts)
        # a new tree: the first one contains files that the first replay wrote
        moved = self._moved_task(
            run, first.version, segment_file, task, name, jump=False, thorough=True
        )
        return replace(
            moved,
            threads=None,  # not pinned, so that its cores are not the reason
            imports=None,  # not forked, so that a shared start is not the reason
            stages=(),
        )

    def abandon(self, run: Run, task: Task, why: str) -> None:
        """Store that a task did not end and that another replay does its work.

        The other replay has its own name and tree: the records of both would count if they shared a
        name, and the files that this one wrote are not what the run found.
        """
        report = msgspec.to_builtins(ReplayReport(error=why))
        self.runs.end_replay(run.id, task.id, proved=False, facts={"report": report})
        for part in ("tree", "elsewhere"):
            shutil.rmtree(self.project.replays / task.id / part, ignore_errors=True)

    def interrupt(self, run: Run, task: Task) -> None:
        """Store that a task was stopped by the user; the values that it has logged stay."""
        report = msgspec.to_builtins(ReplayReport(written=self._count_records(run, task)))
        self.runs.end_replay(run.id, task.id, proved=False, facts={"report": report})

    def _count_records(self, run: Run, task: Task) -> int:
        """Return how many records a task left, those of its child processes included."""
        return sum(count_records(self.runs.folder(run.id), task.id).values())

    def judge(
        self, run: Run, task: Task, code: int, seconds: float, redone: str = ""
    ) -> ReplayOutcome:
        """Read the report of a task and store the verdict with the run.

        Raise OSError if the disk is full: every further replay would fail as well.
        """
        try:
            report = msgspec.json.decode(task.report.read_bytes(), type=ReplayReport)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            report = ReplayReport(error=f"the replay ended with exit code {code} and said nothing")
            self._try_disk()
        if report.failure is ReplayFailure.DISK_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.project.store))
        explained = report.failure in {ReplayFailure.PROBE_RAISED, ReplayFailure.WRONG_PLACE}
        if report.error and not explained and task.log.is_file():
            report.error = _explain(report.error, task.log.read_text("utf-8", "replace"))
        report.written = max(report.written, self._count_records(run, task))
        outcome = ReplayOutcome(run.id, task.id, report, task.log, task.folder, seconds, redone)
        if outcome.proved:
            remove_links_and_source(self.project.replays / task.id / "tree")
        self.runs.end_replay(
            run.id, task.id, proved=outcome.proved, facts={"report": msgspec.to_builtins(report)}
        )
        return outcome

    def _try_disk(self) -> None:
        """Raise OSError if the disk of the store is full: a replay then cannot write its report."""
        try:
            with tempfile.TemporaryFile(dir=self.project.replays) as file:
                file.write(os.urandom(_TRIAL_BYTES))
                file.flush()
        except OSError as exc:
            if caused_by_full_disk(exc):
                raise


def _explain(error: str, log: str) -> str:
    r"""Return `error` with the last lines of the log, or only the message if Rearview itself raised the exception.

    >>> _explain("exit code 1", "File a.py, line 3\n    f(x)\n    ^^^^\nValueError: x is 0")
    'exit code 1: File a.py, line 3 / f(x) / ValueError: x is 0'
    >>> _explain("exit code 1", "    f(x)\nrearview.errors.StateError: x was not saved.")
    'x was not saved.'
    """
    lines = [text for line in log.splitlines() if (text := line.strip(" ~^\t"))]
    if lines and (own := _OWN_ERROR.match(lines[-1])):
        return own[1]
    return error + ": " + " / ".join(lines[-3:])


def _threads_to_pin(run: Run, segment: Segment) -> int | None:
    """Return how many cores a replay is pinned to; None if it may use any core.

    A rerun is not pinned: if it differs from the run, its cores are not the reason, and it is not repeated.
    """
    return None if segment.rerun else threads_of(run.facts.threads, run.end.surroundings)


def script_of(run: Run, home: str) -> str:
    """Return the path of a run's script in the project, whose folder was `home`."""
    script = Path(run.cwd or home, run.facts.target or run.script)
    return os.path.relpath(os.path.realpath(script), os.path.realpath(home))


def _moved(path: Path, old: Path, new: Path) -> Path:
    """Return a folder below `old` as the same folder below `new`, which is created."""
    if not path.is_relative_to(old):
        return path
    moved = new / path.relative_to(old)
    make_folder(moved)
    return moved
