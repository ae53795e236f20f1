"""Begin the process anew when a checkpoint turns out not to be one to go on from.

A gradient that flows through the boundary is only seen when it flows, in the middle of the program's
own work, and a state that cannot be read back leaves the program neither here nor there. Nothing but
a fresh process helps then; it goes on from a checkpoint less deep in the loops, or from the start.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rearview.errors import RearviewError
from rearview.model import Checkpoint, Control
from rearview.model.segment import AGAIN, LAUNCHER, VARIABLE
from rearview.runtime.leaving import end_children

_OPEN = Path("/proc/self/fd")


def _files() -> set[int]:
    return {int(one.name) for one in _OPEN.iterdir()} if _OPEN.is_dir() else set()


@dataclass(frozen=True)
class Retreat:
    """How this process was started, so that it can be once more."""

    control: Control
    environment: dict[str, str] = field(default_factory=os.environ.copy)
    folder: str = field(default_factory=os.getcwd)
    files: set[int] = field(default_factory=_files)

    def __call__(self, checkpoint: Checkpoint, why: RearviewError) -> None:
        """Go on from a checkpoint less deep in the loops than this one; does not return."""
        depth = len(checkpoint.meta["path"]) - 1
        way = "going on from an earlier one" if depth else "starting over"
        sys.stderr.write(
            f"rearview: the checkpoint at {checkpoint.point} is not one to go on from; {way} ({why})\n"
        )
        sys.stderr.flush()
        self._begin(msgspec.structs.replace(self.control, depth=depth))

    def afresh(self, why: RearviewError) -> None:
        """Set up once more without the files that the run has made; does not return.

        A program that fetches its data only where it is absent has taken another way now.
        """
        sys.stderr.write(
            "rearview: the set-up came out differently, now that files are there which the run made "
            f"itself; setting up again without them ({why})\n"
        )
        sys.stderr.flush()
        self._begin(msgspec.structs.replace(self.control, afresh=True))

    def _begin(self, control: Control) -> None:
        """Replace this process by one that is told `control`."""
        end_children()
        if control.kernel is not None:
            # the front end waits for an answer of this very process: it has to begin anew too
            Path(control.kernel).with_name(AGAIN).write_bytes(msgspec.json.encode(control))
            os.kill(os.getpid(), signal.SIGKILL)
        for number in _files() - self.files:
            try:
                os.set_inheritable(number, False)
            except OSError:
                continue  # it was that of the folder we looked into
        signal.pthread_sigmask(signal.SIG_BLOCK, self.control.signals)
        told = msgspec.json.encode(control).decode()
        os.chdir(self.folder)
        command = (sys.executable, LAUNCHER)
        env = {**self.environment, **self.control.lent, VARIABLE: told}
        os.execve(command[0], command, env)  # noqa: S606 - no shell
