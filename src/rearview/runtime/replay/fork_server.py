"""Fork server: import the libraries once, then fork a process per segment.

The server installs the patches of a replay, executes the import statements with which the programs of its segments
begin, and then waits for requests. After the fork, a child continues like a process that was started for the segment
(a fresh process). If the folder of the child's program has files that would change these imports, the child replaces
itself by a fresh process. docs/decisions/shared-start.md says why this is sound.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import msgspec

import rearview.runtime.replay.start_replay  # noqa: F401 - a fresh process also loads this before libraries
from rearview.model import Control
from rearview.model.process_messages import (
    LAUNCHER,
    VARIABLE,
    ForkServerReady,
    ForkServerStart,
    ReapRequest,
    SpawnRequest,
)
from rearview.runtime.measurements import age
from rearview.runtime.replay.start_replay import ReplayPatches, SharedStart
from rearview.runtime.sandbox.entropy import FIRST, Randomness
from rearview.source.library_loops import LOOPS
from rearview.state.codecs.rng import read_global
from rearview.store.create_files import open_file

READING_CLOCK = frozenset(
    {"dateutil.parser._parser", "numpy.f2py.rules", "lightning_utilities.__about__"}
)
"""Modules that read the clock when they are imported, but use the time only for the year or for a comment."""
DRAWING = frozenset(
    {
        "joblib._multiprocessing_helpers",  # draws the name of a lock
        "numpy.random._pickle",  # seeds NumPy's global generator, which is seeded again
        "scipy.stats._distribution_infrastructure",  # draws for examples in its documentation
        "sklearn.ensemble._hist_gradient_boosting.grower",  # draws an unused default
        *("sympy.core.random", "sympy.core.symbol"),  # draw to test whether formulas are equal
        "torch.distributed._composable.contract",  # draws a key of its registry
        "transformers.utils.hub",  # draws the name of a session
    }
)
"""Modules that draw random numbers during their import; no result depends on these numbers."""
_DRAWING_NAMES = frozenset({"rich.style"})
"""Modules that make random names with Python's module `random` during their import."""
_WORDS = 624
"""Number of random 32-bit words that Python's module `random` computes at once."""
_THREADS = frozenset({"jemalloc_bg_thd"})
"""Names of threads that may exist when the process forks: jemalloc itself handles the loss of its thread."""
_CONFIGURATION = {"matplotlibrc": "matplotlib"}
"""Name of a configuration file -> library that reads it from the folder of the program when it is imported."""
_LONGEST = 1 << 22
"""Maximum number of bytes of one request to a fork server."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Result of executing the import statements of a fork server."""

    names: frozenset[str]
    """Top-level packages and modules that were imported."""
    environment: dict[str, str]
    """Environment variables that the imports have set: name -> value."""
    fit: int
    """Number of first statements that leave the process fit to be forked."""
    unfit: str
    """Why the next statement makes the process unfit to be forked; empty if there is no such statement."""


def run_fork_server(control: Control) -> tuple[Control, SharedStart]:
    """Import the libraries that `control.fork_server` lists, then fork a child process for every request.

    This returns only in the children: the control value of the child, and what the child inherits from the server.
    """
    setup = control.fork_server
    assert setup is not None
    variables = dict(os.environ)
    patches = ReplayPatches.install()
    loaded = _load(setup.imports, patches)
    if loaded.unfit:
        # imports cannot be undone: start again with fewer statements
        fewer_imports = ForkServerStart(
            setup.channel, setup.imports[: loaded.fit], loaded.unfit, age()
        )
        new_control = msgspec.json.encode(
            msgspec.structs.replace(control, fork_server=fewer_imports)
        ).decode()
        _start_fresh({**variables, **control.lent, VARIABLE: new_control})
    seconds = age() - setup.tried
    request, channel = serve(setup.channel, ForkServerReady(seconds, setup.left_out))
    spared = max(0.0, seconds - request.waited)
    shared = SharedStart(patches, spared, setup=request.setup, channel=channel)
    return _become_segment(request, loaded), shared


def _load(statements: Sequence[str], patches: ReplayPatches) -> _Loaded:
    """Execute the import `statements` up to the first that makes the process unfit to be forked; return the result."""
    modules, variables, files = set(sys.modules), dict(os.environ), open_files()
    sys.modules["__main__"] = ModuleType("__main__")  # the program will get this module
    fit, unfit = 0, ""
    for statement in statements:
        try:
            exec(statement, {"__name__": "__main__"})  # noqa: S102 - a statement of the programs
        except BaseException as exc:
            unfit = f"{type(exc).__name__}: {exc}"
        if variables.keys() - os.environ.keys():
            unfit = unfit or "an environment variable was removed"
        unfit = unfit or _difference_from_fresh(patches, open_files() - files)
        if unfit:
            break
        fit += 1
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # otherwise every child would print the buffered text again
    names = frozenset(name.partition(".")[0] for name in sys.modules.keys() - modules)
    changed = {k: v for k, v in os.environ.items() if variables.get(k) != v}
    return _Loaded(names, changed, fit, unfit)


def _difference_from_fresh(patches: ReplayPatches, files: set[str]) -> str:
    """Return why a forked child would differ from a fresh process, or an empty text if it would not.

    `files` are the files that the imports have left open.
    """
    assert patches.clock is not None
    assert patches.randomness is not None
    watched = LOOPS.keys() & sys.modules.keys()
    clocked = patches.clock.readers - READING_CLOCK
    drawing = patches.randomness.loaded.keys() - DRAWING
    if watched:
        return f"loops of {min(watched)} are watched"
    if clocked:
        return f"{min(clocked)} reads the clock when it is imported"
    if (
        drawing
        or patches.randomness.stream.drawn != FIRST
        or not _is_reproducible(patches.randomness)
    ):
        return f"{min(drawing, default='something')} draws random numbers when it is imported"
    if files:
        return f"{min(files)} was left open"
    pid = os.fork()  # makes thread pools that can handle forks end their threads
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = threads_left()
    return f"a thread was left behind: {min(threads)}" if threads else ""


def _is_reproducible(randomness: Randomness) -> bool:
    """Return True if the global random generators can be brought into their current state from a random key.

    If numbers were drawn from Python's module `random`, a library of `_DRAWING_NAMES` must be loaded, which drew them.
    Each child then seeds the generator and draws as many numbers again.
    """
    random_state = read_global()
    words = random_state["random"][1][-1] % _WORDS
    if words and not _DRAWING_NAMES & sys.modules.keys():
        return False
    randomness.words = words
    randomness.follow(randomness.stream.key)
    return pickle.dumps(random_state) == pickle.dumps(read_global())


def threads_left() -> set[str]:
    """Return the names of the threads of this process that would not exist in a forked child."""
    tasks_folder = Path("/proc/self/task")
    tasks = [task for task in tasks_folder.iterdir() if task.name != str(os.getpid())]
    names = {(task / "comm").read_text("utf-8", "replace").strip() for task in tasks}
    return names - _THREADS


def open_files() -> set[str]:
    """Return the open files of this process, each as text `<file descriptor>: <path>`."""
    files = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed by now
            files.add(f"{descriptor.name}: {descriptor.readlink()}")
    return files


def serve(
    channel: int, ready: ForkServerReady, before_fork: Callable[[], None] = lambda: None
) -> tuple[SpawnRequest, int]:
    """Serve requests from the socket `channel` until it is closed, then end the process.

    This returns only in each forked child: its request, and the file descriptor of its own socket if the child will
    serve requests itself, else -1. `ready` is sent first; `before_fork` is called before each fork.
    """
    requests = socket.socket(fileno=channel)
    try:
        requests.send(msgspec.json.encode(ready))
        while True:
            data, passed, _, _ = socket.recv_fds(requests, _LONGEST, 1)
            if not data:
                break
            request = msgspec.json.decode(data, type=SpawnRequest | ReapRequest)
            if isinstance(request, SpawnRequest):
                before_fork()
                result = _fork()
                if result == 0:
                    requests.close()
                    return request, passed[0] if passed else -1
                for descriptor in passed:
                    os.close(descriptor)
            else:
                result = os.waitstatus_to_exitcode(os.waitpid(request.pid, 0)[1])
            requests.send(b"%d" % result)
    except OSError:
        os._exit(1)
    os._exit(0)


def _fork() -> int:
    """Fork a child; return its process id, or 0 in the child. The child already leads a new process session."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(reading)
        os.close(writing)
        return 0
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    return pid


def _become_segment(request: SpawnRequest, loaded: _Loaded) -> Control:
    """Switch this process to the output, folder, cores and environment in `request`; return the control value.

    `loaded` is the result of the fork server's imports.
    """
    log = open_file(request.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request.folder)
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    if _changes_imports(request.module_folder, loaded.names):
        if request.setup is not None:
            os._exit(0)  # segments cannot share this process: each starts as a fresh one
        _start_fresh(request.environment)
    os.environ.clear()
    os.environ.update(request.environment)
    control = msgspec.json.decode(os.environ.pop(VARIABLE), type=Control)
    os.environ.update(loaded.environment)
    return control


def _start_fresh(environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a fresh one with the environment variables `environment`."""
    command = (sys.executable, LAUNCHER)
    os.execve(sys.executable, command, environment)  # noqa: S606


def _changes_imports(folder: str, names: frozenset[str]) -> bool:
    """Return True if a file in the program's `folder` would change the import of one of the libraries `names`."""
    own_modules = {name.partition(".")[0] for name in os.listdir(folder)}  # noqa: PTH208 - names alone
    read = {library for file, library in _CONFIGURATION.items() if file in own_modules}
    return bool((own_modules | read) & names)
