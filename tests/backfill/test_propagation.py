"""A statement that the newest run had already is carried into the versions from before it."""

import pytest

from plainly import recorded, write
from rearview._history import history

FIRST = """
import rearview

rate = 2
total = 0
for epoch in range(3):
    total += rate
    print(epoch, total)
"""
SECOND = FIRST.replace("rate = 2", "rate = 3").replace(
    "    print", '    twice = 2 * total\n    rearview.log("t", twice)\n    print'
)


@pytest.fixture
def project(tmp_path):
    for text in (FIRST, SECOND):
        write(tmp_path, train=text)
        assert recorded(tmp_path, "train.py").code == 0
    return tmp_path


def filled(folder, *names):
    report = history(folder).backfill(list(names))
    assert report.proved, report.proof
    assert not report.refusals
    assert history(folder).plan(list(names)).nothing
    return [tuple(row[name] for name in names) for row in history(folder).table(*names)]


def test_a_statement_is_carried_with_its_own_assignments_and_nothing_else(project):
    (told,) = history(project).propagate(["t"])
    added = [line for line in told.diff.splitlines() if line.startswith("+ ")]
    assert added == ["+    twice = 2 * total", '+    rearview.log("t", twice)']
    assert filled(project, "t") == [(4,), (8,), (12,), (6,), (12,), (18,)]


def test_names_of_a_past_version_and_of_the_work_tree_are_filled_together(project):
    write(project, train=SECOND.replace("    print", '    rearview.log("e", epoch)\n    print'))
    assert filled(project, "t", "e") == [(4, 0), (8, 1), (12, 2), (6, 0), (12, 1), (18, 2)]


def test_though_the_script_was_renamed_meanwhile(tmp_path):
    write(tmp_path, train=FIRST)
    assert recorded(tmp_path, "train.py").code == 0
    (tmp_path / "train.py").unlink()
    write(tmp_path, main=SECOND)
    assert recorded(tmp_path, "main.py").code == 0
    assert filled(tmp_path, "t")[:3] == [(4,), (8,), (12,)]


def test_to_where_a_hand_says(project):
    past = history(project)
    first = past.runs()[0]
    past.correct(first.id, "train.py", 7, ["t"])
    (told,) = history(project).propagate(["t"])
    assert told.reasons == ("put there by hand",)
    assert filled(project, "t")[:3] == [(0,), (4,), (8,)]


def test_a_name_that_nothing_logs_is_said_to_be_unknown(project):
    write(project, train=SECOND.replace("    print", '    rearview.log("e", twice)\n    print'))
    refusals = history(project).plan(["no_such_name"]).refusals
    assert len(refusals) == 2
    assert all("nothing in the newest source logs this" in one.reason for one in refusals)


def test_code_that_was_added_to_the_program_meanwhile_is_not_carried(tmp_path):
    write(tmp_path, train=FIRST)
    assert recorded(tmp_path, "train.py").code == 0
    write(tmp_path, train=SECOND.replace("    twice", "    total += 1\n    twice"))
    assert recorded(tmp_path, "train.py").code == 0
    assert filled(tmp_path, "t") == [(4,), (8,), (12,), (8,), (16,), (24,)]


def test_a_value_that_only_newer_code_computes_is_refused(tmp_path):
    write(tmp_path, train=FIRST)
    assert recorded(tmp_path, "train.py").code == 0
    scaled = FIRST.replace("    print", "    total = scale(total)\n    print").replace(
        "rate = 2", "rate = 2\nseen = []\ndef scale(x):\n    seen.append(x)\n    return x"
    )
    write(
        tmp_path, train=scaled.replace("    print", '    rearview.log("n", len(seen))\n    print')
    )
    assert recorded(tmp_path, "train.py").code == 0
    plan = history(tmp_path).plan(["n"])
    assert plan.nothing, "what was not there then is not made up"
    assert len(plan.refusals) == 1, plan.refusals


def test_asking_for_one_name_carries_only_the_statement_that_logs_it(project):
    both = '    rearview.log("e", epoch)\n    rearview.log("d", total - 1)\n    print'
    write(project, train=SECOND.replace("    print", both))
    for told in history(project).propagate(["d"]):
        added = [line for line in told.diff.splitlines() if line.startswith("+ ")]
        assert added[-1] == '+    rearview.log("d", total - 1)'
        assert not any('"e"' in line or '"t"' in line for line in added)
    insertions = history(project).plan(["d"]).insertions
    assert insertions
    assert all('"d"' in one.diff and '"e"' not in one.diff for one in insertions)
