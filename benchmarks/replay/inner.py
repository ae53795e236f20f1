"""An inner-loop probe on one and on two workers, in turns.

python benchmarks/replay/inner.py [epochs] [rounds] [job]

Beside it what the machine allows: the script run plainly, alone and twice at once. Two processes
share memory, caches and the host, so even those take longer than one.
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from common import backfill, command, forget, keep, plain, probe, project


def together(folder, epochs):
    """Run the script twice at once; return the seconds until both are done."""
    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(lambda _: plain(folder, str(epochs)), range(2)))


def main():
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    job = sys.argv[3] if len(sys.argv) > 3 else "images"
    print(
        "| round | one worker s | two workers s | ratio | plain: twice at once, ratio to two in a row |"
    )
    print("|---|---|---|---|---|")
    ratios, allowed = [], []
    with project(job) as folder, tempfile.TemporaryDirectory() as other:
        command(folder, "run", "--every", "train.py", str(epochs))
        probe(folder, "INNER")
        kept = keep(folder, Path(other))
        for k in range(rounds):
            _, one = backfill(folder, "--workers", "1")
            forget(folder, kept)
            _, two = backfill(folder, "--workers", "2")
            forget(folder, kept)
            half = max(1, epochs // 2)
            allowed.append(2 * plain(folder, str(half)) / together(folder, half))
            ratios.append(one / two)
            print(
                f"| {k + 1} | {one:.1f} | {two:.1f} | {ratios[-1]:.2f} | {allowed[-1]:.2f} |",
                flush=True,
            )
    print(f"median {median(ratios):.2f}, and {median(allowed):.2f} for plain training")


if __name__ == "__main__":
    main()
