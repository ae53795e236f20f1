"""Find the buffers that changed since their last save, and copy them into staging memory.

Three tests can prove that a buffer is unchanged. From the cheapest to the most expensive: the page tables say
that no page was written (`dirty_pages`); the live buffer has the hash of the saved bytes; the copy of the buffer
has the id of the saved object. A buffer whose sampled bytes differ has changed for certain and is copied without
a hash.

Page tables are used for buffers that did not change so far or are not likely to change, and between the end of
an inner loop and the boundary after this loop, because the state mostly stays the same between these two.

At one boundary, `select` finds that a buffer is *unchanged* (stored before), equal to a copy *in flight* (not
durable yet), or *changed*. A changed buffer is copied at once, or *late*: after training has resumed, if its
pages are watched and earlier iterations did not write to the buffer soon.
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
from rearview.runtime.saving.dirty_pages import Pages, PageWatch, address_of
from rearview.runtime.saving.late_copy import (
    LATE_COPY_FROM,
    LATE_SLOWDOWN,
    CopyRange,
    LateCopy,
    OvertakenError,
    WatchedCopy,
    WriteHistory,
    copy_in_parallel,
    ranges_to_copy_now,
    sample_memory,
)
from rearview.runtime.saving.staging import Staged
from rearview.store.checkpoints.checkpoints import OBJECT_FROM
from rearview.store.checkpoints.manifest_and_packs import SLICE
from rearview.store.checkpoints.objects import as_bytes
from rearview.store.create_files import ALIGN

SAMPLES, SAMPLE = 16, 64
"""Number of samples that are compared in a buffer, and bytes of each sample."""
TINY = 4096
"""Bytes. Smaller buffers are joined into one: handling each buffer costs more than copying its bytes."""
SMALL = 1 << 16
"""Bytes. Smaller buffers are always copied: no test of the live bytes is cheaper than the copy."""
MOST_PACKS = 8
"""Old packs that one checkpoint may refer to; a small part in a further pack is written again."""
LARGE = 1 << 20
"""Buffers of at least this many bytes are copied by several threads."""
HASHED_CHANGES = 2
"""Number of saves; a buffer that changed in more saves in a row is expected to change again, and is not hashed."""


def sample(view: memoryview) -> bytes:
    """Return some bytes of a buffer: if the samples of two buffers differ, the buffers differ."""
    return b"".join(view[at : at + SAMPLE] for at in sample_offsets(len(view)))


def sample_offsets(nbytes: int) -> range:
    """Return the offsets of the samples in a buffer of `nbytes`."""
    step = nbytes // SAMPLES
    return range(0, step * SAMPLES, step)


def fast_hash(view: memoryview) -> bytes:
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
    """What the recorder expects to happen to a state after it is copied."""

    recapture: bool = False
    """Whether nearly the same state will be captured again before training resumes."""
    likely_unchanged: Collection[str] = ()
    """Keys of buffers that are not likely to change at all."""
    free_core: bool = True
    """Whether a core is free for a late copy, so that training need not wait for the copy."""


NO_HINTS = CopyHints()


@dataclass(frozen=True, slots=True)
class Selection:
    """The buffers of one state, by key, sorted by what a save has to do with each."""

    unchanged: dict[str, ObjectRef]
    """Buffers that were stored before: only the reference is saved."""
    in_flight: dict[str, Staged]
    """Buffers that equal a copy of an earlier checkpoint, which is not durable yet."""
    changed: dict[str, memoryview]
    """Buffers that must be copied."""


@dataclass(slots=True)
class _SavedBuffer:
    """Facts about one buffer from its last save."""

    ref: ObjectRef
    sample: bytes
    hash: bytes | None
    """Hash of all bytes; None for a buffer that is expected to change."""
    changed_saves: int = 0
    """Number of saves in a row that found the buffer changed."""
    unchanged_saves: int = 0
    """Number of saves in a row that found the buffer unchanged."""


class Changes:
    """Remembers each buffer of a run from its last save, to tell unchanged buffers from changed ones.

    `select` and `copy` run on the training thread, `complete`, `parts` and `remember_saved` on the writer
    thread.
    """

    def __init__(self) -> None:
        self._saved: dict[str, _SavedBuffer] = {}
        self._pages = Pages()
        self._in_flight: dict[str, Staged] = {}
        """By key of a buffer: its newest copy that is not durable yet."""
        self._watched: dict[str, PageWatch] = {}
        """By key of a buffer: the watch over its pages since its last copy."""
        self._long_watched: set[str] = set()
        """Keys of buffers that stay watched until they are written; the watches of other buffers end when
        training resumes."""
        self._late_copies: list[LateCopy] = []
        """Late copies that still run, or whose watches are still registered."""
        self._history = WriteHistory()

    def select(self, buffers: Mapping[str, Any]) -> Selection:
        """Sort the buffers of a state into unchanged ones, copies in flight and changed ones."""
        selection = Selection({}, {}, {})
        views = {key: as_bytes(buffer) for key, buffer in buffers.items()}
        watches = self._watch_unchanged(views)
        for key, view in views.items():
            if len(view) >= SMALL:
                copy, unwritten = self._in_flight.get(key), self._unwritten(key, view)
                saved = self._saved.get(key)
                if copy is not None:
                    if unwritten or _equals_copy(copy, key, view):
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

        With `late`, some buffers may be copied after this returns: `complete` waits for them.
        """
        changed = selection.changed
        staged = Staged(shared=selection.in_flight)
        self._unregister_copied()
        self._watch_for_next_capture(changed, hints)
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
        late_copies = self._late_copies_of(large, changed, hints) if late else {}
        began = time.perf_counter()
        copy_in_parallel(
            [
                part
                for key, copy_range in large.items()
                for part in ranges_to_copy_now(copy_range, late_copies.get(key))
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

    def _late_copies_of(
        self, large: Mapping[str, CopyRange], changed: Mapping[str, memoryview], hints: CopyHints
    ) -> dict[str, WatchedCopy]:
        """Return the copies that may be made after training has resumed; their pages are watched from now on."""
        keys = [k for k in large if self._history.is_quiet(k) and k not in self._long_watched]
        if sum(large[key].nbytes for key in keys) < LATE_COPY_FROM or not self._pages.available:
            return {}
        if hints.recapture:
            watches = [self._watched.get(key) for key in keys]
        else:
            watches = self._pages.watch_all([changed[key] for key in keys])
        return {
            key: WatchedCopy(
                CopyRange(
                    copy_range.to + watch.low - copy_range.source, watch.low, watch.page_bytes
                ),
                watch,
            )
            for key, copy_range, watch in zip(
                keys, map(large.__getitem__, keys), watches, strict=True
            )
            if watch is not None
        }

    def _plan_trial(self, staged: Staged, large: Mapping[str, CopyRange], seconds: float) -> None:
        """Let `complete` test whether training writes to new buffers while a late copy would run.

        `seconds` is the time that the copies have taken.
        """
        new = {
            key: copy_range.source for key, copy_range in large.items() if key not in self._history
        }
        if sum(large[key].nbytes for key in new) >= LATE_COPY_FROM and self._pages.available:
            staged.trial, staged.trial_delay = new, LATE_SLOWDOWN * seconds

    def complete(self, staged: Staged) -> None:
        """Wait for late copies; raise `OvertakenError` if training wrote to a buffer before it was copied.

        If buffers are to be tried for late copying, wait as long as a late copy would take and test them.
        """
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

    def _watch_for_next_capture(self, changed: Mapping[str, memoryview], hints: CopyHints) -> None:
        """Watch changed buffers that may be equal in the next capture, from before they are copied.

        If the state is captured again before training resumes, these are all changed buffers; otherwise
        only new ones that are not likely to change. Small buffers are never watched.
        """
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
        """Return True if a buffer is watched and none of its pages was written; else end its watch."""
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
        """End the watches that last until training resumes.

        The first write to a watched page costs more than the copy of the page.
        """
        if not self._late_copies and len(self._watched) == len(self._long_watched):
            return
        ended = {key: self._watched.pop(key) for key in self._watched.keys() - self._long_watched}
        copied: list[PageWatch] = []
        for late in self._late_copies:
            copied += late.stop_watching()
            for key, copy in late.copies.items():
                if ended.get(key) is copy.watch:
                    del ended[key]  # this watch ends when the pages are copied
        self._pages.forget(*ended.values(), *copied)
        self._unregister_copied()

    def _unregister_copied(self) -> None:
        """Unregister the watches of late copies that have ended."""
        for late in [
            copying
            for copying in self._late_copies
            if copying.is_over and not copying.keep_watching
        ]:
            self._late_copies.remove(late)
            self._pages.end_watches(*(copy.watch for copy in late.copies.values()))

    def release(self, staged: Staged) -> None:
        """Release the copies of a checkpoint that is durable, or whose save failed."""
        for key in staged.views:
            if self._in_flight.get(key) is staged:
                del self._in_flight[key]
        staged.release()

    def parts(self, staged: Staged, unchanged: Mapping[str, ObjectRef]) -> list[Part]:
        """Return the parts of a checkpoint: references to unchanged buffers, and the copies of the changed ones.

        Small buffers are copied untested; those that turn out to be unchanged become references.
        """
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
            if saved is not None and len(view) < SMALL and saved.hash == fast_hash(view):
                pack = saved.ref.pack or ""
                if pack in packs or len(packs) < MOST_PACKS:
                    packs.add(pack)
                    ref = saved.ref
            parts.append(Part(key, view, ref))
        return parts

    def remember_saved(self, staged: Staged, refs: Mapping[str, ObjectRef]) -> None:
        """Remember the buffers that a save has stored under `refs`, and whether each has changed."""
        staged.refs = refs
        for key, view in staged.views.items():
            saved, ref = self._saved.get(key), refs[key]
            if len(view) < SMALL:
                if saved is None or saved.ref is not ref:
                    self._saved[key] = _SavedBuffer(ref, b"", fast_hash(view))
            elif saved is None or saved.ref.oid == ref.oid:
                self._saved[key] = _SavedBuffer(ref, sample(view), _hash(ref, view))
            else:
                changes = saved.changed_saves + 1
                hashed = _hash(ref, view) if changes <= HASHED_CHANGES else None
                self._saved[key] = _SavedBuffer(ref, sample(view), hashed, changed_saves=changes)

    def forget(self) -> None:
        """Forget earlier saves: the next save copies everything."""
        self._saved = {}

    def close(self) -> None:
        """End all watches."""
        self.forget()
        self._pages.close()

    def _watch_unchanged(self, views: Mapping[str, memoryview]) -> dict[str, PageWatch]:
        """Watch buffers that were unchanged in the last save and may be unchanged now; return the new watches.

        The watches begin before the buffers are hashed, so that the next boundary sees every later write.
        Buffers are not watched from their first save on: the first write to a watched page costs more than
        the copy of the page.
        """
        keys = []
        for key, view in views.items():  # not over _saved: the writer thread may add to it
            saved = self._saved.get(key)
            if saved is not None and saved.unchanged_saves and key not in self._watched:
                if _may_be_equal(saved, view):
                    keys.append(key)
        if not keys:
            return {}
        watches = self._pages.watch_all([views[key] for key in keys])
        return {key: watch for key, watch in zip(keys, watches, strict=True) if watch is not None}

    def _unchanged(
        self, key: str, saved: _SavedBuffer, view: memoryview, watch: PageWatch | None
    ) -> bool:
        """Return True if a buffer equals its last save; `watch` then stays, otherwise it ends."""
        if not _may_be_equal(saved, view) or fast_hash(view) != saved.hash:
            if watch is not None:
                self._pages.forget(watch)
            return False
        if watch is not None:
            self._watched[key] = watch
            self._long_watched.add(key)
        saved.changed_saves = 0
        saved.unchanged_saves += 1
        return True


def _may_be_equal(saved: _SavedBuffer, view: memoryview) -> bool:
    """Return True if a buffer may equal its last save, judged by its size and samples."""
    if len(view) != saved.ref.nbytes or saved.hash is None:
        return False
    return sample(view) == saved.sample


def _hash(ref: ObjectRef, view: memoryview) -> bytes:
    """Return the hash of a copy that is stored as `ref`; not computed if the store knows the hash."""
    return bytes.fromhex(ref.sum) if ref.sum else fast_hash(view)


def staging_size(changed: Mapping[str, memoryview]) -> int:
    """Return the most bytes of staging memory that copies of the `changed` buffers can take."""
    return sum(
        size if size < TINY else size + (ALIGN if size >= OBJECT_FROM else SLICE)
        for size in map(len, changed.values())
    )


def _equals_copy(staged: Staged, key: str, view: memoryview) -> bool:
    """Return True if `view` equals the copy of buffer `key` in staging memory."""
    if staged.late is not None and not staged.late.is_over:
        return False
    try:
        copied = staged.views[key][:]  # while this view exists, the memory stays mapped
    except (KeyError, ValueError):
        return False  # the checkpoint is durable and its copies were released
    with copied:
        return equal(copied, view)
