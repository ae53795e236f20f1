"""`rearview.block`: any piece of a program is run and saved, or skipped and restored."""

import pytest

from plainly import plain, recorded, write
from rearview._history import history

pytestmark = pytest.mark.usefixtures("warm_start")

SCRIPT = """
import random, time
import numpy as np
import rearview
{before}
for _ in rearview.block("prepare"):
    data = np.random.default_rng(0).normal(size=(900, 4))
    shift = random.random()
    {inside}
    time.sleep(0.3)
w = np.zeros(4)
for epoch in range(4):
    for batch in range(3):
        w = w + data[batch::3].mean(axis=0) + shift + random.random()
        time.sleep(0.01)
    print(epoch, w.sum())
"""
TRAINING = "        time.sleep(0.01)\n"
PREPARING = "    time.sleep(0.3)\n"


def probed(folder, script, line, statement):
    (folder / "train.py").write_text(script.replace(line, line + statement))
    return history(folder)


def script(before="", inside=""):
    return SCRIPT.format(before=before, inside=inside)


INSIDE = {
    "nothing else": "",
    "draws": "more = [random.random() for _ in range(3)]",
    "writes a file": 'np.save("data.npy", data)',
    "makes what cannot be saved": "numbers = (n for n in range(9)); next(numbers)",
    "uses a function of its own": "shift += (lambda x: x * 2)(shift)",
}


@pytest.mark.parametrize("inside", INSIDE)
def test_a_value_after_a_block_is_filled_without_running_the_block(inside, tmp_path):
    text = script(inside=INSIDE[inside])
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").code == 0
    past = probed(tmp_path, text, TRAINING, '        rearview.log("total", float(w.sum()))\n')
    report = past.backfill(["total"], workers=1)
    assert report.verdict == "exact"
    assert len(past.table("total").rows()) == 12
    saved = inside != "makes what cannot be saved"
    assert saved == any(outcome.report.skipped for outcome in report.outcomes)


def test_a_value_inside_a_block_runs_the_block_again(tmp_path):
    write(tmp_path, train=script())
    assert recorded(tmp_path, "train.py").code == 0
    past = probed(tmp_path, script(), PREPARING, '    rearview.log("largest", float(data.max()))\n')
    assert past.backfill(["largest"]).verdict == "exact"
    (row,) = past.table("largest").rows()
    assert row["largest"] > 3


def test_the_training_loop_is_divided_and_not_a_slow_block(tmp_path):
    write(tmp_path, train=script())
    assert recorded(tmp_path, "train.py").code == 0
    past = probed(tmp_path, script(), TRAINING, '        rearview.log("total", float(w.sum()))\n')
    past.backfill(["total"], at="epoch=3")
    assert {row["epoch"] for row in past.table("total").rows() if row["total"] is not None} == {3}


def test_a_block_that_fails_fails_as_without_rearview(tmp_path):
    write(tmp_path, train=script(inside='raise ValueError("bad data")'))
    done = recorded(tmp_path, "train.py")
    assert done.code == plain(tmp_path, "train.py").code == 1
    assert "ValueError: bad data" in done.err


def test_a_program_with_a_block_runs_under_plain_python(tmp_path):
    write(tmp_path, train=script(before="random.seed(1)"))
    assert plain(tmp_path, "train.py").out == recorded(tmp_path, "train.py").out
