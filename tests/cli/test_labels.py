"""Names, tags and notes are given from the command line, shown, searched for and refused."""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys

import click
import pytest

from recorded import Recorded, at

EVIL = "\x1b]0;owned\x07\x1b[31mred\u202e"


@pytest.fixture
def project(tmp_path, monkeypatch):
    found = Recorded(tmp_path)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture
def two(project):
    """Two runs: the first with rate 0.1 that ends at acc 0.5, the second with 0.2 and 0.9."""
    return [
        project.run((at(epoch=0), {"acc": 0.95}), (at(epoch=1), {"acc": acc}), args={"lr": lr})
        for lr, acc in ((0.1, 0.5), (0.2, 0.9))
    ]


def listed(command, *words):
    code, out, err = command("runs", "--json", *words)
    assert code == 0, err
    return [run["id"] for run in json.loads(out)]


def test_a_named_run_is_found_by_its_name_wherever_a_run_is_asked_for(command, two):
    assert command("name", two[0], "baseline")[0] == 0
    assert two[0] in command("show", "baseline")[1]
    code, out, _ = command("table", "acc", "--runs", "baseline", "-f", "json")
    assert code == 0
    assert {row["run"] for row in json.loads(out)} == {two[0]}
    assert "baseline" in command("runs")[1]
    assert "baseline" in command("ls")[1]


def test_a_later_name_replaces_the_earlier_and_can_be_taken_away(command, two):
    command("name", two[0], "first")
    command("name", "first", "second")
    assert command("show", "first")[0] == 2
    command("name", "second", "--remove")
    assert command("show", "second")[0] == 2
    assert json.loads(command("runs", "--json")[1])[0]["name"] == ""


def test_a_name_that_another_run_has_is_refused(command, two):
    command("name", two[0], "baseline")
    code, _, err = command("name", two[1], "baseline")
    assert code == 2
    assert two[0] in err
    assert command("name", two[0], "baseline")[0] == 0  # its own name is no conflict


def test_two_runs_of_the_same_name_are_distinguished_by_id(command, project, two):
    for run in two:  # as two machines that share a store may do at once
        project.runs.append_event(run, "name", {"name": "same"})
    code, _, err = command("show", "same")
    assert code == 2
    assert all(run in err for run in two)
    assert command("show", two[1])[0] == 0
    assert command("name", two[1], "other")[0] == 0
    assert two[0] in command("show", "same")[1]


@pytest.mark.parametrize(
    "name", ["", "  ", "latest", "worktree", "--", "20260101-000000-abcd", "x" * 101, EVIL, "a\nb"]
)
def test_a_name_that_cannot_be_used_is_refused_and_nothing_is_written(command, two, name):
    code, _, err = command("name", two[0], "--", name)
    assert code == 2
    assert "\x1b]" not in err
    assert json.loads(command("runs", "--json")[1])[0]["name"] == ""


@pytest.mark.parametrize("tag", ["", "\t", "a,b", EVIL, "y" * 101])
def test_a_tag_that_cannot_be_used_is_refused(command, two, tag):
    code, _, err = command("tag", two[0], tag)
    assert code == 2
    assert "bad-label" in err
    assert json.loads(command("runs", "--json")[1])[0]["tags"] == []


@pytest.mark.parametrize("words", [("name",), ("tag",), ("note",)])
def test_a_label_for_an_unknown_run_is_refused(command, two, words):
    code, _, err = command(*words, "nothing-like-it", "x")
    assert code == 2
    assert "no-run" in err


def test_tags_add_up_and_are_taken_away(command, two):
    command("tag", two[0], "good", "paper")
    command("tag", two[0], "good", "late")
    assert json.loads(command("runs", "--json")[1])[0]["tags"] == ["good", "paper", "late"]
    command("tag", two[0], "--remove", "paper")
    assert json.loads(command("runs", "--json")[1])[0]["tags"] == ["good", "late"]
    code, _, err = command("tag", two[0], "--remove", "paper")
    assert code == 2
    assert "good, late" in err


def test_notes_add_up_are_shown_and_taken_away(command, two):
    command("note", two[0], "diverged", "late")
    command("note", two[0], "the seed was 3")
    assert command("note", two[0])[1] == "diverged late\nthe seed was 3\n"
    assert "the seed was 3" in command("show", two[0])[1]
    command("note", two[0], "--remove")
    assert command("note", two[0])[1] == ""
    assert command("note", two[0], " ")[0] == 2


def test_control_characters_of_labels_reach_no_terminal(command, project, two):
    project.runs.append_event(two[0], "name", {"name": EVIL})
    project.runs.append_event(two[0], "tag", {"tags": [EVIL]})
    command("note", two[0], EVIL)
    for words in (("runs",), ("show", two[0]), ("note", two[0]), ("runs", "--json")):
        code, out, err = command(*words)
        assert code == 0
        assert not re.search("[\x1b\x07\u202e]", out + err)


@pytest.mark.parametrize(
    ("where", "which"),
    [
        ("tag = 'good'", [0]),
        ("'good' in tags", [0]),
        ("tag is null", [1]),
        ("name = 'second'", [1]),
        ("name like 'sec%' and tag is null", [1]),
        ("lr < 0.15", [0]),
        ("acc > 0.8", [1]),  # the last value, not the best: both began with 0.95
        ("acc > 0.4 and status = 'finished'", [0, 1]),
        ("note like '%seed%'", [0]),
        ("seconds < 0", []),
    ],
)
def test_runs_are_found_by_tag_name_argument_and_last_value(command, two, where, which):
    command("tag", two[0], "good", "paper")
    command("name", two[1], "second")
    command("note", two[0], "another seed")
    assert listed(command, "--where", where) == [two[k] for k in which]


def test_a_logged_name_that_is_also_a_fact_of_runs_has_a_suffix(command, project):
    run = project.run((at(epoch=0), {"status": 3}), args={"host": "far"})
    assert listed(command, "--where", "status_logged = 3 and status = 'finished'") == [run]
    assert listed(command, "--where", "host_arg = 'far' and host <> 'far'") == [run]


@pytest.mark.parametrize("where", ["nonsense = 1", "acc >", "1=1) or (1=1", "1; drop table runs"])
def test_a_condition_that_cannot_be_used_is_explained(command, two, where):
    code, _, err = command("runs", "--where", where)
    assert code == 2
    assert "(docs/errors.md#sql)" in err


def test_sql_and_tables_know_labels(command, two):
    command("name", two[0], "base")
    command("tag", two[0], "good")
    code, out, _ = command("sql", "select run from runs where 'good' in tags", "-f", "csv")
    assert code == 0
    assert two[0] in out
    assert two[1] not in out
    out = command("table", "acc", "name", "--where", "name = 'base'", "-f", "json")[1]
    assert {(row["run"], row["name"]) for row in json.loads(out)} == {(two[0], "base")}


def test_runs_fit_80_columns_and_wide_cuts_nothing(command, project, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    argv = ["--data", "/a/long/path/to/some/data", "--learning-rate", "0.0001", "--epochs", "100"]
    run = project.run((at(epoch=0), {"acc": 1}), argv=argv)
    command("name", run, "a-rather-long-name-of-a-run")
    command("tag", run, "several", "long-tags", "that-take-room")
    out = command("runs")[1]
    assert max(map(len, out.splitlines())) <= 80
    assert run in out
    assert " ".join(argv) in command("runs", "--wide")[1]


def test_runs_fit_a_terminal_of_80_columns(command, project, tmp_path):
    argv = ["--data", "/a/long/path/to/some/data", "--learning-rate", "0.0001", "--epochs", "100"]
    run = project.run((at(epoch=0), {"acc": 1}), argv=argv)
    command("name", run, "a-rather-long-name-of-a-run")
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    words = [sys.executable, "-m", "rearview", "runs"]
    ran = subprocess.Popen(words, stdout=theirs, stderr=theirs, env=env, cwd=tmp_path)
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:
            break
        if not data:
            break
        seen += data
    os.close(ours)
    assert ran.wait() == 0
    lines = [line for line in click.unstyle(seen.decode()).splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert sum(run in line for line in lines) == 1
    assert len(lines) == 3  # heading, rule, and the run on one line


def test_rm_needs_yes_without_a_terminal(command, two, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, _, err = command("rm", two[0])
    assert code == 2
    assert "--yes" in err
    assert listed(command) == two
    code, out, _ = command("rm", two[0], "--dry-run")
    assert code == 0
    assert "would free" in out
    assert listed(command) == two
    assert command("rm", two[0], "--yes")[0] == 0
    assert listed(command) == two[1:]


@pytest.mark.parametrize(("answer", "code"), [("n", 1), ("y", 0)])
def test_rm_asks_on_a_terminal(command, two, tmp_path, answer, code):
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "rearview", "rm", two[0]]
    ran = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path)
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    with os.fdopen(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while terminal.read(4096):
            pass
    assert ran.wait() == code
    assert listed(command) == (two if answer == "n" else two[1:])
