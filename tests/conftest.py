"""What holds for all tests."""

import ast
import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from warm_start import warm_starts

# Which stores were made here is remembered in a folder of the tests' own, not in the user's.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rearview-state-")

# Programs of tests run for milliseconds: they are to be replayed from checkpoints all the same.
os.environ.setdefault("REARVIEW_RERUN", "false")

# A busy machine makes no test fail.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# Tests fork to be killed. Clients of servers that the parent left behind must not be collected in
# such a child: on their way out they wait for threads that only the parent has, or crash.
os.register_at_fork(after_in_child=gc.freeze)

# pytest keeps the tests that it has rewritten in __pycache__, also where no bytecode is to be written: to rewrite
# all of them takes each worker longer than to import them.
_WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False

LIBRARIES = ("torch", "torch._dynamo")
"""What takes several seconds to import, and what many libraries import first."""
_SLOW_IMPORTS = {
    *("plainly", "recorded", "oracle", "kills", "forked", "subprocess", "multiprocessing", "rays"),
    *("notebooks", "faults"),
    *(
        "torch",
        "keras",
        "lightning",
        "transformers",
        "jax",
        "ray",
        "hypothesis",
        "pandas",
        "duckdb",
    ),
}
"""A test module that imports one of these starts processes, or loads a library that takes seconds."""
_SLOW_FOLDERS = ("journeys", "sites", "frameworks", "contracts")
_SHARING = {
    "a server": ("contracts/test_remotes", "remote/test_servers", "runtime/test_kills"),
    "a Ray cluster": ("execute/test_ray", "contracts/test_executors"),
    "a process that has imported torch": ("journeys/test_corpus", "journeys/test_libraries"),
    "a browser": ("web/",),
    "torch and a framework": ("frameworks/", "background_logger/", "bridges/", "state/"),
}
"""Modules whose tests share what takes seconds to start or to import: one worker gets them together."""
_SECONDS = {
    "journeys/test_corpus": 6,
    "frameworks/test_loggers": 10,
    "journeys/test_damage": 12,
    "journeys/test_guides": 8,
    "notebook/": 4,
    "multiversion/test_package": 0.3,
    "multiversion/": 2,
    "journeys/test_small_programs": 0.6,
    "journeys/": 1.5,
    "runtime/observed_values/test_logger_patches": 8,
    "runtime/test_kills": 8,
    "runtime/test_as_iterated": 0.02,
    "backfill/": 1,
    "store/": 0.2,
}
"""Processor seconds of one test, about, where they are more than half a second: the first that fits."""


@pytest.fixture(scope="module")
def warm_start():
    """Recorded programs are forked from a process that has imported Rearview."""
    with warm_starts():
        yield


@pytest.fixture(scope="module")
def warm_torch():
    """Recorded programs are forked from a process that has imported torch, too."""
    pytest.importorskip("torch", reason="LOUD: torch is not installed")
    with warm_starts(*LIBRARIES):
        yield


@pytest.fixture(scope="module")
def warm_kernel():
    """Kernels of notebooks are forked from a process that has imported what each of them needs."""
    with warm_starts("ipykernel.kernelapp", "rearview.runtime.cells.cached_kernel"):
        yield


def pytest_collection_finish():
    """Let tests find the setting of the interpreter as it was."""
    sys.dont_write_bytecode = _WRITES_NO_BYTECODE


def pytest_collection_modifyitems(items):
    """Mark slow tests and those that need a server, and let each worker start with long ones.

    `make quick` leaves out what is marked.
    """
    slow = {}
    for item in items:
        path = item.path
        if path not in slow:
            slow[path] = _is_slow(path)
        if slow[path]:
            item.add_marker(pytest.mark.slow)
        if "server" in item.fixturenames or "ray" in path.name:
            item.add_marker(pytest.mark.server)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        items[:] = _dealt(items, workers, slow)


def _dealt(items, workers, slow):
    """Return the tests in the order in which workers are to run them.

    pytest-xdist gives each worker an equal number of tests that follow each other, and later gives those
    at the end of one worker's tests to workers that have none left. So each part begins with long tests, and
    ends with short ones, by which the workers end at the same time. Tests of a module stay together, as
    they share fixtures.
    """
    groups = {}
    for item in items:
        groups.setdefault(_group(item.path), []).append(item)
    long = {name: group for name, group in groups.items() if any(slow[item.path] for item in group)}
    short = [item for name, group in groups.items() if name not in long for item in group]
    parts = [[] for _ in range(workers)]
    seconds = [0.0] * workers
    by_seconds = {name: sum(_seconds(item.path) for item in group) for name, group in long.items()}
    for name in sorted(long, key=lambda name: (-by_seconds[name], name)):
        least = seconds.index(min(seconds))
        parts[least] += long[name]
        seconds[least] += by_seconds[name]
    for number, part in enumerate(parts):
        missing = len(items) * (number + 1) // workers - len(items) * number // workers - len(part)
        part.extend(short[: max(0, missing)])
        del short[: max(0, missing)]
    return [item for part in [*parts, short] for item in part]


def _name(path):
    return path.relative_to(Path(__file__).parent).with_suffix("").as_posix()


def _group(path):
    """Return what the tests of a module share, else the module."""
    name = _name(path)
    return next((what for what, begin in _SHARING.items() if name.startswith(begin)), name)


def _seconds(path):
    return next((n for begin, n in _SECONDS.items() if _name(path).startswith(begin)), 0.3)


def _is_slow(path):
    if any(part in _SLOW_FOLDERS for part in path.parts):
        return True
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
    }
    return bool(imported & _SLOW_IMPORTS)
