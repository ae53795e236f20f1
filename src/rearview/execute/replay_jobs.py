"""Prepare replays and the folders that they run in, and judge their reports.

`ReplayJobs.prepare` makes the scratch tree and the segment file of a replay, and returns the task that an executor
starts. `ReplayJobs.judge` reads the report of the replay and stores the verdict with the run.

A replay never runs in the user's own folder. It runs in a *scratch tree*, a folder that looks like the project when the
run started: it contains the source of the version, and links to the files that the run read (`make_tree`). Files that
the replay writes stay in the scratch tree.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rearview.execute.cores_and_accelerators import threads_of, visible_accelerators
from rearview.execute.executor import SetupStage, Task
from rearview.execute.program_command import arg_values_of, arguments_of, program_command
from rearview.model import (
    Control,
    Proof,
    ReplayReport,
    ReplayStart,
    Run,
    Segment,
    SegmentFile,
    Verdict,
    proof_of,
)
from rearview.model.process_messages import TEXTS, VARIABLE, ReplayFailure
from rearview.store.create_files import caused_by_full_disk, make_folder, publish, set_store_mode
from rearview.store.project import FOLDER, Project
from rearview.store.recorded_inputs import environment_of
from rearview.store.records import count_records
from rearview.store.runs import Runs
from rearview.store.versions.versions import Versions

FOLD_FROM = 100
"""A folder with at least this many files is linked as a whole, because making a link can take a millisecond."""
_NOT_INPUTS = {FOLDER, ".git", ".hg", "__pycache__", "node_modules", ".venv", ".tox"}
"""Names of folders whose files are never linked into a scratch tree."""


def make_tree(
    root: Path,
    versions: Versions,
    version: str,
    before: float,
    tree: Path,
    written_by_run: tuple[Collection[str], Collection[str]] = ((), ()),
    inputs: Collection[str] = (),
    *,
    fold: bool = False,
    working_folder: str = "",
) -> tuple[str, ...]:
    """Make `tree` look like the project at `root` when a run started, at time `before`.

    `tree` gets links to files that have not changed since `before`. It gets none to `written_by_run`, the files and the
    folders that the run created: their times are no proof, because files from an archive have the time at which the
    archive was made. It also gets links to `inputs`, files that the run read and did not write, even if they have
    changed; the proof of the replay then says that.

    With `fold`, a folder of many files in which nothing has changed since `before` becomes a single link, but never the
    `working_folder` (relative to the project) or a folder around it. Return these folders, relative to the tree: to
    the program of the replay, they must look like folders (`FileView.folded`).
    """
    files, folders = written_by_run
    make_folder(tree)
    versions.export(version, tree)
    layout = _Layout(
        before,
        frozenset(files).union(_files_below(str(tree))),
        frozenset(folders),
        os.path.realpath(root),
        tree,
        os.path.join(working_folder, ""),  # noqa: PTH118 - with a separator at its end
        frozenset(inputs),
    )
    project = layout.read(str(root))
    if project is not None:
        layout.link(project, fold=fold)
    return tuple(layout.folded)


@dataclass(slots=True)
class _Folder:
    """A folder of the project, with the files that a replay may read in it."""

    path: str
    prefix: str
    """The path relative to the project: empty, or with a separator at its end."""
    whole: bool = True
    """Whether the folder has exactly the content that it had when the run started, so that it can be one link."""
    count: int = 0
    """Number of files in the folder and below."""
    files: list[tuple[str, os.DirEntry[str]]] = field(default_factory=list)
    """(path relative to the project, entry) of each file in the folder."""
    folders: list[_Folder] = field(default_factory=list)
    """The folders directly in this folder."""


@dataclass(slots=True)
class _Layout:
    """Reads a project and links its inputs into a scratch tree."""

    before: float
    """When the run started."""
    unlinked: frozenset[str]
    """Files that are not linked: source, and files that the run wrote."""
    written: frozenset[str]
    """Folders that the run created."""
    root: str
    """The real path of the project."""
    tree: Path
    """The scratch tree."""
    working_folder: str = ""
    inputs: frozenset[str] = frozenset()
    """Files that the run read and did not write, which are linked even if they have changed."""
    folded: list[str] = field(default_factory=list)
    """Folders that became one link each."""
    changing: set[str] = field(init=False)
    """Folders that contain something, perhaps in inner folders, that is not linked."""

    def __post_init__(self) -> None:
        paths = self.unlinked | self.written
        self.changing = {str(above) for path in paths for above in Path(path).parents}
        self.changing |= self.written

    def read(self, path: str, prefix: str = "") -> _Folder | None:
        """Return the inputs in a folder and below, or None if it cannot be read or is a virtual environment."""
        try:
            entries = list(os.scandir(path))
        except OSError:
            return None
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            return None
        folder = _Folder(path, prefix, whole=prefix.removesuffix(os.sep) not in self.changing)
        folder.whole = folder.whole and not self.working_folder.startswith(prefix)
        for entry in entries:
            relative = f"{prefix}{entry.name}"
            if not entry.is_dir(follow_symlinks=False):
                if self._is_input(relative, entry):
                    folder.files.append((relative, entry))
                    folder.whole = folder.whole and entry.is_file(follow_symlinks=False)
                else:
                    folder.whole = False
                continue
            below = None
            if entry.name not in _NOT_INPUTS:
                below = self.read(entry.path, relative + os.sep)
            if below is not None:
                folder.folders.append(below)
                folder.count += below.count
            # a folder with a later time has lost a file, or got a new one
            unchanged = entry.stat(follow_symlinks=False).st_mtime <= self.before
            folder.whole = folder.whole and below is not None and below.whole and unchanged
        folder.count += len(folder.files)
        return folder

    def _is_input(self, relative: str, entry: os.DirEntry[str]) -> bool:
        return (
            relative not in self.unlinked
            and not _is_below(relative, self.written)
            and (relative in self.inputs or _is_older(entry, self.before))
        )

    def link(self, folder: _Folder, *, fold: bool) -> None:
        """Link the files of a folder and of the folders in it; with `fold`, a large unchanged folder is one link."""
        if folder.files:
            make_folder(self.tree / folder.prefix)
        for relative, entry in folder.files:
            target = _link_target(entry, self.root, self.tree)
            os.symlink(target, f"{self.tree}{os.sep}{relative}")  # noqa: PTH211 - one of many
        for below in folder.folders:
            name = below.prefix.removesuffix(os.sep)
            unchanged = os.stat(below.path).st_mtime <= self.before  # noqa: PTH116
            if fold and below.whole and unchanged and below.count >= FOLD_FROM:
                make_folder(self.tree / folder.prefix)
                os.symlink(below.path, f"{self.tree}{os.sep}{name}")  # noqa: PTH211
                self.folded.append(name)
            else:
                self.link(below, fold=fold)


def keep_recorded_texts(versions: Versions, recorded: str, version: str, tree: Path) -> None:
    """Store the text that files of `version` had in the version `recorded`, in a folder next to `tree`.

    A program that reads its own source, for example to log it, must not see the probes.
    """
    if not recorded or recorded == version:
        return
    recorded_hashes = versions.hashes(recorded)
    for path, oid in versions.hashes(version).items():
        if recorded_hashes.get(path, oid) != oid:
            target = recorded_texts(tree) / path
            make_folder(target.parent)
            target.write_bytes(versions.read(recorded, path))
            set_store_mode(target)


def recorded_texts(tree: Path) -> Path:
    """Return the folder of recorded texts that belongs to a scratch tree."""
    return tree.parent / TEXTS


def remove_links_and_source(tree: Path) -> None:
    """Remove everything from a scratch tree except the files that the replay wrote."""
    try:
        started = (tree.parent / "output.txt").stat().st_ctime
        laid_out = (tree.parent / "segment.json").stat().st_mtime
    except OSError:
        return
    _remove_unwritten(str(tree), min(started, laid_out))


def _remove_unwritten(folder: str, started: float) -> None:
    """Remove the links below a folder, the files that were not written after `started`, and empty folders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _remove_unwritten(entry.path, started)
            elif entry.is_symlink() or entry.stat().st_mtime <= started:
                os.unlink(entry.path)  # noqa: PTH108 - one of many thousands
    with contextlib.suppress(OSError):
        Path(folder).rmdir()


def _is_below(relative: str, folders: Collection[str]) -> bool:
    return bool(folders) and any(str(above) in folders for above in Path(relative).parents)


def _is_older(entry: os.DirEntry[str], before: float) -> bool:
    """Return True if a file existed with its present content at time `before`.

    The time of a link to a folder is that of the link itself. Return False for a dangling link.
    """
    if entry.stat(follow_symlinks=False).st_mtime > before:
        return False
    if not entry.is_symlink():
        return True
    try:
        return entry.is_dir() or entry.stat().st_mtime <= before
    except OSError:
        return False


def _link_target(entry: os.DirEntry[str], root: str, tree: Path) -> str:
    """Return the target of the link to `entry`.

    If the entry is itself a link to a folder of the project at `root`, the target is that folder of the scratch tree.
    """
    if entry.is_symlink() and entry.is_dir():
        target = os.path.realpath(entry.path)
        if target.startswith(root + os.sep):
            return str(tree / target[len(root) + 1 :])
    return entry.path


def _files_below(folder: str, prefix: str = "") -> Iterator[str]:
    """Yield the files below a folder, relative to it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path, f"{prefix}{entry.name}{os.sep}")
            else:
                yield f"{prefix}{entry.name}"


_OWN_ERROR = re.compile(r"rearview\.errors\.(?:State|Replay)Error: (.+)")
"""The last line of a traceback if Rearview, not the program, raised the exception."""
_TRIAL_BYTES = 64 << 10
"""Bytes that are written to find out if the disk is full."""


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The outcome of the replay of one segment."""

    run: str
    replay: str
    report: ReplayReport
    log: Path
    """File with the output of the replayed program."""
    tree: Path
    """The folder in which the replay ran, with the files that it wrote."""
    seconds: float = 0.0
    """Seconds that the replay took, including the start of the interpreter."""
    redone: str = ""
    """Why the segment ran again from the start of the run; empty if it ran once."""

    @property
    def proof(self) -> Proof:
        """The verdict on the values of the replay, with the reason."""
        return proof_of(self.report)

    @property
    def proved(self) -> bool:
        """Whether the replay was equal to the run in everything that was compared."""
        return self.proof.verdict is Verdict.EXACT


def needs_rerun(report: ReplayReport, *, pinned: bool = False, shared: bool = False) -> bool:
    """Return True if the replay must be repeated from the start of the run, to find out what was wrong.

    The reason may be a restored checkpoint, the cores that the replay was `pinned` to, or a `shared` start.

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
    """Prepares the replays of one project, and stores how they end."""

    project: Project
    versions: Versions
    runs: Runs
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    fold: bool = False
    """Whether a large folder of inputs may become one link, which only processes of this machine can follow."""

    def run_folder(self, run: str) -> Path:
        """Return the folder with the records of a run and of its replays."""
        return self.runs.folder(run)

    def prepare(
        self,
        run: Run,
        version: str,
        segment_file: SegmentFile,
        segment: Segment,
        start: ReplayStart | None = None,
        imports: tuple[str, ...] | None = None,
        stages: tuple[SetupStage, ...] = (),
    ) -> Task:
        """Return a task that replays one segment of `run` with the source `version`.

        The replay is announced at once, so that other backfills skip its iterations. `start` has the limits of the
        request and the id of the backfill; its other fields are filled in here. `imports` are leading imports, and
        `stages` parts of the set-up, that the replay may share with others.
        """
        start = msgspec.structs.replace(
            start or ReplayStart(),
            version=version,
            names=tuple(segment_file.names),
            operator=segment.operator.value,
            covered=(segment.first, (1 << 62) if segment.last is None else segment.last),
            only=None if segment.only is None else tuple(segment.only),
            predicted=segment.seconds,
            head=segment_file.head,
            tail=segment_file.tail,
        )
        self.runs.start_replay(run.id, segment_file.replay, start)
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
        recorded_root = run.recorded_root(os.path.realpath(self.project.root))
        relative = os.path.relpath(run.cwd or recorded_root, recorded_root)
        inside = not relative.startswith("..")
        command = program_command(
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
            else (tree / script_of(run, recorded_root)).parent,
        )
        if not stages:
            return task
        shared_setup = partial(self._setup_task, run, version, segment_file, task)
        return replace(task, stages=stages, shared_setup=shared_setup)

    def _setup_task(self, run: Run, version: str, segment_file: SegmentFile, task: Task) -> Task:
        """Return a task that runs only the set-up of `task`, in a separate folder; no replay is announced."""
        name = f"{task.id}-setup-{secrets.token_hex(2)}"
        return self._copied_task(run, version, segment_file, task, name)

    def _copied_task(
        self,
        run: Run,
        version: str,
        segment_file: SegmentFile,
        task: Task,
        name: str,
        **changes: Any,
    ) -> Task:
        """Return a copy of `task` under another name, in a new scratch tree, with `changes` to the segment file."""
        folder, old_folder = self.project.replays / name, self.project.replays / task.id
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
            folder=_rebased(task.folder, old_folder / "tree", tree),
            environment={**task.environment, VARIABLE: msgspec.json.encode(control).decode()},
            log=folder / "output.txt",
            report=folder / "report.json",
            module_folder=task.module_folder
            and _rebased(task.module_folder, old_folder / "tree", tree),
        )

    def _make_tree(self, run: Run, version: str, tree: Path) -> tuple[str, ...]:
        """Make the scratch tree of a replay; return the folders in it that are links."""
        root, written = self.project.root, self.runs.created_paths(run.id)
        real_root = os.path.realpath(root)
        # if the project was moved since the run, the program could follow such a link out of its project
        fold = self.fold and run.recorded_root(real_root) == real_root
        inputs = [run.current_path(path, real_root) for path in run.end.inputs]
        folded = make_tree(
            root,
            self.versions,
            version,
            run.started,
            tree,
            written,
            {os.path.relpath(path, real_root) for path in inputs},
            fold=fold,
            working_folder=os.path.relpath(run.cwd or real_root, real_root),
        )
        keep_recorded_texts(self.versions, run.version, version, tree)
        return folded

    def prepare_rerun(self, run: Run, task: Task, because: str) -> Task:
        """Return a task that repeats the replay `task` from the start of the run, without any checkpoint.

        The reason `because` is stored with the replay.
        """
        file = self.project.replays / task.id / "segment.json"
        segment_file = msgspec.json.decode(file.read_bytes(), type=SegmentFile)
        name = f"{task.id}-again"
        first = next(replay for replay in self.runs.replays(run.id) if replay.id == task.id)
        start = msgspec.structs.replace(first.start, predicted=0.0, redoes=task.id, because=because)
        self.runs.start_replay(run.id, name, start)
        # in a new tree, because the first tree contains files that the first replay wrote
        rerun = self._copied_task(
            run, first.version, segment_file, task, name, jump=False, thorough=True
        )
        return replace(
            rerun,
            threads=None,  # not pinned, so that its cores cannot be the reason
            imports=None,  # not forked, so that a shared start cannot be the reason
            stages=(),
        )

    def abandon(self, run: Run, task: Task, why: str) -> None:
        """Store that a task did not end, and why; another replay will do its work.

        That replay has another name and tree. If both had one name, the records of both would count; and the tree of
        this task contains files that the run did not find at its start.
        """
        self.runs.end_replay(run.id, task.id, proved=False, report=ReplayReport(error=why))
        for part in ("tree", "elsewhere"):
            shutil.rmtree(self.project.replays / task.id / part, ignore_errors=True)

    def interrupt(self, run: Run, task: Task) -> None:
        """Store that the user stopped a task. The values that it has logged stay in the store."""
        report = ReplayReport(written=self._count_records(run, task))
        self.runs.end_replay(run.id, task.id, proved=False, report=report)

    def _count_records(self, run: Run, task: Task) -> int:
        """Return how many records a task and its child processes have written."""
        return sum(count_records(self.runs.folder(run.id), task.id).values())

    def judge(
        self, run: Run, task: Task, code: int, seconds: float, redone: str = ""
    ) -> ReplayOutcome:
        """Read the report of a task, store the verdict with the run, and return the outcome.

        Raise OSError if the disk is full, because every further replay would fail as well.
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
        self.runs.end_replay(run.id, task.id, proved=outcome.proved, report=report)
        return outcome

    def _try_disk(self) -> None:
        """Raise OSError if the disk of the store is full, which may be why a replay wrote no report."""
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
    if lines and (match := _OWN_ERROR.match(lines[-1])):
        return match[1]
    return error + ": " + " / ".join(lines[-3:])


def _threads_to_pin(run: Run, segment: Segment) -> int | None:
    """Return the number of cores to which a replay is pinned, or None if the replay may use any core.

    A rerun of the whole run is not pinned. If it differs from the run, the cores cannot be the reason, so that it need
    not be repeated.
    """
    return None if segment.rerun else threads_of(run.facts.threads, run.end.surroundings)


def script_of(run: Run, recorded_root: str) -> str:
    """Return the path of a run's script, relative to the folder that the project had when the run was recorded."""
    script = Path(run.cwd or recorded_root, run.facts.target or run.script)
    return os.path.relpath(os.path.realpath(script), os.path.realpath(recorded_root))


def _rebased(path: Path, old: Path, new: Path) -> Path:
    """If the folder `path` is below `old`, create and return the corresponding folder below `new`, else `path`."""
    if not path.is_relative_to(old):
        return path
    new_path = new / path.relative_to(old)
    make_folder(new_path)
    return new_path
