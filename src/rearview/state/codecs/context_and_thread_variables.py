"""Codecs of values that belong to a thread or a process: context variables, thread-locals, shared memory.

Processes and queues of `multiprocessing`, which cannot be captured, are reported as missing.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from threading import local
from typing import Any

from rearview.errors import StateError
from rearview.state.codecs.base import Capturing, Kind, PathStep, Restoring, WalkRules, steps
from rearview.state.codecs.containers import fill_dict

_POINTERS = frozenset("zZPO")
_UNSET = object()
_CHILDREN = "multiprocessing.process"


class VariableKind(Kind):
    """Codec of context variables (`contextvars.ContextVar`): captures the value in the current context."""

    name = "variable"

    @staticmethod
    def values(variable: ContextVar[Any]) -> tuple[Any, ...]:
        """Return (value,) of a variable, or () if the variable has not been set in the current context."""
        # `get()` would return the default, which is no state: the set-up code of a replay creates a new default
        value = variable.get(_UNSET)
        return () if value is _UNSET else (value,)

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to the value, if the variable was set."""
        return [PathStep("<", "", value) for value in self.values(obj)]

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (value,) for each variable, or () if the variable has not been set."""
        return [self.values(obj) for obj in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the value; raise StateError if the variable must become unset, which Python does not allow."""
        if content:
            obj.set(content[0])
        elif self.values(obj):
            raise StateError(
                f"The context variable {obj.name!r} had no value here and has one after set-up. "
                "Replay from the start of the loop.",
                slug="state-variable",
            )


class LocalKind(Kind):
    """Codec of `threading.local`: captures the attributes that the training thread sees."""

    name = "local"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each attribute."""
        return steps(".", list(vars(obj).items()))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the attributes of each object."""
        return [vars(obj).copy() for obj in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the attributes by the recorded attributes."""
        fill_dict(vars(obj), content)


class NumberKind(Kind):
    """Codec of numbers and arrays of ctypes, also inside a `multiprocessing.Value`: captures the bytes."""

    name = "number"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the bytes of each number or array."""
        return [bytes(obj) for obj in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Copy the bytes into the memory of the number, which other processes may share."""
        ctypes.memmove(ctypes.addressof(obj), content, ctypes.sizeof(obj))


class SharedKind(Kind):
    """Codec of `multiprocessing.Value` and `Array`, which hold a lock and a ctypes value: the walk enters the value."""

    name = "shared"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to the ctypes value, whose codec is `NumberKind`."""
        return [PathStep(".", "value", obj._obj)]


class ChildKind(Kind):
    """Codec of child processes: reports a running child process, whose state is outside this process."""

    name = "child"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Report each child process that is running."""
        for obj in objs:
            if is_running(obj):
                capturing.report_missing(obj, f"the process {obj.name} is running")
        return None


class QueueKind(Kind):
    """Codec of queues between processes: reports a queue with items, because reading an item would remove it."""

    name = "queue"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Report each queue that is not empty."""
        for obj in objs:
            try:
                empty = obj.empty()
            except (OSError, ValueError):
                empty = True  # the queue is closed
            if not empty:
                capturing.report_missing(obj, "there is something in this queue between processes")
        return None


CHILD = ChildKind()
_KINDS: tuple[tuple[type, Kind], ...] = ((ContextVar, VariableKind()), (local, LocalKind()))
_NUMBER = NumberKind()
_SHARED = SharedKind()
_QUEUE = QueueKind()


def hidden_kind(obj: Any) -> Kind | None:
    """Return the codec of an object whose value is not in its attributes, or None for any other object."""
    for base, kind in _KINDS:
        if isinstance(obj, base):
            return kind
    cls = type(obj)
    if is_number(cls):
        return _NUMBER
    if cls.__module__ == "multiprocessing.sharedctypes" and is_number(
        type(getattr(obj, "_obj", None))
    ):
        return _SHARED
    if cls.__module__ == "multiprocessing.queues":
        return _QUEUE
    return CHILD if is_child(obj) else None


def is_number(cls: Any) -> bool:
    """Return True if a class is a ctypes type that contains only numbers, and no addresses.

    >>> is_number(ctypes.c_int), is_number(ctypes.c_double * 3), is_number(ctypes.c_void_p)
    (True, True, False)
    """
    if not isinstance(cls, type):
        return False
    if issubclass(cls, ctypes._SimpleCData):
        return str(cls._type_) not in _POINTERS  # type: ignore[attr-defined]
    if issubclass(cls, ctypes.Array):
        return is_number(cls._type_)
    if issubclass(cls, ctypes.Structure):
        return all(is_number(field[1]) for field in getattr(cls, "_fields_", ()))
    return False


def is_child(obj: Any) -> bool:
    """Return True if `obj` is a process of `multiprocessing`."""
    module = sys.modules.get(_CHILDREN)
    return module is not None and isinstance(obj, module.BaseProcess)


def is_running(child: Any) -> bool:
    """Return True if the child process `child` is running; False also for a process that another process started."""
    try:
        return bool(child.is_alive())
    except (AssertionError, ValueError):
        return False
