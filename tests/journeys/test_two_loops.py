"""A loop that prepares the data, and a loop that trains on it: the first is restored, not run again."""

from plainly import recorded, write
from rearview._history import history

SCRIPT = """
import time
import numpy as np
parts = []
for part in range(4):
    block = np.random.default_rng(part).normal(size=(500, 4))
    parts.append(block * 2)
    time.sleep(0.02)
w = np.zeros(4)
for epoch in range(6):
    for x in parts:
        w = w + x.mean(axis=0)
    time.sleep(0.01)
print(w.sum())
"""


def test_arrays_made_by_the_first_loop_are_restored_for_the_second(tmp_path):
    write(tmp_path, train=SCRIPT)
    assert recorded(tmp_path, "train.py").code == 0
    line = "    time.sleep(0.01)\n"
    (tmp_path / "train.py").write_text(
        SCRIPT.replace(line, line + '    rearview.log("total", float(w.sum()))\n')
    )
    past = history(tmp_path)
    report = past.backfill(["total"], workers=1)
    assert [outcome.redone for outcome in report.outcomes] == [""] * len(report.outcomes)
    assert sum(outcome.report.skipped for outcome in report.outcomes) > 0
    assert report.verdict == "exact"
    assert len(past.table("total").rows()) == 6
