"""Set up a session that replays a segment.

A replay patches the functions for random numbers, clock and files. Libraries bind names to these
functions when they are imported (`from time import time`), so the patches are installed before. They are
directed to the data of one run as soon as this run is known: at once in a process that was started for one segment,
after the fork in a process of the fork server. Child processes of a replay also run in its scratch tree (its own copy
of the work tree), and their records belong to the replay.

Probes run inside a context manager, the guard (`guard_probes`): after a probe has run, the guard restores the random
state and the position in the recorded clock readings.

Modules that only recording needs are not imported here.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from rearview.config import Settings
from rearview.model import Control, SegmentFile
from rearview.model.process_messages import TEXTS, SetupStart
from rearview.runtime import importer
from rearview.runtime.base_session import use_session
from rearview.runtime.importer import offer, offer_value
from rearview.runtime.replay.replayer import Replayer, recorded_values
from rearview.runtime.replay.silent_trackers import (
    EventFiles,
    logged_values,
    scalar_of,
    silence_trackers,
)
from rearview.runtime.restore_checkpoints import CheckpointIndex
from rearview.runtime.sandbox import clock as clocks
from rearview.runtime.sandbox import entropy, file_patches, program_inputs
from rearview.runtime.sandbox.entropy import after_import
from rearview.runtime.sandbox.file_view import FileView, PathUse, resolved
from rearview.runtime.sandbox.printed_lines import watch_streams
from rearview.runtime.sandbox.program_inputs import (
    library_prefixes,
    temporary_prefixes,
    unrecorded_prefixes,
)
from rearview.runtime.sandbox.written_files import OverwrittenFiles, for_native_paths
from rearview.source.isolate_probes import PACKAGE, PROBE_HOOK, TRACK, WITHOUT_RANDOM
from rearview.state.codecs.rng import read_global, write_global
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.project import Project
from rearview.store.records import RecordFile
from rearview.store.runs import Runs

if TYPE_CHECKING:
    from rearview.runtime.replay.replayer import Replayer

VARIABLE = "REARVIEW_REPLAY"
"""Environment variable that tells child processes to which replay they belong (a `ParentReplay` as JSON)."""
_PATHS = ("dir", "orig_dir", "init_main_from_path")


class ParentReplay(msgspec.Struct, frozen=True):
    """The replay to which a child process belongs, as the environment variable `VARIABLE` tells it."""

    root: str
    run: str
    replay: str
    names: tuple[str, ...]
    """Names that the replay records; the recorded run has logged all other names."""


def parent_replay() -> ParentReplay | None:
    """Return the replay to which this process belongs as a child process, or None if it belongs to none."""
    text = os.environ.get(VARIABLE)
    return msgspec.json.decode(text, type=ParentReplay) if text else None


def make_children_join(parent: ParentReplay, view: FileView) -> None:
    """Make child processes that are started from now on belong to the replay `parent` and find its files by `view`."""
    os.environ[VARIABLE] = msgspec.json.encode(parent).decode()
    after_import("multiprocessing.spawn", functools.partial(_redirect, view=view))


def _redirect(spawn: ModuleType, *, view: FileView) -> None:
    real = spawn.get_preparation_data

    @functools.wraps(real)
    def prepared(name: str) -> dict[str, Any]:
        data: dict[str, Any] = real(name)
        for key in _PATHS:
            if data.get(key):
                data[key] = view.real(data[key], PathUse.RUN)
        if "sys_path" in data:
            data["sys_path"] = [view.real(path) for path in data["sys_path"]]
        return data

    vars(spawn)["get_preparation_data"] = prepared


_NOWHERE = "\0"
"""Root folder for a `FileView` that translates no path: no path is inside this folder."""


@dataclass(frozen=True, slots=True)
class ReplayPatches:
    """The patched functions of a replay for files, random numbers and the clock."""

    view: FileView
    randomness: entropy.Randomness | None
    clock: clocks.Clock | None

    @classmethod
    def install(cls, *, watched: bool = True) -> ReplayPatches:
        """Patch the functions and return the patches; without `watched`, do not patch random numbers and clock."""
        randomness = clock = None
        if watched:
            randomness = entropy.install(b"")
            clock = clocks.Clock(Path(os.devnull), replays=True, rule=1)
            clock.install()
            watch_streams()
        view = FileView(_NOWHERE, _NOWHERE)
        file_patches.install(view)
        for_native_paths(lambda path, mode: view.real(path, file_patches.use_of(mode)))
        return cls(view, randomness, clock)

    def direct_to(
        self, view: FileView, key: bytes, readings: Path, rule: int
    ) -> dict[str, list[Any]]:
        """Direct the patches to one run: its files (`view`), random key and file with recorded clock readings.

        `rule` is the version of the rule by which the clock readings were recorded. Return name of a root -> position
        in the random stream or in the clock readings: both positions belong to the state.
        """
        positions: dict[str, list[Any]] = {}
        if self.randomness is not None:
            self.randomness.follow(key)
            positions[entropy.ROOT] = self.randomness.stream.place
        if self.clock is not None:
            self.clock.follow(readings, rule)
            positions[clocks.ROOT] = self.clock.place
        self.view.take_over(view)
        return positions


@dataclass(frozen=True, slots=True)
class SharedStart:
    """Data that a process inherits from the fork server from which it was forked."""

    patches: ReplayPatches
    seconds: float
    """Seconds that this process did not need, because other processes had done its imports and first statements."""
    setup: SetupStart | None = None
    """Which first part of the program this process runs for several segments; None if it runs one segment."""
    channel: int = -1
    """Socket on which a set-up process gets its requests; -1 in any other process."""


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Random key and clock readings of a recorded run, which its replays use again."""

    key: bytes
    """The key from which the random numbers of the run are derived."""
    folder: Path
    """The folder of the run in the store, which contains its clock readings."""
    clock_rule: int
    """Version of the rule by which the clock readings of the run were recorded."""


def replay(control: Control, shared: SharedStart | None = None) -> Replayer:
    """Return the session that replays the segment of `control`, with all patches installed.

    `shared` is what this process has inherited from the fork server; None in a process started for one segment.
    """
    session, inputs = make_session(control)
    use_session(session)
    os.register_at_fork(after_in_child=session.on_fork)
    patches = shared.patches if shared else ReplayPatches.install(watched=session.compiler.watched)
    session.report.spared = shared.seconds if shared else 0.0
    assert session.view is not None
    session.declared |= patches.direct_to(
        session.view, inputs.key, inputs.folder / clocks.FILE, inputs.clock_rule
    )
    if patches.clock is not None:
        patches.clock.in_loop = lambda: bool(session.stack)
    view = session.view = session.compiler.view = patches.view
    importer.install(session.compiler)
    make_children_join(parent_of(session), view)
    program_inputs.patch_as_recorded(inputs.folder)
    guard_probes(session)
    silence_trackers(Path(session.segment.tree).parent)
    return session


def parent_of(session: Replayer) -> ParentReplay:
    """Return the replay of `session` in the form in which child processes are told to which replay they belong."""
    segment = session.segment
    return ParentReplay(str(session.project.root), session.run, segment.replay, segment.names)


def make_session(control: Control) -> tuple[Replayer, RunInputs]:
    """Return the session that replays the segment of `control`, and inputs of its run; patch nothing."""
    assert control.segment is not None
    segment = msgspec.json.decode(Path(control.segment).read_bytes(), type=SegmentFile)
    project = Project.open(Path(control.root))
    settings = Settings.read(project.store).changed(control.settings)
    runs = Runs(project)
    run = runs.get(segment.run)
    checkpoints = Checkpoints(project)
    folder = runs.folder(run.id)
    recorded_root = run.recorded_root(os.path.realpath(project.root))
    created = OverwrittenFiles.of(folder, recorded_root + os.sep, lambda: False).created_paths()
    view = _view(project, segment, recorded_root, created)
    session = Replayer(
        project,
        run.id,
        settings,
        checkpointing=1,
        arg_values=dict(control.given),
        view=view,
        segment=segment,
        records=RecordFile(folder, run.id, origin=segment.replay, put=checkpoints.objects.put),
        recorded=recorded_values(folder),
        surroundings=run.end.surroundings,
        inputs=run.end.inputs,
        run_code=run.exit_code,
        run_early=run.end.early,
        created_files=created,
        put=checkpoints.objects.put,
    )
    session.checkpoint_index = CheckpointIndex.of(session, checkpoints, run.id)
    session.compiler = importer.Compiler(
        session,
        autolog=bool(run.facts.autolog),
        watched=run.facts.watched,
        ids=segment.ids,
        probes={
            path: {(line, column): tuple(drawn) for line, column, drawn in places}
            for path, places in segment.probes.items()
        },
        view=view,
        recorded=Path(segment.tree).parent / TEXTS,
    )
    if run.facts.cells:
        script = os.path.join(run.cwd, run.facts.target or "")  # noqa: PTH118 - as text
        session.compiler.cells = os.path.relpath(os.path.realpath(script), recorded_root)
    if segment.replay:
        session.event_files = EventFiles(project.store, run.id, segment.replay)
    return session, RunInputs(bytes.fromhex(run.facts.entropy), folder, run.facts.clock)


def _view(project: Project, segment: SegmentFile, root: str, created: Sequence[str]) -> FileView:
    """Return the translation of file paths for a replay.

    The program sees its project at `root`, where the run was recorded; the files are in the tree of `segment`.
    `created` are the files that the run created.
    """
    spared = (os.path.realpath(project.store) + os.sep, *unrecorded_prefixes())
    created_paths = (
        f"{resolved(str(Path(path).parent))}{os.sep}{Path(path).name}" for path in created
    )
    places = {path for path in created_paths if not path.startswith((root + os.sep, *spared))}
    tree = os.path.realpath(segment.tree)
    texts = Path(tree).parent / TEXTS
    return FileView(
        root,
        tree,
        texts={
            f"{tree}{os.sep}{path.relative_to(texts)}": str(path) for path in texts.rglob("*.*")
        },
        outside_copies=os.path.realpath(Path(segment.report).parent / "elsewhere"),
        unmapped=spared,
        installed=tuple(
            path
            for path in library_prefixes()
            if path.startswith(root + os.sep) and path != root + os.sep
        ),
        temporary=temporary_prefixes(),
        hidden_paths={path for path in places if os.path.lexists(path)},
        run_temporaries=frozenset(places),
        folded={f"{tree}{os.sep}{folder}" for folder in segment.folded},
    )


def guard_probes(session: Replayer) -> None:
    """Make available the names that code with probes uses: the context managers around probes, and `rearview`.

    The context manager (guard) restores random states and clock readings after a probe. `track` records the values
    that a probe logs with an experiment tracker.
    """

    @contextmanager
    def shield(line: int, *generators: Any) -> Iterator[None]:
        del line  # not needed: the traceback contains the line
        random_state = read_global()
        positions = copy.deepcopy({k: v for k, v in session.declared.items() if k.startswith("$")})
        generator_states = [(generator, _state_of(generator)) for generator in generators]
        session.probing += 1
        try:
            yield
        except Exception as exc:
            trace = exc.__traceback__  # its first frame is this function, the second one the probe
            session.note_probe_error(exc, trace and trace.tb_next)
            raise
        finally:
            session.probing -= 1
            write_global(random_state)
            for name, value in positions.items():
                _restore_declared(session.declared[name], value)
            for generator, state in generator_states:
                _restore_generator(generator, state)

    light_guard = _LightGuard(session)

    def track(method: str, *args: Any, **kwargs: Any) -> None:
        values = {
            name: scalar_of(value) for name, value in logged_values(method, args, kwargs).items()
        }
        session.log(values, session.place(sys._getframe(1)))
        if session.event_files is not None and session.writes_at(session.point()):
            session.event_files.add(method, args, kwargs)

    def guard_lightly(line: int) -> _LightGuard:
        del line
        return light_guard

    offer(PROBE_HOOK, shield, **{WITHOUT_RANDOM: guard_lightly, TRACK: track})
    offer_value(
        PACKAGE, importlib.import_module(PACKAGE)
    )  # a probe may use `rearview` without importing it


class _LightGuard:
    """Context manager around a probe that draws no random numbers: it restores no state, only counts the probe."""

    __slots__ = ("session",)

    def __init__(self, session: Replayer) -> None:
        self.session = session

    def __enter__(self) -> None:
        self.session.probing += 1

    def __exit__(
        self, kind: object, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(exc, Exception):
            self.session.note_probe_error(exc, trace)
        self.session.probing -= 1


def _restore_declared(live: Any, saved: Any) -> None:
    if isinstance(live, list):
        live[:] = saved
    else:
        vars(live).update(vars(saved))


def _state_of(generator: Any) -> Any:
    """Return a copy of the state of a random generator of Python, NumPy or torch, or None for another library's."""
    if hasattr(generator, "bit_generator"):
        return copy.deepcopy(generator.bit_generator.state)
    for getter in ("getstate", "get_state"):
        if hasattr(generator, getter):
            return copy.deepcopy(getattr(generator, getter)())
    return None


def _restore_generator(generator: Any, state: Any) -> None:
    if state is None:
        return
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)
