"""Notice stop signals without acting on them, so that the program can save at its next step; and exit.

`Signals` remembers that a signal came. `leave` ends the process with an exit code that tells the batch system to
start it again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from types import FrameType
from typing import Any, NoReturn, Self


def in_notebook() -> bool:
    """Return True in the kernel of a notebook, which must outlive a cell."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def leave(code: int, number: int = signal.SIGTERM) -> None:
    """End the program with `code`; in a notebook, only interrupt the cell, as the signal would.

    In any thread except the main thread, an exception would only end that thread, so this flushes the
    buffers and ends the process at once.
    """
    if threading.current_thread() is not threading.main_thread():
        leave_at_once(code)
    if in_notebook():
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    sys.exit(code)


def leave_at_once(code: int) -> NoReturn:
    """End the process with `code` without unwinding: its main thread may be blocked for ever."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    logging.shutdown()
    end_children()
    os._exit(code)


def end_children() -> None:
    """End the multiprocessing workers of this process, as Python does when it exits normally.

    Workers of a fork server, the default from Python 3.14 on, are not its children: they would not notice
    its end, and would keep its output open for ever.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:
        return
    for child in multiprocessing.active_children():
        if child._parent_pid == os.getpid():  # not a worker that the parent started before a fork
            child.terminate()


DEFAULT = (signal.SIGTERM, signal.SIGUSR1)
ABSORBED = tuple(
    getattr(signal, name)
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if hasattr(signal, name)
)
"""Signals that are ignored while the process saves and exits. SIGQUIT (Ctrl-\\) is not among them: it ends
a save that hangs."""


class SignalsWarning(UserWarning):
    """Signals cannot be noticed in this process."""


class Signals:
    """Remembers the first of `numbers` that arrives; handlers that were set before still run.

    Use it as a context manager or with `start` and `stop`. Any number may be in use at once, in any
    order of stopping. An earlier handler is called when the signal comes; an exception that it raises
    (to exit, for example) is suppressed, because the owner of this object exits after it has saved.
    A second SIGINT raises at once: the user insists. During a save (`saving`) it is only remembered,
    and after `absorb` signals have no effect.

    `grace` is a hard deadline in seconds: if `settle` has not been called by then, a separate thread
    calls `on_deadline`, even while the main thread is inside native code.
    """

    def __init__(
        self,
        numbers: Iterable[int] = DEFAULT,
        *,
        grace: float | None = None,
        on_deadline: Callable[[signal.Signals], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.numbers = tuple(signal.Signals(number) for number in numbers)
        self.grace = grace
        self.armed = False
        self._on_deadline = on_deadline
        self._clock = clock
        self._requested: signal.Signals | None = None
        self._deadline: float | None = None
        self._arrived: SimpleQueue[signal.Signals | None] = SimpleQueue()
        self._settled = threading.Event()

    @property
    def requested(self) -> signal.Signals | None:
        """The signal that asked the program to stop, or None."""
        return self._requested

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline; None if no signal came or there is no deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def start(self) -> Self:
        """Start to notice signals. Outside the main thread, only signals that are already handled; else warn."""
        if not self.numbers:
            return self
        self.armed = _TRAP.add(self)
        if not self.armed:
            names = ", ".join(number.name for number in self.numbers)
            warnings.warn(
                f"{names} will not be noticed: signals can be handled in the main thread only, "
                f"and this is {threading.current_thread().name}. Saving by interval continues. Create "
                "a Checkpointer or Signals in the main thread first.",
                SignalsWarning,
                stacklevel=3,
            )
        elif self.grace is not None and self._on_deadline is not None:
            facts = (self._arrived, self._settled, self.grace, weakref.WeakMethod(self._expire))
            threading.Thread(
                target=_watch, args=facts, name="rearview-signals", daemon=True
            ).start()
            weakref.finalize(self, self._arrived.put, None)
        return self

    def stop(self) -> None:
        """Stop noticing signals; the last one to stop restores the earlier handlers."""
        self.settle()
        self._arrived.put(None)
        _TRAP.remove(self)
        self.armed = False

    def rearm(self) -> None:
        """Install the handlers again if the program has replaced them; they then call the program's handler.

        A notebook kernel sets its own SIGINT handler at the start of every cell.
        """
        if self.armed:
            _TRAP.rearm(self.numbers)

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask the program to stop, as if `number` had arrived."""
        if self._requested is None:
            self._requested = signal.Signals(number)
            if self.grace is not None and number != signal.SIGINT:
                self._deadline = self._clock() + self.grace
                self._arrived.put(self._requested)

    def settle(self) -> None:
        """Cancel the deadline: the program acts on the request."""
        self._settled.set()

    def absorb(self) -> None:
        """Ignore every further signal until the process has ended, or until `clear`.

        The program saves and exits. A repeated signal (of a batch system, or an impatient user) would only
        spoil the save or the exit code.
        """
        _TRAP.absorb()

    def stop_absorbing(self) -> None:
        """Stop ignoring signals: the program continues."""
        _TRAP.absorbing = False

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Hold back exceptions of earlier handlers, so that no signal interrupts a save."""
        _TRAP.saves += 1
        try:
            yield
        finally:
            _TRAP.saves -= 1

    def clear(self) -> None:
        """Forget the request: the program continues (a notebook cell was interrupted)."""
        self.stop_absorbing()
        self._requested = self._deadline = None
        self._settled.clear()

    def _expire(self, number: signal.Signals) -> None:
        if self._requested is not None and self._on_deadline is not None:
            self._on_deadline(number)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _watch(
    arrived: SimpleQueue[signal.Signals | None],
    settled: threading.Event,
    grace: float,
    expire: weakref.WeakMethod[Callable[[signal.Signals], None]],
) -> None:
    while (number := arrived.get()) is not None:
        if not settled.wait(grace) and (call := expire()) is not None:
            call(number)


class _Trap:
    """The one handler per signal of this process, for any number of `Signals`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.earlier: dict[int, Any] = {}
        self.listeners: dict[int, weakref.WeakSet[Signals]] = {}
        self.inside = False
        self.pipe: tuple[int, int] | None = None
        self.earlier_fd = -1
        self.handler = self._arrived
        self.absorbing = False
        """Whether the process saves and exits, and ignores signals."""
        self.saves = 0
        """Number of saves in progress after which the program continues."""

    def absorb(self) -> None:
        if self.absorbing:
            return
        self.absorbing = True
        if threading.current_thread() is threading.main_thread():
            for number in ABSORBED:
                if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
                    self.earlier[number] = signal.getsignal(number)
                    signal.signal(number, self.handler)
            # Python removes its own handlers before the process has ended, but not this one
            atexit.register(self._ignore)

    def _ignore(self) -> None:
        if self.absorbing and os.getpid() == self.pid:
            for number in ABSORBED:
                if signal.getsignal(number) is self.handler:
                    signal.signal(number, signal.SIG_IGN)

    def add(self, listener: Signals) -> bool:
        self.absorbing = False  # the program has not exited after all
        main = threading.current_thread() is threading.main_thread()
        if not main and not all(number in self.earlier for number in listener.numbers):
            return False
        for number in listener.numbers:
            self.listeners.setdefault(number, weakref.WeakSet()).add(listener)
        if main:
            self.rearm(listener.numbers)
            if listener.grace is not None:
                self._listen_at_once()
        return True

    def remove(self, listener: Signals) -> None:
        for number in listener.numbers:
            self.listeners.get(number, weakref.WeakSet()).discard(listener)
        if self.absorbing or threading.current_thread() is not threading.main_thread():
            return
        for free in [number for number in self.earlier if not self.listeners.get(number)]:
            earlier = self.earlier.pop(free)
            if signal.getsignal(free) is self.handler and earlier is not None:
                signal.signal(free, earlier)

    def rearm(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            current = signal.getsignal(number)
            if current is self.handler:
                continue
            if threading.current_thread() is not threading.main_thread():
                return
            if current is None:
                warnings.warn(
                    f"{signal.Signals(number).name} has a handler set by native code "
                    "(faulthandler?), which Python cannot call; it is replaced.",
                    SignalsWarning,
                    stacklevel=4,
                )
            self.earlier[number] = current
            signal.signal(number, self.handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.pid:  # a forked child that the hook below did not reach
            signal.signal(number, self.earlier.get(number) or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.absorbing or self.inside:  # inside: an earlier handler calls this one again
            return
        listeners = list(self.listeners.get(number, ()))
        insists = (
            number == signal.SIGINT
            and not self.saves
            and any(listener.requested == signal.SIGINT for listener in listeners)
        )
        for listener in listeners:
            listener.request(number)
        earlier = self.earlier.get(number)
        if not callable(earlier):
            if earlier == signal.SIG_DFL and not listeners:  # all were dropped without `stop`
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.inside = True
        try:
            earlier(number, frame)
        except BaseException:
            if insists or not listeners:
                raise
        finally:
            self.inside = False

    def _listen_at_once(self) -> None:
        """Watch for signals in a thread, so that a deadline works while the main thread is blocked."""
        if self.pipe is not None:
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        self.pipe = (read, write)
        self.earlier_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(
            target=self._listen, args=(read,), name="rearview-signals", daemon=True
        ).start()

    def _listen(self, read: int) -> None:
        while data := os.read(read, 64):
            for number in data:
                # SIGINT goes through the handler, which counts the second one
                if number != signal.SIGINT:
                    for listener in list(self.listeners.get(number, ())):
                        listener.request(number)
            if self.earlier_fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self.earlier_fd, data)

    def forked(self) -> None:
        """Restore the earlier handlers in a forked child, such as a data loader's worker."""
        if self.pipe is not None:
            signal.set_wakeup_fd(-1)
            for fd in self.pipe:
                os.close(fd)
        for number, earlier in self.earlier.items():
            if signal.getsignal(number) is self.handler:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)
        self.pid = os.getpid()
        self.absorbing, self.saves = False, 0
        self.earlier, self.listeners, self.pipe, self.earlier_fd = {}, {}, None, -1


_TRAP = _Trap()
os.register_at_fork(after_in_child=_TRAP.forked)
