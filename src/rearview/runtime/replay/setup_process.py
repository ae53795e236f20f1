"""Run the set-up of several segments once, then fork a process for each segment.

The *set-up* is the first part of a program, which segments have in common. A process of the fork server
(`fork_server.py`) becomes the set-up process of some segments: it replays the start of their program and stops where
the segments begin to differ. For segments of different runs this is a top-level statement of the script; for segments
of one run it is the main loop. Each forked process then becomes the replay of one segment, with its own session,
folder, files, random key, clock and records.

The set-up ends early, before a statement whose effects depend on the run or cannot be inherited by a forked
process. Before each statement that may have such effects, the process forks a *standby*, a copy of itself that waits.
If the statement does have such effects, the process ends and the standby continues from the state before the
statement. docs/decisions/shared-start.md says why this is sound.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

import msgspec

from rearview.model import Control
from rearview.model.process_messages import (
    UNLIKE,
    VARIABLE,
    ForkServerReady,
    SetupStart,
    SpawnRequest,
)
from rearview.runtime.base_session import Session
from rearview.runtime.program_frames import run_at_bottom
from rearview.runtime.replay import start_replay
from rearview.runtime.replay.fork_server import (
    DRAWING,
    READING_CLOCK,
    open_files,
    serve,
    threads_left,
)
from rearview.runtime.replay.replayer import Replayer
from rearview.runtime.replay.shareable_statements import SetupScript, names_mean_libraries
from rearview.runtime.replay.silent_trackers import set_tracker_variables
from rearview.runtime.replay.start_replay import RunInputs, SharedStart
from rearview.runtime.restore_checkpoints import CheckpointIndex, KnownMemory
from rearview.runtime.sandbox import clock as clocks
from rearview.runtime.sandbox.program_inputs import listen
from rearview.state.codecs.rng import read_global, write_global
from rearview.store.create_files import open_file

# the original file functions, before a replay patches those in `os` and `builtins` for the program
_chdir, _getcwd, _scandir, _mkdir, _open = os.chdir, os.getcwd, os.scandir, os.mkdir, open
_readlink, _utime, _exit, _fork = os.readlink, os.utime, os._exit, os.fork

MOST_SHARED_BYTES = 64 << 20
"""Maximum number of bytes that a shared set-up may write to files: each segment gets a copy of the files."""
_UNFIT_LIBRARIES = {
    **dict.fromkeys(("wandb", "mlflow", "comet_ml", "neptune"), "it has loaded {}, a tracker"),
    **dict.fromkeys(("jax", "tensorflow", "polars", "ray", "pyspark", "grpc"), "{} keeps threads"),
    "cupy": "{} holds a device",
}
"""Library -> why a process that has imported it must not be forked; `{}` stands for the name of the library."""
_PROCESSES = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.exec", "pty.spawn")
_OPENMP = re.compile(r"/lib(?:g|i|)omp[^/]*\.so[^/]*$")
_RELEASED = b"."


class SharedSetup:
    """The set-up in this process, from which the replays of several segments are forked.

    `session.shared_setup` is this object while the set-up runs: the session reports which values the program logs and
    which loops it enters. `previous` is the set-up whose process was forked to continue with this one, or None.
    """

    def __init__(
        self,
        start: SetupStart,
        channel: int,
        shared: SharedStart,
        session: Replayer,
        previous: SharedSetup | None = None,
    ) -> None:
        self.start = start
        self._channel = channel
        self._spared = shared.seconds
        """Seconds that earlier processes took to reach the start of this set-up, such as for imports."""
        self._patches = shared.patches
        self._session = session
        self._began = perf_counter()
        self._seconds = 0.0
        self._used_paths: set[str] = set()
        if self.across_runs:
            # use no checkpoints: they belong to one run, and this set-up is for several runs
            session.checkpoint_index = CheckpointIndex(session, session.checkpoint_index.store)
        self._tree = os.path.realpath(session.segment.tree)
        self._new_files: list[_NewFile] = previous._new_files if previous is not None else []
        new_paths = {each.path for each in self._new_files}
        self._files = {
            path: facts for path, facts in _files_below(self._tree).items() if path not in new_paths
        }
        self._texts = {
            path: _content(f"{self._tree}/{path}") if facts[0] == "file" else b""
            for path, facts in self._files.items()
        }
        """Path of a file in the replay's copy of the work tree -> its bytes before the set-up, which may change it."""
        self._standby: tuple[int, int] | None = None
        """(process id, file descriptor of a pipe to the process) of the standby; None if there is no standby."""
        self._reason = ""
        """Why the set-up has ended; empty if all its statements were executed."""
        self._line = 0
        """First line of the statement that is being executed."""
        view = self._patches.view
        view.used_paths = set(previous._used_paths) if previous is not None else set()
        self._view = (set(view.hidden_paths), set(view.replay_temporaries), view.changes)
        self._open = open_files()
        self._drawn = self._randomness.stream.drawn
        self._loaded = set(self._randomness.loaded)
        self._seeded: set[str] = set(previous._seeded) if previous is not None else set()
        """Names of random generators that the program has seeded: their states no longer depend on the run."""
        self._clock_readers: set[str] = set()
        self._own_fork = False
        self._clock.listeners[:] = [self._clock_readers.add]
        self._unshareable_act = ""
        _running_setup[:] = [self]
        session.shared_setup = self

    @property
    def across_runs(self) -> bool:
        """Whether segments of different runs share this set-up."""
        return self.start.statements is not None

    @property
    def _randomness(self) -> Any:
        assert self._patches.randomness is not None
        return self._patches.randomness

    @property
    def _clock(self) -> clocks.Clock:
        assert self._patches.clock is not None
        return self._patches.clock

    def on_log(self, *, fresh: bool) -> None:
        """End the set-up before the statement that is logging values, because each run has its own records.

        Segments of one run may share the statement if the run has recorded all these values (`fresh` is False).
        """
        if self.across_runs or fresh:
            self.refuse("it logs values")

    def on_loop(self, site: str, index: int) -> None:
        """If the loop `site` is the main loop, end the set-up before it; segments of one run are forked here."""
        if site not in self.start.loops:
            return
        if self.across_runs:
            self.refuse("it enters the main loop")
        elif index == 0:
            self._fork_segments()

    def on_process(self, event: str) -> None:
        """Remember that the program starts a process; `event` is the name of the audit event that shows it."""
        if not self._own_fork:
            self._unshareable_act = self._unshareable_act or f"it starts a process ({event})"

    def on_environment(self) -> None:
        """Remember that the program reads all environment variables: Rearview's differ between segments."""
        self._unshareable_act = self._unshareable_act or "it copies the environment"

    def run(self, call: Callable[..., Any], *args: Any) -> None:
        """Run the program with `call(*args)` until segments begin to differ, then fork a process for each segment.

        This returns only in the process of a segment, after the program has ended there.
        """
        if not self.across_runs:
            run_at_bottom(call, *args)
            if self._session.shared_setup is not None:
                self.quit("the program ended before its main loop")
            return
        namespace = args[-1]
        script = SetupScript.read(self._session, namespace["__file__"])
        setup, executed = self, 0
        while True:
            executed = setup._execute_shared(script, executed, namespace)
            request, channel = setup._serve()
            script = setup._become_segment(request, script, executed)
            code = script.code_after(self._session, executed)
            if request.setup is None:
                run_at_bottom(exec, code, namespace)
                return
            shared = SharedStart(self._patches, setup._spared + setup._seconds)
            setup = SharedSetup(request.setup, channel, shared, self._session, setup)
            if not setup.across_runs:
                setup.run(exec, code, namespace)
                return

    def _execute_shared(self, script: SetupScript, executed: int, namespace: dict[str, Any]) -> int:
        """Execute the statements that segments share, except the first `executed`, which were executed before.

        Stop before a statement that cannot be shared. Return the number of statements that are executed by then.
        """
        assert self.start.statements is not None
        statements = script.statements(self._session, self.start.statements)
        for statement in statements[executed:]:
            self._line = statement.first_line
            if not statement.safe and self._fork_standby():
                return executed
            try:
                run_at_bottom(exec, statement.code, namespace)
            except BaseException as exc:
                self.refuse(f"it raises {type(exc).__name__}: {exc}")
            if not statement.safe:
                seeds = statement.seeds and names_mean_libraries(namespace)
                reason = self._obstacle(seeds=seeds)
                if reason:
                    self.refuse(reason)
            executed += 1
        self._release_standby()
        return executed

    def _fork_standby(self) -> bool:
        """Fork a standby, which waits inside this call; return False in this process.

        If this process refuses the next statement and ends, the call returns True in the standby, which continues. If
        the standby is no longer needed, it ends inside this call.
        """
        reading, writing = os.pipe()
        pid = self._fork()
        if pid:
            os.close(reading)
            self._release_standby()
            self._standby = pid, writing
            return False
        os.close(writing)
        if self._standby is not None:
            os.close(self._standby[1])
            self._standby = None
        message = os.read(reading, 1 << 16)
        os.close(reading)
        if message == _RELEASED:
            _exit(0)
        self._reason = message.decode("utf-8", "replace") or "the process ended"
        self._unshareable_act = ""
        return True

    def _release_standby(self) -> None:
        if self._standby is not None:
            pid, pipe = self._standby
            self._standby = None
            os.write(pipe, _RELEASED)
            os.close(pipe)
            os.waitpid(pid, 0)

    def refuse(self, reason: str) -> NoReturn:
        """End the set-up before the current statement because of `reason`.

        This process ends and the standby continues; without a standby, no segment is forked.
        """
        if self._standby is None:
            self.quit(reason)
        text = f"{reason} (line {self._line})"
        os.write(self._standby[1], text.encode("utf-8", "replace")[: 1 << 12])
        self._leave()

    def quit(self, reason: str) -> NoReturn:
        """End the set-up and this process without forking segments; each segment then starts on its own.

        `reason` is reported to the process that requested the set-up.
        """
        with contextlib.suppress(OSError):
            ready = ForkServerReady(perf_counter() - self._began, reason, usable=False)
            os.write(self._channel, msgspec.json.encode(ready))
        self._leave()

    def _leave(self) -> NoReturn:
        self._session.closed = True
        _exit(0)

    def _fork(self) -> int:
        """Fork a child that can continue the program like this process; return its process id, or 0 in the child."""
        with self._children_continue():
            return _fork()

    @contextlib.contextmanager
    def _children_continue(self) -> Iterator[None]:
        """Let children that are forked inside the `with` block continue the program.

        After a fork, Python and Rearview change random states in a child, and Rearview stops watching its loops. Here
        this is undone: the child watches loops and has the random states of the parent.
        """
        session, pid = self._session, os.getpid()
        stack, state = session.stack, read_global()
        self._own_fork = True
        _end_openmp_threads()
        try:
            yield
        finally:
            self._own_fork = False
            if os.getpid() != pid:
                session.stack, session.watching, session.pid = stack, True, os.getpid()
                self._randomness.resume()
                write_global(state)

    def _obstacle(self, *, seeds: bool = False) -> str:
        """Return why segments cannot share the state of this process, or an empty text if they can.

        Either the process must not be forked here, or its state depends on the run. `seeds` is True after a statement
        that only gives seeds.
        """
        for library, why in _UNFIT_LIBRARIES.items():
            if library in sys.modules:
                return why.format(library)
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return "torch holds a CUDA device"
        _end_openmp_threads()
        return (
            self._unshareable_act
            or self._file_obstacle()
            or (self._run_dependence(seeds=seeds) if self.across_runs else "")
            or _lost_by_fork()
        )

    def _file_obstacle(self) -> str:
        """Return why segments cannot inherit what the set-up did with files, or an empty text if they can."""
        new_descriptors = open_files() - self._open
        new_descriptors = {
            file
            for file in new_descriptors
            if self._standby is None or not file.startswith(f"{self._standby[1]}:")
        }
        if new_descriptors:
            return f"it leaves open {_path_in_program(min(new_descriptors), self._session)}"
        view = self._patches.view
        if (view.hidden_paths, view.replay_temporaries) != self._view[:2] or Path(
            view.outside_copies
        ).exists():
            return "it changes files outside the project"
        return self._written_file_obstacle() if view.changes != self._view[2] else ""

    def _written_file_obstacle(self) -> str:
        """Remember the files that the set-up has created, so that each segment gets a copy.

        Return why segments cannot get copies, such as because an existing file was changed, or an empty text.
        """
        current_files = _files_below(self._tree)
        for path, facts in self._files.items():
            if current_files.get(path) != facts:
                return f"it changes {path}"
        new_files = []
        for path in sorted(current_files.keys() - self._files.keys()):
            kind, size, moment = current_files[path]
            if kind == "link":
                return f"it makes the link {path}"
            new_files.append(_NewFile(path, kind == "folder", int(size), moment))
        if sum(each.size for each in new_files) > MOST_SHARED_BYTES:
            return "it writes large files"
        for each in new_files:
            each.data = b"" if each.folder else _content(f"{self._tree}/{each.path}")
        self._new_files = new_files
        return ""

    def _run_dependence(self, *, seeds: bool) -> str:
        """Return why the state of the program depends on which run is replayed, or an empty text if it does not.

        `seeds` is True after a statement that only gives seeds.
        """
        readers = {name for name in self._clock_readers if name not in READING_CLOCK}
        if readers:
            return "it reads the clock"
        if self._randomness.stream.drawn != self._drawn:
            return "it draws random numbers"
        if set(self._randomness.loaded) - self._loaded - DRAWING:
            return "it draws random names"
        moved_generators = self._moved_generators()
        if seeds:
            self._seeded |= moved_generators
        if moved_generators - self._seeded:
            return "it draws random numbers"
        return ""

    def _moved_generators(self) -> set[str]:
        """Return the names of the global random generators that are no longer in their first state.

        The first state is the one that Rearview derives from the run's random key.
        """
        states, initial = read_global(), self._randomness.initial()
        return {
            name
            for name in initial
            if name in states and _encoded(states[name]) != _encoded(initial[name])
        }

    def _fork_segments(self) -> None:
        """Fork segments of one run here, at the entry of the main loop; return only in the processes of segments."""
        reason = self._obstacle()
        if reason:
            self.quit(reason)
        request, _ = self._serve()
        self._become_segment(request, None, -1)

    def _serve(self) -> tuple[SpawnRequest, int]:
        """Fork a process for each request; return only in the forked processes.

        Return the request, and the file descriptor of its own socket if the process becomes a set-up process, else -1.
        """
        self._session.shared_setup = None
        # write no report when this process ends: it replays no segment itself
        self._session.closed = True
        self._clock.listeners.clear()
        _running_setup.clear()
        self._used_paths = self._patches.view.used_paths or set()
        self._patches.view.used_paths = None
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        self._seconds = perf_counter() - self._began
        ready = ForkServerReady(self._seconds, self._reason)
        with self._children_continue():
            return serve(self._channel, ready, before_fork=_end_openmp_threads)

    def _become_segment(
        self, request: SpawnRequest, script: SetupScript | None, executed: int
    ) -> SetupScript | Any:
        """Turn this process into the replay of the segment in `request`; return the segment's script.

        `script` is the script of the set-up, of which `executed` statements are executed. At the main loop, `script`
        and the result are None.
        """
        session = self._session
        control = msgspec.json.decode(request.environment[VARIABLE], type=Control)
        with _open("/proc/self/fd/1", "rb") as printed:
            output = printed.read()
        log = open_file(request.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(log, output)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        if request.cores:
            os.sched_setaffinity(0, request.cores)
        fresh, inputs = start_replay.make_session(control)
        if script is not None:
            reason = self._difference(fresh, script)
            if reason:
                self._leave_segment(reason)
        self._take_files(fresh)
        self._take_session(fresh, inputs, request)
        if script is None:
            return None
        key = script.sharing_key(session, executed)
        script.forget_loops_after(session, executed)
        own_script = SetupScript.read(session, script.path)
        if own_script.sharing_key(session, executed) != key:
            self._leave_segment("its statements differ")
        return own_script

    def _leave_segment(self, reason: str) -> NoReturn:
        """End this process because of `reason`: its segment cannot continue from this set-up.

        Another set-up process may suit the segment.
        """
        os.write(2, f"not shared: {reason}\n".encode())
        self._session.closed = True
        _exit(UNLIKE)

    def _difference(self, fresh: Replayer, script: SetupScript) -> str:
        """Return how the session `fresh` of a segment differs in a way that matters to the set-up, or an empty text.

        Settings, arguments, and files that the set-up used or that either run read are compared.
        """
        session = self._session
        for attribute in ("root", "settings", "arg_values"):
            if getattr(fresh, attribute) != getattr(session, attribute):
                return f"{attribute} differs"
        own_view = fresh.view
        assert own_view is not None
        root = session.root.rstrip(os.sep)
        loaded = {
            os.path.relpath(os.path.realpath(file), root)
            for module in list(sys.modules.values())
            if isinstance(file := getattr(module, "__file__", None), str) and session.belongs(file)
        } - {script.relative}
        used = {
            os.path.relpath(path, root)
            for path in self._used_paths
            if path.startswith(root + os.sep)
        }
        if root in self._used_paths:
            used.add("")
        own_tree = os.path.realpath(fresh.segment.tree)
        own_files = _files_below(own_tree)
        read = {
            os.path.relpath(path, root)
            for inputs in (session.inputs, fresh.inputs)
            for path in inputs
        }
        for path in sorted(self._files.keys() | own_files.keys()):
            setup_file, own_file = self._files.get(path), own_files.get(path)
            if setup_file is None or own_file is None:
                parent = os.path.dirname(path)  # noqa: PTH120
                if path in used or parent in used or path in read or path.endswith(".py"):
                    return f"{path} is there for one run only"
            elif setup_file[0] != own_file[0] or (
                setup_file[0] == "link" and setup_file[1] != own_file[1]
            ):
                return f"{path} differs"
            elif setup_file[0] == "file" and path != script.relative:
                matters = not path.endswith(".py") or path in loaded or path in used
                if matters and self._texts[path] != _content(f"{own_tree}/{path}"):
                    return f"{path} differs"
        return ""

    def _take_files(self, fresh: Replayer) -> None:
        """Copy the files that the set-up has created into the work tree of the segment `fresh`.

        Change the current folder and the folders of imports to this tree.
        """
        own_tree = os.path.realpath(fresh.segment.tree)
        for each in self._new_files:
            target = f"{own_tree}/{each.path}"
            if each.folder:
                with contextlib.suppress(FileExistsError):
                    _mkdir(target)
            else:
                with _open(target, "wb") as new:
                    new.write(each.data)
                _utime(target, ns=(each.moment, each.moment))
        folder = _getcwd()
        if folder == self._tree or folder.startswith(self._tree + os.sep):
            _chdir(own_tree + folder[len(self._tree) :])
        to_own_tree = _path_mover(self._tree, own_tree)
        sys.path[:] = map(to_own_tree, sys.path)
        for module in list(sys.modules.values()):
            folders = getattr(module, "__path__", None)
            if isinstance(folders, list):
                folders[:] = map(to_own_tree, folders)

    def _take_session(self, fresh: Replayer, inputs: RunInputs, request: SpawnRequest) -> None:
        """Give the session of this process the segment, records and report of `fresh`, and direct patches to its run."""
        session, patches = self._session, self._patches
        assert fresh.view is not None
        patches.view.take_over(fresh.view)
        if self.across_runs:
            self._follow(inputs)
            own_names = {each.name for each in fields(Replayer)}
            own_names -= {each.name for each in fields(Session)}
            own_names |= {"run", "began"}
            for name in own_names - {"checkpoint_index", "shared_setup"}:
                setattr(session, name, getattr(fresh, name))
            session.checkpoint_index = CheckpointIndex.of(
                session, fresh.checkpoint_index.store, fresh.run
            )
            for name in ("autolog", "ids", "probes"):
                setattr(session.compiler, name, getattr(fresh.compiler, name))
        else:
            for name in ("segment", "records", "event_files"):
                setattr(session, name, getattr(fresh, name))
            session.checkpoint_index.known_memory = KnownMemory()
            session.closed = False
        session.compiler.recorded = fresh.compiler.recorded
        session.report.spared = max(0.0, self._spared + self._seconds - request.waited)
        parent = start_replay.parent_of(session)
        os.environ[start_replay.VARIABLE] = msgspec.json.encode(parent).decode()
        set_tracker_variables(Path(session.segment.tree).parent)

    def _follow(self, inputs: RunInputs) -> None:
        """Let random numbers and clock readings from now on be those of the run whose key and folder are in `inputs`."""
        self._randomness.follow(inputs.key, seeded=self._seeded)
        self._clock.follow(inputs.folder / clocks.FILE, inputs.clock_rule)


@dataclass(slots=True)
class _NewFile:
    """A file or folder that the set-up has created in its copy of the work tree."""

    path: str
    folder: bool
    size: int
    moment: int
    data: bytes = b""


_running_setup: list[SharedSetup] = []


def _on_process(event: str, _args: tuple[Any, ...]) -> None:
    if _running_setup:
        _running_setup[0].on_process(event)


def watch_program() -> None:
    """Patch Python to notify the running set-up when the program starts a process or copies the environment."""
    listen(_on_process, *_PROCESSES)
    environ: Any = type(os.environ)
    real = environ.__iter__

    def iterate(mapping: Any) -> Any:
        if _running_setup and not _called_by_rearview(sys._getframe(1)):
            _running_setup[0].on_environment()
        return real(mapping)

    environ.__iter__ = iterate


def _called_by_rearview(frame: Any) -> bool:
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in {"os", "collections.abc", "_collections_abc"}:
            return name.startswith("rearview.")
        frame = frame.f_back
    return True


def _lost_by_fork() -> str:
    """Return which thread a forked child would lose or which memory it would share, or an empty text if none."""
    threads = threads_left()
    if threads:
        return f"a thread was left behind: {min(threads)}"
    maps = Path("/proc/self/maps").read_text("utf-8", "replace")
    for line in maps.splitlines():
        words = line.split(None, 5)
        if "w" in words[1] and "s" in words[1]:
            return f"it shares memory ({words[5] if len(words) > 5 else 'without a name'})"
    return ""


def _end_openmp_threads() -> None:
    """End the threads of OpenMP libraries in this process; the libraries start new threads when needed."""
    if not threads_left():
        return
    with _open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        libraries = {line.split(None, 5)[5].strip() for line in file if ".so" in line}
    for library in sorted(libraries):
        if _OPENMP.search(library):
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(library).omp_pause_resource_all(2)


def _files_below(folder: str, prefix: str = "") -> dict[str, tuple[str, str | int, int]]:
    """Return path in `folder` -> (kind, size, time) of the files, folders and links in `folder` at any depth.

    The kind is `file`, `folder` or `link`; for a link, the second value is its target. Times are in nanoseconds, 0
    except for files. `prefix` is put before each path.
    """
    files: dict[str, tuple[str, str | int, int]] = {}
    with _scandir(folder) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            file_stat = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(file_stat.st_mode):
                files[path] = ("link", _readlink(entry.path), 0)
            elif stat.S_ISDIR(file_stat.st_mode):
                files[path] = ("folder", 0, 0)
                files |= _files_below(entry.path, path + os.sep)
            else:
                files[path] = ("file", file_stat.st_size, file_stat.st_mtime_ns)
    return files


def _content(path: str) -> bytes:
    with _open(path, "rb") as file:
        return file.read()


def _path_mover(old: str, new: str) -> Callable[[str], str]:
    def move(path: str) -> str:
        inside = path == old or path.startswith(old + os.sep)
        return new + path[len(old) :] if inside else path

    return move


def _encoded(value: Any) -> bytes:
    return pickle.dumps(value)


def _path_in_program(file: str, session: Session) -> str:
    path = file.partition(": ")[2]
    return session.view.program_path(path) if session.view is not None else path
