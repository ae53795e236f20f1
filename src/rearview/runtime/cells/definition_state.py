"""The state that functions and classes of a notebook keep: attributes, defaults, and variables of closures.

Running the text of a definition makes it again, but without the changes that cells have made to it since: a counter in
a class, a list that is a default, an attribute of a function.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rearview.runtime.cells.cell_analysis import Definition
from rearview.runtime.cells.library_state import digest_of
from rearview.state.variable_groups import attributes_of, serialize

_OWN_CLASS = ("cls.", "type.", "self.__class__.")
"""Beginnings of assignment targets in methods that change their class."""


def definition_state(value: Any, references: Mapping[int, str]) -> str:
    """Return a digest of the state that a function or class keeps.

    `references` are the definitions of the notebook by address: they are referred to by name.
    """
    try:
        return digest_of([(place, _digest(part, references)) for place, part in _parts(value)])
    except Exception:  # an object that a decorator returns may raise on any access
        return f"{type(value).__qualname__} at {id(value)}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each part of the state of a function or class, with its place."""
    if isinstance(value, type):
        for name, attribute in attributes_of(value).items():
            functions = list(_functions_of(attribute))
            if not functions:
                yield name, attribute
            for function in functions:
                yield from ((f"{name}.{place}", part) for place, part in _parts(function))
        return
    for function in _functions_of(value):
        code = function.__code__
        constants = [each for each in code.co_consts if not isinstance(each, types.CodeType)]
        yield "<code>", (function.__qualname__, code.co_code, code.co_names, repr(constants))
        yield (
            "<attributes>",
            {
                name: attribute
                for name, attribute in attributes_of(function).items()
                # ipywidgets' `interact` stores its widgets in the function
                if name != "__wrapped__"
                and not type(attribute).__module__.startswith("ipywidgets.")
            },
        )
        for cell in function.__closure__ or ():
            yield "<closure>", _content(cell)


def _content(cell: types.CellType) -> Any:
    try:
        content = cell.cell_contents
    except ValueError:
        return None  # the variable has no value yet
    return None if isinstance(content, types.FunctionType | type) else content


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a function, method, property or wrapper; nothing for other values."""
    accessors = (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
    for accessor in accessors:
        function = getattr(accessor, "__func__", accessor)
        for _ in range(10):  # wrappers of wrappers
            if isinstance(function, types.FunctionType):
                yield function
            function = getattr(function, "__wrapped__", None)
            if function is None:
                break


def _digest(value: Any, references: Mapping[int, str]) -> str:
    def by_name(obj: Any) -> str | None:
        return references.get(id(obj)) if isinstance(obj, types.FunctionType | type) else None

    try:
        return serialize({"": value}, by_name=by_name, owned=True).digest
    except Exception:
        return f"{type(value).__qualname__} at {id(value)}"


def changes_definitions(
    definitions: Iterable[Definition],
    effects: Iterable[str],
    used: Iterable[str],
    loaded: Mapping[str, Any],
) -> bool:
    """Return True if a cell may change the state of functions and classes that it has defined itself.

    `effects` are its calls for their effect and its assignments to attributes, dotted; `used` the names that its other
    statements use; `loaded` the variables after it.
    """
    own = {each.name: each for each in definitions}
    for effect in effects:
        root, _, rest = effect.partition(".")
        if root.rstrip("=") in own and (rest or root.endswith("=")):
            return True
    for name in own.keys() & set(used):
        methods_assign = any(
            call.endswith("=") and (call.startswith(_OWN_CLASS) or call.partition(".")[0] in own)
            for call in own[name].calls
        )
        if methods_assign or any(map(_is_mutable, _plain_parts(loaded.get(name)))):
            return True
    return False


def _plain_parts(value: Any) -> Iterator[Any]:
    for place, part in _parts(value):
        if place.endswith("<attributes>"):
            yield from part.values()
            yield from part["__defaults__"] or ()
            yield from (part["__kwdefaults__"] or {}).values()
        elif not place.endswith("<code>"):
            yield part


def _is_mutable(value: Any) -> bool:
    return isinstance(value, list | dict | set | bytearray)
