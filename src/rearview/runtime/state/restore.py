"""Restore: recorded state written into the live objects, in place."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rearview.errors import StateError
from rearview.runtime.state import iterators, loaders
from rearview.runtime.state.addresses import put
from rearview.runtime.state.anchors import Anchors
from rearview.runtime.state.blocks import Block, Memory
from rearview.runtime.state.builders import NAMES, prelude
from rearview.runtime.state.capture import split
from rearview.runtime.state.randomness import write_global
from rearview.runtime.state.sets import fill_set
from rearview.runtime.state.tensors import plain_access
from rearview.runtime.state.writing import Writing

Parts = tuple[Callable[[str], Any], Callable[[str, Any], None] | None]


class StateUnpickler(pickle.Unpickler):
    """Reads a skeleton's stream; numbers below `len(NAMES)` are builders, the rest anchors."""

    def __init__(self, stream: io.BytesIO, objects: Sequence[Any], buffers: Iterator[Any]) -> None:
        super().__init__(stream, buffers=buffers)
        self._objects: Sequence[Any] = objects

    def forget(self) -> None:
        """Let go of everything: newer Pythons keep an unpickler until the next collection."""
        self._objects = ()
        self.memo.clear()

    def persistent_load(self, pid: Any) -> Any:
        """Return a builder or a live anchor."""
        return self._objects[pid]


def restore(
    anchors: Anchors,
    roots: Mapping[str, object],
    skeleton: bytes,
    buffers: Callable[[str], Any],
    into: Callable[[str, Any], None] | None = None,
) -> dict[str, object]:
    """Write the state into the live anchors and return the values of the roots, by name.

    `roots` are the names as they are bound now, those of the walk. `buffers` returns the bytes of a
    part; `into`, where given, reads them straight into memory.

    Names that were unbound at capture are absent. After a StateError the live objects are neither
    here nor there: start the program again.
    """
    header, stream = split(skeleton)
    if header["anchors"] != len(anchors):
        raise StateError(
            f"The checkpoint was taken over {header['anchors']} objects and {len(anchors)} exist "
            "now: set-up came out differently. Replay from the start instead.",
            slug="state-anchors",
        )
    with plain_access():
        return _restore(anchors, roots, header, stream, (buffers, into))


def _restore(
    anchors: Anchors,
    roots: Mapping[str, object],
    header: dict[str, Any],
    stream: memoryview,
    parts: Parts,
) -> dict[str, object]:
    values, first = _pass(anchors, roots, header, stream, parts)
    if not first.generators and not first.loaders:
        return values
    # To bring them to their places runs the program's code, so everything is written once more.
    for obj, state, _ in first.generators:
        iterators.drive(obj, state, getattr(obj, "__qualname__", "?"))
    for obj, drawn in first.loaders:
        loaders.draw(obj, drawn)
    values, second = _pass(anchors, roots, header, stream, parts, first)
    for (old, _), (new, drawn) in zip(first.loaders, second.loaders, strict=True):
        loaders.carry_over(old, new, drawn)
    for obj, state, held in second.generators:
        if state[0] == "suspended":
            iterators.give_locals(obj, held)
    return values


def _pass(
    anchors: Anchors,
    roots: Mapping[str, object],
    header: dict[str, Any],
    stream: memoryview,
    parts: Parts,
    before: Writing | None = None,
) -> tuple[dict[str, object], Writing]:
    """Read and write everything once."""
    alive = anchors.alive(roots)
    table = [Block(*row) for row in header["blocks"]]
    buffers, into = parts
    memory = Memory(table, buffers, lambda number: alive[number], anchors.path, into)
    writing = Writing(anchors, alive, memory)
    if before is not None:
        writing.driven = list(before.made)
    memory.claim()
    try:
        values, contents, classes, rng, cells = _read(header, stream, alive, writing, buffers)
    except StateError:
        raise
    except Exception as exc:
        raise StateError(
            f"The state cannot be read back ({type(exc).__name__}: {exc}). "
            "Replay from an earlier checkpoint.",
            slug="state-read",
        ) from exc
    for number, cls in classes:
        object.__setattr__(alive[number], "__class__", cls)
    _keep_texts(alive, contents, writing.addressed)
    _write(anchors, alive, contents, writing)
    for cell, held in cells:
        if held:
            cell.cell_contents = held[0]
    for action in writing.afterwards:
        action()
    if rng is not None:
        write_global(rng)
    alive.clear()
    return dict(values), writing


def _read(
    header: dict[str, Any],
    stream: memoryview,
    alive: Sequence[Any],
    writing: Writing,
    buffers: Callable[[str], Any],
) -> tuple[Any, ...]:
    builders = [getattr(writing, f"build_{name}") for name in NAMES]
    outside = (bytearray(buffers(key)) for key in header["outside"])
    objects = [*builders, *alive]
    data = io.BytesIO(prelude(len(objects)) + bytes(stream))
    unpickler = StateUnpickler(data, objects, outside)
    body = unpickler.load()
    values, contents, classes, rng = body
    cells: list[Any] = []
    sets: list[Any] = []
    addresses: list[Any] = []
    late = {"cells": cells, "contents": contents, "sets": sets, "addresses": addresses}
    while (batch := unpickler.load()) is not None:
        late[batch[0]].extend(batch[1])
    for live, content in addresses:
        if not put(live, content):
            writing.build_fill(live, content)
    for live, recipe in sets:
        fill_set(live, recipe)
    unpickler.forget()
    objects.clear()
    return values, contents, classes, rng, cells


def _keep_texts(
    alive: Sequence[Any], contents: Sequence[Any], addressed: Mapping[int, Any]
) -> None:
    """Exchange recorded texts for the live ones that they equal, wherever they are held.

    Those `addressed` stay: their `id` is kept somewhere.

    Pickle stores a text once for all who hold the same one. A name that the program holds as a key
    and in a list would be two texts after a restore, since live keys stay, and a file that the
    program pickles would have other bytes than without a stop.
    """
    kept: dict[int, str] = {}
    held_by = []
    for _, numbers, group in contents:
        for place, (number, content) in enumerate(zip(numbers, group, strict=True)):
            live = alive[number]
            if type(content) is list and type(live) is list:
                pairs: Iterable[tuple[Any, Any]] = zip(content, live, strict=False)
            elif type(content) is dict and all(type(key) is str for key in content):
                held = live if isinstance(live, dict) else getattr(live, "__dict__", None)
                if not isinstance(held, dict):
                    continue
                pairs = [
                    *zip(content, held, strict=False),
                    *((new, dict.get(held, key)) for key, new in content.items()),
                ]
            else:
                continue
            held_by.append((group, place))
            for new, old in pairs:
                if type(new) is str and type(old) is str and new is not old and new == old:
                    kept.setdefault(id(new), old)
    for number in addressed:
        kept.pop(number, None)
    for group, place in held_by if kept else ():
        content = group[place]
        if type(content) is list:
            content[:] = [kept.get(id(item), item) for item in content]
        else:
            group[place] = {
                kept.get(id(key), key): kept.get(id(item), item) for key, item in content.items()
            }


def _write(
    anchors: Anchors, alive: Sequence[Any], contents: Sequence[Any], writing: Writing
) -> None:
    for late in (False, True):
        for _, numbers, group in contents:
            for number, content in zip(numbers, group, strict=True):
                obj, kind = alive[number], anchors.kinds[number]
                if kind.late is not late or obj is None:
                    continue
                try:
                    kind.write(obj, content, writing)
                except StateError:
                    raise
                except Exception as exc:
                    raise StateError(
                        f"{anchors.path(number)} cannot be given its recorded state "
                        f"({type(exc).__name__}: {exc}). Replay from the start of the loop.",
                        slug="state-write",
                    ) from exc
