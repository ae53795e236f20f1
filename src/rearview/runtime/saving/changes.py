"""Which buffers hold other bytes than when they were last saved.

Compare memory: by samples, by a hash, byte by byte.

Which buffers hold other bytes than when they were last saved.

Three sound tests, cheapest first: the page tables say that nothing was written (`pages`); the
hash of the live buffer equals the hash of the saved bytes; the copy is found to be the saved
object. A buffer whose sampled bytes differ has changed for certain and goes straight to the copy.
Page tables are asked about what stays, or is likely to, and between the end of an inner loop and
the boundary after it, which mostly hold the same.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from rearview.errors import StoreError
from rearview.model import ObjectRef, Part
from rearview.runtime.saving import late_copy
from rearview.runtime.saving.dirty_pages import Pages, PageWatch, address_of
from rearview.runtime.saving.late_copy import (
    ENOUGH,
    LONGER,
    OVERTAKEN,
    Copy,
    CopyRange,
    LateCopy,
    OvertakenError,
    Patience,
    around,
    taste,
)
from rearview.runtime.saving.staging import Staged
from rearview.store.checkpoints.checkpoints import OBJECT_FROM
from rearview.store.checkpoints.manifest import SLICE
from rearview.store.checkpoints.objects import as_bytes
from rearview.store.files import ALIGN

SAMPLES, SAMPLE = 16, 64
"""How many samples of a buffer are compared, and how many bytes each has."""


def sample(view: memoryview) -> bytes:
    """Return some of the bytes: if these differ, so do the buffers."""
    return b"".join(view[at : at + SAMPLE] for at in places(len(view)))


def places(nbytes: int) -> range:
    """Return where samples of so many bytes are taken."""
    step = nbytes // SAMPLES
    return range(0, step * SAMPLES, step)


def digest(view: memoryview) -> bytes:
    """Return a hash of all bytes, at the speed of memory."""
    return xxhash.xxh3_128_digest(view)


def equal(one: memoryview, other: memoryview) -> bool:
    """Say whether two buffers hold the same, without the interpreter lock."""
    if len(one) != len(other) or sample(one) != sample(other):
        return False
    return not _memcmp()(
        ctypes.c_void_p(address_of(one)),
        ctypes.c_void_p(address_of(other)),
        ctypes.c_size_t(len(one)),
    )


@functools.cache
def _memcmp() -> Any:
    return ctypes.CDLL(None).memcmp


TINY = 4096
"""Buffers below this are gathered in one go; looking at each costs more than its bytes."""
SMALL = 1 << 16
"""Buffers below this are always copied: no test of the live bytes is cheaper."""
MOST_PACKS = 8
"""Old packs that one checkpoint may lean on; beyond that small parts are written again."""
LARGE = 1 << 20
"""Buffers from here on are copied by several threads."""
SELDOM = 2
"""After so many changes in a row nobody expects a buffer to stay, and it is not hashed."""


@dataclass(frozen=True, slots=True)
class CopyHints:
    """What is to be expected of buffers after they were copied."""

    soon: bool = False
    """Nearly the same state will be looked at again before `settle`."""
    still: Collection[str] = ()
    """Keys of those that are not likely to change at all."""
    roomy: bool = True
    """A core is free to copy beside training, which then need not wait for that."""


UNKNOWN = CopyHints()


@dataclass(slots=True)
class _Seen:
    """What is known of one buffer as last saved."""

    ref: ObjectRef
    sample: bytes
    hash: bytes | None
    """Of all bytes; None while it changes at every save, when nobody would look at it."""
    changes: int = 0
    """How often in a row it was found changed."""
    same: int = 0
    """How often in a row it was found unchanged."""


class Changes:
    """What was saved last, buffer by buffer.

    `split` and `copy` run on the training thread, `complete`, `parts` and `learn` on the background
    thread.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._pages = Pages()
        self._flying: dict[str, Staged] = {}
        """The newest copy of a buffer that is not durable yet."""
        self._noted: dict[str, PageWatch] = {}
        """Buffers to which every write since their last copy is noted."""
        self._still: set[str] = set()
        """Those of them that are noted for as long as none comes."""
        self._late: list[LateCopy] = []
        """Copies under way, or whose watches are still listed."""
        self._patience = Patience()

    def split(
        self, buffers: Mapping[str, Any]
    ) -> tuple[dict[str, ObjectRef], dict[str, Staged], dict[str, memoryview]]:
        """Return unchanged buffers as references, or as copies in flight; others as plain bytes."""
        same: dict[str, ObjectRef] = {}
        lean: dict[str, Staged] = {}
        changed: dict[str, memoryview] = {}
        seen, flying = self._seen, self._flying
        views = {key: as_bytes(buffer) for key, buffer in buffers.items()}
        watches = self._watch_again(views)
        for key, view in views.items():
            if len(view) >= SMALL:
                ahead, unwritten = flying.get(key), self._unwritten(key, view)
                if ahead is not None:
                    if unwritten or _holds(ahead, key, view):
                        lean[key] = ahead
                        continue
                    changed[key] = view
                    continue
                known = seen.get(key)
                if known is not None and (
                    unwritten or self._unchanged(key, known, view, watches.pop(key, None))
                ):
                    same[key] = known.ref
                    continue
            changed[key] = view
        self._pages.forget(*watches.values())
        return same, lean, changed

    def copy(
        self,
        changed: Mapping[str, memoryview],
        into: memoryview,
        lean: Mapping[str, Staged] | None = None,
        outlook: CopyHints = UNKNOWN,
        *,
        late: bool = False,
    ) -> Staged:
        """Copy `changed` into staging memory of at least `room(changed)` bytes.

        With `late`, some of it may be copied after this returns: `complete` waits for that.
        """
        staged = Staged(lean=dict(lean or {}))
        self._strike()
        self._note(changed, outlook)
        at, base = 0, address_of(into)
        tiny: list[memoryview] = []
        large: dict[str, CopyRange] = {}
        for key, view in changed.items():
            size = len(view)
            if size < TINY:
                tiny.append(view)
                staged.tiny[key] = size
                continue
            at += -at % (ALIGN if size >= OBJECT_FROM else SLICE)
            place = staged.views[key] = into[at : at + size]
            if size >= LARGE:
                large[key] = CopyRange(base + at, address_of(view), size)
            else:
                place[:] = view
            at += size
        beside = self._beside(large, changed, outlook) if late else {}
        began = time.perf_counter()
        late_copy.copy(
            [part for key, each in large.items() for part in around(each, beside.get(key))]
        )
        if late and not beside:
            self._wonder(staged, large, time.perf_counter() - began)
        if tiny:
            gathered = b"".join(tiny)
            staged.gathered = into[at : at + len(gathered)]
            staged.gathered[:] = gathered
            at += len(gathered)
        staged.nbytes = at
        self._flying.update(dict.fromkeys(staged.views, staged))
        if beside:
            staged.late = LateCopy(self._pages, beside, held=outlook.soon).begin()
            self._late.append(staged.late)
        return staged

    def _beside(
        self, large: Mapping[str, CopyRange], changed: Mapping[str, memoryview], outlook: CopyHints
    ) -> dict[str, Copy]:
        """Return what may be copied after training has gone on, watched from now on."""
        keys = [key for key in large if self._patience.trusts(key) and key not in self._still]
        if sum(large[key].nbytes for key in keys) < ENOUGH or not self._pages.available:
            return {}
        if outlook.soon:
            watches = [self._noted.get(key) for key in keys]
        else:
            watches = self._pages.watch_all([changed[key] for key in keys])
        return {
            key: Copy(CopyRange(each.to + watch.low - each.source, watch.low, watch.whole), watch)
            for key, each, watch in zip(keys, map(large.__getitem__, keys), watches, strict=True)
            if watch is not None
        }

    def _wonder(self, staged: Staged, large: Mapping[str, CopyRange], seconds: float) -> None:
        """Have a look taken, when a late copy would have been made, at what is still the same."""
        new = {key: each.source for key, each in large.items() if not self._patience.knows(key)}
        if sum(large[key].nbytes for key in new) >= ENOUGH and self._pages.available:
            staged.curious, staged.pause = new, LONGER * seconds

    def complete(self, staged: Staged) -> None:
        """Wait for copies that are made late; raise `OvertakenError` if training was faster."""
        if staged.late is not None:
            staged.late.wait()
            for key in staged.late.torn:
                self._patience.learn(key, patient=False)
            if staged.late.torn:
                raise OvertakenError(OVERTAKEN)
        if staged.curious:
            time.sleep(staged.pause)
            for key, address in staged.curious.items():
                view = staged.views[key]
                same = taste(address, places(len(view)), SAMPLE) == sample(view)
                self._patience.learn(key, patient=same)

    def _note(self, changed: Mapping[str, memoryview], outlook: CopyHints) -> None:
        """Note writes to these buffers from before they are copied."""
        still = {k for k in outlook.still if k in changed and k not in self._seen}
        keys = [k for k in (changed if outlook.soon else still) if len(changed[k]) >= SMALL]
        if not keys or not self._pages.available:
            return
        watches = self._pages.watch_all([changed[key] for key in keys])
        for key, watch in zip(keys, watches, strict=True):
            if watch is not None:
                self._noted[key] = watch
        self._still |= still & self._noted.keys()

    def _unwritten(self, key: str, view: memoryview) -> bool:
        watch = self._noted.get(key)
        if watch is None:
            return False
        if self._pages.unwritten(watch, view):
            return True
        self._pages.forget(watch)
        del self._noted[key]
        self._still.discard(key)
        return False

    def settle(self) -> None:
        """Note no longer what will be written: the first write to a page costs more than its copy."""
        ended = {key: self._noted.pop(key) for key in self._noted.keys() - self._still}
        left: list[PageWatch] = []
        for late in self._late:
            left += late.let_go()
            for key, copy in late.copies.items():
                if ended.get(key) is copy.watch:
                    del ended[key]  # it is let go of when it is copied
        self._pages.forget(*ended.values(), *left)
        self._strike()

    def _strike(self) -> None:
        """Strike off the list what late copies have let go of."""
        for late in [each for each in self._late if each.over and not each.held]:
            self._late.remove(late)
            self._pages.strike(*(copy.watch for copy in late.copies.values()))

    def landed(self, staged: Staged) -> None:
        """Let go of copies that are durable, or failed to be."""
        for key in staged.views:
            if self._flying.get(key) is staged:
                del self._flying[key]
        staged.release()

    def parts(self, staged: Staged, same: Mapping[str, ObjectRef]) -> list[Part]:
        """Return the parts of the checkpoint; small copies that did not change become references."""
        staged.spread()
        parts = [Part(key, b"", ref) for key, ref in same.items()]
        for key, ahead in staged.lean.items():
            if ahead.refs is None:
                if ahead.late is not None and ahead.late.torn:
                    raise OvertakenError(OVERTAKEN)
                raise StoreError(
                    "The checkpoint that this one shares bytes with could not be saved. The next "
                    "one holds everything itself.",
                    slug="object-missing",
                )
            parts.append(Part(key, b"", ahead.refs[key]))
        packs: set[str] = set()
        for key, view in staged.views.items():
            known = self._seen.get(key)
            ref = None
            if known is not None and len(view) < SMALL and known.hash == digest(view):
                pack = known.ref.pack or ""
                if pack in packs or len(packs) < MOST_PACKS:
                    packs.add(pack)
                    ref = known.ref
            parts.append(Part(key, view, ref))
        return parts

    def learn(self, staged: Staged, refs: Mapping[str, ObjectRef]) -> None:
        """Take note of what was saved, and of what turned out not to have changed."""
        staged.refs = refs
        for key, view in staged.views.items():
            known, ref = self._seen.get(key), refs[key]
            if len(view) < SMALL:
                if known is None or known.ref is not ref:
                    self._seen[key] = _Seen(ref, b"", digest(view))
            elif known is None or known.ref.oid == ref.oid:
                self._seen[key] = _Seen(ref, sample(view), _hash(ref, view))
            else:
                changes = known.changes + 1
                seldom = _hash(ref, view) if changes <= SELDOM else None
                self._seen[key] = _Seen(ref, sample(view), seldom, changes=changes)

    def forget(self) -> None:
        """Assume nothing: the next save copies everything."""
        self._seen = {}

    def close(self) -> None:
        """End all watches."""
        self.forget()
        self._pages.close()

    def _watch_again(self, views: Mapping[str, memoryview]) -> dict[str, PageWatch]:
        """Watch what was found unchanged before and may be again, from before it is hashed.

        A write in between is then seen the next time. Not at once: the first write to each page
        that is watched costs more than its copy.
        """
        keys = []
        for key, view in views.items():  # what is known may grow meanwhile, on another thread
            known = self._seen.get(key)
            if known is not None and known.same and key not in self._noted:
                if _may_hold(known, view):
                    keys.append(key)
        if not keys:
            return {}
        watches = self._pages.watch_all([views[key] for key in keys])
        return {key: watch for key, watch in zip(keys, watches, strict=True) if watch is not None}

    def _unchanged(self, key: str, known: _Seen, view: memoryview, watch: PageWatch | None) -> bool:
        """Say whether a buffer holds what was saved; if so, it stays watched."""
        if not _may_hold(known, view) or digest(view) != known.hash:
            if watch is not None:
                self._pages.forget(watch)
            return False
        if watch is not None:
            self._noted[key] = watch
            self._still.add(key)
        known.changes = 0
        known.same += 1
        return True


def _may_hold(known: _Seen, view: memoryview) -> bool:
    """Say whether a buffer may hold what was saved, by a look at some of it."""
    if len(view) != known.ref.nbytes or known.hash is None:
        return False
    return sample(view) == known.sample


def _hash(ref: ObjectRef, view: memoryview) -> bytes:
    """Return the hash of a copy that is stored as `ref`."""
    return bytes.fromhex(ref.sum) if ref.sum else digest(view)


def room(changed: Mapping[str, memoryview]) -> int:
    """Return the bytes of staging memory that a copy of `changed` takes at most."""
    return sum(
        size if size < TINY else size + (ALIGN if size >= OBJECT_FROM else SLICE)
        for size in map(len, changed.values())
    )


def _holds(ahead: Staged, key: str, view: memoryview) -> bool:
    """Say whether `view` holds what was copied into staging memory before."""
    if ahead.late is not None and not ahead.late.over:
        return False
    try:
        copied = ahead.views[key][:]  # while this is held, the memory stays mapped
    except (KeyError, ValueError):
        return False  # durable meanwhile
    with copied:
        return equal(copied, view)
