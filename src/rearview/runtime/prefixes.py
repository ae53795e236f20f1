"""Points as records spell them, without building each."""

from __future__ import annotations

import threading

from rearview.model import Point, Step
from rearview.runtime.session import Session
from rearview.store.records import encode_point


class Prefixes:
    """What records at the points of one run begin with."""

    def __init__(self) -> None:
        self._heads: dict[tuple[str, ...], bytes] = {(): encode_point(Point())}

    def of(self, session: Session) -> bytes:
        """Return the current point as records spell it; the common case without building it."""
        stack = session.stack
        if session.loose or session.cell or threading.get_ident() != session.thread:
            return encode_point(session.point())
        indices = [entry.now for entry in stack]
        for entry, index in zip(stack, indices, strict=True):
            if entry.label(index) is not None:
                return encode_point(session.point())
        names = tuple([entry.habit.site.name for entry in stack])
        head = self._heads.get(names)
        if head is None:
            zeros = encode_point(Point(tuple(Step(name, 0) for name in names)))
            head = self._heads[names] = zeros[: zeros.rfind(b"[") + 1]
        if not indices:
            return head
        return b"%b%b]," % (head, ",".join(map(str, indices)).encode())
