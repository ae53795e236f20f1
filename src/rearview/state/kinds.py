"""What the instances of a class consist of: attributes, slots, a builtin base, or hidden memory.

The contract of a kind of object: what it leads to, how it is read, how it is written in place.

What the instances of a class consist of: attributes, slots, a builtin base, or hidden memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from rearview.errors import StateError
from rearview.state.codecs.functions import importable

if TYPE_CHECKING:
    from rearview.state.capture import Capture
    from rearview.state.restore import Writing
import types
from dataclasses import dataclass


class PathStep(NamedTuple):
    """One step from an object to what it holds; `style` and `key` make the path people read."""

    style: str
    """`.` attribute, `[` item, `{` element, `<` something without a spelling of its own."""
    key: object
    child: object


class Kind:
    """How one kind of anchor is walked, read and written; this base is a mere reference."""

    name = "ref"
    late = False
    """Whether it depends on the hashes of other objects: written after them."""
    unordered = False
    """Whether its order may be another in the next process: walked after all the rest."""

    def children(self, obj: Any, look: WalkRules) -> Iterable[PathStep]:
        """Yield what the walk goes on to, always in the same order."""
        return ()

    def read(self, objs: Sequence[Any], reading: Capture) -> list[Any] | None:
        """Return the shallow content of each object, or None when there is none to keep."""
        return None

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Make the live object have that content, in place."""
        raise StateError(f"A {self.name} of {type_name(type(obj))} has nothing to be set to.")

    def label(self, obj: Any) -> str:
        """Return the text that stands for the object in a signature."""
        return type_name(type(obj))


class WalkRules:
    """What a walk asks while it goes: is this worth entering, is that module the user's own."""

    def __init__(
        self, project: Callable[[Any], bool], is_atom: Callable[[type, Iterable[object]], bool]
    ) -> None:
        self.project = project
        self.is_atom = is_atom
        self.recorded: Sequence[str] | None = None
        """On replay, the closure variables of a function, or the functions of a class, that there
        were when it was recorded."""
        self._local: dict[type, bool] = {}

    def is_local(self, cls: type) -> bool:
        """Say whether a class is the user's own, or was made where no name leads to it."""
        known = self._local.get(cls)
        if known is None:
            known = self._local[cls] = bool(self.project(cls.__module__ or "")) or not importable(
                cls
            )
        return known

    def boring(self, items: Collection[object]) -> bool:
        """Say whether all items are values, without a Python call for each of them."""
        types = set(map(type, items))
        if tuple in types:
            types.discard(tuple)
            inner = list(chain.from_iterable(item for item in items if type(item) is tuple))
            if not self.boring(inner):
                return False
        return all(self.is_atom(t, items) for t in types)


def steps(style: str, pairs: Iterable[tuple[object, object]]) -> Iterator[PathStep]:
    """Yield a step for each key and child."""
    for key, child in pairs:
        yield PathStep(style, key, child)


def type_name(cls: type) -> str:
    """Return a name of the class that is the same in the next process."""
    return f"{cls.__module__}.{cls.__qualname__}"


REF = Kind()


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
