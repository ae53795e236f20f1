"""What instrumented loops cost without checkpoints, against plain Python, interleaved.

Each program prints the seconds of its loop by its own clock; the plain and the recorded process take
turns, and the table shows the ratio of medians and the quartiles of the ratios of neighbours.

    python benchmarks/instrument/run.py [rounds]
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import rearview
from rearview._history import start_run

SOURCE = str(Path(rearview.__file__).parent.parent.resolve())

BODY = {
    "step of about 10 ms": """
import time
data = list(range(400_000))
def main():
    begun = time.process_time()
    for epoch in range(4):
        for i in range(50):
            total = sum(map(abs, data))
    print(time.process_time() - begun)
main()
""",
    "10^7 short iterations, first entry": """
import time
def loop(n):
    total = 0
    for i in range(n):
        total += i
    return total
begun = time.process_time()
loop(10_000_000)
print(time.process_time() - begun)
""",
    "10^7 short iterations, second entry": """
import time
def loop(n):
    total = 0
    for i in range(n):
        total += i
    return total
loop(1_000_000)
begun = time.process_time()
loop(10_000_000)
print(time.process_time() - begun)
""",
    "10^7 turns of `while`, first entry": """
import time
def loop(n):
    i = 0
    while i < n:
        i += 1
    return i
begun = time.process_time()
loop(10_000_000)
print(time.process_time() - begun)
""",
    "10^6 entries of a loop of 10": """
import time
def loop(n):
    total = 0
    for i in range(n):
        total += i
    return total
def main():
    for k in range(1_000_000):
        loop(10)
begun = time.process_time()
main()
print(time.process_time() - begun)
""",
    "a generator that yields 10^6 times": """
import time
def numbers(n):
    for i in range(n):
        yield i
begun = time.process_time()
for i in numbers(1_000_000):
    pass
print(time.process_time() - begun)
""",
}


def seconds(command, environment, folder):
    out = subprocess.run(
        command,
        env={**environment, "PYTHONPATH": SOURCE},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(out.stdout.split()[-1])


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ",
        end="",
    )
    print(f"{rounds} rounds")
    print("| loop | plain s | recorded / plain | quartiles |\n|---|---|---|---|")
    for name, text in BODY.items():
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "loop.py"
            script.write_text(text)
            (Path(folder) / ".rearview").mkdir()
            plain, ratios = [], []
            for _ in range(rounds):
                environment = dict(os.environ)
                alone = seconds([sys.executable, str(script)], environment, folder)
                os.chdir(folder)
                how = start_run("loop.py", [], settings={"epsilon": 0})
                beside = seconds(how.command, how.environment, folder)
                os.chdir("/")
                plain.append(alone)
                ratios.append(beside / alone)
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"| {name} | {statistics.median(plain):.3f} | {middle:.3f} | {low:.3f}-{high:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
