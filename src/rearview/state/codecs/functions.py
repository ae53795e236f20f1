"""Functions and classes by name: which can be imported, and where the code of nested ones is."""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Self

from rearview.errors import StateError

Place = tuple[str, str, int, str]
"""Module, qualified name, number among those of that name, digest of the code."""


class Standin(functools.partial[Any]):
    """What was put in the place of a builtin function: kept by name, as that function would be.

    Being no Python function, it is no method of a class that holds it, either. Calling it adds no frame.
    """

    def __new__(cls, call: Callable[..., Any], real: Any) -> Self:
        """Return what calls `call` and looks like the builtin function `real`."""
        made = super().__new__(cls, call)
        functools.update_wrapper(made, real)
        return made

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        return self

    def __repr__(self) -> str:
        return repr(vars(self)["__wrapped__"])

    def __reduce__(self) -> str:
        return str(vars(self)["__qualname__"])


def importable(obj: Any) -> bool:
    """Return True if module and qualified name lead back to this very object."""
    module = sys.modules.get(obj.__module__ or "")
    found: Any = module
    for part in obj.__qualname__.split("."):
        found = getattr(found, part, None)
        if found is None:
            return False
    return found is obj


def named(obj: Any, module_name: str) -> str | None:
    """Return the dotted name under which a module, or a class in it, holds this very object."""
    module = sys.modules.get(module_name)
    held = dict(vars(module)) if module is not None else {}
    for name, value in held.items():
        if value is obj:
            return name
        if isinstance(value, type) and value.__module__ == module_name:
            for inner, part in list(vars(value).items()):
                if part is obj:
                    return f"{name}.{inner}"
    return None


def locate(function: types.FunctionType) -> Place | None:
    """Return where the code of a nested function stands in its module, or None."""
    code = function.__code__
    same = [c for c in codes(function.__module__) if c.co_qualname == code.co_qualname]
    for number, candidate in enumerate(same):
        if candidate is code or candidate == code:
            return function.__module__, code.co_qualname, number, digest(code)
    return None


def code_at(place: Place) -> types.CodeType:
    """Return the code that stands at a place, by what it does before where it stands.

    Probes add lines and perhaps functions, so line numbers say nothing.
    """
    module, qualname, number, wanted = place
    same = [c for c in codes(module) if c.co_qualname == qualname]
    for candidate in same:
        if digest(candidate) == wanted:
            return candidate
    if number < len(same):
        return same[number]
    raise StateError(
        f"The function {qualname} is not in {module} any more. "
        "Replay with the source that was recorded plus probes only.",
        slug="state-function",
    )


def digest(code: types.CodeType) -> str:
    """Return a hash of what a function does, the same wherever its lines have moved."""
    seen = hashlib.sha256(code.co_code)
    for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        seen.update(repr(part).encode())
    for const in code.co_consts:
        seen.update((digest(const) if isinstance(const, types.CodeType) else repr(const)).encode())
    return seen.hexdigest()[:16]


def codes(module_name: str) -> Iterator[types.CodeType]:
    """Yield every code object of a module that can be found, parents before children."""
    seen: set[int] = set()
    for top in _tops(module_name):
        stack = [top]
        while stack:
            code = stack.pop()
            if id(code) in seen:
                continue
            seen.add(id(code))
            yield code
            inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
            stack.extend(reversed(inner))


def _tops(module_name: str) -> Iterator[types.CodeType]:
    module = sys.modules.get(module_name)
    if module is None:
        return
    # The module's own code runs now, or is gone; running, it holds all the others.
    for frame in sys._current_frames().values():
        here: types.FrameType | None = frame
        while here is not None:
            if here.f_globals is vars(module):
                yield here.f_code
            here = here.f_back
    yield from _held(vars(module), module_name, set())


def _held(names: Any, module_name: str, seen: set[int]) -> Iterator[types.CodeType]:
    for value in list(names.values()):
        target = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        while target is not None and id(target) not in seen:
            seen.add(id(target))
            if isinstance(target, types.FunctionType):
                yield target.__code__
                for cell in target.__closure__ or ():
                    held = getattr(cell, "cell_contents", None) if _bound(cell) else None
                    if isinstance(held, types.FunctionType):
                        yield from _held({"": held}, module_name, seen)
            elif isinstance(target, type) and target.__module__ == module_name:
                yield from _held(vars(target), module_name, seen)
            target = getattr(target, "__wrapped__", None)


def _bound(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
