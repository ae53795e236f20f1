"""Capture the state of the live objects at a boundary: a skeleton and buffers.

The skeleton holds everything small as a pickle in which anchors are referred to by number; the
buffers are views of large memory, which is not copied here.
"""

from __future__ import annotations

import functools
import gc
import io
import pickle
import struct
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rearview.errors import StateError
from rearview.model import MissingPart
from rearview.state.anchors import Anchors, find_path
from rearview.state.codecs.containers import set_recipe
from rearview.state.codecs.python_objects import CellKind
from rearview.state.codecs.rng import read_global
from rearview.state.codecs.tensors import PlainReader, plain_access, plain_reader
from rearview.state.kinds import Kind
from rearview.state.memory import SMALL, Blocks, extent
from rearview.state.object_ids import Marked, marked, numbers_in
from rearview.state.pickling import Unpicklable, reducer_for
from rearview.state.rebuild import BUILDERS

_SET = b"\x8f\x94("
"""Opcodes at the start of a pickled set that is not empty."""
_BUILDER_IDS = [id(builder) for builder in BUILDERS.values()]
_MARGIN = 25
"""Additional levels at which a value must be picklable, because it is part of a larger one."""
PLAIN: Any = object()
"""Marks a type that the C pickler handles without help."""


class StatePickler(pickle.Pickler):
    """Pickles objects created after the walk; anchors and builders become memo references.

    The memo is filled beforehand, so that a reference to an anchor needs no Python call, and
    neither do the numbers and strings in a long list.
    """

    def __init__(self, out: io.BytesIO, capturing: Capture) -> None:
        super().__init__(out, protocol=5, buffer_callback=capturing.take_buffer)
        self.capturing = capturing
        self.reducers = capturing.anchors.reducers

    def reducer_override(self, obj: Any) -> Any:
        """Return how to rebuild an object that plain pickling would get wrong."""
        t = type(obj)
        how = self.reducers.get(t)
        if how is None:
            how = reducer_for(obj, self.capturing) or PLAIN
            self.reducers[t] = how
        if how is PLAIN:
            return NotImplemented
        return how(obj, self.capturing)


class Capture:
    """One capture under way: the memory met so far, and what could not be captured."""

    def __init__(
        self, anchors: Anchors, roots: Mapping[str, object], *, careful: bool = False
    ) -> None:
        self.anchors = anchors
        self.careful = careful
        """Whether small arrays are checked for shared memory."""
        self.loose: dict[int, Any] = {}
        """Small arrays that are assumed not to share their memory."""
        self.found: dict[int, Any] = {}
        """Anchors that are known by address only, as they are met."""
        self.viewed: set[int] = set()
        """`id` of arrays that have views."""
        self.roots = roots
        self.blocks = Blocks(anchors.block_keys)
        self.missing: list[MissingPart] = []
        self.lost: dict[int, Any] = {}
        self.oob: list[str] = []
        self.cells: list[types.CellType] = []
        """Closure variables that were met and are not pickled yet."""
        self.running: set[int] = set()
        """`id` of closure variables of functions on the stack."""
        self._locals: dict[str, list[tuple[str, Any]]] | None = None
        self.alive: list[Any] = anchors.alive()
        self._all_alive = len(anchors.index) == len(self.alive)
        self.stand_ins: list[object] = []

    @functools.cached_property
    def plain_tensor(self) -> PlainReader:
        """The reader of plain tensors."""
        return plain_reader(self.blocks)

    def miss(self, obj: object, reason: str) -> None:
        """Report that `obj` cannot be captured: the capture is partial."""
        if id(obj) not in self.lost:
            self.lost[id(obj)] = obj
            self.missing.append(MissingPart(self.path(obj), reason))

    def is_running(self, function: str, name: str, cell: types.CellType) -> bool:
        """Return True if the closure variable `name` of `function` belongs to a function on the stack.

        Python does not tell. A variable of an earlier call that refers to the same object counts
        too, which is the safe side.
        """
        if self._locals is None:
            self._locals = {}
            for key, value in self.roots.items():
                if key.startswith("local:"):
                    place, _, variable = key.rpartition(":")
                    self._locals.setdefault(variable, []).append((place.split(":")[-1], value))
        values = CellKind.values(cell)
        return any(
            function.startswith(f"{owner}.<locals>.") and values and values[0] is value
            for owner, value in self._locals.get(name, ())
        )

    def path(self, obj: object) -> str:
        """Return the path to an object, anchor or not, or its type if there is none."""
        number = self.anchors.index.get(id(obj))
        if number is not None:
            return self.anchors.path(number)
        return find_path(self.anchors, self.roots, obj) or f"a {type(obj).__name__}"

    def take_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Return True if a buffer from an object's own pickling stays in the skeleton."""
        raw = buffer.raw()
        if raw.nbytes <= SMALL:
            return True
        self.oob.append(self.blocks.add_bytes(raw))
        return False

    def contents(self) -> list[tuple[str, list[int], list[Any]]]:
        """Return the shallow contents of all live anchors, grouped by kind."""
        alive = self.alive
        found = []
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
                found.append((kind.name, numbers, content))
        return found

    def _one_by_one(
        self, kind: Kind, numbers: list[int], objs: list[Any]
    ) -> tuple[list[int], list[Any]]:
        """Read the objects of a group one by one, reporting those that fail."""
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
        """Return the body without the parts that cannot be pickled; report each of them."""
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
        now = list(map(type, self.alive))
        if now == self.anchors.types:
            return []
        pairs = enumerate(zip(now, self.anchors.types, strict=True))
        differ = [number for number, (found, then) in pairs if found is not then]
        return [(number, now[number]) for number in differ if self.alive[number] is not None]

    def again(self) -> Capture:
        """Return a new capture that remembers what was missing."""
        fresh = Capture(self.anchors, self.roots, careful=True)
        fresh.missing, fresh.lost = self.missing, self.lost
        return fresh

    def release(self) -> None:
        """Drop references to the program's objects now, not at the next collection."""
        self.alive, self.roots, self.stand_ins, self._locals = [], {}, [], None
        for held in (self.loose, self.found, self.lost):
            held.clear()

    def shared(self) -> bool:
        """Return True if an array that was assumed not to share its memory does."""
        if not self.loose:
            return False
        if not self.loose.keys().isdisjoint(self.viewed):
            return True
        sizes = {nbytes for _, nbytes in self.blocks.index}
        return any(
            extent(array)[:2] in self.blocks.index
            for array in self.loose.values()
            if array.nbytes in sizes
        )

    def dump(self, body: object) -> tuple[bytes, bytes]:
        """Return the pickle of `body`, and the pickles of what was met on the way, ended by None."""
        out = io.BytesIO()
        pickler = StatePickler(out, self)
        pickler.memo = self._memo()
        pickler.dump(body)
        kept: set[int] = set()
        while True:
            cells, self.cells = self.cells, []
            arrays_met = {n: a for n, a in self.found.items() if n not in kept}
            if not cells and not arrays_met:
                break
            kept.update(arrays_met)
            pickler.dump(("cells", [(cell, CellKind.values(cell)) for cell in cells]))
            pickler.dump(("contents", self._late_contents(arrays_met)))
        # searching the memo takes time: first see whether there is anything to search for
        stream = out.getvalue()
        # write the rest to the emptied buffer: appending to a stream in use would copy it
        out.seek(0)
        out.truncate()
        numbers = numbers_in(stream)
        found = marked(pickler.memo.copy(), numbers, self) if numbers else []
        if found:
            pickler.dump(("addresses", found))
        sets = self._reordered(pickler, found) if _SET in stream else []
        if sets:
            pickler.dump(("sets", sets))
        pickler.dump(None)
        pickler.clear_memo()
        return stream, out.getvalue()

    def _late_contents(self, found: dict[int, Any]) -> list[tuple[str, list[int], list[Any]]]:
        numbers, objs = list(found), list(found.values())
        self.anchors.index.update({id(obj): number for number, obj in found.items()})
        content = self.anchors.kinds[numbers[0]].read(objs, self) if objs else None
        return [("array", numbers, content)] if content else []

    def _reordered(self, pickler: StatePickler, marked: Marked) -> list[tuple[Any, Any]]:
        """Return sets created after the walk that would be restored in another order, with a recipe."""
        found = []
        unordered = {id(obj) for obj, _ in marked}
        for _, obj in pickler.memo.copy().values():
            if type(obj) is not set or len(obj) < 2 or id(obj) in unordered:
                continue
            if id(obj) not in self.anchors.index:
                recipe = set_recipe(obj, list(obj), self)
                if recipe != list(obj):
                    found.append((obj, recipe))
        return found

    def _memo(self) -> dict[int, tuple[int, Any]]:
        known = [*BUILDERS.values(), *self.alive]
        ids = [*_BUILDER_IDS, *self.anchors.ids]
        if not self._all_alive:
            for place, obj in enumerate(known):
                if obj is None:
                    # its number must not be given to another object
                    known[place] = types.SimpleNamespace()
                    self.stand_ins.append(known[place])
                    ids[place] = id(known[place])
        return dict(zip(ids, enumerate(known), strict=True))


MAGIC = b"RVSTATE1"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Captured:
    """State at a boundary: everything small in `skeleton`, large memory in `buffers`.

    The buffers are views of live memory: copy them before the program continues.
    """

    skeleton: bytes
    buffers: dict[str, Any]
    missing: list[MissingPart]
    """What could not be captured; empty if the capture is complete."""
    likely_unchanged: Collection[str] = ()
    """Keys of buffers that are not likely to change."""
    owners: Sequence[Any] = ()
    """Owners of the memory below the buffers: kept alive as long as this."""


def capture(anchors: Anchors, roots: Mapping[str, object], *, rng: bool = True) -> Captured:
    """Return the state reachable from the anchors and the names in `roots`.

    `roots` holds the names that are bound now; other names will be unbound after a restore. Nothing
    in the program changes. An object that cannot be captured is listed in `missing`; the others are
    captured.
    """
    collecting = gc.isenabled()
    # thousands of short-lived tuples would start collections of the whole program; all of them are
    # freed before it continues
    gc.disable()
    try:
        with plain_access():
            return _capture(anchors, roots, rng=rng)
    finally:
        if collecting:
            gc.enable()


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
            "outside": capturing.oob,
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
    state = read_global() if rng else None
    while True:
        capturing = Capture(anchors, roots, careful=anchors.shares_arrays)
        body = (dict(roots), capturing.contents(), capturing.changed_classes(), state)
        try:
            stream = capturing.dump(body)
        except Exception:
            capturing = capturing.again()
            body = (dict(roots), capturing.contents(), capturing.changed_classes(), state)
            stream = capturing.dump(capturing.prune(body))
        if anchors.shares_arrays or not capturing.shared():
            return capturing, stream
        anchors.shares_arrays = True


def split(skeleton: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header of a skeleton and the stream behind it."""
    view = memoryview(skeleton)
    start = len(MAGIC) + _LENGTH.size
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise StateError(
            f"These bytes are not a state this Rearview can read (they begin with "
            f"{bytes(view[:8])!r}). Use the version that recorded the run.",
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
            f"The head of this state names {module}.{name}, which no Rearview writes: it is damaged, "
            "or made to run something. Nothing was run. Do not trust this store.",
            slug="state-format",
        )
