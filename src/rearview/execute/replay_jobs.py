"""Carry out replays: make each segment ready, run them on an executor, judge what comes back.

Lay out the tree a replay runs in: the version's source, and links to the run's inputs.

Carry out replays: make each segment ready, run them on an executor, judge what comes back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rearview.execute.executor import Task
from rearview.execute.local import seen_of, threads_of
from rearview.execute.start import arguments, given_of, start
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
from rearview.model.plan import PROBE_RAISED, TEXTS, VARIABLE
from rearview.store.files import close_to_others, make_folder
from rearview.store.project import FOLDER, Project, publish
from rearview.store.recorded_inputs import environment_of
from rearview.store.records import count_records
from rearview.store.runs import Runs
from rearview.store.versions.versions import Versions

_NOT_INPUTS = {FOLDER, ".git", ".hg", "__pycache__", "node_modules", ".venv", ".tox"}


def lay_out(
    root: Path,
    versions: Versions,
    version: str,
    before: float,
    tree: Path,
    made: tuple[Collection[str], Collection[str]] = ((), ()),
) -> None:
    """Make `tree` look like the project at `root` when a run started at time `before`.

    A file that has not been touched since is linked: neither the run nor anybody later wrote it.
    What the run wrote itself is not there, as it was not there then: `made` names the files and the
    folders that it made, whatever time they carry (those of an archive carry that of its maker).
    """
    files, folders = made
    make_folder(tree)
    versions.export(version, tree)
    exported = {relative for _, entries in _folders(tree) for relative, _ in entries}
    home = os.path.realpath(root)
    for prefix, entries in _folders(root):
        targets = [
            (relative, _link_target(entry, home, tree))
            for relative, entry in entries
            if relative not in exported
            and relative not in files
            and not _is_below(relative, folders)
            and _is_older(entry, before)
        ]
        if targets:
            make_folder(tree / prefix)
        for relative, target in targets:
            os.symlink(target, f"{tree}{os.sep}{relative}")  # noqa: PTH211 - one of many thousands


def keep_texts(versions: Versions, recorded: str, version: str, tree: Path) -> None:
    """Keep, beside the tree of `version`, the text of files as it was `recorded`.

    A program that reads its own source, to log it with its results, must not find the probes.
    """
    if not recorded or recorded == version:
        return
    then = versions.hashes(recorded)
    for path, name in versions.hashes(version).items():
        if then.get(path, name) != name:
            target = texts_of(tree) / path
            make_folder(target.parent)
            target.write_bytes(versions.read(recorded, path))
            close_to_others(target)


def texts_of(tree: Path) -> Path:
    """Return the folder of recorded texts of a tree."""
    return tree.parent / TEXTS


def _is_below(relative: str, folders: Collection[str]) -> bool:
    return bool(folders) and any(str(above) in folders for above in Path(relative).parents)


def _is_older(entry: os.DirEntry[str], before: float) -> bool:
    """Return True if a file was there, as it is, at time `before`.

    Of a link to a folder, the time of the link itself counts. A dangling link is no input.
    """
    if entry.stat(follow_symlinks=False).st_mtime > before:
        return False
    if not entry.is_symlink():
        return True
    try:
        return entry.is_dir() or entry.stat().st_mtime <= before
    except OSError:
        return False


def _link_target(entry: os.DirEntry[str], home: str, tree: Path) -> str:
    """Return what to link to: for a link from folder to folder within the project, that of the tree."""
    if entry.is_symlink() and entry.is_dir():
        target = os.path.realpath(entry.path)
        if target.startswith(home + os.sep):
            return str(tree / target[len(home) + 1 :])
    return entry.path


def _folders(root: Path) -> Iterator[tuple[str, list[tuple[str, os.DirEntry[str]]]]]:
    """Yield each folder below `root`, relative to it, with its files: their paths and entries."""
    remaining = [(str(root), "")]
    while remaining:
        folder, prefix = remaining.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue
        files = []
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            if not entry.is_dir(follow_symlinks=False):
                files.append((relative, entry))
            elif entry.name not in _NOT_INPUTS:
                remaining.append((entry.path, relative + os.sep))
        yield prefix, files


_KEPT = frozenset(
    ("covered", "only", "operator", "head", "tail", "limits", "inner", "same", "crew")
)
"""What a replay from the start takes over from the one that it stands in for."""

_OWN_ERROR = re.compile(r"rearview\.errors\.(?:State|Replay)Error: (.+)")
"""The last line of a traceback if a replay itself stopped the program."""


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """What became of one segment."""

    run: str
    replay: str
    report: ReplayReport
    log: Path
    """Output of the replayed program."""
    tree: Path
    """Where it ran, with the files it wrote."""
    seconds: float = 0.0
    """From its start to its end, the interpreter's included."""
    redone: str = ""
    """Why a first try was run again from the start of the run; empty: it was not."""

    @property
    def proof(self) -> Proof:
        """How far its values can be trusted, and why."""
        return proof_of(self.report)

    @property
    def proved(self) -> bool:
        """Whether the replay was found equal to the run."""
        return self.proof.verdict is Verdict.EXACT


def doubtful(report: ReplayReport, *, pinned: bool = False, shared: bool = False) -> bool:
    """Say whether a run from the start, alone and free to use every core, would tell more.

    >>> doubtful(ReplayReport(retry=True)), doubtful(ReplayReport(difference="w", restored=0))
    (True, False)
    >>> doubtful(ReplayReport(difference="w"), pinned=True), doubtful(ReplayReport(error="e"), shared=True)
    (True, True)
    """
    differs = report.difference is not None
    wrong = differs or bool(report.lacking) or report.error is not None
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
        wanted: SegmentFile,
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
            args=arguments(run),
            segment=str(file),
            given=given_of(run),
        )
        home = run.home(os.path.realpath(self.project.root))
        relative = os.path.relpath(run.cwd or home, home)
        inside = not relative.startswith("..")
        how = start(
            control,
            environment_of(run, self.runs.folder(run.id), self.environment),
            tree / relative if inside else Path(run.cwd),
            hash_seed=str(facts.get("hash_seed", "0")),
        )
        make_folder(how.folder)
        return Task(
            id=wanted.replay,
            command=how.command,
            environment=how.environment,
            folder=how.folder,
            log=folder / "output.txt",
            report=folder / "report.json",
            seconds=segment.seconds,
            threads=threads_of(
                facts.get("threads", {}), facts.get("end", {}).get("surroundings", ())
            ),
            accelerators=seen_of(facts.get("hardware", {})),
            imports=imports,
            beside=how.folder if control.module else (tree / script_of(run, home)).parent,
        )

    def _lay_out(self, run: Run, version: str, tree: Path) -> None:
        made = self.runs.made(run.id)
        lay_out(self.project.root, self.versions, version, run.started, tree, made)
        keep_texts(self.versions, run.version, version, tree)

    def from_the_start(self, run: Run, task: Task, because: str) -> Task:
        """Return a task that replays the same without trusting any checkpoint.

        `because` says why; it is kept with the replay.
        """
        old = self.project.replays / task.id
        wanted = msgspec.json.decode((old / "segment.json").read_bytes(), type=SegmentFile)
        folder = self.project.replays / f"{task.id}-again"
        about = next(one for one in self.runs.replays(run.id) if one.id == task.id)
        told = {k: v for k, v in about.facts.items() if k in _KEPT}
        told |= {"version": about.version, "names": list(about.names)}
        told |= {"redoes": task.id, "because": because}
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
        report = msgspec.to_builtins(ReplayReport(error=why))
        self.runs.end_replay(run.id, task.id, proved=False, facts={"report": report})
        for part in ("tree", "elsewhere"):
            shutil.rmtree(self.project.replays / task.id / part, ignore_errors=True)

    def interrupt(self, run: Run, task: Task) -> None:
        """Keep it that a task was stopped in the middle; what it logged so far stays."""
        report = msgspec.to_builtins(ReplayReport(written=self._logged(run, task)))
        self.runs.end_replay(run.id, task.id, proved=False, facts={"report": report})

    def _logged(self, run: Run, task: Task) -> int:
        """Return how many records a task left, its child processes included."""
        return sum(count_records(self.runs.folder(run.id), task.id).values())

    def judge(
        self, run: Run, task: Task, code: int, seconds: float, redone: str = ""
    ) -> ReplayOutcome:
        """Read what a task reports and keep the verdict with the run."""
        try:
            report = msgspec.json.decode(task.report.read_bytes(), type=ReplayReport)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            report = ReplayReport(error=f"the replay ended with exit code {code} and said nothing")
        if report.error and not report.error.startswith(PROBE_RAISED) and task.log.is_file():
            report.error = _explain(report.error, task.log.read_text("utf-8", "replace"))
        self._check_room(report)
        report.written = max(report.written, self._logged(run, task))
        outcome = ReplayOutcome(run.id, task.id, report, task.log, task.folder, seconds, redone)
        if outcome.proved:
            tidy(self.project.replays / task.id / "tree")
        self.runs.end_replay(
            run.id, task.id, proved=outcome.proved, facts={"report": msgspec.to_builtins(report)}
        )
        return outcome

    def _check_room(self, report: ReplayReport) -> None:
        """Stop everything if a replay failed since the disk is full: the next would fail too."""
        for number in (errno.ENOSPC, errno.EDQUOT):
            if report.error and os.strerror(number) in report.error:
                raise OSError(number, os.strerror(number), str(self.project.store))


def _explain(error: str, log: str) -> str:
    r"""Return `error` with the last lines of the log, or alone what our own exception says there.

    >>> _explain("exit code 1", "File a.py, line 3\n    f(x)\n    ^^^^\nValueError: x is 0")
    'exit code 1: File a.py, line 3 / f(x) / ValueError: x is 0'
    >>> _explain("exit code 1", "    f(x)\nrearview.errors.StateError: x was not saved.")
    'x was not saved.'
    """
    lines = [text for line in log.splitlines() if (text := line.strip(" ~^\t"))]
    if lines and (own := _OWN_ERROR.match(lines[-1])):
        return own[1]
    return error + ": " + " / ".join(lines[-3:])


def script_of(run: Run, home: str) -> str:
    """Return the path of a run's script in the project, whose folder was `home`."""
    script = Path(run.cwd or home, str(run.facts.get("target", run.script)))
    return os.path.relpath(os.path.realpath(script), os.path.realpath(home))


def _moved(path: Path, old: Path, new: Path) -> Path:
    if not path.is_relative_to(old):
        return path
    moved = new / path.relative_to(old)
    make_folder(moved)
    return moved


def tidy(tree: Path) -> None:
    """Leave of a scratch tree only what the replay wrote itself."""
    try:
        begun = (tree.parent / "output.txt").stat().st_ctime
        laid = (tree.parent / "segment.json").stat().st_mtime
    except OSError:
        return
    _remove_unwritten(str(tree), min(begun, laid))


def _remove_unwritten(folder: str, begun: float) -> None:
    """Remove the links below a folder, the files not written since `begun`, and what is then empty."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _remove_unwritten(entry.path, begun)
            elif entry.is_symlink() or entry.stat().st_mtime <= begun:
                os.unlink(entry.path)  # noqa: PTH108 - one of many thousands
    with contextlib.suppress(OSError):
        Path(folder).rmdir()
