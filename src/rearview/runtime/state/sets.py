"""The order in which a set iterates, and how to make a set that iterates so again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rearview.runtime.state.tensors import is_tensor

if TYPE_CHECKING:
    from rearview.runtime.state.reading import Reading

_STARTS = 60
_REPAIRS = 40
_LONG = 200
_ATOMS = (str, int, float, bytes, bool, type(None))


def is_steady(key: Any) -> bool:
    """Say whether a key hashes the same whatever is restored."""
    cls = type(key)
    by_identity = getattr(cls, "__hash__") is getattr(object, "__hash__")  # noqa: B009
    if cls in _ATOMS or by_identity or is_tensor(key):
        return True
    return cls is tuple and all(is_steady(part) for part in key)


def build_set(recipe: Sequence[Any]) -> set[Any]:
    """Return the set that a recipe makes: a list is added one by one, a tuple is copied over."""
    if isinstance(recipe, list):
        return set(recipe)
    grown = set(recipe)
    return set(grown)


def recipe_for(items: list[Any]) -> Sequence[Any] | None:
    """Return how to make a set that iterates as `items`, or None if no way was found.

    A set iterates by the places in its table, which depend on the order of insertion where two
    hashes meet, and on the size of the table, which is another when a set is made from a set. So
    orders of insertion are tried and repaired until one fits.

    >>> recipe_for([8, 0]), recipe_for([0, 8])
    ([8, 0], [0, 8])
    """
    chance = random.Random(0)  # noqa: S311
    starts = _STARTS if len(items) <= _LONG else 4
    for form in (list, tuple):
        for start in range(starts):
            order = items[::-1] if start == 1 else list(items)
            if start > 1:
                chance.shuffle(order)
            for _ in range(_REPAIRS):
                got = list(build_set(form(order)))
                wrong = next((i for i, item in enumerate(got) if item != items[i]), None)
                if wrong is None:
                    return form(order)
                _repair(
                    order, early=got[wrong], late=items[wrong], chance=chance, last=start % 2 == 1
                )
    return None


def _repair(order: list[Any], *, early: Any, late: Any, chance: random.Random, last: bool) -> None:
    """Let what took a place too early come last, or what belongs there come sooner."""
    if last:
        order.remove(early)
        order.append(early)
    else:
        order.remove(late)
        order.insert(chance.randrange(order.index(early) + 1), late)


def set_recipe(obj: Any, items: list[Any], reading: Reading) -> Sequence[Any]:
    """Return how to make a set again, order included; report it when that is not known."""
    if len(items) < 2 or not reading.anchors.look.boring(items) or list(set(items)) == items:
        return items
    known = reading.anchors.recipes
    key = tuple(items)
    if key not in known:
        if len(known) >= _LONG:
            known.clear()
        known[key] = recipe_for(items)
    recipe = known[key]
    if recipe is None:
        reading.miss(obj, "the order of this set comes from deleted elements")
    return recipe or items


def fill_set(obj: Any, recipe: Sequence[Any]) -> None:
    """Give a live set the elements of a recipe, in its order."""
    wanted = build_set(recipe)
    if all(map(is_steady, recipe)) and list(obj) == list(wanted):
        return
    set.clear(obj)
    set.update(obj, recipe if isinstance(recipe, list) else set(recipe))
