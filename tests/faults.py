"""A disk that fails, or a process that dies, at a chosen system call."""

import errno
import os

CALLS = (
    "open",
    "pwrite",
    "write",
    "fsync",
    "ftruncate",
    "replace",
    "rename",
    "mkdir",
    "utime",
    "unlink",
)


class Faults:
    """Counts calls that change the disk; from call `at` on they fail, `times` times.

    With `die` the process ends there instead, as if killed.
    """

    def __init__(self, monkeypatch, *, at=None, times=1, error=errno.ENOSPC, die=False):
        self.count = 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        self.at, self.times, self.error, self.die = at, times, error, die
        self.failed = []

    def _wrap(self, name, real):
        def call(*args, **kwargs):
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                return real(*args, **kwargs)
            self.count += 1
            if self.at is not None and self.at <= self.count < self.at + self.times:
                if self.die:
                    os._exit(9)
                self.failed.append(name)
                raise OSError(self.error, os.strerror(self.error))
            return real(*args, **kwargs)

        return call
