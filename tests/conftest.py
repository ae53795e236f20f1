"""What holds for all tests."""

import ast
import gc
import os
import tempfile

import pytest
from hypothesis import settings

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


def pytest_collection_modifyitems(items):
    """Mark slow tests and those that need a server, so that `make quick` can leave them out."""
    slow = {}
    for item in items:
        path = item.path
        if path not in slow:
            slow[path] = _is_slow(path)
        if slow[path]:
            item.add_marker(pytest.mark.slow)
        if "server" in item.fixturenames or "ray" in path.name:
            item.add_marker(pytest.mark.server)


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
