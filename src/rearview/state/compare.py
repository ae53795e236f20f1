"""Compare the state of a replay with the recorded state, and describe each difference in words.

Two states are equal if the program could not tell one from the other: all values are equal bit by bit, references that
led to one object lead to one object, and the bytes that tensors and arrays use are equal. An *anchor* is an object that
existed when the loop was entered (`object_numbers`); a *node* describes a captured object (`skeleton_reader`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from rearview.model import MissingPart
from rearview.state.capture import Captured, split
from rearview.state.codecs.external_resources import UNKNOWN_POSITION
from rearview.state.displays_and_trackers import (
    belongs_to_program,
    is_never_compared,
    uncompared_attributes,
)
from rearview.state.object_numbers import Anchors, readable_path, step_text
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
    """Return a text for each of two memory blocks that shows how the blocks differ, or None if all bytes are equal.

    With `spans`, only the bytes in these spans are compared.
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
    """Return a path as a Python expression, such as `model.layers[2].weight`."""
    parts = []
    step: Any = path
    while step is not None:
        step, text = step
        parts.append(text)
    return readable_path("".join(reversed(parts)))


Path = tuple[Any, str]
"""Path to an object: (path to the object that refers to it, or None for a variable; text of the last step)."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between a recorded state and the current state."""

    path: str
    """Path to the object that differs."""
    recorded: str
    """Short text of the recorded value."""
    current: str
    """Short text of the current value."""

    def __str__(self) -> str:
        return f"{self.path}: {self.recorded} when recorded, {self.current} now"


def compare(
    anchors: Anchors,
    captured: Captured,
    recorded_skeleton: bytes,
    recorded_buffers: Callable[[str], Any],
    *,
    recorded_missing: Collection[MissingPart] = (),
    equal_buffers: Callable[[str, str], bool] | None = None,
    ignore: Callable[[str], bool] | None = None,
) -> Difference | None:
    """Return the first difference between a recorded state and the captured one; None if the states are equal.

    `recorded_buffers` returns the bytes of the recorded buffer with a key. `recorded_missing` lists the parts that
    could not be captured when the state was recorded: an open file does not differ if one of the two states lacks its
    position and lists the file as missing. `equal_buffers(recorded key, current key)`, if given, returns True if the
    hashes of two buffers are known to be equal; these buffers are then not read. `ignore`, if given, gets the path of a
    difference, and returns True to leave the difference out.
    """
    all_differences = differences(
        anchors,
        captured,
        recorded_skeleton,
        recorded_buffers,
        recorded_missing=recorded_missing,
        equal_buffers=equal_buffers,
        ignore=ignore,
    )
    return next(all_differences, None)


def differences(
    anchors: Anchors,
    captured: Captured,
    recorded_skeleton: bytes,
    recorded_buffers: Callable[[str], Any],
    *,
    recorded_missing: Collection[MissingPart] = (),
    equal_buffers: Callable[[str, str], bool] | None = None,
    ignore: Callable[[str], bool] | None = None,
) -> Iterator[Difference]:
    """Yield every difference between two states, the program's variables first; arguments as in `compare`."""
    if _has_equal_bytes(captured, recorded_skeleton, recorded_buffers, equal_buffers):
        return
    comparison = _Comparison(
        anchors,
        Skeleton(recorded_skeleton),
        Skeleton(captured.skeleton),
        recorded_buffers,
        captured.buffers.__getitem__,
        recorded_missing=recorded_missing,
        current_missing=captured.missing,
        equal_buffers=equal_buffers,
    )
    for difference in comparison.run():
        if ignore is None or not ignore(difference.path):
            yield difference


def _has_equal_bytes(
    current: Captured,
    recorded_skeleton: bytes,
    recorded_buffers: Callable[[str], Any],
    equal_buffers: Callable[[str, str], bool] | None,
) -> bool:
    """Return True if the skeletons and buffers of two states are equal byte for byte, which is usual.

    States with different bytes may still be equal.
    """
    recorded_header, recorded_stream = split(recorded_skeleton)
    current_header, current_stream = split(current.skeleton)
    if (
        len(recorded_header["blocks"]) != len(current_header["blocks"])
        or recorded_stream != current_stream
    ):
        return False
    pairs = zip(recorded_header["outside"], current_header["outside"], strict=True)
    outside = [((a, 0, None), (b, 0, None)) for a, b in pairs]
    blocks = zip(recorded_header["blocks"], current_header["blocks"], strict=True)
    for old, new in [*blocks, *outside]:
        if old[1] != new[1] or (old[0] is None) != (new[0] is None):
            return False
        if old[0] is None:
            if old[2] != new[2]:
                return False
        elif equal_buffers is not None and equal_buffers(old[0], new[0]):
            continue
        elif memory_texts(recorded_buffers(old[0]), current.buffers[new[0]]) is not None:
            return False
    return True


class _Comparison:
    """The comparison of two states.

    In every method, `a` is a part of the recorded state and `b` the corresponding part of the current state.
    """

    def __init__(
        self,
        anchors: Anchors,
        recorded: Skeleton,
        current: Skeleton,
        recorded_buffers: Callable[[str], Any],
        current_buffers: Callable[[str], Any],
        *,
        recorded_missing: Collection[MissingPart],
        current_missing: Collection[MissingPart],
        equal_buffers: Callable[[str, str], bool] | None,
    ) -> None:
        self.anchors = anchors
        self.recorded_missing = {part.path for part in recorded_missing}
        self.current_missing = {part.path for part in current_missing}
        self.recorded, self.current = recorded, current
        self.recorded_buffers, self.current_buffers = recorded_buffers, current_buffers
        self.equal_buffers = equal_buffers
        self._partner: dict[int, int] = {}
        """`id` of a recorded object -> `id` of the current object with which the recorded object was compared."""
        self._reverse_partner: dict[int, int] = {}
        """`id` of a current object -> `id` of the recorded object with which the current object was compared."""
        self._compared_anchors: set[int] = set()
        self._kept_alive: list[Any] = []
        """References that keep objects alive while their `id` is a key of `_partner` or `_reverse_partner`."""
        self._stack: list[tuple[Any, Any, Path]] = []
        """Pairs of values that are still to be compared."""
        self._late_sets: list[tuple[Any, Any, Path]] = []
        """Pairs of sets that contain the `id` of objects: compared at the end, when all objects have partners."""
        self._late_dicts: list[tuple[Any, Any, Path]] = []
        """Pairs of dicts with keys that are hashed by address: compared late, when most objects have partners."""
        self._memory: list[tuple[BlockNode, BlockNode, Path]] = []
        """Pairs of memory blocks whose bytes are still to be compared."""
        self._display_values: list[tuple[Skeleton, Any]] = []
        """Values inside progress bars and loggers, each with its state, that are still to be searched for anchors."""
        self._visited_display_values: dict[int, Any] = {}
        self._display_anchors: set[int] = set()
        """Numbers of anchors to which progress bars and loggers refer; an anchor is compared only if the program refers
        to it, too."""
        self._spans: dict[int, list[Span]] = {}
        """`id` of a recorded memory block -> spans of the bytes that tensors and arrays use in the block."""

    def run(self) -> Iterator[Difference]:
        """Yield the differences of variables, of anchors that no variable leads to, and of the random state."""
        yield from self._compare_root_names()
        shared = [name for name in self.recorded.roots if name in self.current.roots]
        for name in shared:
            path = (None, step_text("", name))
            yield from self._compare_from(self.recorded.roots[name], self.current.roots[name], path)
        shared_anchors = self.recorded.contents.keys() & self.current.contents.keys()
        for number in sorted(shared_anchors - self.recorded.by_address - self.current.by_address):
            if number not in self._compared_anchors and self._is_only_in_displays(number):
                continue
            path = (None, self.anchors.path(number))
            yield from self._compare_from(Ref(number), Ref(number), path)
        yield from self._compare_late_dicts()
        yield from self._compare_late_sets()
        yield from self._compare_memory()
        if self.recorded.rng is not None and self.current.rng is not None:
            # a probe may have imported a library that has a random generator
            for name in self.recorded.rng.keys() & self.current.rng.keys():
                path = (None, f"<global state of {name}>")
                yield from self._compare_from(self.recorded.rng[name], self.current.rng[name], path)
            yield from self._compare_memory()

    def _compare_root_names(self) -> Iterator[Difference]:
        for name in self.recorded.roots.keys() - self.current.roots.keys():
            yield Difference(step_text("", name), "bound", "unbound")
        for name in self.current.roots.keys() - self.recorded.roots.keys():
            yield Difference(step_text("", name), "unbound", "bound")

    def _compare_from(self, recorded: Any, current: Any, path: Path) -> Iterator[Difference]:
        self._stack.append((recorded, current, path))
        yield from self._work_off_stack()

    def _work_off_stack(self) -> Iterator[Difference]:
        while self._stack:
            a, b, path = self._stack.pop()
            before = len(self._stack)
            difference = self._compare_pair(a, b, path)
            if difference is not None:
                yield difference
            # `_compare_pair` appended the parts in order: reverse the parts, so that the first part is popped first
            self._stack[before:] = self._stack[before:][::-1]

    def _difference(self, path: Path, recorded: Any, current: Any) -> Difference:
        return Difference(render(path), short(recorded, self.anchors), short(current, self.anchors))

    def _compare_pair(self, a: Any, b: Any, path: Path) -> Difference | None:
        if type(a) is not type(b) and not (is_array(a) and is_array(b)):
            return self._difference(path, a, b)
        if isinstance(a, Ref):
            return self._compare_anchors(a, b, path)
        if isinstance(a, BlockNode):
            return self._compare_blocks(a, b, path)
        if isinstance(a, type):
            return None if a is b else self._difference(path, a, b)
        if isinstance(a, float):
            return (
                None if struct.pack("d", a) == struct.pack("d", b) else self._difference(path, a, b)
            )
        if isinstance(a, complex):
            equal = struct.pack("2d", a.real, a.imag) == struct.pack("2d", b.real, b.imag)
            return None if equal else self._difference(path, a, b)
        if isinstance(a, (OutsideKey, memoryview)):
            return self._compare_pickled_buffers(a, b, path)
        if isinstance(a, (list, tuple, dict, set, frozenset, ObjectNode)):
            return self._compare_compound(a, b, path)
        return None if a == b else self._difference(path, a, b)

    def _compare_compound(self, a: Any, b: Any, path: Path) -> Difference | None:
        partner = self._partner.get(id(a))
        if partner == id(b):
            return None
        if has_identity(a) and (partner is not None or id(b) in self._reverse_partner):
            return Difference(render(path), "one object", "another object that is merely equal")
        self._pair_up(a, b)
        if isinstance(a, dict):
            return self._compare_dicts(a, b, path)
        if isinstance(a, (list, tuple)):
            return self._compare_sequences(a, b, path)
        if isinstance(a, (set, frozenset)):
            return self._compare_sets(a, b, path)
        return self._compare_nodes(a, b, path)

    def _pair_up(self, a: Any, b: Any) -> None:
        self._partner[id(a)], self._reverse_partner[id(b)] = id(b), id(a)
        self._kept_alive.append((a, b))

    def _compare_fields(
        self, a: Any, b: Any, path: Path, names: tuple[str, ...]
    ) -> Difference | None:
        if len(a) != len(b) or len(a) != len(names):
            return self._compare_sequences(a, b, path)
        for left, right, name in zip(a, b, names, strict=True):
            if name == EXTRAS:
                left, right = without_operation(left), without_operation(right)  # noqa: PLW2901
            self._stack.append((left, right, (path, name)))
        return None

    def _compare_sequences(self, a: Any, b: Any, path: Path, style: str = "[") -> Difference | None:
        if isinstance(a, ArrayBody):
            self._add_span(a)
            return self._compare_fields(a, b, path, ArrayBody.FIELDS[: len(a)])
        if len(a) != len(b):
            return Difference(render(path), f"{len(a)} items", f"{len(b)} items")
        if same_values(a, b):
            return None
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            self._stack.append((left, right, (path, step_text(style, number))))
        return None

    def _compare_dicts(self, a: Any, b: Any, path: Path, style: str = "[") -> Difference | None:
        if is_environment(a) and is_environment(b):
            a, b = compared_variables(a), compared_variables(b)
        keys_a, keys_b = list(a), list(b)
        if set(map(type, keys_a)) <= QUICK and set(map(type, keys_b)) <= QUICK:
            if keys_a != keys_b:
                return self._key_difference(keys_a, keys_b, path)
        elif len(keys_a) != len(keys_b):
            return Difference(render(path), f"{len(a)} keys", f"{len(b)} keys")
        elif self._have_another_order(keys_a, keys_b):
            self._late_dicts.append((a, b, path))
            return None
        else:
            for left, right in zip(keys_a, keys_b, strict=True):
                self._stack.append((left, right, (path, f"<key {short(left, self.anchors)}>")))
        for left, right in zip(keys_a, keys_b, strict=True):
            text = step_text(style, left) if type(left) in QUICK else f"[{self._key_text(left)}]"
            self._stack.append((a[left], b[right], (path, text)))
        return None

    def _have_another_order(self, a: list[Any], b: list[Any]) -> bool:
        """Return True if the keys of two dicts are hashed by address, and `a` may have another order of keys than `b`.

        A set of objects that are hashed by address iterates in another order in every process. A dict that was filled
        from such a set therefore has another order, too.
        """
        anchors_a, anchors_b = ([getattr(key, "number", None) for key in each] for each in (a, b))
        if anchors_a == anchors_b and None not in anchors_a:
            return False
        return all(map(self._is_hashed_by_address, [*a, *b]))

    def _is_hashed_by_address(self, key: Any) -> bool:
        if isinstance(key, ObjectNode) and key.label == "build tensor":
            return True
        cls = self._class_of(key)
        if cls is None:
            return False
        tensor = any(b.__module__ == "torch" and b.__name__ == "Tensor" for b in cls.__mro__)
        hashing: object = cls.__hash__
        return tensor or hashing is object.__hash__

    def _compare_late_dicts(self) -> Iterator[Difference]:
        """Yield the differences of dicts whose keys are hashed by address.

        Each recorded key is compared with its partner among the current keys (`_partner`).
        """
        while self._late_dicts:
            a, b, path = self._late_dicts.pop(0)
            unpaired_keys = {_identity(key): key for key in b}
            pairs = [(key, unpaired_keys.pop(self._current_identity(key), None)) for key in a]
            # keys without a partner are compared in the order of the dict: only this dict refers to these objects
            remaining_keys = iter(unpaired_keys.values())
            for key, current_key in pairs:
                match = next(remaining_keys) if current_key is None else current_key
                self._stack.append((key, match, (path, f"<key {short(key, self.anchors)}>")))
                self._stack.append((a[key], b[match], (path, f"[{self._key_text(key)}]")))
            yield from self._work_off_stack()

    def _current_identity(self, key: Any) -> Any:
        """Return the `_identity` of the current object that is the partner of the recorded object `key`."""
        return key.number if isinstance(key, Ref) else ("object", self._partner.get(id(key)))

    def _key_difference(self, a: list[Any], b: list[Any], path: Path) -> Difference:
        where = render(path)
        only_recorded = [key for key in a if key not in set(b)]
        only_current = [key for key in b if key not in set(a)]
        if not only_recorded and not only_current:
            return Difference(where, f"keys in the order {short(a)}", f"in the order {short(b)}")
        return Difference(
            where,
            f"has the keys {short(only_recorded)}" if only_recorded else "has no such key",
            f"has the keys {short(only_current)}" if only_current else "has no such key",
        )

    def _compare_sets(self, a: Any, b: Any, path: Path) -> Difference | None:
        if set(map(type, a)) <= QUICK:
            return None if a == b else self._difference(path, a - b, b - a)
        if any(map(is_object_id, a)) and len(a) == len(b):
            self._late_sets.append((a, b, path))
            return None
        return self._compare_unordered(a, b, path)

    def _compare_late_sets(self) -> Iterator[Difference]:
        while self._late_sets:
            a, b, path = self._late_sets.pop(0)
            left, right = without_matched_ids(a, b, self._partner)
            difference = self._compare_unordered(left, right, path)
            if difference is not None:
                yield difference
            yield from self._work_off_stack()

    def _compare_unordered(self, a: Any, b: Any, path: Path) -> Difference | None:
        sorted_a, sorted_b = sorted(a, key=canonical), sorted(b, key=canonical)
        return self._compare_sequences(sorted_a, sorted_b, path, "{")

    def _compare_nodes(self, a: ObjectNode, b: ObjectNode, path: Path) -> Difference | None:
        name = class_of(a, self.anchors)
        if is_never_compared(name) and name == class_of(b, self.anchors):
            return None
        if is_object_id(a) and not has_identity(a.args[0]):
            return self._difference(path, a, b)
        parts_a, parts_b = self.recorded.parts(a), self.current.parts(b)
        if a.label == b.label == "build function":
            parts_a, parts_b = (
                function_as_recorded(parts_a, parts_a),
                function_as_recorded(parts_b, parts_a),
            )
        if a.label == b.label == "build live_generator" and isinstance(b.state, dict):
            recorded = a.state or {}
            self._stack.append((parts_a, parts_b, path))
            current = {name: value for name, value in b.state.items() if name in recorded}
            return self._compare_dicts(recorded, current, path)
        if a.label == b.label == "build file":
            if self._is_unknown_position(parts_a[0], parts_b[0], path):
                return None
        if a.label in NODE_FIELDS:
            return self._compare_fields(parts_a, parts_b, path, NODE_FIELDS[a.label])
        self._stack.append((parts_a, parts_b, path))
        for left, right in ((a.items, b.items), (a.pairs, b.pairs)):
            if left or right:
                self._stack.append((left, right, path))
        return self._compare_attributes(self._class_of(a), a.state, b.state, path)

    def _compare_attributes(
        self, cls: type | None, a: Any, b: Any, path: Path
    ) -> Difference | None:
        """Compare those attributes of two instances of `cls` that are training state.

        `a` and `b` hold the attributes: each is a dict, or a pair of a dict and a dict of slots. A value of any other
        form is compared as a whole.
        """
        if isinstance(a, dict) and isinstance(b, dict):
            (a, display_a), (b, display_b) = (
                uncompared_attributes(cls).split(a),
                uncompared_attributes(cls).split(b),
            )
            for tree, attributes, other_attributes in (
                (self.recorded, display_a, display_b),
                (self.current, display_b, display_a),
            ):
                for key, value in attributes.items():
                    if key not in other_attributes or not self._belongs_to_program(
                        value, other_attributes[key]
                    ):
                        self._display_values.append((tree, value))
                    elif tree is self.recorded:
                        self._stack.append(
                            (value, other_attributes[key], (path, step_text(".", key)))
                        )
            return self._compare_dicts(a, b, path, ".")
        if _has_slots(a) and _has_slots(b):
            difference = self._compare_attributes(cls, a[0] or {}, b[0] or {}, path)
            return difference or self._compare_attributes(cls, a[1], b[1], path)
        self._stack.append((a, b, path))
        return None

    def _belongs_to_program(self, a: Any, b: Any) -> bool:
        """Return True if the values `a` and `b` of an attribute of a progress bar or logger are objects of the program.

        Such objects are compared, although other attributes that the library uses are not.
        """
        classes = [self._class_of(value) for value in (a, b)]
        return (
            classes[0] is classes[1] and classes[0] is not None and belongs_to_program(classes[0])
        )

    def _class_of(self, value: Any) -> type | None:
        """Return the class of a captured object; None if `value` is no object or its class does not exist now."""
        if isinstance(value, Ref):
            return self.anchors.types[value.number]
        return live_class(value, self.anchors) if isinstance(value, ObjectNode) else None

    def _is_only_in_displays(self, number: int) -> bool:
        """Return True if progress bars or loggers refer to the anchor with this number."""
        while self._display_values:
            tree, value = self._display_values.pop()
            if isinstance(value, Ref):
                if value.number not in self._display_anchors:
                    self._display_anchors.add(value.number)
                    self._display_values.append(
                        (tree, tree.contents.get(value.number, ("", None))[1])
                    )
            elif isinstance(value, (list, tuple, set, frozenset, dict, ObjectNode)):
                if id(value) not in self._visited_display_values:
                    self._visited_display_values[id(value)] = value
                    self._display_values += [(tree, part) for part in _parts_of(value)]
        return number in self._display_anchors

    def _compare_anchors(self, a: Ref, b: Ref, path: Path) -> Difference | None:
        if a.number != b.number:
            return self._difference(path, a, b)
        if a.number in self._compared_anchors:
            return None
        self._compared_anchors.add(a.number)
        kind, left = self.recorded.contents.get(a.number, ("", None))
        current_kind, right = self.current.contents.get(a.number, ("", None))
        if kind != current_kind:
            return Difference(render(path), kind or "gone", current_kind or "gone")
        path = (None, self.anchors.path(a.number))
        if kind == "object":
            return self._compare_attributes(self._class_of(a), left, right, path)
        if kind in {"set", "weak set"}:
            return self._compare_sets(elements(left), elements(right), path)
        if kind == "function":
            right = content_as_recorded(left, right)
        if kind == "generator":
            right = generator_as_recorded(left, right)
        if kind == "file" and self._is_unknown_position(left, right, path):
            return None
        if left is not None and right is not None and kind in CONTENT_FIELDS:
            return self._compare_fields(left, right, path, CONTENT_FIELDS[kind])
        self._stack.append((left, right, path))
        return None

    def _is_unknown_position(self, recorded: Any, current: Any, path: Path) -> bool:
        """Return True if one of two states of an open file lacks the position, and the file is listed as missing there.

        The position of a text file is unknown while the program iterates over the file. Whether a boundary is before or
        after the end of the file depends on how many iterations the loop takes from its iterator at once.
        """
        if recorded is None or current is None:  # the file is closed in one of the states
            return False
        where = render(path)
        return (recorded == UNKNOWN_POSITION and where in self.recorded_missing) or (
            current == UNKNOWN_POSITION and where in self.current_missing
        )

    def _compare_blocks(self, a: BlockNode, b: BlockNode, path: Path) -> Difference | None:
        partner = self._partner.get(id(a))
        if partner == id(b):
            return None
        if partner is not None or id(b) in self._reverse_partner:
            return Difference(render(path), "memory of its own or shared", "shared otherwise")
        self._pair_up(a, b)
        if a.block.nbytes != b.block.nbytes or a.block.device != b.block.device:
            sizes = [f"{p.block.nbytes} bytes on {p.block.device}" for p in (a, b)]
            return Difference(render(path), *sizes)
        both_have_keys = self.equal_buffers is not None and a.block.key and b.block.key
        if (
            both_have_keys
            and self.equal_buffers
            and self.equal_buffers(a.block.key or "", b.block.key or "")
        ):
            return None
        self._memory.append((a, b, path))
        return None

    def _compare_memory(self) -> Iterator[Difference]:
        """Yield the differences of memory blocks; `_spans` must be complete for all blocks in `_memory`."""
        for a, b, path in self._memory:
            left, right = (
                self._bytes_of_block(a, self.recorded_buffers),
                self._bytes_of_block(b, self.current_buffers),
            )
            texts = memory_texts(left, right, self._spans.get(id(a)))
            if texts is not None:
                yield Difference(render(path), *texts)
        self._memory = []

    def _add_span(self, body: ArrayBody) -> None:
        """Remember which bytes of its block a tensor uses: only these are compared, because others may be undefined."""
        span = span_of(body)
        whole = (0, (body[0].block.nbytes,), (1,))
        self._spans.setdefault(id(body[0]), []).append(whole if span is None else span)

    @staticmethod
    def _bytes_of_block(node: BlockNode, buffers: Callable[[str], Any]) -> Any:
        block = node.block
        return block.data if block.key is None else buffers(block.key)

    def _compare_pickled_buffers(self, a: Any, b: Any, path: Path) -> Difference | None:
        key_a, key_b = bytes(a).decode(), bytes(b).decode()
        if self.equal_buffers is not None and self.equal_buffers(key_a, key_b):
            return None
        texts = memory_texts(self.recorded_buffers(key_a), self.current_buffers(key_b))
        return None if texts is None else Difference(render(path), *texts)

    def _key_text(self, key: Any) -> str:
        return self.anchors.path(key.number) if isinstance(key, Ref) else short(key, self.anchors)


def _has_slots(state: Any) -> bool:
    """Return True if a state is a pair (attributes, slots), as pickle stores an instance with slots."""
    return (
        type(state) is tuple
        and len(state) == 2
        and isinstance(state[0], dict | None)
        and isinstance(state[1], dict)
    )


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield the values inside a container or node."""
    if isinstance(value, ObjectNode):
        yield from (value.args, value.items, value.pairs, value.state)
    elif isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    else:
        yield from value


def _identity(key: Any) -> Any:
    """Return a value that is equal for equal objects and differs for different objects: an anchor number or an `id`."""
    return key.number if isinstance(key, Ref) else ("object", id(key))
