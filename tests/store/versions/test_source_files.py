"""Every change of the source is seen, and only source is taken."""

import os

import pytest

from gitrepo import git, repo, versions, write
from rearview.errors import VersionError
from rearview.store.versions import source_files


def test_every_kind_of_change_is_seen_by_the_next_save(tmp_path, monkeypatch):
    root = repo(tmp_path)
    store = versions(root)
    monkeypatch.setattr(source_files, "SETTLED", -(10**18))  # trust the cache at once
    first = store.save("r1")
    assert store.save("r1b") == first
    (root / "train.py").unlink()
    write(root, {"train.py/inner.py": "now a folder\n"})
    (root / "lib/net.py").unlink()
    (root / "lib").rmdir()
    write(root, {"lib": "now a file\n"})
    second = store.save("r2")
    assert store.files(second) == {"train.py/inner.py": b"now a folder\n", "lib": b"now a file\n"}
    (root / "lib").chmod(0o755)
    third = store.save("r3")
    assert third != second
    assert store.files(third) == store.files(second)


def test_a_change_within_the_same_tick_of_the_clock_is_not_missed(tmp_path):
    root = repo(tmp_path)
    store = versions(root)
    seen = set()
    for i in range(5):
        facts = (root / "train.py").stat()
        (root / "train.py").write_text(f"x = {i}\n")
        os.utime(root / "train.py", ns=(facts.st_atime_ns, facts.st_mtime_ns))
        seen.add(store.read(store.save(f"r{i}"), "train.py"))
    assert seen == {f"x = {i}\n".encode() for i in range(5)}


def test_a_cache_that_speaks_of_lost_objects_is_given_up(tmp_path, monkeypatch):
    root = repo(tmp_path)
    monkeypatch.setattr(source_files, "SETTLED", -(10**18))
    write(root, {"loose.py": "u\n"})
    store = versions(root)
    version = store.save("r1")
    git(root, "update-ref", "-d", "refs/rearview/runs/r1")
    git(root, "gc", "-q", "--prune=now")
    with pytest.raises(VersionError, match="another copy"):
        store.files(version)
    assert store.save("r2") == version
    assert store.read(version, "loose.py") == b"u\n"
    (root / ".rearview/cache/versions/seen").write_bytes(b"rubbish")
    assert store.save("r3") == version


def test_a_folder_of_data_is_not_swallowed(tmp_path, monkeypatch):
    monkeypatch.setattr(source_files, "MANY", 20)
    write(tmp_path, {f"corpus/{i}.txt": f"{i}" for i in range(30)})
    write(tmp_path, {"train.py": "x\n", "conf/a.yaml": "a: 1\n", "requirements.txt": "torch\n"})
    store = versions(tmp_path)
    assert set(store.files(store.save("r1"))) == {"train.py", "conf/a.yaml", "requirements.txt"}
