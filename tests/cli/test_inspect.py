"""`rearview inspect`, as a newcomer types it."""

import json
import subprocess
import sys

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
