"""A backfill over versions whose set-up dominates: set-up shared, imports alone shared, and plain runs, in turns.

python benchmarks/replay/setup.py [versions] [rounds] [rows]
"""

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ENVIRONMENT, SOURCE, command, forget, keep, project

SCRIPT = """import csv
import random
import numpy as np

random.seed(0)
np.random.seed(0)


def load(path):
    with open(path, newline="") as file:
        return np.array([[float(cell) for cell in row] for row in csv.reader(file)])


table = load("table.csv")
table = (table - table.mean(0)) / table.std(0)
order = np.random.permutation(len(table))
x, y = table[order, :-1], table[order, -1]
rate = 0.1
weights = np.zeros(x.shape[1])
for epoch in range(5):
    error = x @ weights - y
    weights -= rate * x.T @ error / len(x)
    loss = float((error**2).mean())
    print("said", repr(loss))
"""


def main():
    versions, rounds, rows = (
        int(sys.argv[k]) if len(sys.argv) > k else default
        for k, default in ((1, 8), (2, 3), (3, 200_000))
    )
    sys.path.insert(0, SOURCE)
    os.environ.update(ENVIRONMENT, REARVIEW_TRUST="1")  # the store is put back between rounds
    with project("plain") as folder:
        source = random.Random(0)
        with (folder / "table.csv").open("w") as file:
            for _ in range(rows):
                file.write(",".join(f"{source.gauss(0, 1):.6f}" for _ in range(9)) + "\n")
        plain = record(folder, versions)
        print(
            f"{versions} versions; running all of them plainly, one after the other: {plain:.1f} s"
        )
        with tempfile.TemporaryDirectory() as other:
            kept = keep(folder, Path(other))
            for number in range(rounds):
                took = {}
                for kind in ("set-up", "imports")[:: 1 if number % 2 else -1]:
                    forget(folder, kept)
                    took[kind] = fill(folder, versions, kind)
                print(f"  ratio {took['imports'] / took['set-up']:.2f}")


def record(folder, versions):
    """Record the versions, add a probe to the newest; return the seconds of plain runs of all."""
    script, seconds = folder / "train.py", 0.0
    for k in range(versions):
        text = re.sub("rate = .*", f"rate = {0.05 + k / 100}", SCRIPT, count=1)
        script.write_text(text)
        command(folder, "run", "--every", "train.py")
        begun = time.perf_counter()
        subprocess.run(
            [sys.executable, "train.py"], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        seconds += time.perf_counter() - begun
    script.write_text("import rearview\n" + text + "    rearview.log('asked', loss)\n")
    return seconds


def fill(folder, versions, kind):
    """Fill in this process; return the seconds. With `imports`, only leading imports are shared."""
    from rearview._history import history
    from rearview.backfill import setup_sharing

    setup_sharing.WORTH_SHARING = 0.3 if kind == "set-up" else float("inf")
    begun = time.perf_counter()
    report = history(folder).backfill(["asked"], workers=2)
    took = time.perf_counter() - begun
    assert report.proved, report.proof
    print(f"  shared: {kind:8}{took:6.1f} s ({took / versions:.2f} s each), {report.proof}")
    return took


if __name__ == "__main__":
    main()
