"""Short texts for people: what an object in a state is, and where memory differs."""

from __future__ import annotations

from typing import Any

from rearview.runtime.state.anchors import Anchors, tidy
from rearview.runtime.state.tree import Node, Piece, Ref, Span

_WIDTH = 80


def short(value: Any, anchors: Anchors | None = None) -> str:
    """Return a value in at most a line.

    >>> short([1, 2.5, "three"])
    "[1, 2.5, 'three']"
    """
    text = _text(value, anchors, 0)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _text(value: Any, anchors: Anchors | None, depth: int) -> str:
    if isinstance(value, Ref):
        return f"the object at {anchors.path(value.number)}" if anchors else "an older object"
    if isinstance(value, Piece):
        return f"{value.block.nbytes} bytes"
    if isinstance(value, type):
        return str(getattr(value, "label", "") or value.__qualname__)
    if isinstance(value, Node):
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
    """Return a text by which elements of a set, which have no order, can be put into one."""
    if isinstance(value, Ref):
        return f"anchor {value.number:09}"
    if isinstance(value, Node):
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
    """Return how two pieces of memory differ, or None when they are equal byte for byte.

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
