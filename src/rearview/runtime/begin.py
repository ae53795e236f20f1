"""Begin a session that records: a new run, or one that stopped and goes on."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

from rearview.config import Settings
from rearview.energy import Account, Used
from rearview.errors import VersionError
from rearview.model import Checkpoint, Control
from rearview.remote.base import open_remote
from rearview.runtime import api, children, clocks, entropy, imports
from rearview.runtime.clocks import Clock
from rearview.runtime.inputs import Inputs
from rearview.runtime.jumps import Jumps
from rearview.runtime.loading import Loading
from rearview.runtime.outputs import Outputs
from rearview.runtime.printing import Printing
from rearview.runtime.pulse import Pulse
from rearview.runtime.recorder import Recorder
from rearview.runtime.resumer import Resumer, last_usable
from rearview.runtime.retreat import Retreat
from rearview.runtime.session import Session
from rearview.runtime.signals import Signals
from rearview.runtime.state.refusal import REFUSING
from rearview.runtime.traces import Traces, allow_again
from rearview.runtime.writer import Writer
from rearview.store.checkpoints import Checkpoints
from rearview.store.hardware import hardware
from rearview.store.project import Project, root_of
from rearview.store.records import RecordFile
from rearview.store.runs import ACCOUNT, Runs
from rearview.store.sync import command_key, push
from rearview.store.versions import Versions
from rearview.store.worth import Worth

RUN_VARIABLE = "REARVIEW_RUN"
"""Names the run that child processes join."""
ENTROPY_VARIABLE = "REARVIEW_ENTROPY"
"""Hexadecimal key from which everything random follows: two runs with the same one are alike."""


def begin(control: Control) -> Session:
    """Return the session that `control` asks for, ready to run the program."""
    session = _record(control) if control.resume is None else _resume(control)
    imports.install(session.compiler)
    if control.signals:
        session.signals = Signals(control.signals).start()
        # Held back since before this interpreter started, so that none kills it on the way.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, control.signals)
    if control.exit_every is not None:
        _leave_after(session, control.exit_every)
    if control.remote is not None:
        session.bring = functools.partial(_push, session, control)
    return session


def _push(session: Recorder, control: Control) -> None:
    """Bring the run to the remote, so that any machine can go on with it."""
    assert control.remote is not None
    key = command_key(control.target, control.args)
    push(session.project, session.run, open_remote(control.remote), key)


def attach() -> Session:
    """Return a session for a script that was started with plain `python`.

    A child process of a recorded run joins that run: its records land beside the parent's. So do
    those of a replay's child, beside the replay's.
    """
    replaying = children.parent()
    if replaying is not None:
        return _join(replaying)
    script = Path(sys.argv[0] or "<interactive>")
    root = root_of(script) if script.is_file() else Path.cwd()
    control = Control(root=str(root), target=str(script), args=tuple(sys.argv[1:]))
    session = _record(control, watched=False, run=os.environ.get(RUN_VARIABLE))
    atexit.register(lambda: session.finish(None))
    return session


def _join(replaying: children.Replaying) -> Session:
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
        only=frozenset(replaying.names),
        records=records,
        writer=Writer(checkpoints, settings, warn=_warn),
        pulse=Pulse.begin(settings, project, replaying.run, ""),
    )
    api.use(session)
    atexit.register(lambda: session.finish(None))
    return session


def _record(control: Control, *, watched: bool = True, run: str | None = None) -> Recorder:
    project = Project.create(Path(control.root))
    settings = Settings.read(project.store).changed(control.settings)
    runs = Runs(project)
    joins = run is not None
    chosen = os.environ.get(ENTROPY_VARIABLE)
    key = bytes.fromhex(chosen) if chosen else os.urandom(32)
    if run is None:
        run = control.run or runs.reserve()
        runs.start(run, facts(control, project, settings, run, key, watched=watched))
        os.environ[RUN_VARIABLE] = run
    checkpoints = Checkpoints(project, Worth.of(settings.compress))
    pulse = Pulse.begin(settings, project, run, control.target)
    session = Recorder(
        project,
        run,
        settings,
        checkpointing=int(watched),
        given=dict(control.given),
        runs=runs,
        script="" if control.module else os.path.abspath(control.target),  # noqa: PTH100
        joins=joins,
        records=RecordFile(runs.folder(run), run, put=checkpoints.objects.put),
        writer=Writer(checkpoints, settings, warn=_warn, ended=pulse.ended),
        pulse=pulse,
    )
    session.compiler = imports.Compiler(session, autolog=settings.autolog, loading=Loading())
    api.use(session)
    os.register_at_fork(after_in_child=session.forked)
    if watched:
        session.declared[entropy.ROOT] = entropy.install(key).stream.place
        if not joins:
            session.clock = Clock(runs.folder(run) / clocks.FILE, replays=False)
            session.declared[clocks.ROOT] = session.clock.place
            session.clock.install()
        session.inputs = Inputs()
        _watch_arguments(session)
        traces = None if joins else _traces(session)
        session.outputs = Outputs(session.root, session.deleted, traces)
        session.outputs.install()
        if not joins:
            session.printing = Printing(runs.folder(run), session.where)
            session.printing.install()
    if not joins:
        _beat(runs, session)
    return session


def _resume(control: Control) -> Resumer:
    assert control.resume is not None
    retreat = Retreat(control)
    project = Project.open(Path(control.root))
    settings = Settings.read(project.store).changed(control.settings)
    runs = Runs(project)
    run = runs.get(control.resume)
    checkpoints = Checkpoints(project, Worth.of(settings.compress))
    saved = checkpoints.of(run.id)
    usable = [one for one in saved if _deep(one) <= (control.depth or 0)]
    target = last_usable(saved if control.depth is None else usable)
    pulse = Pulse.begin(settings, project, run.id, control.target)
    since = int(target.meta["records"]) if target is not None else 0
    attempt = 1 + int(run.facts.get("attempts", 0))
    folder = runs.folder(run.id)
    if run.home(root := os.path.realpath(project.root)) != root:
        _warn(
            f"run {run.id} was begun in {run.home(root)} and goes on in {root}; full paths that its "
            "variables hold still name the old place"
        )
    lived = _lived(folder / "heartbeat", float(run.facts.get("heartbeat", settings.heartbeat)))
    runs.resume(run.id, {"heartbeat": settings.heartbeat, "since": since})
    os.environ[RUN_VARIABLE] = run.id
    put = checkpoints.objects.put
    session = Resumer(
        project,
        run.id,
        settings,
        checkpointing=1,
        given=dict(control.given),
        runs=runs,
        records=RecordFile(folder, run.id, put=put, attempt=attempt, since=since),
        writer=Writer(checkpoints, settings, warn=_warn, ended=pulse.ended),
        pulse=pulse,
        seq=max((one.seq for one in saved), default=0),
        target=target,
        retreat=retreat,
    )
    session.jumps = Jumps.of(session, checkpoints, run.id, control.depth)
    REFUSING.append(session.refusing)
    sources = Versions(project, settings).files(run.version) if run.version else {}
    session.compiler = imports.Compiler(session, autolog=settings.autolog, sources=sources)
    api.use(session)
    os.register_at_fork(after_in_child=session.forked)
    chance = entropy.install(bytes.fromhex(run.facts["entropy"]))
    session.declared[entropy.ROOT] = chance.stream.place
    session.clock = Clock(folder / clocks.FILE, replays=target is not None)
    session.declared[clocks.ROOT] = session.clock.place
    session.clock.install()
    traces = _traces(session)
    allow_again(traces.take_away(data=target is None, lived=lived), session.root)
    session.shared = frozenset(traces.shared)
    session.outputs = Outputs(session.root, session.deleted, traces)
    session.outputs.install()
    session.printing = Printing(folder, session.where)
    session.printing.install()
    _beat(runs, session)
    return session


def _lived(heartbeat: Path, seconds: float) -> float:
    """Return the latest time at which the process that stopped can have written a file."""
    try:
        return heartbeat.stat().st_mtime + 2 * seconds
    except OSError:
        return float("inf")


def _deep(checkpoint: Checkpoint) -> int:
    return len(checkpoint.meta["path"])


def _traces(session: Recorder) -> Traces:
    return Traces.of(session.runs.folder(session.run), session.root, lambda: bool(session.stack))


def facts(
    control: Control, project: Project, settings: Settings, run: str, key: bytes, *, watched: bool
) -> dict[str, Any]:
    """Return what a replay has to know of how this run was started."""
    try:
        version = Versions(project, settings).save(run)
    except VersionError as exc:
        warnings.warn(f"The source of this run was not kept: {exc}", RuntimeWarning, stacklevel=2)
        version = ""
    return {
        "version": version,
        "script": f"-m {control.target}" if control.module else control.target,
        "argv": list(control.args),
        "root": os.path.realpath(project.root),
        "cwd": os.getcwd(),  # noqa: PTH109 - as the program sees it
        "heartbeat": settings.heartbeat,
        "target": control.target,
        "module": control.module,
        "given": control.given,
        "watched": watched,
        "autolog": settings.autolog,
        "entropy": key.hex(),
        "hash_seed": os.environ.get("PYTHONHASHSEED", "random"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "machine": platform.platform(),
        "hardware": hardware(),
        "threads": {k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS")},
    }


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _beat(runs: Runs, session: Recorder) -> None:
    """Give signs of life from a thread of our own, however long an iteration takes.

    The same thread writes down what the run uses, for `rearview energy report`.
    """
    run, seconds = session.run, session.settings.heartbeat
    session.used = used = Used(Account(runs.folder(run) / ACCOUNT))

    def beat() -> None:
        while not ended.wait(seconds):
            try:
                runs.heartbeat(run)
                used.beat()
            except OSError:
                return

    ended = threading.Event()
    atexit.register(ended.set)
    threading.Thread(target=beat, name="rearview-heartbeat", daemon=True).start()


def _leave_after(session: Recorder, seconds: float) -> None:
    """Ask the program to save and leave when it has computed for so long.

    Time counts from where it goes on, else a program that is slow to set up would never get far.
    """

    def count() -> None:
        ever = threading.Event()
        while not session.stack or getattr(session, "pending", False):
            ever.wait(min(1.0, seconds / 10))
        ever.wait(seconds)
        if session.signals is not None:
            session.signals.request()

    threading.Thread(target=count, name="rearview-leave", daemon=True).start()


def _watch_arguments(session: Recorder) -> None:
    """Keep what `argparse` returns as hyper-parameters."""
    import argparse

    real = argparse.ArgumentParser.parse_known_args

    def parse(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        found = real(self, *args, **kwargs)
        try:
            session.argument({k: plain(v) for k, v in vars(found[0]).items()})
        except Exception as exc:
            session.fail(exc)
        return found

    argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]


def plain(value: Any) -> Any:
    """Return a value as JSON has it, or its text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)
