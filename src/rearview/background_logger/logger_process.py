"""The logger process: it constructs the logger, makes the calls of the program in order, and closes the logger.

The process ends when the program closes the logger, or after the program has ended in any way. Before it ends, it
makes every call that the program has copied into the shared memory.
"""

from __future__ import annotations

import atexit
import contextlib
import marshal
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from rearview.background_logger import shared_memory_ring
from rearview.background_logger.call_arguments import decode, is_plain
from rearview.background_logger.shared_memory_ring import (
    ASLEEP,
    ATTENTION,
    ERRORS,
    ERRORS_READ,
    HEAD,
    JUMP,
    PID,
    TAIL,
    Ring,
)

NICE = 10
"""Number added to the niceness of the logger process, so that training has priority."""
POLL_SECONDS = 0.004
"""Seconds between checks for new messages in the ring while calls arrive."""
IDLE_SECONDS = 0.25
"""Seconds without a call after which the logger process sleeps until the program wakes it."""
LONGEST_SLEEP = 0.5
"""Seconds after which the sleeping logger process checks the ring even if it was not woken."""
MOST_UNREAD = 4
"""Largest number of errors sent that the program has not read yet; further errors are only counted."""
LONGEST_TRACEBACK = 8_000

START, CALL, SET, ASK, FINISH = range(5)
"""Kinds of messages: construct the logger, call a method, set an attribute, answer a question, close and end.

The number of a message is its kind plus 8 times another number: of a method (`CALL`), or of a question.
"""


def main(facts: dict[str, Any]) -> None:
    """Be the logger process for the ring that `facts` describes; then end the process without exit handlers."""
    if os.fork():
        os._exit(0)  # the program waits for this process, not for the fork
    prepare_process(facts["nice"])
    ring = Ring(facts["memory"], facts["size"], facts["bound"])
    code = 0
    try:
        server = CallServer(ring, facts["wake"], facts["answers"], facts["parent"])
        server.has_own_handlers = True
        server.serve()
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # not `sys.exit`, which would wait for threads of the closed logger


def run_in_fork(
    ring: Ring, wake: int, answers: int, parent: int, make: Callable[[], Any], *, unused: int
) -> NoReturn:
    """Be the logger process in a fork of the program; then end the process.

    `wake` and `answers` are file descriptors as in `CallServer`, `parent` is the id of the program's process. `make()`
    returns the logger; `unused` is a descriptor that only the program needs.
    """
    code = 1
    try:
        prepare_process(NICE)
        os.close(unused)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # the threads of torch's pool do not exist in a fork
        server = CallServer(ring, wake, answers, parent)
        try:
            server.target = make()
        except BaseException as exc:
            server.report_start_error(exc)
        server.serve()
        code = 0
    finally:
        os._exit(code)


def prepare_process(nice: int) -> None:
    """Lower the priority of this process by `nice`, and ignore signals that are meant for the program."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(nice)


class CallServer:
    """Reads messages with calls from a ring, and makes the calls on the logger."""

    def __init__(self, ring: Ring, wake: int, answers: int, parent: int) -> None:
        self.ring = ring
        self.wake = wake
        """Descriptor (eventfd) through which the program wakes this process."""
        self.answers = answers
        """Descriptor of the pipe to which answers and errors for the program are written."""
        self.target: Any = None
        """The logger; None until it is constructed."""
        self.start_error: BaseException | None = None
        self.methods: dict[int, tuple[tuple[str, ...], str]] = {}
        """Number of a method in messages -> (attribute path from the logger to the object, name of the method)."""
        self.has_own_handlers = False
        """Whether this process was not forked from the program, so that its exit handlers are the logger's own."""
        self.running = True
        self.parent = parent
        """Id of the program's process."""
        ring.header[PID] = os.getpid()
        try:
            self.pidfd = os.pidfd_open(parent)
        except (OSError, AttributeError):  # the program has ended, or the system has no pidfd
            self.pidfd = -1

    def report_start_error(self, exc: BaseException) -> None:
        """Send the error `exc`, with which constructing the logger failed, to the program; make no calls after it."""
        self.start_error = exc
        self._send_error("", exc)

    def serve(self) -> None:
        """Make calls until the program has closed the logger, or has ended and the ring is empty."""
        idle = time.monotonic()
        header = self.ring.header
        while self.running:
            if self._serve_next():
                idle = time.monotonic()
            elif self._is_orphan():
                shared_memory_ring.fence()
                if not self._serve_next():
                    self._close()
            elif time.monotonic() - idle < IDLE_SECONDS:
                time.sleep(POLL_SECONDS)
            else:
                header[ASLEEP] = header[ATTENTION] = 1
                shared_memory_ring.fence()
                if header[HEAD] == header[TAIL]:
                    self._sleep()
                header[ASLEEP] = 0
                header[ATTENTION] = header[ERRORS] != header[ERRORS_READ]

    def _sleep(self) -> None:
        watched = [fd for fd in (self.wake, self.pidfd) if fd >= 0]
        ready, _, _ = select.select(watched, [], [], LONGEST_SLEEP)
        if self.wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, 8)

    def _is_orphan(self) -> bool:
        if self.pidfd >= 0:
            return bool(select.select([self.pidfd], [], [], 0)[0])
        try:
            os.kill(self.parent, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def _serve_next(self) -> bool:
        """Handle the next message in the ring and return True; return False if the ring is empty."""
        ring, header = self.ring, self.ring.header
        tail = header[TAIL]
        if header[HEAD] == tail:
            return False
        shared_memory_ring.fence()
        size = ring.read_number(tail)
        if size == JUMP:
            header[TAIL] = 0
            return True
        length = ring.read_number(tail + 8)
        payload = ring.bytes[tail + 16 : tail + 16 + length]
        args: Any = ()
        kwargs: Any = {}
        decode_error: BaseException | None = None
        try:
            number, args, kwargs = decode(payload, lambda sizes: self._buffers(tail, length, sizes))
        except BaseException as exc:  # the class of an argument cannot be imported
            decode_error = exc
            number = _method_number(payload)
        finally:
            payload.release()
        ring.release(tail, size)
        shared_memory_ring.fence()
        header[TAIL] = tail + size
        self._handle(number, args, kwargs, decode_error)
        return True

    def _buffers(self, message: int, length: int, sizes: Sequence[int]) -> list[bytearray]:
        """Return copies of the buffers, of `sizes` bytes, in the message at offset `message`.

        `length` is the size of the message's payload. A logger may keep its arguments, so they must not refer to the ring.
        """
        offsets, _ = shared_memory_ring.layout(length, sizes)
        whole = self.ring.bytes
        return [
            bytearray(whole[message + offset : message + offset + size])
            for offset, size in zip(offsets, sizes, strict=True)
        ]

    def _handle(
        self, number: int, args: Any, kwargs: Any, decode_error: BaseException | None
    ) -> None:
        message_kind, index = number % 8, number // 8
        text = ""
        try:
            if message_kind == START:
                self._start(args, decode_error)
            elif message_kind == CALL:
                attribute_path, name = self.methods[index]
                text = f"{'.'.join((*attribute_path, name))}({_first_text(args)})"
                self._check(decode_error)
                getattr(self._object_at(attribute_path), name)(*args, **kwargs)
            elif message_kind == SET:
                attribute_path, name, value = args
                text = f"{'.'.join((*attribute_path, name))} = …"
                self._check(decode_error)
                setattr(self._object_at(attribute_path), name, value)
            elif message_kind == ASK:
                self._answer(index, args, kwargs, decode_error)
            else:
                self._finish(index, args, decode_error)
        except BaseException as exc:
            self._send_error(text, exc)

    def _check(self, decode_error: BaseException | None) -> None:
        if decode_error is not None:
            raise decode_error
        if self.start_error is not None:
            raise _NotConstructed(
                "the writer could not be constructed, so this call was not made"
            ) from self.start_error

    def _object_at(self, attribute_path: Sequence[str]) -> Any:
        target = self.target
        for name in attribute_path:
            target = getattr(target, name)
        return target

    def _start(self, args: Any, decode_error: BaseException | None) -> None:
        try:
            self._check(decode_error)
            facts, blob = args
            sys.path[:] = facts["path"]
            sys.argv[:] = facts["argv"]
            with contextlib.suppress(OSError):
                os.chdir(facts["folder"])
            factory, arguments, named_arguments = pickle.loads(blob)
            self.target = factory(*arguments, **named_arguments)
        except BaseException as exc:
            self.start_error = exc
            raise

    def _answer(
        self, token: int, args: Any, kwargs: Any, decode_error: BaseException | None
    ) -> None:
        """Answer the question `token` of the program, which waits for the answer.

        The question `register` gets no answer: it tells this process the number of a method.
        """
        answer: tuple[str, Any]
        question, attribute_path, name, *arguments = args if decode_error is None else ("", (), "")
        if question == "register":  # the program has given a method a number
            self.methods[arguments[0]] = (tuple(attribute_path), name)
            return
        try:
            self._check(decode_error)
            if question == "flush":
                flush = getattr(self.target, "flush", None)
                answer = ("value", flush() and None if callable(flush) else None)
            elif question == "read":
                value = getattr(self._object_at(attribute_path), name)
                if callable(value) and not isinstance(value, type):
                    answer = ("method", None)
                elif _is_data(value):
                    answer = ("value", value)
                else:
                    answer = ("object", None)
            elif question == "items":
                answer = ("value", list(self._object_at(attribute_path)))
            else:
                answer = (
                    "value",
                    getattr(self._object_at(attribute_path), name)(*arguments[0], **kwargs),
                )
        except _NotConstructed as exc:
            answer = ("error", _describe_error("", self.start_error or exc))
        except BaseException as exc:
            answer = ("error", _describe_error("", exc))
        self._send(token, answer)

    def _finish(self, token: int, args: Any, decode_error: BaseException | None) -> None:
        try:
            (name,) = args if decode_error is None else ("",)
            self._close(name)
        except BaseException as exc:
            self._send_error(f"{name}()", exc)
        finally:
            self.running = False
            self._send(token, ("value", None))

    def _close(self, name: str = "") -> None:
        """Close the logger by its method `name`; without a name, by the first of `close`, `finish` and `flush` it has."""
        self.running = False
        if self.target is None:
            return
        try:
            for each in (name,) if name else ("close", "finish", "flush"):
                method = getattr(self.target, each, None)
                if callable(method):
                    method()
                    break
        finally:
            if self.has_own_handlers and not getattr(self.target, "is_attached", False):
                # W&B's exit handler waits until its service has written everything
                atexit._run_exitfuncs()  # noqa: SLF001 - `os._exit` would skip the handlers

    def _send_error(self, text: str, exc: BaseException) -> None:
        """Send an exception to the program, which raises it at a later call; `text` shows the call that failed."""
        header = self.ring.header
        if isinstance(exc, _NotConstructed):
            return  # the program was sent the error of the constructor already
        unread = header[ERRORS] - header[ERRORS_READ]
        if unread < MOST_UNREAD:
            self._send(0, ("error", _describe_error(text, exc)))
        shared_memory_ring.fence()
        header[ERRORS] += 1
        header[ATTENTION] = 1

    def _send(self, token: int, answer: tuple[str, Any]) -> None:
        try:
            data = pickle.dumps((token, answer), protocol=5)
        except Exception as exc:
            why = f"the answer of the writer cannot be sent to the program: {exc}"
            data = pickle.dumps((token, ("error", ("", None, why))), protocol=5)
        message = len(data).to_bytes(8, "little") + data
        with contextlib.suppress(BrokenPipeError):
            view = memoryview(message)
            while view:
                view = view[os.write(self.answers, view) :]


class _NotConstructed(Exception):  # noqa: N818 - never raised to users
    """Raised in place of making a call if the logger could not be constructed."""


def _method_number(payload: memoryview) -> int:
    try:
        number = int(marshal.loads(payload)[0])  # noqa: S302 - written by the other process of this writer
    except Exception:
        return CALL
    return number if number >= 0 else -1 - number


def _is_data(value: Any) -> bool:
    """Return True if the value of an attribute is copied to the program; the program gets a proxy of any other object.

    Lists and dictionaries are not copied, because changes to a copy would be lost.
    """
    if type(value) in {dict, list}:
        return False
    module = type(value).__module__
    return is_plain(value) or module in {"pathlib", "datetime"} or module.split(".")[0] == "numpy"


def _first_text(args: Any) -> str:
    """Return the first argument of a call for a message: quoted if it is a string, else `…`; '' if there is none."""
    return repr(args[0])[:60] if args and isinstance(args[0], str) else "…" if args else ""


def _describe_error(text: str, exc: BaseException) -> tuple[str, bytes | None, str]:
    """Return (`text`, pickled exception or None if it cannot be pickled or is large, traceback as text)."""
    lines = "".join(traceback.format_exception(exc))[-LONGEST_TRACEBACK:]
    try:
        blob = pickle.dumps(exc, protocol=5)
        pickle.loads(blob)
    except Exception:
        blob = None
    return text, blob if blob is not None and len(blob) < LONGEST_TRACEBACK else None, lines
