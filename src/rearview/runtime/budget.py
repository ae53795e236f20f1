"""Keep the checkpoints of a project within the size that the user set, while a run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from time import monotonic

from rearview.runtime.costs import Costs
from rearview.store.project import Project
from rearview.store.sweep import usage

ROOM = 0.8
"""Share of the budget that is aimed at, so that not every checkpoint has to make room anew."""
PAUSE = 30.0
"""Seconds between two starts: looking through a store takes a processor second or so."""


@dataclass
class Budget:
    """Watches what a project's checkpoints take; has them thinned by another process."""

    project: Project
    run: str
    most: int
    """Bytes; 0 is no bound."""
    used: int = -1
    """Bytes, as far as known; -1 before anybody looked."""
    _child: subprocess.Popen[str] | None = None
    _next: float = 0.0

    def saved(self, costs: Costs) -> None:
        """Take note of a checkpoint that is durable; called on the writer's thread."""
        if not self.most:
            return
        if self.used < 0:
            self.used = usage(self.project)
        else:
            self.used += costs.stored
        if self._settled() and self.used > self.most and monotonic() >= self._next:
            self._start()

    def close(self) -> None:
        """Have what is still too much thinned after the run; nobody waits for it."""
        self._settled()
        if self.most and self.used > self.most:
            self._forget()  # one that is at work does not see what came after it began
            self._start(subprocess.DEVNULL)
        self._forget()

    def _forget(self) -> None:
        if self._child is not None:
            self._child.returncode = 0  # it outlives us, which is no reason for a warning
            self._child = None

    def _settled(self) -> bool:
        """Say whether nobody is thinning now, and learn what the last one left."""
        if self._child is None:
            return True
        if self._child.poll() is None:
            return False
        told = self._child.communicate()[0].strip()
        if told.isdecimal():
            self.used = int(told)
        self._child = None
        return True

    def _start(self, out: int = subprocess.PIPE) -> None:
        self._next = monotonic() + PAUSE
        target = str(int(self.most * ROOM))
        command = ["-P", "-m", "rearview.store.thinning", str(self.project.root), target, self.run]
        env = {k: v for k, v in os.environ.items() if not k.startswith("REARVIEW_")}
        self._child = subprocess.Popen(
            [sys.executable, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
