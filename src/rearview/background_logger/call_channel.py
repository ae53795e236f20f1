"""The program's side of a background writer: copies calls into the ring, receives answers and errors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import marshal
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import cloudpickle

from rearview.background_logger import shared_memory_ring
from rearview.background_logger.call_arguments import PLAIN, GpuTensorCopies, encode
from rearview.background_logger.logger_factories import Recipe
from rearview.background_logger.logger_process import (
    ASK,
    CALL,
    FINISH,
    NICE,
    START,
    run_in_fork,
)
from rearview.background_logger.shared_memory_ring import (
    ASLEEP,
    ATTENTION,
    ERRORS,
    HEAD,
    PID,
    SEEN,
    Ring,
)
from rearview.errors import RearviewError, UsageError
from rearview.model.wording import plural

OPEN, CLOSED, DEAD, FORKED, REPLAY, PENDING = range(6)
"""States of a channel; only in the first does a call take the fast path."""
_POLL = 0.001
"""Seconds between looks at a full ring."""
_ORPHANED = 5.0
"""Seconds after which a lock counts as abandoned: an exception was raised while it was being taken."""
CHANNELS: weakref.WeakSet[CallChannel] = weakref.WeakSet()
"""Channels of this process; the program waits for them at its end."""


class WriterError(RearviewError):
    """A background writer failed with an exception that cannot be pickled."""

    slug = "background-writer"


def _close_figure(args: Any, kwargs: Any) -> None:
    """Close a figure in the program, as `SummaryWriter.add_figure` closes its copy in the writer process."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    figures = args[1] if len(args) > 1 else kwargs.get("figure")
    if pyplot is None or not (args[3] if len(args) > 3 else kwargs.get("close", True)):
        return
    for figure in figures if isinstance(figures, list) else [figures]:
        pyplot.close(figure)


_AFTER = {"add_figure": _close_figure}


class CallChannel:
    """The program's side of one background writer."""

    def __init__(self, recipe: Recipe, bound: int) -> None:
        self.recipe = recipe
        self.bound = bound
        self.state = CLOSED
        self.lock = threading.Lock()
        self.errors: deque[tuple[str, bytes | None, str]] = deque()
        self.errors_read = 0
        self.waited = 0.0
        """Seconds that calls waited for room."""
        self.dropped = 0
        self.numbers: dict[tuple[tuple[str, ...], str], int] = {}
        self.unused_numbers = itertools.count()
        self.receiving = threading.RLock()
        """Held while a thread reads the pipe of answers, so that two threads never split a message."""
        self.tokens = itertools.count(1)
        self.answers: dict[int, tuple[str, Any]] = {}
        self.accelerator: GpuTensorCopies | None = None
        self.local: Any = None
        """The writer itself, made in a replay if the program asks it something."""
        self.deferred: list[tuple[bytes, list[Any]]] = []
        self.incoming = b""

    # --- start and end

    def start(self, how: str) -> None:
        """Start the process that owns the writer."""
        blob = b"" if how == "fork" else self._blob()
        self.ring = Ring.create(self.bound)
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.inbox, answers = os.pipe()
        try:
            if how == "fork":
                self._fork(answers)
            else:
                self._spawn(answers)
        finally:
            os.close(answers)
        self.state = OPEN
        CHANNELS.add(self)
        if how == "spawn":
            facts = {
                "path": [str(each) for each in sys.path],
                "argv": list(sys.argv),
                "folder": os.getcwd(),  # noqa: PTH109 - as the program sees it
            }
            self.send(START, (facts, blob), {})

    def _blob(self) -> bytes:
        recipe = self.recipe
        try:
            return bytes(cloudpickle.dumps((recipe.factory, recipe.args, recipe.kwargs)))
        except Exception as exc:
            raise UsageError(
                f"{recipe.name} or its arguments cannot be sent to the writer process: {exc}. Pass a "
                "function that makes the logger, and plain values: "
                'rearview.background(make_logger, "logs").',
                slug="background-arguments",
            ) from exc

    def _facts(self, answers: int) -> dict[str, Any]:
        ring = self.ring
        return {
            "memory": ring.fd,
            "size": ring.size,
            "bound": ring.bound,
            "wake": self.wake,
            "answers": answers,
            "parent": os.getpid(),
            "nice": NICE,
        }

    def _spawn(self, answers: int) -> None:
        """Start a new interpreter; it forks once, so that this process gets no child."""
        facts = json.dumps(self._facts(answers))
        path = json.dumps([each for each in sys.path if each])
        code = (
            f"import sys; sys.path[:0] = [p for p in {path} if p not in sys.path]\n"
            f"from rearview.background_logger.logger_process import main; main({facts})"
        )
        env = dict(os.environ) | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        env.setdefault("MPLBACKEND", "Agg")
        process = subprocess.Popen(  # the interpreter of this program
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=(self.ring.fd, self.wake, answers),
            env=env,
        )
        process.wait()
        if process.returncode:
            raise WriterError(
                f"The writer process could not be started: {sys.executable} ended with code "
                f"{process.returncode}. Its message is on standard error.",
                slug="background-start",
            )

    def _fork(self, answers: int) -> None:
        """Fork this process twice: the second copy owns the writer as it is now."""
        flush = getattr(self.recipe.instance, "flush", None)
        if callable(flush):
            flush()  # otherwise both processes would write the bytes in its buffers
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the user chose "fork"
            child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            if os.fork():
                os._exit(0)
        run_in_fork(self.ring, self.wake, answers, parent, self.recipe.make, unused=self.inbox)

    def close(self, name: str = "", *, wait: bool = True) -> None:
        """Wait until all calls are made, close the writer and end its process; may be called twice."""
        if self.state not in {OPEN, PENDING}:
            return
        self._publish_pending(wait=True)
        token = next(self.tokens)
        self._write(*encode(FINISH + 8 * token, (name,), {}))
        try:
            if wait and self.state == OPEN:
                self._wait_for(token)
        finally:
            if self.state != DEAD:
                self._end(CLOSED)
            if self.recipe.after is not None:
                self.recipe.after()

    def _end(self, state: int) -> None:
        self.state = state
        pid = int(self.ring.header[PID])
        with contextlib.suppress(OSError):
            if pid and state == CLOSED and os.getpid() == 1:
                os.waitpid(pid, 0)  # process 1 inherits the writer process and waits for its end
            elif pid:
                os.waitpid(pid, os.WNOHANG)
        for fd in (self.inbox, self.wake):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.ring.close()

    def forked(self) -> None:
        """Disconnect in a forked child, because the writer belongs to the parent."""
        if self.state in {OPEN, PENDING}:
            self.state = FORKED
            self.lock = threading.Lock()
            self.receiving = threading.RLock()

    # --- calls

    def method(self, path: tuple[str, ...], name: str) -> Callable[..., None]:
        """Return a function that sends calls of one method, as fast as Python allows."""
        number = self.number_of(path, name)
        dumps, frame, kinds, channel = marshal.dumps, _frame, PLAIN.issuperset, self
        take, give, weak = self.lock.acquire, self.lock.release, not shared_memory_ring.ORDERED
        after, seen = _AFTER.get(name), None if path else self.recipe.recording_hook(name)
        if self.state not in {OPEN, PENDING}:

            def refused(_self: Any, *args: Any, **kwargs: Any) -> None:
                channel.send(number, args, kwargs)

            return refused
        ring, header, memory = self.ring, self.ring.header, self.ring.memory

        def call(_self: Any, *args: Any, **kwargs: Any) -> None:
            if (
                channel.state
                or not kinds(map(type, args))
                or (kwargs and not kinds(map(type, kwargs.values())))
            ):
                channel.send(number, args, kwargs)
                if seen is not None:
                    seen((None, *args), kwargs)
                if after is not None:
                    after(args, kwargs)
                return
            data = dumps((number, args, kwargs))
            length = len(data)
            if not take(False):  # another thread, or a call that a signal handler interrupted
                channel._write(data, [])
            else:
                try:
                    place = header[HEAD]
                    end = place + (length + 79 & -64)
                    fits = end < ring.limit
                    if fits:
                        data = frame(end - place, length) + data
                        memory[place + _BASE : place + _BASE16 + length] = data
                        if weak:
                            shared_memory_ring.fence()
                        header[HEAD] = end
                finally:
                    give()
                if not fits:
                    channel._write(data, [])
            if seen is not None:
                seen((None, *args), kwargs)
            if header[ATTENTION]:
                channel.look_at_writer()

        call.__name__ = call.__qualname__ = name
        return call

    def number_of(self, path: tuple[str, ...], name: str) -> int:
        """Return the number by which messages name a method; the writer process gets it before the first such message.

        Another thread sees the number only after it was sent. Two threads that number the same method at
        the same time may give it two numbers, which is harmless.
        """
        key = (path, name)
        index = self.numbers.get(key)
        if index is None:
            index = next(self.unused_numbers)
            if self.state in {OPEN, PENDING}:
                self.send(ASK, ("register", path, name, index), {})
            self.numbers[key] = index
        return CALL + 8 * index

    def send(self, number: int, args: Any, kwargs: Any) -> None:
        """Copy a call with any arguments into the ring; then raise an error of the writer if there is one."""
        if self.state not in {OPEN, PENDING}:
            self._refuse()
            return
        payload, buffers = self._encoded(number, args, kwargs)
        if self.state == PENDING or self._is_on_accelerator(buffers):
            self._keep_pending(payload, buffers)
        else:
            self._write(payload, buffers)
        if self.state == OPEN:
            self.look_at_writer()

    def _encoded(self, number: int, args: Any, kwargs: Any) -> tuple[bytes, list[Any]]:
        try:
            if self.accelerator is None:
                self.accelerator = GpuTensorCopies.when_present()
            if self.accelerator is not None:
                args, kwargs = self.accelerator.stage((args, kwargs))
            return encode(number, args, kwargs)
        except RearviewError:
            raise
        except Exception as exc:
            name = next(
                (".".join((*p, n)) for (p, n), k in self.numbers.items() if CALL + 8 * k == number),
                "a call",
            )
            raise UsageError(
                f"An argument of {name} cannot be copied to the writer process: "
                f"{type(exc).__name__}: {exc}. Pass values that can be pickled.",
                slug="background-arguments",
            ) from exc

    def _is_on_accelerator(self, buffers: list[Any]) -> bool:
        return bool(buffers) and self.accelerator is not None and self.accelerator.is_under_way()

    def _keep_pending(self, payload: bytes, buffers: list[Any]) -> None:
        """Hold a call back until the accelerator copies that it needs are done."""
        assert self.accelerator is not None
        self.accelerator.hold(payload, buffers)
        self.state = PENDING
        self._publish_pending(wait=self.accelerator.nbytes > self.bound)

    def _publish_pending(self, *, wait: bool) -> None:
        if self.state != PENDING or self.accelerator is None:
            return
        for payload, buffers in self.accelerator.finished(wait=wait):
            self._write(payload, buffers)
        if not self.accelerator.is_under_way() and self.state == PENDING:
            self.state = OPEN

    def _write(self, payload: bytes, buffers: list[Any]) -> None:
        """Append a message to the ring; wait while there is no room for it."""
        ring, header = self.ring, self.ring.header
        sizes = [memoryview(each).nbytes for each in buffers]
        places, size = shared_memory_ring.layout(len(payload), sizes)
        if size + shared_memory_ring.GAP > ring.size:
            raise UsageError(
                f"One call has {size} bytes, but the background writer has only {ring.size} bytes of memory. "
                "Log less in one call, or raise the limit on the address space (ulimit -v).",
                slug="background-arguments",
            )
        since = 0.0
        while True:
            if not self._is_alive():
                self._continue_without_writer()
                return
            if not self.lock.acquire(blocking=False):
                if _is_interrupted_call():
                    self.deferred.append((payload, [bytes(memoryview(each)) for each in buffers]))
                    header[ATTENTION] = 1  # the interrupted call publishes it
                    return
                if not self.lock.acquire(timeout=_ORPHANED):
                    with contextlib.suppress(RuntimeError):
                        self.lock.release()
                    continue
            try:
                place = ring.room(size)
                if place is not None:
                    start = place + shared_memory_ring.HEADER
                    ring.memory[start : start + 16 + len(payload)] = (
                        _frame(size, len(payload)) + payload
                    )
                    for at, data in zip(places, buffers, strict=True):
                        shared_memory_ring.copy_into(ring, place + at, data)
                    shared_memory_ring.fence()
                    header[HEAD] = place + size
                    break
            finally:
                self.lock.release()
            since = since or time.monotonic()
            self._awaken()
            time.sleep(_POLL)
        if since:
            self.waited += time.monotonic() - since
        self._awaken()

    def look_at_writer(self) -> None:
        """Wake the writer process if it sleeps; raise an error of the writer if there is one.

        Calls by signal handlers that interrupted another call are published here.
        """
        while self.deferred and self.state in {OPEN, PENDING} and not self.lock.locked():
            self._write(*self.deferred.pop(0))
        header = self.ring.header if self.state in {OPEN, PENDING} else None
        if header is None:
            return
        self._awaken()
        if header[ERRORS] != self.errors_read:
            self.raise_error()
        if not header[ASLEEP]:
            header[ATTENTION] = 0

    def _awaken(self) -> None:
        if self.ring.header[ASLEEP]:
            os.eventfd_write(self.wake, 1)

    # --- questions and answers

    def ask(self, kind: str, path: tuple[str, ...], name: str, *rest: Any, **kwargs: Any) -> Any:
        """Return the writer's answer after it has made all earlier calls; None if its process is gone."""
        if self.state == REPLAY:
            return self._answer_here(kind, path, name, *rest, **kwargs)
        if self.state not in {OPEN, PENDING}:
            self._refuse()
            return ("value", None)
        self._publish_pending(wait=True)
        token = next(self.tokens)
        self._write(*encode(ASK + 8 * token, (kind, path, name, *rest), kwargs))
        return self._wait_for(token)

    def _answer_here(
        self, kind: str, path: tuple[str, ...], name: str, *rest: Any, **kwargs: Any
    ) -> Any:
        if kind in {"flush", "register"}:
            return ("value", None)
        if self.local is None:
            self.local = self.recipe.make()
        target = functools.reduce(getattr, path, self.local)
        value = getattr(target, name)
        if kind == "read":
            return ("method", None) if callable(value) else ("value", value)
        return ("value", value(*rest[0], **kwargs))

    def flush(self) -> None:
        """Wait until all calls so far are made and the writer is flushed; raise the error of a call that failed."""
        self.ask("flush", (), "flush")
        if self.state == OPEN and self.ring.header[ERRORS] != self.errors_read:
            self.raise_error()

    def _wait_for(self, token: int) -> Any:
        while token not in self.answers:
            if self.state not in {OPEN, PENDING}:
                return ("value", None)
            self._awaken()
            if not self._receive(0.05):
                self._continue_without_writer()
                return ("value", None)
        answer = self.answers.pop(token)
        if self.errors or self.ring.header[ERRORS] != self.errors_read:
            self.raise_error()
        if answer[0] == "error":
            raise _exception(answer[1])
        return answer

    def _receive(self, timeout: float) -> bool:
        """Read answers and errors of the writer process; return False if it is gone and none are left."""
        with self.receiving:
            if not select.select([self.inbox], [], [], timeout)[0]:
                return True
            data = os.read(self.inbox, 1 << 16)
            if not data:
                return False
            self.incoming += data
            while len(self.incoming) >= 8:
                length = int.from_bytes(self.incoming[:8], "little")
                if len(self.incoming) < 8 + length:
                    break
                token, answer = pickle.loads(self.incoming[8 : 8 + length])
                self.incoming = self.incoming[8 + length :]
                if token:
                    self.answers[token] = answer
                else:
                    self.errors.append(answer[1])
            return True

    def raise_error(self) -> None:
        """Raise the oldest error of the writer that was not raised yet, in one thread only."""
        with self.receiving:
            exc = self._next_error()
        if exc is not None:
            raise exc

    def _next_error(self) -> BaseException | None:
        count = self.ring.header[ERRORS]
        if count == self.errors_read and not self.errors:
            return None
        while not self.errors and self._receive(1.0):
            pass
        more = count - self.errors_read - 1
        self.errors_read = count
        if not self.errors:
            return None
        first = self.errors.popleft()
        self.errors.clear()
        while select.select([self.inbox], [], [], 0)[0] and self._receive(0):
            self.errors.clear()
        self.ring.header[SEEN] = count
        self.ring.header[ATTENTION] = 0
        exc = _exception(first)
        if more > 0:
            exc.add_note(f"{plural(more, 'more call')} of the writer failed after it.")
        return exc

    # --- a writer that cannot be reached

    def _is_alive(self) -> bool:
        poll = select.poll()
        poll.register(self.inbox, select.POLLIN)
        events = poll.poll(0)
        return not events or not events[0][1] & (select.POLLHUP | select.POLLERR)

    def _continue_without_writer(self) -> None:
        """Continue without the writer process, which is gone; warn once."""
        if self.state == DEAD:
            return
        self._end(DEAD)
        _warn(
            WriterError(
                f"The process that owns the background writer {self.recipe.name} is gone. Training "
                "continues; calls to this writer are dropped from now on, and those that it had not made "
                "yet are lost.",
                slug="background-dead",
            )
        )

    def _refuse(self) -> None:
        if self.state == CLOSED:
            raise UsageError(
                f"The background writer {self.recipe.name} was closed before this call. Close it "
                "after the last call, or make a new one with rearview.background.",
                slug="background-closed",
            )
        self.dropped += 1
        if self.state == FORKED and self.dropped == 1:
            _warn(
                WriterError(
                    f"The background writer {self.recipe.name} belongs to the process that made it, "
                    f"and this is a forked child ({os.getpid()}): its calls are dropped. Make another "
                    "writer in the child.",
                    slug="background-forked",
                )
            )


def _warn(problem: WriterError) -> None:
    """Issue a warning at the line of the program: a failing logger must not end a training."""
    text = f"{problem} (docs/errors.md#{problem.slug})"
    warnings.warn(text, RuntimeWarning, stacklevel=_caller())


_BASE = shared_memory_ring.HEADER
_BASE16 = _BASE + 16
_frame = struct.Struct("<QQ").pack


def _is_interrupted_call() -> bool:
    """Return True if this call was made by a signal handler that interrupted another one."""
    frame: Any = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return frame is not None


def _caller() -> int:
    """Return the stack level of the first caller outside this file, for a warning."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - a warning names the user's line
    while frame is not None and frame.f_code.co_filename == __file__:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level - 1 if frame is None else level


def _exception(described: tuple[str, bytes | None, str]) -> BaseException:
    """Return the exception that the writer raised, with its traceback there as a note."""
    text, blob, lines = described
    exc: BaseException | None = None
    if blob is not None:
        with contextlib.suppress(Exception):
            exc = pickle.loads(blob)
    if not isinstance(exc, Exception):
        last = lines.strip().rsplit("\n", 1)[-1]
        exc = WriterError(
            f"The background writer failed: {last}. Its traceback follows; correct the call."
        )
    where = f" in the call {text}" if text else ""
    exc.add_note(f"Raised by the background writer{where}:\n{lines.rstrip()}")
    return exc
