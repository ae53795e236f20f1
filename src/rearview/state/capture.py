"""Capture the live objects of a program between two iterations: `capture` returns a skeleton and buffers.

The *skeleton* is a pickle of the state without large memory. It refers to *anchors* (objects that existed when
the loop was entered, see `object_numbers`) by number, and contains objects that the loop created. A *buffer* is a view of
the memory of one large array or tensor; the writer copies buffers later (`runtime/saving`).
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
from rearview.state.codecs.instances_and_functions import CellKind
from rearview.state.codecs.rng import read_global
from rearview.state.codecs.tensors import PlainReader, plain_access, plain_reader
from rearview.state.memory_blocks import SMALL, Blocks, GcPaused, extent
from rearview.state.object_numbers import Anchors, find_path
from rearview.state.reducers import Unpicklable, reducer_for
from rearview.state.stored_id_numbers import MarkedContents, contents_with_ids, possible_ids

_SET_OPCODES = b"\x8f\x94("
"""Opcodes at the start of a pickled set that has elements."""
_BUILDER_IDS = [id(builder) for builder in BUILDERS.values()]
_NESTING_MARGIN = 25
"""Levels of nesting that `_can_dump` adds to a value for its test, because the value is nested deeper in the state."""
PLAIN: Any = object()
"""Entry in `reducers` for a type whose objects the C pickler stores correctly without a reducer."""


class StatePickler(pickle.Pickler):
    """Pickles objects that the loop created; anchors and builders (`codecs.base`) become references by number.

    The pickler's memo is filled with anchors and builders before pickling, so that a reference needs no Python call.
    """

    def __init__(self, out: io.BytesIO, capturing: Capture) -> None:
        super().__init__(out, protocol=5, buffer_callback=capturing.take_buffer)
        self.capturing = capturing
        self.reducers = capturing.anchors.reducers

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild `obj`, as `__reduce_ex__` does; NotImplemented if plain pickling is correct."""
        t = type(obj)
        reducer = self.reducers.get(t)
        if reducer is None:
            reducer = reducer_for(obj, self.capturing) or PLAIN
            self.reducers[t] = reducer
        if reducer is PLAIN:
            return NotImplemented
        return reducer(obj, self.capturing)


class Capture:
    """One running capture: the anchors, the memory blocks that it has read, and the parts that it could not capture."""

    def __init__(
        self, anchors: Anchors, roots: Mapping[str, object], *, check_sharing: bool = False
    ) -> None:
        self.anchors = anchors
        self.check_sharing = check_sharing
        """Whether the capture looks up the memory of each small array among the memory of all other arrays."""
        self.presumed_unshared: dict[int, Any] = {}
        """`id` -> small array that is assumed to share no memory; `has_shared_small_arrays` checks the assumption."""
        self.captured_by_address: dict[int, Any] = {}
        """Anchor number -> array of `Anchors.by_address` to which this capture has pickled a reference."""
        self.ids_with_views: set[int] = set()
        """`id` of each array whose memory another array views."""
        self.roots = roots
        self.blocks = Blocks(anchors.block_keys)
        self.missing: list[MissingPart] = []
        self.reported_objects: dict[int, Any] = {}
        """`id` -> object that is listed in `missing`."""
        self.out_of_band: list[str] = []
        """Keys of the large buffers that pickling methods of classes passed to pickle, in order."""
        self.cells: list[types.CellType] = []
        """Closure variables whose values are still to be pickled."""
        self.running_cells: set[int] = set()
        """`id` of each closure variable of a function on the stack."""
        self._locals: dict[str, list[tuple[str, Any]]] | None = None
        self.alive: list[Any] = anchors.alive()
        self._all_alive = len(anchors.index) == len(self.alive)
        self.placeholders: list[object] = []
        """Objects in the pickler's memo that take the places of anchors that no longer exist."""

    @functools.cached_property
    def plain_tensor(self) -> PlainReader:
        """The function that `plain_reader` returns: it reads plain tensors fast."""
        return plain_reader(self.blocks)

    def report_missing(self, obj: object, reason: str) -> None:
        """Add `obj` to `missing`, with the reason why it cannot be captured."""
        if id(obj) not in self.reported_objects:
            self.reported_objects[id(obj)] = obj
            self.missing.append(MissingPart(self.path(obj), reason))

    def belongs_to_running_function(self, function: str, name: str, cell: types.CellType) -> bool:
        """Return True if `cell`, the closure variable `name` of `function`, may belong to a call that is still running.

        Python does not tell which call a closure variable belongs to. The variable of an earlier call of the
        function counts as well if it refers to the same object: this makes the state partial, but never wrong.
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
        """Return the path to an object, such as `model.layers[2].weight`, or its type if no path is found."""
        number = self.anchors.index.get(id(obj))
        if number is not None:
            return self.anchors.path(number)
        return find_path(self.anchors, self.roots, obj) or f"a {type(obj).__name__}"

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Store a large buffer outside the skeleton and return False; for a small buffer, return True.

        If this function returns True, pickle stores the buffer inside the skeleton.
        """
        raw = buffer.raw()
        if raw.nbytes <= SMALL:
            return True
        self.out_of_band.append(self.blocks.add_bytes(raw))
        return False

    def contents(self) -> list[tuple[str, list[int], list[Any]]]:
        """Return (kind, anchor numbers, contents) for each kind of live anchor.

        The kind is the name of the codec. The content of an anchor, such as the items of a list, refers to other
        objects and does not include the contents of these objects.
        """
        alive = self.alive
        groups = []
        for kind, numbers in self.anchors.numbers_by_kind():
            if not self._all_alive:
                numbers = [number for number in numbers if alive[number] is not None]  # noqa: PLW2901
            objs = [alive[number] for number in numbers]
            if not objs:
                continue
            try:
                content = kind.read(objs, self)
            except Exception:
                numbers, content = self._read_one_by_one(kind, numbers, objs)  # noqa: PLW2901
            if content is not None:
                groups.append((kind.name, numbers, content))
        return groups

    def _read_one_by_one(
        self, kind: Kind, numbers: list[int], objs: list[Any]
    ) -> tuple[list[int], list[Any]]:
        """Return numbers and contents of those anchors that `kind` can read; report each of the others as missing."""
        good: list[int] = []
        contents: list[Any] = []
        for number, obj in zip(numbers, objs, strict=True):
            try:
                contents.extend(kind.read([obj], self) or ())
            except Exception as exc:
                self.report_missing(obj, f"it cannot be read ({type(exc).__name__}: {exc})")
            else:
                good.append(number)
        return good, contents

    def without_unpicklable(self, body: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `body` without the contents that cannot be pickled, and report each of these contents as missing.

        `body` is (variables, contents of anchors, changed classes, random state).
        """
        roots, contents, *other_parts = body
        good_roots = {
            name: value if self._can_dump(value) else Unpicklable(value)
            for name, value in roots.items()
        }
        good_contents = []
        for kind, numbers, group in contents:
            good = [i for i, content in enumerate(group) if self._can_dump(content, numbers[i])]
            good_contents.append((kind, [numbers[i] for i in good], [group[i] for i in good]))
        return good_roots, good_contents, *other_parts

    def _can_dump(self, value: Any, number: int | None = None) -> bool:
        pickler = StatePickler(io.BytesIO(), self)
        pickler.memo = self._memo()
        deeper = value
        for _ in range(_NESTING_MARGIN):
            deeper = (deeper,)
        try:
            pickler.dump(deeper)
        except Exception as exc:
            obj = value if number is None else self.alive[number]
            self.report_missing(obj, f"it cannot be pickled ({type(exc).__name__}: {exc})")
            return False
        return True

    def changed_classes(self) -> list[tuple[int, type]]:
        """Return (number, class) of each anchor whose `__class__` was assigned since the loop was entered."""
        classes = list(map(type, self.alive))
        if classes == self.anchors.types:
            return []
        pairs = enumerate(zip(classes, self.anchors.types, strict=True))
        changed = [number for number, (current, recorded) in pairs if current is not recorded]
        return [(number, classes[number]) for number in changed if self.alive[number] is not None]

    def restarted(self) -> Capture:
        """Return a new capture for a second attempt, with the missing parts that this capture has reported."""
        new_capture = Capture(self.anchors, self.roots, check_sharing=True)
        new_capture.missing, new_capture.reported_objects = self.missing, self.reported_objects
        return new_capture

    def release(self) -> None:
        """Drop all references to the program's objects, without waiting for the garbage collector."""
        self.alive, self.roots, self.placeholders, self._locals = [], {}, [], None
        for container in (self.presumed_unshared, self.captured_by_address, self.reported_objects):
            container.clear()

    def has_shared_small_arrays(self) -> bool:
        """Return True if an array of `presumed_unshared` shares its memory with another array."""
        if not self.presumed_unshared:
            return False
        if not self.presumed_unshared.keys().isdisjoint(self.ids_with_views):
            return True
        sizes = {nbytes for _, nbytes in self.blocks.index}
        return any(
            extent(array)[:2] in self.blocks.index
            for array in self.presumed_unshared.values()
            if array.nbytes in sizes
        )

    def dump(self, body: object) -> tuple[bytes, bytes]:
        """Return the pickle of `body`, and the pickles to store after it, which end with a pickle of None.

        The later pickles hold what pickling `body` has found: values of closure variables, contents of arrays, contents
        that contain an `id`, and the order of sets.
        """
        out = io.BytesIO()
        pickler = StatePickler(out, self)
        pickler.memo = self._memo()
        pickler.dump(body)
        dumped: set[int] = set()
        while True:
            cells, self.cells = self.cells, []
            arrays = {n: a for n, a in self.captured_by_address.items() if n not in dumped}
            if not cells and not arrays:
                break
            dumped.update(arrays)
            pickler.dump(("cells", [(cell, CellKind.values(cell)) for cell in cells]))
            pickler.dump(("contents", self._contents_by_address(arrays)))
        # searching the memo is slow: skip the search if the stream holds no number that may be an `id`
        stream = out.getvalue()
        # empty the buffer before the next pickles: appending would copy the buffer, whose memory `stream` uses
        out.seek(0)
        out.truncate()
        numbers = possible_ids(stream)
        with_ids = contents_with_ids(pickler.memo.copy(), numbers, self) if numbers else []
        if with_ids:
            pickler.dump(("addresses", with_ids))
        sets = self._reordered_sets(pickler, with_ids) if _SET_OPCODES in stream else []
        if sets:
            pickler.dump(("sets", sets))
        pickler.dump(None)
        pickler.clear_memo()
        return stream, out.getvalue()

    def _contents_by_address(
        self, arrays: dict[int, Any]
    ) -> list[tuple[str, list[int], list[Any]]]:
        numbers, objs = list(arrays), list(arrays.values())
        self.anchors.index.update({id(obj): number for number, obj in arrays.items()})
        content = self.anchors.kinds[numbers[0]].read(objs, self) if objs else None
        return [("array", numbers, content)] if content else []

    def _reordered_sets(
        self, pickler: StatePickler, with_ids: MarkedContents
    ) -> list[tuple[Any, Any]]:
        """Return (set, recipe) for each set created by the loop whose iteration order a restore would change."""
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
"""First bytes of a skeleton."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured state: `skeleton`, and the views of large memory in `buffers`, by key.

    The buffers are views of live memory: copy their bytes before the program continues.
    """

    skeleton: bytes
    buffers: dict[str, Any]
    missing: list[MissingPart]
    """The parts that could not be captured; empty if the state is complete."""
    likely_unchanged: Collection[str] = ()
    """Keys of buffers that will probably not change, such as frozen weights and data."""
    owners: Sequence[Any] = ()
    """Objects that own the memory of the buffers: this list keeps the objects alive."""


def capture(anchors: Anchors, roots: Mapping[str, object], *, rng: bool = True) -> Captured:
    """Return the state of all objects that the anchors and the variables in `roots` lead to.

    `roots` maps the names of the variables that are bound now to their values; a restore unbinds all other variables.
    The capture changes nothing in the program. An object that cannot be captured is listed in `Captured.missing`. With
    `rng`, the state includes the global random state.
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
    """Return the finished capture and its pickles (see `dump`).

    If pickling fails, or small arrays share memory, the state is captured a second time.
    """
    random_state = read_global() if rng else None
    while True:
        capturing = Capture(anchors, roots, check_sharing=anchors.shares_arrays)
        body = (dict(roots), capturing.contents(), capturing.changed_classes(), random_state)
        try:
            stream = capturing.dump(body)
        except Exception:
            capturing = capturing.restarted()
            body = (dict(roots), capturing.contents(), capturing.changed_classes(), random_state)
            stream = capturing.dump(capturing.without_unpicklable(body))
        if anchors.shares_arrays or not capturing.has_shared_small_arrays():
            return capturing, stream
        anchors.shares_arrays = True


def split(skeleton: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header of a skeleton, and the pickles that follow the header."""
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
    """Reads the header of a skeleton, which consists of numbers, texts, bytes, lists, tuples and dicts."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Raise StateError: a header names no class or function, so this name may be an attack."""
        raise StateError(
            f"The header of this state names {module}.{name}. Rearview never writes such a name: the "
            "state is damaged, or made to run code. Nothing was run. Do not trust this store.",
            slug="state-format",
        )
