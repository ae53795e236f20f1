"""Builtin containers: their items, kept in order, written back without breaking live iterators."""

from __future__ import annotations

import array
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rearview.runtime.state.kinds import Kind, Look, Step, steps
from rearview.runtime.state.layout import Layout

if TYPE_CHECKING:
    from rearview.runtime.state.reading import Reading
    from rearview.runtime.state.writing import Writing


def fill_dict(live: dict[Any, Any], content: Mapping[Any, Any], base: type = dict) -> None:
    """Give `live` those items in that order; untouched keys keep their place.

    A loop of the program may be iterating over `live`, so keys are only taken out and put back
    when they differ. Keys are hashed anew: a key may be an anchor that was itself restored.
    """
    write: Any = base.__setitem__  # type: ignore[attr-defined]
    if len(live) == len(content) and all(
        a is b or (type(a) is str and a == b) for a, b in zip(live, content, strict=True)
    ):
        for key, value in content.items():
            write(live, key, value)
        return
    items = list(content.items())
    base.clear(live)  # type: ignore[attr-defined]
    for key, value in items:
        write(live, key, value)


class DictKind(Kind):
    """A dict: values and keys, in order."""

    name = "dict"
    late = True
    base: type = dict

    def children(self, obj: Any, look: Look) -> Iterable[Step]:
        """Yield values under their keys, then keys that are objects themselves."""
        values = self.base.values(obj)  # type: ignore[attr-defined]
        if not look.boring(values):
            yield from steps("[", self.base.items(obj))  # type: ignore[attr-defined]
        keys = list(self.base.keys(obj))  # type: ignore[attr-defined]
        if not look.boring(keys):
            yield from steps("{", ((None, key) for key in keys))

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return a shallow copy of each as a plain dict."""
        return [dict(o) for o in objs]

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Put the items back in order."""
        fill_dict(obj, content, self.base)


class PlainDictKind(DictKind):
    """Exactly a dict, so that copying it is one call."""

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return a shallow copy of each."""
        return [o.copy() for o in objs]


class OrderedDictKind(DictKind):
    """An OrderedDict, which keeps its own order beside the dict's."""

    base = OrderedDict

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return the items of each in its own order."""
        return [dict(OrderedDict.items(o)) for o in objs]


class DefaultDictKind(DictKind):
    """A defaultdict: the items and the factory."""

    name = "defaultdict"
    base = defaultdict

    def children(self, obj: Any, look: Look) -> Iterable[Step]:
        """Yield the items and the factory."""
        yield from super().children(obj, look)
        yield Step(".", "default_factory", obj.default_factory)

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return items and factory of each."""
        return [(dict(o), o.default_factory) for o in objs]

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Put back the items and the factory."""
        fill_dict(obj, content[0], dict)
        obj.default_factory = content[1]


class ListKind(Kind):
    """A list."""

    name = "list"

    def children(self, obj: Any, look: Look) -> Iterable[Step]:
        """Yield the items."""
        return () if look.boring(obj) else steps("[", enumerate(list.copy(obj)))

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return a copy of each."""
        return [list.copy(o) for o in objs]

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Replace the items; iterators over the list go on by index."""
        list.__setitem__(obj, slice(None), content)


class DequeKind(Kind):
    """A deque; its bound is fixed when it is made."""

    name = "deque"

    def children(self, obj: Any, look: Look) -> Iterable[Step]:
        """Yield the items."""
        return () if look.boring(obj) else steps("[", enumerate(list(obj)))

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return the items of each."""
        return [list(o) for o in objs]

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Replace the items."""
        if len(obj) == len(content) and all(a is b for a, b in zip(obj, content, strict=True)):
            return
        deque.clear(obj)
        deque.extend(obj, content)


def insertion_order(items: list[Any]) -> list[Any] | None:
    """Return an order of adding that makes a set iterate as `items`, or None if none was found.

    A set iterates by the places in its table, which depend on the order of insertion where two
    hashes meet, and on how large the table has grown.

    >>> insertion_order([8, 0]), insertion_order([0, 8])
    ([8, 0], [0, 8])
    """
    for order in (items, items[::-1]):
        if list(set(order)) == items:
            return order
    return None


class SetKind(Kind):
    """A set; its order of iteration is kept for values, whose hashes are the same next time."""

    name = "set"
    late = True
    unordered = True

    def children(self, obj: Any, look: Look) -> Iterable[Step]:
        """Yield the elements."""
        return () if look.boring(obj) else steps("{", ((None, item) for item in list(obj)))

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return the elements of each in the order in which they must be added."""
        contents = []
        for obj in objs:
            items = list(set.copy(obj)) if type(obj) is not set else list(obj)
            if len(items) > 1 and reading.anchors.look.boring(items):
                order = insertion_order(items)
                if order is None:
                    reading.miss(obj, "the order of this set comes from deleted elements")
                items = order or items
            contents.append(items)
        return contents

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Replace the elements."""
        if list(obj) == content:
            return
        set.clear(obj)
        set.update(obj, content)


class BytesKind(Kind):
    """A bytearray."""

    name = "bytes"

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return the bytes of each."""
        return [bytes(o) for o in objs]

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Replace the bytes."""
        obj[:] = content


class TypedArrayKind(Kind):
    """An `array.array`."""

    name = "typed array"

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return type code and bytes of each."""
        return [(o.typecode, o.tobytes()) for o in objs]

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Replace the numbers."""
        obj[:] = array.array(content[0], content[1])


class WeakDictKind(Kind):
    """A WeakKeyDictionary or WeakValueDictionary: the pairs still alive."""

    name = "weak dict"
    late = True
    unordered = True

    def children(self, obj: Any, look: Look) -> Iterable[Step]:
        """Yield values, then keys."""
        pairs = list(obj.items())
        yield from steps("[", pairs)
        yield from steps("{", ((None, key) for key, _ in pairs))

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return the live pairs of each."""
        return [list(o.items()) for o in objs]

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Put back the pairs; what nobody else holds is gone again, as it would have been."""
        obj.clear()
        for key, value in content:
            obj[key] = value


class WeakSetKind(Kind):
    """A WeakSet: the elements still alive."""

    name = "weak set"
    late = True
    unordered = True

    def children(self, obj: Any, look: Look) -> Iterable[Step]:
        """Yield the elements."""
        return steps("{", ((None, item) for item in list(obj)))

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return the live elements of each."""
        return [list(o) for o in objs]

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Put back the elements."""
        obj.clear()
        obj.update(content)


class AttributedKind(Kind):
    """A subclass of a container, which has attributes of its own besides its items."""

    def __init__(self, inner: Kind, layout: Layout) -> None:
        from rearview.runtime.state.objects import ObjectKind

        self.inner = inner
        self.attrs = ObjectKind(layout)
        self.name = f"{inner.name} with attributes"
        self.late = inner.late
        self.unordered = inner.unordered

    def children(self, obj: Any, look: Look) -> Iterable[Step]:
        """Yield attributes, then items."""
        yield from self.attrs.children(obj, look)
        yield from self.inner.children(obj, look)

    def read(self, objs: Sequence[Any], reading: Reading) -> list[Any]:
        """Return items and attributes of each."""
        inner = self.inner.read(objs, reading)
        return list(zip(inner or (), self.attrs.read(objs, reading), strict=True))

    def write(self, obj: Any, content: Any, writing: Writing) -> None:
        """Put back both."""
        self.attrs.write(obj, content[1], writing)
        self.inner.write(obj, content[0], writing)


CONTAINERS: dict[type, Kind] = {
    list: ListKind(),
    dict: DictKind(),
    set: SetKind(),
    deque: DequeKind(),
    OrderedDict: OrderedDictKind(),
    defaultdict: DefaultDictKind(),
    bytearray: BytesKind(),
    array.array: TypedArrayKind(),
}
PLAIN_DICT = PlainDictKind()
WEAK_CONTAINERS: dict[type, Kind] = {
    weakref.WeakKeyDictionary: WeakDictKind(),
    weakref.WeakValueDictionary: WeakDictKind(),
    weakref.WeakSet: WeakSetKind(),
}
