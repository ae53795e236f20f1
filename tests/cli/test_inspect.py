"""`rearview inspect`, as a newcomer types it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


def inspect(folder, *words):
    command = [sys.executable, "-m", "rearview", "inspect", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "train.py").write_text(
        "from steps import fit\nimport json\nfor epoch in range(3):\n    fit(epoch)\n"
    )
    (tmp_path / "steps.py").write_text(
        "def fit(epoch):\n    for step in range(4):\n        model.partial_fit(step)\n"
    )
    (tmp_path / "unrelated.py").write_text("for never in x: pass\n")
    return tmp_path


def test_files_that_the_script_imports_are_read_and_nothing_runs(project):
    done = inspect(project, "train.py")
    assert done.returncode == 0, done.stderr
    assert "epoch/step" in done.stdout
    assert "main loop" in done.stdout
    assert "never" not in done.stdout
    assert not (project / ".rearview").exists()


def test_programs_get_json(project):
    found = json.loads(inspect(project, "train.py", "--json").stdout)
    assert found["files"] == ["steps.py", "train.py"]
    assert [loop["point"] for loop in found["loops"] if loop["main"]] == [["epoch"]]


def test_a_missing_script_is_refused_with_advice(tmp_path):
    done = inspect(tmp_path, "nowhere.py")
    assert done.returncode == 2
    assert "nowhere.py" in done.stderr
    assert "no-script" in done.stderr


def test_a_script_that_does_not_parse_ends_with_1(tmp_path):
    (tmp_path / "t.py").write_text("for i in\n")
    done = inspect(tmp_path, "t.py")
    assert done.returncode == 1
    assert "t.py" in done.stderr


def test_packages_and_relative_imports_are_followed(tmp_path):
    package = tmp_path / "work"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "loop.py").write_text("from .deep import run\nfrom . import other\n")
    (package / "deep.py").write_text("def run():\n    for i in range(3):\n        pass\n")
    (package / "other.py").write_text("")
    (tmp_path / "train.py").write_text("from work.loop import run\nrun()\n")
    found = json.loads(inspect(tmp_path, "train.py", "--json").stdout)
    expected = ["train.py", "work/__init__.py", "work/deep.py", "work/loop.py", "work/other.py"]
    assert found["files"] == expected


def first_line(folder, *words):
    return inspect(folder, *words).stdout.splitlines()[0]


def test_the_first_line_answers_whether_it_will_work(project):
    assert first_line(project, "train.py").startswith("Yes: train.py can be recorded as it is")
    (project / "empty.py").write_text("")
    assert first_line(project, "empty.py").startswith("In part: empty.py")
    (project / "old.py").write_text("print 'x'\n")
    assert first_line(project, "old.py") == "No: old.py cannot be recorded."


def test_arguments_of_the_script_may_follow_as_for_run(project):
    done = inspect(project, "train.py", "--epochs", "3", "--json")
    assert json.loads(done.stdout)["answer"] == "yes"
    assert "`rearview run train.py --lr 1`" in inspect(project, "train.py", "--lr", "1").stdout


def test_a_module_is_inspected_as_python_would_find_it(tmp_path):
    package = tmp_path / "work"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("from work.train import go\ngo()\n")
    (package / "train.py").write_text("def go():\n    for epoch in r:\n        opt.step()\n")
    for module in ("work", "work.train"):
        found = json.loads(inspect(tmp_path, "-m", module, "--json").stdout)
        assert found["training"]["loop"] == "work/train.py:go:0:epoch"
    assert inspect(tmp_path, "-m", "nowhere").returncode == 2


def test_files_outside_the_scripts_folder_are_read_if_they_are_in_its_project(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "lib.py").write_text("def fit():\n    for epoch in r:\n        opt.step()\n")
    (tmp_path / "scripts" / "train.py").write_text("from lib import fit\nfit()\n")
    found = json.loads(inspect(tmp_path, "scripts/train.py", "--json").stdout)
    assert found["files"] == ["lib.py", "scripts/train.py"]
    assert found["training"]["point"] == ["epoch"]


def test_a_notebook_is_read_cell_by_cell(tmp_path):
    cells = ["%matplotlib inline\nx = 1", "for epoch in range(3):\n    opt.step()"]
    parts = [{"cell_type": "code", "source": cell, "metadata": {}} for cell in cells]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": parts, "metadata": {}, "nbformat": 4}))
    (loop,) = json.loads(inspect(tmp_path, "a.ipynb", "--json").stdout)["loops"]
    assert (loop["path"], loop["cell"], loop["line"]) == ("a.ipynb", 2, 1)
    assert "a.ipynb cell 2, line 1" in inspect(tmp_path, "a.ipynb").stdout


@pytest.mark.parametrize(
    ("name", "text", "advice"),
    [
        ("work", None, "is a folder"),
        ("run.sh", "python train.py\n", "rearview run train.py"),
        ("a.ipynb", "not json", "is not a notebook"),
    ],
)
def test_what_is_no_script_is_refused_with_advice(tmp_path, name, text, advice):
    if text is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(text)
    done = inspect(tmp_path, name)
    assert done.returncode == 2
    assert advice in done.stderr


def test_many_loops_are_counted_and_shown_with_all(tmp_path):
    loops = "".join(f"for i{n} in r:\n    f(i{n})\n" for n in range(30))
    (tmp_path / "t.py").write_text(f"{loops}for epoch in r:\n    opt.step()\n")
    assert "and 18 more loops (--all)" in inspect(tmp_path, "t.py").stdout
    assert "i29" in inspect(tmp_path, "t.py", "--all").stdout


def test_the_page_for_the_first_look_shows_what_is_printed(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "first-look.md").read_text()
    program, example = re.findall(r"```(?:python|console)\n(.*?)```", page, re.DOTALL)[:2]
    (tmp_path / "train.py").write_text(program)
    command, _, answer = example.partition("\n")
    assert command == "$ rearview inspect train.py"
    assert inspect(tmp_path, "train.py").stdout.startswith(answer + "\n")
