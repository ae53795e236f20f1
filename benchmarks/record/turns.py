"""Run programs in turns of a fraction of a second, so that a machine whose speed drifts hits all alike.

While one runs the others are stopped, threads and children included. Their clocks go on, for
everything they measure alike, so ratios inside a program keep. What a program took is the
length of its own turns.
"""

import os
import signal
import subprocess
import tempfile
import time
from typing import NamedTuple

TURN = 0.2
"""Seconds: far shorter than an epoch, far longer than it takes to warm a cache."""


class Ended(NamedTuple):
    """A program that has ended."""

    code: int
    output: str
    error: str
    turns: list[tuple[float, float]]
    """When it ran, by `time.perf_counter`, which all processes of a machine share."""

    def within(self, begin, end):
        """Return the seconds it ran between these times."""
        return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.turns)


class _Program:
    def __init__(self, command, env, cwd):
        self.out, self.err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - kept
        self.process = subprocess.Popen(
            command, env=env, cwd=cwd, stdout=self.out, stderr=self.err, start_new_session=True
        )
        self.signal(signal.SIGSTOP)
        self.turns = []

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def turn(self, seconds):
        """Let it run for so long; return whether it has ended."""
        begun = time.perf_counter()
        self.signal(signal.SIGCONT)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGSTOP)
        self.turns.append((begun, time.perf_counter()))
        return self.process.returncode is not None

    def ended(self):
        texts = []
        for file in (self.out, self.err):
            file.seek(0)
            texts.append(file.read())
            file.close()
        return Ended(self.process.returncode, *texts, self.turns)


def together(programs, longest, turn=TURN):
    """Run (command, env, cwd) each in turns; return what became of each, None if it took `longest`.

    With turns as long as the programs, they run one after the other.
    """
    running = [_Program(*each) for each in programs]
    left = list(running)
    begun = time.monotonic()
    while left and time.monotonic() - begun < longest:
        left = [each for each in left if not each.turn(turn)]
    for each in left:
        each.signal(signal.SIGKILL)
        each.process.wait()
    return [None if each in left else each.ended() for each in running]
