"""Set up a session that records: for a new run, a resumed run, or a child process of a run.

If the store cannot be written, the program runs with an `Unrecorded` session.
"""

from __future__ import annotations

import atexit
import functools
import os
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rearview.checkpointer.signals import Signals, leave_at_once
from rearview.config import Settings
from rearview.energy import Account, EnergyLog
from rearview.errors import RearviewError, VersionError
from rearview.model import Checkpoint, Control, Run, RunStart
from rearview.model.run import is_notebook
from rearview.model.secrets import redact_value, redact_words
from rearview.model.wording import printable
from rearview.runtime import importer
from rearview.runtime.base_session import Session, current_session, use_session
from rearview.runtime.importer import ImportTimes
from rearview.runtime.loops import LoopHistory
from rearview.runtime.observed_values.start_observing import start_observing
from rearview.runtime.recorder import Recorder
from rearview.runtime.restore_checkpoints import CheckpointIndex
from rearview.runtime.sandbox import clock, entropy
from rearview.runtime.sandbox.clock import Clock
from rearview.runtime.sandbox.printed_lines import PrintedLines
from rearview.runtime.sandbox.program_inputs import EnvironmentReads, InputFiles
from rearview.runtime.sandbox.written_files import Outputs, OverwrittenFiles, allow_mkdir_again
from rearview.runtime.saving.overhead import Overhead
from rearview.runtime.saving.writer import RemoteCopy, Writer
from rearview.state.codecs.base import REFUSAL_HANDLERS
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.checkpoints.compression import CompressionPolicy
from rearview.store.json_files import fields_of_struct
from rearview.store.machine_and_process import hardware
from rearview.store.project import Project, root_of
from rearview.store.records import RecordFile
from rearview.store.runs import ACCOUNT, Runs
from rearview.store.versions.versions import Versions

if TYPE_CHECKING:
    from rearview.runtime.replay.start_replay import ParentReplay
    from rearview.runtime.resumer import Resumer

RUN_VARIABLE = "REARVIEW_RUN"
"""Environment variable with the id of the run that child processes join."""
ENTROPY_VARIABLE = "REARVIEW_ENTROPY"
"""Environment variable with the key from which all random numbers are derived, in hexadecimal."""


def begin(control: Control) -> Session:
    """Return a recording session for the new or resumed run that `control` describes, ready to run the program."""
    session = _record(control) if control.resume is None else _resume(control)
    session.prints_closing_lines = True
    importer.install(session.compiler)
    if control.signals:
        session.signals = Signals(control.signals).start()
        # the signals were blocked before this interpreter started, so that they could not end the process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, control.signals)
    if control.exit_every is not None:
        _leave_after(session, control.exit_every)
    if control.remote is not None:
        from rearview.remote.open import open_remote
        from rearview.store.maintenance.sync import command_key, push

        key, pushed = command_key(control.target, control.args), dict[str, object]()
        remote = open_remote(control.remote)
        remote_copy = functools.partial(push, session.project, session.run, remote, key, pushed)
        session.remote_copy = RemoteCopy(remote_copy, share=session.settings.epsilon, warn=_warn)
        session.writer.on_saved = session.remote_copy.saved
    return session


INTERACTIVE = "<interactive>"
"""Stands for the script's name if the program is typed at a prompt."""


def attach() -> Session:
    """Return a session for a script that was started with plain `python`.

    A child process of a recorded run joins that run and adds its records to it; a child process of
    a replay joins the replay.
    """
    from rearview.runtime.replay.start_replay import parent_replay

    replaying = parent_replay()
    if replaying is not None:
        return _join(replaying)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:  # a notebook kernel or a prompt: `sys.argv` names its launcher
        script = os.environ.get("JPY_SESSION_NAME", INTERACTIVE)
        control = Control(root=str(Path.cwd()), target=script)
    else:
        script = sys.argv[0] or INTERACTIVE
        root = root_of(Path(script)) if Path(script).is_file() else Path.cwd()
        control = Control(root=str(root), target=script, args=tuple(sys.argv[1:]))
    session = _record(control, watched=False, run=os.environ.get(RUN_VARIABLE))
    if main is None:
        sys.stderr.write(f"rearview: recording into {session.project.store} as run {session.run}\n")
    atexit.register(lambda: session.finish(None))
    return session


def _join(replaying: ParentReplay) -> Session:
    project = Project.open(Path(replaying.root))
    settings = Settings.read(project.store)
    runs, checkpoints = Runs(project), Checkpoints(project)
    put = checkpoints.objects.put
    records = RecordFile(
        runs.folder(replaying.run), replaying.run, origin=replaying.replay, put=put
    )
    session = Recorder(
        project,
        replaying.run,
        settings,
        runs=runs,
        joins=True,
        only_names=frozenset(replaying.names),
        records=records,
        writer=Writer(checkpoints, settings, warn=_warn),
        overhead=Overhead.begin(settings, project, replaying.run, ""),
    )
    use_session(session)
    atexit.register(lambda: session.finish(None))
    return session


def _record(control: Control, *, watched: bool = True, run: str | None = None) -> Recorder:
    started = time.time()
    project = Project.create(Path(control.root))
    settings = Settings.read(project.store).changed(control.settings)
    if is_notebook(control.target):
        settings = settings.for_notebook()
    runs = Runs(project)
    joins = run is not None
    given_key = os.environ.get(ENTROPY_VARIABLE)
    key = bytes.fromhex(given_key) if given_key else os.urandom(entropy.KEY_BYTES)
    if control.repeat_seeds and not given_key:
        from rearview.runtime.cells.result_store import ResultStore

        place = os.path.relpath(os.path.realpath(control.target), os.path.realpath(project.root))
        key += ResultStore(project.cache / "cells").seeds(place)
    if run is None:
        run = control.run or runs.reserve()
        runs.start(run, facts(control, project, settings, run, key, watched=watched))
        reads = EnvironmentReads(runs.folder(run))
        if watched:
            reads.install()
        else:
            reads.read_all()  # treat all variables as read: the program may have read any before this call
        os.environ[RUN_VARIABLE] = run
    checkpoints = Checkpoints(project, CompressionPolicy.of(settings.compress))
    overhead = Overhead.begin(settings, project, run, control.target)
    session = Recorder(
        project,
        run,
        settings,
        checkpointing=int(watched),
        arg_values=dict(control.given),
        runs=runs,
        script="" if control.module else _program_of(control.target),
        joins=joins,
        records=RecordFile(runs.folder(run), run, put=checkpoints.objects.put),
        writer=Writer(checkpoints, settings, warn=_warn_of_save, on_end=overhead.end_save),
        overhead=overhead,
    )
    session.compiler = importer.Compiler(
        session, autolog=settings.autolog, import_times=ImportTimes()
    )
    if watched and not joins and not control.module and not is_notebook(control.target):
        session.compiler.cells = _relative(session, control.target)
        session.cells_in_points = control.cells
    use_session(session)
    os.register_at_fork(after_in_child=session.on_fork)
    if watched:
        session.declared[entropy.ROOT] = entropy.install(key).stream.place
        if not joins:
            session.clock = Clock(runs.folder(run) / clock.FILE, replays=False)
            session.declared[clock.ROOT] = session.clock.place
            session.clock.in_loop = lambda: bool(session.stack)
            session.clock.install()
        session.inputs = InputFiles(started)
        overwritten = None if joins else _overwritten_files(session)
        session.outputs = Outputs(session.root, session.stop_recording, overwritten)
        session.outputs.install()
        if not joins:
            session.printing = PrintedLines(runs.folder(run), session.loops_and_indices)
            session.printing.install()
            start_observing(session, checkpoints.objects.put)
    if not joins:
        _start_heartbeat(runs, session)
    return session


def _resume(control: Control) -> Resumer:
    from rearview.runtime.resumer import Restart, Resumer, last_usable

    assert control.resume is not None
    restart = Restart(control)
    project = Project.open(Path(control.root))
    runs = Runs(project)
    run = runs.get(control.resume)
    settings = _settings_of(run, control, project)
    runs.claim(run.id)
    checkpoints = Checkpoints(project, CompressionPolicy.of(settings.compress))
    saved = checkpoints.of(run.id)
    usable = [checkpoint for checkpoint in saved if _depth(checkpoint) <= (control.depth or 0)]
    target = last_usable(saved if control.depth is None else usable)
    overhead = Overhead.begin(settings, project, run.id, control.target)
    since = target.meta.records if target is not None else 0
    attempt = 1 + run.attempts
    folder = runs.folder(run.id)
    _warn_if_moved(run, project)
    last_sign_of_life = _last_sign_of_life(folder / "heartbeat", run.heartbeat)
    runs.resume(run.id, {"heartbeat": settings.heartbeat, "since": since})
    EnvironmentReads(folder).install()
    os.environ[RUN_VARIABLE] = run.id
    put = checkpoints.objects.put
    session = Resumer(
        project,
        run.id,
        settings,
        checkpointing=1,
        arg_values=dict(control.given),
        runs=runs,
        records=RecordFile(folder, run.id, put=put, attempt=attempt, since=since),
        writer=Writer(checkpoints, settings, warn=_warn_of_save, on_end=overhead.end_save),
        overhead=overhead,
        seq=max((checkpoint.seq for checkpoint in saved), default=0),
        target=target,
        restart=None if control.source else restart,
        repeat_loops=None if control.repeat_loops else restart.repeat_loops,
    )
    session.checkpoint_index = CheckpointIndex.of(session, checkpoints, run.id, control.depth)
    REFUSAL_HANDLERS.append(session.on_refusal)
    session.compiler = importer.Compiler(session, autolog=settings.autolog)
    if run.facts.cells:
        session.compiler.cells = _relative(session, control.target)
    _use_source(session, run, control.source, Versions(project, settings))
    use_session(session)
    os.register_at_fork(after_in_child=session.on_fork)
    randomness = entropy.install(bytes.fromhex(run.facts.entropy))
    session.declared[entropy.ROOT] = randomness.stream.place
    rule = run.facts.clock
    session.clock = Clock(folder / clock.FILE, replays=target is not None, rule=rule)
    session.declared[clock.ROOT] = session.clock.place
    session.clock.in_loop = lambda: bool(session.stack)
    session.clock.install()
    overwritten = _overwritten_files(session)
    afresh = target is None or control.afresh
    allow_mkdir_again(
        overwritten.restore_initial_files(data=afresh, last_sign_of_life=last_sign_of_life),
        session.root,
    )
    if not afresh and overwritten.data_files():
        session.afresh = restart.afresh
    session.shared = frozenset(overwritten.shared)
    session.outputs = Outputs(session.root, session.stop_recording, overwritten)
    session.outputs.install()
    session.printing = PrintedLines(folder, session.loops_and_indices)
    session.printing.install()
    start_observing(session, put, attempt=attempt)
    _start_heartbeat(runs, session)
    return session


def _warn_if_moved(run: Run, project: Project) -> None:
    root = os.path.realpath(project.root)
    if run.recorded_root(root) != root:
        _warn(
            f"run {run.id} was started in {run.recorded_root(root)} and is resumed in {root}; full paths in its "
            "variables still name the old folder"
        )


def _use_source(session: Resumer, run: Run, source: str | None, versions: Versions) -> None:
    """Let the program run the version `source` of the source, or the recorded one if `source` is None.

    Its loops keep the ids that they had in the recorded run.
    """
    version = source or run.source
    if not version:
        return
    texts = versions.files(version)
    session.compiler.sources = texts
    if version == run.version:
        return
    recorded = versions.files(run.version)
    old = recorded if run.source == run.version else versions.files(run.source)
    from rearview.source.probes.edit_before_resume import edit_before_resume

    change = edit_before_resume(recorded, old, texts)
    session.compiler.ids = change.ids
    if source and session.target is not None:
        from rearview.runtime.resumer import SourceChange

        leave = functools.partial(_refuse_source, session, run)
        session.continues = source
        session.source_change = SourceChange(change, session.root, str(session.target.point), leave)
        session.source_change.start()


def _refuse_source(session: Resumer, run: Run, why: str) -> NoReturn:
    """Print `why` the run cannot be resumed with the edited source, and end the process; leave the run unchanged."""
    session.finished = True
    if session.source_change is not None:
        session.source_change.stop()
    session.writer.close()
    session.records.close()
    session.printing.close()
    if run.ended is not None:
        session.runs.end(run.id, run.end.exit_code, run.end)
    sys.stderr.write(
        f"rearview: Run {run.id} cannot be resumed with the edited source: {why}. Resume it with the "
        "source that it ran (`rearview resume`), or start a new run (`rearview run`). "
        "(docs/errors.md#mend-too-early)\n"
    )
    leave_at_once(2)


def _last_sign_of_life(heartbeat: Path, seconds: float) -> float:
    """Return the latest time at which the process of the stopped run can have written a file.

    `heartbeat` is its heartbeat file, `seconds` the interval between heartbeats. Infinite if the file is missing.
    """
    try:
        return heartbeat.stat().st_mtime + 2 * seconds
    except OSError:
        return float("inf")


def _depth(checkpoint: Checkpoint) -> int:
    return len(checkpoint.meta.path)


def _settings_of(run: Run, control: Control, project: Project) -> Settings:
    """Return the settings of the resumed run `run`: those of its start, changed by the options of `control`.

    The option --autolog cannot be changed: it decides which columns the run has.
    """
    options = {**run.facts.settings, **control.settings}
    settings = Settings.read(project.store).changed(options)
    if is_notebook(control.target):
        settings = settings.for_notebook()
    if run.facts.autolog is None:
        return settings
    return replace(settings, autolog=run.facts.autolog)


def _overwritten_files(session: Recorder) -> OverwrittenFiles:
    return OverwrittenFiles.of(
        session.runs.folder(session.run), session.root, lambda: bool(session.stack)
    )


def facts(
    control: Control, project: Project, settings: Settings, run: str, key: bytes, *, watched: bool
) -> dict[str, Any]:
    """Save the source as a version, and return the facts about the start of `run` that its replays need.

    `key` is the key from which all random numbers of the run are derived.
    """
    try:
        version = Versions(project, settings).save(run)
    except VersionError as exc:
        warnings.warn(f"The source of this run was not saved: {exc}", RuntimeWarning, stacklevel=2)
        version = ""
    start = RunStart(
        target=control.target,
        module=control.module,
        root=os.path.realpath(project.root),
        given={name: str(redact_value(name, value)) for name, value in control.given.items()},
        watched=watched,
        autolog=settings.autolog,
        settings=dict(control.settings),
        entropy=key.hex(),
        cells=control.cells,
        clock=clock.RULE,
        hash_seed=os.environ.get("PYTHONHASHSEED", "random"),
        python=platform.python_version(),
        executable=sys.executable,
        machine=platform.platform(),
        hardware=hardware(),
        threads={k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
    )
    return {
        "version": version,
        "script": f"-m {control.target}" if control.module else control.target,
        "argv": redact_words(control.args),
        "cwd": os.getcwd(),  # noqa: PTH109 - as the program sees it
        "heartbeat": settings.heartbeat,
        **fields_of_struct(start),
    }


def _warn(message: str) -> None:
    warnings.warn(printable(message), RuntimeWarning, stacklevel=2)


def _warn_of_save(message: str) -> None:
    session = current_session()
    if isinstance(session, Recorder):
        session.warn_of_save(message)
    else:
        _warn(message)


def _start_heartbeat(runs: Runs, session: Recorder) -> None:
    """Start the thread that updates the run's heartbeat file and measures energy for `rearview energy report`."""
    run, seconds = session.run, session.settings.heartbeat
    session.energy = energy = EnergyLog(Account(runs.folder(run) / ACCOUNT))

    def beat() -> None:
        while not ended.wait(seconds):
            try:
                runs.heartbeat(run)
                energy.beat()
            except OSError:
                session.store_is_gone()
                return

    ended = threading.Event()
    atexit.register(ended.set)
    threading.Thread(target=beat, name="rearview-heartbeat", daemon=True).start()


def _leave_after(session: Recorder, seconds: float) -> None:
    """Start a thread that asks the program to save a checkpoint and end after it has computed for `seconds`.

    The time counts from the first loop, or from the checkpoint from which the program is resumed: if the code before
    the first loop counted, a program that starts slowly would make no progress.
    """

    def count() -> None:
        never = threading.Event()
        while not session.stack or getattr(session, "pending", False):
            never.wait(min(1.0, seconds / 10))
        never.wait(seconds)
        if session.signals is not None:
            session.signals.request()

    threading.Thread(target=count, name="rearview-leave", daemon=True).start()


def _relative(session: Session, target: str) -> str:
    return os.path.relpath(os.path.realpath(target), session.root)


def _program_of(target: str) -> str:
    """Return the absolute path of the script `target`; for a notebook, that of its program text, `<notebook>.py`."""
    return os.path.abspath(target) + (".py" if is_notebook(target) else "")  # noqa: PTH100


@dataclass
class Unrecorded(Session):
    """A session that records nothing: the program runs as it would without Rearview."""

    watching: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.compiler = self

    def compile(self, data: bytes, path: str) -> CodeType:
        """Return the code of a source file, as plain Python compiles it."""
        code: CodeType = compile(data, path, "exec", dont_inherit=True)
        return code

    def enter(self, history: LoopHistory, iterable: Any, frame: FrameType) -> Iterator[Any]:
        """Return a plain iterator over `iterable`, which does not call the session."""
        return iter(iterable)

    def log(self, items: Mapping[str, Any], place: bytes = b"") -> None:
        """Record nothing."""

    def record_arguments(self, values: Mapping[str, Any], origin: str = "") -> None:
        """Record nothing."""

    def finish(self, code: int | None) -> None:
        """Do nothing."""


def go_unrecorded(root: Path, arg_values: Mapping[str, str], why: Exception) -> Unrecorded:
    """Print why nothing is recorded (`why`); return a session with which the program runs unrecorded."""
    slug = why.slug if isinstance(why, RearviewError) else "store-unwritable"
    sys.stderr.write(
        f"rearview: this run is not recorded: {printable(str(why))} Your program runs anyway "
        f"(docs/errors.md#{slug})\n"
    )
    session = Unrecorded(Project(root), "", Settings(), arg_values=dict(arg_values))
    use_session(session)
    return session
