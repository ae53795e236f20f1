"""What the work tree adds is brought into older versions, however it is written."""

import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.errors import SourceError

pytestmark = pytest.mark.usefixtures("warm_start")

OLD = """
total = 0
for epoch in range(3):
    total += epoch
    print(total)
"""
NEW = OLD.replace("total = 0", "total = 0\nlr = 1").replace("print(total)", "print(total, lr)")
EDITS = {
    "two that were added": (
        "    print(total, lr)",
        '    import rearview; rearview.log("t", total)\n    print(total, lr)',
    ),
    "one behind a recorded statement": (
        "    total += epoch",
        '    total += epoch; import rearview; rearview.log("t", total)',
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_statements_that_share_a_line_go_into_an_older_version(tmp_path, edit):
    for text in (OLD, NEW):
        write(tmp_path, train=text)
        assert recorded(tmp_path, "train.py").code == 0
    write(tmp_path, train=NEW.replace(*EDITS[edit]))
    outcomes = history(tmp_path).propagate("t")
    assert [one.reason for one in outcomes] == ["", ""]
    for outcome in outcomes:
        added = [line for line in outcome.diff.splitlines() if line.startswith("+    ")]
        assert added == ["+    import rearview", '+    rearview.log("t", total)']
    report = history(tmp_path).backfill(["t"])
    assert report.proved, report.proof
    assert [row["t"] for row in history(tmp_path).table("t")] == [0, 1, 3] * 2


def test_a_line_of_several_statements_is_put_by_hand_once(tmp_path):
    for text in (OLD, NEW):
        write(tmp_path, train=text)
        assert recorded(tmp_path, "train.py").code == 0
    write(tmp_path, train=NEW.replace(*EDITS["two that were added"]))
    past = history(tmp_path)
    first = past.runs()[0]
    past.correct(first.id, "train.py", 5)
    (diff,) = [one.diff for one in history(tmp_path).propagate("t") if first.id in one.runs]
    added = [line for line in diff.splitlines() if line.startswith("+    ")]
    assert added == ["+    import rearview", '+    rearview.log("t", total)']


def test_a_work_tree_that_does_not_parse_is_named_as_the_reason(tmp_path):
    write(tmp_path, train=OLD)
    assert recorded(tmp_path, "train.py").code == 0
    broken = OLD.replace("    total += epoch", 'rearview.log("t", total)\n    total += epoch')
    write(tmp_path, train=broken)
    with pytest.raises(SourceError, match=r"train\.py:4 is not Python"):
        history(tmp_path).propagate("t")
    (refusal,) = history(tmp_path).backfill(["t"]).refusals
    assert "train.py mentions it, but line 4 does not parse" in refusal.reason
