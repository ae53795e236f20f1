"""Every small program prints, leaves and ends under `rearview run` as it does under `python`, byte for byte.

A program is a file in `small_programs`, or a text archive (`.txtar`) of several, each after a line
`-- name --`. Comment lines of its first file say how it is run:

    # run: main.py a b         what stands after `python`; the file itself, if nothing is said
    # shell: $RUN a.py | head  a whole command line, where $RUN is `python` or `rearview run`
    # before: arrange.py       a script that makes what text cannot hold: links, bytes, permissions
    # env: NAME=value          added to the environment; $HERE is the folder
    # stdin: one\\ntwo\\n        what it can read
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import rearview

PROGRAMS = {path.stem: path for path in Path(__file__).with_name("small_programs").iterdir()}
OURS = re.compile(rb"^rearview: recording .*\n", re.MULTILINE)
"""The one line that we add to what a program prints."""
LIMIT = 120
"""Seconds after which a program that hangs is killed."""


@dataclass(frozen=True)
class Ending:
    """What can be seen of a program from outside."""

    code: int
    out: bytes
    err: bytes
    files: dict[str, object]


def said(path: Path, word: str, default: str = "") -> str:
    match = re.search(rf"^# {word}: (.*)$", path.read_text(), re.MULTILINE)
    return match[1] if match else default


def lay_out(path: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / ".rearview").mkdir(parents=True)
    if path.suffix == ".txtar":
        _, *parts = re.split(r"^-- (.+) --\n", path.read_text(), flags=re.MULTILINE)
        files = dict(zip(parts[::2], parts[1::2], strict=True))
    else:
        files = {path.name: path.read_text()}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        os.utime(folder / name, (1e9, 1e9))  # the bytecode cache holds it


def run(path: Path, folder: Path, how: str) -> Ending:
    lay_out(path, folder)
    kept = ("PYTHON", "REARVIEW", "COV_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(kept)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    env |= {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "RUN": how}
    if before := said(path, "before"):
        subprocess.run([sys.executable, before], cwd=folder, env=env, check=True)
    for word in shlex.split(said(path, "env")):
        name, _, value = word.partition("=")
        env[name] = value.replace("$HERE", str(folder))
    command = said(path, "shell") or f"exec {how} {said(path, 'run', path.name)}"
    stdin = said(path, "stdin").encode().decode("unicode_escape").encode("latin-1")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        input=stdin,
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    left = [file for file in sorted(folder.rglob("*")) if ".rearview" not in file.parts]
    files = {str(file.relative_to(folder)): content(file) for file in left}
    return Ending(done.returncode, OURS.sub(b"", done.stdout), OURS.sub(b"", done.stderr), files)


def content(file: Path) -> object:
    if file.is_symlink():
        return file.readlink()
    return file.read_bytes() if file.is_file() else None


def test_there_are_many_of_them_and_the_command_is_that_of_this_package():
    assert len(PROGRAMS) >= 150
    found = shutil.which("rearview", path=str(Path(sys.executable).parent))
    assert found is not None
    asked = [sys.executable, "-P", "-c", "import rearview; print(rearview.__file__)"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    file = subprocess.run(asked, env=env, capture_output=True, text=True, check=True).stdout
    assert file.strip() == rearview.__file__


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_runs_as_under_plain_python(name, tmp_path):
    path, folder = PROGRAMS[name], tmp_path / "work"
    assert run(path, folder, "rearview run") == run(path, folder, "python")
