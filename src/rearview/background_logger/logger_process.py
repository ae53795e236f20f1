"""The process that owns a background writer: constructs it, makes the calls in order, closes it.

It ends when the program closes the writer or has ended in any way, and only after it has made every call
that reached the shared memory.
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
    HEAD,
    JUMP,
    PID,
    SEEN,
    TAIL,
    Ring,
)

NICE = 10
"""Added to the niceness of the process, so that training has priority."""
NAP = 0.004
"""Seconds between looks at the ring while calls are coming."""
LINGER = 0.25
"""Seconds without a call after which the process sleeps until it is woken."""
LONGEST_SLEEP = 0.5
"""Seconds after which it wakes up in any case, because it may have missed a wake-up."""
UNREAD = 4
"""Errors that are sent before the program has read them; later ones are only counted."""
LONGEST_TRACEBACK = 8_000

START, CALL, SET, ASK, FINISH = range(5)
"""Kinds of messages: construct the writer, call a method, set an attribute, answer a question, close and end."""


def main(facts: dict[str, Any]) -> None:
    """Run the writer process of the ring that `facts` describes, then end without exit handlers."""
    if os.fork():
        os._exit(0)  # the program waits for this process only, so that it gets no child
    yield_to_program(facts["nice"])
    ring = Ring(facts["memory"], facts["size"], facts["bound"])
    code = 0
    try:
        writer = CallServer(ring, facts["wake"], facts["answers"], facts["parent"])
        writer.has_own_handlers = True
        writer.serve()
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # threads of a writer that was closed need not be waited for


def run_in_fork(
    ring: Ring, wake: int, answers: int, parent: int, make: Callable[[], Any], *, unused: int
) -> NoReturn:
    """Run the writer process in a copy of the program; ends the process.

    `make` returns the logger; `unused` is a descriptor of the program that this process closes.
    """
    code = 1
    try:
        yield_to_program(NICE)
        os.close(unused)
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # its thread pool was not copied
        server = CallServer(ring, wake, answers, parent)
        try:
            server.target = make()
        except BaseException as exc:
            server.fail(exc)
        server.serve()
        code = 0
    finally:
        os._exit(code)


def yield_to_program(nice: int) -> None:
    """Ignore signals, which are for the program, and lower the priority of this process."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(nice)


class CallServer:
    """Reads calls from a ring and makes them on the writer."""

    def __init__(self, ring: Ring, wake: int, answers: int, parent: int) -> None:
        self.ring = ring
        self.wake = wake
        self.answers = answers
        self.target: Any = None
        self.failed: BaseException | None = None
        self.methods: dict[int, tuple[tuple[str, ...], str]] = {}
        self.has_own_handlers = False
        """Whether all exit handlers of this process belong to the writer's libraries."""
        self.running = True
        self.parent = parent
        ring.header[PID] = os.getpid()
        try:
            self.pidfd = os.pidfd_open(parent)
        except (OSError, AttributeError):  # the program is gone already, or the kernel has no pidfd
            self.pidfd = -1

    def fail(self, exc: BaseException) -> None:
        """Note that the logger could not be constructed: the program gets the error, and no call is made."""
        self.failed = exc
        self._send_error("", exc)

    def serve(self) -> None:
        """Make calls until the writer is closed, or until the program is gone and no call is left."""
        idle = time.monotonic()
        header = self.ring.header
        while self.running:
            if self._serve_next():
                idle = time.monotonic()
            elif self._is_orphan():
                shared_memory_ring.fence()
                if not self._serve_next():
                    self._close()
            elif time.monotonic() - idle < LINGER:
                time.sleep(NAP)
            else:
                header[ASLEEP] = header[ATTENTION] = 1
                shared_memory_ring.fence()
                if header[HEAD] == header[TAIL]:
                    self._sleep()
                header[ASLEEP] = 0
                header[ATTENTION] = header[ERRORS] != header[SEEN]

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
        """Make the next call in the ring; return False if there is none."""
        ring, header = self.ring, self.ring.header
        tail = header[TAIL]
        if header[HEAD] == tail:
            return False
        shared_memory_ring.fence()
        size = ring.number_at(tail)
        if size == JUMP:
            header[TAIL] = 0
            return True
        length = ring.number_at(tail + 8)
        payload = ring.bytes[tail + 16 : tail + 16 + length]
        args: Any = ()
        kwargs: Any = {}
        problem: BaseException | None = None
        try:
            number, args, kwargs = decode(payload, lambda sizes: self._buffers(tail, length, sizes))
        except BaseException as exc:  # an argument whose class cannot be loaded here
            problem = exc
            number = _number_of(payload)
        finally:
            payload.release()
        ring.give_back(tail, size)
        shared_memory_ring.fence()
        header[TAIL] = tail + size
        self._do(number, args, kwargs, problem)
        return True

    def _buffers(self, place: int, length: int, sizes: Sequence[int]) -> list[bytearray]:
        """Copy the buffers of a message, because a writer may keep its arguments."""
        places, _ = shared_memory_ring.layout(length, sizes)
        whole = self.ring.bytes
        return [
            bytearray(whole[place + at : place + at + size])
            for at, size in zip(places, sizes, strict=True)
        ]

    def _do(self, number: int, args: Any, kwargs: Any, problem: BaseException | None) -> None:
        kind, index = number % 8, number // 8
        text = ""
        try:
            if kind == START:
                self._start(args, problem)
            elif kind == CALL:
                path, name = self.methods[index]
                text = f"{'.'.join((*path, name))}({_first(args)})"
                self._check(problem)
                getattr(self._at(path), name)(*args, **kwargs)
            elif kind == SET:
                path, name, value = args
                text = f"{'.'.join((*path, name))} = …"
                self._check(problem)
                setattr(self._at(path), name, value)
            elif kind == ASK:
                self._answer(index, args, kwargs, problem)
            else:
                self._finish(index, args, problem)
        except BaseException as exc:
            self._send_error(text, exc)

    def _check(self, problem: BaseException | None) -> None:
        if problem is not None:
            raise problem
        if self.failed is not None:
            raise _NotConstructed(
                "the writer could not be constructed, so this call was not made"
            ) from self.failed

    def _at(self, path: Sequence[str]) -> Any:
        target = self.target
        for name in path:
            target = getattr(target, name)
        return target

    def _start(self, args: Any, problem: BaseException | None) -> None:
        try:
            self._check(problem)
            facts, blob = args
            sys.path[:] = facts["path"]
            sys.argv[:] = facts["argv"]
            with contextlib.suppress(OSError):
                os.chdir(facts["folder"])
            factory, arguments, named_arguments = pickle.loads(blob)
            self.target = factory(*arguments, **named_arguments)
        except BaseException as exc:
            self.failed = exc
            raise

    def _answer(self, token: int, args: Any, kwargs: Any, problem: BaseException | None) -> None:
        """Answer a question of the program, which waits for it."""
        answer: tuple[str, Any]
        kind, path, name, *rest = args if problem is None else ("", (), "")
        if kind == "register":  # the program numbers the methods that it calls
            self.methods[rest[0]] = (tuple(path), name)
            return
        try:
            self._check(problem)
            if kind == "flush":
                flush = getattr(self.target, "flush", None)
                answer = ("value", flush() and None if callable(flush) else None)
            elif kind == "read":
                value = getattr(self._at(path), name)
                if callable(value) and not isinstance(value, type):
                    answer = ("method", None)
                elif _is_data(value):
                    answer = ("value", value)
                else:
                    answer = ("object", None)
            elif kind == "items":
                answer = ("value", list(self._at(path)))
            else:
                answer = ("value", getattr(self._at(path), name)(*rest[0], **kwargs))
        except _NotConstructed as exc:
            answer = ("error", _described("", self.failed or exc))
        except BaseException as exc:
            answer = ("error", _described("", exc))
        self._send(token, answer)

    def _finish(self, token: int, args: Any, problem: BaseException | None) -> None:
        try:
            (name,) = args if problem is None else ("",)
            self._close(name)
        except BaseException as exc:
            self._send_error(f"{name}()", exc)
        finally:
            self.running = False
            self._send(token, ("value", None))

    def _close(self, name: str = "") -> None:
        """Close the writer with the first of the closing methods that it has."""
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
                # the service of W&B may still be writing: its exit handler waits for it
                atexit._run_exitfuncs()  # noqa: SLF001 - this process ends without them

    def _send_error(self, text: str, exc: BaseException) -> None:
        """Send an error of the writer to the program, which raises it at its next call."""
        header = self.ring.header
        if isinstance(exc, _NotConstructed):
            return  # the first error has reported it
        unread = header[ERRORS] - header[SEEN]
        if unread < UNREAD:
            self._send(0, ("error", _described(text, exc)))
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
    """A call was made, but the writer could not be constructed."""


def _number_of(payload: memoryview) -> int:
    try:
        number = int(marshal.loads(payload)[0])  # noqa: S302 - written by the other process of this writer
    except Exception:
        return CALL
    return number if number >= 0 else -1 - number


def _is_data(value: Any) -> bool:
    """Return True for a value that is copied to the program; others are accessed by their name.

    Lists and dictionaries are not copied, because changes to a copy would be lost.
    """
    if type(value) in {dict, list}:
        return False
    module = type(value).__module__
    return is_plain(value) or module in {"pathlib", "datetime"} or module.split(".")[0] == "numpy"


def _first(args: Any) -> str:
    """Return the first argument if it is a text: most loggers take a name first."""
    return repr(args[0])[:60] if args and isinstance(args[0], str) else "…" if args else ""


def _described(text: str, exc: BaseException) -> tuple[str, bytes | None, str]:
    """Return the call as text, the pickled exception if possible, and its traceback as text."""
    lines = "".join(traceback.format_exception(exc))[-LONGEST_TRACEBACK:]
    try:
        blob = pickle.dumps(exc, protocol=5)
        pickle.loads(blob)
    except Exception:
        blob = None
    return text, blob if blob is not None and len(blob) < LONGEST_TRACEBACK else None, lines
