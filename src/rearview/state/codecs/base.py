"""The base class of all codecs (`Kind`), and builders, which build objects again that the loop created.

A *codec* walks, captures and restores the *anchors* of one kind: objects that existed when the loop was entered. The
*walk* (`object_numbers`) follows references from the program's variables, and so finds and numbers the anchors. The methods
of a codec get the running capture or restore as `Capturing` or `Restoring`, and the `WalkRules`. `layout_of` returns
where the instances of a class keep their state: in attributes, slots, a builtin base class, or memory that only C code
can read.

A *builder* is a function that a skeleton names and that `restore` calls to build an object. A skeleton never
names a function of Rearview directly, so that functions can be renamed. `Lost` takes the place of an object that
could not be captured: every use of it in a restored program calls `refuse`.
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
_MANAGED_DICT = (
    -1
)  # the interpreter keeps this dict before the object: `__basicsize__` does not count it


class PathStep(NamedTuple):
    """A step of the walk from an object to an object that it refers to; messages show `style` and `key`."""

    style: str
    """`.` for an attribute, `[` for an item, `{` for a key or an element of a set, `<` for any other reference."""
    key: object
    child: object
    """The object that the step leads to."""


class Kind:
    """A codec: walks, captures and restores anchors of one kind. This base class captures nothing."""

    name = "ref"
    """Name of the codec in skeletons."""
    restored_last = False
    """Whether these objects hash other objects, and are therefore restored after the objects of all other codecs."""
    unordered = False
    """Whether `children` may have another order in the next process; the walk therefore enters these objects last."""

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each object that `obj` refers to, in an order that is equal in every process."""
        return ()

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any] | None:
        """Return the content of each object, which may refer to other objects, or None if nothing is captured."""
        return None

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Restore the content of a live object in place, from what `read` returned for it."""
        raise StateError(
            f"A {type_name(type(obj))} is captured as a reference only ({self.name}), but the "
            "checkpoint holds content for it. Replay from the start of the loop."
        )

    def label(self, obj: Any) -> str:
        """Return the label of an anchor, which must be equal in a replay, except for names in parentheses."""
        return type_name(type(obj))


class WalkRules:
    """The rules of a walk: which modules belong to the project, and which objects are values."""

    def __init__(
        self,
        project: Callable[[Any], bool],
        is_atom: Callable[[type, Iterable[object]], bool],
        loop_modules: Collection[str] = (),
    ) -> None:
        self.project = project
        """Returns True for a module, or the name of a module, that belongs to the project."""
        self.is_atom = is_atom
        """Returns True if objects of a type are immutable values; the second argument contains objects of the type."""
        self.loop_modules = loop_modules
        """Modules of libraries whose training loops are watched."""
        self.recorded_names: Sequence[str] | None = None
        """In a replay, while the walk enters a function, class or generator: the names of those closure variables,
        functions or local variables to enter, which are the recorded ones. None: enter all of them.
        """
        self.owners_of_views = False
        """Whether the walk enters objects whose memory an array views, as earlier versions of Rearview did."""
        self._local: dict[type, bool] = {}
        """Class -> what `is_local` returned for the class."""

    def is_local(self, cls: type) -> bool:
        """Return True if a class belongs to the project, or cannot be imported by its name."""
        local = self._local.get(cls)
        if local is None:
            local = bool(self.project(cls.__module__ or "")) or not importable(cls)
            self._local[cls] = local
        return local

    def all_values(self, items: Collection[object], levels: int | None = None) -> bool:
        """Return True if all items are immutable values. This is fast, because no Python function is called per item.

        With `levels`, a tuple nested deeper than this number counts as mutable: a caller that calls this method for
        each nested tuple then looks at no item more than `levels` times.
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
    """The members of `object_numbers.Anchors` that codecs use, and that are described there."""

    index: dict[int, int]
    rules: WalkRules
    recipes: dict[tuple[Any, ...], Any]
    set_orders: dict[int, list[Any]]
    by_address: dict[int, tuple[int, Any]]

    def __len__(self) -> int:
        """Return the number of anchors."""

    def kind(self, obj: Any) -> Kind:
        """Return the codec of an object."""

    def has_same_graph(self, tensor: Any) -> bool:
        """Return True if a tensor has the autograd graph that it had when the loop was entered."""


class Capturing(Protocol):
    """The members of `capture.Capture`, the running capture, that codecs use, and that are described there."""

    check_sharing: bool
    alive: list[Any]
    blocks: Blocks
    cells: list[types.CellType]
    captured_by_address: dict[int, Any]
    presumed_unshared: dict[int, Any]
    running_cells: set[int]
    placeholders: list[object]
    ids_with_views: set[int]

    @property
    def anchors(self) -> AnchorTable:
        """The anchors that the capture refers to."""

    @property
    def plain_tensor(self) -> Any:
        """The function that `tensors.plain_reader` returns: it reads plain tensors fast."""

    def report_missing(self, obj: object, reason: str) -> None:
        """Add `obj` to the missing parts of the state, with the reason why it cannot be captured."""

    def belongs_to_running_function(self, function: str, name: str, cell: types.CellType) -> bool:
        """Return True if `cell`, the closure variable `name` of `function`, may belong to a call that still runs."""


class Restoring(Protocol):
    """The members of `restore.Restoration`, the running restore, that codecs use, and that are described there."""

    memory: RestoredMemory
    afterwards: list[Callable[[], None]]
    generators: list[tuple[Any, Sequence[Any], dict[str, Any]]]
    loaders: list[tuple[Any, Any]]

    def path(self, obj: object) -> str:
        """Return the path to an anchor, for messages."""


def steps(style: str, pairs: Iterable[tuple[object, object]]) -> Iterator[PathStep]:
    """Yield a step of the given style for each pair of key and child."""
    for key, child in pairs:
        yield PathStep(style, key, child)


def type_name(cls: type) -> str:
    """Return the full name of a class, such as `torch.nn.modules.linear.Linear`."""
    return f"{cls.__module__}.{cls.__qualname__}"


REF = Kind()
"""Codec of objects that are captured as references: a restore leaves each object as the set-up code made it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the instances of a class keep their state.

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
    """Whether instances have, in addition to the memory of `base`, memory that only C code can read."""

    @property
    def plain(self) -> bool:
        """Whether attributes and slots are the whole state of an instance."""
        return self.base is object and not self.hidden


def layout_of(cls: type) -> Layout:
    """Return the layout of instances of `cls`, computed from the sizes that the interpreter knows."""
    slots: list[types.MemberDescriptorType] = []
    hidden = False
    base: type = cls
    while base.__flags__ & _HEAP_TYPE:
        parent = base.__base__
        if parent is None:
            break
        own_slots = [d for d in vars(base).values() if isinstance(d, types.MemberDescriptorType)]
        unexplained_size = base.__basicsize__ - parent.__basicsize__ - _POINTER * len(own_slots)
        if base.__weakrefoffset__ > 0 and parent.__weakrefoffset__ == 0:
            unexplained_size -= _POINTER
        if base.__dictoffset__ not in {0, _MANAGED_DICT} and parent.__dictoffset__ == 0:
            unexplained_size -= _POINTER
        created_in_c = isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)
        hidden = hidden or unexplained_size > 0 or created_in_c
        slots.extend(own_slots)
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
"""Names of the builders. In skeletons, the builders have the first numbers, in this order, and the anchors the
following numbers. Changing the list makes old skeletons unreadable.
"""


class Builder:
    """Takes the place of a builder while a state is pickled, because pickle requires a callable there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_args: object) -> object:
        """Raise TypeError: a skeleton names a builder, and only `restore` calls the function of this name."""
        raise TypeError(f"the builder {self.name} is named in a stream, never called")


BUILDERS = {name: Builder(name) for name in NAMES}


@lru_cache(maxsize=4)
def prelude(count: int) -> bytes:
    """Return the pickle opcodes that put `count` persistent objects (builders, then anchors) into the memo.

    `capture` fills the memo of its pickler in the same order, so that a number means the same object in both.
    """
    loads = (b"J" + number.to_bytes(4, "little") + b"Q\x940" for number in range(count))
    return b"\x80\x05" + b"".join(loads)


REFUSAL_HANDLERS: list[Callable[[StateError], None]] = []
"""Functions that `refuse` calls with the error; a handler may start the program again and then not return."""


def refuse(error: StateError) -> NoReturn:
    """Call each of `REFUSAL_HANDLERS` with the error, then raise the error."""
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
    """Return why the object that `lost` replaces was not captured."""
    return str(object.__getattribute__(lost, "_reason"))
