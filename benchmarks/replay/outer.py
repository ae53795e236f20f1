"""An outer-loop probe on a long run, against running the probed script again.

python benchmarks/replay/outer.py [epochs]

Running again is timed over the first 20 epochs and scaled. The bound is what cannot be avoided:
start and set-up of the script, and the restores.
"""

import sys

from common import backfill, command, plain, probe, project

TIMED = 20


def main():
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with project("images") as folder:
        _, recorded = command(folder, "run", "--every", "train.py", str(epochs))
        print(f"{epochs} epochs recorded in {recorded:.0f} s", flush=True)
        setup = min(plain(folder, "0") for _ in range(3))
        probe(folder, "OUTER")
        each = (plain(folder, str(TIMED)) - setup) / TIMED
        again = setup + each * epochs
        replays, took = backfill(folder, "--workers", "1")
        second, _ = backfill(folder, "--workers", "1")
    restoring = sum(one["restoring"] for one in replays)
    assert not second
    print(f"running again: {again:.0f} s ({each:.2f} s per epoch)")
    print(f"backfill {took:.2f} s; start and set-up {setup:.2f} s, restores {restoring:.2f} s")
    print("| faster than running again | over set-up + restores |\n|---|---|")
    print(f"| {again / took:.0f} times | {took / (setup + restoring):.2f} |")


if __name__ == "__main__":
    main()
