"""A name that only an older version logs is filled in newer ones, from the statement of that version."""

import pytest

from plainly import recorded, write
from rearview._history import history

pytestmark = pytest.mark.usefixtures("warm_start")

LOGGED = """
import rearview

rate = 2
total = 0
for epoch in range(3):
    total += rate
    twice = 2 * total
    rearview.log("t", twice)
    print(epoch, total)
"""
SILENT = (
    LOGGED.replace('    rearview.log("t", twice)\n', "")
    .replace("rate = 2", "rate = 3")
    .replace("print(epoch, total)", "print(epoch, twice)")
)
ALL_GONE = "\n".join(
    line for line in LOGGED.replace("rate = 2", "rate = 5").splitlines() if "twice" not in line
).replace("import rearview\n", "")


def run(folder, text, script="train"):
    write(folder, **{script: text})
    assert recorded(folder, f"{script}.py").code == 0


def filled(folder, name="t"):
    report = history(folder).backfill([name], workers=1)
    assert report.proved, report.proof
    assert not report.refusals
    assert history(folder).plan([name]).nothing
    return [row[name] for row in history(folder).table(name)]


def test_a_deleted_statement_is_filled_in_the_newer_version(tmp_path):
    run(tmp_path, LOGGED)
    run(tmp_path, SILENT)
    plan = history(tmp_path).plan(["t"])
    first, second = (one.id for one in history(tmp_path).runs())
    (note,) = (text for text in plan.notes if text.startswith("t: "))
    assert f"train.py:9 of run {first}" in note
    (insertion,) = plan.insertions
    assert insertion.runs == (second,)
    assert '+    rearview.log("t", twice)' in insertion.diff
    assert filled(tmp_path) == [4, 8, 12, 6, 12, 18]


def test_variables_that_only_the_statement_read_come_with_it(tmp_path):
    run(tmp_path, LOGGED)
    run(tmp_path, ALL_GONE)
    assert filled(tmp_path) == [4, 8, 12, 10, 20, 30]


def test_through_a_version_in_between_and_back_into_older_ones(tmp_path):
    run(tmp_path, SILENT.replace("rate = 3", "rate = 1"))
    run(tmp_path, LOGGED)
    run(tmp_path, SILENT)
    run(tmp_path, SILENT.replace("total += rate", "total += rate + 1"))
    assert filled(tmp_path) == [2, 4, 6, 4, 8, 12, 6, 12, 18, 8, 16, 24]


def test_the_newest_version_that_logs_the_name_counts(tmp_path):
    run(tmp_path, LOGGED.replace('log("t", twice)', 'log("t", -1)'))
    run(tmp_path, LOGGED)
    run(tmp_path, SILENT)
    assert filled(tmp_path)[6:] == [6, 12, 18]


def test_though_the_script_was_renamed(tmp_path):
    run(tmp_path, LOGGED)
    (tmp_path / "train.py").unlink()
    run(tmp_path, SILENT, script="main")
    assert filled(tmp_path) == [4, 8, 12, 6, 12, 18]


def test_a_statement_in_another_file(tmp_path):
    steps = "import rearview\n\n\ndef step(total, rate):\n    total = total + rate\n    rearview.log('t', total)\n    return total\n"
    main = "from steps import step\n\ntotal = 0\nfor epoch in range(3):\n    total = step(total, {})\n    print(total)\n"
    write(tmp_path, steps=steps)
    run(tmp_path, main.format(2))
    write(tmp_path, steps=steps.replace("    rearview.log('t', total)\n", ""))
    run(tmp_path, main.format(3))
    assert filled(tmp_path) == [2, 4, 6, 3, 6, 9]


def test_a_statement_in_an_if_that_contains_nothing_else(tmp_path):
    guarded = LOGGED.replace(
        '    rearview.log("t", twice)\n', '    if epoch != 1:\n        rearview.log("t", twice)\n'
    )
    run(tmp_path, guarded)
    run(tmp_path, SILENT)
    assert filled(tmp_path) == [4, 12, 6, 18]


def test_a_statement_without_a_place_in_the_newer_version_is_refused_with_the_reason(tmp_path):
    run(tmp_path, LOGGED)
    run(tmp_path, "for epoch in range(3):\n    print(epoch)\n")
    (refusal,) = history(tmp_path).plan(["t"]).refusals
    assert "no certain place" in refusal.reason
    assert (
        "total" in refusal.reason or "twice" in refusal.reason or "did not exist" in refusal.reason
    )


def test_a_place_can_be_given_by_hand(tmp_path):
    run(tmp_path, LOGGED)
    run(tmp_path, SILENT)
    past = history(tmp_path)
    past.correct("latest", "train.py", 9, ["t"], after=True)
    assert "put there by hand" in next(iter(history(tmp_path).propagate(["t"]))).reasons
    assert filled(tmp_path)[3:] == [6, 12, 18]


def test_a_log_call_that_is_part_of_another_statement_is_not_taken(tmp_path):
    run(tmp_path, LOGGED.replace('rearview.log("t", twice)', 'twice = rearview.log("t", twice)'))
    run(tmp_path, SILENT)
    (refusal,) = history(tmp_path).plan(["t"]).refusals
    assert "does more than log" in refusal.reason


def test_names_of_the_work_tree_and_of_the_past_need_separate_commands(tmp_path):
    run(tmp_path, LOGGED)
    run(tmp_path, SILENT)
    write(tmp_path, train=SILENT + '\nrearview.log("e", total)\n')
    refusals = history(tmp_path).plan(["t", "e"]).refusals
    assert any("rearview backfill t" in one.reason for one in refusals)
    assert filled(tmp_path)[3:] == [6, 12, 18]


def test_a_file_that_does_not_parse_is_reported_and_nothing_is_taken_from_the_past(tmp_path):
    run(tmp_path, LOGGED)
    run(tmp_path, SILENT)
    write(tmp_path, train=LOGGED + "\nfor\n")
    (refusal,) = history(tmp_path).plan(["t"]).refusals
    assert "correct that first" in refusal.reason


@pytest.mark.parametrize("form", ["--explain", "--json"])
def test_the_command_says_where_the_statement_comes_from(tmp_path, monkeypatch, capsys, form):
    from rearview.cli import main

    run(tmp_path, LOGGED)
    run(tmp_path, SILENT)
    monkeypatch.chdir(tmp_path)
    words = ["backfill", "t", "--explain"] + (["--json"] if form == "--json" else [])
    with pytest.raises(SystemExit):
        main.main(words)
    said = capsys.readouterr()
    assert "the statement is taken from train.py:9 of run" in said.out
