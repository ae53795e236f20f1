"""Store the `id` of an object inside a state as a reference to that object.

The `id` of an object differs in every process. A class that remembers objects by their `id` would
not recognise them after a restore, and the state of a replay would never equal the recorded one.
`capture` calls `with_marked_ids` after pickling; `restore` puts the new numbers in with
`set_content`.
"""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from rearview.state.codecs.base import NAMES, Capturing
from rearview.state.codecs.containers import ObjectId
from rearview.state.codecs.python_objects import AttributedKind, ObjectKind

_NUMBER = re.compile(rb"\x8a(?=\x05.{4}[^\x00]|[\x06\x07])", re.DOTALL)
"""Opcode of a number of five to seven bytes; it also matches inside other numbers."""
_ALIGNED = 8
_REGION = 40
"""The addresses of one process differ above this bit by at most one."""
_WITHOUT_IDENTITY = (
    *(int, float, complex, tuple, frozenset),
    *(types.MethodType, weakref.ref, ObjectId),
)
"""Types whose equal instances are interchangeable, so that their `id` means nothing."""
_TEXTS = (str, bytes)
"""Interchangeable too, but often unique: scikit-learn keeps the `id` of `stop_words`."""
_SINGLETONS = {id(value): value for value in (None, True, False, ..., NotImplemented)}

_VALUES = {str, bytes, tuple, frozenset}

MarkedContents = list[tuple[Any, Any]]
"""Objects whose content holds the `id` of others, each with its content in which these are marked."""


def possible_ids(stream: bytes) -> set[int]:
    """Return the numbers in a pickle that may be the `id` of an object; usually none."""
    numbers: set[int] = set()
    regions = {(id(obj) >> _REGION) + d for obj in (numbers, object, ObjectId) for d in (-1, 0, 1)}
    for match in _NUMBER.finditer(stream):
        start = match.end()
        number = int.from_bytes(stream[start + 1 : start + 1 + stream[start]], "little")
        if number % _ALIGNED == 0 and number >> _REGION in regions:
            numbers.add(number)
    return numbers


def with_marked_ids(
    memo: Mapping[int, tuple[int, Any]], numbers: set[int], capturing: Capturing
) -> MarkedContents:
    """Return the pickled objects that hold the `id` of other pickled objects, with these marked.

    `memo` is the pickler's memo: the pickled objects by `id`. The search covers lists, dicts, sets,
    attributes, and the tuples in them.
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
        if number >= first_new:  # includes the copies of the anchors' content
            content = _marked_content(obj, marker, capturing)
            if content is not None:
                contents.append((obj, content))
    return contents


def _is_unique(obj: Any, memo: Mapping[int, tuple[int, Any]]) -> bool:
    """Return False for a text if an equal one was pickled too: the value would be ambiguous."""
    if type(obj) not in _TEXTS:
        return True
    return not any(
        other is not obj and other == obj for _, other in memo.values() if type(other) is type(obj)
    )


class _IdMarker:
    """Replaces each number that is the `id` of a target by an `ObjectId`."""

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
        """Return the items with each `id` marked, or None if there is none."""
        kinds = set(map(type, items))
        if tuple not in kinds and (
            int not in kinds
            or self.targets.keys().isdisjoint([item for item in items if type(item) is int])
        ):
            return None
        before = list(items)
        after = [self.in_value(item) for item in before]
        return after if any(a is not b for a, b in zip(after, before, strict=True)) else None

    def in_dict(self, held: dict[Any, Any]) -> dict[Any, Any] | None:
        keys, values = self.in_items(held), self.in_items(held.values())
        if keys is None and values is None:
            return None
        return dict(zip(keys or held, values or held.values(), strict=True))

    def in_content(self, content: Any) -> Any:
        """Mark every `id` in the content that a codec has read: a dict, a list, or a tuple of them."""
        if type(content) is dict:
            return self.in_dict(content) or content
        if type(content) is list:
            return self.in_items(content) or content
        if type(content) is tuple:
            parts = [self.in_content(part) for part in content]
            same = all(a is b for a, b in zip(parts, content, strict=True))
            return content if same else tuple(parts)
        return self.in_value(content)


def _marked_content(obj: Any, marker: _IdMarker, capturing: Capturing) -> Any:
    """Return the marked content of an object created after the walk, or None if it holds no `id`."""
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
    except Exception:  # the codec cannot read it: it was pickled by its own methods
        return None


def _marked_attributes(
    obj: Any, kind: ObjectKind | AttributedKind, marker: _IdMarker, capturing: Capturing
) -> Any:
    if isinstance(kind, ObjectKind):
        attributes = obj.__dict__ if kind.has_dict else {}
        if not kind.slots and marker.in_items(attributes.values()) is None:
            return None
        kind = kind.whole()
    content = kind.read([obj], capturing)[0]
    after = marker.in_content(content)
    return None if after is content else after


def set_content(obj: Any, content: Any) -> bool:
    """Replace the content of a plain list, dict or set; return False for any other object."""
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
