"""What recording costs: every way on every workload, interleaved, as ratios to plain training.

    python benchmarks/record/bench.py [--threads 2] [--output FILE] [--json FILE] [--rounds 3]
        [--workloads adamw25,frozen100] [--ways hands_free,torch_save] [--epochs 6] [--keep-memory]
        [--tiny]

Each way runs beside plain training of its own, in turns of a fifth of a second (`turns.py`), so that
a machine that gets slower or faster hits both alike; ratios are taken within such a pair, medians
over rounds. Plain training gets the pages that the way gets: huge ones beside a recorded program, which
Rearview starts with huge pages. `hands_free_typed` is the exception: plain training as users type it. Hands-free training is measured in every round, the others, whose overhead is
large, in the first `--peer-rounds`.
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
from turns import TURN, together  # noqa: E402 - our neighbour

HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Gives plain training the pages that a recorded program gets."""
OURS = {
    "hands_free": HUGE,
    "hands_free_typed": {},
    "hands_free_small": {"REARVIEW_HUGE_PAGES": "0"},
    "hands_free_every": {**HUGE, "REARVIEW_EVERY": "1"},
}
"""Recorded ways, with the environment of the recorded program and of plain training beside it."""
LONGEST = 300
"""Seconds after which a measurement is given up."""
SCRIPT = ("train.py", "workloads.py")
STEADY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""Keeps freed memory with the process (`--keep-memory`). How much the C library gives back and
faults in anew is a matter of where its heap begins: the same program differs by a tenth from one start
to the next. Without it, pairs scatter more, and what recording does to the allocator is seen too."""


def environment(args, **more):
    return {
        **os.environ,
        "PYTHONPATH": str((HERE.parent.parent / "src").resolve()),
        "OMP_NUM_THREADS": str(args.threads),
        "FLORDB": args.flordb,
        **(STEADY if args.keep_memory else {}),
        **more,
    }


def said(output):
    """Return what the last line of a measurement's output says."""
    return next(json.loads(line) for line in reversed(output.splitlines()) if line[:1] == "{")


def result(ended):
    """Return what a program measured, its times by its own turns, or its error."""
    if ended is None:
        return {"error": f"not done after {LONGEST} s"}
    if ended.code:
        return {"error": (ended.error.strip().splitlines() or ["?"])[-1]}
    row = said(ended.output)
    begin, end = row.pop("span")
    row["wall"] = ended.within(begin, end)
    if "whole" in row:
        row["whole"] = ended.within(*row["whole"])
    row["stretch"] = (end - begin) / row["wall"]
    return row


def recorded(place, env):
    """Return what Rearview says of the run in the folder `place`."""
    command = [sys.executable, str(HERE / "recorded.py"), str(place)]
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, check=True)
    return said(done.stdout)


def pair(name, way, args):
    """Measure plain training and `way` in turns; return both."""
    tail = [str(args.epochs), str(args.threads), str(args.part)]
    env = environment(args, **OURS.get(way, {}))
    place = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        if way in OURS:  # the unmodified script, in a project folder of its own
            for file in SCRIPT:
                shutil.copy(HERE / file, place / file)
            command = [sys.executable, "-m", "rearview", "run", "train.py", name, *tail]
        else:
            command = [sys.executable, str(HERE / "one.py"), name, way, *tail, str(place)]
        plain = [sys.executable, str(HERE / "train.py"), name, *tail]
        both = together([(plain, env, HERE), (command, env, place)], LONGEST, args.turn)
        base, row = map(result, both)
        if way in OURS and "error" not in row:
            row |= recorded(place, env)
        if "blocking_ms" in row:  # by a clock that went on between the turns
            row["blocking_ms"] /= row["stretch"]
        return base, row
    finally:
        shutil.rmtree(place, ignore_errors=True)


def rounds(name, ways, args):
    """Yield (round, way, plain training beside it, measurement) of one workload."""
    for turn in range(args.rounds):
        for way in ways:
            if way == "hands_free" or turn < args.peer_rounds:
                yield turn, way, *pair(name, way, args)


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
    parser.add_argument(
        "--turn", type=float, default=TURN, help="seconds; 1000: one after the other"
    )
    parser.add_argument("--keep-memory", action="store_true", help="have malloc keep freed memory")
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
    found, began = [], time.monotonic()
    for name in args.workloads.split(","):
        for turn, way, base, row in rounds(name, args.ways.split(","), args):
            found.append({"workload": name, "way": way, "round": turn, "plain": base, **row})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    text = report(found, args, time.monotonic() - began)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
