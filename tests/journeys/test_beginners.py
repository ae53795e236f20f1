"""Mistakes of the first hour: each is answered so that the next command is right."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from rearview.cli import main

SCRIPT = """\
import numpy as np
rng = np.random.default_rng(0)
weights = rng.normal(size=50)
for epoch in range(4):
    for step in range(10):
        gradient = rng.normal(size=50)
        weights -= 0.1 * gradient
    loss = float(np.abs(weights).mean())
    if loss > 100:
        exploded = loss
    print(f"epoch {epoch} loss {loss:.4f}")
"""
PROBE = '    rearview.log("half", loss / 2)\n    if loss'
ENVIRONMENT = {"COLUMNS": "200", "REARVIEW_TRUST": "1"}


def started(folder, *words, **named):
    """Start a command as a process of its own: `rearview run` becomes the script."""
    return subprocess.Popen(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder, env={**os.environ, **ENVIRONMENT, **named}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def recorded(folder, *words, **named):
    process = started(folder, "run", *words, **named)
    text, _ = process.communicate()
    return process.returncode, text


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beginner") / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    for _ in range(2):
        code, text = recorded(folder, "--every", "-q", "train.py")
        assert code == 0, text
    return folder


@pytest.fixture
def project(template, tmp_path):
    shutil.copytree(template, tmp_path / "project", symlinks=True)
    return tmp_path / "project"


@pytest.fixture
def ask(project, monkeypatch, capsys):
    """Return a function that gives a command in the project, or in another folder."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def asked(*words, folder=project):
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main.main(list(words))
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    return asked


def edit(project, before, after):
    text = (project / "train.py").read_text()
    assert before in text
    (project / "train.py").write_text(text.replace(before, after))


def test_a_command_before_any_run_says_how_to_record_one(ask, tmp_path):
    (tmp_path / "empty").mkdir()
    for words in (["backfill", "loss"], ["table"], ["replay"], ["ui"]):
        code, text = ask(*words, folder=tmp_path / "empty")
        assert code == 2
        assert "`rearview run train.py`" in text


def test_a_command_in_the_folder_above_says_where_the_project_is(ask, project):
    code, text = ask("runs", folder=project.parent)
    assert code == 2
    assert "`cd project`" in text


def test_a_script_in_a_folder_below_is_offered(ask, project):
    code, text = ask("run", "train.py", folder=project.parent)
    assert code == 2
    assert "`rearview run project/train.py`" in text


def test_a_misspelt_script_is_answered_with_the_one_that_is_there(ask):
    code, text = ask("run", "trian.py")
    assert code == 2
    assert "Did you mean `rearview run train.py`?" in text


def test_a_script_without_the_word_run_is_answered_with_it(ask):
    code, text = ask("train.py")
    assert code == 2
    assert "`rearview run train.py`" in text


def test_a_misspelt_command_is_answered_with_the_nearest(ask):
    code, text = ask("backfil", "loss")
    assert code == 2
    assert "`rearview backfill`" in text


def test_an_option_of_the_script_in_front_of_its_name_is_put_behind_it(ask):
    code, text = ask("run", "--epochs", "3", "train.py")
    assert code == 2
    assert "`rearview run train.py --epochs …`" in text


def test_a_probe_may_use_rearview_without_importing_it(ask, project):
    probe = '    rearview.log("largest", float(np.abs(gradient).max()))\n    if loss'
    edit(project, "    if loss", probe)
    code, text = ask("backfill", "largest", "--yes", "--runs", "-1")
    assert code == 0, text
    assert "4 records written" in text
    assert "exact" in text


def test_a_script_that_uses_rearview_without_importing_it_is_told_to_when_it_is_run(tmp_path):
    (tmp_path / "train.py").write_text("rearview.log('x', 1)\n")
    code, text = recorded(tmp_path, "train.py", REARVIEW_CLOSING_LINES="always")
    assert code == 1
    assert "add `import rearview`" in text


def test_a_missing_package_is_answered_with_the_python_that_lacks_it(tmp_path):
    (tmp_path / "train.py").write_text("import no_such_package\n")
    code, text = recorded(tmp_path, "train.py", REARVIEW_CLOSING_LINES="always")
    assert code == 1
    assert f"no_such_package is not installed for {sys.executable}" in text


def test_a_script_that_refuses_its_arguments_is_told_where_they_stand(tmp_path):
    script = (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('data')\np.parse_args()\n"
    )
    (tmp_path / "train.py").write_text(script)
    code, text = recorded(tmp_path, "train.py", REARVIEW_CLOSING_LINES="always")
    assert code == 2
    assert "the following arguments are required: data" in text
    assert "they come after its name" in text


def test_a_script_that_does_not_parse_is_named_with_its_line(ask, project):
    edit(project, "loss = float(", "loss = float((")
    code, text = ask("backfill", "largest", "--yes")
    assert code == 1
    assert "train.py" in text
    assert "line 8" in text


def test_a_name_without_a_statement_is_answered_with_the_statement(ask):
    code, text = ask("backfill", "grad_norm")
    assert code == 1
    assert "rearview.log('grad_norm', value)" in text
    assert "save the file" in text
    assert text.count("refused:") == 1


def test_a_misspelt_name_of_a_statement_is_answered_with_the_right_command(ask, project):
    edit(project, "    if loss", PROBE)
    code, text = ask("backfill", "Hafl")
    assert code == 1
    assert "Did you mean `rearview backfill half`?" in text


def test_a_column_that_is_there_by_itself_is_shown_instead_of_filled(ask):
    code, text = ask("backfill", "loss")
    assert code == 1
    assert "`rearview table loss` shows it" in text


def test_a_file_in_place_of_a_name_is_answered_with_what_to_name(ask):
    code, text = ask("backfill", "train.py")
    assert code == 1
    assert "train.py is a file" in text


def test_names_with_commas_are_taken_apart(ask):
    code, text = ask("backfill", "half,third")
    assert code == 1
    assert "`rearview backfill half third`" in text


def test_a_changed_computation_is_refused_with_its_line_and_what_it_was(ask, project):
    edit(project, "0.1 * gradient", "0.2 * gradient")
    edit(project, "    if loss", PROBE)
    code, text = ask("backfill", "half", "--yes")
    assert code == 1
    assert "train.py:7" in text
    assert "0.1 * gradient" in text


def test_a_probe_in_a_branch_that_never_ran_is_said_to_be_never_reached(ask, project):
    edit(project, "exploded = loss", 'exploded = loss\n        rearview.log("exploded", loss)')
    code, text = ask("backfill", "exploded", "--yes", "--runs", "-1")
    assert code == 1
    assert "never reached" in text


def test_a_name_in_a_function_that_is_never_called_is_said_once_for_all_runs(ask, project):
    with (project / "train.py").open("a") as file:
        file.write('def evaluate(w):\n    rearview.log("val", w)\n')
    code, text = ask("backfill", "val", "--yes")
    assert code == 1
    assert text.count("never reached") == 1
    assert "a function that was not entered" in text


def test_an_iteration_that_the_run_does_not_have_is_answered_with_those_it_has(ask, project):
    edit(project, "    if loss", PROBE)
    code, text = ask("backfill", "half", "--at", "epoch=9", "--yes")
    assert code == 1
    assert "it has 4, 0 to 3" in text


def test_a_range_with_a_dash_is_answered_with_how_ranges_are_written(ask, project):
    edit(project, "    if loss", PROBE)
    code, text = ask("backfill", "half", "--at", "epoch=1-3", "--yes")
    assert code == 1
    assert "a range is written epoch=1:3" in text


def test_a_number_without_a_loop_is_answered_with_the_form(ask):
    code, text = ask("backfill", "half", "--at", "3")
    assert code == 2
    assert "Write epoch=3" in text


def test_a_loop_that_does_not_exist_is_answered_with_those_that_do(ask, project):
    edit(project, "    if loss", PROBE)
    code, text = ask("backfill", "half", "--at", "batch=1", "--yes")
    assert code == 1
    assert "batch" in text
    assert "epoch" in text


def test_a_backfill_without_a_name_offers_what_is_missing(ask, project):
    edit(project, "    if loss", PROBE)
    code, text = ask("backfill")
    assert code == 2
    assert "rearview backfill half" in text


def test_a_backfill_without_a_name_says_how_to_add_a_statement_where_nothing_is_missing(ask):
    code, text = ask("backfill")
    assert code == 2
    assert "rearview.log(" in text


def test_a_script_that_is_gone_is_named(ask, project):
    (project / "train.py").unlink()
    code, text = ask("backfill", "half", "--yes")
    assert code == 1
    assert "train.py" in text


def test_runs_of_another_script_of_the_project_are_left_out_in_one_line(ask, project):
    (project / "other.py").write_text("for turn in range(2):\n    x = turn * 2\n")
    assert recorded(project, "-q", "other.py")[0] == 0
    edit(project, "    if loss", PROBE)
    code, text = ask("backfill", "half", "--yes", "--workers", "1")
    assert code == 0, text
    assert "1 run of other.py left out" in text
    assert "refused" not in text


def test_a_misspelt_column_is_answered_with_the_nearest(ask):
    code, text = ask("table", "los")
    assert code == 2
    assert "Did you mean loss?" in text


def test_a_text_without_quotes_in_a_condition_is_answered_with_quotes(ask):
    code, text = ask("table", "loss", "--where", "status = finished")
    assert code == 2
    assert "\"name = 'finished'\"" in text


def test_a_question_in_sql_needs_no_quotes(ask):
    code, text = ask("sql", "select", "max(epoch)", "as", "last", "from", "full_pivot")
    assert code == 0
    assert text.split() == ["last", "3"]


def test_a_table_that_does_not_exist_is_answered_with_those_that_do(ask):
    code, text = ask("sql", "select loss from losses")
    assert code == 2
    assert "full_pivot" in text


def test_part_of_an_id_that_fits_several_runs_is_answered_with_them(ask, project):
    runs = sorted(path.name for path in (project / ".rearview" / "runs").iterdir())
    code, text = ask("show", runs[0][:6])
    assert code == 2
    assert all(run in text for run in runs)


def test_a_run_that_does_not_exist_is_answered_with_where_to_look(ask):
    code, text = ask("show", "nosuch")
    assert code == 2
    assert "`rearview runs`" in text
    assert "Did you mean latest?" in ask("show", "lastest")[1]


def test_a_run_that_ended_needs_no_resume(ask):
    code, text = ask("resume")
    assert code == 2
    assert "is finished" in text


def test_a_folder_that_takes_no_store_does_not_stop_the_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / ".rearview").touch()  # stands in the way, as a read-only disk does for most users
    code, text = recorded(tmp_path, "train.py")
    assert code == 0
    assert "epoch 3 loss" in text
    assert text.count("this run is not recorded") == 1
    assert "Make the folder writable" in text


WAITING = "import sys, time\nfor epoch in range(3):\n    x = epoch\nprint('trained', flush=True)\ninput()\n"


@pytest.fixture
def waiting(tmp_path):
    """A recorded script that has left its loop and waits for a line."""
    (tmp_path / "train.py").write_text(WAITING)
    process = subprocess.Popen(
        [sys.executable, "-m", "rearview", "run", "--every", "train.py"],
        cwd=tmp_path, env={**os.environ, **ENVIRONMENT, "REARVIEW_CLOSING_LINES": "always"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if "trained" in line:
            break
    yield process
    process.kill()
    process.communicate()


def test_a_store_that_is_removed_during_a_run_is_said_in_one_line(waiting, tmp_path):
    (tmp_path / ".rearview").rename(tmp_path / "away")  # at once, as no removal file by file is
    text, _ = waiting.communicate("\n")
    assert waiting.returncode == 0
    assert len(text.splitlines()) == 1
    assert ".rearview was removed while the program runs" in text


def test_a_run_that_is_interrupted_says_that_resume_continues_it(waiting):
    waiting.send_signal(signal.SIGINT)
    text, _ = waiting.communicate()
    assert waiting.returncode == -signal.SIGINT
    assert "`rearview resume` continues this run" in text


def test_a_backfill_that_is_interrupted_says_that_the_same_command_goes_on(project):
    pause = '    rearview.log("half", loss / 2); __import__("time").sleep(600)\n    if loss'
    edit(project, "    if loss", pause)
    process = started(project, "backfill", "half", "--yes", "--json", "--runs", "-1")
    for line in process.stdout:
        if '"started"' in line:
            break
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate()
    assert process.returncode == 130
    assert "the same command fills the rest" in text


SAVING = """\
import numpy as np, os
from pathlib import Path
def write(data):
    number = os.open("model.bin", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(number, data)
    os.close(number)
scale = float(np.load("data.npy").sum())
for epoch in range(3):
    weights = np.full(4, epoch * scale)
    write(weights.tobytes())
    np.save("new.npy", weights)
    Path("new.npy").replace("best.npy")
print(np.load("best.npy").sum(), len(Path("model.bin").read_bytes()))
"""


def test_files_that_the_run_writes_itself_are_not_inputs_that_changed(tmp_path, ask):
    folder = tmp_path / "saving"
    folder.mkdir()
    (folder / "train.py").write_text(SAVING)
    np = pytest.importorskip("numpy")
    np.save(folder / "data.npy", np.ones(3))
    for _ in range(3):
        assert recorded(folder, "--every", "-q", "train.py")[0] == 0
    text = SAVING.replace("    np.save", '    rearview.log("w", float(weights[0]))\n    np.save')
    (folder / "train.py").write_text(text)
    assert "changed since" not in ask("backfill", "w", "--explain", folder=folder)[1]
    np.save(folder / "data.npy", np.zeros(3))
    code, text = ask("backfill", "w", "--yes", "--workers", "1", folder=folder)
    assert code == 1
    assert len(re.findall("changed since: .*data.npy is not what run .* read", text)) == 1
    assert (
        text.count("data.npy has changed since the run read it") == 1
    )  # said of all three runs at once
    assert "not exact: 3 of 3 segments" in text
