"""Prepare replays and the folders that they run in, and store the verdicts on them.

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
"""Least number of files in a folder that is linked as a whole, because making one link can take a millisecond."""
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
    """Make the folder `tree` look like the project at `root` when a run started, at the Unix time `before`.

    `tree` gets the source of `version`, and links to the files that have not changed since `before`. The files and the
    folders in `written_by_run`, which the run created, are not linked; their times alone would not show that, because
    files from an archive keep the time at which the archive was made. `inputs`, files that the run read and did not
    write, are linked even if they have changed; the proof of the replay then says so.

    With `fold`, a folder of many files in which nothing has changed since `before` becomes a single link, but never the
    `working_folder` (relative to the project) or a folder around it. Return these folders, relative to `tree`: the
    program of the replay must see them as folders, not as links (`FileView.folded`).
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
    """Whether the folder has exactly the content that it had when the run started; then it can be linked as a whole."""
    count: int = 0
    """Number of files in the folder and in the folders below it."""
    files: list[tuple[str, os.DirEntry[str]]] = field(default_factory=list)
    """(path relative to the project, directory entry) of each file directly in the folder."""
    folders: list[_Folder] = field(default_factory=list)
    """The folders directly in this folder."""


@dataclass(slots=True)
class _Layout:
    """Reads a project and links its inputs into a scratch tree."""

    before: float
    """Unix time of the start of the run."""
    unlinked: frozenset[str]
    """Paths of files that are not linked: source files, and files that the run wrote."""
    written: frozenset[str]
    """Paths of folders that the run created."""
    root: str
    """The real path of the project."""
    tree: Path
    """The scratch tree."""
    working_folder: str = ""
    inputs: frozenset[str] = frozenset()
    """Files that the run read and did not write, which are linked even if they have changed."""
    folded: list[str] = field(default_factory=list)
    """Folders that were linked as a whole."""
    changing: set[str] = field(init=False)
    """Folders with a file or folder, at any depth, that is not linked; these folders cannot be linked as a whole."""

    def __post_init__(self) -> None:
        paths = self.unlinked | self.written
        self.changing = {str(above) for path in paths for above in Path(path).parents}
        self.changing |= self.written

    def read(self, path: str, prefix: str = "") -> _Folder | None:
        """Return the folder `path` with the files that a replay may read, at any depth.

        `prefix` is the path relative to the project. Return None if the folder cannot be read or is a virtual
        environment.
        """
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
            # if its time is later than the start of the run, a file in the folder was added or removed
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
        """Make links in the scratch tree to the files of `folder` and of the folders below it.

        With `fold`, large unchanged folders are linked as a whole.
        """
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
    """Store the text in the version `recorded` of each file that `version` changes, in a folder next to `tree`.

    A replayed program that reads its own source, for example to log it, gets these texts: it must not see the probes.
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
    """Return the folder in which `keep_recorded_texts` stores texts for the scratch tree `tree`."""
    return tree.parent / TEXTS


def remove_links_and_source(tree: Path) -> None:
    """Remove everything from the scratch tree of a replay except the files that the replay wrote."""
    try:
        started = (tree.parent / "output.txt").stat().st_ctime
        laid_out = (tree.parent / "segment.json").stat().st_mtime
    except OSError:
        return
    _remove_unwritten(str(tree), min(started, laid_out))


def _remove_unwritten(folder: str, started: float) -> None:
    """Remove all links below `folder`, all files not written after the Unix time `started`, and empty folders."""
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
    """Return True if a file or link has not changed since the Unix time `before`.

    For a link to a file, both link and file must be unchanged; for a link to a folder, only the link. Return False if
    the target of the link does not exist.
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
    """Return the path to which the link for `entry` in the scratch tree `tree` must point: usually its own path.

    If the entry is itself a link to a folder of the project at `root`, return the path of that folder in `tree`.
    """
    if entry.is_symlink() and entry.is_dir():
        target = os.path.realpath(entry.path)
        if target.startswith(root + os.sep):
            return str(tree / target[len(root) + 1 :])
    return entry.path


def _files_below(folder: str, prefix: str = "") -> Iterator[str]:
    """Yield the path of each file below `folder`, relative to `folder`; each path begins with `prefix`."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path, f"{prefix}{entry.name}{os.sep}")
            else:
                yield f"{prefix}{entry.name}"


_OWN_ERROR = re.compile(r"rearview\.errors\.(?:State|Replay)Error: (.+)")
"""Pattern of the last line of a traceback if Rearview, not the program, raised the exception; group 1: its message."""
_TRIAL_BYTES = 64 << 10
"""Bytes that are written to find out whether the disk is full."""


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The outcome of the replay of one segment."""

    run: str
    replay: str
    report: ReplayReport
    log: Path
    """File with the output of the replayed program."""
    tree: Path
    """The working folder of the replay, with files that it wrote."""
    seconds: float = 0.0
    """Seconds that the replay took, including the start of the interpreter."""
    redone: str = ""
    """Why the segment was repeated from the start of the run by this replay; empty for a first replay."""

    @property
    def proof(self) -> Proof:
        """The verdict on the values that the replay logged, with its reason."""
        return proof_of(self.report)

    @property
    def proved(self) -> bool:
        """Whether the replay was equal to the run in everything that was compared."""
        return self.proof.verdict is Verdict.EXACT


def needs_rerun(report: ReplayReport, *, pinned: bool = False, shared: bool = False) -> bool:
    """Return True if the replay must be repeated from the start of the run, because how it ran may have made it wrong.

    The cause of a difference or error may be a restored checkpoint, the cores that the replay was `pinned` to, or a
    `shared` start (forked from a process with other replays). The repeated replay does without all three.

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
    """Whether large folders of inputs are linked as a whole; only for replays on this machine, which can follow it."""

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
        """Return a task that replays `segment` of `run` with the source `version`.

        The start of the replay is stored at once, so that other backfills skip its iterations. `start` contains the
        limits of the request and the id of the backfill; its other fields are filled in here. The replay may share
        `imports` (the first statements of the program) and `stages` (further statements) with other replays.
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
        """Return a task that runs only the statements before the main loop, in a folder of its own.

        It is a copy of `task`. No start of a replay is stored for it.
        """
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
        """Return a copy of `task` with the id `name` and a new scratch tree, and with `changes` of its segment file."""
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
        """Make the scratch tree `tree` for a replay of `run` with the source `version`.

        Return the folders in it that were linked as a whole, as `make_tree` does.
        """
        root, written = self.project.root, self.runs.created_paths(run.id)
        real_root = os.path.realpath(root)
        # if the project was moved since the run, the program could follow a linked folder out of its project
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
        # the rerun gets a new scratch tree, because the first one contains files that the first replay wrote
        rerun = self._copied_task(
            run, first.version, segment_file, task, name, jump=False, thorough=True
        )
        return replace(
            rerun,
            threads=None,  # do not pin the rerun, so that its cores cannot be the reason for a difference
            imports=None,  # do not fork the rerun, so that a shared start cannot be the reason for a difference
            stages=(),
        )

    def abandon(self, run: Run, task: Task, why: str) -> None:
        """Store that the replay `task` of `run` did not end, and why; another replay will do its work.

        The other replay has another id and another scratch tree. With one id, the records of both replays would count,
        and the tree of `task` contains files that did not exist when the run started.
        """
        self.runs.end_replay(run.id, task.id, proved=False, report=ReplayReport(error=why))
        for part in ("tree", "elsewhere"):
            shutil.rmtree(self.project.replays / task.id / part, ignore_errors=True)

    def interrupt(self, run: Run, task: Task) -> None:
        """Store that the user stopped the replay `task` of `run`. The values that it has logged stay in the store."""
        report = ReplayReport(written=self._count_records(run, task))
        self.runs.end_replay(run.id, task.id, proved=False, report=report)

    def _count_records(self, run: Run, task: Task) -> int:
        """Return how many records of `run` the replay `task` and its child processes have written."""
        return sum(count_records(self.runs.folder(run.id), task.id).values())

    def judge(
        self, run: Run, task: Task, code: int, seconds: float, redone: str = ""
    ) -> ReplayOutcome:
        """Read the report of the replay `task`, store the verdict with `run`, and return the outcome.

        `code` is the exit code of the replay's process, `seconds` how long it took, and `redone` why it repeats an
        earlier replay. Raise OSError if the disk is full, because every further replay would fail as well.
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
        """Raise OSError if the disk of the store is full; that may be the reason why a replay wrote no report."""
        try:
            with tempfile.TemporaryFile(dir=self.project.replays) as file:
                file.write(os.urandom(_TRIAL_BYTES))
                file.flush()
        except OSError as exc:
            if caused_by_full_disk(exc):
                raise


def _explain(error: str, log: str) -> str:
    r"""Return `error` with the last lines of `log`, the output of a replay that failed.

    If Rearview itself raised the exception, return only its message.

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
    """Return the number of cores to which the replay of `segment` is pinned, or None if it may use any core.

    A segment that runs from the start of the program is not pinned. If it differs from the run, its cores cannot be
    the reason, and it need not be repeated.
    """
    return None if segment.rerun else threads_of(run.facts.threads, run.end.surroundings)


def script_of(run: Run, recorded_root: str) -> str:
    """Return the path of a run's script, relative to the folder that the project had when the run was recorded."""
    script = Path(run.cwd or recorded_root, run.facts.target or run.script)
    return os.path.relpath(os.path.realpath(script), os.path.realpath(recorded_root))


def _rebased(path: Path, old: Path, new: Path) -> Path:
    """Return the folder below `new` that corresponds to `path` below `old`; create it.

    If `path` is not below `old`, return `path` itself.
    """
    if not path.is_relative_to(old):
        return path
    new_path = new / path.relative_to(old)
    make_folder(new_path)
    return new_path
