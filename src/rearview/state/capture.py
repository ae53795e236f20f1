"""Capture the state of the live objects at a boundary: `capture` returns a skeleton and buffers.

The skeleton is a pickle of everything small; it refers to anchors by number. The buffers are views
of large memory; the writer copies them later (`runtime/saving`).
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rearview.errors import StateError
from rearview.model import MissingPart
from rearview.state.codecs.base import BUILDERS, Kind
from rearview.state.codecs.containers import set_recipe
from rearview.state.codecs.python_objects import CellKind
from rearview.state.codecs.rng import read_global
from rearview.state.codecs.tensors import PlainReader, plain_access, plain_reader
from rearview.state.memory_blocks import SMALL, Blocks, GcPaused, extent
from rearview.state.object_walk import Anchors, find_path
from rearview.state.python_object_ids import MarkedContents, possible_ids, with_marked_ids
from rearview.state.reducers import Unpicklable, reducer_for

_SET = b"\x8f\x94("
"""Opcodes at the start of a pickled set that is not empty."""
_BUILDER_IDS = [id(builder) for builder in BUILDERS.values()]
_MARGIN = 25
"""Levels of nesting that are added when a value is tested alone: it is part of a deeper one."""
PLAIN: Any = object()
"""Marks a type that the C pickler handles without help."""


class StatePickler(pickle.Pickler):
    """Pickles objects created after the walk; anchors and builders become memo references.

    The memo is filled before pickling, so that a reference to an anchor needs no Python call.
    """

    def __init__(self, out: io.BytesIO, capturing: Capture) -> None:
        super().__init__(out, protocol=5, buffer_callback=capturing.take_buffer)
        self.capturing = capturing
        self.reducers = capturing.anchors.reducers

    def reducer_override(self, obj: Any) -> Any:
        """Return the reduced form of an object that plain pickling would get wrong."""
        t = type(obj)
        reducer = self.reducers.get(t)
        if reducer is None:
            reducer = reducer_for(obj, self.capturing) or PLAIN
            self.reducers[t] = reducer
        if reducer is PLAIN:
            return NotImplemented
        return reducer(obj, self.capturing)


class Capture:
    """One running capture: the memory blocks seen so far, and what could not be captured."""

    def __init__(
        self, anchors: Anchors, roots: Mapping[str, object], *, check_sharing: bool = False
    ) -> None:
        self.anchors = anchors
        self.check_sharing = check_sharing
        """Whether small arrays are checked for shared memory."""
        self.presumed_unshared: dict[int, Any] = {}
        """Small arrays, by `id`, that are assumed to share memory with nothing; see `shared`."""
        self.met_by_address: dict[int, Any] = {}
        """Arrays of `Anchors.by_address` that this capture has seen, by number."""
        self.viewed: set[int] = set()
        """`id` of arrays that have views."""
        self.roots = roots
        self.blocks = Blocks(anchors.block_keys)
        self.missing: list[MissingPart] = []
        self.reported: dict[int, Any] = {}
        """Objects in `missing`, by `id`."""
        self.out_of_band: list[str] = []
        """Keys of the buffers that the objects' own pickling handed over, in order."""
        self.cells: list[types.CellType] = []
        """Closure variables whose values are still to be pickled."""
        self.running: set[int] = set()
        """`id` of closure variables of functions on the stack."""
        self._locals: dict[str, list[tuple[str, Any]]] | None = None
        self.alive: list[Any] = anchors.alive()
        self._all_alive = len(anchors.index) == len(self.alive)
        self.placeholders: list[object] = []
        """Objects that take the memo numbers of anchors that no longer exist."""

    @functools.cached_property
    def plain_tensor(self) -> PlainReader:
        """The function that reads plain tensors fast."""
        return plain_reader(self.blocks)

    def miss(self, obj: object, reason: str) -> None:
        """Report that `obj` cannot be captured: the capture is partial."""
        if id(obj) not in self.reported:
            self.reported[id(obj)] = obj
            self.missing.append(MissingPart(self.path(obj), reason))

    def is_running(self, function: str, name: str, cell: types.CellType) -> bool:
        """Return True if the closure variable `name` of `function` belongs to a function on the stack.

        Python cannot say this exactly. A variable of an earlier call that refers to the same object
        counts as running too, which is the safe side.
        """
        if self._locals is None:
            self._locals = {}
            for key, value in self.roots.items():
                if key.startswith("local:"):
                    scope, _, variable = key.rpartition(":")
                    self._locals.setdefault(variable, []).append((scope.split(":")[-1], value))
        values = CellKind.values(cell)
        return any(
            function.startswith(f"{owner}.<locals>.") and values and values[0] is value
            for owner, value in self._locals.get(name, ())
        )

    def path(self, obj: object) -> str:
        """Return the path to an object, or its type if no path is found."""
        number = self.anchors.index.get(id(obj))
        if number is not None:
            return self.anchors.path(number)
        return find_path(self.anchors, self.roots, obj) or f"a {type(obj).__name__}"

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Pickle's buffer callback: return True to keep a small buffer inside the skeleton."""
        raw = buffer.raw()
        if raw.nbytes <= SMALL:
            return True
        self.out_of_band.append(self.blocks.add_bytes(raw))
        return False

    def contents(self) -> list[tuple[str, list[int], list[Any]]]:
        """Return the shallow contents of all live anchors, grouped by kind."""
        alive = self.alive
        groups = []
        for kind, numbers in self.anchors.by_kind():
            if not self._all_alive:
                numbers = [number for number in numbers if alive[number] is not None]  # noqa: PLW2901
            objs = [alive[number] for number in numbers]
            if not objs:
                continue
            try:
                content = kind.read(objs, self)
            except Exception:
                numbers, content = self._one_by_one(kind, numbers, objs)  # noqa: PLW2901
            if content is not None:
                groups.append((kind.name, numbers, content))
        return groups

    def _one_by_one(
        self, kind: Kind, numbers: list[int], objs: list[Any]
    ) -> tuple[list[int], list[Any]]:
        """Read the objects of a group one by one; report those that fail."""
        good: list[int] = []
        contents: list[Any] = []
        for number, obj in zip(numbers, objs, strict=True):
            try:
                contents.extend(kind.read([obj], self) or ())
            except Exception as exc:
                self.miss(obj, f"it cannot be read ({type(exc).__name__}: {exc})")
            else:
                good.append(number)
        return good, contents

    def prune(self, body: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the body without the parts that cannot be pickled; report these parts."""
        roots, contents, *rest = body
        kept_roots = {
            name: value if self._can_dump(value) else Unpicklable(value)
            for name, value in roots.items()
        }
        kept = []
        for kind, numbers, group in contents:
            good = [i for i, content in enumerate(group) if self._can_dump(content, numbers[i])]
            kept.append((kind, [numbers[i] for i in good], [group[i] for i in good]))
        return kept_roots, kept, *rest

    def _can_dump(self, value: Any, number: int | None = None) -> bool:
        pickler = StatePickler(io.BytesIO(), self)
        pickler.memo = self._memo()
        deeper = value
        for _ in range(_MARGIN):
            deeper = (deeper,)
        try:
            pickler.dump(deeper)
        except Exception as exc:
            obj = value if number is None else self.alive[number]
            self.miss(obj, f"it cannot be pickled ({type(exc).__name__}: {exc})")
            return False
        return True

    def changed_classes(self) -> list[tuple[int, type]]:
        """Return the anchors whose `__class__` was assigned since the walk."""
        classes = list(map(type, self.alive))
        if classes == self.anchors.types:
            return []
        pairs = enumerate(zip(classes, self.anchors.types, strict=True))
        changed = [number for number, (current, recorded) in pairs if current is not recorded]
        return [(number, classes[number]) for number in changed if self.alive[number] is not None]

    def again(self) -> Capture:
        """Return a new capture that starts with the missing parts of this one."""
        fresh = Capture(self.anchors, self.roots, check_sharing=True)
        fresh.missing, fresh.reported = self.missing, self.reported
        return fresh

    def release(self) -> None:
        """Drop all references to the program's objects, without waiting for the garbage collector."""
        self.alive, self.roots, self.placeholders, self._locals = [], {}, [], None
        for container in (self.presumed_unshared, self.met_by_address, self.reported):
            container.clear()

    def shared(self) -> bool:
        """Return True if an array of `presumed_unshared` does share its memory."""
        if not self.presumed_unshared:
            return False
        if not self.presumed_unshared.keys().isdisjoint(self.viewed):
            return True
        sizes = {nbytes for _, nbytes in self.blocks.index}
        return any(
            extent(array)[:2] in self.blocks.index
            for array in self.presumed_unshared.values()
            if array.nbytes in sizes
        )

    def dump(self, body: object) -> tuple[bytes, bytes]:
        """Return the pickle of `body`, then pickles of objects found while pickling it, then None."""
        out = io.BytesIO()
        pickler = StatePickler(out, self)
        pickler.memo = self._memo()
        pickler.dump(body)
        dumped: set[int] = set()
        while True:
            cells, self.cells = self.cells, []
            arrays_seen = {n: a for n, a in self.met_by_address.items() if n not in dumped}
            if not cells and not arrays_seen:
                break
            dumped.update(arrays_seen)
            pickler.dump(("cells", [(cell, CellKind.values(cell)) for cell in cells]))
            pickler.dump(("contents", self._late_contents(arrays_seen)))
        # searching the memo is slow: skip it if the stream holds no number that may be an `id`
        stream = out.getvalue()
        # write the rest to the emptied buffer: appending to a stream in use would copy it
        out.seek(0)
        out.truncate()
        numbers = possible_ids(stream)
        with_ids = with_marked_ids(pickler.memo.copy(), numbers, self) if numbers else []
        if with_ids:
            pickler.dump(("addresses", with_ids))
        sets = self._reordered(pickler, with_ids) if _SET in stream else []
        if sets:
            pickler.dump(("sets", sets))
        pickler.dump(None)
        pickler.clear_memo()
        return stream, out.getvalue()

    def _late_contents(self, arrays: dict[int, Any]) -> list[tuple[str, list[int], list[Any]]]:
        numbers, objs = list(arrays), list(arrays.values())
        self.anchors.index.update({id(obj): number for number, obj in arrays.items()})
        content = self.anchors.kinds[numbers[0]].read(objs, self) if objs else None
        return [("array", numbers, content)] if content else []

    def _reordered(self, pickler: StatePickler, with_ids: MarkedContents) -> list[tuple[Any, Any]]:
        """Return the new sets that a restore would give another order, each with a recipe."""
        reordered = []
        with_id_numbers = {id(obj) for obj, _ in with_ids}
        for _, obj in pickler.memo.copy().values():
            if type(obj) is not set or len(obj) < 2 or id(obj) in with_id_numbers:
                continue
            if id(obj) not in self.anchors.index:
                recipe = set_recipe(obj, list(obj), self)
                if recipe != list(obj):
                    reordered.append((obj, recipe))
        return reordered

    def _memo(self) -> dict[int, tuple[int, Any]]:
        objects = [*BUILDERS.values(), *self.alive]
        ids = [*_BUILDER_IDS, *self.anchors.ids]
        if not self._all_alive:
            for number, obj in enumerate(objects):
                if obj is None:
                    # no other object may get the memo number of an anchor that no longer exists
                    objects[number] = types.SimpleNamespace()
                    self.placeholders.append(objects[number])
                    ids[number] = id(objects[number])
        return dict(zip(ids, enumerate(objects), strict=True))


MAGIC = b"RVSTATE1"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Captured:
    """State at a boundary: small parts in `skeleton`, large memory in `buffers`.

    The buffers are views of live memory: copy them before the program continues.
    """

    skeleton: bytes
    buffers: dict[str, Any]
    missing: list[MissingPart]
    """The parts that could not be captured; empty if the capture is complete."""
    likely_unchanged: Collection[str] = ()
    """Keys of buffers that will probably not change: frozen weights, data."""
    owners: Sequence[Any] = ()
    """Objects that own the memory of the buffers; this reference keeps them alive."""


def capture(anchors: Anchors, roots: Mapping[str, object], *, rng: bool = True) -> Captured:
    """Return the state reachable from the anchors and the names in `roots`.

    `roots` holds the names that are bound now; a restore unbinds all others. The capture changes
    nothing in the program. It lists an object that it cannot capture in `missing`, and captures
    the rest.
    """
    # thousands of short-lived tuples would start garbage collections of the whole program
    with GcPaused(), plain_access():
        return _capture(anchors, roots, rng=rng)


def _capture(anchors: Anchors, roots: Mapping[str, object], *, rng: bool) -> Captured:
    capturing, stream = _read(anchors, roots, rng=rng)
    capturing.release()
    blocks = capturing.blocks
    anchors.block_keys = blocks.keys
    header = pickle.dumps(
        {
            "anchors": len(anchors),
            "classes": anchors.classes,
            "blocks": blocks.table,
            "outside": capturing.out_of_band,
        },
        protocol=5,
    )
    skeleton = b"".join((MAGIC, _LENGTH.pack(len(header)), header, *stream))
    return Captured(
        skeleton, blocks.buffers, capturing.missing, blocks.likely_unchanged, blocks.owners
    )


def _read(
    anchors: Anchors, roots: Mapping[str, object], *, rng: bool
) -> tuple[Capture, tuple[bytes, bytes]]:
    random_state = read_global() if rng else None
    while True:
        capturing = Capture(anchors, roots, check_sharing=anchors.shares_arrays)
        body = (dict(roots), capturing.contents(), capturing.changed_classes(), random_state)
        try:
            stream = capturing.dump(body)
        except Exception:
            capturing = capturing.again()
            body = (dict(roots), capturing.contents(), capturing.changed_classes(), random_state)
            stream = capturing.dump(capturing.prune(body))
        if anchors.shares_arrays or not capturing.shared():
            return capturing, stream
        anchors.shares_arrays = True


def split(skeleton: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header of a skeleton and the pickle stream after it."""
    view = memoryview(skeleton)
    start = len(MAGIC) + _LENGTH.size
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise StateError(
            f"This version of Rearview cannot read the state: it begins with {bytes(view[:8])!r}. "
            "Use the version that recorded the run.",
            slug="state-format",
        )
    (length,) = _LENGTH.unpack(view[len(MAGIC) : start])
    header = _HeaderUnpickler(io.BytesIO(view[start : start + length])).load()
    return header, view[start + length :]


class _HeaderUnpickler(pickle.Unpickler):
    """Reads a header: only numbers, texts, bytes, lists, tuples and dicts."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Refuse every name: a header has none, so this one may be an attack."""
        raise StateError(
            f"The header of this state names {module}.{name}. Rearview never writes such a name: the "
            "state is damaged, or made to run code. Nothing was run. Do not trust this store.",
            slug="state-format",
        )
