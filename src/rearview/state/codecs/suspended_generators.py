"""Codec of the project's suspended generators, and of the iterators of their loops.

The state of a suspended generator is its local variables, the `yield` at which it is suspended, and the iterators
of the loops around this `yield`. Rearview instruments generator functions so that each of these iterators is in a local
variable, as a `LoopIterator`, and can be captured. A restore runs a generator to its recorded `yield`, restores the
whole state again, because the generator has changed objects on its way, and sets the recorded local variables.
"""

from __future__ import annotations

import ctypes
import dis
import gc
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import compress, repeat
from operator import attrgetter, length_hint
from typing import Any

from rearview.errors import StateError
from rearview.state.codecs.base import Capturing, Kind, PathStep, Restoring, WalkRules, steps
from rearview.state.codecs.data_loaders import is_loader_iterator

FURTHEST = 100_000
"""Most items that a restore takes from a generator to reach the recorded `yield`."""


_ABSENT = object()
_ENDLESS = 1 << 62
"""A number that is larger than the number of items that any loop takes."""


def draw_items(source: Any, count: int = _ENDLESS) -> Iterator[Any]:
    """Return an iterator over the next `count` items of `source`, which gets each item by `next(source)`.

    `for`, `islice`, `zip` and `map` would call `iter(source)` first, which may start a user's iterator from its
    beginning. The returned iterator adds no frame to tracebacks.
    """
    return map(next, repeat(source, count))


class LoopIterator:
    """The iterator of a loop in a generator function; the loop takes items from `source`, which can be replaced.

    With None as `source` the iterator never ends, which a `while` loop needs. The iterator adds no frame to tracebacks.
    """

    __slots__ = ("__weakref__", "_before", "_counter", "_draw", "source")

    def __init__(self, source: Any) -> None:
        self.continue_with(source, 0)

    def continue_with(self, source: Any, count: int) -> None:
        """Continue with `source`, from which the loop has taken `count` items."""
        self.source = source
        self._before = count
        self._counter = repeat(True, _ENDLESS)
        items = repeat(None) if source is None else draw_items(source)
        self._draw = compress(items, self._counter).__next__

    @property
    def count(self) -> int:
        """Number of items that the loop has taken."""
        return self._before + _ENDLESS - length_hint(self._counter)

    def __iter__(self) -> Iterator[Any]:
        return self

    __next__ = property(attrgetter("_draw"))
    # `yield from` calls these methods; each of these methods exists only if the source has it
    send = property(attrgetter("source.send"))
    throw = property(attrgetter("source.throw"))
    close = property(attrgetter("source.close"))


class LoopIteratorKind(Kind):
    """Codec of `LoopIterator`: captures a reference to the source, and the number of items that the loop has taken."""

    name = "walk"

    def label(self, obj: Any) -> str:
        """Return the label of a loop iterator: a former name of the class, which all versions have recorded."""
        return "rearview.state.codecs.iterators.Walk"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to the source."""
        return [PathStep("<", "iterator", obj.source)]

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (source, count) of each iterator."""
        return [(o.source, o.count) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the source, and the number of items that the loop has taken."""
        obj.continue_with(*content)


class GeneratorKind(Kind):
    """Codec of generators: captures the status (such as suspended), the current yield and the local variables."""

    name = "generator"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each local variable, if the generator belongs to the project."""
        frame = getattr(obj, "gi_frame", None)
        if frame is not None and rules.project(frame.f_globals.get("__name__", "")):
            recorded = rules.recorded_names
            variables = sorted(frame.f_locals.items())
            yield from steps(
                "<",
                (variable for variable in variables if recorded is None or variable[0] in recorded),
            )

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the state of each generator (see `generator_state`)."""
        return [generator_state(o, capturing) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Append the generator to `restoring.generators`: `restore` later runs the program's code up to its yield."""
        if content is not None:
            restoring.generators.append((obj, content[:2], content[2] if content[2:] else {}))

    def label(self, obj: Any) -> str:
        """Return the name of the generator's function, with the local variables in parentheses.

        Names in parentheses may differ in a replay, because a probe may add local variables.
        """
        frame = getattr(obj, "gi_frame", None)
        names = ",".join(sorted(frame.f_locals)) if frame is not None else ""
        return f"generator {getattr(obj, '__qualname__', type(obj).__name__)}({names})"


GENERATOR = GeneratorKind()
LOOP_ITERATOR = LoopIteratorKind()


def generator_state(obj: Any, capturing: Capturing) -> tuple[Any, ...] | None:
    """Return the status of a generator, and where it is suspended.

    The result is ("over",), ("new", 0), ("running",) or ("suspended", number of the yield, local variables).

    Report a generator that cannot be captured, and return None for it.
    """
    if not isinstance(obj, types.GeneratorType):
        capturing.report_missing(obj, f"a {type(obj).__name__} cannot be saved")
        return None
    state = inspect.getgeneratorstate(obj)
    if state == inspect.GEN_CLOSED:
        return ("over",)
    frame: Any = obj.gi_frame
    if state == inspect.GEN_CREATED:
        return "new", 0
    if (
        state == inspect.GEN_RUNNING
        and frame.f_globals.get("__name__") in capturing.anchors.rules.loop_modules
    ):
        # a generator with a watched library loop: `capture` gets its local variables with the roots
        return ("running",)
    reason = reason_not_captured(obj, state, capturing.anchors.rules.project)
    if reason:
        capturing.report_missing(obj, f"the generator {obj.__qualname__} {reason}")
        return None
    return "suspended", yield_number(obj), dict(sorted(frame.f_locals.items()))


def reason_not_captured(
    obj: types.GeneratorType[Any, Any, Any], state: str, project: Any
) -> str | None:
    """Return why a generator that has started cannot be captured, or None if it can be captured.

    `state` is the generator's status, as `inspect.getgeneratorstate` returns it. `project` returns True for the name of
    a module that belongs to the project.
    """
    frame: Any = obj.gi_frame
    if state == inspect.GEN_RUNNING:
        return "is running"
    if not project(frame.f_globals.get("__name__", "")):
        return "of a library is suspended in the middle, which cannot be saved"
    if yield_number(obj) < 0:
        return "is suspended at an unknown place"
    iterator_count = sum(isinstance(value, LoopIterator) for value in frame.f_locals.values())
    if iterator_count < loops_around(obj.gi_code, frame.f_lasti):
        return "holds an iterator that cannot be seen (as in a generator expression)"
    return None


@cache
def yields_of(code: types.CodeType) -> tuple[int, ...]:
    """Return the bytecode offsets of the yields in a function."""
    return tuple(
        instruction.offset
        for instruction in dis.get_instructions(code)
        if instruction.opname == "YIELD_VALUE"
    )


@cache
def loops_around(code: types.CodeType, offset: int) -> int:
    """Return how many `for` loops and `yield from` expressions are active at a bytecode offset of a function."""
    count = 0
    delegation = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "FOR_ITER" and instruction.offset < offset < int(
            instruction.argval
        ):
            count += 1
        if instruction.opname == "SEND" and instruction.offset < offset <= int(instruction.argval):
            delegation = instruction
    return count + (delegation is not None)


def yield_number(obj: types.GeneratorType[Any, Any, Any]) -> int:
    """Return the number of the yield at which a generator is suspended, among the yields of its code; -1 if unknown."""
    yields = yields_of(obj.gi_code)
    frame: Any = obj.gi_frame
    # since Python 3.13, `f_lasti` is the offset of the RESUME instruction, which is two bytes after the yield
    offsets = (frame.f_lasti, frame.f_lasti - 2)
    return next((yields.index(offset) for offset in offsets if offset in yields), -1)


def function_of(obj: types.GeneratorType[Any, Any, Any]) -> types.FunctionType | None:
    """Return the function that a generator runs, or None if the generator does not refer to it."""
    for referent in gc.get_referents(obj):
        if isinstance(referent, types.FunctionType) and referent.__code__ is obj.gi_code:
            return referent
    return None


def generator_recipe(obj: Any, capturing: Capturing) -> tuple[Any, ...] | None:
    """Return (function, arguments, number of positional arguments, `generator_state`) to create a generator again.

    The function is None for a generator that has ended. Report a generator that cannot be created again, and return
    None for it.
    """
    state = generator_state(obj, capturing)
    if state is None:
        return None
    if state[0] == "over":
        return None, (), 0, state
    if state[0] == "running":
        capturing.report_missing(
            obj, f"the generator {obj.__qualname__} was started in the loop and is running"
        )
        return None
    function = function_of(obj)
    if function is None:
        capturing.report_missing(
            obj, f"the function of the generator {obj.__qualname__} cannot be found"
        )
        return None
    if function.__closure__ and id(function) not in capturing.anchors.index:
        capturing.report_missing(
            obj, f"the generator {obj.__qualname__} is of a function made in the loop"
        )
        return None
    code = obj.gi_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    variables = obj.gi_frame.f_locals
    flags = bool(code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))
    if flags or any(name not in variables for name in names):
        capturing.report_missing(
            obj, f"the arguments of the generator {obj.__qualname__} cannot be found"
        )
        return None
    return function, tuple((name, variables[name]) for name in names), code.co_argcount, state


def make_generator(function: Any, arguments: Sequence[tuple[str, Any]], count: int) -> Any:
    """Return a new generator of `function`; the first `count` arguments are passed by position."""
    values = [value for _, value in arguments]
    keyword_arguments = dict(arguments[count:])
    return function(*values[:count], **keyword_arguments)


def drive_to_yield(obj: Any, state: Sequence[Any] | None, name: str) -> None:
    """Run a live generator to the yield in `state`, or close it if it had ended; do nothing if `state` is None.

    The caller then restores the local variables by `set_locals`. `name` is the generator's name for error messages.
    Raise StateError if the generator cannot get the recorded status.
    """
    if state is None:
        return
    if state[0] == "over":
        obj.close()
        return
    current = inspect.getgeneratorstate(obj)
    if state[0] == "running":
        if current != inspect.GEN_RUNNING:
            raise _cannot_restore(name, "was running when the checkpoint was taken, and is not now")
        return
    if state[0] == "new":
        if current != inspect.GEN_CREATED:
            raise _cannot_restore(
                name, "had not started when the checkpoint was taken, and has started now"
            )
        return
    if current == inspect.GEN_CLOSED:
        raise _cannot_restore(name, "is finished now")
    target = state[1]
    for _ in range(FURTHEST):
        if (
            obj.gi_frame is not None
            and current != inspect.GEN_CREATED
            and yield_number(obj) == target
        ):
            return
        try:
            next(obj)
        except StopIteration:
            break
        current = inspect.GEN_SUSPENDED
    raise _cannot_restore(name, "does not reach the yield at which it was suspended")


def _cannot_restore(name: str, why: str) -> StateError:
    return StateError(
        f"The generator {name} {why}. Replay from the start of the loop.", slug="state-generator"
    )


def assign_locals(frame: types.FrameType, values: Mapping[str, Any]) -> None:
    """Assign the local variables in `values` in the frame of a running function or a suspended generator."""
    variables = frame.f_locals
    changed = {k: v for k, v in values.items() if variables.get(k, _ABSENT) is not v}
    if not changed:
        return
    for name, value in changed.items():
        variables[name] = value
    if sys.version_info < (3, 13):
        # before PEP 667, `f_locals` is a copy: write it back, as debuggers do
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def set_locals(obj: Any, values: dict[str, Any]) -> None:
    """Set the local variables of a suspended generator; its running loops continue with the recorded iterators."""
    frame: Any = obj.gi_frame
    current = frame.f_locals
    changed: dict[str, Any] = {}
    for name, value in values.items():
        old = current.get(name)
        if isinstance(old, LoopIterator) and isinstance(value, LoopIterator):
            # the running loop refers to the old iterator: replace the source of that iterator
            old.continue_with(value.source, value.count)
        else:
            changed[name] = value
    assign_locals(frame, changed)


def sources_of(source: Any, project: Any) -> list[Any]:
    """Return the generators of the project, and the iterators of data loaders, from which `source` takes its items.

    Iterators of data loaders with workers are left out. `project` returns True for the name of a module of the project.
    """
    sources: list[Any] = []
    visited_ids: set[int] = set()
    todo = [source]
    while todo:
        iterator = todo.pop()
        if id(iterator) in visited_ids or len(visited_ids) > 50:
            continue
        visited_ids.add(id(iterator))
        if type(iterator) is types.GeneratorType:
            frame = iterator.gi_frame
            if frame is None:
                continue
            if project(frame.f_globals.get("__name__", "")):
                sources.append(iterator)
            else:
                todo += [value for value in frame.f_locals.values() if _iterates(value)]
        elif is_loader_iterator(iterator):
            if not getattr(iterator, "_num_workers", 0):
                sources.append(iterator)
        elif type(iterator).__module__ in {"builtins", "itertools"} and _iterates(iterator):
            for referent in gc.get_referents(iterator):
                # `zip` refers to its iterators by a tuple
                candidates = referent if type(referent) is tuple else (referent,)
                todo += [candidate for candidate in candidates if _iterates(candidate)]
    return sources


def _iterates(obj: object) -> bool:
    """Return True if the class of `obj` defines `__next__`; no method of `obj` is called."""
    return any("__next__" in vars(cls) for cls in type(obj).__mro__)
