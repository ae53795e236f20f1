"""What a question about a script of a few seconds costs, beside running the probed script again.

python benchmarks/replay/small.py [rounds] [job…]

Both take turns; CPU seconds (all processes together) and wall seconds, medians and ratios. Imports are the
program's own, in a process that does nothing else; "over" is what a backfill takes besides running again.
With the job `beside`, the script stands beside 20,000 files, one of 4 GB (sparse) and one of 1 GB.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from common import ENVIRONMENT, probe, project

SHORT = {
    "plain": "pass",
    "numpy_net": "import numpy",
    "forest": "import numpy, sklearn.ensemble",
    "mlp": "import torch",
    "beside": "import numpy",
}
"""Jobs, and what their programs import."""


def measured(folder, *command):
    """Run a command; return (CPU seconds of it and its children, wall seconds, output)."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**ENVIRONMENT, "REARVIEW_TRUST": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, wall, done.stderr


@contextmanager
def job(name):
    """Give a folder with the script of a job."""
    with project("numpy_net" if name == "beside" else name) as folder:
        if name == "beside":
            fill(folder)
        yield folder


def fill(folder):
    """Put 20,000 files and two big ones beside the script, all of them old."""
    for k in range(20_000):
        file = folder / "images" / f"{k // 1000:02}" / f"{k}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\x89PNG\0" + os.urandom(200))
    with (folder / "sparse.bin").open("wb") as file:
        file.truncate(4 << 30)
    with (folder / "data.bin").open("wb") as file:
        for _ in range(1024):
            file.write(b"\0" * (1 << 20))
    for path in (*folder.rglob("*"), folder / "images"):
        os.utime(path, (1e9, 1e9))


def main():
    words = sys.argv[1:]
    rounds = int(words.pop(0)) if words and words[0].isdigit() else 3
    rearview = (sys.executable, "-m", "rearview")
    print("CPU seconds (wall seconds); over: CPU of the backfill less that of running again")
    print("| job | asked | imports | recording | running again | backfill | ratio | over | plan |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in words or SHORT:
        for kind in ("OUTER", "INNER"):
            with job(name) as folder, tempfile.TemporaryDirectory() as other:
                recorded = measured(folder, *rearview, "run", "train.py")
                if not probe(folder, kind):
                    continue
                shutil.copytree(folder / ".rearview", Path(other, "store"), symlinks=True)
                figures = {"imports": [], "again": [], "backfill": []}
                for _ in range(rounds):
                    plain = Path(other, "plain")
                    plain.mkdir(exist_ok=True)
                    shutil.copy(folder / "train.py", plain)
                    figures["imports"].append(measured(plain, sys.executable, "-c", SHORT[name]))
                    figures["again"].append(measured(plain, sys.executable, "train.py"))
                    filled = measured(folder, *rearview, "backfill", "asked", "--yes")
                    figures["backfill"].append(filled)
                    shutil.rmtree(folder / ".rearview")
                    shutil.copytree(Path(other, "store"), folder / ".rearview", symlinks=True)
            row(name, kind, recorded, figures, "again" if "again from" in filled[2] else "restores")


def row(name, kind, recorded, figures, plan):
    """Print one line of the table."""
    middle = {
        what: tuple(median(one[k] for one in taken) for k in (0, 1))
        for what, taken in figures.items()
    }
    cells = [middle["imports"], recorded[:2], middle["again"], middle["backfill"]]
    ratio = middle["backfill"][0] / middle["again"][0]
    over = middle["backfill"][0] - middle["again"][0]
    told = " | ".join(f"{cpu:.2f} ({wall:.1f})" for cpu, wall in cells)
    print(f"| {name} | {kind.lower()} | {told} | {ratio:.2f} | {over:+.2f} | {plan} |", flush=True)


if __name__ == "__main__":
    main()
