"""Run a little program under plain Python and under recording, and compare what comes out."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import rearview
from limits import HUNG
from rearview._history import start_run

SOURCE = str(Path(rearview.__file__).parent.parent.resolve())
os.environ["PYTHONPATH"] = SOURCE  # replays start in other folders, where `src` means nothing


@dataclass(frozen=True)
class Ended:
    """How a process ended and what it said."""

    code: int
    out: str
    err: str


def plain(folder, *words):
    """Run `python words…` in a folder."""
    return _run([sys.executable, *words], folder, {**os.environ, "PYTHONHASHSEED": "0"})


def recorded(folder, *words, **settings):
    """Run `rearview run words…` in a folder."""
    here = Path.cwd()
    module = words[0] == "-m"
    target, *args = words[1:] if module else words
    os.environ["REARVIEW_ROOT"] = str(folder)
    os.chdir(folder)
    try:
        how = start_run(target, args, module=module, settings={"every": True, **settings})
    finally:
        os.chdir(here)
        del os.environ["REARVIEW_ROOT"]
    environment = {**how.environment, "PYTHONHASHSEED": "0", "PYTHONPATH": SOURCE}
    return _run(how.command, how.folder, environment)


def run_as_started(how):
    """Run what `begin` or `resume` says how to start."""
    return _run(how.command, how.folder, {**how.environment, "PYTHONPATH": SOURCE})


def _run(command, folder, environment):
    environment.pop("PYTHONSAFEPATH", None)
    environment.pop("PYTHONBREAKPOINT", None)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HUNG,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def write(folder, **files):
    """Put a project into a folder."""
    (folder / ".rearview").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / f"{name.replace('__dot__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
