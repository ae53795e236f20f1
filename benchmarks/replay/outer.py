"""An outer-loop probe on a long run, against running the probed script again.

python benchmarks/replay/outer.py [epochs]

The bound is what cannot be avoided: start and set-up of the script, and the restores.
"""

import sys

from common import backfill, command, plain, probe, project


def main():
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with project("long") as folder:
        _, recorded = command(folder, "run", "--every", "train.py", str(epochs))
        setup = min(plain(folder, "0") for _ in range(3))
        probe(folder, "OUTER")
        again = plain(folder, str(epochs))
        replays, took = backfill(folder, "--workers", "1")
        second, _ = backfill(folder, "--workers", "1")
    restoring = sum(one["restoring"] for one in replays)
    bound = setup + restoring
    assert not second
    print(f"{epochs} epochs: recorded in {recorded:.1f} s, run again with the probe {again:.1f} s")
    print(f"backfill {took:.2f} s; start and set-up {setup:.2f} s, restores {restoring:.2f} s")
    print("| faster than running again | over set-up + restores |\n|---|---|")
    print(f"| {again / took:.0f} times | {took / bound:.2f} |")


if __name__ == "__main__":
    main()
