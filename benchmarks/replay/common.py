"""Record a job of `jobs/` in a folder of its own, add a probe, run things, take their time."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import rearview
from rearview._history import history

JOBS = Path(__file__).parent / "jobs"
SOURCE = str(Path(rearview.__file__).parent.parent.resolve())
ENVIRONMENT = {
    **os.environ,
    "PYTHONDONTWRITEBYTECODE": "",  # what pip installs is compiled once, as torch is here
    "PYTHONPATH": SOURCE,
    "OMP_NUM_THREADS": "1",  # a worker per core: two threads each would measure their quarrel
    "OPENBLAS_NUM_THREADS": "1",
}


@contextmanager
def project(job, **changes):
    """Give a folder with the job's script as `train.py`; `changes` replace text in it."""
    with tempfile.TemporaryDirectory(prefix="rearview-") as name:
        text = (JOBS / f"{job}.py").read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        Path(name, "train.py").write_text(text)
        yield Path(name)


def probe(folder, kind):
    """Put the probe `kind` (`OUTER` or `INNER`) into the script; say whether it has a place."""
    script = folder / "train.py"
    text = script.read_text()
    if f"# {kind} " not in text:
        return False
    text = re.sub(rf"# {kind} (.*)", r'rearview.log("asked", \1)', text)
    at = text.index("\n", text.index('"""', 3)) + 1 if text.startswith('"""') else 0
    script.write_text(text[:at] + "import rearview\n" + text[at:])
    return True


def plain(folder, *args):
    """Run a copy of the script with plain Python elsewhere; return the seconds it took."""
    with tempfile.TemporaryDirectory(prefix="rearview-plain-") as other:
        shutil.copy(folder / "train.py", other)
        begun = time.perf_counter()
        command = [sys.executable, "train.py", *args]
        subprocess.run(command, cwd=other, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begun


def command(folder, *words):
    """Run `rearview` with these words; return (its output, the seconds it took)."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "rearview", *words],
        cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"rearview {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout, time.perf_counter() - begun


def backfill(folder, *words):
    """Fill `asked`; return (what its replays reported, the seconds it took from the outside)."""
    before = len(history(folder).show().replays)
    _, seconds = command(folder, "backfill", "asked", "--yes", "--quiet", *words)
    replays = history(folder).show().replays[before:]
    assert all(replay.proved for replay in replays)  # and the command's exit code said so too
    return [replay.report for replay in replays], seconds


def keep(folder, other):
    """Keep the store as it is now in the folder `other`, for `forget`."""
    kept = other / "store"
    shutil.copytree(folder / ".rearview", kept, symlinks=True)
    return kept


def forget(folder, kept):
    """Put the store back as it was, so that the same can be asked again."""
    shutil.rmtree(folder / ".rearview")
    shutil.copytree(kept, folder / ".rearview", symlinks=True)
