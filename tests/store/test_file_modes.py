"""The store is its owner's alone, and secrets do not get into it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rearview.config import Settings
from rearview.store.project import Project
from rearview.store.versions.versions import Versions

JOB = """\
import rearview
for epoch in range(5):
    total = 0
    for step in range(10):
        total += step
    rearview.log("loss", total)
"""


def rearview(folder, *words, umask=-1, **env):
    return subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        umask=umask,
    )


def modes(store):
    for path in store.rglob("*"):
        if not path.is_symlink():
            yield path, stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o002, 0o022])
@pytest.mark.parametrize("git", [True, False])
def test_only_the_owner_can_read_files_with_any_umask(tmp_path, umask, git):
    (tmp_path / "job.py").write_text(JOB)
    env = {} if git else {"PATH": str(Path(sys.executable).parent)}
    assert rearview(tmp_path, "run", "-q", "--every", "job.py", umask=umask, **env).returncode == 0
    (tmp_path / "job.py").write_text(JOB.replace("total)", 'total); rearview.log("b", epoch)'))
    for words in (("backfill", "b"), ("table", "b", "loss"), ("verify",), ("show",)):
        done = rearview(tmp_path, *words, umask=umask, **env)
        assert done.returncode == 0, done.stderr
    store = tmp_path / ".rearview"
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    assert [(path, oct(mode)) for path, mode in modes(store) if mode & 0o077] == []


def test_the_group_may_be_let_in_and_shut_out_again(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    done = rearview(tmp_path, "run", "-q", "job.py", umask=0o077, REARVIEW_SHARED="group")
    assert done.returncode == 0, done.stderr
    store = tmp_path / ".rearview"
    for path, mode in modes(store / "runs"):
        assert mode == (0o2770 if path.is_dir() else 0o660), path
    assert rearview(tmp_path, "run", "-q", "job.py", umask=0).returncode == 0
    assert [path for path, mode in modes(store) if mode & 0o077] == []


SECRET = [
    *("credentials.json", "secrets.yaml", ".aws/credentials", ".kube/config", "kubeconfig"),
    *(".netrc", "id_rsa", "server.pem", "tls.key", ".env", ".env.local", "prod.env", ".pypirc"),
    *("token.txt", "hf_token", "service-account.json", "conf/db_password.txt", ".git-credentials"),
]
TAKEN = ["train.py", "tokenizer.json", "auth.py", "keys.py", "conf/model.yaml", "README.md"]


@pytest.mark.parametrize("git", ["none", "untracked", "tracked"])
def test_credentials_are_never_part_of_a_version(tmp_path, git):
    token = "hf_" + "aB3" * 12
    for name in (*SECRET, *TAKEN):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x\n")
    (tmp_path / "notes.txt").write_text(f"use {token}\n")
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXktdjEAAAAABG5vbmU\n" * 4
    (tmp_path / "deploy.yaml").write_text(key)
    (tmp_path / "guide.txt").write_text("a key begins with -----BEGIN PRIVATE KEY-----\n")
    if git != "none":
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    if git == "tracked":
        subprocess.run(["git", "add", "-Af"], cwd=tmp_path, check=True)
    project = Project.create(tmp_path)
    versions = Versions(project, Settings())
    found = set(versions.files(versions.save("r1")))
    assert found >= {*TAKEN, "guide.txt"}
    assert not found & {*SECRET, "notes.txt", "deploy.yaml"}


def test_links_out_of_the_project_are_not_followed(tmp_path):
    root, outside = tmp_path / "project", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "private.py").write_text("mine = 1\n")
    (root / "train.py").write_text("x = 1\n")
    (root / "file.py").symlink_to(outside / "private.py")
    (root / "near.py").symlink_to("../outside/private.py")
    (root / "folder").symlink_to(outside)
    versions = Versions(Project.create(root), Settings())
    version = versions.save("r1")
    assert set(versions.files(version)) == {"train.py"}
    assert not any(b"mine" in data for _, data in versions.packed(version).values())
    versions.export(version, tmp_path / "out")
    assert (
        tmp_path / "out" / "near.py"
    ).read_text() == "mine = 1\n"  # a link, and it still leads there


def test_secrets_of_a_command_line_are_not_stored_and_asked_for_again(tmp_path):
    (tmp_path / "job.py").write_text(
        JOB.replace("import rearview", "import sys, argparse\nimport rearview", 1)
        + "p = argparse.ArgumentParser(); p.add_argument('--api-key'); p.add_argument('--lr')\n"
        "p.add_argument('url')\nprint(len(p.parse_args().api_key))\n"
    )
    words = ("--lr", "0.1", "--api-key", "s3cr3tvalue", "pg://me:hunter2@db/x")
    done = rearview(tmp_path, "run", "-q", "job.py", *words)
    assert (done.returncode, done.stdout) == (0, "11\n"), done.stderr
    for path in (tmp_path / ".rearview").rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert b"s3cr3tvalue" not in data, path
        assert b"hunter2" not in data, path
    shown = rearview(tmp_path, "show").stdout
    assert "--lr 0.1 --api-key *** pg://me:***@db/x" in shown
    text = (tmp_path / "job.py").read_text()
    (tmp_path / "job.py").write_text(text.replace("total)", 'total); rearview.log("b", epoch)'))
    done = rearview(tmp_path, "backfill", "b")
    assert "REARVIEW_ARG_API_KEY" in done.stdout + done.stderr
    assert done.returncode in {1, 2}
    given = {"REARVIEW_ARG_API_KEY": "s3cr3tvalue", "REARVIEW_ARG_5": "pg://me:hunter2@db/x"}
    done = rearview(tmp_path, "backfill", "b", **given)
    assert done.returncode == 0, done.stderr
