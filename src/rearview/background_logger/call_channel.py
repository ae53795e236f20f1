"""The program's side of a background logger: copy calls into shared memory, and receive answers and errors."""

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
    ERRORS_READ,
    HEAD,
    PID,
    Ring,
)
from rearview.errors import RearviewError, UsageError
from rearview.model.wording import plural

OPEN, CLOSED, DEAD, FORKED, REPLAY, PENDING = range(6)
"""Values of `CallChannel.state`: calls are sent; the logger was closed; the logger process is gone; this process is a
forked child; this process is a replay, in which calls do nothing; calls wait for copies of GPU tensors. `OPEN` must be
0, because `CallChannel.method` tests `if channel.state`."""
_POLL_SECONDS = 0.001
"""Seconds between checks whether a full ring has room again."""
_ABANDONED_SECONDS = 5.0
"""Seconds after which a lock is released by force: an exception (Ctrl-C) has probably interrupted its owner."""
CHANNELS: weakref.WeakSet[CallChannel] = weakref.WeakSet()
"""All channels of this process; when the program ends, it closes them."""


class WriterError(RearviewError):
    """Raised or shown if a logger fails with an exception that cannot be pickled, or the logger process is gone."""

    slug = "background-writer"


def _close_figure(args: Any, kwargs: Any) -> None:
    """Close matplotlib figures in the program as `SummaryWriter.add_figure` would, given the call's arguments."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    figures = args[1] if len(args) > 1 else kwargs.get("figure")
    if pyplot is None or not (args[3] if len(args) > 3 else kwargs.get("close", True)):
        return
    for figure in figures if isinstance(figures, list) else [figures]:
        pyplot.close(figure)


_AFTER_CALL = {"add_figure": _close_figure}
"""Name of a logger's method -> function to call in the program with the arguments of each call."""


class CallChannel:
    """The connection of the program to the logger process of one logger."""

    def __init__(self, recipe: Recipe, bound: int) -> None:
        self.recipe = recipe
        self.bound = bound
        self.state = CLOSED
        self.lock = threading.Lock()
        self.errors: deque[tuple[str, bytes | None, str]] = deque()
        self.errors_read = 0
        """Value of `ERRORS` in the ring's header when an error of the logger was last raised here."""
        self.waited = 0.0
        """Total seconds for which calls waited for room in the ring."""
        self.dropped = 0
        """Number of calls that were ignored: in a replay, in a forked child, or because the logger process is gone."""
        self.numbers: dict[tuple[tuple[str, ...], str], int] = {}
        """(attribute path from the logger, name of a method) -> number of the method in messages."""
        self.unused_numbers = itertools.count()
        self.receiving = threading.RLock()
        """Lock held while a thread reads the pipe of answers, so that two threads never split a message."""
        self.tokens = itertools.count(1)
        self.answers: dict[int, tuple[str, Any]] = {}
        """Number of a question -> its answer, once it has arrived."""
        self.gpu_copies: GpuTensorCopies | None = None
        self.replay_logger: Any = None
        """In a replay: the logger, made in this process when the program first asks it for a value; else None."""
        self.deferred: list[tuple[bytes, list[Any]]] = []
        """(payload, buffers) of calls that signal handlers made in the middle of another call; they are sent later."""
        self.incoming = b""
        """Bytes of an answer of which the rest has not arrived yet."""

    # --- start and end

    def start(self, how: str) -> None:
        """Start the logger process as a new interpreter (`how` is "spawn") or as a fork of this process ("fork")."""
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

    def _process_facts(self, answers: int) -> dict[str, Any]:
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
        """Start a new interpreter, whose fork becomes the logger process, so that it is no child of the program."""
        facts = json.dumps(self._process_facts(answers))
        path = json.dumps([each for each in sys.path if each])
        code = (
            f"import sys; sys.path[:0] = [p for p in {path} if p not in sys.path]\n"
            f"from rearview.background_logger.logger_process import main; main({facts})"
        )
        env = dict(os.environ) | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        env.setdefault("MPLBACKEND", "Agg")
        process = subprocess.Popen(
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
        """Fork this process twice: the second fork becomes the logger process, with the logger as it is now."""
        flush = getattr(self.recipe.instance, "flush", None)
        if callable(flush):
            flush()  # otherwise both processes would write the logger's buffered data
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # a warning about threads: the user has chosen "fork"
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
        """Let the logger process make all calls, close the logger by its method `name`, and end.

        Wait for that unless `wait` is False. Do nothing if the channel is closed already.
        """
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
                self._disconnect(CLOSED)
            if self.recipe.after_close is not None:
                self.recipe.after_close()

    def _disconnect(self, state: int) -> None:
        self.state = state
        pid = int(self.ring.header[PID])
        with contextlib.suppress(OSError):
            if pid and state == CLOSED and os.getpid() == 1:
                os.waitpid(pid, 0)  # process 1 (of a container) is the parent of the logger process
            elif pid:
                os.waitpid(pid, os.WNOHANG)
        for fd in (self.inbox, self.wake):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.ring.close()

    def disconnect_in_child(self) -> None:
        """In a forked child of the program, send no calls any more, because the logger belongs to the parent."""
        if self.state in {OPEN, PENDING}:
            self.state = FORKED
            self.lock = threading.Lock()
            self.receiving = threading.RLock()

    # --- calls

    def method(self, attribute_path: tuple[str, ...], name: str) -> Callable[..., None]:
        """Return a function that sends calls of the method `name`, with as little work per call as possible.

        `attribute_path` leads from the logger to the object with the method.
        """
        number = self.number_of(attribute_path, name)
        dumps, frame, all_plain, channel = marshal.dumps, _frame, PLAIN.issuperset, self
        acquire, release = self.lock.acquire, self.lock.release
        needs_fence = not shared_memory_ring.ORDERED
        after_call = _AFTER_CALL.get(name)
        record_call = None if attribute_path else self.recipe.recording_hook(name)
        if self.state not in {OPEN, PENDING}:

            def reject(_self: Any, *args: Any, **kwargs: Any) -> None:
                channel.send(number, args, kwargs)

            return reject
        ring, header, memory = self.ring, self.ring.header, self.ring.memory

        def call(_self: Any, *args: Any, **kwargs: Any) -> None:
            if (
                channel.state
                or not all_plain(map(type, args))
                or (kwargs and not all_plain(map(type, kwargs.values())))
            ):
                channel.send(number, args, kwargs)
                if record_call is not None:
                    record_call((None, *args), kwargs)
                if after_call is not None:
                    after_call(args, kwargs)
                return
            data = dumps((number, args, kwargs))
            length = len(data)
            if not acquire(False):
                # another thread has the lock, or this call is made by a signal handler during another call
                channel._write(data, [])
            else:
                try:
                    offset = header[HEAD]
                    end = offset + (length + 79 & -64)
                    fits = end < ring.limit
                    if fits:
                        data = frame(end - offset, length) + data
                        memory[offset + _BASE : offset + _BASE16 + length] = data
                        if needs_fence:
                            shared_memory_ring.fence()
                        header[HEAD] = end
                finally:
                    release()
                if not fits:
                    channel._write(data, [])
            if record_call is not None:
                record_call((None, *args), kwargs)
            if header[ATTENTION]:
                channel.check_logger_process()

        call.__name__ = call.__qualname__ = name
        return call

    def number_of(self, attribute_path: tuple[str, ...], name: str) -> int:
        """Return the number of messages that call the method `name`; tell it to the logger process at first use.

        Other threads see the number only after it was sent. Two threads may give the same method two numbers, which
        is harmless.
        """
        key = (attribute_path, name)
        index = self.numbers.get(key)
        if index is None:
            index = next(self.unused_numbers)
            if self.state in {OPEN, PENDING}:
                self.send(ASK, ("register", attribute_path, name, index), {})
            self.numbers[key] = index
        return CALL + 8 * index

    def send(self, number: int, args: Any, kwargs: Any) -> None:
        """Send a call with any arguments as message `number`; then raise an error if the logger has reported one."""
        if self.state not in {OPEN, PENDING}:
            self._reject_call()
            return
        payload, buffers = self._encoded(number, args, kwargs)
        if self.state == PENDING or self._waits_for_gpu(buffers):
            self._keep_pending(payload, buffers)
        else:
            self._write(payload, buffers)
        if self.state == OPEN:
            self.check_logger_process()

    def _encoded(self, number: int, args: Any, kwargs: Any) -> tuple[bytes, list[Any]]:
        try:
            if self.gpu_copies is None:
                self.gpu_copies = GpuTensorCopies.when_present()
            if self.gpu_copies is not None:
                args, kwargs = self.gpu_copies.stage((args, kwargs))
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

    def _waits_for_gpu(self, buffers: list[Any]) -> bool:
        return bool(buffers) and self.gpu_copies is not None and self.gpu_copies.is_under_way()

    def _keep_pending(self, payload: bytes, buffers: list[Any]) -> None:
        """Keep an encoded call until the copies of its GPU tensors are done; wait if too much memory is in use."""
        assert self.gpu_copies is not None
        self.gpu_copies.hold(payload, buffers)
        self.state = PENDING
        self._publish_pending(wait=self.gpu_copies.nbytes > self.bound)

    def _publish_pending(self, *, wait: bool) -> None:
        if self.state != PENDING or self.gpu_copies is None:
            return
        for payload, buffers in self.gpu_copies.finished(wait=wait):
            self._write(payload, buffers)
        if not self.gpu_copies.is_under_way() and self.state == PENDING:
            self.state = OPEN

    def _write(self, payload: bytes, buffers: list[Any]) -> None:
        """Append a message to the ring; wait while the ring has no room for it."""
        ring, header = self.ring, self.ring.header
        sizes = [memoryview(each).nbytes for each in buffers]
        offsets, size = shared_memory_ring.layout(len(payload), sizes)
        if size + shared_memory_ring.GAP > ring.size:
            raise UsageError(
                f"One call has {size} bytes, but the background writer has only {ring.size} bytes of memory. "
                "Log less in one call, or raise the limit on the address space (ulimit -v).",
                slug="background-arguments",
            )
        wait_start = 0.0
        while True:
            if not self._is_alive():
                self._continue_without_logger()
                return
            if not self.lock.acquire(blocking=False):
                if _is_interrupted_call():
                    self.deferred.append((payload, [bytes(memoryview(each)) for each in buffers]))
                    header[ATTENTION] = 1  # the interrupted call will send this call
                    return
                if not self.lock.acquire(timeout=_ABANDONED_SECONDS):
                    with contextlib.suppress(RuntimeError):
                        self.lock.release()
                    continue
            try:
                offset = ring.find_room(size)
                if offset is not None:
                    start = offset + shared_memory_ring.HEADER
                    ring.memory[start : start + 16 + len(payload)] = (
                        _frame(size, len(payload)) + payload
                    )
                    for buffer_offset, data in zip(offsets, buffers, strict=True):
                        shared_memory_ring.copy_into(ring, offset + buffer_offset, data)
                    shared_memory_ring.fence()
                    header[HEAD] = offset + size
                    break
            finally:
                self.lock.release()
            wait_start = wait_start or time.monotonic()
            self._wake_process()
            time.sleep(_POLL_SECONDS)
        if wait_start:
            self.waited += time.monotonic() - wait_start
        self._wake_process()

    def check_logger_process(self) -> None:
        """Send calls made by signal handlers, wake the logger process if it sleeps, and raise an error that it sent."""
        while self.deferred and self.state in {OPEN, PENDING} and not self.lock.locked():
            self._write(*self.deferred.pop(0))
        header = self.ring.header if self.state in {OPEN, PENDING} else None
        if header is None:
            return
        self._wake_process()
        if header[ERRORS] != self.errors_read:
            self.raise_error()
        if not header[ASLEEP]:
            header[ATTENTION] = 0

    def _wake_process(self) -> None:
        if self.ring.header[ASLEEP]:
            os.eventfd_write(self.wake, 1)

    # --- questions and answers

    def ask(
        self, kind: str, attribute_path: tuple[str, ...], name: str, *arguments: Any, **kwargs: Any
    ) -> Any:
        """Ask the logger process a question and return its answer as (kind, value); it first makes all earlier calls.

        `kind` is the question: `read` the attribute `name`, `call` the method `name` with `arguments`, list `items`, or
        `flush`. The answer is ("value", None) if the logger process is gone.
        """
        if self.state == REPLAY:
            return self._answer_in_replay(kind, attribute_path, name, *arguments, **kwargs)
        if self.state not in {OPEN, PENDING}:
            self._reject_call()
            return ("value", None)
        self._publish_pending(wait=True)
        token = next(self.tokens)
        self._write(*encode(ASK + 8 * token, (kind, attribute_path, name, *arguments), kwargs))
        return self._wait_for(token)

    def _answer_in_replay(
        self, kind: str, attribute_path: tuple[str, ...], name: str, *arguments: Any, **kwargs: Any
    ) -> Any:
        if kind in {"flush", "register"}:
            return ("value", None)
        if self.replay_logger is None:
            self.replay_logger = self.recipe.make()
        target = functools.reduce(getattr, attribute_path, self.replay_logger)
        value = getattr(target, name)
        if kind == "read":
            return ("method", None) if callable(value) else ("value", value)
        return ("value", value(*arguments[0], **kwargs))

    def flush(self) -> None:
        """Wait until all calls so far are made and the logger is flushed; raise the exception of a failed call."""
        self.ask("flush", (), "flush")
        if self.state == OPEN and self.ring.header[ERRORS] != self.errors_read:
            self.raise_error()

    def _wait_for(self, token: int) -> Any:
        while token not in self.answers:
            if self.state not in {OPEN, PENDING}:
                return ("value", None)
            self._wake_process()
            if not self._receive(0.05):
                self._continue_without_logger()
                return ("value", None)
        answer = self.answers.pop(token)
        if self.errors or self.ring.header[ERRORS] != self.errors_read:
            self.raise_error()
        if answer[0] == "error":
            raise _exception(answer[1])
        return answer

    def _receive(self, timeout: float) -> bool:
        """Read answers and errors for at most `timeout` seconds; return False if the logger process is gone."""
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
        """Raise the oldest exception of the logger that was not raised yet; do nothing if there is none."""
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
        later_errors = count - self.errors_read - 1
        self.errors_read = count
        if not self.errors:
            return None
        first = self.errors.popleft()
        self.errors.clear()
        while select.select([self.inbox], [], [], 0)[0] and self._receive(0):
            self.errors.clear()
        self.ring.header[ERRORS_READ] = count
        self.ring.header[ATTENTION] = 0
        exc = _exception(first)
        if later_errors > 0:
            exc.add_note(f"{plural(later_errors, 'more call')} of the writer failed after it.")
        return exc

    # --- without a logger process

    def _is_alive(self) -> bool:
        poll = select.poll()
        poll.register(self.inbox, select.POLLIN)
        events = poll.poll(0)
        return not events or not events[0][1] & (select.POLLHUP | select.POLLERR)

    def _continue_without_logger(self) -> None:
        """Disconnect, because the logger process is gone, and warn once."""
        if self.state == DEAD:
            return
        self._disconnect(DEAD)
        _warn(
            WriterError(
                f"The process that owns the background writer {self.recipe.name} is gone. Training "
                "continues; calls to this writer are dropped from now on, and those that it had not made "
                "yet are lost.",
                slug="background-dead",
            )
        )

    def _reject_call(self) -> None:
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
    """Issue `problem` as a warning at the user's line: a failing logger must not end a training."""
    text = f"{problem} (docs/errors.md#{problem.slug})"
    warnings.warn(text, RuntimeWarning, stacklevel=_caller())


_BASE = shared_memory_ring.HEADER
_BASE16 = _BASE + 16
_frame = struct.Struct("<QQ").pack


def _is_interrupted_call() -> bool:
    """Return True if the present call was made by a signal handler that interrupted another call of this module."""
    frame: Any = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back
    return frame is not None


def _caller() -> int:
    """Return the `stacklevel` with which a warning shows the line of the first caller outside this file."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - a warning names the user's line
    while frame is not None and frame.f_code.co_filename == __file__:
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    return level - 1 if frame is None else level


def _exception(described: tuple[str, bytes | None, str]) -> BaseException:
    """Return the exception that `described` contains, with its traceback in the logger process as a note.

    Return a WriterError in its place if it cannot be unpickled here.
    """
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
