"""What a program does first inside its loop does not make replays from a checkpoint differ."""

import pytest

from plainly import recorded, write
from rearview._history import history

SCRIPT = """\
import random
import time
{head}
weight = 1.0
for epoch in range(6):
{first}
    for step in range(3):
        weight = weight * 1.5 % 7 + random.random()
        time.sleep(0.01)
"""
PROBE = "        rearview.log('w', weight)\n"
USES = {
    "names of temporary files": ("import tempfile", "    tempfile.TemporaryFile().close()"),
    "semaphores named by joblib": (
        "import joblib, multiprocessing",
        "    if epoch == 0: lock = multiprocessing.RLock()\n    lock = None",
    ),
    "multiprocessing": ("", "    if epoch == 0: __import__('multiprocessing')"),
    "a module of the project": (
        "",
        "    if epoch == 0: import helper\n    else: import helper\n    weight += helper.count()",
    ),
}
HELPER = """\
import random
counted = [random.random()]
def count():
    counted.append(1)
    return len(counted) * 1e-3
"""


@pytest.mark.parametrize("what", USES)
def test_a_replay_from_a_checkpoint_is_exact_at_the_first_try(tmp_path, what):
    head, first = USES[what]
    text = SCRIPT.format(head=head, first=first)
    write(tmp_path, train=text, helper=HELPER)
    assert recorded(tmp_path, "train.py").code == 0
    probed = "import rearview\n" + text.replace("(0.01)\n", "(0.01)\n" + PROBE)
    (tmp_path / "train.py").write_text(probed)
    report = history(tmp_path).backfill(["w"], at="epoch=3:5", workers=1)
    assert report.proved, report.proof
    assert report.redone == [], report.redone[0].redone
    assert report.outcomes[0].report.restored > 0, "it began from the start"


def test_the_globals_of_main_are_recorded_once(tmp_path):
    text = SCRIPT.format(head="import multiprocessing", first="")
    write(tmp_path, train=text)
    assert recorded(tmp_path, "train.py").code == 0
    packs = (tmp_path / ".rearview").rglob("*.pack")
    assert not any(b"__mp_main__" in pack.read_bytes() for pack in packs)
