"""A replay sees the files of the run, and leaves those of the user as they are."""

import builtins
import io
import os
import posix
import shutil
import subprocess
import sys
import textwrap

import pytest

from plainly import SOURCE
from rearview.runtime.sandbox.file_view import FileView, PathUse, resolved

HEAD = """
import glob, io, os, pathlib, pickle, shutil, sys
from rearview.runtime.sandbox import file_patches
from rearview.runtime.sandbox.file_view import FileView
home = os.getcwd()
os.makedirs("proj/.rearview/tree", exist_ok=True)
for name in ("proj/.rearview/tree/made", "data"):
    os.makedirs(name, exist_ok=True)
pathlib.Path("data/old.txt").write_text("old")
pathlib.Path("data/other.txt").write_text("other")
view = FileView(home + "/proj", home + "/proj/.rearview/tree", outside_copies=home + "/elsewhere", unmapped=(home + "/tmp/",))
file_patches.install(view)
os.chdir(home + "/proj")
"""
"""What every program of these tests begins with: a project beside a folder of data."""


def replayed(folder, text):
    """Run a text as a replay would."""
    (folder / "program.py").write_text(HEAD + textwrap.dedent(text))
    command = [sys.executable, "program.py"]
    env = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def left(folder):
    """Return the files of the folder of data, with what is in them."""
    return {one.name: one.read_text() for one in (folder / "data").rglob("*") if one.is_file()}


AS_IT_WAS = {"old.txt": "old", "other.txt": "other"}


def test_paths_below_the_root_lead_into_the_scratch_tree_and_those_above_it_out():
    view = FileView("/home/me/proj", "/scratch")
    assert view.real("/home/me/proj/a/../b.txt") == "/scratch/a/../b.txt"
    assert view.real("/home/me/other/../proj/b.txt") == "/scratch/b.txt"
    assert view.real("/home/me/proj/../proj/b.txt") == "/scratch/b.txt"
    assert view.real("/home/me/proj/../data/b.txt") == "/home/me/data/b.txt"
    assert view.real(b"/home/me/proj/b.txt") == b"/scratch/b.txt"
    assert view.real(3) == 3
    assert view.real("") == ""


@pytest.mark.parametrize("spelling", ["../data", "{home}/data", "{home}/proj/../data"])
def test_files_above_the_project_are_read_in_place(tmp_path, spelling):
    said = replayed(
        tmp_path,
        f"""
        folder = {spelling!r}.format(home=home)
        print(open(folder + "/old.txt").read(), *sorted(os.listdir(folder)))
        print(os.path.exists(folder + "/new.txt"), os.path.getsize(folder + "/old.txt"))
        """,
    )
    assert said == ["old", "old.txt", "other.txt", "False", "3"]


def test_a_file_written_outside_the_project_is_read_back_and_the_users_file_stays(tmp_path):
    said = replayed(
        tmp_path,
        """
        with open("../data/old.txt", "a") as file:
            file.write("+more")
        open("../data/other.txt", "w").write("mine")
        pathlib.Path("../data/new/deep").mkdir(parents=True)
        pathlib.Path("../data/new/deep/a.txt").write_text("a")
        number = os.open(home + "/data/low.txt", os.O_CREAT | os.O_WRONLY)
        os.write(number, b"low")
        os.close(number)
        print(open(home + "/data/old.txt").read(), pathlib.Path("../data/other.txt").read_text())
        print(*sorted(os.listdir("../data")), *sorted(glob.glob("../data/*/*")))
        print(*sorted(entry.name for entry in os.scandir("../data")))
        print(os.stat("../data/low.txt").st_size)
        """,
    )
    names = ["low.txt", "new", "old.txt", "other.txt"]
    assert said == ["old+more", "mine", *names, "../data/new/deep", *names, "3"]
    assert left(tmp_path) == AS_IT_WAS


def test_a_file_removed_or_renamed_outside_the_project_changes_for_the_replay_only(tmp_path):
    said = replayed(
        tmp_path,
        """
        os.remove("../data/old.txt")
        os.replace("../data/other.txt", "../data/moved.txt")
        print(*sorted(os.listdir("../data")), open("../data/moved.txt").read())
        for way in (open, os.remove):
            try:
                way("../data/old.txt")
            except FileNotFoundError:
                print("gone")
        open("../data/old.txt", "x").write("anew")
        print(*sorted(os.listdir("../data")), open("../data/old.txt").read())
        os.rename("../data", "../renamed")
        print(os.path.exists("../data"), *sorted(os.listdir("../renamed")))
        shutil.rmtree("../renamed")
        print(os.path.exists("../renamed"), os.path.exists(home + "/program.py"))
        """,
    )
    now = ["moved.txt", "old.txt"]
    assert said == [
        "moved.txt",
        "other",
        "gone",
        "gone",
        *now,
        "anew",
        "False",
        *now,
        "False",
        "True",
    ]
    assert left(tmp_path) == AS_IT_WAS


def test_a_whole_folder_outside_is_deleted_for_the_replay_alone(tmp_path):
    said = replayed(
        tmp_path,
        """
        try:
            os.rmdir("../data")
        except OSError as exc:
            print(exc.errno != 0)
        shutil.rmtree("../data")
        print(os.path.exists("../data"))
        os.makedirs("../data")
        print(os.listdir("../data") == [])
        """,
    )
    assert said == ["True", "False", "True"]
    assert left(tmp_path) == AS_IT_WAS


def test_links_of_the_project_that_lead_outside_are_not_written_through(tmp_path):
    said = replayed(
        tmp_path,
        """
        os.symlink(home + "/data", home + "/proj/.rearview/tree/outputs")
        print(open("outputs/old.txt").read())
        open("outputs/old.txt", "w").write("mine")
        open(home + "/proj/outputs/new.txt", "w").write("new")
        print(open("outputs/old.txt").read(), *sorted(os.listdir("outputs")), os.path.isdir("outputs"))
        """,
    )
    assert said == ["old", "mine", "new.txt", "old.txt", "other.txt", "True"]
    assert left(tmp_path) == AS_IT_WAS


def test_a_replay_in_a_folder_outside_the_project_writes_to_a_copy(tmp_path):
    said = replayed(
        tmp_path,
        """
        os.chdir("../data")
        open("old.txt", "w").write("mine")
        os.mkdir("sub")
        os.chdir("sub")
        open("in.txt", "w").write("in")
        print(os.getcwd() == home + "/data/sub", open("../old.txt").read(), os.listdir("."))
        os.chdir(home + "/proj")
        print(os.getcwd() == home + "/proj", open("../data/sub/in.txt").read())
        """,
    )
    assert said == ["True", "mine", "['in.txt']", "True", "in"]
    assert left(tmp_path) == AS_IT_WAS


def test_a_temporary_folder_is_used_in_place(tmp_path):
    (tmp_path / "tmp").mkdir()
    replayed(tmp_path, 'open("../tmp/a.txt", "w").write("a")\n')
    assert (tmp_path / "tmp" / "a.txt").read_text() == "a"


def test_another_way_to_the_users_files_is_refused(tmp_path):
    said = replayed(
        tmp_path,
        """
        folder = os.open(home + "/data", os.O_RDONLY)
        for act in (
            lambda: os.unlink("old.txt", dir_fd=folder),
            lambda: os.rename("old.txt", "x", src_dir_fd=folder, dst_dir_fd=folder),
            lambda: io.FileIO(home + "/data/old.txt", "w"),
        ):
            try:
                act()
            except PermissionError as exc:
                print("does not change your files" in str(exc))
        """,
    )
    assert said == ["True", "True", "True"]
    assert left(tmp_path) == AS_IT_WAS


def test_patched_functions_are_pickled_as_the_builtin_functions_that_they_replace(tmp_path):
    said = replayed(
        tmp_path,
        """
        for function in (open, io.open, os.stat, os.listdir, os.getcwd, os.replace):
            print(pickle.loads(pickle.dumps(function)) is function)

        class Holder:
            opens = open

        print(Holder().opens("../data/old.txt").read())
        print(os.stat in os.supports_follow_symlinks, os.chmod in os.supports_fd)
        """,
    )
    assert said == [*["True"] * 6, "old", "True", "True"]
    assert pickle_of(open) == pickle_of(builtins.open)
    assert posix.stat is os.stat
    assert io.open is open


def pickle_of(function):
    """Return what is kept of a function: module and name."""
    return function.__module__, function.__qualname__


def test_links_are_followed_as_the_system_does(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    (tmp_path / "full").symlink_to(tmp_path / "link")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("link/../c", "full/x", "a/./b", "none/x"):
        assert resolved(f"{tmp_path}/{name}") == os.path.realpath(f"{tmp_path}/{name}")
    assert resolved(f"{tmp_path}/loop/x")
    shutil.rmtree(tmp_path / "a")


def test_a_linked_input_is_copied_before_it_is_changed(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "in.txt").symlink_to(tmp_path / "mine.txt")
    view = FileView(f"{tmp_path}/proj", f"{tmp_path}/tree")
    path = view.real(f"{tmp_path}/proj/in.txt", PathUse.CHANGE)
    assert path == f"{tmp_path}/tree/in.txt"
    assert not (tmp_path / "tree" / "in.txt").is_symlink()
    assert (tmp_path / "tree" / "in.txt").read_text() == "mine"


def test_an_environment_of_python_in_the_project_is_used_as_it_is():
    view = FileView("/proj", "/scratch", outside_copies="/e", installed=("/proj/.venv/",))
    inside = "/proj/.venv/lib/a.py"
    assert view.real(inside) == view.real("/proj/src/../.venv/lib/a.py") == inside
    assert view.real("/proj/.venvs/a.py") == "/scratch/.venvs/a.py"
    assert not view.is_protected(inside)
    assert view.is_protected("/proj/a.py")


FOLDED = """
photos = pathlib.Path(home, "proj/photos/old")
photos.mkdir(parents=True)
for k in range(3):
    photos.joinpath(f"{k}.png").write_text(str(k))
os.symlink(home + "/proj/photos", home + "/proj/.rearview/tree/photos")
view.folded.add(home + "/proj/.rearview/tree/photos")
def listed():
    return sorted(p.relative_to(home + "/proj").as_posix() for p in pathlib.Path(home, "proj/photos").rglob("*"))
"""


def folded(folder, text):
    """Run a text as a replay in whose tree the folder `photos` is a link; return what it printed."""
    before, after = HEAD.split("file_patches.install(view)")
    (folder / "program.py").write_text(
        before + FOLDED + "file_patches.install(view)" + after + textwrap.dedent(text)
    )
    env = {**os.environ, "PYTHONPATH": SOURCE}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept = {p.name: p.read_text() for p in (folder / "proj/photos").rglob("*") if p.is_file()}
    assert kept == {"0.png": "0", "1.png": "1", "2.png": "2"}
    return done.stdout.split()


def test_a_folder_that_is_a_link_for_us_is_none_for_the_program(tmp_path):
    assert folded(
        tmp_path,
        """
        print(sum(len(files) for _, _, files in os.walk("photos")))
        print(sum(len(files) for _, _, files in os.walk(".")))
        print(len(list(pathlib.Path(".").rglob("*.png"))), len(glob.glob("**/*.png", recursive=True)))
        print(os.path.islink("photos"), pathlib.Path("photos").is_symlink(), os.path.isdir("photos"))
        (entry,) = [one for one in os.scandir(".") if one.name == "photos"]
        print(entry.is_symlink(), entry.is_dir(follow_symlinks=False), entry.is_file())
        try:
            os.readlink("photos")
        except OSError as exc:
            print(exc.errno)
        print(open("photos/old/1.png").read(), os.path.realpath("photos/old") == home + "/proj/photos/old")
        """,
    ) == ["3", "3", "3", "3", "False", "False", "True", "False", "True", "False", "22", "1", "True"]


@pytest.mark.parametrize(
    ("write", "found"),
    [
        ('open("photos/old/1.png", "w").write("new")', "new"),
        ('open("photos/old/1.png", "a").write("new")', "1new"),
        ('open(home + "/proj/photos/old/1.png", "r+").write("new")', "new"),
        ('open(next(e.path for e in os.scandir("photos/old") if e.name == "1.png"), "w").write("new")', "new"),
        ('os.chdir("photos"); open("old/1.png", "w").write("new"); os.chdir("..")', "new"),
        ('os.remove("photos/old/1.png"); open("photos/old/1.png", "x").write("new")', "new"),
        ('os.rename("photos/old/2.png", "photos/old/1.png")', "2"),
        ('shutil.rmtree("photos"); os.makedirs("photos/old"); open("photos/old/1.png", "w").write("new")', "new"),
        ('os.rename("photos", "moved"); shutil.copytree("moved", "photos")', "1"),
        ('shutil.copy("photos/old/2.png", "photos/old/1.png")', "2"),
    ],
)  # fmt: skip
def test_files_written_in_a_linked_folder_belong_to_the_replay(tmp_path, write, found):
    text = f"""
        {write}
        print(open("photos/old/1.png").read())
        open("photos/new.txt", "w").write("made")
        os.mkdir("photos/more")
        print(sorted(os.listdir("photos")) in (["more", "new.txt", "old"],))
        """
    assert folded(tmp_path, text) == [found, "True"]
