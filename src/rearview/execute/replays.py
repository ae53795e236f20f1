"""Carry out replays: make each segment ready, run them on an executor, judge what comes back."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rearview.execute.executor import Task
from rearview.execute.places import seen_of, threads_of
from rearview.execute.scratch import keep_texts, lay_out
from rearview.execute.start import start
from rearview.model import Control, Report, Run, Segment, Wanted
from rearview.model.segment import PROBE_RAISED, VARIABLE
from rearview.store.project import Project, publish
from rearview.store.runs import Runs
from rearview.store.versions import Versions

_KEPT = frozenset(
    ("covered", "only", "operator", "head", "tail", "limits", "inner", "same", "crew")
)
"""What a replay from the start takes over from the one that it stands in for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one segment."""

    run: str
    replay: str
    report: Report
    log: Path
    """Output of the replayed program."""
    tree: Path
    """Where it ran, with the files it wrote."""
    seconds: float = 0.0
    """From its start to its end, the interpreter's included."""

    @property
    def proved(self) -> bool:
        """Whether the replay was found equal to the run."""
        return self.report.proved


def doubtful(report: Report, *, pinned: bool = False, shared: bool = False) -> bool:
    """Say whether a run from the start, alone and free to use every core, would tell more.

    >>> doubtful(Report(retry=True)), doubtful(Report(difference="w", restored=0))
    (True, False)
    >>> doubtful(Report(difference="w"), pinned=True), doubtful(Report(error="e"), shared=True)
    (True, True)
    """
    differs = report.difference is not None
    wrong = differs or report.error is not None
    begun = wrong or bool(report.differing) or not report.finished
    return (
        report.retry
        or (wrong and report.restored > 0)
        or (differs and pinned)
        or (begun and shared)
    )


@dataclass
class Replays:
    """The replays of one project."""

    project: Project
    versions: Versions
    runs: Runs
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def prepare(
        self,
        run: Run,
        version: str,
        wanted: Wanted,
        segment: Segment,
        told: Mapping[str, Any] | None = None,
        imports: tuple[str, ...] | None = None,
    ) -> Task:
        """Return a task that replays what is wanted of `run` with the source `version`.

        What is `told` besides is kept with the replay. That it has started is said first: others
        then leave what it covers to it. It may share its leading `imports`, if they are given.
        """
        covered = [segment.first, (1 << 62) if segment.last is None else segment.last]
        about: dict[str, Any] = {
            "version": version,
            "names": wanted.names,
            "operator": segment.operator.value,
        }
        about |= {"covered": covered, "only": segment.only, "predicted": segment.seconds}
        about |= {"head": wanted.head, "tail": wanted.tail, **(told or {})}
        self.runs.start_replay(run.id, wanted.replay, about)
        folder = self.project.replays / wanted.replay
        tree = folder / "tree"
        self._lay_out(run, version, tree)
        wanted = msgspec.structs.replace(wanted, tree=str(tree), report=str(folder / "report.json"))
        file = folder / "segment.json"
        publish(file, msgspec.json.encode(wanted), durable=False)
        facts = run.facts
        control = Control(
            root=str(self.project.root),
            target=str(facts.get("target", run.script)),
            module=bool(facts.get("module")),
            args=run.argv,
            segment=str(file),
            given=dict(facts.get("given", {})),
        )
        home = run.home(os.path.realpath(self.project.root))
        relative = os.path.relpath(run.cwd or home, home)
        inside = not relative.startswith("..")
        how = start(
            control,
            {**self.environment, **facts.get("threads", {})},
            tree / relative if inside else Path(run.cwd),
            hash_seed=str(facts.get("hash_seed", "0")),
        )
        how.folder.mkdir(parents=True, exist_ok=True)
        return Task(
            id=wanted.replay,
            command=how.command,
            environment=how.environment,
            folder=how.folder,
            log=folder / "output.txt",
            report=folder / "report.json",
            seconds=segment.seconds,
            threads=threads_of(facts.get("threads", {})),
            accelerators=seen_of(facts.get("hardware", {})),
            imports=imports,
            beside=how.folder if control.module else (tree / script_of(run, home)).parent,
        )

    def _lay_out(self, run: Run, version: str, tree: Path) -> None:
        lay_out(self.project.root, self.versions, version, run.started, tree)
        keep_texts(self.versions, run.version, version, tree)

    def from_the_start(self, run: Run, task: Task) -> Task:
        """Return a task that replays the same without trusting any checkpoint."""
        old = self.project.replays / task.id
        wanted = msgspec.json.decode((old / "segment.json").read_bytes(), type=Wanted)
        folder = self.project.replays / f"{task.id}-again"
        about = next(one for one in self.runs.replays(run.id) if one.id == task.id)
        told = {k: v for k, v in about.facts.items() if k in _KEPT}
        told |= {"version": about.version, "names": list(about.names)}
        self.runs.start_replay(run.id, folder.name, told)
        tree = folder / "tree"  # not that of the first: it holds what that one wrote
        self._lay_out(run, about.version, tree)
        wanted = msgspec.structs.replace(
            wanted,
            replay=folder.name,
            tree=str(tree),
            report=str(folder / "report.json"),
            jump=False,
        )
        publish(folder / "segment.json", msgspec.json.encode(wanted), durable=False)
        control = msgspec.json.decode(task.environment[VARIABLE], type=Control)
        control = msgspec.structs.replace(control, segment=str(folder / "segment.json"))
        return replace(
            task,
            id=folder.name,
            folder=_moved(task.folder, old / "tree", tree),
            environment={**task.environment, VARIABLE: msgspec.json.encode(control).decode()},
            log=folder / "output.txt",
            report=folder / "report.json",
            threads=None,  # its cores are not to blame then
            imports=None,  # nor what it shared with others
        )

    def abandon(self, run: Run, task: Task, why: str) -> None:
        """Keep it that a task was ended in the middle, so that another does its work anew.

        That one has a name and a tree of its own: of two replays of one name all records would
        count, and what this one wrote to files is not what the run found.
        """
        report = msgspec.to_builtins(Report(error=why))
        self.runs.end_replay(run.id, task.id, proved=False, facts={"report": report})
        for part in ("tree", "elsewhere"):
            shutil.rmtree(self.project.replays / task.id / part, ignore_errors=True)

    def judge(self, run: Run, task: Task, code: int, seconds: float) -> Outcome:
        """Read what a task reports and keep the verdict with the run."""
        try:
            report = msgspec.json.decode(task.report.read_bytes(), type=Report)
        except (OSError, msgspec.DecodeError):
            report = Report(error=f"the replay ended with exit code {code} and said nothing")
        if report.error and not report.error.startswith(PROBE_RAISED) and task.log.is_file():
            lines = task.log.read_text("utf-8", "replace").splitlines()
            last = [text for line in lines if (text := line.strip(" ~^\t"))][-3:]
            report.error += ": " + " / ".join(last)
        self._check_room(report)
        outcome = Outcome(run.id, task.id, report, task.log, task.folder, seconds)
        if outcome.proved:
            tidy(self.project.replays / task.id / "tree")
        self.runs.end_replay(
            run.id, task.id, proved=outcome.proved, facts={"report": msgspec.to_builtins(report)}
        )
        return outcome

    def _check_room(self, report: Report) -> None:
        """Stop everything if a replay failed since the disk is full: the next would fail too."""
        for number in (errno.ENOSPC, errno.EDQUOT):
            if report.error and os.strerror(number) in report.error:
                raise OSError(number, os.strerror(number), str(self.project.store))


def script_of(run: Run, home: str) -> str:
    """Return the path of a run's script in the project, whose folder was `home`."""
    script = Path(run.cwd or home, str(run.facts.get("target", run.script)))
    return os.path.relpath(os.path.realpath(script), os.path.realpath(home))


def _moved(path: Path, old: Path, new: Path) -> Path:
    if not path.is_relative_to(old):
        return path
    moved = new / path.relative_to(old)
    moved.mkdir(parents=True, exist_ok=True)
    return moved


def tidy(tree: Path) -> None:
    """Leave of a scratch tree only what the replay wrote itself."""
    try:
        begun = (tree.parent / "output.txt").stat().st_ctime
        laid = (tree.parent / "segment.json").stat().st_mtime
    except OSError:
        return
    for folder, _, names in os.walk(tree, topdown=False):
        for name in names:
            file = Path(folder, name)
            if file.is_symlink() or file.stat().st_mtime <= min(begun, laid):
                file.unlink()
        with contextlib.suppress(OSError):
            Path(folder).rmdir()
