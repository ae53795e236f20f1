"""A version is the source as it was, whatever the user's git looks like, and git never notices."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gitrepo import CLEAN, everything, git, repo, versions, write
from rearview.errors import VersionError
from rearview.store.project import Project


def test_a_version_holds_tracked_and_untracked_text_and_leaves_out_the_rest(tmp_path):
    root = repo(tmp_path)
    write(root, {".gitignore": "*.log\n", "train.py": "x = 3\n", "new.py": "z\n", "run.log": "no"})
    write(root, {"weights.npy": b"\x93NUMPY", "raw.dat": b"a\0b", "big.txt": "a" * 2001})
    write(root, {".env": "SECRET=1", "__pycache__/a.txt": "no"})
    store = versions(root, max_source=2000)
    version = store.save("r1")
    assert store.files(version) == {
        ".gitignore": b"*.log\n",
        "lib/net.py": b"y = 2\n",
        "new.py": b"z\n",
        "train.py": b"x = 3\n",
    }
    assert store.versions_by_ref() == {"runs/r1": version}
    assert version == git(root, "rev-parse", "refs/rearview/runs/r1^{tree}")


def test_the_users_git_is_the_same_byte_for_byte_afterwards(tmp_path):
    root = repo(tmp_path / "user")
    write(root, {"staged.py": "s\n"})
    git(root, "add", "staged.py")
    git(root, "stash")
    write(root, {"staged.py": "s2\n", "dirty.py": "d\n"})
    git(root, "add", "staged.py")
    git(root, "config", "core.logAllRefUpdates", "always")
    git(root, "config", "commit.gpgSign", "true")
    git(root, "config", "gpg.program", "false")
    trace = tmp_path / "trace"
    for hook in ("post-index-change", "reference-transaction", "pre-commit", "post-commit"):
        file = root / ".git/hooks" / hook
        file.write_text(f"#!/bin/sh\necho {hook} >> {trace}\n")
        file.chmod(0o755)
    store = versions(root)
    ours = (".git/objects/", ".git/refs/rearview/", ".rearview/")
    before, refs = everything(root, ours), git(root, "for-each-ref", "refs/heads", "refs/stash")
    first = store.save("r1")
    write(root, {"dirty.py": "d2\n"})
    second = store.save("r2")
    derived = store.derive(second, {"train.py": b"x = 9\n"})
    write(root, {"dirty.py": "d\n"})
    assert everything(root, ours) == before
    assert git(root, "for-each-ref", "refs/heads", "refs/stash") == refs
    assert not trace.exists()
    assert len({first, second, derived}) == 3
    assert git(root, "fsck", "--strict") == ""


def test_versions_survive_a_merciless_gc(tmp_path):
    root = repo(tmp_path)
    store = versions(root)
    write(root, {"only_here.py": "u\n"})
    version = store.save("r1")
    derived = store.derive(version, {"only_there.py": b"v\n"})
    git(root, "gc", "-q", "--prune=now")
    assert store.read(version, "only_here.py") == b"u\n"
    assert versions(root).read(derived, "only_there.py") == b"v\n"


def test_a_repository_without_a_commit_works(tmp_path):
    git(tmp_path, "init", "-q")
    write(tmp_path, {"train.py": "x\n"})
    store = versions(tmp_path)
    assert store.files(store.save("r1")) == {"train.py": b"x\n"}
    assert not (tmp_path / ".rearview/versions.git").exists()


def test_a_project_in_a_subfolder_holds_only_that_folder(tmp_path):
    root = repo(tmp_path, {"top.py": "t\n", "work/train.py": "x\n", "work/sub/a.py": "a\n"})
    store = versions(root / "work")
    assert store.files(store.save("r1")) == {"train.py": b"x\n", "sub/a.py": b"a\n"}
    write(root, {"work/train.py": "x2\n"})
    assert store.files(store.save("r2"))["train.py"] == b"x2\n"


def test_a_project_that_the_outer_repository_ignores_has_its_own_versions(tmp_path):
    root = repo(tmp_path, {".gitignore": "scratch/\n"})
    write(root, {"scratch/train.py": "x\n"})
    store = versions(root / "scratch")
    assert store.files(store.save("r1")) == {"train.py": b"x\n"}
    assert git(root, "for-each-ref", "refs/rearview") == ""


def test_without_a_repository_versions_are_in_the_store(tmp_path):
    write(tmp_path, {"train.py": "x\n", ".gitignore": "out/\n", "out/a.txt": "o", "venv/b.py": "v"})
    store = versions(tmp_path)
    version = store.save("r1")
    assert store.files(version) == {"train.py": b"x\n", ".gitignore": b"out/\n"}
    git(tmp_path, "init", "-q")
    later = versions(tmp_path)
    write(tmp_path, {"train.py": "x = 2\n"})
    newer = later.save("r2")
    assert later.read(version, "train.py") == b"x\n"
    assert "-x\n+x = 2\n" in later.diff(version, newer)
    assert later.versions_by_ref() == {"runs/r1": version, "runs/r2": newer}


@pytest.fixture
def gitless(tmp_path, monkeypatch):
    """No git on PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_without_git_installed_versions_are_kept_in_gits_own_format(tmp_path, gitless, monkeypatch):
    root = tmp_path / "p"
    write(root, {"train.py": "x\n", "a/b/c.py": "c\n", "a.py": "d\n", "w.npy": b"\x93"})
    (root / "link.py").symlink_to("train.py")
    store = versions(root)
    first = store.save("r1")
    write(root, {"train.py": "x2\n"})
    (root / "a.py").unlink()
    second = store.save("r2")
    derived = store.derive(second, {"a/new.py": b"n\n", "a/b/c.py": None})
    assert store.files(first) == {"train.py": b"x\n", "a/b/c.py": b"c\n", "a.py": b"d\n"}
    assert store.files(derived) == {"train.py": b"x2\n", "a/new.py": b"n\n"}
    assert store.read(second, "link.py") == b"x2\n"
    assert "-x\n+x2\n" in store.diff(first, second)
    monkeypatch.undo()
    with_git = versions(root)
    assert with_git.versions_by_ref() == store.versions_by_ref()
    assert with_git.files(derived) == store.files(derived)
    assert with_git.save("r3") == second
    assert git(root / ".rearview/versions.git", "fsck", "--strict") == ""


def test_a_linked_work_tree_keeps_its_versions_in_the_shared_database(tmp_path):
    root = repo(tmp_path / "main")
    git(root, "worktree", "add", "-q", "../other", "-b", "side")
    write(tmp_path / "other", {"train.py": "other\n"})
    store = versions(tmp_path / "other")
    version = store.save("r1")
    assert store.read(version, "train.py") == b"other\n"
    assert git(root, "rev-parse", "refs/rearview/runs/r1^{tree}") == version


def test_submodules_and_nested_clones_bring_their_text(tmp_path):
    inner = repo(tmp_path / "inner", {"dep.py": "dep\n"})
    root = repo(tmp_path / "outer")
    git(root, "submodule", "add", "-q", str(inner), "third/dep")
    repo(root / "clone", {"c.py": "c\n"})
    write(root, {"third/dep/dep.py": "changed\n", "third/dep/untracked.py": "u\n"})
    git(root, "submodule", "add", "-q", str(inner), "gone")
    git(root, "submodule", "deinit", "-f", "gone")
    store = versions(root)
    files = store.files(store.save("r1"))
    assert files["third/dep/dep.py"] == b"changed\n"
    assert files["third/dep/untracked.py"] == b"u\n"
    assert files["clone/c.py"] == b"c\n"
    assert not [name for name in files if name.startswith("gone")]


def test_filters_and_line_endings_do_not_change_a_byte(tmp_path):
    attributes = "*.py text eol=crlf ident\n*.txt text\n*.md filter=shout\n*.rst working-tree-encoding=UTF-16\n"
    root = repo(tmp_path, {".gitattributes": attributes})
    git(root, "config", "core.autocrlf", "true")
    git(root, "config", "filter.shout.clean", "tr a-z A-Z")
    git(root, "config", "filter.shout.required", "true")
    files = {"a.py": "# $Id$\r\nx\n", "b.txt": "1\r\n2\n", "c.md": "quiet\r\n", "d.rst": "plain\n"}
    write(root, files)
    store = versions(root)
    version = store.save("r1")
    assert {n: t.decode() for n, t in store.files(version).items() if n in files} == files
    store.export(version, tmp_path / "out")
    assert (tmp_path / "out/a.py").read_bytes() == files["a.py"].encode()


def test_unusual_names_and_modes_are_restored(tmp_path):
    root = repo(tmp_path / "p")
    names = [
        "with space.py",
        "new\nline.py",
        '"quoted".py',
        "ünï.py",
        "tab\t.py",
        "-rf.py",
        "a\\b.py",
    ]
    write(root, {name: f"# {i}\n" for i, name in enumerate(names)})
    (root / os.fsdecode(b"latin\xe9.py")).write_text("l\n")
    write(root, {"tool.sh": "#!/bin/sh\n", "empty.py": ""})
    (root / "tool.sh").chmod(0o755)
    (root / "inside.py").symlink_to("train.py")
    (tmp_path / "shared.py").write_text("shared\n")
    (root / "outside.py").symlink_to(tmp_path / "shared.py")
    (root / "data").symlink_to("/nowhere")
    store = versions(root)
    version = store.save("r1")
    out = tmp_path / "out"
    store.export(version, out)
    for i, name in enumerate(names):
        assert (out / name).read_text() == f"# {i}\n"
    assert (out / os.fsdecode(b"latin\xe9.py")).read_text() == "l\n"
    assert (out / "empty.py").read_bytes() == b""
    assert os.access(out / "tool.sh", os.X_OK)
    assert not os.access(out / "train.py", os.X_OK)
    assert (out / "inside.py").readlink() == Path("train.py")
    assert store.read(version, "inside.py") == b"x = 1\n"
    assert (out / "outside.py").readlink() == tmp_path / "shared.py"  # not followed
    assert (out / "data").readlink() == Path("/nowhere")


def test_the_users_git_environment_does_not_leak_in(tmp_path, monkeypatch):
    other = repo(tmp_path / "other")
    before = everything(other)
    root = repo(tmp_path / "p")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(other / ".git/objects"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "broken")
    store = versions(root)
    version = store.save("r1")
    assert store.read(version, "train.py") == b"x = 1\n"
    assert everything(other) == before
    assert git(root, "rev-parse", "refs/rearview/runs/r1^{tree}") == version


def test_a_repository_that_cannot_be_written_is_left_alone(tmp_path):
    root = repo(tmp_path)
    (root / ".git/refs/rearview").write_text("in the way\n")  # also stops root, as chmod would not
    before = everything(root / ".git", ("objects/",))
    store = versions(root)
    version = store.save("r1")
    assert store.read(version, "train.py") == b"x = 1\n"
    assert (root / ".rearview/versions.git/HEAD").is_file()
    assert everything(root / ".git", ("objects/",)) == before
    assert versions(root).files(version) == store.files(version)


def test_a_read_only_repository_is_left_alone(tmp_path, monkeypatch):
    root = repo(tmp_path)
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, how: ".git" not in str(path) and real(path, how))
    store = versions(root)
    assert store.read(store.save("r1"), "train.py") == b"x = 1\n"
    assert git(root, "for-each-ref", "refs/rearview") == ""


def test_eight_runs_that_start_at_once_all_keep_their_version(tmp_path):
    for place in (repo(tmp_path / "git"), tmp_path / "bare"):
        write(place, {"train.py": "x\n"})
        Project.create(place)
        code = (
            "import sys; from pathlib import Path; from rearview.config import Settings;"
            "from rearview.store.project import Project; from rearview.store.versions.versions import Versions;"
            "print(Versions(Project.create(Path(sys.argv[1])), Settings()).save(sys.argv[2]))"
        )
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}

        def start(i, place=place, code=code, env=env):
            argv = [sys.executable, "-c", code, str(place), f"r{i}"]
            return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout

        with ThreadPoolExecutor(8) as pool:
            found = {line.strip() for line in pool.map(start, range(8))}
        assert len(found) == 1
        assert set(versions(place).versions_by_ref()) == {f"runs/r{i}" for i in range(8)}


def test_a_derived_version_changes_only_the_given_files(tmp_path):
    store = versions(repo(tmp_path))
    version = store.save("r1")
    derived = store.derive(
        version, {"train.py": b"x = 5\n", "added.py": b"a\n", "lib/net.py": None}
    )
    assert store.files(derived) == {"train.py": b"x = 5\n", "added.py": b"a\n"}
    assert store.files(version)["train.py"] == b"x = 1\n"
    assert f"derived/{derived}" in store.versions_by_ref()
    assert "-x = 1\n+x = 5\n" in store.diff(version, derived)
    assert store.derive(derived, {"train.py": b"x = 5\n"}) == derived


def test_a_file_or_version_that_is_not_there_is_named(tmp_path):
    store = versions(repo(tmp_path))
    version = store.save("r1")
    with pytest.raises(VersionError, match=r"no file 'nope\.py'"):
        store.read(version, "nope.py")
    with pytest.raises(VersionError, match="Version 000000000000 is not in"):
        store.files("0" * 40)
    store.drop("r1")
    assert store.versions_by_ref() == {}


def test_a_tree_that_points_outside_is_not_exported(tmp_path):
    root = repo(tmp_path / "p")
    store = versions(root)
    blob = git(root, "hash-object", "-w", "--stdin", input="evil\n")
    inner = git(root, "mktree", input=f"100644 blob {blob}\tevil.py\n")
    raw = b"40000 ..\0" + bytes.fromhex(inner)
    done = subprocess.run(
        ["git", "hash-object", "-t", "tree", "--literally", "-w", "--stdin"],
        cwd=root, env=CLEAN, input=raw, capture_output=True, check=True,
    )  # fmt: skip
    with pytest.raises(VersionError, match="outside its folder"):
        store.export(done.stdout.decode().strip(), tmp_path / "out/deep")
    assert not list(tmp_path.rglob("evil.py"))
