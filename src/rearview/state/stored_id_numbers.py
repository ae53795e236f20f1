"""Find each `id()` of a Python object in a captured state, and store a reference to the object in its place.

An *anchor* is an object that existed when the loop was entered (`object_numbers`). The `id` of an object differs in every
process. A class that remembers objects by their `id` would not recognise the objects after a restore, and the state of
a replay would never equal the recorded state. `capture` calls `contents_with_ids` after pickling a state. This function
returns *marked* contents: contents with an `ObjectId` in place of each `id`. `restore` calls `set_content` with the
contents, in which each `ObjectId` has become an `id` of the new process.
"""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from rearview.state.codecs.base import NAMES, Capturing
from rearview.state.codecs.containers import ObjectId
from rearview.state.codecs.instances_and_functions import AttributedKind, ObjectKind

_NUMBER = re.compile(rb"\x8a(?=\x05.{4}[^\x00]|[\x06\x07])", re.DOTALL)
"""Matches the opcode before a number of five to seven bytes in a pickle; also matches equal bytes inside other data."""
_ALIGNED = 8
"""Every `id` is a multiple of this number."""
_REGION = 40
"""Number of low bits of an address. The number formed by the higher bits differs by at most 1 between objects of a
process."""
_WITHOUT_IDENTITY = (
    *(int, float, complex, tuple, frozenset),
    *(types.MethodType, weakref.ref, ObjectId),
)
"""Types whose equal instances are interchangeable, so that programs do not store the `id` of an instance."""
_TEXTS = (str, bytes)
"""Types of texts. Equal texts are interchangeable, too, but a text that has no equal may be identified by its `id`:
scikit-learn stores the `id` of `stop_words`.
"""
_SINGLETONS = {id(value): value for value in (None, True, False, ..., NotImplemented)}

_VALUES = {str, bytes, tuple, frozenset}

MarkedContents = list[tuple[Any, Any]]
"""(object, marked content) of each object whose content contains an `id`."""


def possible_ids(stream: bytes) -> set[int]:
    """Return the numbers in the pickle `stream` that may be the `id` of an object; usually none."""
    numbers: set[int] = set()
    regions = {(id(obj) >> _REGION) + d for obj in (numbers, object, ObjectId) for d in (-1, 0, 1)}
    for match in _NUMBER.finditer(stream):
        start = match.end()
        number = int.from_bytes(stream[start + 1 : start + 1 + stream[start]], "little")
        if number % _ALIGNED == 0 and number >> _REGION in regions:
            numbers.add(number)
    return numbers


def contents_with_ids(
    memo: Mapping[int, tuple[int, Any]], numbers: set[int], capturing: Capturing
) -> MarkedContents:
    """Return (object, marked content) for each pickled object that contains the `id` of a pickled object.

    `memo` is the memo of the pickler: `id` -> (memo number, object). `numbers` are the numbers that may be an `id`. The
    search covers lists, dicts, sets, attributes, and tuples inside these.
    """
    placeholders = {id(obj) for obj in capturing.placeholders}
    targets = {
        number: memo[number][1]
        for number in numbers & memo.keys()
        if memo[number][0] >= len(NAMES)
        and number not in placeholders
        and not isinstance(memo[number][1], _WITHOUT_IDENTITY)
    }
    targets = {number: obj for number, obj in targets.items() if _is_unique(obj, memo)}
    targets |= {number: _SINGLETONS[number] for number in numbers & _SINGLETONS.keys()}
    if not targets:
        return []
    first_new = len(NAMES) + len(capturing.anchors)
    marker = _IdMarker(targets)
    contents: MarkedContents = []
    for number, obj in memo.values():
        if number >= first_new:  # an object created by the loop, or the copied content of an anchor
            content = _marked_content(obj, marker, capturing)
            if content is not None:
                contents.append((obj, content))
    return contents


def _is_unique(obj: Any, memo: Mapping[int, tuple[int, Any]]) -> bool:
    """Return False if `obj` is a text and an equal text was pickled, too: the stored `id` is then ambiguous."""
    if type(obj) not in _TEXTS:
        return True
    return not any(
        candidate is not obj and candidate == obj
        for _, candidate in memo.values()
        if type(candidate) is type(obj)
    )


class _IdMarker:
    """Replaces each number that is the `id` of one of the `targets` (`id` -> object) by an `ObjectId`."""

    def __init__(self, targets: Mapping[int, Any]) -> None:
        self.targets = targets

    def in_value(self, value: Any) -> Any:
        if type(value) is int:
            return ObjectId(self.targets[value]) if value in self.targets else value
        if type(value) is tuple and value:
            parts = self.in_items(value)
            return value if parts is None else tuple(parts)
        return value

    def in_items(self, items: Collection[Any]) -> list[Any] | None:
        """Return `items` with an `ObjectId` in place of each `id`, or None if no item contains an `id`."""
        kinds = set(map(type, items))
        if tuple not in kinds and (
            int not in kinds
            or self.targets.keys().isdisjoint([item for item in items if type(item) is int])
        ):
            return None
        before = list(items)
        after = [self.in_value(item) for item in before]
        return after if any(a is not b for a, b in zip(after, before, strict=True)) else None

    def in_dict(self, items: dict[Any, Any]) -> dict[Any, Any] | None:
        keys, values = self.in_items(items), self.in_items(items.values())
        if keys is None and values is None:
            return None
        return dict(zip(keys or items, values or items.values(), strict=True))

    def in_content(self, content: Any) -> Any:
        """Return `content`, which a codec has read, with an `ObjectId` in place of each `id`.

        The content is a dict, a list, or a tuple of dicts and lists. If it contains no `id`, the same object is
        returned.
        """
        if type(content) is dict:
            return self.in_dict(content) or content
        if type(content) is list:
            return self.in_items(content) or content
        if type(content) is tuple:
            parts = [self.in_content(part) for part in content]
            is_unchanged = all(a is b for a, b in zip(parts, content, strict=True))
            return content if is_unchanged else tuple(parts)
        return self.in_value(content)


def _marked_content(obj: Any, marker: _IdMarker, capturing: Capturing) -> Any:
    """Return the marked content (see the module docstring) of an object, or None if its content contains no `id`."""
    cls = type(obj)
    if cls is dict:
        return marker.in_dict(obj)
    if cls is list or cls is set:
        return marker.in_items(obj)
    if cls in _VALUES or isinstance(obj, type):
        return None
    kind = capturing.anchors.kind(obj)
    if not isinstance(kind, (ObjectKind, AttributedKind)):
        return None
    try:
        return _marked_attributes(obj, kind, marker, capturing)
    except Exception:  # the codec cannot read the object, but the methods of its class can
        return None


def _marked_attributes(
    obj: Any, kind: ObjectKind | AttributedKind, marker: _IdMarker, capturing: Capturing
) -> Any:
    """Return the marked content (see the module docstring) of an instance, or None if it contains no `id`."""
    if isinstance(kind, ObjectKind):
        attributes = obj.__dict__ if kind.has_dict else {}
        if not kind.slots and marker.in_items(attributes.values()) is None:
            return None
        kind = kind.whole()
    content = kind.read([obj], capturing)[0]
    after = marker.in_content(content)
    return None if after is content else after


def set_content(obj: Any, content: Any) -> bool:
    """Replace the content of a list, dict or set; return False for an object of any other class."""
    if type(obj) is dict:
        obj.clear()
        obj.update(content)
    elif type(obj) is list:
        obj[:] = content
    elif type(obj) is set:
        obj.clear()
        obj.update(content)
    else:
        return False
    return True
