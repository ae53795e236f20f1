"""Codecs of builtin containers: dict, list, set, deque and so on, with their iteration order.

They restore a container without breaking live iterators over it. The iteration order of a set
depends on how it was filled; `set_recipe` finds insertions that give the same order again.
"""

from __future__ import annotations

import array
import random
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rearview.state.codecs.base import Capturing, Kind, PathStep, Restoring, WalkRules, steps
from rearview.state.memory_blocks import is_tensor

_STARTS = 60
_REPAIRS = 40
_LONG = 200
_ATOMS = (str, int, float, bytes, bool, type(None))


def has_stable_hash(key: Any) -> bool:
    """Return True if a restore of other objects cannot change the hash of a key."""
    cls = type(key)
    by_identity = getattr(cls, "__hash__") is getattr(object, "__hash__")  # noqa: B009
    if cls in _ATOMS or by_identity or is_tensor(key):
        return True
    return cls is tuple and all(has_stable_hash(part) for part in key)


def build_set(recipe: Sequence[Any]) -> set[Any]:
    """Return the set of a recipe: a list is inserted in order; a tuple too, and the set then copied."""
    if isinstance(recipe, list):
        return set(recipe)
    grown = set(recipe)
    return set(grown)


def recipe_for(items: list[Any]) -> Sequence[Any] | None:
    """Return a recipe for a set that iterates as `items`, or None if none was found.

    A set iterates over the slots of its hash table. An element's slot depends on the order of
    insertion if hashes collide, and on the size of the table, which differs when a set is copied.
    So this function tries and repairs orders of insertion until one fits.

    >>> recipe_for([8, 0]), recipe_for([0, 8])
    ([8, 0], [0, 8])
    """
    generator = random.Random(0)  # noqa: S311
    starts = _STARTS if len(items) <= _LONG else 4
    for form in (list, tuple):
        for start in range(starts):
            order = items[::-1] if start == 1 else list(items)
            if start > 1:
                generator.shuffle(order)
            for _ in range(_REPAIRS):
                produced = list(build_set(form(order)))
                wrong = next((i for i, item in enumerate(produced) if item != items[i]), None)
                if wrong is None:
                    return form(order)
                _repair(
                    order,
                    early=produced[wrong],
                    late=items[wrong],
                    generator=generator,
                    move_last=start % 2 == 1,
                )
    return None


def _repair(
    order: list[Any], *, early: Any, late: Any, generator: random.Random, move_last: bool
) -> None:
    """Move the element that came too early to the end, or insert the one that came too late before."""
    if move_last:
        order.remove(early)
        order.append(early)
    else:
        order.remove(late)
        order.insert(generator.randrange(order.index(early) + 1), late)


def set_recipe(obj: Any, items: list[Any], capturing: Capturing) -> Sequence[Any]:
    """Return a recipe for a set; report the set as missing if its order cannot be reproduced."""
    if len(items) < 2 or not capturing.anchors.rules.all_values(items) or list(set(items)) == items:
        return items
    recipes = capturing.anchors.recipes
    key = tuple(items)
    if key not in recipes:
        if len(recipes) >= _LONG:
            recipes.clear()
        recipes[key] = recipe_for(items)
    recipe = recipes[key]
    if recipe is None:
        capturing.report_missing(obj, "the order of this set comes from deleted elements")
    return recipe or items


def fill_set(obj: Any, recipe: Sequence[Any]) -> None:
    """Replace the elements of a live set by those of a recipe, in its order."""
    target = build_set(recipe)
    if all(map(has_stable_hash, recipe)) and list(obj) == list(target):
        return
    set.clear(obj)
    set.update(obj, recipe if isinstance(recipe, list) else set(recipe))


_LOWEST_ADDRESS = 1 << 24


def fill_dict(live: dict[Any, Any], content: Mapping[Any, Any], base: type = dict) -> None:
    """Replace the items of `live` by `content`, in its order; equal keys stay where they are.

    The program may be iterating over `live`, so keys are removed and inserted only if they differ.
    They are then hashed again: a key may be an anchor that was itself restored.
    """
    write: Any = getattr(base, "__setitem__")  # noqa: B009
    if len(live) == len(content) and all(
        (type(a) is str and a == b) or (a is b and has_stable_hash(a))
        for a, b in zip(live, content, strict=True)
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

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the values by key, then the keys that are not plain values."""
        values = self.base.values(obj)  # type: ignore[attr-defined]
        if not rules.all_values(values):
            yield from steps("[", self.base.items(obj))  # type: ignore[attr-defined]
        keys = list(self.base.keys(obj))  # type: ignore[attr-defined]
        if not rules.all_values(keys):
            yield from steps("{", ((None, key) for key in keys))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return a shallow copy of each as a plain dict."""
        # most are empty: a torch module has a dozen of them
        length: Any = self.base.__len__  # type: ignore[attr-defined]
        items: Any = self.base.items  # type: ignore[attr-defined]
        return [plain_copy(dict(items(o)), capturing) if length(o) else {} for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the items, in order."""
        fill_dict(obj, content, self.base)


class ObjectId:
    """Represents the `id` of an object in a content; the number differs in the next process."""

    __slots__ = ("target",)

    def __init__(self, target: object) -> None:
        self.target = target


def plain_copy(copy: dict[Any, Any], capturing: Capturing) -> dict[Any, Any]:
    """Return the copy of a dict, with an `ObjectId` for each key that is the `id` of an anchor."""
    keys = with_marked_keys(copy, capturing) if copy else None
    return copy if keys is None else dict(zip(keys, copy.values(), strict=True))


def with_marked_keys(keys: Any, capturing: Capturing) -> list[Any] | None:
    """Return the keys with an `ObjectId` for each `id` of an anchor, or None if there is none.

    Keras keeps the `id` of each of its variables in a set; many dicts of parameters do the same.
    """
    first = next(iter(keys), None)
    if type(first) is not int or first < _LOWEST_ADDRESS:
        return None
    index, alive = capturing.anchors.index, capturing.alive
    if index.keys().isdisjoint(keys):
        return None
    return [ObjectId(alive[index[key]]) if key in index else key for key in keys]


class PlainDictKind(DictKind):
    """A dict of exactly that class: copied by one call."""

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return a shallow copy of each."""
        return [plain_copy(o.copy(), capturing) for o in objs]


class OrderedDictKind(DictKind):
    """An OrderedDict, which keeps its own order in addition to the dict's."""

    base = OrderedDict


class DefaultDictKind(DictKind):
    """A defaultdict: the items and the factory."""

    name = "defaultdict"
    base = defaultdict

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the items and the factory."""
        yield from super().children(obj, rules)
        yield PathStep(".", "default_factory", obj.default_factory)

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return items and factory of each."""
        return [(plain_copy(dict(o), capturing), o.default_factory) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the items and the factory."""
        fill_dict(obj, content[0], dict)
        obj.default_factory = content[1]


class ListKind(Kind):
    """A list."""

    name = "list"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the items."""
        return () if rules.all_values(obj) else steps("[", enumerate(list.copy(obj)))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return a copy of each."""
        return [list.copy(o) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the items; iterators over the list continue at their index."""
        list.__setitem__(obj, slice(None), content)


class DequeKind(Kind):
    """A deque; its maximal length is fixed at creation."""

    name = "deque"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the items."""
        return () if rules.all_values(obj) else steps("[", enumerate(list(obj)))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the items of each."""
        return [list(o) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the items."""
        if len(obj) == len(content) and all(a is b for a, b in zip(obj, content, strict=True)):
            return
        deque.clear(obj)
        deque.extend(obj, content)


class SetKind(Kind):
    """A set. The iteration order is kept for values, whose hashes are the same in every process."""

    name = "set"
    late = True
    unordered = True

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the elements."""
        return () if rules.all_values(obj) else steps("{", ((None, item) for item in list(obj)))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return a recipe for each."""
        # most are empty: every torch module has one
        return [self._read(obj, capturing) if set.__len__(obj) else [] for obj in objs]

    @staticmethod
    def _read(obj: Any, capturing: Capturing) -> Any:
        items = list(set.__iter__(obj))
        marked = with_marked_keys(items, capturing)
        if marked is not None:
            return marked
        if capturing.anchors.set_orders.get(id(obj)) == items:
            # unchanged since set-up: the set-up of a replay fills it in the same way
            return SAME, items
        return set_recipe(obj, items, capturing)

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the elements."""
        if isinstance(content, tuple) and content and content[0] == SAME:
            if set(content[1]) == obj and all(map(has_stable_hash, content[1])):
                return
            content = content[1]
        fill_set(obj, content)


SAME = "<as set up>"
"""First item of the content of a set that is as the set-up filled it."""


class BytesKind(Kind):
    """A bytearray."""

    name = "bytes"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the bytes of each."""
        return [bytes(o) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the bytes."""
        obj[:] = content


class TypedArrayKind(Kind):
    """An `array.array`."""

    name = "typed array"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return type code and bytes of each."""
        return [(o.typecode, o.tobytes()) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the numbers."""
        obj[:] = array.array(content[0], content[1])


class WeakDictKind(Kind):
    """A WeakKeyDictionary or WeakValueDictionary: the pairs that are alive."""

    name = "weak dict"
    late = True
    unordered = True

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield values, then keys."""
        pairs = list(obj.items())
        yield from steps("[", pairs)
        yield from steps("{", ((None, key) for key, _ in pairs))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the live pairs of each."""
        return [list(o.items()) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the pairs; those that nothing else refers to disappear again, as they should."""
        obj.clear()
        for key, value in content:
            obj[key] = value


class WeakSetKind(Kind):
    """A WeakSet: the elements that are alive."""

    name = "weak set"
    late = True
    unordered = True

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the elements."""
        return steps("{", ((None, item) for item in list(obj)))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the live elements of each container."""
        return [list(o) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the elements."""
        obj.clear()
        obj.update(content)


class ProxyKind(Kind):
    """A read-only view of a mapping: captured as a reference; its values are walked."""

    name = "proxy"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the values: Python gives no access to the mapping itself."""
        return steps("[", dict(obj).items())


PROXY = ProxyKind()
READ_ONLY = "read-only"
"""Name in a skeleton for a read-only view that was created in the loop."""
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
