"""Claim: keeping the version of a run takes under 100 ms on a repository of 5,000 files.

    PYTHONPATH=src python benchmarks/versions/run.py [files]

Peers, interleaved in the same repository: `git stash create` (which needs a commit and leaves out
untracked files) and `git add -A` with `git write-tree` on an index of its own, begun anew.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rearview.config import Settings
from rearview.store.project import Project
from rearview.store.versions.versions import Versions

FILES = int(sys.argv[1]) if len(sys.argv) > 1 else 5_000
ROUNDS = 15


def git(root: Path, *args: str, **env: str) -> None:
    who = {f"GIT_{r}_{w}": "b@b" for r in ("AUTHOR", "COMMITTER") for w in ("NAME", "EMAIL")}
    argv = ["git", *args]
    subprocess.run(argv, cwd=root, env=os.environ | who | env, check=True, capture_output=True)


def build(root: Path) -> None:
    for i in range(FILES):
        file = root / f"pkg{i % 50}/mod{i % 7}/file{i}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"value = {i}\n" * 40)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "all")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        build(root)
        project = Project.create(root)
        begun = time.perf_counter()
        Versions(project, Settings()).save("first")
        first = time.perf_counter() - begun
        time.sleep(1.5)  # until file times are old enough to be trusted
        Versions(project, Settings()).save("warm")
        times: dict[str, list[float]] = {
            "rearview": [],
            "stash create": [],
            "add -A, own index": [],
        }
        for i in range(ROUNDS):
            (root / "pkg1/mod1/file1.py").write_text(f"value = {i}, 'changed'\n")
            index = str(root / f".rearview/cache/bench{i}")
            for way, act in {
                "rearview": lambda i=i: Versions(project, Settings()).save(f"r{i}"),
                "stash create": lambda: git(root, "stash", "create"),
                "add -A, own index": lambda index=index: (
                    git(root, "add", "-A", GIT_INDEX_FILE=index),
                    git(root, "write-tree", GIT_INDEX_FILE=index),
                ),
            }.items():
                begun = time.perf_counter()
                act()
                times[way].append(time.perf_counter() - begun)
        print(
            f"{FILES} files, one changed, {ROUNDS} rounds, {platform.machine()}, {os.cpu_count()} cores"
        )
        print(f"| {'way':20} | median ms | worst ms | ratio |")
        base = statistics.median(times["rearview"])
        for way, seen in times.items():
            mid = statistics.median(seen)
            print(f"| {way:20} | {mid * 1e3:9.1f} | {max(seen) * 1e3:8.1f} | {mid / base:5.2f} |")
        print(f"first version of the project: {first * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
