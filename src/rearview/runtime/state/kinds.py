"""The contract of a kind of object: what it leads to, how it is read, how it is written in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from rearview.errors import StateError
from rearview.runtime.state.programs import importable

if TYPE_CHECKING:
    from rearview.runtime.state.reading import Reading
    from rearview.runtime.state.writing import Writing


class Step(NamedTuple):
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

    def children(self, obj: Any, look: Look) -> Iterable[Step]:
        """Yield what the walk goes on to, always in the same order."""
        return ()

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any] | None:
        """Return the shallow content of each object, or None when there is none to keep."""
        return None

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Make the live object have that content, in place."""
        raise StateError(f"A {self.name} of {type_name(type(obj))} has nothing to be set to.")

    def label(self, obj: Any) -> str:
        """Return the text that stands for the object in a signature."""
        return type_name(type(obj))


class Look:
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


def steps(style: str, pairs: Iterable[tuple[object, object]]) -> Iterator[Step]:
    """Yield a step for each key and child."""
    for key, child in pairs:
        yield Step(style, key, child)


def type_name(cls: type) -> str:
    """Return a name of the class that is the same in the next process."""
    return f"{cls.__module__}.{cls.__qualname__}"


REF = Kind()
