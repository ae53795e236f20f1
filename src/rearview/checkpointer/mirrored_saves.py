"""All saves of one job, in the local folder and mirrored to a remote.

`Archive` numbers the saves and finds the newest intact one. `Mirror` sends saves to a remote and fetches them; a
manifest at the remote means that the save is complete. `BackgroundTasks` runs saves and transfers in a thread.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from rearview.checkpointer.save_folder import (
    ID,
    MANIFEST,
    Keep,
    Save,
    SaveFolder,
    counter_of,
    file_intact,
)
from rearview.durable_files import publish
from rearview.errors import DamagedError
from rearview.remote.base import HIDDEN, Remote


class BackgroundTasks:
    """Runs tasks in a thread, one after the other; at most one is queued."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread: threading.Thread | None = None
        self._next: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a task is running or queued."""
        return self._thread is not None

    def submit(self, task: Callable[[], None]) -> None:
        """Run `task` after the current one; it replaces a task that is queued."""
        with self._lock:
            self._next = task
            if self._thread is None:
                # not a daemon: a program that ends waits for the save it has started
                self._thread = threading.Thread(target=self._run, name=self.name)
                self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no task is left, or until the time is up; return True if no task is left."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        return not self.busy

    def check(self) -> None:
        """Raise the error of a task since the last check, if any."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._lock:
                task, self._next = self._next, None
                if task is None:
                    self._thread = None
                    return
            try:
                task()
            except BaseException as exc:
                self._error = exc


class Mirror:
    """The copy of a save folder at `remote`, under `prefix`."""

    def __init__(self, remote: Remote, prefix: str) -> None:
        self.remote, self.prefix = remote, prefix.strip("/")
        self.pushed: set[str] = set()
        """Saves that this process knows to be complete at the remote."""
        self._manifests: dict[str, Save] = {}
        self._transfer_lock = threading.RLock()

    def push(self, folder: SaveFolder, save: Save) -> None:
        """Send `save`: first its files, each compared at the remote, then its manifest."""
        with self._transfer_lock:
            if save.id in self.pushed:
                return
            for name in (*(file.name for file in save.files), MANIFEST):
                self.remote.put(folder.folder / save.id / name, self._key(save.id, name))
            self.pushed.add(save.id)
            self._manifests[save.id] = save

    def ids(self) -> tuple[str, ...]:
        """Return the ids of the complete saves at the remote, the highest count first."""
        return tuple(
            save_id for save_id, names in self._files_by_save().items() if MANIFEST in names
        )

    def last_counter(self) -> int:
        """Return the highest count at the remote, also of incomplete saves."""
        return max((counter_of(save_id) for save_id in self._files_by_save()), default=0)

    def manifest(self, save_id: str) -> Save:
        """Return the save that the manifest of `save_id` describes."""
        if save_id not in self._manifests:
            with tempfile.TemporaryDirectory(prefix=HIDDEN) as folder:
                path = Path(folder, MANIFEST)
                self.remote.get(self._key(save_id, MANIFEST), path)
                save = Save.from_json(path.read_bytes())
            if save is None or save.id != save_id:
                raise DamagedError(
                    f"The manifest of save {save_id} at {self.remote} cannot be read. An older "
                    "save is used if there is one; delete this save.",
                    slug="save-damaged",
                )
            self._manifests[save_id] = save
        return self._manifests[save_id]

    def fetch(self, save_id: str, folder: SaveFolder) -> Save:
        """Fetch a save into `folder` and return it; continue an interrupted fetch."""
        save = self.manifest(save_id)
        staged = folder.folder / f"{HIDDEN}fetch-{save_id}"
        staged.mkdir(parents=True, exist_ok=True)
        for file in save.files:
            path = staged / file.name
            if file_intact(path, file):
                continue
            self.remote.get(self._key(save_id, file.name), path)
            if not file_intact(path, file):
                shutil.rmtree(staged, ignore_errors=True)
                raise DamagedError(
                    f"{file.name} of save {save_id} at {self.remote} is damaged (it should have the "
                    f"checksum {file.checksum}). An older save is used if there is one.",
                    slug="save-damaged",
                )
        publish(staged / MANIFEST, save.to_json())
        folder.publish(staged, save)
        self.pushed.add(save_id)
        return save

    def prune(self, keep: Keep) -> None:
        """Remove saves that need not be kept at the remote; the newest complete save always stays."""
        with self._transfer_lock:
            files_by_save = self._files_by_save()
            whole = [save_id for save_id, names in files_by_save.items() if MANIFEST in names]
            if not whole:
                return
            saves = []
            for save_id in whole:
                with contextlib.suppress(DamagedError):
                    saves.append(self.manifest(save_id))
            kept = keep.choose(saves)
            newest = max(counter_of(save_id) for save_id in whole)
            for save_id, names in files_by_save.items():
                # a save without manifest that is not older than the newest may be in transfer
                if save_id in kept or (MANIFEST not in names and counter_of(save_id) >= newest):
                    continue
                for name in sorted(names, key=lambda name: name != MANIFEST):
                    self.remote.delete(self._key(save_id, name))
                sweep = getattr(self.remote, "sweep", None)
                if sweep is not None:
                    sweep(f"{self.prefix}/{save_id}/")
                self.pushed.discard(save_id)

    def _key(self, save_id: str, name: str) -> str:
        return f"{self.prefix}/{save_id}/{name}"

    def _files_by_save(self) -> dict[str, set[str]]:
        files_by_save: dict[str, set[str]] = defaultdict(set)
        for key in self.remote.list(f"{self.prefix}/"):
            save_id, _, name = key.removeprefix(f"{self.prefix}/").partition("/")
            if ID.fullmatch(save_id) and name:
                files_by_save[save_id].add(name)
        return dict(
            sorted(files_by_save.items(), key=lambda item: counter_of(item[0]), reverse=True)
        )


class CheckpointerWarning(UserWarning):
    """A save or transfer failed, and the program continues."""


class Archive:
    """The save folder, its mirror if there is one, and the rule which saves to keep."""

    def __init__(
        self, folder: SaveFolder, mirror: Mirror | None, keep: Keep, foreign_key: str | None
    ) -> None:
        self.folder, self.mirror, self.keep = folder, mirror, keep
        self._foreign_key = foreign_key
        self._counter: int | None = None
        self._counted_far = mirror is None
        self._lock = threading.Lock()
        self._in_transfer: str | None = None
        """Save in transfer, which must stay until it is at the remote."""

    def write(
        self, write: Callable[[Path], object], *, counter: int, step: int, metric: float | None
    ) -> Save:
        """Make a save with `write`, show it at the checkpoint's own path, and return it."""
        save = self.folder.write(write, counter=counter, step=step, metric=metric)
        self.folder.show(save)
        return save

    def deliver(self, save: Save) -> None:
        """Send `save` to the mirror, then remove saves that need not be kept."""
        if self.mirror is not None:
            self.mirror.push(self.folder, save)
            self.mirror.prune(self.keep)
        self.prune()

    def deliver_kept(self) -> None:
        """Send the kept saves that the mirror does not have, the newest first.

        Saves may be written and pruned while this sends, so it chooses each save just before sending it.
        """
        if self.mirror is None:
            return
        while True:
            with self._lock:
                saves = self.folder.saves()
                kept = self.keep.choose(saves)
                waiting = [save for save in saves if save.id in kept]
                waiting = [save for save in waiting if save.id not in self.mirror.pushed]
                # a save that is neither the newest nor among the best is not sent any more
                best = self.keep.choose_best(saves)
                save = next(
                    (
                        candidate
                        for candidate in waiting
                        if candidate is saves[0] or candidate.id in best
                    ),
                    None,
                )
                self._in_transfer = None if save is None else save.id
            if save is None:
                return
            try:
                self.mirror.push(self.folder, save)
                self.mirror.prune(self.keep)
            finally:
                self._in_transfer = None

    def prune(self) -> None:
        """Remove the local saves that need not be kept, except one in transfer."""
        with self._lock:
            saves = self.folder.saves()
            kept = {*self.keep.choose(saves), self._in_transfer}
            self.folder.remove(save.id for save in saves if save.id not in kept)
            self.folder.sweep()

    def push_newest(self) -> None:
        """Send the newest save, unless the mirror has it."""
        saves = self.folder.saves()
        if self.mirror is not None and saves:
            self.mirror.push(self.folder, saves[0])

    @property
    def delivered(self) -> bool:
        """Whether any transfer has succeeded in this process."""
        return self.mirror is not None and bool(self.mirror.pushed)

    def next_counter(self) -> int:
        """Return a count above all others, so that the save is the newest here and at the remote.

        Raises `RemoteError` if the mirror cannot be reached; the count then continues from the local
        saves, and the next call asks again.
        """
        self._counter = (self.folder.last_counter() if self._counter is None else self._counter) + 1
        if not self._counted_far and self.mirror is not None:
            self._counter = max(self._counter, self.mirror.last_counter() + 1)
            self._counted_far = True
        return self._counter

    @property
    def counter(self) -> int:
        """The last count."""
        return self._counter or 0

    def newest(self) -> Path | None:
        """Return the path of the newest intact save, fetched from the mirror if needed."""
        local = {save.id: save for save in self.folder.saves()}
        remote_ids = self.mirror.ids() if self.mirror is not None else ()
        damaged = []
        for save_id in sorted(
            {*local, *remote_ids}, key=lambda candidate: self._order(candidate, local), reverse=True
        ):
            if save_id in local and self.folder.intact(local[save_id]):
                return self.folder.show(local[save_id])
            reason = f"Save {save_id} in {self.folder.folder} is damaged."
            if save_id in remote_ids and self.mirror is not None:
                try:
                    return self.folder.show(self.mirror.fetch(save_id, self.folder))
                except DamagedError as exc:
                    reason = str(exc)
            warnings.warn(f"{reason} Using the save before it.", CheckpointerWarning, stacklevel=4)
            damaged.append(save_id)
        if damaged:
            raise DamagedError(
                f"None of the {len(damaged)} saves of {self.folder.file.name} is intact "
                f"({', '.join(damaged[:3])}). Bring one back from a backup, or remove "
                f"{self.folder.folder} (and the copies at the target) to start from the beginning.",
                slug="save-damaged",
            )
        return self._foreign()

    @property
    def exists(self) -> bool:
        """Whether there is a save for `newest`."""
        if self.folder.saves() or self.folder.foreign() is not None:
            return True
        if self.mirror is None:
            return False
        return bool(self.mirror.ids()) or self._foreign_there()

    def clean_up(self) -> None:
        """Remove the local saves, if the mirror is known to hold the newest of them."""
        saves = self.folder.saves()
        if self.mirror is not None and saves and saves[0].id in self.mirror.pushed:
            self.folder.clear()

    def _order(self, save_id: str, here: dict[str, Save]) -> tuple[int, float]:
        if save_id in here:
            return here[save_id].order
        try:
            assert self.mirror is not None
            return self.mirror.manifest(save_id).order
        except DamagedError:
            return (counter_of(save_id), 0.0)

    def _foreign_there(self) -> bool:
        if self.mirror is None or self._foreign_key is None:
            return False
        return self.mirror.remote.stat(self._foreign_key) is not None

    def _foreign(self) -> Path | None:
        """Return a checkpoint without manifest that another program wrote, local or at the remote."""
        path = self.folder.foreign()
        if path is None and self.mirror is not None and self._foreign_there():
            assert self._foreign_key is not None
            self.mirror.remote.get(self._foreign_key, self.folder.file)
            return self.folder.file
        return path
