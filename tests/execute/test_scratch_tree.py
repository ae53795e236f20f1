"""A replay's tree looks like the project did when the run began."""

import os
import time

import pytest

from rearview.config import Settings
from rearview.execute.replay_jobs import make_tree
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


def test_files_written_since_the_run_started_are_not_in_the_scratch_tree(project, tmp_path_factory):
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


@pytest.fixture
def photos(project):
    """A folder of many files, made long before the run."""
    folder = project.root / "photos"
    for k in range(120):
        file = folder / str(k % 3) / f"{k}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\x89PNG\0" + bytes([k]))
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (1000, 1000))
    return folder


def laid_out(project, tmp_path_factory, before=2000.0, **more):
    versions = Versions(project, Settings())
    tree = tmp_path_factory.mktemp("scratch") / "tree"
    made = make_tree(project.root, versions, versions.save("r"), before, tree, fold=True, **more)
    assert sorted(made) == sorted(
        str(path.relative_to(tree))
        for path in tree.rglob("*")
        if path.is_symlink() and path.is_dir()
    )
    return tree, made


def test_a_large_unchanged_folder_is_one_link(project, photos, tmp_path_factory):
    tree, made = laid_out(project, tmp_path_factory)
    assert made == ("photos",)
    assert (tree / "photos").readlink() == photos
    assert len(list(tree.rglob("*"))) == 2  # with the source


@pytest.mark.parametrize("touched", ["photos", "photos/1", "photos/1/1.png"])
def test_a_folder_with_a_newer_file_is_not_one_link(project, photos, tmp_path_factory, touched):
    os.utime(project.root / touched, (3000, 3000))
    tree, made = laid_out(project, tmp_path_factory)
    assert made == ()
    shown = {path.name for path in (tree / "photos").rglob("*.png")}
    assert len(shown) == (119 if touched.endswith(".png") else 120)


def test_a_folder_in_which_the_run_wrote_is_not_one_link(project, photos, tmp_path_factory):
    tree, made = laid_out(project, tmp_path_factory, written_by_run=(["photos/1/1.png"], []))
    assert made == ()
    assert not (tree / "photos/1/1.png").exists()
    tree, made = laid_out(project, tmp_path_factory, written_by_run=([], ["photos/2"]))
    assert made == ()
    assert not (tree / "photos/2").exists()


def test_the_folder_that_a_run_works_in_is_none(project, photos, tmp_path_factory):
    assert laid_out(project, tmp_path_factory, working_folder="photos/1")[1] == ()
    assert laid_out(project, tmp_path_factory, working_folder=".")[1] == ("photos",)


def test_links_and_source_in_a_folder_keep_it_from_being_folded(project, photos, tmp_path_factory):
    (photos / "0" / "readme.txt").write_text("of the version\n")
    for path in (photos / "0" / "readme.txt", photos / "0"):
        os.utime(path, (1000, 1000))
    tree, made = laid_out(project, tmp_path_factory)
    assert made == ()
    assert not (tree / "photos/0/readme.txt").is_symlink()


def test_small_folders_are_linked_file_by_file(project, tmp_path_factory):
    for path in (project.root / "data" / "x.bin", project.root / "data"):
        os.utime(path, (1000, 1000))
    tree, made = laid_out(project, tmp_path_factory)
    assert made == ()
    assert (tree / "data" / "x.bin").is_symlink()
