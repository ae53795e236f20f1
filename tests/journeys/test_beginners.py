"""Mistakes of the first hour: each is answered so that the next command is right."""

import os
import shutil
import subprocess
import sys

import pytest

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


def rearview(folder, *words):
    done = subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder, env={**os.environ, "COLUMNS": "200", "REARVIEW_TRUST": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beginner") / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    code, text = rearview(folder, "run", "-q", "train.py")
    assert code == 0, text
    return folder


@pytest.fixture
def project(template, tmp_path):
    shutil.copytree(template, tmp_path / "project", symlinks=True)
    return tmp_path / "project"


def edit(project, before, after):
    text = (project / "train.py").read_text()
    assert before in text
    (project / "train.py").write_text(text.replace(before, after))


def test_a_probe_may_use_rearview_without_importing_it(project):
    probe = '    rearview.log("largest", float(np.abs(gradient).max()))\n    if loss'
    edit(project, "    if loss", probe)
    code, text = rearview(project, "backfill", "largest", "--yes")
    assert code == 0, text
    assert "4 records written" in text
    assert "exact" in text


def test_a_script_that_does_not_parse_is_named_with_its_line(project):
    edit(project, "loss = float(", "loss = float((")
    code, text = rearview(project, "backfill", "largest", "--yes")
    assert code == 1
    assert "train.py" in text
    assert "line 8" in text


def test_a_probe_in_a_branch_that_never_ran_is_said_to_be_never_reached(project):
    edit(project, "exploded = loss", 'exploded = loss\n        rearview.log("exploded", loss)')
    code, text = rearview(project, "backfill", "exploded", "--yes")
    assert code == 1
    assert "never reached" in text


def test_an_iteration_that_the_run_does_not_have_is_answered_with_how_many_it_has(project):
    edit(project, "    if loss", '    rearview.log("half", loss / 2)\n    if loss')
    code, text = rearview(project, "backfill", "half", "--at", "epoch=9", "--yes")
    assert code == 1
    assert "it has 4" in text


def test_a_loop_that_does_not_exist_is_answered_with_those_that_do(project):
    edit(project, "    if loss", '    rearview.log("half", loss / 2)\n    if loss')
    code, text = rearview(project, "backfill", "half", "--at", "batch=1", "--yes")
    assert code == 1
    assert "batch" in text
    assert "epoch" in text


def test_a_backfill_without_a_name_offers_what_is_missing(project):
    edit(project, "    if loss", '    rearview.log("half", loss / 2)\n    if loss')
    code, text = rearview(project, "backfill")
    assert code == 2
    assert "rearview backfill half" in text


def test_a_backfill_without_a_name_says_how_to_add_a_statement_where_nothing_is_missing(project):
    code, text = rearview(project, "backfill")
    assert code == 2
    assert "rearview.log(" in text


def test_a_script_that_is_gone_is_named(project):
    (project / "train.py").unlink()
    code, text = rearview(project, "backfill", "half", "--yes")
    assert code == 1
    assert "train.py" in text


def test_a_name_that_was_misspelt_is_answered_with_the_nearest(project):
    code, text = rearview(project, "show", "nosuch")
    assert code == 2
    assert "rearview runs" in text
