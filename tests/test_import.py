"""`import rearview` does nothing: it loads no library of weight and touches no file but its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rearview

PACKAGE = Path(rearview.__file__).parent
HEAVY = {
    "blake3", "click", "cloudpickle", "duckdb", "fsspec", "msgspec", "numpy", "pandas", "polars",
    "pyarrow", "ray", "rich", "sklearn", "sqlite3", "subprocess", "threading", "torch", "xxhash",
}  # fmt: skip

WATCHED = """
import sys, json, importlib
before = set(sys.modules)
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
importlib.import_module(sys.argv[1])
print(json.dumps({"loaded": sorted(set(sys.modules) - before), "opened": opened}))
"""


def watch(name, folder):
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_importing_loads_nothing_of_weight_and_opens_only_its_own_file(tmp_path):
    seen = watch("rearview", tmp_path)
    assert {name.split(".")[0] for name in seen["loaded"]} & HEAVY == set()
    assert [name for name in seen["loaded"] if name.startswith("rearview.")] == []
    ours = {str(PACKAGE), str(Path(sys.base_prefix)), str(Path(sys.prefix))}
    strange = [path for path in seen["opened"] if not path.startswith(tuple(ours))]
    assert strange == []
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_loads_only_click_before_it_knows_what_to_do(tmp_path):
    seen = watch("rearview.cli.main", tmp_path)
    loaded = {name.split(".")[0] for name in seen["loaded"]} & HEAVY
    assert loaded <= {"click", "threading", "subprocess"}
    ours = [name for name in seen["loaded"] if name.startswith("rearview.")]
    assert set(ours) <= {
        "rearview.cli",
        "rearview.cli.main",
        "rearview.cli.terminal",
        "rearview.cli.terminal.output",
        "rearview.errors",
    }


@pytest.mark.parametrize("name", ["log", "arg", "loop", "checkpointing", "history", "History"])
def test_public_names_are_there_when_asked_for(name):
    assert callable(getattr(rearview, name))


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = rearview.nonsense


def test_all_public_names_are_listed():
    assert {"log", "arg", "loop", "checkpointing", "history"} <= set(rearview.__all__)


def test_a_recording_process_has_not_imported_multiprocessing(tmp_path):
    # it would remember the launcher as `__mp_main__`, and pickles of spawned workers would miss the program
    seen = watch("rearview.runtime.start_recording", tmp_path)
    assert "multiprocessing" not in seen["loaded"]
