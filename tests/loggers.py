"""Loggers for tests of background writers: they write lines to a file, which tests read."""

import os
import time
from pathlib import Path


class Lines:
    """Writes every call as a line; has no thread, but an open file."""

    def __init__(self, file, wait_for=None):
        self.file = Path(file).open("a")  # noqa: SIM115 - until close
        self.wait_for = wait_for
        self.count = 0
        self.kept = []
        self.table = {}

    def add(self, name, value, step=None):
        while self.wait_for and not Path(self.wait_for).exists():
            time.sleep(0.005)
        self.count += 1
        self.file.write(f"{name} {value} {step}\n")

    def keep(self, value):
        self.kept.append(value)

    def get_kept(self):
        return [value.tolist() for value in self.kept]

    def get_ends(self):
        return [(value[0].item(), value[-1].item()) for value in self.kept]

    def get_types(self):
        return [f"{type(v).__module__}.{type(v).__name__}" for v in self.kept]

    def get_pid(self):
        return os.getpid()

    def fail(self, text):
        raise ValueError(text)

    def fail_oddly(self):
        class OddError(Exception):
            pass

        raise OddError("cannot be pickled")

    def die(self):
        os._exit(3)

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.close()


class Plain:
    """Nothing but plain attributes."""

    def __init__(self, file):
        self.file = str(file)

    def add(self, text):
        with Path(self.file).open("a") as out:
            out.write(f"{text}\n")


def make_lines(file):
    return Lines(file)
