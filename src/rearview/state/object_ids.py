"""Numbers in a state that are the `id` of an object, which differs in every process.

A class that remembers objects by their `id` would not recognise them after a restore with the old
numbers, and a replay from the start would never equal the recording. So such numbers are stored as
references to the objects.
"""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Collection, Mapping
from typing import Any

from rearview.state.codecs.containers import Address
from rearview.state.codecs.python_objects import AttributedKind, ObjectKind
from rearview.state.kinds import Capturing
from rearview.state.rebuild import NAMES

# How pickle writes a number of five to seven bytes; one that begins in another is found too.
_NUMBER = re.compile(rb"\x8a(?=\x05.{4}[^\x00]|[\x06\x07])", re.DOTALL)
_ALIGNED = 8
_REGION = 40
"""Addresses of one process agree, but for one, in what stands above this bit."""
# Which of two equal ones it is means nothing, so their addresses mean nothing either.
_WITHOUT_IDENTITY = (
    *(int, float, complex, tuple, frozenset),
    *(types.MethodType, weakref.ref, Address),
)
_TEXTS = (str, bytes)
"""As these, but mostly the only one of its value: scikit-learn keeps the `id` of `stop_words`."""
_SINGLETONS = {id(one): one for one in (None, True, False, ..., NotImplemented)}

_VALUES = {str, bytes, tuple, frozenset}

Marked = list[tuple[Any, Any]]
"""Objects that hold addresses, each with its content in which they are marked."""


def numbers_in(stream: bytes) -> set[int]:
    """Return the numbers in a pickle that may be addresses: most often none."""
    found: set[int] = set()
    near = {(id(one) >> _REGION) + d for one in (found, object, Address) for d in (-1, 0, 1)}
    for match in _NUMBER.finditer(stream):
        start = match.end()
        number = int.from_bytes(stream[start + 1 : start + 1 + stream[start]], "little")
        if number % _ALIGNED == 0 and number >> _REGION in near:
            found.add(number)
    return found


def marked(memo: Mapping[int, tuple[int, Any]], numbers: set[int], capturing: Capturing) -> Marked:
    """Return what was pickled with addresses of other pickled objects in it, those marked.

    `memo` is the pickler's: what it pickled, by `id`. Looked at are lists, dicts, sets, attributes,
    and tuples in them.
    """
    ours = {id(one) for one in capturing.stand_ins}
    targets = {
        number: memo[number][1]
        for number in numbers & memo.keys()
        if memo[number][0] >= len(NAMES)
        and number not in ours
        and not isinstance(memo[number][1], _WITHOUT_IDENTITY)
    }
    targets = {n: one for n, one in targets.items() if _is_only(one, memo)}
    targets |= {n: _SINGLETONS[n] for n in numbers & _SINGLETONS.keys()}
    if not targets:
        return []
    first_born = len(NAMES) + len(capturing.anchors)
    mark = _Mark(targets)
    found: Marked = []
    for number, obj in memo.values():
        if number >= first_born:  # what anchors hold was copied, and the copies are here too
            content = _content(obj, mark, capturing)
            if content is not None:
                found.append((obj, content))
    return found


def _is_only(obj: Any, memo: Mapping[int, tuple[int, Any]]) -> bool:
    """Return True unless a text has equals that were pickled too: its value would not say which."""
    if type(obj) not in _TEXTS:
        return True
    return not any(
        one is not obj and one == obj for _, one in memo.values() if type(one) is type(obj)
    )


class _Mark:
    """Puts a mark in place of each number that is an address."""

    def __init__(self, targets: Mapping[int, Any]) -> None:
        self.targets = targets

    def one(self, value: Any) -> Any:
        if type(value) is int:
            return Address(self.targets[value]) if value in self.targets else value
        if type(value) is tuple and value:
            parts = self.all(value)
            return value if parts is None else tuple(parts)
        return value

    def all(self, values: Collection[Any]) -> list[Any] | None:
        """Return the values with addresses marked, or None when there are none."""
        kinds = set(map(type, values))
        if tuple not in kinds and (
            int not in kinds
            or self.targets.keys().isdisjoint([v for v in values if type(v) is int])
        ):
            return None
        before = list(values)
        after = [self.one(value) for value in before]
        return after if any(a is not b for a, b in zip(after, before, strict=True)) else None

    def dict(self, held: dict[Any, Any]) -> dict[Any, Any] | None:
        keys, values = self.all(held), self.all(held.values())
        if keys is None and values is None:
            return None
        return dict(zip(keys or held, values or held.values(), strict=True))

    def read(self, content: Any) -> Any:
        """Mark addresses in what a kind has read: a dict or list that is a copy, or some of them."""
        if type(content) is dict:
            return self.dict(content) or content
        if type(content) is list:
            return self.all(content) or content
        if type(content) is tuple:
            parts = [self.read(part) for part in content]
            same = all(a is b for a, b in zip(parts, content, strict=True))
            return content if same else tuple(parts)
        return self.one(content)


def _content(obj: Any, mark: _Mark, capturing: Capturing) -> Any:
    """Return the marked content of one object born after the walk, or None."""
    cls = type(obj)
    if cls is dict:
        return mark.dict(obj)
    if cls is list or cls is set:
        return mark.all(obj)
    if cls in _VALUES or isinstance(obj, type):
        return None
    kind = capturing.anchors.kind(obj)
    if not isinstance(kind, (ObjectKind, AttributedKind)):
        return None
    try:
        return _attributes(obj, kind, mark, capturing)
    except Exception:  # it cannot be read, and was pickled in a way of its own
        return None


def _attributes(
    obj: Any, kind: ObjectKind | AttributedKind, mark: _Mark, capturing: Capturing
) -> Any:
    if isinstance(kind, ObjectKind):
        attributes = obj.__dict__ if kind.has_dict else {}
        if not kind.slots and mark.all(attributes.values()) is None:
            return None
        kind = kind.whole()
    content = kind.read([obj], capturing)[0]
    after = mark.read(content)
    return None if after is content else after


def put(obj: Any, content: Any) -> bool:
    """Give a plain list, dict or set its marked content; say whether it is one."""
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
