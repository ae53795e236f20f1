"""What recording costs: every way on every workload, interleaved, as ratios to plain training.

    python benchmarks/record/bench.py [--threads 2] [--output FILE] [--json FILE] [--rounds 3]
        [--workloads adamw25,frozen100] [--ways hands_free,torch_save] [--epochs 6] [--tiny]

One process per measurement. Each round goes through plain training and the ways, in an order that
rotates, so that a machine that gets slower or faster hits all alike; ratios are taken within a
round, medians over rounds. Plain and hands-free training are measured in every round, the others,
whose overhead is large, in the first `--peer-rounds`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
OURS = {"hands_free": {}, "hands_free_every": {"REARVIEW_EVERY": "1"}}
LONGEST = 300
"""Seconds after which a measurement is given up."""
SCRIPT = ("train.py", "workloads.py")


def environment(args, **more):
    return {
        **os.environ,
        "PYTHONPATH": str((HERE.parent.parent / "src").resolve()),
        "OMP_NUM_THREADS": str(args.threads),
        "FLORDB": args.flordb,
        **more,
    }


def call(command, env, cwd):
    """Run `command`; return what its last line says, or its error."""
    try:
        done = subprocess.run(
            command, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LONGEST} s"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{") and not done.returncode:
            return json.loads(line)
    return {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}


def hands_free(name, way, tail, args):
    """The unmodified script under `rearview run`, in a project folder of its own."""
    place = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        for file in SCRIPT:
            shutil.copy(HERE / file, place / file)
        env = environment(args, **OURS[way])
        run = [sys.executable, "-m", "rearview", "run", "train.py", name, *tail]
        found = call(run, env, place)
        if "error" in found:
            return found
        return found | call([sys.executable, str(HERE / "recorded.py"), str(place)], env, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def measure(name, way, args):
    tail = [str(args.epochs), str(args.threads), str(args.part)]
    if way in OURS:
        return hands_free(name, way, tail, args)
    if way == "plain":
        return call([sys.executable, str(HERE / "train.py"), name, *tail], environment(args), HERE)
    command = [sys.executable, str(HERE / "one.py"), name, way, *tail, args.folder]
    return call(command, environment(args), HERE)


def rounds(name, ways, args):
    """Yield (round, way, measurement) of one workload."""
    for turn in range(args.rounds):
        often = [way for way in ways if way in ("plain", "hands_free") or turn < args.peer_rounds]
        shift = turn % len(often)
        for way in often[shift:] + often[:shift]:
            yield turn, way, measure(name, way, args)


def arguments():
    from ways import WAYS
    from workloads import WORKLOADS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--ways", default=",".join([*OURS, *WAYS]))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-rounds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to save")
    parser.add_argument("--flordb", default=os.environ.get("FLORDB", ""), help="folder it is in")
    parser.add_argument("--tiny", action="store_true", help="only see that every way works")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    args.part = 0.05 if args.tiny else 1.0
    if args.tiny:
        args.epochs, args.rounds = 2, 1
    return args


def main():
    from tables import report

    args = arguments()
    ways = ["plain", *args.ways.split(",")]
    found, began = [], time.monotonic()
    for name in args.workloads.split(","):
        for turn, way, row in rounds(name, ways, args):
            found.append({"workload": name, "way": way, "round": turn, **row})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    text = report(found, args, time.monotonic() - began)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
