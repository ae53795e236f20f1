"""How long `import rearview`, `rearview --version` and `rearview --help` take.

Each is measured against the bare interpreter in the same rounds; the difference of the medians is
what Rearview adds. Results: import_time.md.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 31
SRC = str(Path(__file__).parent.parent / "src")
CASES = {
    "bare interpreter": ["-c", "pass"],
    "import rearview": ["-c", "import rearview"],
    "import click": ["-c", "import click"],
    "rearview --version": ["-m", "rearview", "--version"],
    "rearview --help": ["-m", "rearview", "--help"],
    "rearview run --help": ["-m", "rearview", "run", "--help"],
    "import msgspec": ["-c", "import msgspec"],
    "import rich.console": ["-c", "import rich.console"],
    "import duckdb": ["-c", "import duckdb"],
}


def main():
    env = {**os.environ, "PYTHONPATH": SRC}
    spent = {name: [] for name in CASES}
    for words in CASES.values():  # once for the compiled files and the page cache
        measure(words, env)
    for _ in range(ROUNDS):
        for name, words in CASES.items():
            spent[name].append(measure(words, env))
    bare = statistics.median(cpu for _, cpu in spent["bare interpreter"])
    print("| what | wall, fastest | CPU, median | CPU beyond the bare interpreter |")
    print("|---|---|---|---|")
    for name, times in spent.items():
        wall, cpu = min(wall for wall, _ in times), statistics.median(cpu for _, cpu in times)
        print(
            f"| {name} | {wall * 1e3:.0f} ms | {cpu * 1e3:.0f} ms | {(cpu - bare) * 1e3:.0f} ms |"
        )


def measure(words, env):
    """Return wall and CPU seconds of one start; CPU time bears a machine that others use too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    subprocess.run([sys.executable, *words], env=env, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
