"""The writer: copies a snapshot while training waits, and saves the copy on a background thread.

Training waits only for a copy of the changed bytes; hashing, compressing and writing happen on the
writer thread. The writer never raises into the program and never makes the program wait for a disk: if earlier
checkpoints are still being written, the writer skips the new one. With each further failed save in a row, the
writer skips more boundaries. `RemoteCopy` copies the run to its remote after each save, so that the run can be
resumed if this machine is lost.

A checkpoint is in flight from the moment it is accepted until it is durable or its save has failed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from rearview.config import Settings
from rearview.errors import RearviewError
from rearview.model import Checkpoint, ObjectRef, Part, Snapshot
from rearview.runtime.saving.changes import NO_HINTS, Changes, CopyHints, staging_size
from rearview.runtime.saving.late_copy import OvertakenError
from rearview.runtime.saving.overhead import Costs
from rearview.runtime.saving.policy import Reason
from rearview.runtime.saving.staging import (
    MOST_IN_FLIGHT,
    Device,
    Fetch,
    Lease,
    Staged,
    Staging,
    free_memory,
)
from rearview.store.checkpoints.checkpoints import Checkpoints

SKELETON = "skeleton"
"""Key of the checkpoint part with the skeleton: the captured state without its buffers."""
RECAPTURE_WAIT = 0.2
"""Maximum seconds that the writer thread waits for an expected capture: both need the interpreter lock."""
NICENESS = 10
"""Added to the nice value of background threads, so that the system prefers training threads."""
_LONGEST_PAUSE = 64
"""Maximum number of boundaries that are skipped after a failed save."""


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A captured state whose buffers are copied or being copied, and which waits to be written."""

    snapshot: Snapshot
    """The snapshot without its buffers: the copies are in `staged`."""
    unchanged: dict[str, ObjectRef]
    """Key of an unchanged buffer -> reference to the object that an earlier save has stored."""
    staged: Staged
    lease: Lease
    fetch: Fetch | None
    """Copies of tensors from accelerators to the host; None if the state has no such tensors."""
    blocking: float
    """Seconds that training waited for the copy."""
    recapture: bool
    """Whether the state will be captured again before training resumes."""


class SaveFailures:
    """Counts failed saves, warns once per cause, and says how many boundaries to skip after a failure.

    With each further failure in a row, more boundaries are skipped.
    """

    def __init__(self, warn: Callable[[str], None] | None) -> None:
        self.count = 0
        """Number of saves that failed since the last success."""
        self.pause = 0
        """Number of boundaries that are still to be skipped."""
        self._warn = warn or logging.getLogger("rearview").warning
        self._warned: set[str] = set()

    def add(self, exc: Exception, checkpoint: str) -> None:
        """Count that saving `checkpoint` failed with `exc`, and warn unless its cause was warned about before."""
        self.count += 1
        self.pause = min(_LONGEST_PAUSE, 2 ** (self.count - 1)) - 1
        cause = exc.slug if isinstance(exc, RearviewError) else type(exc).__name__
        self.warn_once(cause, f"Checkpoint {checkpoint} was not saved; training continues. {exc}")

    def clear(self) -> None:
        """Forget the failures: a save has succeeded."""
        self.count = 0
        self._warned.clear()

    def warn_once(self, cause: str, message: str) -> None:
        """Show `message` as a warning, unless there was a warning with the same `cause` since the last success."""
        if cause not in self._warned:
            self._warned.add(cause)
            try:
                self._warn(message)
            except Exception:
                logging.getLogger("rearview").exception("the warning itself failed: %s", message)


class Writer:
    """Saves checkpoints in the background, one after another.

    `warn` is called once for each cause of failure. `on_end` is called at the end of each accepted
    save with the number of the checkpoint, the costs, and the reason if the save was given up without a failure.
    Both are called on the writer thread; `warn` also on the training thread, if the copy fails.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: Settings,
        *,
        warn: Callable[[str], None] | None = None,
        on_end: Callable[[int, Costs, Reason | None], None] | None = None,
    ) -> None:
        self.costs = Costs()
        self.reason: Reason | None = None
        """Why the last `submit` returned False."""
        self.on_saved: Callable[[], None] | None = None
        """Function that is called on the writer thread when a checkpoint has become durable, or None."""
        self._checkpoints = checkpoints
        self._on_end = on_end
        self._staging = Staging(settings.staging)
        self._changes = Changes()
        self._device = Device()
        self._queue: deque[PendingCheckpoint] = deque()
        self._changed = threading.Condition()
        """Lock for the attributes that the training and writer threads share, notified when one of these changes."""
        self._in_flight = 0
        """Number of checkpoints that were accepted and whose save has not ended."""
        self._preparing: threading.Thread | None = None
        """The thread that is preparing staging memory; None if no memory is being prepared."""
        self._preparation = (0.0, 0.0)
        """(seconds, processor seconds) of preparing memory that are not yet counted as the cost of a save."""
        self._worked = 0.0
        """Seconds that background work took, without the work that is still running."""
        self._working_since: float | None = None
        self._recapture_expected = False
        """Whether the state will be captured again before `training_resumes` is called."""
        self._prepared = 0
        """Bytes of staging memory whose preparation has ended, with or without success."""
        self._recent_needs: deque[int] = deque(maxlen=4)
        self._closed = False
        self._failures = SaveFailures(warn)
        self._thread: threading.Thread | None = None
        abandon_in_child(self)

    def prepare(self, nbytes: int, *, certain: bool = False) -> None:
        """Start to prepare staging memory for `nbytes` of changes, on a thread with the priority of training.

        If it is not `certain` that so many bytes are needed, prepare at most a quarter of the free memory of the
        machine. Checkpoints are skipped until the memory is ready.
        """
        if not self._staging.is_cold(nbytes):
            return
        nbytes = nbytes if certain else min(nbytes, free_memory() // 4)
        with self._changed:
            if self._preparing is not None or self._closed or not self._staging.is_cold(nbytes):
                return
            with contextlib.suppress(MemoryError):  # reported when a checkpoint needs the memory
                self._staging.reserve(nbytes)
            self._preparing = threading.Thread(
                target=self._prepare_memory, args=(nbytes,), name="rearview-memory", daemon=True
            )
            self._preparing.start()

    def submit(
        self, snapshot: Snapshot, *, wait: bool = False, hints: CopyHints = NO_HINTS
    ) -> bool:
        """Copy the captured state `snapshot`; return True if the copy will be saved (if not, `reason` says why).

        Tensors of accelerators are copied while the computation continues. With `wait`, block until there is room
        for the copy, instead of skipping the checkpoint.
        """
        began = time.perf_counter()
        try:
            accepted = self._submit(snapshot, wait, hints, began)
        except Exception as exc:
            self._changes.forget()
            self._failures.add(exc, snapshot.id)
            accepted = False
            self.reason = Reason.FAILED
        if not accepted:
            spent = time.perf_counter() - began
            with self._changed:
                self.costs = replace(
                    self.costs,
                    skipped=self.costs.skipped + 1,
                    blocking=self.costs.blocking + spent,
                )
        return accepted

    def training_resumes(self) -> float:
        """End page watches that would slow training down, and let the writer thread begin to write.

        Return the seconds that this call took.
        """
        began = time.perf_counter()
        self._changes.training_resumes()
        if self._recapture_expected:
            with self._changed:
                self._stop_waiting()
        return time.perf_counter() - began

    def refusal(self) -> Reason | None:
        """Return why `submit` without `wait` would refuse any checkpoint now, or None if it may accept one."""
        with self._changed:
            if self._preparing is not None:
                return Reason.PREPARING
            return None if self._has_slot() else Reason.BUSY

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every accepted checkpoint is durable or has failed; return False after `timeout` seconds."""
        with self._changed:
            self._stop_waiting()
            return self._changed.wait_for(lambda: not self._in_flight, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Wait for all saves, end the writer thread and free the memory; return False after `timeout` seconds."""
        drained = self.drain(timeout)
        with self._changed:
            self._changed.wait_for(lambda: self._preparing is None, timeout)
            self._closed = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if drained:
            if thread is not None:
                thread.join()
            self._staging.close()
            self._changes.close()
            self._device.close()
        return drained

    @property
    def background_seconds(self) -> float:
        """Seconds that background threads have worked so far."""
        since, worked = self._working_since, self._worked
        return worked if since is None else worked + time.perf_counter() - since

    @property
    def staging(self) -> int:
        """Bytes of staging memory that are in use or ready for use."""
        return self._staging.touched

    def _submit(self, snapshot: Snapshot, wait: bool, hints: CopyHints, began: float) -> bool:
        if self._closed:
            return self._refuse(Reason.CLOSED)
        if self._failures.pause:
            self._failures.pause -= 1
            return self._refuse(Reason.AFTER_FAILURES)
        if not self._get_slot(wait):
            return self._refuse(Reason.BUSY)
        if not self._memory_is_ready(wait):
            return self._refuse(Reason.PREPARING)
        selection = self._changes.select(snapshot.buffers)
        need = staging_size(selection.changed)
        if self._staging.is_cold(need) and not self._may_touch(snapshot, need, wait):
            return False
        lease = self._lease(snapshot, need, wait)
        if lease is None:
            return False
        try:
            late = hints.free_core and not wait
            staged = self._changes.copy(selection, lease.view, hints, late=late)
            fetch = self._device.fetch(snapshot.device) if snapshot.device else None
        except BaseException:
            with self._changed:
                self._staging.release(lease)
            raise
        spent = time.perf_counter() - began
        pending = PendingCheckpoint(
            snapshot.without_buffers(),
            selection.unchanged,
            staged,
            lease,
            fetch,
            spent,
            hints.recapture,
        )
        with self._changed:
            self._queue.append(pending)
            self._in_flight += 1
            self._recapture_expected = hints.recapture
            self._start()
            self._changed.notify_all()
        return True

    def _refuse(self, reason: Reason, warning: str = "") -> bool:
        """Set `reason`, show `warning` if it is not empty, and return False."""
        self.reason = reason
        if warning:
            self._failures.warn_once(reason.name, warning)
        return False

    def _get_slot(self, wait: bool) -> bool:
        """Return True if one more checkpoint may be in flight; with `wait`, first wait until one may."""
        with self._changed:
            if wait and not self._has_slot():
                self._stop_waiting()
                self._changed.wait_for(self._has_slot)
            return self._has_slot()

    def _has_slot(self) -> bool:
        # one more than memory allows: the next state may mostly equal the one in flight and need few bytes
        slots = min(self._staging.depth + 1, MOST_IN_FLIGHT)
        return self._in_flight < slots and not self._device.busy

    def _memory_is_ready(self, wait: bool) -> bool:
        """Return True if no memory is being prepared; with `wait`, first wait until the preparation has ended."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._preparing is None)
            return self._preparing is None

    def _stop_waiting(self) -> None:
        """Let the writer thread begin now, because no further capture is expected before training resumes."""
        self._recapture_expected = False
        self._changed.notify_all()

    def _may_touch(self, snapshot: Snapshot, need: int, wait: bool) -> bool:
        """Return True if `need` bytes of staging memory, not all used before, may be used while training waits.

        Otherwise start to prepare the memory and return False. If the machine has too little memory left, warn and
        return False.
        """
        if self._staging.fits(need) and need - self._staging.touched > free_memory() // 2:
            return self._refuse(
                Reason.OVER_MEMORY,
                f"No checkpoint at {snapshot.point}: {need} changed bytes are more than half of the "
                "memory that this machine has left",
            )
        if wait or need <= self._prepared or not self._staging.fits(need):
            return True
        self.prepare(need, certain=True)
        return self._refuse(Reason.PREPARING)

    def _lease(self, snapshot: Snapshot, need: int, wait: bool) -> Lease | None:
        """Return a lease of `need` bytes of staging memory; if there is none, set `reason` and return None.

        With `wait`, wait for checkpoints in flight to release their memory.
        """
        while (lease := self._try_lease(need)) is None:
            if not self._staging.fits(need):
                self._refuse(
                    Reason.OVER_STAGING,
                    f"No checkpoint at {snapshot.point}: {need} changed bytes exceed the staging "
                    f"bound of {self._staging.bound}",
                )
                return None
            if not (wait and self._in_flight):
                self._refuse(Reason.BUSY)
                return None
            with self._changed:
                self._stop_waiting()
                self._changed.wait(1.0)
        return lease

    def _try_lease(self, need: int) -> Lease | None:
        with self._changed:
            lease = self._staging.take(need)
            if lease is None and self._in_flight == self._staging.depth:
                lease = self._staging.take_spare(need)
            return lease

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._work, name="rearview-writer", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                pending = self._queue.popleft()
                if pending.recapture:
                    self._changed.wait_for(lambda: not self._recapture_expected, RECAPTURE_WAIT)
            began = self._working_since = time.perf_counter()
            self._save(pending)
            self._worked += time.perf_counter() - began
            self._working_since = None

    def _prepare_memory(self, nbytes: int) -> None:
        began = self._working_since = time.perf_counter()
        try:
            with contextlib.suppress(MemoryError):
                self._staging.warm(nbytes)
        finally:
            self._preparation = (time.perf_counter() - began, time.thread_time())
            self._worked += self._preparation[0]
            self._working_since = None
            with self._changed:
                self._prepared, self._preparing = max(self._prepared, nbytes), None
                self._changed.notify_all()

    def _save(self, pending: PendingCheckpoint) -> None:
        """Store the checkpoint `pending`, report its costs or the failure, and release its memory."""
        began, cpu = time.perf_counter(), time.thread_time() - self._checkpoints.hashing
        checkpoint: Checkpoint | None = None
        skipped: Reason | None = None
        try:
            checkpoint = self._store(pending)
        except OvertakenError:
            skipped = Reason.OVERTAKEN
        except Exception as exc:
            self._changes.forget()
            self._failures.add(exc, pending.snapshot.id)
        copied = pending.staged.nbytes + (pending.fetch.nbytes if pending.fetch else 0)
        self._changes.release(pending.staged)
        if pending.fetch is not None:
            self._device.release(pending.fetch)
        used = time.thread_time() + self._checkpoints.hashing - cpu
        used += pending.staged.late.cpu if pending.staged.late is not None else 0.0
        preparation, self._preparation = self._preparation, (0.0, 0.0)
        costs = Costs(
            saved=int(checkpoint is not None),
            skipped=int(skipped is not None),
            failed=int(checkpoint is None and skipped is None),
            blocking=pending.blocking,
            background=time.perf_counter() - began + preparation[0],
            cpu=used + preparation[1],
            logical=checkpoint.nbytes if checkpoint else 0,
            copied=copied,
            stored=checkpoint.stored if checkpoint else 0,
        )
        if checkpoint is not None:
            self._failures.clear()
        self._notify(pending.snapshot, costs, skipped)
        self._finish(pending.lease, costs)

    def _store(self, pending: PendingCheckpoint) -> Checkpoint:
        """Wait for copies that are not complete, write all as a checkpoint, and return the checkpoint."""
        if pending.fetch is not None:
            pending.staged.views.update(pending.fetch.wait())
        self._changes.complete(pending.staged)
        parts = self._changes.parts(pending.staged, pending.unchanged)
        parts.append(Part(SKELETON, pending.snapshot.skeleton))
        checkpoint = self._checkpoints.save(pending.snapshot, parts)
        self._changes.remember_saved(pending.staged, checkpoint.parts)
        return checkpoint

    def _notify(self, snapshot: Snapshot, costs: Costs, skipped: Reason | None) -> None:
        try:
            if self._on_end is not None:
                self._on_end(snapshot.seq, costs, skipped)
            if self.on_saved is not None and costs.saved:
                self.on_saved()
        except Exception as exc:
            self._failures.add(exc, snapshot.id)

    def _finish(self, lease: Lease, costs: Costs) -> None:
        with self._changed:
            self.costs = self.costs + costs
            if not lease.spare:
                self._recent_needs.append(lease.end - lease.start)
            self._staging.release(lease)
            self._in_flight -= 1
            if not self._in_flight and len(self._recent_needs) == self._recent_needs.maxlen:
                # the first saves also copied buffers that never change: later saves need less memory
                self._staging.trim(max(self._recent_needs))
            self._changed.notify_all()

    def abandon(self) -> None:
        """Drop all saves under way; called in a forked child, because the writer thread exists only in the parent."""
        self._closed = True
        self._in_flight = 0
        self._thread = self._preparing = None
        self._queue = deque()
        self._changed = threading.Condition()
        self._staging.forget()
        self._changes.forget()


class RemoteCopy:
    """Calls `push`, which copies the run to its remote, on a background thread after each save.

    Calls never overlap: saves that end during a call are pushed together by the next call. `share` limits the
    processor time of pushing to this fraction of the time that passes. `warn` is called for the first of several
    failures in a row; the next save calls `push` again.
    """

    def __init__(
        self, push: Callable[[], object], *, share: float, warn: Callable[[str], None]
    ) -> None:
        self._push, self._share, self._warn = push, max(share, 0.01), warn
        self._requested, self._closed = threading.Event(), threading.Event()
        self._pushing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failing = False
        abandon_in_child(self)

    def saved(self) -> None:
        """Request a push on the background thread, because a new checkpoint is durable."""
        self._requested.set()
        if self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._work, name="rearview-remote", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Push a last time, on the calling thread; raise what `push` raises."""
        self._closed.set()
        self._requested.set()
        with self._pushing:
            self._push()

    def abandon(self) -> None:
        """Never push from now on; called in a forked child, because the parent pushes the run."""
        self._closed.set()
        self._thread = None

    def _work(self) -> None:
        lower_priority()
        while True:
            self._requested.wait()
            self._requested.clear()
            began = time.thread_time()
            with self._pushing:
                if self._closed.is_set():
                    return
                try:
                    self._push()
                    self._failing = False
                except Exception as exc:
                    if not self._failing:
                        self._failing = True
                        self._warn(
                            f"The last checkpoints are not at the remote: {exc} The next save tries again."
                        )
            if self._closed.wait((time.thread_time() - began) / self._share):
                return


def lower_priority() -> None:
    """Lower the priority of the calling thread, so that training gets scarce cores first.

    On Linux, each thread has its own priority.
    """
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, nice + NICENESS))


class OwnsThreads(Protocol):
    """An object whose background threads do not exist in a forked child."""

    def abandon(self) -> None:
        """Drop the threads, locks and memory that belong to the parent; called in the forked child."""


def abandon_in_child(owner: OwnsThreads) -> None:
    """Register `owner`: in every child process that is forked while `owner` exists, `owner.abandon()` is called."""
    reference = weakref.ref(owner)

    def after_fork() -> None:
        alive = reference()
        if alive is not None:
            alive.abandon()

    os.register_at_fork(after_in_child=after_fork)
