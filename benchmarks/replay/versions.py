"""A backfill over many versions of a script: it runs through, in bounded memory.

python benchmarks/replay/versions.py [versions] [plain|torch] [rounds]

With `torch`, replays that share their start are compared with such that do not, in turns.
"""

import os
import re
import resource
import shutil
import sys
import time

from common import ENVIRONMENT, SOURCE, command, project

PLAIN = """import random

random.seed(0)
rate = 0.1
weight = 5.0
for epoch in range(20):
    for step in range(50):
        grad = weight * random.gauss(1, 0.1)
        weight -= rate * grad / 50
"""
TORCH = """import numpy as np
import torch
from torch import nn

rate = 0.1
x = torch.tensor(np.random.default_rng().normal(size=(64, 8)), dtype=torch.float32)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=rate / 100)
for epoch in range(20):
    for step in range(10):
        loss = ((net(x)[:, 0] - x.sum(1)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weight = float(loss)
"""


def main():
    versions = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    kind = sys.argv[2] if len(sys.argv) > 2 else "plain"
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    sys.path.insert(0, SOURCE)
    os.environ.update(ENVIRONMENT)
    os.environ["REARVIEW_TRUST"] = "1"  # the copies of the project are our own
    with project("plain") as folder:
        begun = time.perf_counter()
        record(folder, TORCH if kind == "torch" else PLAIN, versions)
        print(f"{versions} versions recorded in {time.perf_counter() - begun:.0f} s")
        ways = ("true", "false") if kind == "torch" else ("true",)
        for number in range(rounds * len(ways)):
            copy = folder.with_name(f"{folder.name}-{number}")
            shutil.copytree(folder, copy, symlinks=True)
            try:
                fill(copy, versions, ways[number % len(ways)])
            finally:
                shutil.rmtree(copy)


def record(folder, text, versions):
    """Record runs of so many versions, with a rename half way, and add a probe to the last."""
    script = folder / "train.py"
    for k in range(versions):
        changed = re.sub("rate = .*", f"rate = {0.1 + k / 1000}", text, count=1)
        if k >= versions // 2:
            changed = re.sub(r"\bweight\b", "w", changed)
        script.write_text(changed)
        command(folder, "run", "train.py")
    name = "w" if versions > 1 else "weight"
    script.write_text("import rearview\n" + changed + f"    rearview.log('asked', {name})\n")


def fill(folder, versions, shared):
    """Fill what is missing, and say what that took."""
    from rearview._history import history

    os.chdir(folder)
    os.environ["REARVIEW_SHARED_START"] = shared
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    predicted = history(folder).plan(["asked"]).plan.seconds
    begun = time.perf_counter()
    report = history(folder).backfill(["asked"])
    took = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = history(folder).table("asked").pandas()
    real = sum(outcome.seconds for outcome in report.outcomes)
    print(f"shared start: {shared}")
    print(f"  backfill {took:.1f} s ({took / versions * 1000:.0f} ms each), {report.proof}")
    print(f"  predicted {predicted:.1f} s of computing, really {real:.1f} s")
    print(
        f"  {len(rows)} rows, {rows['asked'].notna().sum()} filled, {len(report.refusals)} refused"
    )
    print(f"  peak memory of the backfill {after:.0f} MB ({after - before:.0f} MB above its start)")


if __name__ == "__main__":
    main()
