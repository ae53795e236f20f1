"""An inner-loop probe on one and on two workers, in turns.

python benchmarks/replay/inner.py [epochs] [rounds]
"""

import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from common import backfill, command, forget, probe, project


def main():
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    print("| round | one worker s | two workers s | ratio |\n|---|---|---|---|")
    ratios = []
    with project("long") as folder, tempfile.TemporaryDirectory() as other:
        command(folder, "run", "--every", "train.py", str(epochs))
        probe(folder, "INNER")
        kept = Path(other, "store")
        shutil.copytree(folder / ".rearview", kept, symlinks=True)
        for k in range(rounds):
            _, one = backfill(folder, "--workers", "1")
            forget(folder, kept)
            _, two = backfill(folder, "--workers", "2")
            forget(folder, kept)
            ratios.append(one / two)
            print(f"| {k + 1} | {one:.1f} | {two:.1f} | {one / two:.2f} |", flush=True)
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
