"""The write path: training pays for one copy of the changed bytes, a thread does the rest.

What threads beside training keep to: they stand back behind it, and are not there after a fork.

One checkpoint on its way from the training thread to the disk.

Saves that fail: said once for each kind, and tried less and less often while it lasts.

The write path: training pays for one copy of the changed bytes, a thread does the rest.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rearview.config import Settings
from rearview.errors import RearviewError
from rearview.model import Checkpoint, CheckpointMeta, Edge, ObjectRef, Part, Point
from rearview.runtime.saving.changes import UNKNOWN, Changes, CopyHints, room
from rearview.runtime.saving.late_copy import OvertakenError
from rearview.runtime.saving.overhead import Costs
from rearview.runtime.saving.staging import DEEPEST, Device, Fetch, Lease, Staged, Staging, free
from rearview.store.checkpoints.checkpoints import Checkpoints

NICE = 10
"""How far background threads stand back behind training when cores are short."""


PREFIX = "rearview-"
"""How the name of every background thread begins."""


def hide_background_threads() -> None:
    """Leave our threads out of `threading.enumerate()` and `active_count()`.

    Programs wait for their threads by these numbers; ours would make them wait for ever.
    """
    listed = threading.enumerate

    @functools.wraps(listed)
    def enumerate() -> list[threading.Thread]:  # noqa: A001 - the name that a program sees
        return [thread for thread in listed() if not thread.name.startswith(PREFIX)]

    @functools.wraps(threading.active_count)
    def active_count() -> int:
        return len(enumerate())

    threading.enumerate, threading.active_count = enumerate, active_count


class Abandons(Protocol):
    """Something whose threads a forked child does not have."""

    def abandon(self) -> None:
        """Let go of everything, in a child."""


def stand_back() -> None:
    """Let training go first when cores are short; a thread has its own priority on Linux."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        now = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(19, now + NICE))


def abandon_in_child(owner: Abandons) -> None:
    """Have `owner` let go in every child that is forked while it lives."""
    known = weakref.ref(owner)

    def after() -> None:
        here = known()
        if here is not None:
            here.abandon()

    os.register_at_fork(after_in_child=after)


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A state as it was taken, and what its copies hold."""

    run: str
    seq: int
    point: Point
    edge: Edge
    meta: CheckpointMeta
    complete: bool
    missing: tuple[str, ...]
    skeleton: bytes
    same: dict[str, ObjectRef]
    staged: Staged
    lease: Lease
    fetch: Fetch | None
    blocking: float
    soon: bool
    """The state is about to be looked at again."""


_LONGEST = 64
"""Boundaries that are let pass at most."""


class Setbacks:
    """What went wrong with saving, of late."""

    def __init__(self, warn: Callable[[str], None] | None) -> None:
        self.count = 0
        """Saves that failed since the last that did not."""
        self.pause = 0
        """Boundaries that are still to be let pass."""
        self._warn = warn or logging.getLogger("rearview").warning
        self._warned: set[str] = set()

    def note(self, exc: Exception, name: str) -> None:
        """Take note of a save that failed."""
        self.count += 1
        self.pause = min(_LONGEST, 2 ** (self.count - 1)) - 1
        kind = exc.slug if isinstance(exc, RearviewError) else type(exc).__name__
        self.say(kind, f"Checkpoint {name} was not saved; training goes on. {exc}")

    def over(self) -> None:
        """Take note of a save that went well."""
        self.count = 0
        self._warned.clear()

    def say(self, kind: str, message: str) -> None:
        """Warn of something, once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            try:
                self._warn(message)
            except Exception:
                logging.getLogger("rearview").exception("the warning itself failed: %s", message)


SKELETON = "skeleton"
"""Key of the part that holds everything but the buffers."""

_BUSY = "busy: the previous checkpoint is still being written"
_PREPARING = "preparing: memory for the copy is still being made ready"
SOON = 0.2
"""Seconds that writing waits at most for the next look at the state, with which it would compete
for the interpreter."""


class Writer:
    """Saves checkpoints beside the training; never raises into it, never makes it wait for a disk.

    `warn` is called once for each kind of failure; `ended` after each checkpoint that was taken, with
    its number, what it cost, and why it was skipped after all, if it was; it may also have failed.
    Both are called on the background thread.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: Settings,
        *,
        warn: Callable[[str], None] | None = None,
        ended: Callable[[int, Costs, str], None] | None = None,
    ) -> None:
        self.costs = Costs()
        self.reason = ""
        """Why the last `submit` returned False."""
        self.saved: Callable[[], None] | None = None
        """Called on the background thread after each checkpoint that is durable."""
        self._checkpoints = checkpoints
        self._ended = ended
        self._staging = Staging(settings.staging)
        self._changes = Changes()
        self._device = Device()
        self._jobs: deque[PendingCheckpoint] = deque()
        self._changed = threading.Condition()
        self._busy = 0
        self._warming: threading.Thread | None = None
        self._made = (0.0, 0.0)
        """Seconds, and processor seconds, that making memory ready took since the last save."""
        self._worked = 0.0
        """Seconds of background work that is over."""
        self._since: float | None = None  # that which goes on
        self._expected = False
        """The state will be looked at again, before `settle`."""
        self._tried = 0
        """Bytes that were made ready, or could not be: the system may not offer that."""
        self._needs: deque[int] = deque(maxlen=4)
        self._closed = False
        self._setbacks = Setbacks(warn)
        self._thread: threading.Thread | None = None
        abandon_in_child(self)

    def prepare(self, nbytes: int, *, surely: bool = False) -> None:
        """Say that `nbytes` of changes are expected, so that memory for them is made ready.

        Unless they come `surely`, never more than a quarter of what the machine has left. A thread
        of its own does it, at the priority of training: checkpoints are skipped until it is done.
        """
        nbytes = nbytes if surely else min(nbytes, free() // 4)
        with self._changed:
            if self._warming is not None or self._closed or not self._staging.cold(nbytes):
                return
            with contextlib.suppress(MemoryError):  # said when a checkpoint needs it
                self._staging.reserve(nbytes)
            self._warming = threading.Thread(
                target=self._make_ready, args=(nbytes,), name="rearview-memory", daemon=True
            )
            self._warming.start()

    def submit(
        self,
        run: str,
        seq: int,
        point: Point,
        edge: Edge,
        skeleton: bytes,
        buffers: Mapping[str, Any],
        meta: CheckpointMeta | None = None,
        complete: bool = True,
        missing: Sequence[str] = (),
        *,
        device: Mapping[str, Any] | None = None,
        wait: bool = False,
        outlook: CopyHints = UNKNOWN,
    ) -> bool:
        """Take the state as it is now; say whether it will be saved (`reason` says why not).

        `buffers` are of the host; `device` are tensors of accelerators, which are fetched beside
        the computation. With `wait` it blocks until there is room instead of skipping.
        """
        began = time.perf_counter()
        try:
            took = self._submit(
                PendingCheckpoint(
                    *(
                        run,
                        seq,
                        point,
                        edge,
                        meta or CheckpointMeta(),
                        complete,
                        tuple(missing),
                        skeleton,
                        {},
                    ),
                    staged=Staged(),
                    lease=Lease(0, 0, memoryview(b"")),
                    fetch=None,
                    blocking=began,
                    soon=outlook.soon,
                ),
                buffers,
                device or {},
                wait,
                outlook,
            )
        except Exception as exc:
            self._changes.forget()
            self._setbacks.note(exc, f"{run}/{seq}")
            took = False
            self.reason = f"failed: {exc}"
        if not took:
            spent = time.perf_counter() - began
            with self._changed:
                self.costs = replace(
                    self.costs,
                    skipped=self.costs.skipped + 1,
                    blocking=self.costs.blocking + spent,
                )
        return took

    def settle(self) -> float:
        """Say that the program goes on to change its state; return the seconds that takes."""
        began = time.perf_counter()
        self._changes.settle()
        if self._expected:
            with self._changed:
                self._hurry()
        return time.perf_counter() - began

    def refusal(self) -> str:
        """Return why a checkpoint that may not wait would be refused now, whatever is in it."""
        with self._changed:
            if self._warming is not None:
                return _PREPARING
            return "" if self._free() else _BUSY

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything submitted is durable (or has failed); False when out of time."""
        with self._changed:
            self._hurry()
            return self._changed.wait_for(lambda: not self._busy, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Drain, end the thread and give the memory back; False when out of time."""
        done = self.drain(timeout)
        with self._changed:
            self._changed.wait_for(lambda: self._warming is None, timeout)
            self._closed = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if done:
            if thread is not None:
                thread.join()
            self._staging.close()
            self._changes.close()
            self._device.close()
        return done

    @property
    def written(self) -> float:
        """Seconds that background work has gone on so far."""
        since, worked = self._since, self._worked
        return worked if since is None else worked + time.perf_counter() - since

    @property
    def staging(self) -> int:
        """Bytes of staging memory in use or kept warm."""
        return self._staging.touched

    def _submit(
        self,
        job: PendingCheckpoint,
        buffers: Mapping[str, Any],
        device: Mapping[str, Any],
        wait: bool,
        outlook: CopyHints,
    ) -> bool:
        if self._closed:
            self.reason = "closed: this process no longer saves"
            return False
        if self._setbacks.pause:
            self._setbacks.pause -= 1
            self.reason = f"waiting: the last {self._setbacks.count} saves failed"
            return False
        if not self._room(wait):
            self.reason = _BUSY
            return False
        if not self._ready(wait):
            self.reason = _PREPARING
            return False
        same, lean, changed = self._changes.split(buffers)
        need = room(changed)
        if self._staging.cold(need) and not self._can_have(job, need, wait):
            return False
        while (lease := self._take(need)) is None:
            if not self._staging.fits(need):
                self.reason = (
                    f"too large: {need} changed bytes exceed the staging bound of "
                    f"{self._staging.bound}"
                )
                self._setbacks.say("staging", f"No checkpoint at {job.point}. {self.reason}")
                return False
            if not (wait and self._busy):
                self.reason = _BUSY
                return False
            with self._changed:
                self._hurry()
                self._changed.wait(1.0)
        try:
            late = outlook.roomy and not wait
            staged = self._changes.copy(changed, lease.view, lean, outlook, late=late)
            fetch = self._device.fetch(device) if device else None
        except BaseException:
            with self._changed:
                self._staging.release(lease)
            raise
        spent = time.perf_counter() - job.blocking
        with self._changed:
            self._jobs.append(
                replace(job, same=same, staged=staged, lease=lease, fetch=fetch, blocking=spent)
            )
            self._busy += 1
            self._expected = job.soon
            self._start()
            self._changed.notify_all()
        return True

    def _room(self, wait: bool) -> bool:
        """Say, before anything is looked at, whether another checkpoint may have room."""
        with self._changed:
            if wait and not self._free():
                self._hurry()
                self._changed.wait_for(self._free)
            return self._free()

    def _ready(self, wait: bool) -> bool:
        """Return True if no memory is being made ready; with `wait`, wait until that is so."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._warming is None)
            return self._warming is None

    def _hurry(self) -> None:
        """Let the background thread begin at once with what it has."""
        self._expected = False
        self._changed.notify_all()

    def _free(self) -> bool:
        # one more than fits: it may hold little else than the one in flight does
        most = min(self._staging.depth + 1, DEEPEST)
        return self._busy < most and not self._device.busy

    def _can_have(self, job: PendingCheckpoint, need: int, wait: bool) -> bool:
        """Say whether memory that was never touched may be; else have it made ready."""
        if self._staging.fits(need) and need - self._staging.touched > free() // 2:
            self.reason = (
                f"too large: {need} changed bytes are more than half of the memory that this "
                "machine has left"
            )
            self._setbacks.say("memory", f"No checkpoint at {job.point}. {self.reason}")
            return False
        if wait or need <= self._tried or not self._staging.fits(need):
            return True
        self.prepare(need, surely=True)
        self.reason = _PREPARING
        return False

    def _take(self, need: int) -> Lease | None:
        with self._changed:
            lease = self._staging.take(need)
            if lease is None and self._busy == self._staging.depth:
                lease = self._staging.spare(need)
            return lease

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._work, name="rearview-writer", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        stand_back()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                if job.soon:
                    self._changed.wait_for(lambda: not self._expected, SOON)
            began = self._since = time.perf_counter()
            self._save(job)
            self._worked, self._since = self._worked + time.perf_counter() - began, None

    def _make_ready(self, warm: int) -> None:
        began = self._since = time.perf_counter()
        try:
            with contextlib.suppress(MemoryError):
                self._staging.warm(warm)
        finally:
            self._made = (time.perf_counter() - began, time.thread_time())
            self._worked, self._since = self._worked + self._made[0], None
            with self._changed:
                self._tried, self._warming = max(self._tried, warm), None
                self._changed.notify_all()

    def _save(self, job: PendingCheckpoint) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        hashing = self._checkpoints.hashing
        checkpoint: Checkpoint | None = None
        overtaken = ""
        try:
            if job.fetch is not None:
                job.staged.views.update(job.fetch.wait())
            self._changes.complete(job.staged)
            parts = self._changes.parts(job.staged, job.same)
            parts.append(Part(SKELETON, job.skeleton))
            checkpoint = self._checkpoints.save(
                job.run, job.seq, job.point, job.edge, parts, job.meta, job.complete, job.missing
            )
            self._changes.learn(job.staged, checkpoint.parts)
            del parts
        except OvertakenError as exc:
            overtaken = str(exc)
        except Exception as exc:
            self._changes.forget()
            self._setbacks.note(exc, f"{job.run}/{job.seq}")
        copied = job.staged.nbytes + (job.fetch.nbytes if job.fetch else 0)
        self._changes.landed(job.staged)
        if job.fetch is not None:
            self._device.release(job.fetch)
        used = time.thread_time() - cpu + self._checkpoints.hashing - hashing
        used += job.staged.late.cpu if job.staged.late is not None else 0.0
        made, self._made = self._made, (0.0, 0.0)
        spent = Costs(
            saved=int(checkpoint is not None),
            skipped=int(bool(overtaken)),
            failed=int(checkpoint is None and not overtaken),
            blocking=job.blocking,
            background=time.perf_counter() - began + made[0],
            cpu=used + made[1],
            logical=checkpoint.nbytes if checkpoint else 0,
            copied=copied,
            stored=checkpoint.stored if checkpoint else 0,
        )
        if checkpoint is not None:
            self._setbacks.over()
        self._notify(job, spent, overtaken)
        with self._changed:
            self.costs = self.costs + spent
            if not job.lease.spare:
                self._needs.append(job.lease.end - job.lease.start)
            self._staging.release(job.lease)
            self._busy -= 1
            if not self._busy and len(self._needs) == self._needs.maxlen:
                # what was needed once, before frozen buffers were known as such, is given back
                self._staging.trim(max(self._needs))
            self._changed.notify_all()

    def _notify(self, job: PendingCheckpoint, spent: Costs, skipped: str) -> None:
        try:
            if self._ended is not None:
                self._ended(job.seq, spent, skipped)
            if self.saved is not None and spent.saved:
                self.saved()
        except Exception as exc:
            self._setbacks.note(exc, f"{job.run}/{job.seq}")

    def abandon(self) -> None:
        """In a forked child: save nothing, hold nothing; the parent's thread is not here."""
        self._closed = True
        self._busy = 0
        self._thread = self._warming = None
        self._jobs = deque()
        self._changed = threading.Condition()
        self._staging.forget()
        self._changes.forget()
