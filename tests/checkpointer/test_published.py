"""Every call form, callback name and import path of the published Checkpointer and its slides."""

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from checkpointers import make, read, write  # noqa: F401
from rearview import Checkpointer
from rearview.checkpointer import published
from rearview.errors import UsageError

TOP = published.__path__[0]

SLIDE = """
from pathlib import Path
from checkpointer.checkpointer import Checkpointer

model = {"w": 0}

def load(path):
    model["w"] = int(path.read_text())
    return model

checkpointer = Checkpointer(
    local_checkpoint_file=Path("checkpoint.pt"),
    checkpoint_function=lambda path, model: path.write_text(str(model["w"])),
    restore_function=load,
    checkpoint_every=100,
)
model = checkpointer.restore(model)
for i in range(250):
    model["w"] += 1
    checkpointer.step(i, model)
print(model["w"], Path("checkpoint.pt").read_text())
"""


def ran(folder, *words, **env):
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_program_of_the_published_slides_runs_unchanged(tmp_path):
    (tmp_path / "slide.py").write_text(SLIDE)
    assert ran(tmp_path, "slide.py", PYTHONPATH=TOP) == ["250", "201"]
    assert ran(tmp_path, "slide.py", PYTHONPATH=TOP) == ["451", "402"]


def test_the_slides_program_runs_hands_free(tmp_path):
    (tmp_path / "slide.py").write_text(SLIDE)
    assert ran(tmp_path, "-m", "rearview", "run", "-q", "slide.py") == ["250", "201"]


def test_another_package_of_that_name_wins_hands_free(tmp_path):
    (tmp_path / "checkpointer.py").write_text("who = 'theirs'\n")
    (tmp_path / "t.py").write_text("import checkpointer\nprint(checkpointer.who)\n")
    assert ran(tmp_path, "-m", "rearview", "run", "-q", "t.py") == ["theirs"]


def test_step_and_checkpoint_take_the_number_of_the_step_first(make, tmp_path):  # noqa: F811
    one = make(checkpoint_every=1)
    for call in (one.step, one.checkpoint):
        call(41, "77")
        save = one._archive.folder.saves()[0]
        assert (one.restore(), save.step, save.metric) == (77, 41, None)


def test_a_number_second_is_still_the_metric(make):  # noqa: F811
    one = make(checkpoint_every=1)
    one.step(5, 0.25)
    assert one._archive.folder.saves()[0].metric == 0.25
    one.step(6, metric=0.5)
    assert one.restore() == 6


def test_a_metric_that_is_no_number_is_refused(make):  # noqa: F811
    with pytest.raises(UsageError, match="not a number"):
        make().step({"w": 1}, {"loss": 1})


PUBLISHED = {
    "checkpointer.checkpointer": ["Checkpointer"],
    "checkpointer": ["Checkpointer"],
    "checkpointer.lightning_callback": [
        "LightningCheckpointCallback",
        "LightningCheckpointerCallback",
    ],
    "checkpointer.keras_callback": ["KerasCheckpointCallback", "KerasCheckpointerCallback"],
}


@pytest.mark.parametrize("module", PUBLISHED)
def test_every_published_import_path_is_there(tmp_path, module):
    library = next((name for name in ("lightning", "keras") if name in module), None)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"LOUD: {library} is not installed")
    names = PUBLISHED[module]
    text = "".join(
        f"from {prefix}{module} import {name} as found; print(found.__name__);"
        for prefix in ("", "rearview.")
        for name in names
    )
    out = ran(tmp_path, "-c", text, PYTHONPATH=TOP, KERAS_BACKEND="torch")
    assert len(out) == 2 * len(names)
    assert set(out) <= set(names)  # one class may have two names


def test_every_import_path_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "checkpointer.md").read_text()
    for module, names in PUBLISHED.items():
        assert module in text
        assert all(name in text for name in names)


@pytest.mark.parametrize("asynchronous", [True, "transfer"])
def test_a_transfer_that_is_under_way_delays_no_local_save(tmp_path, asynchronous):
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        """A remote that keeps its first file until it is let go on."""

        def __init__(self, folder):
            from rearview.remote.folder import FolderRemote

            self.real = FolderRemote(folder)

        def put(self, local, key):
            begun.set()
            go_on.wait()
            return self.real.put(local, key)

        def __getattr__(self, name):
            return getattr(self.real, name)

        def get(self, key, local):
            return self.real.get(key, local)

        def stat(self, key):
            return self.real.stat(key)

        def list(self, prefix=""):
            return self.real.list(prefix)

        def delete(self, key):
            return self.real.delete(key)

    one = Checkpointer(
        tmp_path / "here" / "a.pt",
        write,
        read,
        checkpoint_every=1,
        keep_last=1,
        asynchronous=asynchronous,
        checkpoint_transfer_target=Slow(tmp_path / "far"),
        signals=(),
    )
    try:
        one.step(0)
        begun.wait()
        for value in range(1, 8):
            one.step(value)
            one._writer.wait()  # with True, a save that is still being written is not joined by another
            assert read(tmp_path / "here" / "a.pt") == value
        kept = {read(p / "a.pt") for p in (tmp_path / "here" / "a.pt.saves").iterdir()}
        assert kept == {0, 7}  # the newest, and the one that is on its way
    finally:
        go_on.set()
    one.wait()
    away = sorted(read(p) for p in (tmp_path / "far").rglob("a.pt"))
    assert away == [7]  # the newest was brought away; what lay between was not worth the way
    one.close()
