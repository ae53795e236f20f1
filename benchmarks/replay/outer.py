"""An outer-loop probe on a long run, against running the probed script again.

python benchmarks/replay/outer.py [epochs] [rounds]

Running again is timed over the first 20 epochs and scaled. The bound is what cannot be avoided:
start and set-up of the script, and the restores. Set-up and backfill take turns; medians.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

from common import backfill, command, forget, keep, plain, probe, project

TIMED = 20


def main():
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with project("images") as folder, tempfile.TemporaryDirectory() as other:
        _, recorded = command(folder, "run", "--every", "train.py", str(epochs))
        print(f"{epochs} epochs recorded in {recorded:.0f} s", flush=True)
        probe(folder, "OUTER")
        kept = keep(folder, Path(other))
        setups, fills, restores, bounds = [], [], [], []
        for _ in range(rounds):
            setups.append(plain(folder, "0"))
            replays, took = backfill(folder, "--workers", "1")
            second, _ = backfill(folder, "--workers", "1")
            assert not second
            fills.append(took)
            restores.append(sum(report.restoring for report in replays))
            bounds.append(took / (setups[-1] + restores[-1]))
            forget(folder, kept)
        each = (plain(folder, str(TIMED)) - median(setups)) / TIMED
        again = median(setups) + each * epochs
    took = median(fills)
    print(f"running again: {again:.0f} s ({each:.2f} s per epoch)")
    print(
        f"backfill {took:.2f} s ({min(fills):.2f} to {max(fills):.2f}); start and set-up "
        f"{median(setups):.2f} s ({min(setups):.2f} to {max(setups):.2f}), restores {median(restores):.2f} s"
    )
    print("| faster than running again | over set-up + restores |\n|---|---|")
    spread = f"{median(bounds):.2f} ({min(bounds):.2f} to {max(bounds):.2f})"
    print(f"| {again / took:.0f} times | {spread} |")


if __name__ == "__main__":
    main()
