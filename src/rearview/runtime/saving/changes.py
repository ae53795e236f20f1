"""Find the buffers that changed since they were saved, and copy them into staging memory.

Three sound tests, cheapest first: the page tables say that nothing was written (`dirty_pages`); the
hash of the live buffer equals the hash of the saved bytes; the copy turns out to be the saved
object. A buffer whose sampled bytes differ has changed for certain and is copied without a hash.

Page tables are used for buffers that did not change so far or are not likely to, and between the
end of an inner loop and the boundary after it, which mostly hold the same.

The life of one buffer at one boundary: `select` finds it *unchanged* (stored before), equal to a
copy *in flight* (not durable yet), or *changed*. A changed buffer is copied at once, or *late*:
after training has resumed, if its pages are watched and earlier iterations did not write to it soon.
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
    LATE_SLOWDOWN,
    CopyRange,
    LateCopy,
    OvertakenError,
    WatchedCopy,
    WriteHistory,
    around,
    sample_memory,
)
from rearview.runtime.saving.staging import Staged
from rearview.store.checkpoints.checkpoints import OBJECT_FROM
from rearview.store.checkpoints.manifest import SLICE
from rearview.store.checkpoints.objects import as_bytes
from rearview.store.create_files import ALIGN

SAMPLES, SAMPLE = 16, 64
"""Number of samples that are compared of a buffer, and bytes of each."""
TINY = 4096
"""Smaller buffers are gathered into one: looking at each costs more than its bytes."""
SMALL = 1 << 16
"""Smaller buffers are always copied: no test of the live bytes is cheaper."""
MOST_PACKS = 8
"""Old packs that one checkpoint may refer to; beyond that small parts are written again."""
LARGE = 1 << 20
"""Buffers of at least this many bytes are copied by several threads."""
SELDOM = 2
"""A buffer that changed more often than this in a row is expected to change and is not hashed."""


def sample(view: memoryview) -> bytes:
    """Return some of the bytes: if the samples of two buffers differ, so do the buffers."""
    return b"".join(view[at : at + SAMPLE] for at in sample_offsets(len(view)))


def sample_offsets(nbytes: int) -> range:
    """Return the offsets of the samples in a buffer of `nbytes`."""
    step = nbytes // SAMPLES
    return range(0, step * SAMPLES, step)


def digest(view: memoryview) -> bytes:
    """Return a hash of all bytes, at the speed of memory."""
    return xxhash.xxh3_128_digest(view)


def equal(left: memoryview, right: memoryview) -> bool:
    """Return True if two buffers hold the same bytes; compares without the interpreter lock."""
    if len(left) != len(right) or sample(left) != sample(right):
        return False
    return not _memcmp()(
        ctypes.c_void_p(address_of(left)),
        ctypes.c_void_p(address_of(right)),
        ctypes.c_size_t(len(left)),
    )


@functools.cache
def _memcmp() -> Any:
    return ctypes.CDLL(None).memcmp


@dataclass(frozen=True, slots=True)
class CopyHints:
    """The recorder's expectations of a state after it was copied."""

    recapture: bool = False
    """Whether nearly the same state will be captured again before training resumes."""
    likely_unchanged: Collection[str] = ()
    """Keys of buffers that are not likely to change at all."""
    free_core: bool = True
    """Whether a core is free to copy late, so that training need not wait for the copy."""


NO_HINTS = CopyHints()


@dataclass(frozen=True, slots=True)
class Selection:
    """The buffers of one state, sorted by the action that they need."""

    unchanged: dict[str, ObjectRef]
    """Stored before: only the reference is saved."""
    in_flight: dict[str, Staged]
    """Equal to a copy of an earlier checkpoint that is not durable yet."""
    changed: dict[str, memoryview]
    """To be copied."""


@dataclass(slots=True)
class _SavedBuffer:
    """One buffer at its last save."""

    ref: ObjectRef
    sample: bytes
    hash: bytes | None
    """Of all bytes; None for a buffer that is expected to change."""
    changes: int = 0
    """Saves in a row that found it changed."""
    same: int = 0
    """Saves in a row that found it unchanged."""


class Changes:
    """The buffers of a run at their last saves.

    `select` and `copy` run on the training thread, `complete`, `parts` and `learn` on the writer
    thread.
    """

    def __init__(self) -> None:
        self._saved: dict[str, _SavedBuffer] = {}
        self._pages = Pages()
        self._in_flight: dict[str, Staged] = {}
        """By buffer, its newest copy that is not durable yet."""
        self._watched: dict[str, PageWatch] = {}
        """Buffers whose pages are watched since their last copy."""
        self._long_watched: set[str] = set()
        """Those that stay watched until they are written; others only until training resumes."""
        self._late_copies: list[LateCopy] = []
        """Late copies under way, or whose watches are still registered."""
        self._history = WriteHistory()

    def select(self, buffers: Mapping[str, Any]) -> Selection:
        """Sort the buffers of a state into unchanged ones, copies in flight and changed ones."""
        selection = Selection({}, {}, {})
        views = {key: as_bytes(buffer) for key, buffer in buffers.items()}
        watches = self._watch_again(views)
        for key, view in views.items():
            if len(view) >= SMALL:
                copy, unwritten = self._in_flight.get(key), self._unwritten(key, view)
                saved = self._saved.get(key)
                if copy is not None:
                    if unwritten or _holds(copy, key, view):
                        selection.in_flight[key] = copy
                        continue
                elif saved is not None and (
                    unwritten or self._unchanged(key, saved, view, watches.pop(key, None))
                ):
                    selection.unchanged[key] = saved.ref
                    continue
            selection.changed[key] = view
        self._pages.forget(*watches.values())
        return selection

    def copy(
        self,
        selection: Selection,
        into: memoryview,
        hints: CopyHints = NO_HINTS,
        *,
        late: bool = False,
    ) -> Staged:
        """Copy changed buffers into staging memory of at least `staging_size(changed)` bytes.

        With `late`, some of them may be copied after this returns: `complete` waits for that.
        """
        changed = selection.changed
        staged = Staged(shared=selection.in_flight)
        self._unregister_copied()
        self._watch(changed, hints)
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
        late_copies = self._late(large, changed, hints) if late else {}
        began = time.perf_counter()
        late_copy.copy(
            [
                part
                for key, copy_range in large.items()
                for part in around(copy_range, late_copies.get(key))
            ]
        )
        if late and not late_copies:
            self._plan_trial(staged, large, time.perf_counter() - began)
        if tiny:
            gathered = b"".join(tiny)
            staged.gathered = into[at : at + len(gathered)]
            staged.gathered[:] = gathered
            at += len(gathered)
        staged.nbytes = at
        self._in_flight.update(dict.fromkeys(staged.views, staged))
        if late_copies:
            staged.late = LateCopy(self._pages, late_copies, keep_watching=hints.recapture).begin()
            self._late_copies.append(staged.late)
        return staged

    def _late(
        self, large: Mapping[str, CopyRange], changed: Mapping[str, memoryview], hints: CopyHints
    ) -> dict[str, WatchedCopy]:
        """Return the copies that may be made after training has resumed, watched from now on."""
        keys = [k for k in large if self._history.is_quiet(k) and k not in self._long_watched]
        if sum(large[key].nbytes for key in keys) < ENOUGH or not self._pages.available:
            return {}
        if hints.recapture:
            watches = [self._watched.get(key) for key in keys]
        else:
            watches = self._pages.watch_all([changed[key] for key in keys])
        return {
            key: WatchedCopy(
                CopyRange(copy_range.to + watch.low - copy_range.source, watch.low, watch.whole),
                watch,
            )
            for key, copy_range, watch in zip(
                keys, map(large.__getitem__, keys), watches, strict=True
            )
            if watch is not None
        }

    def _plan_trial(self, staged: Staged, large: Mapping[str, CopyRange], seconds: float) -> None:
        """Plan to check new buffers again, after the time that a late copy would have taken."""
        new = {
            key: copy_range.source for key, copy_range in large.items() if key not in self._history
        }
        if sum(large[key].nbytes for key in new) >= ENOUGH and self._pages.available:
            staged.trial, staged.trial_delay = new, LATE_SLOWDOWN * seconds

    def complete(self, staged: Staged) -> None:
        """Wait for late copies; raise `OvertakenError` if training wrote to a buffer before."""
        if staged.late is not None:
            staged.late.wait()
            for key in staged.late.overtaken:
                self._history.add(key, quiet=False)
            if staged.late.overtaken:
                raise OvertakenError
        if staged.trial:
            time.sleep(staged.trial_delay)
            for key, address in staged.trial.items():
                view = staged.views[key]
                current = sample_memory(address, sample_offsets(len(view)), SAMPLE)
                self._history.add(key, quiet=current == sample(view))

    def _watch(self, changed: Mapping[str, memoryview], hints: CopyHints) -> None:
        """Watch the pages of these buffers, beginning before they are copied."""
        unchanging = {
            key for key in hints.likely_unchanged if key in changed and key not in self._saved
        }
        candidates = changed if hints.recapture else unchanging
        keys = [key for key in candidates if len(changed[key]) >= SMALL]
        if not keys or not self._pages.available:
            return
        watches = self._pages.watch_all([changed[key] for key in keys])
        for key, watch in zip(keys, watches, strict=True):
            if watch is not None:
                self._watched[key] = watch
        self._long_watched |= unchanging & self._watched.keys()

    def _unwritten(self, key: str, view: memoryview) -> bool:
        """Return True if the buffer is watched and no page of it was written."""
        watch = self._watched.get(key)
        if watch is None:
            return False
        if self._pages.unwritten(watch, view):
            return True
        self._pages.forget(watch)
        del self._watched[key]
        self._long_watched.discard(key)
        return False

    def training_resumes(self) -> None:
        """End the short watches: the first write to a watched page costs more than its copy."""
        if not self._late_copies and len(self._watched) == len(self._long_watched):
            return
        ended = {key: self._watched.pop(key) for key in self._watched.keys() - self._long_watched}
        copied: list[PageWatch] = []
        for late in self._late_copies:
            copied += late.stop_watching()
            for key, copy in late.copies.items():
                if ended.get(key) is copy.watch:
                    del ended[key]  # ends when it is copied
        self._pages.forget(*ended.values(), *copied)
        self._unregister_copied()

    def _unregister_copied(self) -> None:
        """Unregister the watches of late copies that have ended."""
        for late in [
            copying for copying in self._late_copies if copying.over and not copying.keep_watching
        ]:
            self._late_copies.remove(late)
            self._pages.end_watches(*(copy.watch for copy in late.copies.values()))

    def release(self, staged: Staged) -> None:
        """Release copies that are durable, or failed to be."""
        for key in staged.views:
            if self._in_flight.get(key) is staged:
                del self._in_flight[key]
        staged.release()

    def parts(self, staged: Staged, unchanged: Mapping[str, ObjectRef]) -> list[Part]:
        """Return the parts of the checkpoint; small copies that did not change become references."""
        staged.separate_tiny()
        parts = [Part(key, b"", ref) for key, ref in unchanged.items()]
        for key, earlier in staged.shared.items():
            if earlier.refs is None:
                if earlier.late is not None and earlier.late.overtaken:
                    raise OvertakenError
                raise StoreError(
                    "The checkpoint that this one shares bytes with could not be saved. The next "
                    "one holds everything itself.",
                    slug="object-missing",
                )
            parts.append(Part(key, b"", earlier.refs[key]))
        packs: set[str] = set()
        for key, view in staged.views.items():
            saved = self._saved.get(key)
            ref = None
            if saved is not None and len(view) < SMALL and saved.hash == digest(view):
                pack = saved.ref.pack or ""
                if pack in packs or len(packs) < MOST_PACKS:
                    packs.add(pack)
                    ref = saved.ref
            parts.append(Part(key, view, ref))
        return parts

    def learn(self, staged: Staged, refs: Mapping[str, ObjectRef]) -> None:
        """Remember the buffers that were saved, and which of them did not change."""
        staged.refs = refs
        for key, view in staged.views.items():
            saved, ref = self._saved.get(key), refs[key]
            if len(view) < SMALL:
                if saved is None or saved.ref is not ref:
                    self._saved[key] = _SavedBuffer(ref, b"", digest(view))
            elif saved is None or saved.ref.oid == ref.oid:
                self._saved[key] = _SavedBuffer(ref, sample(view), _hash(ref, view))
            else:
                changes = saved.changes + 1
                hashed = _hash(ref, view) if changes <= SELDOM else None
                self._saved[key] = _SavedBuffer(ref, sample(view), hashed, changes=changes)

    def forget(self) -> None:
        """Forget earlier saves: the next save copies everything."""
        self._saved = {}

    def close(self) -> None:
        """End all watches."""
        self.forget()
        self._pages.close()

    def _watch_again(self, views: Mapping[str, memoryview]) -> dict[str, PageWatch]:
        """Watch buffers that were unchanged before and may be again, beginning before their hash.

        Later writes are then seen at the next boundary. Buffers are not watched from their first
        save on: the first write to a watched page costs more than its copy.
        """
        keys = []
        for key, view in views.items():  # not over _saved: the writer thread may add to it
            saved = self._saved.get(key)
            if saved is not None and saved.same and key not in self._watched:
                if _may_hold(saved, view):
                    keys.append(key)
        if not keys:
            return {}
        watches = self._pages.watch_all([views[key] for key in keys])
        return {key: watch for key, watch in zip(keys, watches, strict=True) if watch is not None}

    def _unchanged(
        self, key: str, saved: _SavedBuffer, view: memoryview, watch: PageWatch | None
    ) -> bool:
        """Return True if a buffer equals its last save; it then stays watched."""
        if not _may_hold(saved, view) or digest(view) != saved.hash:
            if watch is not None:
                self._pages.forget(watch)
            return False
        if watch is not None:
            self._watched[key] = watch
            self._long_watched.add(key)
        saved.changes = 0
        saved.same += 1
        return True


def _may_hold(saved: _SavedBuffer, view: memoryview) -> bool:
    """Return True if a buffer may equal its last save, judged by samples."""
    if len(view) != saved.ref.nbytes or saved.hash is None:
        return False
    return sample(view) == saved.sample


def _hash(ref: ObjectRef, view: memoryview) -> bytes:
    """Return the hash of a copy that is stored as `ref`, without hashing if the store knows it."""
    return bytes.fromhex(ref.sum) if ref.sum else digest(view)


def staging_size(changed: Mapping[str, memoryview]) -> int:
    """Return the bytes of staging memory that a copy of `changed` takes at most."""
    return sum(
        size if size < TINY else size + (ALIGN if size >= OBJECT_FROM else SLICE)
        for size in map(len, changed.values())
    )


def _holds(staged: Staged, key: str, view: memoryview) -> bool:
    """Return True if `view` equals the copy of buffer `key` in staging memory."""
    if staged.late is not None and not staged.late.over:
        return False
    try:
        copied = staged.views[key][:]  # while this view exists, the memory stays mapped
    except (KeyError, ValueError):
        return False  # it has become durable and was released
    with copied:
        return equal(copied, view)
