"""Run a child process, forward signals to it, and return its exit code.

`forward` is the command `python -m rearview.checkpointer.supervisor -- COMMAND…`, for batch jobs that start
the program from a shell script. Without this command, the shell dies of the SIGTERM that is meant for the
program, and the shell's exit code 143 hides the program's exit code 85. With this command, all processes of
the script get the signal, and the job exits with the program's exit code.

`Supervisor` runs a program, as often as its caller likes, and sends a signal to pause when the caller asks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Self

from rearview.model.run import EXIT_PAUSED

FORWARDED = ("HUP", "INT", "TERM", "USR1", "USR2", "XCPU", "CONT")
"""Names of the signals that `forward` passes on."""

_GRACE = 0.1
"""Seconds to wait for a shell to die of a signal before its child processes get the signal too."""
_POLL = 0.2
"""Seconds between checks whether a child has ended, if the kernel has no pidfd to wait for."""
_NEVER = 3600.0
"""Seconds between checks of a child that was asked to pause: long, because its end ends the wait anyway."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def forward(
    command: Sequence[str], *, code: int = EXIT_PAUSED, names: Sequence[str] = FORWARDED
) -> int:
    """Run `command`, forward signals to all its processes, and return the code to exit with.

    The result is the exit code of the command, or 128 + n if signal n killed the command. But if the command was
    killed after a signal was forwarded, and one of its child processes exited with `code`, the result is `code`.
    `names` are the signals to forward.
    """
    libc = _libc()
    if libc is not None:
        # orphans of a killed shell become children of this process, which then gets their exit codes
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    group = 0
    early_signals: list[int] = []
    passed_on = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal passed_on
        del frame
        if not group:
            early_signals.append(number)
            return
        passed_on = passed_on or number != signal.SIGCONT
        _signal(group, number)

    for name in names:
        signal.signal(getattr(signal, f"SIG{name}"), pass_on)
    child = subprocess.Popen(
        command,
        process_group=0,
        preexec_fn=lambda: _signal_when_orphaned(libc, signal.SIGKILL),  # noqa: PLW1509  there are no threads here
    )
    group = child.pid
    for number in early_signals:
        pass_on(number, None)
    own_code, other_codes = _wait(child.pid), set[int]()
    if passed_on:
        other_codes = _wait_for_orphans()
    if own_code >= 0:
        return own_code
    return code if code in other_codes else 128 - own_code


@dataclass(frozen=True, slots=True)
class Child:
    """A program to run: its command line, environment variables and working folder."""

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: str | os.PathLike[str]


class Supervisor:
    """Runs a child process, forwards signals to it, and sends it a signal when it should pause.

    The signal handler only stores the number of the signal, and the methods act on stored signals after each
    wait: Python runs a handler between any two instructions, where an exception may be lost. A signal that comes
    just before a wait would not end the wait; therefore every wait also watches the descriptor to which the
    interpreter writes when a signal comes.
    """

    def __init__(self, signals: tuple[int, ...]) -> None:
        self.signals = signals
        """Signals that ask the child to pause. `run` sends the first of these signals."""
        self.pause_requested = False
        """Whether this process got a signal that asks the child to pause."""
        self._received: list[int] = []
        self._running = False

    def __enter__(self) -> Self:
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._previous_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        handled = {*self.signals}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            handled.add(signal.SIGINT)
        self._handlers = {number: signal.signal(number, self._receive) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def sleep(self, seconds: float) -> None:
        """Wait `seconds`; exit the process if a signal came before the wait or comes during the wait."""
        if not self._received:
            select.select([self._wake_read], [], [], seconds)
        self._drain()
        self.exit_if_requested()

    def exit_if_requested(self) -> None:
        """Exit the process if a signal came. Call this only while no child runs."""
        if self.pause_requested:
            raise SystemExit(EXIT_PAUSED)
        if self._received:
            raise KeyboardInterrupt

    def run(self, child: Child, *, pause: Callable[[], bool], interval: Callable[[], float]) -> int:
        """Run `child` until it ends; return its exit code, or 128 + n if signal n killed it.

        `pause()` is called every `interval()` seconds until it returns True; then the child gets one signal to
        pause.
        """
        # the child inherits the blocked signals, so that a signal during its start is not lost
        self._running = True
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        try:
            process = self._start(child)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        code = self._watch(process, pause, interval)
        self._running = False
        return 128 - code if code < 0 else code

    def _start(self, child: Child) -> subprocess.Popen[bytes]:
        libc = _libc()
        sys.stdout.flush()
        sys.stderr.flush()
        return subprocess.Popen(
            child.command,
            env=child.environment,
            cwd=child.folder,
            # if this supervisor is killed, the child gets the signal to save and exit
            preexec_fn=lambda: _signal_when_orphaned(libc, self.signals[0]),  # noqa: PLW1509  there are no threads here
        )

    def _watch(
        self,
        process: subprocess.Popen[bytes],
        pause: Callable[[], bool],
        interval: Callable[[], float],
    ) -> int:
        with contextlib.ExitStack() as stack:
            pidfd = None
            with contextlib.suppress(OSError, AttributeError):
                pidfd = os.pidfd_open(process.pid)
                stack.callback(os.close, pidfd)
            pausing = False
            self._forward(process)
            while not self._ended(process, pidfd, _NEVER if pausing else interval()):
                self._forward(process)
                if not pausing and pause():
                    process.send_signal(self.signals[0])
                    pausing = True
        return process.wait()

    def _ended(self, process: subprocess.Popen[bytes], pidfd: int | None, seconds: float) -> bool:
        """Wait for the end of a process or for a signal; return True if the process has ended."""
        if pidfd is None:
            select.select([self._wake_read], [], [], min(seconds, _POLL))
        else:
            select.select([self._wake_read, pidfd], [], [], seconds)
        self._drain()
        return process.poll() is not None

    def _receive(self, number: int, _frame: object) -> None:
        repeated = bool(self._received) and not self._running
        self._received.append(number)
        self.pause_requested |= number in self.signals
        # a second signal while no child runs: do not wait for the end of the current wait
        if repeated:
            self.exit_if_requested()

    def _forward(self, process: subprocess.Popen[bytes]) -> None:
        """Send the child the stored signals that ask it to pause."""
        while self._received:
            number = self._received.pop(0)
            # a terminal sends Ctrl-C to the child too, and a second SIGINT would stop the child at once
            if number in self.signals and (number != signal.SIGINT or not sys.stdin.isatty()):
                process.send_signal(number)

    def _drain(self) -> None:
        """Read all bytes from the descriptor that wakes waits, so that only new signals end the next wait."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 512):
                pass


def _signal(group: int, number: int) -> None:
    """Send signal `number` to the leader of the process group `group`, and then to its other processes.

    The leader may be a shell. It must die of the signal before it sees its program end: a shell that sees the end
    exits with a code of its own, which would hide the program's code.
    """
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(group, number)
    until = monotonic() + _GRACE
    while _stat_fields(group)[:1] not in ([], ["Z"]) and monotonic() < until:
        if _members(group) == [group]:
            return
        sleep(0.002)
    for pid in _members(group):
        if pid != group:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _members(group: int) -> list[int]:
    """Return the ids of the processes in the process group `group`."""
    pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]  # noqa: PTH208 - half the time
    return [int(pid) for pid in pids if _stat_fields(int(pid))[2:3] == [str(group)]]


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the process status on, or an empty list if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def _wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _wait_for_orphans() -> set[int]:
    codes = set()
    with contextlib.suppress(ChildProcessError):
        while True:
            codes.add(_wait(-1))
    return codes


def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _signal_when_orphaned(libc: ctypes.CDLL | None, number: int) -> None:
    """Ask the kernel to send signal `number` to this process when its parent dies; for `preexec_fn`."""
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command given in `arguments` (default: the command line) with `forward`; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rearview.checkpointer.supervisor",
        description="Run a command; pass signals on to everything below it, and its exit code back.",
    )
    parser.add_argument(
        "--code", type=int, default=EXIT_PAUSED, help="the code for 'to be continued'"
    )
    parser.add_argument(
        "--signals", default=",".join(FORWARDED), help="names of the signals to pass on"
    )
    parser.add_argument("command", nargs="+", help="what to run, after --")
    options = parser.parse_args(arguments)
    names = [name.strip().upper().removeprefix("SIG") for name in options.signals.split(",")]
    for name in names:
        if not hasattr(signal, f"SIG{name}"):
            parser.error(f"there is no signal {name!r}; give names such as TERM,USR1")
    try:
        return forward(options.command, code=options.code, names=names)
    except FileNotFoundError:
        parser.exit(127, f"{options.command[0]}: there is no such command\n")
    except PermissionError:
        parser.exit(126, f"{options.command[0]}: this cannot be run\n")


if __name__ == "__main__":
    sys.exit(main())
