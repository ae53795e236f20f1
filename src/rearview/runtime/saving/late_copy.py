"""Copy memory while training goes on, where training is known to leave it alone at first.

Copy memory on several cores while training waits: one core alone does not fill the bus.

Copy memory while training goes on, where training is known to leave it alone at first.

Between a boundary and the next step of the optimizer, weights and moments are only read, which mostly
takes longer than copying them. So their pages are watched, training goes on, and a thread copies
them. What was not written until it was copied is what training left; else the copy is thrown away.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rearview.runtime.saving.dirty_pages import Pages, PageWatch
from rearview.store.machine import cores

PIECE = 4 << 20
"""Bytes that a thread takes at a time: whoever is late is waited for no longer than that takes."""
ALONE = 16 << 20
"""Fewer bytes than this are copied sooner than a thread starts."""
MOST = 4
"""Threads at most; memory is no faster with more."""


class CopyRange(NamedTuple):
    """Memory to be copied, by addresses."""

    to: int
    source: int
    nbytes: int


def copy(stretches: Sequence[CopyRange]) -> None:
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


def _work(pieces: Iterator[CopyRange]) -> None:
    for to, source, nbytes in pieces:
        ctypes.memmove(to, source, nbytes)  # which releases the interpreter lock


def _cut(stretches: Sequence[CopyRange]) -> Iterator[CopyRange]:
    """Return pieces for any number of threads to draw from: a list's iterator is safe for that."""
    return iter(
        [
            CopyRange(to + at, source + at, min(PIECE, nbytes - at))
            for to, source, nbytes in stretches
            for at in range(0, nbytes, PIECE)
        ]
    )


ENOUGH = 128 << 20
"""Bytes from which on it is worth the watching; fewer are copied in a few milliseconds."""
BATCH = 64 << 20
"""Bytes after which pages that were copied are no longer watched."""
LONGER = 3.0
"""How much longer one thread takes, beside training, than several for which training waits."""
OVERTAKEN = "overtaken: the program changed its state while that was being copied"


class OvertakenError(Exception):
    """The program wrote into memory before it was copied."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Whole pages to be copied, and the watch over them."""

    stretch: CopyRange
    watch: PageWatch


class LateCopy:
    """Copies under way beside training.

    While they are `held`, all pages stay watched, because somebody will ask about them again; else
    they are let go as they are copied: the first write to a watched page costs more than its copy.
    """

    def __init__(self, pages: Pages, copies: Mapping[str, Copy], *, held: bool) -> None:
        self.copies = copies
        self.torn: set[str] = set()
        """Buffers that were written too early; known once it is `over`."""
        self.cpu = 0.0
        """Processor seconds that it took."""
        self._pages = pages
        self._held = held
        self._lock = threading.Lock()
        self._copied: list[PageWatch] = []
        """What is copied and still watched."""
        self._over = threading.Event()

    def begin(self) -> LateCopy:
        """Copy on a thread of its own. It does not stand back: a late copy is worth nothing."""
        thread = threading.Thread(target=self._run, name="rearview-copy", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending, or there are no more threads to have
            self._run()
        return self

    @property
    def over(self) -> bool:
        """Say whether all is copied, or was found to be written."""
        return self._over.is_set()

    @property
    def held(self) -> bool:
        """Say whether pages stay watched after they are copied."""
        return self._held

    def wait(self) -> None:
        """Wait for that."""
        self._over.wait()

    def let_go(self) -> list[PageWatch]:
        """Hold the watches no longer; return those that the caller has to end."""
        with self._lock:
            self._held, left, self._copied = False, self._copied, []
        return left

    def _run(self) -> None:
        try:
            for batch in _batches(self.copies):
                for key, copy in batch.items():
                    if not read(copy.stretch) or not self._pages.intact(copy.watch):
                        self.torn.add(key)
                with self._lock:
                    self._copied += [copy.watch for copy in batch.values()]
                    if not self._held:
                        self._pages.lift(*self._copied)
                        self._copied = []
        except BaseException:
            self.torn.update(self.copies)
            raise
        finally:
            self.cpu = time.thread_time()
            self._over.set()


def _batches(copies: Mapping[str, Copy]) -> Iterator[dict[str, Copy]]:
    batch: dict[str, Copy] = {}
    for key, copy in copies.items():
        batch[key] = copy
        if sum(each.stretch.nbytes for each in batch.values()) >= BATCH:
            yield batch
            batch = {}
    if batch:
        yield batch


def around(stretch: CopyRange, late: Copy | None) -> Iterator[CopyRange]:
    """Return what of a stretch training waits for: all of it, or what lies around the late copy."""
    if late is None:
        yield stretch
        return
    to, source, nbytes = stretch
    before, after = late.watch.low - source, late.watch.high - source
    yield CopyRange(to, source, before)
    yield CopyRange(to + after, source + after, nbytes - after)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read(stretch: CopyRange) -> bool:
    """Copy memory that may be gone: the answer is no then, where a plain copy would end the process."""
    at = 0
    while at < stretch.nbytes:
        left = min(BATCH, stretch.nbytes - at)
        got = _fetch(stretch.to + at, left, [_Vector(stretch.source + at, left)])
        if got <= 0:
            return False
        at += got
    return True


def taste(address: int, places: Sequence[int], nbytes: int) -> bytes:
    """Return some bytes from each of these places behind `address`; none if the memory is gone."""
    into = ctypes.create_string_buffer(len(places) * nbytes)
    wanted = [_Vector(address + place, nbytes) for place in places]
    return into.raw if _fetch(ctypes.addressof(into), len(into), wanted) == len(into) else b""


def _fetch(to: int, nbytes: int, source: Sequence[_Vector]) -> int:
    """Return how many bytes the system could read of this process's own memory."""
    ask = _ask()
    if ask is None:
        return -1
    into, many = _Vector(to, nbytes), (_Vector * len(source))(*source)
    return int(ask(os.getpid(), ctypes.byref(into), 1, many, len(source), 0))


@functools.cache
def _ask() -> Any:
    """Return the system's way to read the memory of a process; None: it has none."""
    ask = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if ask is not None:
        ask.restype = ctypes.c_ssize_t
        vectors = (ctypes.POINTER(_Vector), ctypes.c_ulong)
        ask.argtypes = (ctypes.c_int, *vectors, *vectors, ctypes.c_ulong)
    return ask


class Patience:
    """Which buffers training was seen to leave alone for as long as a late copy takes.

    It is a guess that costs a checkpoint if it is wrong, so a buffer that was once found written
    is not trusted again.
    """

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def trusts(self, key: str) -> bool:
        """Say whether to copy it late."""
        return self._known.get(key, False)

    def knows(self, key: str) -> bool:
        """Say whether it was looked at before."""
        return key in self._known

    def learn(self, key: str, *, patient: bool) -> None:
        """Take note of whether it was left alone."""
        self._known[key] = patient and self._known.get(key, True)
