"""Find functions and classes by name, and the code of nested functions by its location in a module.

`PatchedBuiltin` is the class of the objects by which Rearview replaces builtin functions.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Self

from rearview.errors import StateError

CodeLocation = tuple[str, str, int, str]
"""(module, qualified name, number among the module's functions with this qualified name, digest of the code)."""


class PatchedBuiltin(functools.partial[Any]):
    """An object that replaces a builtin function, and that pickle stores by its name, like the builtin.

    Like a builtin, the object does not become a method in a class, and calling the object adds no frame to the stack.
    """

    def __new__(cls, call: Callable[..., Any], real: Any) -> Self:
        """Return an object that calls `call` and has the name and docstring of the builtin function `real`."""
        replacement = super().__new__(cls, call)
        functools.update_wrapper(replacement, real)
        return replacement

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        return self

    def __repr__(self) -> str:
        return repr(vars(self)["__wrapped__"])

    def __reduce__(self) -> str:
        return str(vars(self)["__qualname__"])


def importable(obj: Any) -> bool:
    """Return True if looking up `obj.__qualname__` in the module of `obj` gives `obj` itself."""
    module = sys.modules.get(obj.__module__ or "")
    value: Any = module
    for part in obj.__qualname__.split("."):
        value = getattr(value, part, None)
        if value is None:
            return False
    return value is obj


def name_in_module(obj: Any, module_name: str) -> str | None:
    """Return the name of `obj` in a module: `name` for an attribute, `Class.name` for an attribute of a class.

    Return None if `obj` is no attribute of the module or of a class that the module defines.
    """
    module = sys.modules.get(module_name)
    attributes = dict(vars(module)) if module is not None else {}
    for name, value in attributes.items():
        if value is obj:
            return name
        if isinstance(value, type) and value.__module__ == module_name:
            for inner, part in list(vars(value).items()):
                if part is obj:
                    return f"{name}.{inner}"
    return None


def locate(function: types.FunctionType) -> CodeLocation | None:
    """Return the location of a nested function's code in its module, or None if the code is not found there."""
    code = function.__code__
    candidates = [c for c in codes(function.__module__) if c.co_qualname == code.co_qualname]
    for number, candidate in enumerate(candidates):
        if candidate is code or candidate == code:
            return function.__module__, code.co_qualname, number, digest(code)
    return None


def code_at(location: CodeLocation) -> types.CodeType:
    """Return the code at a location: the code with the recorded digest, or else the code with the recorded number.

    A location has no line number, because probes add lines. Raise StateError if the code no longer exists.
    """
    module, qualname, number, recorded_digest = location
    candidates = [c for c in codes(module) if c.co_qualname == qualname]
    for candidate in candidates:
        if digest(candidate) == recorded_digest:
            return candidate
    if number < len(candidates):
        return candidates[number]
    raise StateError(
        f"The function {qualname} no longer exists in {module}. "
        "Replay with the recorded source plus probes only.",
        slug="state-function",
    )


def digest(code: types.CodeType) -> str:
    """Return a hash of the code of a function that does not depend on line numbers."""
    hasher = hashlib.sha256(code.co_code)
    for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars):
        hasher.update(repr(part).encode())
    for const in code.co_consts:
        hasher.update(
            (digest(const) if isinstance(const, types.CodeType) else repr(const)).encode()
        )
    return hasher.hexdigest()[:16]


def codes(module_name: str) -> Iterator[types.CodeType]:
    """Yield the code of all functions of a loaded module; a function's code comes before that of nested functions."""
    visited_ids: set[int] = set()
    for top in _outer_codes(module_name):
        stack = [top]
        while stack:
            code = stack.pop()
            if id(code) in visited_ids:
                continue
            visited_ids.add(id(code))
            yield code
            inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
            stack.extend(reversed(inner))


def _outer_codes(module_name: str) -> Iterator[types.CodeType]:
    module = sys.modules.get(module_name)
    if module is None:
        return
    # the code of the module itself contains the code of all functions, but exists only while the module is executed
    for frame in sys._current_frames().values():
        caller: types.FrameType | None = frame
        while caller is not None:
            if caller.f_globals is vars(module):
                yield caller.f_code
            caller = caller.f_back
    yield from _codes_in(vars(module), module_name, set())


def _codes_in(attributes: Any, module_name: str, visited_ids: set[int]) -> Iterator[types.CodeType]:
    """Yield the code of functions among `attributes`, in their closures, and in classes of the module."""
    for value in list(attributes.values()):
        target = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        while target is not None and id(target) not in visited_ids:
            visited_ids.add(id(target))
            if isinstance(target, types.FunctionType):
                yield target.__code__
                for cell in target.__closure__ or ():
                    inner = getattr(cell, "cell_contents", None) if _is_bound(cell) else None
                    if isinstance(inner, types.FunctionType):
                        yield from _codes_in({"": inner}, module_name, visited_ids)
            elif isinstance(target, type) and target.__module__ == module_name:
                yield from _codes_in(vars(target), module_name, visited_ids)
            target = getattr(target, "__wrapped__", None)


def _is_bound(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
