"""`python -m rearview.checkpointer.supervisor -- command…`: signals go in, exit codes come out.

A shell between the batch system and the program spoils both: it dies of the SIGTERM that was meant
for the program, and 143 takes the place of 85. Put this in front of the shell (or the program):
whatever runs below it gets the signal, and its exit code is the code.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

FORWARDED = ("HUP", "INT", "TERM", "USR1", "USR2", "XCPU", "CONT")
EXIT_CODE = 85

_DYING = 0.1
"""Seconds that a shell gets to die of a signal before what runs below it gets it too."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def forward(
    command: Sequence[str], *, code: int = EXIT_CODE, names: Sequence[str] = FORWARDED
) -> int:
    """Run `command`, pass signals on to everything below it, and return the code to exit with.

    That is the command's own code; 128 + n if a signal n killed it; but `code` if the command was
    killed by a signal passed on while a program below it answered the same signal with `code`.
    """
    libc = _libc()
    if libc is not None:
        # what a killed shell leaves behind becomes our child, so that its code reaches us
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    group = 0
    early: list[int] = []
    passed_on = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal passed_on
        del frame
        if not group:
            early.append(number)
            return
        passed_on = passed_on or number != signal.SIGCONT
        _signal(group, number)

    for name in names:
        signal.signal(getattr(signal, f"SIG{name}"), pass_on)
    child = subprocess.Popen(
        command,
        process_group=0,
        preexec_fn=lambda: _die_with_parent(libc),  # noqa: PLW1509  there are no threads here
    )
    group = child.pid
    for number in early:
        pass_on(number, None)
    own, others = _wait(child.pid), set[int]()
    if passed_on:
        others = _wait_for_others()
    if own >= 0:
        return own
    return code if code in others else 128 - own


def _signal(group: int, number: int) -> None:
    """Send a signal to a command and then to what runs below it.

    A shell that dies of it must not live to see its program end: it would take the program's code
    with it. So it comes first.
    """
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(group, number)
    until = monotonic() + _DYING
    while _state(group)[:1] not in ([], ["Z"]) and monotonic() < until:
        if _members(group) == [group]:
            return
        sleep(0.002)
    for pid in _members(group):
        if pid != group:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _members(group: int) -> list[int]:
    """Return the processes of a group."""
    names = [name for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - half the time
    return [int(name) for name in names if _state(int(name))[2:3] == [str(group)]]


def _state(pid: int) -> list[str]:
    """Return state, parent and group of a process, and more; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _wait_for_others() -> set[int]:
    codes = set()
    with contextlib.suppress(ChildProcessError):
        while True:
            codes.add(_wait(-1))
    return codes


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _die_with_parent(libc: ctypes.CDLL | None) -> None:
    # killed outright, we cannot pass the kill on ourselves
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, run the command, return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rearview.checkpointer.supervisor", description=__doc__
    )
    parser.add_argument(
        "--code", type=int, default=EXIT_CODE, help="the code for 'to be continued'"
    )
    parser.add_argument(
        "--signals", default=",".join(FORWARDED), help="names of the signals to pass on"
    )
    parser.add_argument("command", nargs="+", help="what to run, after --")
    given = parser.parse_args(arguments)
    names = [name.strip().upper().removeprefix("SIG") for name in given.signals.split(",")]
    for name in names:
        if not hasattr(signal, f"SIG{name}"):
            parser.error(f"there is no signal {name!r}; give names such as TERM,USR1")
    try:
        return forward(given.command, code=given.code, names=names)
    except FileNotFoundError:
        parser.exit(127, f"{given.command[0]}: there is no such command\n")
    except PermissionError:
        parser.exit(126, f"{given.command[0]}: this cannot be run\n")


if __name__ == "__main__":
    sys.exit(main())
