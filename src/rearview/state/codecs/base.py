"""The base of all codecs: `Kind`, which walks, captures and restores one kind of object in place; and builders.

A codec is given the capture or restore that is running as `Capturing` or `Restoring`, and the walk's
`WalkRules`. `layout_of` returns where the instances of a class keep their state: attributes, slots, a
builtin base, or memory that only C code can read.

A *builder* is a function that a skeleton names and `restore` calls to build an object again. A skeleton never
names a function of Rearview directly, so functions can be renamed. `Lost` takes the place of an object that could
not be captured: a restored program that uses it fails by `refuse`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, NoReturn, Protocol

from rearview.errors import StateError
from rearview.state.code_lookup import importable
from rearview.state.memory_blocks import Blocks, RestoredMemory

_HEAP_TYPE = 1 << 9
_POINTER = 8
_MANAGED_DICT = -1  # kept before the object, so it takes no room in `__basicsize__`


class PathStep(NamedTuple):
    """One step from an object to an object that it holds; `style` and `key` are shown in messages."""

    style: str
    """`.` attribute, `[` item, `{` element, `<` anything else."""
    key: object
    child: object


class Kind:
    """A codec: walks, captures and restores one kind of anchor. This base class captures nothing."""

    name = "ref"
    late = False
    """Whether objects of this kind depend on the hashes of others, and are restored after them."""
    unordered = False
    """Whether the order of the children may differ in the next process: walked after the others."""

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the objects that `obj` holds, always in the same order."""
        return ()

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Return the shallow content of each object, or None if the kind has no content."""
        return None

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the content of a live object, in place."""
        raise StateError(
            f"A {type_name(type(obj))} is captured as a reference only ({self.name}), but the "
            "checkpoint holds content for it. Replay from the start of the loop."
        )

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
        """On replay: names of the recorded closure variables of the function that is being walked,
        or of the recorded functions of the class."""
        self.owners_of_views = False
        """Whether owners of the memory of arrays are walked, as by the versions that recorded them."""
        self._local: dict[type, bool] = {}

    def is_local(self, cls: type) -> bool:
        """Return True if a class belongs to the project, or cannot be imported by its name."""
        local = self._local.get(cls)
        if local is None:
            local = bool(self.project(cls.__module__ or "")) or not importable(cls)
            self._local[cls] = local
        return local

    def all_values(self, items: Collection[object], levels: int | None = None) -> bool:
        """Return True if all items are immutable values; fast: no Python call per item.

        With `levels`, tuples nested deeper than that count as mutable. A caller that then looks
        inside each tuple looks at no item more than `levels` times.
        """
        types = set(map(type, items))
        if tuple in types:
            if levels == 0:
                return False
            types.discard(tuple)
            inner = list(chain.from_iterable(item for item in items if type(item) is tuple))
            if not self.all_values(inner, None if levels is None else levels - 1):
                return False
        return all(self.is_atom(t, items) for t in types)


class AnchorTable(Protocol):
    """The anchors as codecs see them: the objects that the walk numbered."""

    index: dict[int, int]
    """Number of an anchor, by its `id`."""
    rules: WalkRules
    recipes: dict[tuple[Any, ...], Any]
    """For an order of elements: a recipe for a set that iterates in that order."""
    set_orders: dict[int, list[Any]]
    """Order of a set at the walk, by its `id`."""
    by_address: dict[int, tuple[int, Any]]
    """Arrays that are anchors without a reference: number and form, by their `id`."""

    def __len__(self) -> int:
        """Return the number of anchors."""

    def kind(self, obj: Any) -> Kind:
        """Return the kind of an object."""

    def same_graph(self, tensor: Any) -> bool:
        """Return True if a tensor has the autograd graph that it had at the walk."""


class Capturing(Protocol):
    """The running capture as codecs see it; the attributes are described in `capture.Capture`."""

    check_sharing: bool
    alive: list[Any]
    blocks: Blocks
    cells: list[types.CellType]
    met_by_address: dict[int, Any]
    presumed_unshared: dict[int, Any]
    running: set[int]
    placeholders: list[object]
    viewed: set[int]

    @property
    def anchors(self) -> AnchorTable:
        """The anchors that the capture refers to."""

    @property
    def plain_tensor(self) -> Any:
        """The function that reads plain tensors fast."""

    def miss(self, obj: object, reason: str) -> None:
        """Report that `obj` cannot be captured: the capture is partial."""

    def is_running(self, function: str, name: str, cell: types.CellType) -> bool:
        """Return True if a closure variable belongs to a function on the stack."""


class Restoring(Protocol):
    """The running restore as codecs see it."""

    memory: RestoredMemory
    afterwards: list[Callable[[], None]]
    """Actions that run when all objects exist."""
    generators: list[tuple[Any, Sequence[Any], dict[str, Any]]]
    """Generators with the yield they were suspended at and their locals."""
    loaders: list[tuple[Any, Any]]
    """Iterators of data loaders, each with its recorded state (`data_loaders.loader_state`)."""

    def path(self, obj: object) -> str:
        """Return the path to an anchor, for messages."""


def steps(style: str, pairs: Iterable[tuple[object, object]]) -> Iterator[PathStep]:
    """Yield a step for each key and child."""
    for key, child in pairs:
        yield PathStep(style, key, child)


def type_name(cls: type) -> str:
    """Return the full name of a class."""
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
    """The nearest base class that is written in C."""
    has_dict: bool
    slots: tuple[types.MemberDescriptorType, ...]
    hidden: bool
    """Whether a class between this one and `base` holds memory that only C code can read."""

    @property
    def plain(self) -> bool:
        """Whether attributes and slots are the whole state."""
        return self.base is object and not self.hidden


def layout_of(cls: type) -> Layout:
    """Return the layout of `cls`, computed from the sizes that the interpreter keeps."""
    slots: list[types.MemberDescriptorType] = []
    hidden = False
    base: type = cls
    while base.__flags__ & _HEAP_TYPE:
        parent = base.__base__
        if parent is None:
            break
        own = [d for d in vars(base).values() if isinstance(d, types.MemberDescriptorType)]
        extra = base.__basicsize__ - parent.__basicsize__ - _POINTER * len(own)
        if base.__weakrefoffset__ > 0 and parent.__weakrefoffset__ == 0:
            extra -= _POINTER
        if base.__dictoffset__ not in {0, _MANAGED_DICT} and parent.__dictoffset__ == 0:
            extra -= _POINTER
        created_in_c = isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)
        hidden = hidden or extra > 0 or created_in_c
        slots.extend(own)
        base = parent
    has_dict = cls.__dictoffset__ != 0
    return Layout(base, has_dict, tuple(slots), hidden)


NAMES = (
    "anchor",
    "tensor",
    "special_tensor",
    "array",
    "small_array",
    "function",
    "method",
    "cell",
    "weakref",
    "proxy",
    "address",
    "weak",
    "fill_weak",
    "instance",
    "fill",
    "file",
    "lock",
    "module",
    "named",
    "view",
    "torch_generator",
    "generator",
    "live_generator",
    "fill_generator",
    "walk",
    "fill_walk",
    "loader",
    "fill_loader",
    "lost",
)


class Builder:
    """Represents a builder in a pickle stream: pickle requires a callable there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_args: object) -> object:
        """Raise TypeError: a builder is only named in a stream, never called."""
        raise TypeError(f"the builder {self.name} is named in a stream, never called")


BUILDERS = {name: Builder(name) for name in NAMES}


@lru_cache(maxsize=4)
def prelude(count: int) -> bytes:
    """Return pickle opcodes that load `count` persistent objects into the memo, in order.

    Capture fills the memo of its pickler in the same order, so the numbers agree.
    """
    loads = (b"J" + number.to_bytes(4, "little") + b"Q\x940" for number in range(count))
    return b"\x80\x05" + b"".join(loads)


REFUSAL_HANDLERS: list[Callable[[StateError], None]] = []
"""Called by `refuse` with the error; a handler may start the program again instead of returning."""


def refuse(error: StateError) -> NoReturn:
    """Call the handlers, then raise the error."""
    for handler in REFUSAL_HANDLERS:
        handler(error)
    raise error


class Lost:
    """Takes the place of an object that was not captured; every use of it raises StateError."""

    def __init__(self, reason: str) -> None:
        object.__setattr__(self, "_reason", reason)

    def __getattribute__(self, name: str) -> Any:
        if name in {"__class__", "__reduce_ex__", "__reduce__"}:
            return object.__getattribute__(self, name)
        return refuse(
            StateError(
                "This object was not part of the checkpoint "
                f"({object.__getattribute__(self, '_reason')}). Replay from the start of the loop.",
                slug="state-lost",
            )
        )

    def _refuse(self, *_args: object) -> Any:
        return Lost.__getattribute__(self, "use")

    __call__ = __iter__ = __next__ = __len__ = __getitem__ = __bool__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __rtruediv__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __mod__ = __rmod__ = _refuse
    __floordiv__ = __rfloordiv__ = __neg__ = __abs__ = __float__ = __int__ = __index__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse


def reason_of(lost: Lost) -> str:
    """Return why an object was not captured."""
    return str(object.__getattribute__(lost, "_reason"))
