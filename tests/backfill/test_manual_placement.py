"""A place given by hand belongs to a statement in a version: not to a text, not to another name."""

import json

import pytest

from plainly import recorded, write
from rearview._history import history
from rearview.errors import StoreError, UsageError

pytestmark = pytest.mark.usefixtures("warm_start")

OLDEST = """
import rearview

total = 0
for epoch in range(3):
    value = epoch + 1
    value = value * 2
    total += value
"""
OLDER = OLDEST.replace("total += value", "total += value\n    print(total)")
RENAMED = OLDER.replace("value", "amount")
NEWEST = OLDER.replace("    value = value * 2\n", "").replace("range(3)", "range(2)")
LOG = '    rearview.log("v", value)\n    total += value'


def probed(text, log=LOG):
    return text.replace("    total += value", log)


def project_of(folder, *texts):
    for text in texts:
        write(folder, train=text)
        assert recorded(folder, "train.py").code == 0
    return [run.id for run in history(folder).runs()]


def put(folder, name):
    """Return by version, oldest first, the lines that the statement adds; None where refused."""
    found = [
        None
        if one.reason
        else [line[1:] for line in one.diff.splitlines() if line.startswith("+ ")]
        for one in history(folder).propagate([name])
    ]
    return found[::-1]


@pytest.fixture
def project(tmp_path):
    runs = project_of(tmp_path, OLDEST, OLDER, NEWEST)
    write(tmp_path, train=probed(NEWEST))
    return tmp_path, runs


def test_the_place_stays_when_the_statement_changes(project):
    folder, runs = project
    for run in runs[:2]:
        history(folder).correct(run, "train.py", 7, ["v"])
    write(folder, train=probed(NEWEST, '    rearview.log("v", value * 100)\n    total += value'))
    assert put(folder, "v") == [['    rearview.log("v", value * 100)']] * 3
    report = history(folder).backfill(["v"])
    assert report.proved, report.proof
    assert [row["v"] for row in history(folder).table("v")] == [100, 200, 300] * 2 + [100, 200]


def test_a_correction_does_not_apply_to_another_name(project):
    folder, runs = project
    history(folder).correct(runs[0], "train.py", 7, ["v"])
    write(folder, train=probed(NEWEST, '    rearview.log("w", total)\n    total += value'))
    told = history(folder).propagate(["w"])[-1]
    assert "put there by hand" not in told.reasons
    assert put(folder, "w")[0] == ['    rearview.log("w", total)']


def test_names_that_are_filled_separately_are_carried_separately(project):
    folder, runs = project
    both = '    rearview.log("v", value)\n    rearview.log("w", total)\n    total += value'
    write(folder, train=probed(NEWEST, both))
    history(folder).correct(runs[0], "train.py", 7, ["v"])
    assert put(folder, "v")[0] == ['    rearview.log("v", value)']
    assert put(folder, "w")[0] == ['    rearview.log("w", total)']
    assert history(folder).propagate(["v"])[-1].reasons == ("put there by hand",)


def test_variables_are_renamed_at_the_place(tmp_path):
    runs = project_of(tmp_path, RENAMED, NEWEST)
    write(tmp_path, train=probed(NEWEST))
    history(tmp_path).correct(runs[0], "train.py", 7, ["v"])
    assert put(tmp_path, "v")[0] == ['    rearview.log("v", amount)']


def test_a_name_that_is_not_found_may_be_given(tmp_path):
    strange = OLDER.replace("value = epoch + 1", "q = f(epoch)").replace(
        "value = value * 2", "r = [q][0]"
    )
    strange = strange.replace("total += value", "total += r").replace(
        "total = 0", "total = 0\ndef f(x): return x"
    )
    runs = project_of(tmp_path, strange, NEWEST)
    write(tmp_path, train=probed(NEWEST))
    past = history(tmp_path)
    past.correct(runs[0], "train.py", 9, ["v"], renames={"value": "q"})
    assert put(tmp_path, "v")[0] == ['    rearview.log("v", q)']
    told = past.propagate(["v"])[-1]
    assert told.reasons == ("put there by hand", "`value` is called `q` there")


def test_neighbours_of_a_corrected_version_keep_their_places(tmp_path):
    other = NEWEST.replace("    value = epoch + 1\n", "    value = epoch + 1  # again\n")
    inside = "def f(value):\n    return value\n\nfor x in range(2):\n    f(x)\n"
    runs = project_of(tmp_path, other, inside, NEWEST)
    write(tmp_path, train=probed(NEWEST))
    before = put(tmp_path, "v")
    assert before[0] is not None
    history(tmp_path).correct(runs[1], "train.py", 2, ["v"])
    after = put(tmp_path, "v")
    assert after[0] == before[0]
    assert after[1] == ["    import rearview", '    rearview.log("v", value)']


def test_a_correction_can_go_after_the_last_statement_of_a_block(project):
    folder, runs = project
    history(folder).correct(runs[0], "train.py", 8, ["v"], after=True)
    diff = history(folder).propagate(["v"])[-1].diff
    assert diff.endswith('     total += value\n+    rearview.log("v", value)\n')


def test_helper_statements_go_to_the_corrected_place_too(project):
    folder, runs = project
    two = '    twice = 2 * value\n    rearview.log("v", twice)\n    total += value'
    write(folder, train=probed(NEWEST, two))
    history(folder).correct(runs[0], "train.py", 7, ["v"])
    assert put(folder, "v")[0] == ["    twice = 2 * value", '    rearview.log("v", twice)']


def test_one_of_several_statements_for_a_name_must_be_named(project):
    folder, runs = project
    text = probed(NEWEST) + '\nrearview.log("v", total)\n'
    write(folder, train=text)
    past = history(folder)
    with pytest.raises(UsageError, match=r"2 statements log v: train\.py:7, train\.py:11"):
        past.correct(runs[0], "train.py", 7, ["v"])
    past.correct(runs[0], "train.py", 7, ["v"], statement=("train.py", 7))
    (kept,) = past.corrections()
    assert (kept.statement.logs, kept.line) == (("v",), 7)


def test_corrections_are_listed_and_undone(project):
    folder, runs = project
    past = history(folder)
    before = put(folder, "v")
    past.correct(runs[0], "train.py", 8, ["v"])
    past.correct(runs[0], "train.py", 7, ["v"])
    past.correct(runs[1], "train.py", 7, ["v"])
    assert [(one.run, one.line) for one in past.corrections(["v"])] == [(runs[0], 7), (runs[1], 7)]
    assert past.corrections(["w"]) == []
    assert past.undo(runs[0], ["w"]) == []
    assert len(past.undo(runs[0], ["v"])) == 1
    assert [one.run for one in history(folder).corrections()] == [runs[1]]
    history(folder).undo(runs[1])
    assert put(folder, "v") == before


def test_a_place_that_cuts_a_statement_is_refused(tmp_path):
    runs = project_of(tmp_path, NEWEST.replace("epoch + 1", "(\n        epoch + 1)"), NEWEST)
    write(tmp_path, train=probed(NEWEST))
    history(tmp_path).correct(runs[0], "train.py", 7, ["v"])
    told = history(tmp_path).propagate(["v"])[-1]
    assert told.reason == "line 7 is inside the statement that starts on line 6"


def old_format(folder, version, *texts):
    kept = {version: [{"path": "train.py", "line": 7, "text": text} for text in texts]}
    (folder / ".rearview" / "corrections.json").write_text(json.dumps(kept))


def test_texts_kept_by_an_older_rearview_are_read_as_places(project):
    folder, _ = project
    old_format(folder, history(folder).runs()[0].version, '    rearview.log("v", 7)\n')
    assert put(folder, "v")[0] == ['    rearview.log("v", value)']
    assert history(folder).propagate(["v"])[-1].reasons == ("put there by hand",)
    assert not history(folder).correction_note


@pytest.mark.parametrize("text", ["    x = value\n", "    ((\n"])
def test_texts_that_do_not_tell_their_statement_are_ignored_with_a_word(project, text):
    folder, _ = project
    before = put(folder, "v")
    old_format(folder, history(folder).runs()[0].version, text)
    assert put(folder, "v") == before
    assert "1 correction in" in history(folder).correction_note
    assert "is ignored" in history(folder).plan(["v"]).notes[0]


def test_a_file_of_corrections_that_cannot_be_read_is_an_error(project):
    folder, _ = project
    (folder / ".rearview" / "corrections.json").mkdir()
    with pytest.raises(StoreError, match="cannot be read"):
        history(folder).propagate(["v"])
