"""What the instances of a class consist of: attributes, slots, a builtin base, or hidden memory."""

from __future__ import annotations

import types
from dataclasses import dataclass

_HEAP_TYPE = 1 << 9
_POINTER = 8
_MANAGED_DICT = -1  # kept before the object, so it takes no room in `__basicsize__`


@dataclass(frozen=True, slots=True)
class Layout:
    """Where an instance keeps its state.

    >>> class Point:
    ...     __slots__ = ("x", "y")
    >>> layout_of(Point).base, [slot.__name__ for slot in layout_of(Point).slots]
    (<class 'object'>, ['x', 'y'])
    """

    base: type
    """The nearest class that is not written in Python."""
    has_dict: bool
    slots: tuple[types.MemberDescriptorType, ...]
    hidden: bool
    """Whether some class on the way to `base` holds memory that only C code can read."""

    @property
    def plain(self) -> bool:
        """Say whether attributes and slots are the whole state."""
        return self.base is object and not self.hidden


def layout_of(cls: type) -> Layout:
    """Return the layout of `cls`, worked out from the sizes the interpreter keeps."""
    slots: list[types.MemberDescriptorType] = []
    hidden = False
    here: type = cls
    while here.__flags__ & _HEAP_TYPE:
        below = here.__base__
        if below is None:
            break
        own = [d for d in vars(here).values() if isinstance(d, types.MemberDescriptorType)]
        extra = here.__basicsize__ - below.__basicsize__ - _POINTER * len(own)
        if here.__weakrefoffset__ > 0 and below.__weakrefoffset__ == 0:
            extra -= _POINTER
        if here.__dictoffset__ not in {0, _MANAGED_DICT} and below.__dictoffset__ == 0:
            extra -= _POINTER
        made_in_c = isinstance(vars(here).get("__new__"), types.BuiltinFunctionType)
        hidden = hidden or extra > 0 or made_in_c
        slots.extend(own)
        here = below
    has_dict = cls.__dictoffset__ != 0
    return Layout(here, has_dict, tuple(slots), hidden)
