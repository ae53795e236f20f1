"""Compare two states and describe where they differ.

States are equal if the program could not tell them apart: values bit by bit, identity where it can
matter, memory where a tensor or array uses it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rearview.model import MissingPart
from rearview.state.anchors import Anchors, spell, tidy
from rearview.state.capture import Captured, split
from rearview.state.codecs.open_files import UNKNOWN_POSITION
from rearview.state.exclusions import holds_for_others, only_watches, uncompared
from rearview.state.skeleton import (
    CONTENT_FIELDS,
    EXTRAS,
    NODE_FIELDS,
    QUICK,
    ArrayBody,
    MemoryPiece,
    ObjectNode,
    OutsideKey,
    Ref,
    Skeleton,
    Span,
    as_recorded,
    as_suspended,
    class_of,
    compared_variables,
    elements,
    has_identity,
    is_address,
    is_array,
    is_environment,
    live_class,
    matched,
    same_values,
    span_of,
    with_closure_of,
    without_operation,
)

_WIDTH = 80


def short(value: Any, anchors: Anchors | None = None) -> str:
    """Return a short text for a value, at most one line.

    >>> short([1, 2.5, "three"])
    "[1, 2.5, 'three']"
    """
    text = _text(value, anchors, 0)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _text(value: Any, anchors: Anchors | None, depth: int) -> str:
    if isinstance(value, Ref):
        return f"the object at {anchors.path(value.number)}" if anchors else "an older object"
    if isinstance(value, MemoryPiece):
        return f"{value.block.nbytes} bytes"
    if isinstance(value, type):
        return str(getattr(value, "label", "") or value.__qualname__)
    if isinstance(value, ObjectNode):
        label = value.label.removeprefix("build ")
        if label == "address":
            return f"the address of {_text(value.args[0], anchors, depth + 1)}"
        parts = [] if depth > 2 else [_text(part, anchors, depth + 1) for part in value.args[:4]]
        return f"{label}({', '.join(parts)})"
    if isinstance(value, (list, tuple, set, frozenset)) and depth <= 2:
        inner = ", ".join(_text(item, anchors, depth + 1) for item in list(value)[:8])
        around = {list: "[]", tuple: "()"}.get(type(value), "{}")
        return f"{around[0]}{inner}{', …' if len(value) > 8 else ''}{around[1]}"
    if isinstance(value, dict):
        return f"a dict of {len(value)}"
    return repr(value)


def canonical(value: Any, depth: int = 4) -> str:
    """Return a sort key for elements of a set, which have no order of their own."""
    if isinstance(value, Ref):
        return f"anchor {value.number:09}"
    if isinstance(value, ObjectNode):
        if not depth:
            return value.label
        parts = (value.args, value.state, value.items, value.pairs)
        return f"{value.label}({canonical(parts, depth - 1)})"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(canonical(item, depth - 1) for item in value)}]" if depth else "[]"
    if isinstance(value, dict):
        return canonical(list(value.items()), depth)
    if isinstance(value, type):
        return str(getattr(value, "label", ""))
    return f"{type(value).__name__} {value!r}"


def memory_texts(then: Any, now: Any, spans: list[Span] | None = None) -> tuple[str, str] | None:
    """Return how two blocks of memory differ, or None if they are equal byte for byte.

    With `spans`, only those bytes count.
    """
    import numpy as np

    left, right = np.frombuffer(then, np.uint8), np.frombuffer(now, np.uint8)
    if left.nbytes != right.nbytes:
        return f"{left.nbytes} bytes", f"{right.nbytes} bytes"
    if np.array_equal(left, right):
        return None
    unequal = np.flatnonzero(left != right)
    if spans is not None:
        inside: Any = np.zeros(left.nbytes, bool)
        for first, shape, strides in spans:
            np.lib.stride_tricks.as_strided(inside[first:], shape, strides)[...] = True
        unequal = unequal[inside[unequal]]
        if not unequal.size:
            return None
    first = int(unequal[0])
    return (
        f"byte {first} is {int(left[first]):#04x}",
        f"{int(right[first]):#04x} ({unequal.size} of {left.nbytes} bytes differ)",
    )


def render(path: tuple[Any, str]) -> str:
    """Return a path as people write it."""
    parts = []
    here: Any = path
    while here is not None:
        here, text = here
        parts.append(text)
    return tidy("".join(reversed(parts)))


Path = tuple[Any, str]
"""Linked steps: (path of the parent or None, text of this step)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two states differ, and how."""

    path: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.path}: {self.then} when recorded, {self.now} now"


def compare(
    anchors: Anchors,
    captured_now: Captured,
    skeleton_then: bytes,
    buffers_then: Callable[[str], Any],
    *,
    missing_then: Collection[MissingPart] = (),
    same: Callable[[str, str], bool] | None = None,
    ignore: Callable[[str], bool] | None = None,
) -> Difference | None:
    """Return the first difference between the state now and a recorded one, or None.

    `missing_then` is what the recorded state lacks: a file whose position one of the two sides
    could not tell does not count as a difference. `same(then, now)` may tell from hashes that two
    buffers are equal, so that they need not be read. `ignore` returns True for paths that do not
    count.
    """
    found = differences(
        anchors,
        captured_now,
        skeleton_then,
        buffers_then,
        missing_then=missing_then,
        same=same,
        ignore=ignore,
    )
    return next(found, None)


def differences(
    anchors: Anchors,
    captured_now: Captured,
    skeleton_then: bytes,
    buffers_then: Callable[[str], Any],
    *,
    missing_then: Collection[MissingPart] = (),
    same: Callable[[str, str], bool] | None = None,
    ignore: Callable[[str], bool] | None = None,
) -> Iterator[Difference]:
    """Yield every difference, outermost variables first; the arguments are those of `compare`."""
    if _plainly_equal(captured_now, skeleton_then, buffers_then, same):
        return
    comparison = _Comparison(
        anchors,
        Skeleton(skeleton_then),
        Skeleton(captured_now.skeleton),
        buffers_then,
        captured_now.buffers.__getitem__,
        missing_then=missing_then,
        missing_now=captured_now.missing,
        same=same,
    )
    for difference in comparison.run():
        if ignore is None or not ignore(difference.path):
            yield difference


def _plainly_equal(
    now: Captured,
    skeleton_then: bytes,
    buffers_then: Callable[[str], Any],
    same: Callable[[str, str], bool] | None,
) -> bool:
    """Return True if the bytes agree, as they mostly do; otherwise states may still be equal."""
    head_then, stream_then = split(skeleton_then)
    head_now, stream_now = split(now.skeleton)
    if len(head_then["blocks"]) != len(head_now["blocks"]) or stream_then != stream_now:
        return False
    pairs = zip(head_then["outside"], head_now["outside"], strict=True)
    outside = [((a, 0, None), (b, 0, None)) for a, b in pairs]
    blocks = zip(head_then["blocks"], head_now["blocks"], strict=True)
    for then, here in [*blocks, *outside]:
        if then[1] != here[1] or (then[0] is None) != (here[0] is None):
            return False
        if then[0] is None:
            if then[2] != here[2]:
                return False
        elif same is not None and same(then[0], here[0]):
            continue
        elif memory_texts(buffers_then(then[0]), now.buffers[here[0]]) is not None:
            return False
    return True


class _Comparison:
    def __init__(
        self,
        anchors: Anchors,
        then: Skeleton,
        now: Skeleton,
        buffers_then: Callable[[str], Any],
        buffers_now: Callable[[str], Any],
        *,
        missing_then: Collection[MissingPart],
        missing_now: Collection[MissingPart],
        same: Callable[[str, str], bool] | None,
    ) -> None:
        self.anchors = anchors
        self.missing_then = {part.path for part in missing_then}
        self.missing_now = {part.path for part in missing_now}
        self.then, self.now = then, now
        self.buffers_then, self.buffers_now = buffers_then, buffers_now
        self.same = same
        self._partner: dict[int, int] = {}
        self._back: dict[int, int] = {}
        self._entered: set[int] = set()
        self._kept: list[Any] = []
        """Keeps objects alive that are known by their `id`."""
        self._stack: list[tuple[Any, Any, Path]] = []
        self._late: list[tuple[Any, Any, Path]] = []
        """Sets that hold addresses: compared once all objects were met."""
        self._memory: list[tuple[MemoryPiece, MemoryPiece, Path]] = []
        self._shown: list[tuple[Skeleton, Any]] = []
        """Objects that only displays hold, not yet searched for anchors."""
        self._shown_seen: dict[int, Any] = {}
        self._shown_anchors: set[int] = set()
        """Anchors that only displays hold: compared only if something else holds them too."""
        self._covered: dict[int, list[Span]] = {}

    def run(self) -> Iterator[Difference]:
        """Yield differences: of roots, of anchors that no root leads to, of the random state."""
        yield from self._names()
        shared = [name for name in self.then.roots if name in self.now.roots]
        for name in shared:
            path = (None, spell("", name))
            yield from self._drain(self.then.roots[name], self.now.roots[name], path)
        shared_anchors = self.then.contents.keys() & self.now.contents.keys()
        for number in sorted(shared_anchors - self.then.by_address - self.now.by_address):
            if number not in self._entered and self._only_shown(number):
                continue
            path = (None, self.anchors.path(number))
            yield from self._drain(Ref(number), Ref(number), path)
        yield from self._addresses()
        yield from self._memories()
        if self.then.rng is not None and self.now.rng is not None:
            # a probe may have imported a library with a random generator of its own
            for name in self.then.rng.keys() & self.now.rng.keys():
                path = (None, f"<global state of {name}>")
                yield from self._drain(self.then.rng[name], self.now.rng[name], path)
            yield from self._memories()

    def _names(self) -> Iterator[Difference]:
        for name in self.then.roots.keys() - self.now.roots.keys():
            yield Difference(spell("", name), "bound", "unbound")
        for name in self.now.roots.keys() - self.then.roots.keys():
            yield Difference(spell("", name), "unbound", "bound")

    def _drain(self, then: Any, now: Any, path: Path) -> Iterator[Difference]:
        self._stack.append((then, now, path))
        yield from self._down()

    def _down(self) -> Iterator[Difference]:
        while self._stack:
            a, b, here = self._stack.pop()
            before = len(self._stack)
            found = self._pair(a, b, here)
            if found is not None:
                yield found
            # Children were pushed in order; take them in order.
            self._stack[before:] = self._stack[before:][::-1]

    def _differ(self, path: Path, then: Any, now: Any) -> Difference:
        return Difference(render(path), short(then, self.anchors), short(now, self.anchors))

    def _pair(self, a: Any, b: Any, path: Path) -> Difference | None:
        if type(a) is not type(b) and not (is_array(a) and is_array(b)):
            return self._differ(path, a, b)
        if isinstance(a, Ref):
            return self._refs(a, b, path)
        if isinstance(a, MemoryPiece):
            return self._pieces(a, b, path)
        if isinstance(a, type):
            return None if a is b else self._differ(path, a, b)
        if isinstance(a, float):
            return None if struct.pack("d", a) == struct.pack("d", b) else self._differ(path, a, b)
        if isinstance(a, complex):
            both = struct.pack("2d", a.real, a.imag) == struct.pack("2d", b.real, b.imag)
            return None if both else self._differ(path, a, b)
        if isinstance(a, (OutsideKey, memoryview)):
            return self._outside(a, b, path)
        if isinstance(a, (list, tuple, dict, set, frozenset, ObjectNode)):
            return self._compound(a, b, path)
        return None if a == b else self._differ(path, a, b)

    def _compound(self, a: Any, b: Any, path: Path) -> Difference | None:
        met = self._partner.get(id(a))
        if met == id(b):
            return None
        if has_identity(a) and (met is not None or id(b) in self._back):
            return Difference(render(path), "one object", "another object that is merely equal")
        self._marry(a, b)
        if isinstance(a, dict):
            return self._dicts(a, b, path)
        if isinstance(a, (list, tuple)):
            return self._sequences(a, b, path)
        if isinstance(a, (set, frozenset)):
            return self._sets(a, b, path)
        return self._nodes(a, b, path)

    def _marry(self, a: Any, b: Any) -> None:
        self._partner[id(a)], self._back[id(b)] = id(b), id(a)
        self._kept.append((a, b))

    def _fields(self, a: Any, b: Any, path: Path, names: tuple[str, ...]) -> Difference | None:
        if len(a) != len(b) or len(a) != len(names):
            return self._sequences(a, b, path)
        for left, right, name in zip(a, b, names, strict=True):
            if name == EXTRAS:
                left, right = without_operation(left), without_operation(right)  # noqa: PLW2901
            self._stack.append((left, right, (path, name)))
        return None

    def _sequences(self, a: Any, b: Any, path: Path, style: str = "[") -> Difference | None:
        if isinstance(a, ArrayBody):
            self._cover(a)
            return self._fields(a, b, path, ArrayBody.FIELDS[: len(a)])
        if len(a) != len(b):
            return Difference(render(path), f"{len(a)} items", f"{len(b)} items")
        if same_values(a, b):
            return None
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            self._stack.append((left, right, (path, spell(style, number))))
        return None

    def _dicts(self, a: Any, b: Any, path: Path, style: str = "[") -> Difference | None:
        if is_environment(a) and is_environment(b):
            a, b = compared_variables(a), compared_variables(b)
        keys_a, keys_b = list(a), list(b)
        if set(map(type, keys_a)) <= QUICK and set(map(type, keys_b)) <= QUICK:
            if keys_a != keys_b:
                return self._keys(keys_a, keys_b, path)
        elif len(keys_a) != len(keys_b):
            return Difference(render(path), f"{len(a)} keys", f"{len(b)} keys")
        else:
            for left, right in zip(keys_a, keys_b, strict=True):
                self._stack.append((left, right, (path, f"<key {short(left, self.anchors)}>")))
        for left, right in zip(keys_a, keys_b, strict=True):
            text = spell(style, left) if type(left) in QUICK else f"[{self._name(left)}]"
            self._stack.append((a[left], b[right], (path, text)))
        return None

    def _keys(self, a: list[Any], b: list[Any], path: Path) -> Difference:
        where = render(path)
        gone = [key for key in a if key not in set(b)]
        new = [key for key in b if key not in set(a)]
        if not gone and not new:
            return Difference(where, f"keys in the order {short(a)}", f"in the order {short(b)}")
        return Difference(
            where,
            f"has the keys {short(gone)}" if gone else "has no such key",
            f"has the keys {short(new)}" if new else "has no such key",
        )

    def _sets(self, a: Any, b: Any, path: Path) -> Difference | None:
        if set(map(type, a)) <= QUICK:
            return None if a == b else self._differ(path, a - b, b - a)
        if any(map(is_address, a)) and len(a) == len(b):
            self._late.append((a, b, path))
            return None
        return self._in_some_order(a, b, path)

    def _addresses(self) -> Iterator[Difference]:
        while self._late:
            a, b, path = self._late.pop(0)
            left, right = matched(a, b, self._partner)
            found = self._in_some_order(left, right, path)
            if found is not None:
                yield found
            yield from self._down()

    def _in_some_order(self, a: Any, b: Any, path: Path) -> Difference | None:
        order_a, order_b = sorted(a, key=canonical), sorted(b, key=canonical)
        return self._sequences(order_a, order_b, path, "{")

    def _nodes(self, a: ObjectNode, b: ObjectNode, path: Path) -> Difference | None:
        name = class_of(a, self.anchors)
        if only_watches(name) and name == class_of(b, self.anchors):
            return None
        if is_address(a) and not has_identity(a.args[0]):
            return self._differ(path, a, b)
        parts_a, parts_b = self.then.parts(a), self.now.parts(b)
        if a.label == b.label == "build function":
            parts_a, parts_b = as_recorded(parts_a, parts_a), as_recorded(parts_b, parts_a)
        if a.label == b.label == "build live_generator" and isinstance(b.state, dict):
            recorded = a.state or {}
            self._stack.append((parts_a, parts_b, path))
            held = {name: one for name, one in b.state.items() if name in recorded}
            return self._dicts(recorded, held, path)
        if a.label == b.label == "build file":
            if self._unknown_position(parts_a[0], parts_b[0], path):
                return None
        if a.label in NODE_FIELDS:
            return self._fields(parts_a, parts_b, path, NODE_FIELDS[a.label])
        self._stack.append((parts_a, parts_b, path))
        for left, right in ((a.items, b.items), (a.pairs, b.pairs)):
            if left or right:
                self._stack.append((left, right, path))
        return self._attributes(self._class(a), a.state, b.state, path)

    def _attributes(self, cls: type | None, a: Any, b: Any, path: Path) -> Difference | None:
        """Compare the attributes of two instances of a class that are training state.

        They come as a dict, or as a dict and the slots; anything else is compared as it is.
        """
        if isinstance(a, dict) and isinstance(b, dict):
            (a, shown_a), (b, shown_b) = uncompared(cls).split(a), uncompared(cls).split(b)
            for tree, mine, others in (
                (self.then, shown_a, shown_b),
                (self.now, shown_b, shown_a),
            ):
                for key, value in mine.items():
                    if key not in others or not self._for_others(value, others[key]):
                        self._shown.append((tree, value))
                    elif tree is self.then:
                        self._stack.append((value, others[key], (path, spell(".", key))))
            return self._dicts(a, b, path, ".")
        if _with_slots(a) and _with_slots(b):
            found = self._attributes(cls, a[0] or {}, b[0] or {}, path)
            return found or self._attributes(cls, a[1], b[1], path)
        self._stack.append((a, b, path))
        return None

    def _for_others(self, a: Any, b: Any) -> bool:
        """Return True if an attribute of a display belongs to the program and has to be compared."""
        classes = [self._class(one) for one in (a, b)]
        return classes[0] is classes[1] and classes[0] is not None and holds_for_others(classes[0])

    def _class(self, value: Any) -> type | None:
        """Return the class of an anchor or of an object created in the loop."""
        if isinstance(value, Ref):
            return self.anchors.types[value.number]
        return live_class(value, self.anchors) if isinstance(value, ObjectNode) else None

    def _only_shown(self, number: int) -> bool:
        """Return True if only displays hold an anchor."""
        while self._shown:
            tree, value = self._shown.pop()
            if isinstance(value, Ref):
                if value.number not in self._shown_anchors:
                    self._shown_anchors.add(value.number)
                    self._shown.append((tree, tree.contents.get(value.number, ("", None))[1]))
            elif isinstance(value, (list, tuple, set, frozenset, dict, ObjectNode)):
                if id(value) not in self._shown_seen:
                    self._shown_seen[id(value)] = value
                    self._shown += [(tree, one) for one in _inside(value)]
        return number in self._shown_anchors

    def _refs(self, a: Ref, b: Ref, path: Path) -> Difference | None:
        if a.number != b.number:
            return self._differ(path, a, b)
        if a.number in self._entered:
            return None
        self._entered.add(a.number)
        kind, left = self.then.contents.get(a.number, ("", None))
        other, right = self.now.contents.get(a.number, ("", None))
        if kind != other:
            return Difference(render(path), kind or "gone", other or "gone")
        path = (None, self.anchors.path(a.number))
        if kind == "object":
            return self._attributes(self._class(a), left, right, path)
        if kind in {"set", "weak set"}:
            return self._sets(elements(left), elements(right), path)
        if kind == "function":
            right = with_closure_of(left, right)
        if kind == "generator":
            right = as_suspended(left, right)
        if kind == "file" and self._unknown_position(left, right, path):
            return None
        if left is not None and right is not None and kind in CONTENT_FIELDS:
            return self._fields(left, right, path, CONTENT_FIELDS[kind])
        self._stack.append((left, right, path))
        return None

    def _unknown_position(self, then: Any, now: Any, path: Path) -> bool:
        """Return True if one side could not tell the position of an open file, and said so.

        A text file cannot tell its position while it is iterated over, and can once it is
        exhausted; whether a boundary lies before or after that depends on how many iterations are
        drawn at once.
        """
        if then is None or now is None:  # closed on one side
            return False
        where = render(path)
        return (then == UNKNOWN_POSITION and where in self.missing_then) or (
            now == UNKNOWN_POSITION and where in self.missing_now
        )

    def _pieces(self, a: MemoryPiece, b: MemoryPiece, path: Path) -> Difference | None:
        met = self._partner.get(id(a))
        if met == id(b):
            return None
        if met is not None or id(b) in self._back:
            return Difference(render(path), "memory of its own or shared", "shared otherwise")
        self._marry(a, b)
        if a.block.nbytes != b.block.nbytes or a.block.device != b.block.device:
            sizes = [f"{p.block.nbytes} bytes on {p.block.device}" for p in (a, b)]
            return Difference(render(path), *sizes)
        known = self.same is not None and a.block.key and b.block.key
        if known and self.same and self.same(a.block.key or "", b.block.key or ""):
            return None
        self._memory.append((a, b, path))
        return None

    def _memories(self) -> Iterator[Difference]:
        """Compare memory, after it is known which bytes are used by tensors and arrays."""
        for a, b, path in self._memory:
            left, right = self._data(a, self.buffers_then), self._data(b, self.buffers_now)
            texts = memory_texts(left, right, self._covered.get(id(a)))
            if texts is not None:
                yield Difference(render(path), *texts)
        self._memory = []

    def _cover(self, body: ArrayBody) -> None:
        """Remember which bytes a tensor uses; the others may never have been written."""
        span = span_of(body)
        whole = (0, (body[0].block.nbytes,), (1,))
        self._covered.setdefault(id(body[0]), []).append(whole if span is None else span)

    @staticmethod
    def _data(piece: MemoryPiece, buffers: Callable[[str], Any]) -> Any:
        block = piece.block
        return block.data if block.key is None else buffers(block.key)

    def _outside(self, a: Any, b: Any, path: Path) -> Difference | None:
        key_a, key_b = bytes(a).decode(), bytes(b).decode()
        if self.same is not None and self.same(key_a, key_b):
            return None
        texts = memory_texts(self.buffers_then(key_a), self.buffers_now(key_b))
        return None if texts is None else Difference(render(path), *texts)

    def _name(self, key: Any) -> str:
        return self.anchors.path(key.number) if isinstance(key, Ref) else short(key, self.anchors)


def _with_slots(state: Any) -> bool:
    """Return True for a pair of attributes and slots, as pickle and our kinds write them."""
    return (
        type(state) is tuple
        and len(state) == 2
        and isinstance(state[0], dict | None)
        and isinstance(state[1], dict)
    )


def _inside(value: Any) -> Iterator[Any]:
    """Yield the objects inside a container or node."""
    if isinstance(value, ObjectNode):
        yield from (value.args, value.items, value.pairs, value.state)
    elif isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    else:
        yield from value
