"""Find the buffers that changed since their last save, and copy them into staging memory.

A buffer is the raw bytes of one array or tensor of the state. The buffers of successive checkpoints are compared if
they have the same key.

Three tests can prove that a buffer is unchanged. From the cheapest to the most expensive: the page tables say
that no page was written (`dirty_pages`); the live buffer has the hash of the saved bytes; the copy of the buffer
has the id of the saved object. A buffer whose sampled bytes differ has changed for certain and is copied without
a hash.

Page tables are used for buffers that did not change so far or are not likely to change. They are also used between
the end of an inner loop and the next boundary of the outer loop, because the state mostly stays the same in between.

At one boundary, `select` finds that a buffer is *unchanged* (stored before), equal to a copy *in flight* (not
durable yet), or *changed*. A changed buffer is copied at once, or *late*: after training has resumed, if its
pages are watched and earlier iterations did not write to the buffer soon after they began.
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
"""Number of samples of a buffer that are compared, and number of bytes in each sample."""
TINY = 4096
"""Buffers of fewer bytes are joined into one: handling each buffer costs more than copying its bytes."""
SMALL = 1 << 16
"""Buffers of fewer bytes are always copied: no test of the live bytes is cheaper than the copy."""
MOST_PACKS = 8
"""Maximum number of pack files of earlier checkpoints to which one checkpoint may refer; an unchanged small buffer
in a further pack file is written again."""
LARGE = 1 << 20
"""Buffers of at least this many bytes are copied by several threads."""
HASHED_CHANGES = 2
"""A buffer that changed in more than this many saves in a row is expected to change again, and is not hashed."""


def sample(view: memoryview) -> bytes:
    """Return sampled bytes of the buffer `view`: if the samples of two buffers differ, the buffers differ."""
    return b"".join(view[at : at + SAMPLE] for at in sample_offsets(len(view)))


def sample_offsets(nbytes: int) -> range:
    """Return the offsets of the samples in a buffer of `nbytes`."""
    step = nbytes // SAMPLES
    return range(0, step * SAMPLES, step)


def fast_hash(view: memoryview) -> bytes:
    """Return a hash of all bytes of `view`, computed as fast as the memory can be read."""
    return xxhash.xxh3_128_digest(view)


def equal(left: memoryview, right: memoryview) -> bool:
    """Return True if `left` and `right` hold equal bytes; the interpreter lock is released while they are compared."""
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
    """Expectations of the recorder about the state that is being saved, which decide how it is copied."""

    recapture: bool = False
    """Whether nearly the same state will be captured again before training resumes."""
    likely_unchanged: Collection[str] = ()
    """Keys of buffers that will probably never change."""
    free_core: bool = True
    """Whether a core is free for a late copy, so that training need not wait for the copy."""


NO_HINTS = CopyHints()


@dataclass(frozen=True, slots=True)
class Selection:
    """The buffers of one captured state in three groups; a save treats each group differently."""

    unchanged: dict[str, ObjectRef]
    """Key of a buffer that is stored already -> reference to the stored object; only the reference is saved."""
    in_flight: dict[str, Staged]
    """Key of a buffer that equals a copy of an earlier checkpoint, not durable yet -> copies of that checkpoint."""
    changed: dict[str, memoryview]
    """Key of a buffer that must be copied -> its bytes."""


@dataclass(slots=True)
class _SavedBuffer:
    """What is remembered of one buffer from its last save."""

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
        """Key of a buffer -> copies of the newest checkpoint that copied it and is not durable yet."""
        self._watched: dict[str, PageWatch] = {}
        """Key of a buffer -> the watch over its pages since its last copy."""
        self._long_watched: set[str] = set()
        """Keys of buffers that stay watched until the program writes to them; the watches of other buffers end when
        training resumes."""
        self._late_copies: list[LateCopy] = []
        """Late copies that are still being made, or whose page watches have not ended."""
        self._history = WriteHistory()

    def select(self, buffers: Mapping[str, Any]) -> Selection:
        """Return which of `buffers` (key -> buffer) are unchanged, equal to a copy in flight, or changed."""
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
        """Copy the changed buffers of `selection` to `into`, which has at least `staging_size` bytes for them.

        Return the copies. With `late`, some buffers may be copied after this method returns: `complete` waits for
        these copies.
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
        """Return key -> copy that may be made after training has resumed; its pages are watched from now on.

        `large` holds the large buffers to copy.
        """
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
        """Let `complete` test whether training writes to new buffers of `large` before a late copy would end.

        `seconds` is how long it took to copy `large`; a late copy would take `LATE_SLOWDOWN` times as long.
        """
        new = {
            key: copy_range.source for key, copy_range in large.items() if key not in self._history
        }
        if sum(large[key].nbytes for key in new) >= LATE_COPY_FROM and self._pages.available:
            staged.trial, staged.trial_delay = new, LATE_SLOWDOWN * seconds

    def complete(self, staged: Staged) -> None:
        """Wait for the late copies of `staged`; raise `OvertakenError` if training wrote to a buffer before its copy.

        If `staged.trial` names buffers, wait as long as a late copy would take, and remember whether training has
        written to them.
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
        """Watch those `changed` buffers that may be unchanged in the next capture; called before they are copied.

        If the state is captured again before training resumes, these are all changed buffers; otherwise only buffers
        that were never saved and will probably never change. Small buffers are never watched.
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
        """Return True if the buffer `key`, now `view`, is watched and was not written since its last copy.

        Otherwise end the watch over its pages, if there is one, and return False.
        """
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
        """End the watches that were only needed until training resumes.

        Training would be slowed: the first write to a watched page costs more than the copy of the page.
        """
        if not self._late_copies and len(self._watched) == len(self._long_watched):
            return
        ended = {key: self._watched.pop(key) for key in self._watched.keys() - self._long_watched}
        copied: list[PageWatch] = []
        for late in self._late_copies:
            copied += late.stop_watching()
            for key, copy in late.copies.items():
                if ended.get(key) is copy.watch:
                    del ended[key]  # the late copy ends this watch when the pages are copied
        self._pages.forget(*ended.values(), *copied)
        self._unregister_copied()

    def _unregister_copied(self) -> None:
        """Forget late copies that have ended, and end their page watches."""
        for late in [
            copying
            for copying in self._late_copies
            if copying.is_over and not copying.keep_watching
        ]:
            self._late_copies.remove(late)
            self._pages.end_watches(*(copy.watch for copy in late.copies.values()))

    def release(self, staged: Staged) -> None:
        """Release the copies `staged` of a checkpoint that is durable, or whose save failed."""
        for key in staged.views:
            if self._in_flight.get(key) is staged:
                del self._in_flight[key]
        staged.release()

    def parts(self, staged: Staged, unchanged: Mapping[str, ObjectRef]) -> list[Part]:
        """Return the parts of a checkpoint: references for buffers that are stored already, and copies of the others.

        `unchanged` is key -> reference. Small buffers were copied without a test; here those that turn out to be
        unchanged become references.
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
        """Remember the copies `staged` that a save has stored at `refs` (key -> reference), and which have changed."""
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
        """Forget earlier saves and end all page watches."""
        self.forget()
        self._pages.close()

    def _watch_unchanged(self, views: Mapping[str, memoryview]) -> dict[str, PageWatch]:
        """Watch buffers that were unchanged in the last save and may be unchanged now; return key -> new watch.

        The watches begin before the buffers are hashed, so that the next boundary sees every later write.
        Buffers are not watched from their first save on: the first write to a watched page costs more than
        the copy of the page.
        """
        keys = []
        for key, view in views.items():  # not `_saved`, to which the writer thread may add
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
        """Return True if the buffer `key` equals its last save, `saved`; then `watch` stays, otherwise it ends."""
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
    """Return True if size and samples of the buffer `view` equal those of its last save, `saved`.

    Return False also if the hash of the last save is not known.
    """
    if len(view) != saved.ref.nbytes or saved.hash is None:
        return False
    return sample(view) == saved.sample


def _hash(ref: ObjectRef, view: memoryview) -> bytes:
    """Return the hash of the copy `view`, which is stored as `ref`; use the hash in `ref` if there is one."""
    return bytes.fromhex(ref.sum) if ref.sum else fast_hash(view)


def staging_size(changed: Mapping[str, memoryview]) -> int:
    """Return the maximum number of bytes of staging memory that copies of the `changed` buffers take."""
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
        return False  # the earlier checkpoint became durable, and its copies were released
    with copied:
        return equal(copied, view)
