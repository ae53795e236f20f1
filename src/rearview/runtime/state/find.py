"""The way to an object that is not an anchor, looked up only when something has to be said of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from rearview.runtime.state.anchors import Anchors, inside, spell, tidy
from rearview.runtime.state.classify import THROUGH, VALUE
from rearview.runtime.state.kinds import Step

_LIMIT = 100_000


def find_path(anchors: Anchors, roots: Mapping[str, object], wanted: object) -> str | None:
    """Return how a person would spell the way to `wanted`, or None when it is too far away."""
    anchors.look.recorded = None
    queue: deque[tuple[Any, str]] = deque()
    seen: set[int] = set()
    for name, value in roots.items():
        queue.append((value, spell("", name)))
    while queue and len(seen) < _LIMIT:
        obj, path = queue.popleft()
        if obj is wanted:
            return tidy(path)
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        for step in _children(anchors, obj):
            queue.append((step.child, path + spell(step.style, _key(anchors, step))))
    return None


def _children(anchors: Anchors, obj: Any) -> Iterable[Step]:
    kind = anchors.kind(obj)
    if kind is VALUE:
        return []
    try:
        if kind is THROUGH:
            return list(inside(obj, anchors.look))
        return list(kind.children(obj, anchors.look))
    except Exception:
        return []


def _key(anchors: Anchors, step: Step) -> object:
    key = step.key
    if key is None or isinstance(key, (str, int, float, bytes)):
        return key
    number = anchors.index.get(id(key))
    return type(key).__name__ if number is None else anchors.path(number)
