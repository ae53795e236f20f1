"""Values that are not attributes: of context variables, of thread-locals, in shared memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from threading import local
from typing import Any

from rearview.errors import StateError
from rearview.state.codecs.containers import fill_dict
from rearview.state.kinds import Capturing, Kind, PathStep, Restoring, WalkRules, steps

_POINTERS = frozenset("zZPO")
_UNSET = object()
_CHILDREN = "multiprocessing.process"


class VariableKind(Kind):
    """A context variable: the value that it has here."""

    name = "variable"

    @staticmethod
    def values(variable: ContextVar[Any]) -> tuple[Any, ...]:
        """Return the value as a tuple of one, or an empty tuple when only its default is there."""
        # not `get()`: that gives the default, which set-up makes again
        value = variable.get(_UNSET)
        return () if value is _UNSET else (value,)

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the value, if one was set."""
        return [PathStep("<", "", value) for value in self.values(obj)]

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the value of each, if one was set."""
        return [self.values(obj) for obj in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set it; a value cannot be taken away again."""
        if content:
            obj.set(content[0])
        elif self.values(obj):
            raise StateError(
                f"The context variable {obj.name!r} had no value here and has one after set-up. "
                "Replay from the start of the loop.",
                slug="state-variable",
            )


class LocalKind(Kind):
    """A `threading.local`: the attributes that the thread which trains has set."""

    name = "local"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the attributes."""
        return steps(".", list(vars(obj).items()))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the attributes of each."""
        return [vars(obj).copy() for obj in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the attributes."""
        fill_dict(vars(obj), content)


class NumberKind(Kind):
    """A number or array of ctypes, `multiprocessing.Value` included: its bytes."""

    name = "number"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the bytes of each."""
        return [bytes(obj) for obj in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Put the bytes where they were; other processes see them too."""
        ctypes.memmove(ctypes.addressof(obj), content, ctypes.sizeof(obj))


class SharedKind(Kind):
    """What `multiprocessing.Value` and `Array` return: a lock around a number."""

    name = "shared"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the number."""
        return [PathStep(".", "value", obj._obj)]


class ChildKind(Kind):
    """A process that the program started: while it runs, its state lies outside this one."""

    name = "child"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Report those that are running."""
        for obj in objs:
            if runs(obj):
                capturing.miss(obj, f"the process {obj.name} is running")
        return None


class QueueKind(Kind):
    """A queue between processes: what is in it cannot be looked at."""

    name = "queue"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Report those that are not empty."""
        for obj in objs:
            try:
                empty = obj.empty()
            except (OSError, ValueError):
                empty = True  # closed
            if not empty:
                capturing.miss(obj, "there is something in this queue between processes")
        return None


CHILD = ChildKind()
_KINDS: tuple[tuple[type, Kind], ...] = ((ContextVar, VariableKind()), (local, LocalKind()))
_NUMBER = NumberKind()
_SHARED = SharedKind()
_QUEUE = QueueKind()


def hidden_kind(obj: Any) -> Kind | None:
    """Return the kind of an object whose value stands in none of its attributes, or None."""
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
    """Return True if a type of ctypes holds numbers only, no addresses.

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
    """Return True if it is a process of `multiprocessing`."""
    module = sys.modules.get(_CHILDREN)
    return module is not None and isinstance(obj, module.BaseProcess)


def runs(child: Any) -> bool:
    """Return True if a process is alive; one of somebody else is not ours to wait for."""
    try:
        return bool(child.is_alive())
    except (AssertionError, ValueError):
        return False
