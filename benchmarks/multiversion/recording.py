"""What recording a notebook costs: `rearview run x.ipynb` beside `jupyter execute x.ipynb`, in alternation.

    python benchmarks/multiversion/recording.py [--rounds N] [FAMILY…]

The first version of each family of `families.py`, made longer, is executed by both, in a fresh folder each time.
CPU seconds are those of all processes; they vary less than wall seconds on a shared machine.
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
"""How often the cells after the imports are in the notebook: it then takes about 15 s of CPU time."""
NOTEBOOKS = {"two short cells": ["x = 1", "print(x)"]} | {
    name: [versions[0][0], *versions[0][1:] * REPEATS[name]] for name, versions in FAMILIES.items()
}

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("families", nargs="*", default=list(NOTEBOOKS))
    options = parser.parse_args()
    print("| notebook | jupyter, wall s | rearview, wall s | wall | jupyter, CPU s | rearview, CPU s | CPU | load |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in options.families:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.ipynb"
            write_notebook(file, NOTEBOOKS[name])
            for command in COMMANDS.values():
                measure(command, file)  # warms the caches
            rounds = [
                [measure(command, file) for command in COMMANDS.values()]
                for _ in range(options.rounds)
            ]
        plain, ours = zip(*rounds, strict=True)
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
