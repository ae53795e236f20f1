"""Generators of the project: captured while suspended, restored at the same yield.

A suspended generator consists of its local variables, the yield it is suspended at, and the iterators
of the loops around that yield. The instrumenter puts those iterators into local variables (as `Walk`),
so that all of it can be captured. To restore one, it is run to the same yield, whatever it computes on
the way, and then given the recorded locals; everything it touched is restored afterwards.
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
from rearview.state.codecs.data_loaders import is_loader_iterator
from rearview.state.kinds import Capturing, Kind, PathStep, Restoring, WalkRules, steps

FURTHEST = 100_000
"""Items drawn from a generator before it is said not to come to the recorded place."""


_ABSENT = object()
_ENDLESS = 1 << 62
"""More items than any loop draws."""


def drawn(source: Any, count: int = _ENDLESS) -> Iterator[Any]:
    """Return up to `count` items of the iterator `source`, each drawn when it is asked for.

    Everything that iterates (`for`, `islice`, `zip`, `map`) asks its argument for an iterator first,
    and a user's iterator may begin anew at that. Here nothing is asked of `source` but its next item,
    and no frame of ours stands between the two.
    """
    return map(next, repeat(source, count))


class Walk:
    """The iterator of a loop in a generator function; it can be exchanged under the loop.

    Over None it never ends: that is how `while` loops walk. No frame of ours runs while `source`
    makes an item: tracebacks are those of plain Python.
    """

    __slots__ = ("__weakref__", "_before", "_counter", "_draw", "source")

    def __init__(self, source: Any) -> None:
        self.go_on(source, 0)

    def go_on(self, source: Any, count: int) -> None:
        """Draw from `source`, of which `count` items were taken, from now on."""
        self.source = source
        self._before = count
        self._counter = repeat(True, _ENDLESS)
        items = repeat(None) if source is None else drawn(source)
        self._draw = compress(items, self._counter).__next__

    @property
    def count(self) -> int:
        """Items taken."""
        return self._before + _ENDLESS - length_hint(self._counter)

    def __iter__(self) -> Iterator[Any]:
        return self

    __next__ = property(attrgetter("_draw"))
    # What `yield from` hands on: a source without one of these has none here either.
    send = property(attrgetter("source.send"))
    throw = property(attrgetter("source.throw"))
    close = property(attrgetter("source.close"))


class WalkKind(Kind):
    """A `Walk`: a reference to what it walks over."""

    name = "walk"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the iterator."""
        return [PathStep("<", "iterator", obj.source)]

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return iterator and count of each."""
        return [(o.source, o.count) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Exchange the iterator."""
        obj.go_on(*content)


class GeneratorKind(Kind):
    """A generator: over, not begun, or suspended at a yield with its locals."""

    name = "generator"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the local variables of the user's own."""
        frame = getattr(obj, "gi_frame", None)
        if frame is not None and rules.project(frame.f_globals.get("__name__", "")):
            recorded = rules.recorded
            found = sorted(frame.f_locals.items())
            yield from steps("<", (one for one in found if recorded is None or one[0] in recorded))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return what each is at; those that cannot be kept are reported."""
        return [generator_state(o, capturing) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Leave it to the end: it has to be driven, and that must leave no trace."""
        if content is not None:
            restoring.generators.append((obj, content[:2], content[2] if content[2:] else {}))

    def label(self, obj: Any) -> str:
        """Return the function it is of, with its local variables: a probe may bind others."""
        frame = getattr(obj, "gi_frame", None)
        names = ",".join(sorted(frame.f_locals)) if frame is not None else ""
        return f"generator {getattr(obj, '__qualname__', type(obj).__name__)}({names})"


GENERATOR = GeneratorKind()
WALK = WalkKind()


def generator_state(obj: Any, capturing: Capturing) -> tuple[Any, ...] | None:
    """Return ("over",), ("new", 0), ("running",) or ("suspended", yield number, locals)."""
    if not isinstance(obj, types.GeneratorType):
        capturing.miss(obj, f"a {type(obj).__name__} cannot be saved")
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
        return ("running",)  # a watched loop: its frame is among those whose locals are kept
    reason = unkept(obj, state, capturing.anchors.rules.project)
    if reason:
        capturing.miss(obj, f"the generator {obj.__qualname__} {reason}")
        return None
    return "suspended", yield_number(obj), dict(sorted(frame.f_locals.items()))


def unkept(obj: types.GeneratorType[Any, Any, Any], state: str, project: Any) -> str | None:
    """Return why a generator in the middle cannot be kept, or None if it can."""
    frame: Any = obj.gi_frame
    if state == inspect.GEN_RUNNING:
        return "is running"
    if not project(frame.f_globals.get("__name__", "")):
        return "of a library is suspended in the middle, which cannot be saved"
    if yield_number(obj) < 0:
        return "is suspended at an unknown place"
    held = sum(isinstance(value, Walk) for value in frame.f_locals.values())
    if held < loops_around(obj.gi_code, frame.f_lasti):
        return "holds an iterator that cannot be seen (as in a generator expression)"
    return None


@cache
def yields_of(code: types.CodeType) -> tuple[int, ...]:
    """Return the offsets of the yields in a function."""
    return tuple(one.offset for one in dis.get_instructions(code) if one.opname == "YIELD_VALUE")


@cache
def loops_around(code: types.CodeType, offset: int) -> int:
    """Return how many `for` loops and `yield from` are under way at an offset."""
    count = 0
    waiting = None
    for one in dis.get_instructions(code):
        if one.opname == "FOR_ITER" and one.offset < offset < int(one.argval):
            count += 1
        if one.opname == "SEND" and one.offset < offset <= int(one.argval):
            waiting = one
    return count + (waiting is not None)


def yield_number(obj: types.GeneratorType[Any, Any, Any]) -> int:
    """Return which yield of its function a generator stands at, -1 if at none."""
    known = yields_of(obj.gi_code)
    frame: Any = obj.gi_frame
    # From Python 3.13 on it stands at the RESUME that follows, one instruction of two bytes further.
    standing = (frame.f_lasti, frame.f_lasti - 2)
    return next((known.index(offset) for offset in standing if offset in known), -1)


def function_of(obj: types.GeneratorType[Any, Any, Any]) -> types.FunctionType | None:
    """Return the function that a generator runs."""
    for held in gc.get_referents(obj):
        if isinstance(held, types.FunctionType) and held.__code__ is obj.gi_code:
            return held
    return None


def recipe(obj: Any, capturing: Capturing) -> tuple[Any, ...] | None:
    """Return (function, arguments, how many go by position, state) of a generator, or None."""
    state = generator_state(obj, capturing)
    if state is None:
        return None
    if state[0] == "over":
        return None, (), 0, state
    if state[0] == "running":
        capturing.miss(
            obj, f"the generator {obj.__qualname__} was begun in the loop and is running"
        )
        return None
    function = function_of(obj)
    if function is None:
        capturing.miss(obj, f"the function of the generator {obj.__qualname__} is not to be had")
        return None
    if function.__closure__ and id(function) not in capturing.anchors.index:
        capturing.miss(obj, f"the generator {obj.__qualname__} is of a function made in the loop")
        return None
    code = obj.gi_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    here = obj.gi_frame.f_locals
    flags = bool(code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))
    if flags or any(name not in here for name in names):
        capturing.miss(obj, f"the arguments of the generator {obj.__qualname__} are not to be had")
        return None
    return function, tuple((name, here[name]) for name in names), code.co_argcount, state


def make(function: Any, arguments: Sequence[tuple[str, Any]], count: int) -> Any:
    """Return a new generator of `function`; the first `count` arguments go by position."""
    values = [value for _, value in arguments]
    named = dict(arguments[count:])
    return function(*values[:count], **named)


def drive(obj: Any, state: Sequence[Any] | None, name: str) -> None:
    """Bring a live generator to the yield that `state` names; its locals follow later."""
    if state is None:
        return
    if state[0] == "over":
        obj.close()
        return
    now = inspect.getgeneratorstate(obj)
    if state[0] == "running":
        if now != inspect.GEN_RUNNING:
            raise _lost(name, "was running when the checkpoint was taken, and is not now")
        return
    if state[0] == "new":
        if now != inspect.GEN_CREATED:
            raise _lost(name, "had not begun when the checkpoint was taken, and has begun now")
        return
    if now == inspect.GEN_CLOSED:
        raise _lost(name, "is over now")
    wanted = state[1]
    for _ in range(FURTHEST):
        if obj.gi_frame is not None and now != inspect.GEN_CREATED and yield_number(obj) == wanted:
            return
        try:
            next(obj)
        except StopIteration:
            break
        now = inspect.GEN_SUSPENDED
    raise _lost(name, "does not come to the yield at which it stood")


def _lost(name: str, why: str) -> StateError:
    return StateError(
        f"The generator {name} {why}. Replay from the start of the loop.", slug="state-generator"
    )


def assign_locals(frame: types.FrameType, values: Mapping[str, Any]) -> None:
    """Assign local variables of a running function or a suspended generator."""
    space = frame.f_locals
    changed = {k: v for k, v in values.items() if space.get(k, _ABSENT) is not v}
    if not changed:
        return
    for name, value in changed.items():
        space[name] = value
    if sys.version_info < (3, 13):
        # Before PEP 667 `f_locals` is a copy; this writes it back, as debuggers do.
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def give_locals(obj: Any, values: dict[str, Any]) -> None:
    """Give a suspended generator its local variables; loops go on with the recorded iterators."""
    frame: Any = obj.gi_frame
    live = frame.f_locals
    changed: dict[str, Any] = {}
    for name, value in values.items():
        old = live.get(name)
        if isinstance(old, Walk) and isinstance(value, Walk):
            # the loop itself holds the old one
            old.go_on(value.source, value.count)
        else:
            changed[name] = value
    assign_locals(frame, changed)


def feeding(source: Any, project: Any) -> list[Any]:
    """Return the project's generators and loaders' iterators that an iterator draws from."""
    found: list[Any] = []
    seen: set[int] = set()
    todo = [source]
    while todo:
        one = todo.pop()
        if id(one) in seen or len(seen) > 50:
            continue
        seen.add(id(one))
        if type(one) is types.GeneratorType:
            frame = one.gi_frame
            if frame is None:
                continue
            if project(frame.f_globals.get("__name__", "")):
                found.append(one)
            else:
                todo += [value for value in frame.f_locals.values() if _iterates(value)]
        elif is_loader_iterator(one):
            if not getattr(one, "_num_workers", 0):
                found.append(one)
        elif type(one).__module__ in {"builtins", "itertools"} and _iterates(one):
            for held in gc.get_referents(one):
                inside = held if type(held) is tuple else (held,)  # as `zip` keeps them
                todo += [each for each in inside if _iterates(each)]
    return found


def _iterates(obj: object) -> bool:
    """Return True if `obj` is an iterator by its type; the object itself is not asked."""
    return any("__next__" in vars(cls) for cls in type(obj).__mro__)
