"""Notebooks under `rearview run`: as `jupyter execute` has it, with cells and loops recorded."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rearview
from limits import HUNG
from notebooks import cell, environment, outputs, write
from notebooks import rearview as run

pytestmark = pytest.mark.usefixtures("warm_kernel")

pytest.importorskip("nbclient")

STUDY = (
    "%matplotlib inline\nimport random, rearview\nprint('hello')",
    cell("# a remark\n\n", tags=["kept"]),
    "\n\nw = [0.0] * 4\nlines = !echo shell\nlines",
    (
        "%%time\nfor epoch in range(3):\n    for k in range(4):\n        w[k] += random.random()\n"
        "    rearview.log('loss', sum(w))"
    ),
    (
        "import asyncio\nawait asyncio.sleep(0.001)\nfor name in ['a', 'b']:\n"
        "    await asyncio.sleep(0)\n    rearview.log('seen', name)"
    ),
    (
        "from IPython.display import HTML, display\nimport ipywidgets\ndisplay(HTML('<b>x</b>'))\n"
        "ipywidgets.IntSlider(3)"
    ),
    cell("1 / 0", tags=["raises-exception"]),
    "import matplotlib.pyplot as plt\nplt.plot(w)\nrearview.log('last', __name__)",
)


def test_a_notebook_runs_as_under_jupyter_and_every_cell_is_a_point(tmp_path):
    write(tmp_path / "study.ipynb", *STUDY)
    done = run(tmp_path, "run", "--every", "study.ipynb", "--out", "executed.ipynb")
    assert "hello\n" in done.stdout
    assert "Wall time" in done.stdout
    found = outputs(tmp_path / "executed.ipynb")
    assert found[0][0]["text"] == ["hello\n"]
    assert found[1] == []  # nothing but a remark
    assert "shell" in str(found[2][0]["data"]["text/plain"])
    assert found[5][0]["data"]["text/html"] == ["<b>x</b>"]
    assert "application/vnd.jupyter.widget-view+json" in found[5][1]["data"]
    assert found[6][0]["ename"] == "ZeroDivisionError"
    assert any("image/png" in one.get("data", {}) for one in found[7])
    content = json.loads((tmp_path / "executed.ipynb").read_text())
    counts = [one["execution_count"] for one in content["cells"]]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8]
    history = rearview.history(tmp_path)
    rows = list(history.table("loss", "seen", "last"))
    places = [(row["cell"], row["epoch"]) for row in rows if row["loss"] is not None]
    assert places == [(4, 0), (4, 1), (4, 2)]
    assert [(row["cell"], row["seen"]) for row in rows if row["seen"]] == [(5, "a"), (5, "b")]
    assert [(row["cell"], row["last"]) for row in rows if row["last"]] == [(8, "__main__")]
    points = {str(one.point) for one in history._checkpoints.of(history.run().id)}
    assert {"cell=4/epoch=1", "cell=4/epoch=3"} <= points
    kept = history._runs.folder(history.run().id) / "executed.ipynb"
    assert outputs(kept) == found


def test_a_cell_that_fails_is_named_and_ends_the_notebook(tmp_path):
    write(
        tmp_path / "study.ipynb",
        "import debugpy, rearview\nrearview.log('begun', 1)",  # a kernel for debugging has it already
        "def divide(a):\n    return a / 0\n",
        "divide(3)",
        "rearview.log('never', 1)",
    )
    done = run(tmp_path, "run", "study.ipynb", "--out", "executed.ipynb", code=1)
    assert "cell 3 of study.ipynb failed: ZeroDivisionError: division by zero" in done.stderr
    assert "Cell In[2], line 2, in divide(a)" in done.stderr
    assert "src/rearview" not in done.stderr
    history = rearview.history(tmp_path)
    assert history.run().status == "failed"
    assert [row["begun"] for row in history.table("begun")] == [1]
    assert not any(row["never"] for row in history.table("never"))
    assert outputs(tmp_path / "executed.ipynb")[2][0]["output_type"] == "error"


@pytest.mark.parametrize(
    ("source", "options", "code", "said"),
    [
        ("name = input('who? ')", (), 1, "StdinNotImplementedError"),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
            (),
            128 + signal.SIGSEGV,
            "SIGSEGV",
        ),
        ("while True:\n    pass", ("--timeout", "1"), 124, "it took longer than 1 seconds"),
        ("for x in", (), 1, "SyntaxError"),
    ],
)
def test_a_cell_that_cannot_end_well_is_named_with_the_reason(
    tmp_path, source, options, code, said
):
    write(tmp_path / "bad.ipynb", "x = 1", source)
    done = run(tmp_path, "run", *options, "bad.ipynb", code=code)
    assert "cell 2 of bad.ipynb failed: " in done.stderr
    assert said in done.stderr


def test_a_file_that_is_no_python_notebook_is_refused_before_anything_runs(tmp_path):
    write(tmp_path / "julia.ipynb", "println(1)", language="julia")
    (tmp_path / "broken.ipynb").write_text("{")
    (tmp_path / "old.ipynb").write_text('{"worksheets": []}')
    write(tmp_path / "fine.ipynb", "x = 1")
    assert "is a notebook for julia" in run(tmp_path, "run", "julia.ipynb", code=2).stderr
    assert "it is not JSON" in run(tmp_path, "run", "broken.ipynb", code=2).stderr
    assert "format 4" in run(tmp_path, "run", "old.ipynb", code=2).stderr
    assert "takes no arguments" in run(tmp_path, "run", "fine.ipynb", "--lr", "1", code=2).stderr
    assert not (tmp_path / ".rearview").exists()


def test_papermill_records_with_its_parameters_through_the_engine(tmp_path):
    pytest.importorskip("papermill")
    train = "import rearview\nfor epoch in range(3):\n    rearview.log('loss', rate / (epoch + 1))"
    write(tmp_path / "study.ipynb", cell("rate = 1.0", tags=["parameters"]), train)
    call = (
        "import papermill as pm; from papermill.engines import papermill_engines as known; "
        "from rearview.notebook.papermill_engine import RearviewEngine; "
        "known.register('rearview', RearviewEngine); "
        "pm.execute_notebook('study.ipynb', 'out.ipynb', {'rate': 6.0}, engine_name='rearview', "
        "progress_bar=False)"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", call], cwd=tmp_path, env=environment(), check=True
    )
    history = rearview.history(tmp_path)
    assert history.run().status == "finished"
    rows = [(row["cell"], row["epoch"], row["loss"]) for row in history.table("loss")]
    assert rows == [(3, 0, 6.0), (3, 1, 3.0), (3, 2, 2.0)]
    out = json.loads((tmp_path / "out.ipynb").read_text())
    assert [one["execution_count"] for one in out["cells"]] == [1, 2, 3]


def test_the_engine_can_be_imported_before_papermill_which_loads_it_in_turn(tmp_path):
    pytest.importorskip("papermill")
    metadata = tmp_path / "rearview-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rearview\nVersion: 0\n")
    points = "[papermill.engine]\nrearview = rearview.notebook.papermill_engine:RearviewEngine\n"
    (metadata / "entry_points.txt").write_text(points)
    call = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from rearview.notebook.papermill_engine import RearviewEngine; "
        "from papermill.engines import papermill_engines; "
        "assert papermill_engines.get_engine('rearview') is RearviewEngine"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", call], env=environment(), check=True)


def test_an_empty_notebook_runs_and_does_nothing(tmp_path):
    write(tmp_path / "empty.ipynb")
    run(tmp_path, "run", "empty.ipynb")
    assert rearview.history(tmp_path).run().status == "finished"


def test_a_kernel_does_not_outlive_a_command_that_is_killed_while_the_kernel_starts(tmp_path):
    write(tmp_path / "study.ipynb", "import time\ntime.sleep(1000)")
    command = subprocess.Popen(
        [sys.executable, "-m", "rearview", "run", "study.ipynb"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
    )
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    while not children.read_text():
        assert command.poll() is None
    command.kill()
    command.communicate(timeout=HUNG)  # the kernel has the other end of the pipe until it ends
