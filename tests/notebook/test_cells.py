"""Scripts cut into cells: points begin with the cell, and keep it when statements are added."""

import pytest

import rearview
from notebooks import rearview as run
from rearview.source.cells import cell_starts

SCRIPT = """\
'''A study.'''
from __future__ import annotations
import random

import rearview

weight = 0.0
rearview.log("start", weight)


def step(value):
    return value + random.random()


for epoch in range(3):
    weight = step(weight)
    rearview.log("loss", weight)

rearview.log("end", weight)
"""


def test_a_plain_script_is_cut_into_cells_and_hindsight_keeps_their_numbers(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    run(tmp_path, "run", "-q", "--every", "--cells", "train.py")
    probed = SCRIPT.replace("for epoch", "rearview.log('known', len(str(weight)))\n\nfor epoch")
    probed = probed.replace(
        '    rearview.log("loss"', '    rearview.log("half", weight / 2)\n    rearview.log("loss"'
    )
    (tmp_path / "train.py").write_text(probed)
    done = run(tmp_path, "backfill", "half", "known", "--yes")
    assert "exact" in done.stdout + done.stderr
    rows = list(rearview.history(tmp_path).table("start", "known", "loss", "half", "end"))
    places = [
        (
            row["cell"],
            row["epoch"],
            *(name for name in ("start", "known", "half", "end") if row[name] is not None),
        )
        for row in rows
    ]
    assert places == [
        (2, None, "start"),
        (3, None, "known"),
        (4, 0, "half"),
        (4, 1, "half"),
        (4, 2, "half"),
        (5, None, "end"),
    ]


def test_markers_of_a_percent_script_decide_where_its_cells_begin():
    text = (
        "# %% load\nimport a\n\nx = 1\n# %% [markdown]\n# text\n# %% train\nfor i in x:\n    f(i)\n"
    )
    assert list(cell_starts(text, text)) == [2, 8]


@pytest.mark.parametrize("words", [("--cells", "-m", "x"), ("--out", "a.ipynb", "train.py")])
def test_options_that_do_not_go_together_are_refused(tmp_path, words):
    (tmp_path / "train.py").write_text(SCRIPT)
    assert "for" in run(tmp_path, "run", *words, code=2).stderr
