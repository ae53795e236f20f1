"""What recording costs: every way on every workload, interleaved, as ratios to plain training.

    python benchmarks/record/bench.py [--workloads adamw25,frozen100] [--ways rearview,torch_save]
                                      [--rounds 3] [--epochs 8] [--threads 2] [--folder /tmp]

One process per measurement; each round goes through plain training and all ways, in an order that
rotates, so that a machine that gets slower or faster hits all alike. Medians over rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def measure(name, way, args):
    env = {
        **os.environ,
        "PYTHONPATH": f"{HERE.parent.parent / 'src'}:{HERE}",
        "OMP_NUM_THREADS": str(args.threads),
    }
    tail = [str(args.epochs), str(args.threads)]
    if way == "plain":
        command = [sys.executable, str(HERE / "train.py"), name, *tail]
    elif way == "hands_free":
        store = Path(args.folder) / "hands-free"
        store.mkdir(parents=True, exist_ok=True)
        env["REARVIEW_ROOT"] = str(store)
        command = [sys.executable, "-m", "rearview", "run", str(HERE / "train.py"), name, *tail]
    else:
        command = [sys.executable, str(HERE / "one.py"), name, way, *tail, args.folder]
    done = subprocess.run(command, env=env, cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:] or ["?"]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def median(rows, key):
    found = [row[key] for row in rows if key in row]
    return statistics.median(found) if found else float("nan")


def main():
    from ways import WAYS
    from workloads import WORKLOADS

    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument("--json", help="also write every measurement to this file")
    args = parser.parse_args()
    ways = ["plain", *args.ways.split(",")]
    everything = []
    print(
        f"threads {args.threads}, epochs {args.epochs}, rounds {args.rounds}, saved after every epoch but the last"
    )
    print(
        f"{'workload':<12} {'way':<18} {'epoch s':>8} {'wall':>8} {'cpu':>8} {'block ms':>9} "
        f"{'saves':>6} {'state MB':>9} {'stored MB':>10} {'restore ms':>11} {'extra MB':>9}"
    )
    for name in args.workloads.split(","):
        rows = {way: [] for way in ways}
        for turn in range(args.rounds):
            order = ways[turn % len(ways) :] + ways[: turn % len(ways)]
            for way in order:
                rows[way].append(measure(name, way, args))
                everything.append({"workload": name, "way": way, "round": turn, **rows[way][-1]})
        for way in ways:
            good = [
                (row, plain)
                for row, plain in zip(rows[way], rows["plain"], strict=True)
                if "wall" in row and "wall" in plain
            ]
            if not good:
                print(f"{name:<12} {way:<18} failed: {rows[way][0].get('error')}")
                continue
            wall = statistics.median(row["wall"] / plain["wall"] - 1 for row, plain in good)
            cpu = statistics.median(row["cpu"] / plain["cpu"] - 1 for row, plain in good)
            extra = median(rows[way], "peak_mb") - median(rows["plain"], "peak_mb")
            print(
                f"{name:<12} {way:<18} {median(rows[way], 'wall') / args.epochs:>8.2f} {wall:>+8.1%} {cpu:>+8.1%} "
                f"{median(rows[way], 'blocking_ms'):>9.1f} {median(rows[way], 'saved'):>6.0f} "
                f"{median(rows[way], 'state_mb'):>9.1f} {median(rows[way], 'stored_mb'):>10.1f} "
                f"{median(rows[way], 'restore_ms'):>11.1f} {extra:>9.0f}",
                flush=True,
            )
    if args.json:
        Path(args.json).write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
