"""Real git repositories for tests."""

import hashlib
import os
import subprocess
from pathlib import Path

from rearview.config import Settings
from rearview.store.project import Project
from rearview.store.versions.versions import Versions

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
CLEAN |= {
    f"GIT_{role}_{what}": "t@t" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


def git(folder, *args, **options):
    done = subprocess.run(
        ["git", "-c", "protocol.file.allow=always", *args],
        cwd=folder,
        env=CLEAN,
        capture_output=True,
        text=True,
        check=True,
        **options,
    )
    return done.stdout.strip()


def repo(folder: Path, files=None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    write(folder, files or {"train.py": "x = 1\n", "lib/net.py": "y = 2\n"})
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def write(folder: Path, files) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())


def versions(root: Path, **settings) -> Versions:
    return Versions(Project.create(root), Settings().changed(settings))


def everything(folder: Path, skip=()) -> dict[str, str]:
    """Return a fingerprint of every file below a folder."""
    out = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and not name.startswith(skip):
            out[name] = f"{file.stat().st_mode:o} {hashlib.sha256(file.read_bytes()).hexdigest()}"
    return out
