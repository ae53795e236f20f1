"""What the site tests share: the end state that must come out, and waiting for it."""

import hashlib
import time
from pathlib import Path

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"


def expected(steps):
    digest = ""
    for step in range(1, steps + 1):
        digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
    return digest


def starts(folder):
    """Return the step at which each execution began."""
    trace = folder / "trace.txt"
    if not trace.exists():
        return []
    return [int(line.split()[1]) for line in trace.read_text().splitlines()]


def until(true, seconds, what):
    """Wait until `true()` is, and return its value; `what()` says what is there instead."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain; {what()}")
        time.sleep(0.2)
    return found
