"""The files that a run wrote are listed, and fetched from the project or from a checkpoint."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import rearview

SCRIPT = """\
import sys
for epoch in range(3):
    with open("model.txt", "w") as file:
        file.write(f"{sys.argv[1]} {epoch}")
with open("late.txt", "w") as file:
    file.write("late")
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files") / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    env = {**os.environ, "REARVIEW_ROOT": str(folder), "REARVIEW_EPSILON": "100"}
    for word in ("one", "two"):
        words = [sys.executable, "-m", "rearview", "run", "train.py", word]
        subprocess.run(words, cwd=folder, env=env, check=True, capture_output=True)
    return folder


@pytest.fixture
def project(template, tmp_path, monkeypatch):
    folder = tmp_path / "project"
    shutil.copytree(template, folder, copy_function=shutil.copy2)
    (folder / "elsewhere").mkdir()
    monkeypatch.setenv("REARVIEW_ROOT", str(folder))
    monkeypatch.chdir(folder / "elsewhere")
    return folder


def listed(command, which):
    return {file["path"]: file for file in json.loads(command("files", which, "--json")[1])}


def test_files_are_listed_with_where_their_contents_are(command, project):
    new, old = listed(command, "-1"), listed(command, "-2")
    assert set(new) == set(old) == {"model.txt", "late.txt"}
    assert new["model.txt"]["in_place"]
    assert not old["model.txt"]["in_place"]  # the second run has overwritten it
    assert old["model.txt"]["kept_at"]
    assert old["model.txt"]["made"]
    assert not new["model.txt"]["made"]
    (project / "late.txt").unlink()
    assert "gone" in command("files", "-1")[1]


def test_a_file_is_fetched_as_the_run_left_it(command, project):
    code, _, err = command("files", "-1", "--get", "model.txt")
    assert code == 0, err
    assert (project / "elsewhere" / "model.txt").read_text() == "two 2"
    assert (project / "model.txt").read_text() == "two 2"


def test_a_file_that_was_overwritten_comes_from_a_checkpoint(command, project):
    assert command("files", "-2", "--get", "model.txt", "-o", "old.txt")[0] == 0
    assert (project / "elsewhere" / "old.txt").read_text().startswith("one ")
    past = rearview.history(project)
    first = past.show("-2").checkpoints[0].point.steps[0].index
    words = ("--get", "model.txt", "--at", f"epoch={first}", "-o", "early.txt")
    assert command("files", "-2", *words)[0] == 0
    assert (project / "elsewhere" / "early.txt").read_text() == f"one {first - 1}"


def test_an_existing_file_is_never_overwritten(command, project):
    (project / "elsewhere" / "model.txt").write_text("mine")
    code, _, err = command("files", "-1", "--get", "model.txt")
    assert code == 2
    assert "not overwritten" in err
    assert (project / "elsewhere" / "model.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "words", [("--get", "../../etc/passwd"), ("--get", "model.txt", "--at", "epoch=99")]
)
def test_a_file_that_was_not_stored_is_explained(command, project, words):
    code, _, err = command("files", "-2", *words)
    assert code == 2
    assert "no-file" in err


def test_a_file_that_is_kept_nowhere_is_reported_as_missing(command, project):
    code, _, err = command("files", "-2", "--get", "late.txt")
    assert code == 2
    assert "is not stored" in err
