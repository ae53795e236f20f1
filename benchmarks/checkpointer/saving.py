"""What a save costs, beside torch.save and the published Checkpointer.

    python benchmarks/checkpointer/saving.py [--mb 256] [--rounds 7] [--published FOLDER]

Ways are interleaved in every round; medians and ratios to `torch.save + fsync + rename` are shown.
`--published` takes a folder that holds the package `checkpointer` of the published class (it is
measured, not part of this repository).
"""

import argparse
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rearview import Checkpointer

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"


def state(megabytes):
    generator = torch.Generator().manual_seed(0)
    count = max(1, megabytes // 16)
    return {f"layer{n}.weight": torch.randn(2048, 2048, generator=generator) for n in range(count)}


def plain(folder, value):
    torch.save(value, folder / "plain.pt.part")
    (folder / "plain.pt.part").replace(folder / "plain.pt")


def durable(folder, value):
    with (folder / "durable.pt.part").open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    (folder / "durable.pt.part").replace(folder / "durable.pt")


def in_place(folder, value):
    torch.save(value, folder / "in_place.pt")


def ours(folder, **options):
    one = Checkpointer(
        folder / "ours.pt", lambda path, v: torch.save(v, path), torch.load, signals=(), **options
    )
    return lambda _, value: one.checkpoint(value), one


def in_background(folder):
    one = Checkpointer(
        folder / "background.pt",
        lambda path, v: torch.save(v, path),
        torch.load,
        checkpoint_every=1,
        asynchronous=True,
        signals=(),
    )
    return lambda _, value: one.step(value), one


def published(folder, where):
    sys.path.insert(0, str(where))
    from checkpointer.checkpointer import Checkpointer as Published

    held = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    one = Published(folder / "published.pt", lambda path, v: torch.save(v, path), torch.load)
    for number, before in held.items():
        signal.signal(number, before)
    return lambda _, value: one.checkpoint(value)


def saving(arguments, folder):
    value = state(arguments.mb)
    ours_call, _ = ours(folder, checkpoint_every=None)
    shared_call, _ = ours(folder / "s", checkpoint_transfer_target=folder / "far" / "x")
    background_call, background = in_background(folder)
    ways = {
        "torch.save in place": in_place,
        "torch.save + rename": plain,
        "torch.save + fsync + rename": durable,
        "Checkpointer": ours_call,
        "Checkpointer, to a shared folder too": shared_call,
        "Checkpointer, in the background (blocks)": background_call,
    }
    if arguments.published:
        ways["published class"] = published(folder, arguments.published)
    taken = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, save in ways.items():
            os.sync()
            begun = time.perf_counter()
            save(folder, value)
            if number:  # the first round warms up
                taken[name].append(time.perf_counter() - begun)
            background.wait()
    base = statistics.median(taken["torch.save + fsync + rename"])
    print(f"\n{arguments.mb} MB, {arguments.rounds} rounds, interleaved\n")
    print("| way | median s | min s | ratio |\n|---|---|---|---|")
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"| {name} | {median:.3f} | {min(times):.3f} | {median / base:.2f} |")


LOOP = """
import sys, time
from pathlib import Path
import torch
from rearview import Checkpointer
value = {{str(n): torch.ones(2048, 2048) for n in range({count})}}
one = Checkpointer(Path("ck.pt"), lambda p, v: torch.save(v, p), torch.load, checkpoint_every=None)
print("ready", flush=True)
while True:
    time.sleep({step})
    one.step(value)
"""


def leaving(arguments, folder):
    """Measure from the signal to the save and to the exit, beside the length of a step."""
    saved, left = [], []
    for _ in range(arguments.rounds):
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP.format(count=max(1, arguments.mb // 16), step=0.2)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(SRC)},
            stdout=subprocess.PIPE,
        )
        process.stdout.readline()
        time.sleep(0.35)
        begun = time.time()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 85
        left.append(time.time() - begun)
        newest = max((folder / "ck.pt.saves").glob("*/manifest.json"))
        saved.append(newest.stat().st_mtime - begun)
    print(
        f"\nsteps of 0.2 s; signal to durable save: median {statistics.median(saved):.2f} s; "
        f"to exit 85: {statistics.median(left):.2f} s"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--published", type=Path)
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, ")
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    folder = Path(tempfile.mkdtemp(prefix="saving-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    try:
        (folder / "s").mkdir()
        saving(arguments, folder)
        leaving(arguments, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
