"""Copy memory on several cores while training waits: one core alone does not fill the bus."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rearview.store.hardware import cores

PIECE = 4 << 20
"""Bytes that a thread takes at a time: whoever is late is waited for no longer than that takes."""
ALONE = 16 << 20
"""Fewer bytes than this are copied sooner than a thread starts."""
MOST = 4
"""Threads at most; memory is no faster with more."""


class Stretch(NamedTuple):
    """Memory to be copied, by addresses."""

    to: int
    source: int
    nbytes: int


def copy(stretches: Sequence[Stretch]) -> None:
    """Copy all of them; the caller keeps the memory alive."""
    pieces = _cut(stretches)
    helpers = []
    if sum(each.nbytes for each in stretches) >= ALONE:
        for _ in range(min(MOST, cores()) - 1):
            helper = threading.Thread(
                target=_work, args=(pieces,), name="rearview-copy", daemon=True
            )
            try:
                helper.start()
            except RuntimeError:  # the interpreter is ending, or there are no more threads to have
                break
            helpers.append(helper)
    try:
        _work(pieces)
    finally:
        for _ in pieces:
            pass  # interrupted by Ctrl-C: what is left may be freed as soon as training goes on
        for helper in helpers:
            helper.join()


def _work(pieces: Iterator[Stretch]) -> None:
    for to, source, nbytes in pieces:
        ctypes.memmove(to, source, nbytes)  # which releases the interpreter lock


def _cut(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """Return pieces for any number of threads to draw from: a list's iterator is safe for that."""
    return iter(
        [
            Stretch(to + at, source + at, min(PIECE, nbytes - at))
            for to, source, nbytes in stretches
            for at in range(0, nbytes, PIECE)
        ]
    )
