"""A store from a stranger is data: nothing in it is run before the user says that it is trusted."""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from damage import ask_all, build, run_ids
from rearview.config import Settings
from rearview.durable_files import add_check
from rearview.errors import RearviewError, RemoteError
from rearview.model import Part, Snapshot
from rearview.remote.folder import FolderRemote
from rearview.state.capture import _LENGTH, MAGIC
from rearview.store.checkpoints.checkpoints import Checkpoints
from rearview.store.maintenance.sync import pull
from rearview.store.project import Project
from rearview.store.trust import is_trusted
from rearview.store.versions.versions import Versions

READING = (
    ("runs",),
    ("runs", "--json"),
    ("show",),
    ("show", "--printed"),
    ("table",),
    ("table", "spread"),
    ("sql", "select * from records"),
    ("sql", "select * from checkpoints"),
    ("sql", "select * from versions"),
    ("sql", "select * from files"),
    ("diff",),
    ("diff", "-2", "-1"),
    ("propagate", "again"),
    ("backfill", "again", "--explain"),
    ("backfill", "spread", "--explain", "--again"),
    ("verify",),
    ("gc", "--dry-run"),
    ("workers",),
    ("doctor",),
    ("completion", "bash"),
)
RUNNING = (("replay", "-1"), ("backfill", "again", "--yes"), ("resume", "-2"))


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch '{self.canary}'",)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = build(tmp_path_factory.mktemp("recorded"))
    script = folder / "train.py"
    script.write_text(script.read_text() + 'rearview.log("again", sum(weights))\n')
    return folder


@pytest.fixture
def canary(tmp_path):
    return tmp_path / "canary"


@pytest.fixture
def strange(recorded, tmp_path):
    """The project as it comes out of an archive."""
    shutil.copytree(recorded, tmp_path / "strange", symlinks=True)
    return tmp_path / "strange"


def read_all(folder: Path) -> None:
    for words in READING:
        ask_all(folder, *words)


def refuse_all(folder: Path) -> None:
    for words in RUNNING:
        code, _, err = ask_all(folder, *words)
        assert code == 2, (words, err)
        assert "docs/errors.md#untrusted" in err, (words, err)
        assert "rearview trust" in err


def plant_pickles(folder: Path, canary: Path) -> None:
    """Put a pickle that runs a command in every checkpoint."""
    store = Checkpoints(Project.open(folder))
    evil = pickle.dumps(Evil(canary))
    skeleton = MAGIC + _LENGTH.pack(len(evil)) + evil + evil
    for run in store.runs():
        for one in store.of(run):
            kept = {key: bytes(data) for key, data in store.load(one).items()} | {
                "skeleton": skeleton
            }
            parts = [Part(key, data) for key, data in kept.items()]
            store.delete(one.id)
            store.save(Snapshot(one.run, one.seq, one.point, one.edge, meta=one.meta), parts)


def test_a_store_made_here_is_trusted_and_a_copy_of_it_is_not(recorded, strange):
    assert is_trusted(recorded / ".rearview")
    assert not is_trusted(strange / ".rearview")
    refuse_all(strange)


def test_planted_pickles_and_sources_are_not_run(strange, canary, monkeypatch):
    plant_pickles(strange, canary)
    project = Project.open(strange)
    versions = Versions(project, Settings())
    for run in run_ids(strange):
        file = project.runs / run / "run.json"
        old = versions.versions_by_ref()[f"runs/{run}"]
        text = versions.read(old, "train.py")
        line = f"import os\nos.system({f'touch {canary}'!r})\n".encode()
        evil = versions.derive(old, {"train.py": line + text})
        facts = file.read_bytes().rpartition(b',"c":')[0].replace(old.encode(), evil.encode())
        file.write_bytes(add_check(facts + b"}"))
    script = strange / "train.py"
    script.write_bytes(line + script.read_bytes())
    (strange / ".rearview" / "config.toml").write_text("trust = true\n")
    read_all(strange)
    refuse_all(strange)
    assert not canary.exists()
    # that the attack is one: with trust, it succeeds
    monkeypatch.setenv("REARVIEW_TRUST", "1")
    said = ask_all(strange, "replay", "-1")
    assert canary.exists(), said


def test_trusting_once_is_enough_and_lasts_when_the_folder_is_moved(strange, tmp_path):
    code, out, _ = ask_all(strange, "trust")
    assert code == 0
    assert "is trusted from now on" in out
    moved = strange.rename(tmp_path / "moved")
    code, _, err = ask_all(moved, "replay", "-1")
    assert code == 0, err
    shutil.copytree(moved, tmp_path / "copied", symlinks=True)
    assert not is_trusted(tmp_path / "copied" / ".rearview")
    assert is_trusted(moved / ".rearview")


def test_a_store_that_forbids_it_is_not_run_though_it_was_made_here(recorded, tmp_path):
    (recorded / ".rearview" / "config.toml").write_text("trust = false\n")
    try:
        code, _, err = ask_all(recorded, "replay", "-1")
    finally:
        (recorded / ".rearview" / "config.toml").unlink()
    assert code == 2
    assert "untrusted" in err


def test_where_nothing_can_be_remembered_recording_works_and_a_job_can_trust(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    folder = tmp_path / "project"
    folder.mkdir()
    project = Project.create(folder)
    assert not is_trusted(project.store)
    code, _, err = ask_all(folder, "trust")
    assert code == 2
    assert "trust-unwritable" in err
    assert is_trusted(project.store, Settings.read(project.store, {"REARVIEW_TRUST": "1"}).trust)
    monkeypatch.setenv("_CONDOR_SCRATCH_DIR", str(tmp_path))
    assert is_trusted(project.store)


def test_an_existing_store_does_not_count_as_made_here(tmp_path):
    (tmp_path / ".rearview" / "checkpoints").mkdir(parents=True)
    assert not is_trusted(Project.create(tmp_path).store)


def test_a_store_of_before_is_trusted_where_it_was_made_and_not_where_it_was_copied(
    recorded, tmp_path
):
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(recorded / "train.py", folder)
    command = [sys.executable, "-m", "rearview", "run", "train.py"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / ".rearview" / "identity.json").unlink()
    shutil.copytree(folder, tmp_path / "copy")
    assert is_trusted(folder / ".rearview")
    assert (folder / ".rearview" / "identity.json").is_file()
    assert not is_trusted(tmp_path / "copy" / ".rearview")


CONFIGS = {
    "promisor": """
[core]
	repositoryformatversion = 1
	bare = true
[extensions]
	partialClone = evil
[remote "evil"]
	promisor = true
	url = {here}
	uploadpack = touch {canary}; git-upload-pack
	partialclonefilter = blob:none
""",
    "ext": """
[core]
	repositoryformatversion = 1
[extensions]
	partialClone = evil
[protocol]
	allow = always
[remote "evil"]
	promisor = true
	url = ext::sh -c touch% {canary}
""",
    "ssh": """
[core]
	repositoryformatversion = 1
	sshCommand = touch {canary} #
[extensions]
	partialClone = evil
[remote "evil"]
	promisor = true
	url = ssh://nowhere/x
""",
    "programs": """
[core]
	fsmonitor = touch {canary} #
	pager = touch {canary} #
	editor = touch {canary} #
	hooksPath = {hooks}
	attributesFile = {attributes}
	gitProxy = touch {canary} #
[diff]
	external = touch {canary} #
[diff "evil"]
	command = touch {canary} #
	textconv = touch {canary} #
[filter "evil"]
	clean = touch {canary} #
	smudge = touch {canary} #
	process = touch {canary} #
[include]
	path = {hooks}/included
[includeIf "gitdir:/"]
	path = {hooks}/included
""",
}


def arm(git: Path, kind: str, canary: Path) -> None:
    """Give a git directory a configuration that runs a command wherever git lets it."""
    hooks = git / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in (
        "reference-transaction",
        "post-index-change",
        "post-checkout",
        "fsmonitor-watchman",
    ):
        (hooks / name).write_text(f"#!/bin/sh\ntouch '{canary}'\n")
        (hooks / name).chmod(0o755)
    (hooks / "included").write_text(f"[core]\n\tfsmonitor = touch {canary} #\n")
    (git / "info").mkdir(exist_ok=True)
    attributes = git / "info" / "attributes"
    attributes.write_text("* diff=evil filter=evil\n")
    text = CONFIGS[kind].format(here=git, canary=canary, hooks=hooks, attributes=attributes)
    if (git / "index").exists() or (git / "logs").exists():
        text = text.replace("bare = true", "bare = false")
    (git / "config").write_text(text)


def lose_blobs(git: Path) -> list[str]:
    """Remove the blobs, so that git would ask a promisor for them."""
    gone = []
    for file in (git / "objects").glob("??/*"):
        name = file.parent.name + file.name
        clean = {"GIT_CONFIG_GLOBAL": os.devnull, "PATH": os.environ["PATH"]}
        found = subprocess.run(
            ["git", "--git-dir", git, "cat-file", "-t", name], capture_output=True, env=clean,
            check=False,
        )  # fmt: skip
        if found.stdout.strip() == b"blob":
            file.unlink()
            gone.append(name)
    return gone


@pytest.mark.parametrize("kind", CONFIGS)
def test_git_configuration_next_to_the_versions_has_no_effect(strange, canary, kind):
    git = strange / ".rearview" / "versions.git"
    gone = lose_blobs(git) if kind != "programs" else []
    arm(git, kind, canary)
    (git / "objects" / "info").mkdir(exist_ok=True)
    (git / "objects" / "info" / "alternates").write_text(f"{canary.parent}/elsewhere\n")
    read_all(strange)
    assert not canary.exists()
    if kind == "promisor":  # that the attack is one: plain git falls for it
        subprocess.run(["git", "--git-dir", git, "cat-file", "-p", gone[0]], check=False)
        assert canary.exists()


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_configuration_of_an_unpacked_repository_does_nothing(recorded, tmp_path, canary, kind):
    folder = tmp_path / "project"
    folder.mkdir()
    script = (recorded / "train.py").read_text()
    (folder / "train.py").write_text(script)
    (folder / ".gitattributes").write_text("* diff=evil filter=evil\n")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    command = [sys.executable, "-m", "rearview", "run", "train.py"]
    for text in (script, script + "rearview.log('more', 1)\n"):
        (folder / "train.py").write_text(text)
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "train.py").write_text(script + "rearview.log('again', 1)\n")
    strange = tmp_path / "unpacked"
    shutil.copytree(folder, strange)
    if kind != "programs":
        lose_blobs(strange / ".git")
    arm(strange / ".git", kind, canary)
    read_all(strange)
    assert not canary.exists()


def test_a_repository_that_points_to_files_elsewhere_is_not_used(strange, tmp_path):
    private = tmp_path / "private"
    private.mkdir()
    (private / "diary.txt").write_text("dear diary")
    subprocess.run(["git", "init", "-q"], cwd=strange, check=True)
    subprocess.run(["git", "config", "core.worktree", private], cwd=strange, check=True)
    read_all(strange)
    names = Versions(Project.open(strange), Settings()).versions_by_ref()
    kept = Versions(Project.open(strange), Settings()).files(names["runs/worktree"])
    assert "diary.txt" not in kept


@pytest.mark.parametrize(
    "place",
    ["objects", "packs", "runs/{run}", "checkpoints/{run}", "cache", "cache/points/{run}", "damaged",
     "versions.git", "versions.git/objects", "writing", "runs/{run}/records-1-0.jsonl"],
)  # fmt: skip
def test_a_link_that_leads_out_of_the_store_is_followed_by_no_command(strange, tmp_path, place):
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    files = [
        outside / "sub" / "x.pack",
        outside / "sub" / ("a" * 62),
        outside / "records-9-0.jsonl",
        outside / "note",
    ]
    for file in files:
        file.write_bytes(b'{"format":1,"run":"r"}\n')
        os.utime(file, (0, 0))
    os.utime(outside / "sub", (0, 0))
    before = sorted(outside.rglob("*"))
    run = run_ids(strange)[0]
    target = strange / ".rearview" / place.format(run=run)
    if target.is_dir():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(outside if not place.endswith(".jsonl") else files[2])
    read_all(strange)
    for words in (("verify", "--repair"), ("gc",), ("gc", "--budget", "1B"), *RUNNING):
        code, _, err = ask_all(strange, *words)
        assert code == 2
        assert "untrusted-link" in err
    assert sorted(outside.rglob("*")) == before


def test_a_pipe_in_the_store_does_not_hang_a_reader(strange):
    file = strange / ".rearview" / "runs" / run_ids(strange)[0] / "run.json"
    file.unlink()
    os.mkfifo(file)
    assert "untrusted-link" in ask_all(strange, "runs")[2]


@pytest.mark.parametrize(
    "row",
    [
        ["a", "../../../../etc/passwd".ljust(64, "x"), 5, None, 0],
        ["a", "0" * 64, 10**18, 0, 0],
        ["a", "0" * 64, -1, 0, 0],
        ["a", "0" * 64, 5, 7, 0],
        ["a", "0" * 64, 5, 0, -(10**9)],
    ],
)
def test_places_outside_of_the_store_in_a_manifest_are_damage(strange, row):
    import json

    from rearview.store.checkpoints.manifest_and_packs import seal

    run = run_ids(strange)[0]
    file = min((strange / ".rearview" / "checkpoints" / run).glob("*.json"))
    body = json.loads(file.read_bytes())["body"]
    body.pop("table", None)
    body |= {"parts": {"packs": ["../../../../../etc/passwd"], "rows": [row]}}
    file.write_bytes(seal(json.dumps(body).encode()))
    read_all(strange)
    code, out, _ = ask_all(strange, "verify")
    assert code == 1
    assert file.name in out


def test_a_version_that_leads_out_of_its_folder_is_refused(strange):
    versions = Versions(Project.open(strange), Settings())
    home = versions._begin_own()
    for name in (b"../out.py", b"a/../../out.py", b".git/config", b"/out.py"):
        tree = home.tree(None, {b"train.py": ("100644", home.put(b"pass\n"))})
        row = b"100644 %b\0%b" % (name, bytes.fromhex(home.put(b"pass\n")))
        tree = home._write(b"tree", row)
        with pytest.raises(RearviewError, match="outside its folder"):
            versions.files(tree)


def test_a_remote_cannot_write_outside_of_the_store(tmp_path):
    import json

    remote = tmp_path / "remote"
    (remote / "commands").mkdir(parents=True)
    (remote / "runs").mkdir()
    project = Project.create(tmp_path / "project")
    for name in ("../../out", "/tmp/out", "runs/../../out", "config.toml", "identity.json"):
        pointer = {"format": 1, "run": "r", "version": "", "files": [name]}
        (remote / "commands" / "x.json").write_text(json.dumps(pointer))
        with pytest.raises(RemoteError, match="not a file of a run"):
            pull(project, FolderRemote(remote), "commands/x.json")
