"""Codecs of builtin containers: dict, list, set, deque and so on, with the order of their items.

An *anchor* is an object that existed when the loop was entered (`object_numbers`). A restore keeps the running iterators
over a container intact. The iteration order of a set depends on how the set was filled. A *recipe* is a list or tuple
of the elements from which `build_set` builds a set with a given order; `set_recipe` finds a recipe for a set.
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
"""Most orders of insertion with which `recipe_for` starts a search."""
_REPAIRS = 40
"""Most changes that `recipe_for` makes to each of these orders of insertion."""
_LONG = 200
"""For a set with more elements than this number, fewer orders are tried. Also the most recipes that are kept in
memory."""
_ATOMS = (str, int, float, bytes, bool, type(None))


def has_stable_hash(key: Any) -> bool:
    """Return True if the hash of a key stays the same when a restore changes the objects that the key refers to."""
    cls = type(key)
    by_identity = getattr(cls, "__hash__") is getattr(object, "__hash__")  # noqa: B009
    if cls in _ATOMS or by_identity or is_tensor(key):
        return True
    return cls is tuple and all(has_stable_hash(part) for part in key)


def build_set(recipe: Sequence[Any]) -> set[Any]:
    """Return the set with the elements of a recipe, inserted in order; if the recipe is a tuple, a copy of this set.

    A copy may have a smaller hash table, and therefore another iteration order.
    """
    if isinstance(recipe, list):
        return set(recipe)
    filled_set = set(recipe)
    return set(filled_set)


def recipe_for(items: list[Any]) -> Sequence[Any] | None:
    """Return a recipe for a set that iterates in the order of `items`, or None if no recipe was found.

    A set iterates over the slots of its hash table. The slot of an element depends on the order of insertion if hashes
    collide, and on the size of the table, which differs when a set is copied. Therefore this function tries orders of
    insertion, and changes them until the set has the right order.

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
                    early_item=produced[wrong],
                    late_item=items[wrong],
                    generator=generator,
                    move_last=start % 2 == 1,
                )
    return None


def _repair(
    order: list[Any], *, early_item: Any, late_item: Any, generator: random.Random, move_last: bool
) -> None:
    """Move the element that came too early to the end, or the element that came too late before the early one."""
    if move_last:
        order.remove(early_item)
        order.append(early_item)
    else:
        order.remove(late_item)
        order.insert(generator.randrange(order.index(early_item) + 1), late_item)


def set_recipe(obj: Any, items: list[Any], capturing: Capturing) -> Sequence[Any]:
    """Return a recipe for the set `obj`, whose elements in iteration order are `items`.

    If no recipe is found, report the set as missing, and return `items`, which builds a set in another order.
    """
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
    """Replace the elements of a live set by the elements of a recipe; the set then iterates in the recipe's order."""
    target = build_set(recipe)
    if all(map(has_stable_hash, recipe)) and list(obj) == list(target):
        return
    set.clear(obj)
    set.update(obj, recipe if isinstance(recipe, list) else set(recipe))


_LOWEST_ADDRESS = 1 << 24
"""Numbers below this number are never regarded as the `id` of an object."""


def fill_dict(live: dict[Any, Any], content: Mapping[Any, Any], base: type = dict) -> None:
    """Replace the items of the dict `live` by those of `content`, in the order of `content`.

    The program may be iterating over `live`: if all keys are equal and in order, only the values are replaced.
    Otherwise all keys are removed and inserted again, which also computes their hashes again: a key may be an anchor
    that was itself restored. `base` is the class whose methods change `live`.
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
    """Codec of dicts and their subclasses: keys and values, in order."""

    name = "dict"
    restored_last = True
    base: type = dict

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each value, then to each key; skip the values, or keys, if all are immutable."""
        values = self.base.values(obj)  # type: ignore[attr-defined]
        if not rules.all_values(values):
            yield from steps("[", self.base.items(obj))  # type: ignore[attr-defined]
        keys = list(self.base.keys(obj))  # type: ignore[attr-defined]
        if not rules.all_values(keys):
            yield from steps("{", ((None, key) for key in keys))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the items of each dict, as a plain dict."""
        # most dicts are empty: a torch module has a dozen empty dicts
        length: Any = self.base.__len__  # type: ignore[attr-defined]
        items: Any = self.base.items  # type: ignore[attr-defined]
        return [plain_copy(dict(items(o)), capturing) if length(o) else {} for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the items of `obj` by the recorded items, in the recorded order."""
        fill_dict(obj, content, self.base)


class ObjectId:
    """Takes the place of the `id` of `target` in a captured content: the next process gives `target` another `id`."""

    __slots__ = ("target",)

    def __init__(self, target: object) -> None:
        self.target = target


def plain_copy(copy: dict[Any, Any], capturing: Capturing) -> dict[Any, Any]:
    """Return `copy`, the copy of a dict, with an `ObjectId` in place of each key that is the `id` of an anchor."""
    keys = with_marked_keys(copy, capturing) if copy else None
    return copy if keys is None else dict(zip(keys, copy.values(), strict=True))


def with_marked_keys(keys: Any, capturing: Capturing) -> list[Any] | None:
    """Return `keys` with an `ObjectId` in place of each key that is the `id` of an anchor; None if no key is an `id`.

    Keras keeps the `id` of each of its variables in a set, and many programs use the `id` of a parameter as a key.
    """
    first = next(iter(keys), None)
    if type(first) is not int or first < _LOWEST_ADDRESS:
        return None
    index, alive = capturing.anchors.index, capturing.alive
    if index.keys().isdisjoint(keys):
        return None
    return [ObjectId(alive[index[key]]) if key in index else key for key in keys]


class PlainDictKind(DictKind):
    """Codec of dicts whose class is `dict` itself: one call of `dict.copy` copies such a dict."""

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return a copy of each dict."""
        return [plain_copy(o.copy(), capturing) for o in objs]


class OrderedDictKind(DictKind):
    """Codec of OrderedDicts. Only methods of OrderedDict may change one, because these also keep the order of keys."""

    base = OrderedDict


class DefaultDictKind(DictKind):
    """Codec of defaultdicts: the items and the `default_factory`."""

    name = "defaultdict"
    base = defaultdict

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield the steps to the items, then a step to the `default_factory`."""
        yield from super().children(obj, rules)
        yield PathStep(".", "default_factory", obj.default_factory)

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (items, `default_factory`) of each defaultdict."""
        return [(plain_copy(dict(o), capturing), o.default_factory) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the recorded items and the recorded `default_factory`."""
        fill_dict(obj, content[0], dict)
        obj.default_factory = content[1]


class ListKind(Kind):
    """Codec of lists."""

    name = "list"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each item; no step if all items are immutable values."""
        return () if rules.all_values(obj) else steps("[", enumerate(list.copy(obj)))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return a copy of each list."""
        return [list.copy(o) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the items; running iterators over the list continue at their index."""
        list.__setitem__(obj, slice(None), content)


class DequeKind(Kind):
    """Codec of deques: the items. The maximal length of a deque cannot change, so it is not captured."""

    name = "deque"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each item; no step if all items are immutable values."""
        return () if rules.all_values(obj) else steps("[", enumerate(list(obj)))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the items of each deque."""
        return [list(o) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the items by the recorded items."""
        if len(obj) == len(content) and all(a is b for a, b in zip(obj, content, strict=True)):
            return
        deque.clear(obj)
        deque.extend(obj, content)


class SetKind(Kind):
    """Codec of sets. The iteration order is restored, too, if the hash of each element is the same in every process."""

    name = "set"
    restored_last = True
    unordered = True

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each element; no step if all elements are immutable values."""
        return () if rules.all_values(obj) else steps("{", ((None, item) for item in list(obj)))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return a recipe for each set; (`SAME`, elements) for a set unchanged since the loop was entered."""
        # most sets are empty: every torch module has one
        return [self._read(obj, capturing) if set.__len__(obj) else [] for obj in objs]

    @staticmethod
    def _read(obj: Any, capturing: Capturing) -> Any:
        items = list(set.__iter__(obj))
        marked = with_marked_keys(items, capturing)
        if marked is not None:
            return marked
        if capturing.anchors.set_orders.get(id(obj)) == items:
            # the set has not changed since the loop was entered: the set-up code of a replay fills it in the same order
            return SAME, items
        return set_recipe(obj, items, capturing)

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the elements by the recorded elements."""
        if isinstance(content, tuple) and content and content[0] == SAME:
            if set(content[1]) == obj and all(map(has_stable_hash, content[1])):
                return
            content = content[1]
        fill_set(obj, content)


SAME = "<as set up>"
"""First item of the content of a set that has not changed since the loop was entered."""


class BytesKind(Kind):
    """Codec of bytearrays."""

    name = "bytes"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the bytes of each bytearray."""
        return [bytes(o) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the bytes by the recorded bytes."""
        obj[:] = content


class TypedArrayKind(Kind):
    """Codec of arrays of the class `array.array`."""

    name = "typed array"

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return (type code, bytes) of each array."""
        return [(o.typecode, o.tobytes()) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the numbers by the recorded numbers."""
        obj[:] = array.array(content[0], content[1])


class WeakDictKind(Kind):
    """Codec of WeakKeyDictionary and WeakValueDictionary: the pairs whose weakly referenced objects still exist."""

    name = "weak dict"
    restored_last = True
    unordered = True

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each value, then to each key."""
        pairs = list(obj.items())
        yield from steps("[", pairs)
        yield from steps("{", ((None, key) for key, _ in pairs))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the (key, value) pairs of each dictionary."""
        return [list(o.items()) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Set the pairs. As in the run, Python then removes each pair whose weak object has no other reference."""
        obj.clear()
        for key, value in content:
            obj[key] = value


class WeakSetKind(Kind):
    """Codec of WeakSets: the elements that still exist."""

    name = "weak set"
    restored_last = True
    unordered = True

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each element."""
        return steps("{", ((None, item) for item in list(obj)))

    def read(self, objs: Sequence[Any], capturing: Capturing) -> list[Any]:
        """Return the elements of each WeakSet."""
        return [list(o) for o in objs]

    def write(self, obj: Any, content: Any, restoring: Restoring) -> None:
        """Replace the elements by the recorded elements."""
        obj.clear()
        obj.update(content)


class ProxyKind(Kind):
    """Codec of read-only views of dicts (`types.MappingProxyType`): references; the walk enters the values."""

    name = "proxy"

    def children(self, obj: Any, rules: WalkRules) -> Iterable[PathStep]:
        """Yield a step to each value, because Python gives no access to the dict itself."""
        return steps("[", dict(obj).items())


PROXY = ProxyKind()
READ_ONLY = "read-only"
"""Name by which a skeleton marks a read-only view of a mapping, if the loop created the view."""
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
