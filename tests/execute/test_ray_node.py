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
from rearview.execute.ray_node import OWNER_FILE, FolderOwner


@pytest.fixture
def root(tmp_path):
    return tmp_path / "home" / "me" / "project"


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(ray_node, "_CLAIM_TRIES", 2)


def soon(true):
    deadline = time.monotonic() + HUNG
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fill(root):
    (root / "data").mkdir()
    (root / "data" / "x.bin").write_bytes(b"x")
    (root / ".rearview" / "objects").mkdir()


def test_the_project_folder_is_removed_with_the_parent_folders_that_were_created(root, tmp_path):
    first = FolderOwner()
    assert first.create(str(root), "here") is None
    fill(root)
    first.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_last_of_several_owners_removes_the_folder(root, tmp_path):
    first, second = FolderOwner(), FolderOwner()
    assert first.create(str(root), "here") is None
    assert second.create(str(root), "here") is None
    fill(root)
    first.remove()
    assert (root / "data" / "x.bin").exists()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_may_be_used_and_stays(root):
    root.mkdir(parents=True)
    first = FolderOwner()
    assert first.create(str(root), "here") is None
    fill(root)
    first.remove()
    assert list(root.iterdir()) == []


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("name", ["train.py", ".rearview"])
def test_a_folder_of_the_user_is_refused_and_left_unchanged(root, name):
    (root / name).mkdir(parents=True)
    assert FolderOwner().create(str(root), "here") == "another folder is there"
    assert [file.name for file in root.iterdir()] == [name]


def test_the_project_of_another_machine_is_not_mixed_with_ours(root):
    first = FolderOwner()
    assert first.create(str(root), "there") is None
    assert "another machine" in (FolderOwner().create(str(root), "here") or "")
    assert root.exists()
    first.remove()
    assert not root.exists()


def test_a_folder_left_by_a_crashed_machine_is_replaced(root):
    (root / ".rearview").mkdir(parents=True)
    (root / "old.bin").touch()
    (root / ".rearview" / OWNER_FILE).write_text(json.dumps({"home": "gone", "top": ""}))
    first = FolderOwner()
    assert first.create(str(root), "here") is None
    assert [file.name for file in root.iterdir()] == [".rearview"]
    first.remove()


def test_a_path_that_cannot_be_created_is_refused_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be created" in (
        FolderOwner().create(str(tmp_path / "file" / "project"), "here") or ""
    )


def test_the_folder_is_removed_after_its_owner_was_killed(root, tmp_path):
    code = (
        "import sys, time; from rearview.execute.ray_node import FolderOwner; k = FolderOwner();"
        "assert k.create(sys.argv[1], 'here') is None; print('begun', flush=True); time.sleep(600)"
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
