"""A replay is called exact only where what it executed was compared with what was recorded."""

import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.store.checkpoints.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("warm_start")

SCRIPT = """\
import time
weight = 1.0
for epoch in range(8):
    for step in range(3):
        weight = weight * 1.5 % 7
        time.sleep(0.01)
"""
PROBED = SCRIPT.replace("import time", "import time, rearview").replace(
    "        time.sleep(0.01)\n", "        time.sleep(0.01)\n        rearview.log('w', weight)\n"
)


def saved(folder):
    past = history(folder)
    return Checkpoints(past.project).of(past.run().id)


def lose(folder, keep):
    """Remove checkpoints, as a budget or a kill would."""
    lost = [one for one in saved(folder) if not keep(one)]
    for one in lost:
        for file in (folder / ".rearview" / "checkpoints").rglob(f"{one.seq:08d}.json"):
            file.unlink()
    return lost


def epoch(checkpoint):
    return checkpoint.point.indices[0]


def test_a_stretch_that_ends_at_a_checkpoint_is_proved(tmp_path):
    write(tmp_path, train=SCRIPT)
    assert recorded(tmp_path, "train.py").code == 0
    (tmp_path / "train.py").write_text(PROBED)
    report = history(tmp_path).backfill(["w"], at="epoch=2:4")
    assert report.proved, report.proof


def test_a_stretch_after_the_last_checkpoint_is_not(tmp_path):
    write(tmp_path, train=SCRIPT)
    assert recorded(tmp_path, "train.py").code == 0
    assert lose(tmp_path, lambda one: epoch(one) <= 4 and len(one.point.indices) == 1)
    (tmp_path / "train.py").write_text(PROBED)
    report = history(tmp_path).backfill(["w"], at="epoch=5:7")
    assert not report.proved
    assert "nothing was recorded after the last part that it computed" in report.proof
    rows = history(tmp_path).sql(
        "SELECT DISTINCT origin FROM records WHERE name = 'w' AND (origin = 'recorded' OR replay IS NOT NULL)"
    )
    assert rows.rows() == [{"origin": "unproved"}]


def test_logged_values_that_are_repeated_prove_a_replay_too(tmp_path):
    logged = PROBED.replace("'w', weight", "'seen', weight")
    write(tmp_path, train=logged)
    assert recorded(tmp_path, "train.py").code == 0
    lose(tmp_path, lambda one: epoch(one) <= 4 and len(one.point.indices) == 1)
    (tmp_path / "train.py").write_text(f"{logged}        rearview.log('w', weight)\n")
    report = history(tmp_path).backfill(["w"], at="epoch=5:7")
    assert report.proved, report.proof


def test_a_loop_is_skipped_wherever_possible_and_the_code_after_it_is_compared(tmp_path):
    script = SCRIPT.replace("range(8)", "range(60)")
    write(tmp_path, train=script)
    assert recorded(tmp_path, "train.py").code == 0
    (tmp_path / "train.py").write_text(
        script.replace("import time", "import time, rearview") + "    rearview.log('w', weight)\n"
    )
    report = history(tmp_path).backfill(["w"], workers=1)
    assert report.proved, report.proof
    (outcome,) = report.outcomes
    ends = [one for one in saved(tmp_path) if one.edge == "end" and len(one.point.indices) == 2]
    assert ends
    # a loop that takes next to nothing since it is skipped is not left alone for that; on a busy
    # machine one that took longer once may be
    assert 0.8 * len(ends) < outcome.report.skipped <= len(ends)
    # nor is an iteration that takes as little passed over
    assert outcome.report.states >= outcome.report.skipped


PARTIAL = """\
import os, time
class Seen(set):
    best = None
seen = Seen(range(1000, 2000))
list(map(seen.discard, range(1000, 2000)))
seen.update([3, 10])
seen.best = None
weight = 1.0
for epoch in range(4):
    weight = weight * 1.5 % 7
    seen.add(20)
    if "REARVIEW_REPLAY" in os.environ:
        seen.best = 0.93
    time.sleep(0.01)
"""


def test_a_value_that_was_none_is_compared_inside_an_object_that_is_partly_captured(tmp_path):
    write(tmp_path, train=PARTIAL)
    assert recorded(tmp_path, "train.py").code == 0
    assert [
        part.path for one in saved(tmp_path) for part in one.missing if part.path != "seen"
    ] == []
    assert not any(one.complete for one in saved(tmp_path))
    probed = PARTIAL.replace("import os,", "import rearview, os,")
    (tmp_path / "train.py").write_text(f"{probed}    rearview.log('w', weight)\n")
    report = history(tmp_path).backfill(["w"], workers=1)
    assert report.verdict == "not exact"
    assert "best" in report.proof
