"""A replay's tree looks like the project did when the run began."""

import os
import time

import pytest

from rearview.config import Settings
from rearview.execute.scratch_tree import make_tree
from rearview.store.project import Project
from rearview.store.versions.versions import Versions


@pytest.fixture
def project(tmp_path):
    (tmp_path / "train.py").write_text("print('then')\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.bin").write_bytes(bytes(range(256)))
    return Project.create(tmp_path)


def test_the_source_is_the_versions_and_inputs_are_linked(project, tmp_path_factory):
    versions = Versions(project, Settings())
    version = versions.save("r")
    (project.root / "train.py").write_text("print('now')\n")
    tree = tmp_path_factory.mktemp("scratch") / "tree"
    make_tree(project.root, versions, version, time.time() + 10, tree)
    assert (tree / "train.py").read_text() == "print('then')\n"
    assert (tree / "data" / "x.bin").is_symlink()
    assert (tree / "data" / "x.bin").read_bytes() == bytes(range(256))


def test_what_was_written_since_the_run_began_is_not_there(project, tmp_path_factory):
    versions = Versions(project, Settings())
    version = versions.save("r")
    began = time.time()
    late = project.root / "out.bin"
    late.write_bytes(b"\0\1")
    os.utime(late, (began + 100, began + 100))
    tree = tmp_path_factory.mktemp("scratch") / "tree"
    make_tree(project.root, versions, version, began + 50, tree)
    assert not (tree / "out.bin").exists()


def test_virtual_environments_and_the_store_are_left_out(project, tmp_path_factory):
    (project.root / "env").mkdir()
    (project.root / "env" / "pyvenv.cfg").write_text("")
    (project.root / "env" / "big.bin").write_bytes(b"\0")
    versions = Versions(project, Settings())
    tree = tmp_path_factory.mktemp("scratch") / "tree"
    make_tree(project.root, versions, versions.save("r"), time.time() + 10, tree)
    assert not (tree / "env" / "big.bin").exists()
    assert not (tree / ".rearview").exists()
