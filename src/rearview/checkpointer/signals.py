"""Stop signals: remember a signal until the program has saved at its next step, then end the process.

`Signals` remembers that a signal came. `leave` ends the process with an exit code that tells the batch system to
start the job again.
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
    """Return True if this process is the kernel of a notebook, which should not exit when a cell stops."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def leave(code: int, number: int = signal.SIGTERM) -> None:
    """End the program with exit code `code`; in a notebook, do what signal `number` does by default.

    In a notebook, SIGINT interrupts the cell and any other signal ends the kernel. If a thread other than the
    main thread calls this, the process ends at once, because `SystemExit` would end only the thread.
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
    """Flush the output and end the process with exit code `code`, even if its main thread is blocked for ever."""
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

    From Python 3.14 on, workers are by default children of a fork server, not of this process: they would not
    notice that this process ended, and would keep its output open for ever.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is None:
        return
    for child in multiprocessing.active_children():
        # in a forked process, the list has workers of its parent too
        if child._parent_pid == os.getpid():
            child.terminate()


DEFAULT = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which batch systems ask a job to stop."""
ABSORBED = tuple(
    getattr(signal, name)
    for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGXCPU")
    if hasattr(signal, name)
)
"""Signals that are ignored while the process saves and exits. SIGQUIT (Ctrl-\\) still ends a save that hangs."""


class SignalsWarning(UserWarning):
    """Warning that Rearview cannot handle a signal, or replaces a handler that it cannot call."""


class Signals:
    """Remembers the first signal of `numbers` that arrives; handlers that were set before still run.

    Use an instance as a context manager or with `start` and `stop`. A process may have several instances, and
    stop them in any order. When a signal comes, the handler that was set before is called. An exception of that
    handler (to exit, for example) is suppressed, because the owner of this instance exits after saving. At a
    second SIGINT the exception is not suppressed, because the user insists; but it is during a save
    (`saving`). After `absorb`, signals have no effect.

    `grace` is a hard deadline: if `settle` has not been called `grace` seconds after the signal, a separate
    thread calls `on_deadline`, even while the main thread is inside native code.
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
        """The first signal that asked the program to stop, or None if none has."""
        return self._requested

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline; None if no signal came, no `grace` is set, or the signal was SIGINT."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def start(self) -> Self:
        """Set the signal handlers and return this instance.

        In a thread other than the main thread, Python can set no handlers: warn unless earlier instances have
        set the handlers of all `numbers`.
        """
        if not self.numbers:
            return self
        self.armed = _HANDLER.add(self)
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
            arguments = (self._arrived, self._settled, self.grace, weakref.WeakMethod(self._expire))
            threading.Thread(
                target=_watch, args=arguments, name="rearview-signals", daemon=True
            ).start()
            weakref.finalize(self, self._arrived.put, None)
        return self

    def stop(self) -> None:
        """Stop remembering signals; the last instance to stop restores the handlers that were set before."""
        self.settle()
        self._arrived.put(None)
        _HANDLER.remove(self)
        self.armed = False

    def rearm(self) -> None:
        """Set Rearview's handlers again if the program replaced them; the program's handlers still run.

        A notebook kernel sets its own SIGINT handler at the start of every cell.
        """
        if self.armed:
            _HANDLER.rearm(self.numbers)

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask the program to stop, as if signal `number` had arrived."""
        if self._requested is None:
            self._requested = signal.Signals(number)
            if self.grace is not None and number != signal.SIGINT:
                self._deadline = self._clock() + self.grace
                self._arrived.put(self._requested)

    def settle(self) -> None:
        """Cancel the deadline, because the program has begun to save and exit."""
        self._settled.set()

    def absorb(self) -> None:
        """Ignore every further signal until the process has ended, or until `clear` or `stop_absorbing`.

        Call this before the last save. A repeated signal (of a batch system, or an impatient user) would
        spoil the save or the exit code.
        """
        _HANDLER.absorb()

    def stop_absorbing(self) -> None:
        """Handle signals again after `absorb`, because the program continues."""
        _HANDLER.absorbing = False

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Suppress exceptions of the program's signal handlers in this block, so that no signal interrupts a save."""
        _HANDLER.saves += 1
        try:
            yield
        finally:
            _HANDLER.saves -= 1

    def clear(self) -> None:
        """Forget the signal that asked the program to stop: only a notebook cell was interrupted."""
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


class _SignalHandler:
    """The process's signal handler, shared by all instances of `Signals`."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.earlier: dict[int, Any] = {}
        self.listeners: dict[int, weakref.WeakSet[Signals]] = {}
        self.calling_earlier = False
        self.pipe: tuple[int, int] | None = None
        self.earlier_fd = -1
        self.handler = self._arrived
        self.absorbing = False
        """Whether signals are ignored, because the process is saving and will exit."""
        self.saves = 0
        """Number of running saves that are not the last save before an exit."""

    def absorb(self) -> None:
        if self.absorbing:
            return
        self.absorbing = True
        if threading.current_thread() is threading.main_thread():
            for number in ABSORBED:
                if signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
                    self.earlier[number] = signal.getsignal(number)
                    signal.signal(number, self.handler)
            # Python resets handlers written in Python before the process ends, but leaves SIG_IGN
            atexit.register(self._ignore)

    def _ignore(self) -> None:
        if self.absorbing and os.getpid() == self.pid:
            for number in ABSORBED:
                if signal.getsignal(number) is self.handler:
                    signal.signal(number, signal.SIG_IGN)

    def add(self, listener: Signals) -> bool:
        self.absorbing = False  # a new listener means that the program continues
        main = threading.current_thread() is threading.main_thread()
        if not main and not all(number in self.earlier for number in listener.numbers):
            return False
        for number in listener.numbers:
            self.listeners.setdefault(number, weakref.WeakSet()).add(listener)
        if main:
            self.rearm(listener.numbers)
            if listener.grace is not None:
                self._listen_in_thread()
        return True

    def remove(self, listener: Signals) -> None:
        for number in listener.numbers:
            self.listeners.get(number, weakref.WeakSet()).discard(listener)
        if self.absorbing or threading.current_thread() is not threading.main_thread():
            return
        for unused_number in [number for number in self.earlier if not self.listeners.get(number)]:
            earlier = self.earlier.pop(unused_number)
            if signal.getsignal(unused_number) is self.handler and earlier is not None:
                signal.signal(unused_number, earlier)

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
        # a child process that native code forked, so that `forked` did not run in it
        if os.getpid() != self.pid:
            signal.signal(number, self.earlier.get(number) or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        # the program's handler, which is called below, may call this handler
        if self.absorbing or self.calling_earlier:
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
            # no listener is left, because every instance was deleted without `stop`: do what the signal does by default
            if earlier == signal.SIG_DFL and not listeners:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.calling_earlier = True
        try:
            earlier(number, frame)
        except BaseException:
            if insists or not listeners:
                raise
        finally:
            self.calling_earlier = False

    def _listen_in_thread(self) -> None:
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
                # SIGINT is left to `_arrived`, which must tell a second SIGINT from the first
                if number != signal.SIGINT:
                    for listener in list(self.listeners.get(number, ())):
                        listener.request(number)
            if self.earlier_fd >= 0:
                with contextlib.suppress(OSError):
                    os.write(self.earlier_fd, data)

    def forked(self) -> None:
        """Restore the program's signal handlers in a forked child process, such as a worker of a data loader."""
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


_HANDLER = _SignalHandler()
os.register_at_fork(after_in_child=_HANDLER.forked)
