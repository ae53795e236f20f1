"""A replay that shows a carried statement wrong at its place: the next place, or a refusal."""

import pytest

from plainly import recorded, write
from rearview._history import history

pytestmark = pytest.mark.usefixtures("warm_start")

OLD = """
import rearview


class Box:
    pass


def prepare(epoch):
    return epoch


def work(box, epoch):
    setattr(box, "score", epoch * 2.0)


box = Box()
for epoch in range(3):
    prepare(epoch)
    print(epoch)
    rearview.log("epoch", epoch)
    work(box, epoch)
"""
NEW = OLD.replace(
    """    prepare(epoch)
    print(epoch)
    rearview.log("epoch", epoch)
    work(box, epoch)
""",
    """    prepare(epoch)
    work(box, epoch)
    print(epoch)
    rearview.log("epoch", epoch)
""",
)
ASKED = NEW.replace(
    "    work(box, epoch)\n    print",
    '    work(box, epoch)\n    rearview.log("score", box.score)\n    print',
)


@pytest.fixture
def project(tmp_path):
    for text in (OLD, NEW):
        write(tmp_path, train=text)
        assert recorded(tmp_path, "train.py").code == 0
    write(tmp_path, train=ASKED)
    return tmp_path


def test_a_statement_that_lacks_an_attribute_there_goes_to_the_next_place(project):
    past = history(project)
    (old, _) = past.runs()
    report = past.backfill(["score"], sure=0.4)
    assert report.proved, report.proof
    assert not report.refusals
    (moved,) = report.replaced
    assert old.id in moved
    assert "AttributeError: 'Box' object has no attribute 'score'" in moved
    scores = [row["score"] for row in past.table("score") if row["run"] == old.id]
    assert scores == [0.0, 2.0, 4.0]


def test_a_statement_is_refused_if_no_other_place_is_left(tmp_path):
    never = OLD.replace('setattr(box, "score", epoch * 2.0)', "box.total = epoch")
    write(tmp_path, train=never + "print('score')\n")
    assert recorded(tmp_path, "train.py").code == 0
    write(tmp_path, train=NEW)
    assert recorded(tmp_path, "train.py").code == 0
    write(tmp_path, train=ASKED)
    past = history(tmp_path)
    report = past.backfill(["score"], runs=[past.runs()[0].id], sure=0.4)
    assert not report.written
    assert not report.outcomes
    (refusal,) = report.refusals
    assert "AttributeError: 'Box' object has no attribute 'score'" in refusal.reason
    assert "no other place is certain" in refusal.reason


def test_a_value_of_another_kind_than_in_other_versions_disproves_a_place(tmp_path):
    old = """
import rearview


def rate(epoch):
    return "warm"


for epoch in range(3):
    label = rate(epoch)
    print(epoch, "begins")
    rearview.log("e", epoch)
"""
    new = old.replace('"warm"', "epoch * 0.5")
    write(tmp_path, train=old)
    assert recorded(tmp_path, "train.py").code == 0
    write(tmp_path, train=new.replace("    print", '    rearview.log("label", label)\n    print'))
    assert recorded(tmp_path, "train.py").code == 0
    past = history(tmp_path)
    report = past.backfill(["label"])
    assert not report.written
    (refusal,) = report.refusals
    assert "label is text here and a number in other versions" in refusal.reason
    assert "before line 11 of train.py" in refusal.reason
