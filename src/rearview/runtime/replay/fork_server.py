"""Fork server: import the libraries once, then fork a process per segment.

The server installs the patches of a replay, executes the import statements with which the programs of its segments
begin, and then waits for requests. After the fork, a child continues like a fresh process. A child whose program
would import other modules under these names replaces itself by a fresh process.
docs/decisions/shared-start.md says why this is sound.
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

import rearview.runtime.replay.start_replay  # noqa: F401 - a fresh segment loads this before libraries
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
"""Modules that read the clock when they are imported, but use only the year or write a comment."""
DRAWING = frozenset(
    {
        "joblib._multiprocessing_helpers",  # for the name of a lock
        "numpy.random._pickle",  # its global generator, which is seeded again
        "scipy.stats._distribution_infrastructure",  # for examples in its documentation
        "sklearn.ensemble._hist_gradient_boosting.grower",  # for an unused default
        *("sympy.core.random", "sympy.core.symbol"),  # to try out whether formulas are equal
        "torch.distributed._composable.contract",  # for a key of its registry
        "transformers.utils.hub",  # for the name of a session
    }
)
"""Modules that draw random numbers during their import; no result depends on these numbers."""
_DRAWING_NAMES = frozenset({"rich.style"})
"""Modules that draw random names from Python's own generator during their import."""
_WORDS = 624
"""Count of numbers that Python's generator produces at once."""
_THREADS = frozenset({"jemalloc_bg_thd"})
"""Names of threads that may exist at a fork: jemalloc handles forks itself."""
_CONFIGURATION = {"matplotlibrc": "matplotlib"}
"""By file name: the library that reads this file from the folder of the program when it is imported."""
_LONGEST = 1 << 22
"""Most bytes of a request."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the import statements of a fork server have done."""

    names: frozenset[str]
    """Top-level packages and modules that were imported."""
    environment: dict[str, str]
    """Environment variables that the imports have set."""
    fit: int
    """Number of statements after which the process can be forked."""
    unfit: str
    """Why the process cannot be forked after the next statement; empty if all statements are executed."""


def run_fork_server(control: Control) -> tuple[Control, SharedStart]:
    """Import the shared libraries, then fork a child for every request.

    This returns only in these children, with the control value of the child.
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
    """Execute import statements until one makes the process unfit to be forked."""
    modules, variables, files = set(sys.modules), dict(os.environ), open_files()
    sys.modules["__main__"] = ModuleType("__main__")  # becomes the program's `__main__`
    fit, unfit = 0, ""
    for statement in statements:
        try:
            exec(statement, {"__name__": "__main__"})  # noqa: S102 - as the programs do
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
            stream.flush()  # otherwise every child would print the same text again
    names = frozenset(name.partition(".")[0] for name in sys.modules.keys() - modules)
    changed = {k: v for k, v in os.environ.items() if variables.get(k) != v}
    return _Loaded(names, changed, fit, unfit)


def _difference_from_fresh(patches: ReplayPatches, files: set[str]) -> str:
    """Return why a forked child would differ from a fresh process; empty if it would not."""
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
    pid = os.fork()  # thread pools that handle forks end their threads before a fork
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    threads = threads_left()
    return f"a thread was left behind: {min(threads)}" if threads else ""


def _is_reproducible(randomness: Randomness) -> bool:
    """Return True if the current state of the global random generators can be reached again from a key.

    A library that draws names from Python's generator must be in `_DRAWING_NAMES`: its draws are repeated
    after each reseeding.
    """
    random_state = read_global()
    words = random_state["random"][1][-1] % _WORDS
    if words and not _DRAWING_NAMES & sys.modules.keys():
        return False
    randomness.words = words
    randomness.follow(randomness.stream.key)
    return pickle.dumps(random_state) == pickle.dumps(read_global())


def threads_left() -> set[str]:
    """Return the names of the threads that a fork would lose."""
    tasks_folder = Path("/proc/self/task")
    tasks = [task for task in tasks_folder.iterdir() if task.name != str(os.getpid())]
    names = {(task / "comm").read_text("utf-8", "replace").strip() for task in tasks}
    return names - _THREADS


def open_files() -> set[str]:
    """Return the open files of this process, each as `number: path`."""
    files = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor that read the folder is closed
            files.add(f"{descriptor.name}: {descriptor.readlink()}")
    return files


def serve(
    channel: int, ready: ForkServerReady, before_fork: Callable[[], None] = lambda: None
) -> tuple[SpawnRequest, int]:
    """Serve requests until the socket is closed; return only in each forked child, with its request.

    A child that will serve requests itself also gets the number of its own socket; any other child gets -1.
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
    """Fork a child that leads a new process session when this function returns."""
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
    """Take over output, folder, cores and environment of a segment; return its control value."""
    log = open_file(request.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.chdir(request.folder)
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    if _changes_imports(request.module_folder, loaded.names):
        if request.setup is not None:
            os._exit(0)  # this process could share nothing: its segments start on their own
        _start_fresh(request.environment)
    os.environ.clear()
    os.environ.update(request.environment)
    control = msgspec.json.decode(os.environ.pop(VARIABLE), type=Control)
    os.environ.update(loaded.environment)
    return control


def _start_fresh(environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by a fresh one."""
    command = (sys.executable, LAUNCHER)
    os.execve(sys.executable, command, environment)  # noqa: S606


def _changes_imports(folder: str, names: frozenset[str]) -> bool:
    """Return True if files in a program's `folder` would change the imports of the shared libraries `names`."""
    own_modules = {name.partition(".")[0] for name in os.listdir(folder)}  # noqa: PTH208 - names alone
    read = {library for file, library in _CONFIGURATION.items() if file in own_modules}
    return bool((own_modules | read) & names)
