"""What was not logged in a notebook is logged afterwards, in all its versions; a killed one goes on."""

import json
import os
import signal
import subprocess
import sys

import pytest

import rearview
from limits import HUNG
from notebooks import environment, write
from notebooks import rearview as run
from rearview.config import Settings
from rearview.store.project import Project
from rearview.store.versions.versions import Versions

pytest.importorskip("nbclient")

SETUP = "import random\nimport rearview\nweights = [0.0, 0.0]"
RATE = "rate = 0.5"
TRAIN = (
    "%%time\ndef fit(epochs):\n    for epoch in range(epochs):\n        for step in range(3):\n"
    "            weights[step % 2] += rate * random.random()\n"
    "        rearview.log('loss', sum(weights))\n\nfit(4)"
)
PROBED = TRAIN.replace(
    "        rearview.log('loss', sum(weights))\n",
    "        rearview.log('loss', sum(weights))\n        rearview.log('top', max(weights))\n",
)
NAMES = "names = ['a', 'b']"
END = "get_ipython().user_ns['weights'] is weights"


def test_a_statement_added_in_a_cell_is_filled_in_for_every_version_of_the_notebook(tmp_path):
    study = tmp_path / "study.ipynb"
    write(study, SETUP, RATE, NAMES, TRAIN, END)
    run(tmp_path, "run", "-q", "--every", "study.ipynb")
    # a cell is inserted, one is edited, two change places
    edited = TRAIN.replace("fit(4)", "fit(3)")
    write(study, SETUP, "!true", NAMES, RATE, "%time random.random()", edited, END)
    run(tmp_path, "run", "-q", "--every", "study.ipynb")
    write(study, SETUP, RATE.replace("0.5", "0.25"), NAMES, TRAIN, END)
    run(tmp_path, "run", "-q", "--every", "study.ipynb", "--out", "study.ipynb")
    history = rearview.history(tmp_path)
    first, second, third = history.runs()
    assert len({first.version, second.version, third.version}) == 3
    versions = Versions(Project.open(tmp_path), Settings())
    assert versions.save("worktree") == third.version  # outputs and counts are not source

    new = (SETUP, RATE.replace("0.5", "0.25"), NAMES, PROBED, "rearview.log('rate', rate)", END)
    write(study, *new)
    done = run(tmp_path, "backfill", "top", "rate", "--yes")
    assert "exact" in done.stderr + done.stdout
    assert "refused" not in done.stderr + done.stdout
    table = list(rearview.history(tmp_path).table("loss", "top", "rate"))
    tops = [(row["run"], row["cell"], row["epoch"]) for row in table if row["top"] is not None]
    assert tops == [
        *((first.id, 4, epoch) for epoch in range(4)),
        *((second.id, 6, epoch) for epoch in range(3)),
        *((third.id, 4, epoch) for epoch in range(4)),
    ]
    for row in table:
        if row["top"] is not None:
            assert row["loss"] / 2 <= row["top"] <= row["loss"]
    rates = {row["run"]: row["rate"] for row in table if row["rate"] is not None}
    assert rates == {first.id: 0.5, second.id: 0.5, third.id: 0.25}


def test_a_condition_chooses_iterations_of_a_loop_inside_a_cell(tmp_path):
    study = tmp_path / "study.ipynb"
    write(study, SETUP, RATE, TRAIN)
    run(tmp_path, "run", "-q", "--every", "study.ipynb")
    write(study, SETUP, RATE, PROBED)
    run(tmp_path, "backfill", "top", "--where", "epoch >= 2", "--yes")
    rows = rearview.history(tmp_path).table("top")
    assert [row["epoch"] for row in rows if row["top"] is not None] == [2, 3]
    state = rearview.history(tmp_path).run().at(epoch=2)
    assert len(state["weights"]) == 2


def test_an_edit_that_is_no_probe_is_refused_with_the_cell_and_line(tmp_path):
    study = tmp_path / "study.ipynb"
    write(study, SETUP, RATE, TRAIN)
    run(tmp_path, "run", "-q", "--every", "study.ipynb")
    changed = PROBED.replace("max(weights))", "weights.pop())")
    write(study, SETUP, RATE, changed)
    done = run(tmp_path, "backfill", "top", "--yes", code=1)
    assert "study.ipynb cell 3, line 7" in done.stderr + done.stdout
    assert ".ipynb.py" not in done.stderr + done.stdout


def test_a_replay_imports_from_the_folder_that_a_cell_changed_to(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rates.py").write_text("RATE = 7\n")
    enter = "import os, rearview\nos.chdir('data')\ntotal = 0"
    train = (
        "import rates\nfor epoch in range(3):\n    total += rates.RATE\n"
        "    with open(f'{epoch}.txt', 'w') as file:\n        file.write(str(total))"
    )
    study = write(tmp_path / "study.ipynb", enter, train)
    run(tmp_path, "run", "-q", "--every", "study.ipynb")
    (tmp_path / "data" / "rates.py").write_text("RATE = 70\n")
    run(tmp_path, "run", "-q", "--every", "study.ipynb")
    write(study, enter, train + "\n        rearview.log('total', total)")
    run(tmp_path, "backfill", "total", "--yes")
    rows = rearview.history(tmp_path).table("total")
    assert [row["total"] for row in rows] == [7, 14, 21, 70, 140, 210]


TABLES = "import numpy as np\ntables = []\nfor part in range(2):\n    tables.append({})"
KILLED = (
    "import random, os, time, rearview\nweights = []\ngate = os.environ['GATE']",
    TABLES,
    (
        "print('set up')\nfor epoch in range(8):\n    for step in range(20):\n"
        "        weights.append(random.random())\n    time.sleep(0.005)\n    rearview.log('loss', sum(weights))\n"
        "    print('epoch', epoch, flush=True)\n"
        "    while epoch == 5 and not os.path.exists(gate):\n        time.sleep(0.01)"
    ),
    (
        "import hashlib\n"
        "rearview.log('end', hashlib.sha256(repr((weights, random.random())).encode()).hexdigest())"
    ),
)


@pytest.mark.parametrize(
    ("table", "again"),
    [
        # restored, the array owns its memory, which that of the recorded run does not
        ("np.arange(6).reshape(2, 3).T", False),
        # restored, the attributes of the array may come in another order: then there are no anchors as recorded
        ("np.ma.array([1, 2], mask=[0, 1])", None),
    ],
)
def test_a_notebook_killed_inside_a_loop_continues_there_with_the_same_result(
    tmp_path, table, again
):
    project = tmp_path / "project"
    project.mkdir()
    gate = tmp_path / "gate"
    cells = [source.replace("{}", table) for source in KILLED]
    write(project / "study.ipynb", *cells)
    process = subprocess.Popen(
        [sys.executable, "-m", "rearview", "run", "-q", "--every", "study.ipynb"],
        cwd=project,
        env=environment(GATE=str(gate)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "epoch 5\n":
            break
    history = rearview.history(project)
    while not any(one.point.indices[1] >= 4 for one in history._checkpoints.of(history.run().id)):
        pass  # the cell waits, and the writer brings what it has to disk
    facts = json.loads((history._runs.folder(history.run().id) / "run.json").read_text())
    os.kill(facts["pid"], signal.SIGKILL)
    assert process.wait(HUNG) == 128 + signal.SIGKILL
    process.stdout.close()
    gate.touch()
    # the work tree has another source by now: the run goes on with its own
    write(project / "study.ipynb", "print('another')")
    done = run(project, "resume", "--out", "resumed.ipynb")
    assert "another" not in done.stdout
    assert "epoch 3" not in done.stdout
    assert "epoch 7" in done.stdout
    if again is not None:
        assert ("running the earlier loops again" in done.stderr) == again
    write(project / "study.ipynb", *cells)
    run(project, "run", "-q", "study.ipynb", GATE=str(gate))
    history = rearview.history(project)
    table = list(history.table("loss", "end"))
    killed, whole = history.runs()
    ends = {row["run"]: row["end"] for row in table if row["end"] is not None}
    assert ends[killed.id] == ends[whole.id]
    losses = [[row["loss"] for row in table if row["run"] == one.id] for one in (killed, whole)]
    assert losses[0] == losses[1]
