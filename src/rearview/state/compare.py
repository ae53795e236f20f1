"""Compare the state of a replay with a recorded one and describe where they differ: the proof.

States are equal if the program could not tell them apart: values bit by bit, identity where it can
matter, memory where a tensor or array uses it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rearview.model import MissingPart
from rearview.state.capture import Captured, split
from rearview.state.codecs.open_files import UNKNOWN_POSITION
from rearview.state.exclusions import belongs_to_program, is_never_compared, uncompared_attributes
from rearview.state.object_walk import Anchors, spell, tidy
from rearview.state.skeleton_reader import (
    CONTENT_FIELDS,
    EXTRAS,
    NODE_FIELDS,
    QUICK,
    ArrayBody,
    BlockNode,
    ObjectNode,
    OutsideKey,
    Ref,
    Skeleton,
    Span,
    canonical,
    class_of,
    compared_variables,
    content_as_recorded,
    elements,
    function_as_recorded,
    generator_as_recorded,
    has_identity,
    is_array,
    is_environment,
    is_object_id,
    live_class,
    same_values,
    short,
    span_of,
    without_matched_ids,
    without_operation,
)


def memory_texts(
    recorded: Any, current: Any, spans: list[Span] | None = None
) -> tuple[str, str] | None:
    """Return how two blocks of memory differ, or None if they are equal byte for byte.

    With `spans`, only those bytes count.
    """
    import numpy as np

    recorded_bytes, current_bytes = (
        np.frombuffer(recorded, np.uint8),
        np.frombuffer(current, np.uint8),
    )
    if recorded_bytes.nbytes != current_bytes.nbytes:
        return f"{recorded_bytes.nbytes} bytes", f"{current_bytes.nbytes} bytes"
    if np.array_equal(recorded_bytes, current_bytes):
        return None
    unequal = np.flatnonzero(recorded_bytes != current_bytes)
    if spans is not None:
        inside: Any = np.zeros(recorded_bytes.nbytes, bool)
        for first, shape, strides in spans:
            np.lib.stride_tricks.as_strided(inside[first:], shape, strides)[...] = True
        unequal = unequal[inside[unequal]]
        if not unequal.size:
            return None
    first = int(unequal[0])
    return (
        f"byte {first} is {int(recorded_bytes[first]):#04x}",
        f"{int(current_bytes[first]):#04x} ({unequal.size} of {recorded_bytes.nbytes} bytes differ)",
    )


def render(path: tuple[Any, str]) -> str:
    """Return a path as people write it."""
    parts = []
    step: Any = path
    while step is not None:
        step, text = step
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

    `missing_then` lists what the recorded state lacks: a file is no difference if its position is
    unknown on one side and reported as missing there. `same(then, now)`, if given, returns True if
    two buffers are known to be equal by their hashes, so that they need not be read. `ignore`
    returns True for paths that are left out.
    """
    all_differences = differences(
        anchors,
        captured_now,
        skeleton_then,
        buffers_then,
        missing_then=missing_then,
        same=same,
        ignore=ignore,
    )
    return next(all_differences, None)


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
    """Yield every difference, outermost variables first; arguments as in `compare`."""
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
    """Return True if all bytes are equal, the usual case; if not, the states may still be equal."""
    head_then, stream_then = split(skeleton_then)
    head_now, stream_now = split(now.skeleton)
    if len(head_then["blocks"]) != len(head_now["blocks"]) or stream_then != stream_now:
        return False
    pairs = zip(head_then["outside"], head_now["outside"], strict=True)
    outside = [((a, 0, None), (b, 0, None)) for a, b in pairs]
    blocks = zip(head_then["blocks"], head_now["blocks"], strict=True)
    for old, new in [*blocks, *outside]:
        if old[1] != new[1] or (old[0] is None) != (new[0] is None):
            return False
        if old[0] is None:
            if old[2] != new[2]:
                return False
        elif same is not None and same(old[0], new[0]):
            continue
        elif memory_texts(buffers_then(old[0]), now.buffers[new[0]]) is not None:
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
        """References that keep objects alive while their `id` is in use."""
        self._stack: list[tuple[Any, Any, Path]] = []
        self._late: list[tuple[Any, Any, Path]] = []
        self._late_dicts: list[tuple[Any, Any, Path]] = []
        """Dicts that are compared when most objects are known to correspond."""
        """Sets that hold the `id` of objects: compared after all objects are paired."""
        self._memory: list[tuple[BlockNode, BlockNode, Path]] = []
        self._shown: list[tuple[Skeleton, Any]] = []
        """Objects held by displays that are still to be searched for anchors."""
        self._shown_seen: dict[int, Any] = {}
        self._shown_anchors: set[int] = set()
        """Anchors that only displays hold: compared only if something else holds them too."""
        self._spans: dict[int, list[Span]] = {}

    def run(self) -> Iterator[Difference]:
        """Yield the differences of roots, then of anchors that no root leads to, then of random state."""
        yield from self._names()
        shared = [name for name in self.then.roots if name in self.now.roots]
        for name in shared:
            path = (None, spell("", name))
            yield from self._compare_from(self.then.roots[name], self.now.roots[name], path)
        shared_anchors = self.then.contents.keys() & self.now.contents.keys()
        for number in sorted(shared_anchors - self.then.by_address - self.now.by_address):
            if number not in self._entered and self._only_shown(number):
                continue
            path = (None, self.anchors.path(number))
            yield from self._compare_from(Ref(number), Ref(number), path)
        yield from self._dicts_by_address()
        yield from self._addresses()
        yield from self._compare_memory()
        if self.then.rng is not None and self.now.rng is not None:
            # a probe may have imported a library that has a random generator
            for name in self.then.rng.keys() & self.now.rng.keys():
                path = (None, f"<global state of {name}>")
                yield from self._compare_from(self.then.rng[name], self.now.rng[name], path)
            yield from self._compare_memory()

    def _names(self) -> Iterator[Difference]:
        for name in self.then.roots.keys() - self.now.roots.keys():
            yield Difference(spell("", name), "bound", "unbound")
        for name in self.now.roots.keys() - self.then.roots.keys():
            yield Difference(spell("", name), "unbound", "bound")

    def _compare_from(self, then: Any, now: Any, path: Path) -> Iterator[Difference]:
        self._stack.append((then, now, path))
        yield from self._work_off_stack()

    def _work_off_stack(self) -> Iterator[Difference]:
        while self._stack:
            a, b, path = self._stack.pop()
            before = len(self._stack)
            difference = self._pair(a, b, path)
            if difference is not None:
                yield difference
            # the children were pushed in order: reverse them, so that they are popped in order
            self._stack[before:] = self._stack[before:][::-1]

    def _differ(self, path: Path, then: Any, now: Any) -> Difference:
        return Difference(render(path), short(then, self.anchors), short(now, self.anchors))

    def _pair(self, a: Any, b: Any, path: Path) -> Difference | None:
        if type(a) is not type(b) and not (is_array(a) and is_array(b)):
            return self._differ(path, a, b)
        if isinstance(a, Ref):
            return self._refs(a, b, path)
        if isinstance(a, BlockNode):
            return self._compare_blocks(a, b, path)
        if isinstance(a, type):
            return None if a is b else self._differ(path, a, b)
        if isinstance(a, float):
            return None if struct.pack("d", a) == struct.pack("d", b) else self._differ(path, a, b)
        if isinstance(a, complex):
            equal = struct.pack("2d", a.real, a.imag) == struct.pack("2d", b.real, b.imag)
            return None if equal else self._differ(path, a, b)
        if isinstance(a, (OutsideKey, memoryview)):
            return self._outside(a, b, path)
        if isinstance(a, (list, tuple, dict, set, frozenset, ObjectNode)):
            return self._compound(a, b, path)
        return None if a == b else self._differ(path, a, b)

    def _compound(self, a: Any, b: Any, path: Path) -> Difference | None:
        partner = self._partner.get(id(a))
        if partner == id(b):
            return None
        if has_identity(a) and (partner is not None or id(b) in self._back):
            return Difference(render(path), "one object", "another object that is merely equal")
        self._pair_up(a, b)
        if isinstance(a, dict):
            return self._dicts(a, b, path)
        if isinstance(a, (list, tuple)):
            return self._sequences(a, b, path)
        if isinstance(a, (set, frozenset)):
            return self._sets(a, b, path)
        return self._nodes(a, b, path)

    def _pair_up(self, a: Any, b: Any) -> None:
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
            self._note_span(a)
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
        elif self._in_another_order(keys_a, keys_b):
            self._late_dicts.append((a, b, path))
            return None
        else:
            for left, right in zip(keys_a, keys_b, strict=True):
                self._stack.append((left, right, (path, f"<key {short(left, self.anchors)}>")))
        for left, right in zip(keys_a, keys_b, strict=True):
            text = spell(style, left) if type(left) in QUICK else f"[{self._name(left)}]"
            self._stack.append((a[left], b[right], (path, text)))
        return None

    def _in_another_order(self, a: list[Any], b: list[Any]) -> bool:
        """Return True if the keys of two dicts are hashed by their address, and are not the same one by one.

        A dict that was filled from a set of them has another order in every process.
        """
        anchors_a, anchors_b = ([getattr(key, "number", None) for key in each] for each in (a, b))
        if anchors_a == anchors_b and None not in anchors_a:
            return False
        return all(map(self._is_hashed_by_address, [*a, *b]))

    def _is_hashed_by_address(self, key: Any) -> bool:
        if isinstance(key, ObjectNode) and key.label == "build tensor":
            return True
        cls = self._class(key)
        if cls is None:
            return False
        tensor = any(b.__module__ == "torch" and b.__name__ == "Tensor" for b in cls.__mro__)
        hashing: object = cls.__hash__
        return tensor or hashing is object.__hash__

    def _dicts_by_address(self) -> Iterator[Difference]:
        """Compare dicts whose keys are hashed by address: each key with the key that identifies the same object."""
        while self._late_dicts:
            a, b, path = self._late_dicts.pop(0)
            rest = {_identity(key): key for key in b}
            pairs = [(key, rest.pop(self._identity_now(key), None)) for key in a]
            unmatched = iter(rest.values())  # objects that nothing else refers to, in their order
            for key, other in pairs:
                match = next(unmatched) if other is None else other
                self._stack.append((key, match, (path, f"<key {short(key, self.anchors)}>")))
                self._stack.append((a[key], b[match], (path, f"[{self._name(key)}]")))
            yield from self._work_off_stack()

    def _identity_now(self, key: Any) -> Any:
        """Return the identity of the object that corresponds to a recorded one."""
        return key.number if isinstance(key, Ref) else ("object", self._partner.get(id(key)))

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
        if any(map(is_object_id, a)) and len(a) == len(b):
            self._late.append((a, b, path))
            return None
        return self._ignoring_order(a, b, path)

    def _addresses(self) -> Iterator[Difference]:
        while self._late:
            a, b, path = self._late.pop(0)
            left, right = without_matched_ids(a, b, self._partner)
            difference = self._ignoring_order(left, right, path)
            if difference is not None:
                yield difference
            yield from self._work_off_stack()

    def _ignoring_order(self, a: Any, b: Any, path: Path) -> Difference | None:
        sorted_a, sorted_b = sorted(a, key=canonical), sorted(b, key=canonical)
        return self._sequences(sorted_a, sorted_b, path, "{")

    def _nodes(self, a: ObjectNode, b: ObjectNode, path: Path) -> Difference | None:
        name = class_of(a, self.anchors)
        if is_never_compared(name) and name == class_of(b, self.anchors):
            return None
        if is_object_id(a) and not has_identity(a.args[0]):
            return self._differ(path, a, b)
        parts_a, parts_b = self.then.parts(a), self.now.parts(b)
        if a.label == b.label == "build function":
            parts_a, parts_b = (
                function_as_recorded(parts_a, parts_a),
                function_as_recorded(parts_b, parts_a),
            )
        if a.label == b.label == "build live_generator" and isinstance(b.state, dict):
            recorded = a.state or {}
            self._stack.append((parts_a, parts_b, path))
            current = {name: value for name, value in b.state.items() if name in recorded}
            return self._dicts(recorded, current, path)
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

        `a` and `b` are dicts, or pairs of a dict and slots; any other value is compared directly.
        """
        if isinstance(a, dict) and isinstance(b, dict):
            (a, shown_a), (b, shown_b) = (
                uncompared_attributes(cls).split(a),
                uncompared_attributes(cls).split(b),
            )
            for tree, shown, shown_by_other in (
                (self.then, shown_a, shown_b),
                (self.now, shown_b, shown_a),
            ):
                for key, value in shown.items():
                    if key not in shown_by_other or not self._belongs_to_program(
                        value, shown_by_other[key]
                    ):
                        self._shown.append((tree, value))
                    elif tree is self.then:
                        self._stack.append((value, shown_by_other[key], (path, spell(".", key))))
            return self._dicts(a, b, path, ".")
        if _with_slots(a) and _with_slots(b):
            difference = self._attributes(cls, a[0] or {}, b[0] or {}, path)
            return difference or self._attributes(cls, a[1], b[1], path)
        self._stack.append((a, b, path))
        return None

    def _belongs_to_program(self, a: Any, b: Any) -> bool:
        """Return True if an attribute of a display belongs to the program and has to be compared."""
        classes = [self._class(value) for value in (a, b)]
        return (
            classes[0] is classes[1] and classes[0] is not None and belongs_to_program(classes[0])
        )

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
                    self._shown += [(tree, part) for part in _inside(value)]
        return number in self._shown_anchors

    def _refs(self, a: Ref, b: Ref, path: Path) -> Difference | None:
        if a.number != b.number:
            return self._differ(path, a, b)
        if a.number in self._entered:
            return None
        self._entered.add(a.number)
        kind, left = self.then.contents.get(a.number, ("", None))
        kind_now, right = self.now.contents.get(a.number, ("", None))
        if kind != kind_now:
            return Difference(render(path), kind or "gone", kind_now or "gone")
        path = (None, self.anchors.path(a.number))
        if kind == "object":
            return self._attributes(self._class(a), left, right, path)
        if kind in {"set", "weak set"}:
            return self._sets(elements(left), elements(right), path)
        if kind == "function":
            right = content_as_recorded(left, right)
        if kind == "generator":
            right = generator_as_recorded(left, right)
        if kind == "file" and self._unknown_position(left, right, path):
            return None
        if left is not None and right is not None and kind in CONTENT_FIELDS:
            return self._fields(left, right, path, CONTENT_FIELDS[kind])
        self._stack.append((left, right, path))
        return None

    def _unknown_position(self, then: Any, now: Any, path: Path) -> bool:
        """Return True if the position of an open file is unknown on one side and reported missing.

        The position of a text file is unknown while the program iterates over it. Whether a boundary
        lies before or after the end depends on how many iterations are drawn at once.
        """
        if then is None or now is None:  # closed on one side
            return False
        where = render(path)
        return (then == UNKNOWN_POSITION and where in self.missing_then) or (
            now == UNKNOWN_POSITION and where in self.missing_now
        )

    def _compare_blocks(self, a: BlockNode, b: BlockNode, path: Path) -> Difference | None:
        partner = self._partner.get(id(a))
        if partner == id(b):
            return None
        if partner is not None or id(b) in self._back:
            return Difference(render(path), "memory of its own or shared", "shared otherwise")
        self._pair_up(a, b)
        if a.block.nbytes != b.block.nbytes or a.block.device != b.block.device:
            sizes = [f"{p.block.nbytes} bytes on {p.block.device}" for p in (a, b)]
            return Difference(render(path), *sizes)
        both_have_keys = self.same is not None and a.block.key and b.block.key
        if both_have_keys and self.same and self.same(a.block.key or "", b.block.key or ""):
            return None
        self._memory.append((a, b, path))
        return None

    def _compare_memory(self) -> Iterator[Difference]:
        """Yield differences of memory blocks, after all tensors and arrays have noted their bytes."""
        for a, b, path in self._memory:
            left, right = self._data(a, self.buffers_then), self._data(b, self.buffers_now)
            texts = memory_texts(left, right, self._spans.get(id(a)))
            if texts is not None:
                yield Difference(render(path), *texts)
        self._memory = []

    def _note_span(self, body: ArrayBody) -> None:
        """Note which bytes of its block a tensor uses; the others may be uninitialised."""
        span = span_of(body)
        whole = (0, (body[0].block.nbytes,), (1,))
        self._spans.setdefault(id(body[0]), []).append(whole if span is None else span)

    @staticmethod
    def _data(node: BlockNode, buffers: Callable[[str], Any]) -> Any:
        block = node.block
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
    """Return True for a pair of attributes and slots, as pickle and the codecs write them."""
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


def _identity(key: Any) -> Any:
    return key.number if isinstance(key, Ref) else ("object", id(key))
