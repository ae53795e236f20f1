"""What recording a notebook costs: `rearview run x.ipynb` beside `jupyter execute x.ipynb`, in alternation.

    python benchmarks/multiversion/recording.py [--rounds N] [--short | --long] [NOTEBOOK…]

The first version of each family of `families.py` is executed by both, in a fresh folder each time: once with its
cells repeated (some seconds), once with cells that compute longer (about a minute). Two more notebooks have as
little in their cells as possible: 200 tiny cells, and 20 loops of 100 iterations of a fraction of a millisecond.
CPU seconds are those of all processes; they vary less than wall seconds on a shared machine. Run it with
OMP_NUM_THREADS=1: else the numbers of threads of two processes compete for the cores.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from families import FAMILIES, write_notebook

REPEATS = {"preprocessing": 5, "training": 3, "simulation": 10, "analysis": 8}
"""How often the cells after the imports are in a short notebook."""
LONGER = {
    "preprocessing": (24, {"size=(12000, 30)": "size=(24000, 32)"}),
    "training": (1, {"range(12)": "range(240)", "range(2)": "range(40)"}),
    "simulation": (1, {"range(2500)": "range(160000)", "range(400)": "range(40000)"}),
    "analysis": (16, {"1_500_000": "6_000_000"}),
}
"""The same for a long notebook, and what is replaced in the text of its cells."""
GRID, STEP = FAMILIES["simulation"][0][1], FAMILIES["simulation"][0][2]
SHORT = {
    "two short cells": ["x = 1", "print(x)"],
    "200 tiny cells": ["x = 0"] + ["x += 1"] * 198 + ["print(x)"],
    "20 short loops": [
        "import numpy as np",
        GRID,
        STEP,
        *["for t in range(100):\n    grid = step(grid, 0.1)\nprint(grid.mean())"] * 20,
    ],
} | {
    name: [versions[0][0], *versions[0][1:] * REPEATS[name]] for name, versions in FAMILIES.items()
}


def lengthened(cells: list[str], repeats: int, replacements: dict[str, str]) -> list[str]:
    """Return the cells of a notebook that computes longer."""
    text = "\0".join(cells)
    for old, new in replacements.items():
        assert old in text, old
        text = text.replace(old, new)
    first, *others = text.split("\0")
    return [first, *others * repeats]


LONG = {
    f"{name}, long": lengthened(FAMILIES[name][0], *changes) for name, changes in LONGER.items()
}
NOTEBOOKS = SHORT | LONG

COMMANDS = {
    "jupyter execute": [str(Path(sys.executable).with_name("jupyter-execute"))],
    "rearview run": [sys.executable, "-m", "rearview", "run"],
}


def measure(command: list[str], file: Path) -> tuple[float, float]:
    """Return the wall and CPU seconds of a command on a notebook."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / file.name
        copy.write_bytes(file.read_bytes())
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begun = time.perf_counter()
        # as installed packages are: compiled once, not in every process
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run([*command, copy.name], cwd=folder, env=env, check=True, capture_output=True)
        wall = time.perf_counter() - begun
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu


Seconds = list[tuple[float, float]]


def rounds_of(file: Path, rounds: int) -> tuple[Seconds, Seconds]:
    """Return the wall and CPU seconds of both commands in each round; who begins alternates."""
    plain, ours = [list[tuple[float, float]]() for _ in COMMANDS]
    turns = list(zip((plain, ours), COMMANDS.values(), strict=True))
    for _ in range(rounds):
        for column, command in turns:
            column.append(measure(command, file))
        turns.reverse()
    return plain, ours


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="only those of some seconds")
    parser.add_argument("--long", action="store_true", help="only those of about a minute")
    parser.add_argument("notebooks", nargs="*")
    options = parser.parse_args()
    names = options.notebooks or [*LONG] * (not options.short) + [*SHORT] * (not options.long)
    print("| notebook | jupyter, wall s | rearview, wall s | wall | jupyter, CPU s | rearview, CPU s | CPU | load |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.ipynb"
            write_notebook(file, NOTEBOOKS[name])
            if name in SHORT:
                for command in COMMANDS.values():
                    measure(command, file)  # warms the caches
            plain, ours = rounds_of(file, options.rounds)
        row = [name]
        for at in (0, 1):
            a, b = (statistics.median(each[at] for each in column) for column in (plain, ours))
            ratio = statistics.median(
                mine[at] / theirs[at] for theirs, mine in zip(plain, ours, strict=True)
            )
            row += [f"{a:.1f}", f"{b:.1f}", f"{ratio - 1:+.1%}"]
        print("|", " | ".join([*row, f"{os.getloadavg()[0]:.1f}"]), "|", flush=True)


if __name__ == "__main__":
    main()
