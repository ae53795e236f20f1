"""Room for a project on a node: made once, shared, removed by whoever is last."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from limits import HUNG
from rearview.execute import ray_node
from rearview.execute.ray_node import MARK, Keeper


@pytest.fixture
def root(tmp_path):
    return tmp_path / "home" / "me" / "project"


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(ray_node, "_TRIES", 2)


def soon(true):
    deadline = time.monotonic() + HUNG
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fill(root):
    (root / "data").mkdir()
    (root / "data" / "x.bin").write_bytes(b"x")
    (root / ".rearview" / "objects").mkdir()


def test_what_was_made_is_removed_with_the_folders_above_it(root, tmp_path):
    one = Keeper()
    assert one.begin(str(root), "here") is None
    fill(root)
    one.end()
    assert list(tmp_path.iterdir()) == []


def test_the_last_of_several_users_removes_it(root, tmp_path):
    one, two = Keeper(), Keeper()
    assert one.begin(str(root), "here") is None
    assert two.begin(str(root), "here") is None
    fill(root)
    one.end()
    assert (root / "data" / "x.bin").exists()
    two.end()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_may_be_used_and_stays(root):
    root.mkdir(parents=True)
    one = Keeper()
    assert one.begin(str(root), "here") is None
    fill(root)
    one.end()
    assert list(root.iterdir()) == []


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("name", ["train.py", ".rearview"])
def test_a_folder_of_somebody_is_refused_and_left_as_it_is(root, name):
    (root / name).mkdir(parents=True)
    assert Keeper().begin(str(root), "here") == "something else stands there"
    assert [file.name for file in root.iterdir()] == [name]


def test_the_project_of_another_machine_is_not_mixed_with_ours(root):
    one = Keeper()
    assert one.begin(str(root), "there") is None
    assert "another machine" in (Keeper().begin(str(root), "here") or "")
    assert root.exists()
    one.end()
    assert not root.exists()


def test_what_a_crashed_machine_left_is_replaced(root):
    (root / ".rearview").mkdir(parents=True)
    (root / "old.bin").touch()
    (root / ".rearview" / MARK).write_text(json.dumps({"home": "gone", "top": ""}))
    one = Keeper()
    assert one.begin(str(root), "here") is None
    assert [file.name for file in root.iterdir()] == [".rearview"]
    one.end()


def test_a_path_that_cannot_be_made_is_refused_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be made" in (Keeper().begin(str(tmp_path / "file" / "project"), "here") or "")


def test_it_is_removed_however_its_owner_ends(root, tmp_path):
    code = (
        "import sys, time; from rearview.execute.ray_node import Keeper; k = Keeper();"
        "assert k.begin(sys.argv[1], 'here') is None; print('begun', flush=True); time.sleep(600)"
    )
    source = str(Path(ray_node.__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(root)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"begun\n"
        fill(root)
        owner.kill()
    soon(lambda: not list(tmp_path.iterdir()))
