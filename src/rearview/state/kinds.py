"""The contract of a codec: how one kind of object is walked, captured and restored in place.

A `Kind` is a codec. While it works it may ask the capture or restore under way for what is in the
protocols `Capturing` and `Restoring`, and the walk for its `WalkRules`. `layout_of` tells where the
instances of a class keep their state: attributes, slots, a builtin base, or memory that only C code
can read.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol

from rearview.errors import StateError
from rearview.state.codecs.functions import importable
from rearview.state.memory import Blocks, Memory

_HEAP_TYPE = 1 << 9
_POINTER = 8
_MANAGED_DICT = -1  # kept before the object, so it takes no room in `__basicsize__`


class PathStep(NamedTuple):
    """One step from an object to what it holds; `style` and `key` make the path people read."""

    style: str
    """`.` attribute, `[` item, `{` element, `<` something without a spelling of its own."""
    key: object
    child: object


class Kind:
    """How one kind of anchor is walked, captured and restored; this base keeps a reference only."""

    name = "ref"
    late = False
    """Whether it depends on the hashes of other objects: restored after them."""
    unordered = False
    """Whether its order may differ in the next process: walked after everything else."""

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the objects that it holds, always in the same order."""
        return ()

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Return the shallow content of each object, or None if the kind has no content."""
        return None

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Give the live object that content, in place."""
        raise StateError(f"A {self.name} of {type_name(type(obj))} has nothing to be set to.")

    def label(self, obj: Any) -> str:
        """Return the text that describes the object in a signature."""
        return type_name(type(obj))


class WalkRules:
    """Which objects a walk enters, and which modules are the user's own."""

    def __init__(
        self,
        project: Callable[[Any], bool],
        is_atom: Callable[[type, Iterable[object]], bool],
        loop_modules: Collection[str] = (),
    ) -> None:
        self.project = project
        self.is_atom = is_atom
        self.loop_modules = loop_modules
        """Modules of libraries whose training loops are watched."""
        self.recorded: Sequence[str] | None = None
        """On replay: the closure variables of a function, or the functions of a class, that existed
        in the recording."""
        self._local: dict[type, bool] = {}

    def is_local(self, cls: type) -> bool:
        """Return True if a class is the user's own, or cannot be imported by its name."""
        local = self._local.get(cls)
        if local is None:
            local = bool(self.project(cls.__module__ or "")) or not importable(cls)
            self._local[cls] = local
        return local

    def boring(self, items: Collection[object]) -> bool:
        """Return True if all items are values; makes no Python call for each item."""
        types = set(map(type, items))
        if tuple in types:
            types.discard(tuple)
            inner = list(chain.from_iterable(item for item in items if type(item) is tuple))
            if not self.boring(inner):
                return False
        return all(self.is_atom(t, items) for t in types)


class AnchorTable(Protocol):
    """What codecs may ask of the anchors: the numbered objects of the walk."""

    index: dict[int, int]
    """Number of an anchor, by its `id`."""
    rules: WalkRules
    recipes: dict[tuple[Any, ...], Any]
    """How to build a set that iterates in a given order."""
    set_orders: dict[int, list[Any]]
    """Order of a set at the walk, by its `id`."""
    unheld: dict[int, tuple[int, Any]]
    """Anchors that are known by their address only: number and form."""

    def __len__(self) -> int:
        """Return the number of anchors."""

    def kind(self, obj: Any) -> Kind:
        """Return the kind of an object."""

    def same_graph(self, tensor: Any) -> bool:
        """Return True if the autograd graph of an anchor is the one it had at the walk."""


class Capturing(Protocol):
    """What codecs may ask of the capture under way."""

    careful: bool
    alive: list[Any]
    blocks: Blocks
    cells: list[types.CellType]
    found: dict[int, Any]
    loose: dict[int, Any]
    running: set[int]
    stand_ins: list[object]
    viewed: set[int]

    @property
    def anchors(self) -> AnchorTable:
        """The anchors that the capture refers to."""

    @property
    def plain_tensor(self) -> Any:
        """The reader of plain tensors."""

    def miss(self, obj: object, reason: str) -> None:
        """Report that `obj` cannot be captured: the capture is partial."""

    def is_running(self, function: str, name: str, cell: types.CellType) -> bool:
        """Return True if a closure variable belongs to a function on the stack."""


class Restoring(Protocol):
    """What codecs may ask of the restore under way."""

    memory: Memory
    afterwards: list[Callable[[], None]]
    """Actions that need all objects to exist."""
    generators: list[tuple[Any, Sequence[Any], dict[str, Any]]]
    """Generators with the yield they were suspended at and their locals."""
    loaders: list[tuple[Any, Any]]
    """Iterators of data loaders with what their samplers had drawn."""

    def path(self, obj: object) -> str:
        """Return how the program reaches an anchor."""


def steps(style: str, pairs: Iterable[tuple[object, object]]) -> Iterator[PathStep]:
    """Yield a step for each key and child."""
    for key, child in pairs:
        yield PathStep(style, key, child)


def type_name(cls: type) -> str:
    """Return a name of the class that is the same in the next process."""
    return f"{cls.__module__}.{cls.__qualname__}"


REF = Kind()


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
        """Whether attributes and slots are the whole state."""
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
