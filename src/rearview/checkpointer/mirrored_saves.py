"""All saves of one job, in the local folder and mirrored to a remote.

`Archive` numbers the saves and finds the newest intact save. `Mirror` sends saves to a remote and fetches saves
from the remote; a save is complete there once its manifest has arrived. `BackgroundTasks` runs saves and
transfers in a thread.
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
    KeepRule,
    Save,
    SaveFolder,
    counter_of,
    file_intact,
)
from rearview.durable_files import publish
from rearview.errors import DamagedError
from rearview.remote.base import HIDDEN, Remote


class BackgroundTasks:
    """Runs tasks in a thread, one after the other; at most one task waits for the running task to end."""

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
        """Run `task` once the running task has ended; drop the task that was queued before `task`, if any."""
        with self._lock:
            self._next = task
            if self._thread is None:
                # not a daemon thread, so that Python exits only after a running save is complete
                self._thread = threading.Thread(target=self._run, name=self.name)
                self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no task runs or is queued, at most `seconds`; return True if no task runs or is queued."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        return not self.busy

    def check(self) -> None:
        """Raise the error of the last task that failed since the last call of `check`, if any failed."""
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
        """Ids of the complete saves at the remote that this process has sent there or fetched from there."""
        self._manifests: dict[str, Save] = {}
        self._transfer_lock = threading.RLock()

    def push(self, folder: SaveFolder, save: Save) -> None:
        """Send `save` to the remote if this process has not: first its files, each verified, then its manifest."""
        with self._transfer_lock:
            if save.id in self.pushed:
                return
            for name in (*(file.name for file in save.files), MANIFEST):
                self.remote.put(folder.folder / save.id / name, self._key(save.id, name))
            self.pushed.add(save.id)
            self._manifests[save.id] = save

    def ids(self) -> tuple[str, ...]:
        """Return the ids of the complete saves at the remote, the highest counter first."""
        return tuple(
            save_id for save_id, names in self._files_by_save().items() if MANIFEST in names
        )

    def last_counter(self) -> int:
        """Return the highest counter of all saves at the remote, complete or not; 0 if there are none."""
        return max((counter_of(save_id) for save_id in self._files_by_save()), default=0)

    def manifest(self, save_id: str) -> Save:
        """Return the save that the manifest of `save_id` at the remote describes; raise if it cannot be parsed."""
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
        """Fetch save `save_id` from the remote into `folder` and return the save.

        Files that an interrupted fetch left intact are not fetched again. Raise if a file is damaged.
        """
        save = self.manifest(save_id)
        staging = folder.folder / f"{HIDDEN}fetch-{save_id}"
        staging.mkdir(parents=True, exist_ok=True)
        for file in save.files:
            path = staging / file.name
            if file_intact(path, file):
                continue
            self.remote.get(self._key(save_id, file.name), path)
            if not file_intact(path, file):
                shutil.rmtree(staging, ignore_errors=True)
                raise DamagedError(
                    f"{file.name} of save {save_id} at {self.remote} is damaged (it should have the "
                    f"checksum {file.checksum}). An older save is used if there is one.",
                    slug="save-damaged",
                )
        publish(staging / MANIFEST, save.to_json())
        folder.publish(staging, save)
        self.pushed.add(save_id)
        return save

    def prune(self, keep: KeepRule) -> None:
        """Remove from the remote the complete saves that `keep` does not choose.

        Incomplete saves that are older than the newest complete save are removed too.
        """
        with self._transfer_lock:
            files_by_save = self._files_by_save()
            complete_ids = [
                save_id for save_id, names in files_by_save.items() if MANIFEST in names
            ]
            if not complete_ids:
                return
            saves = []
            for save_id in complete_ids:
                with contextlib.suppress(DamagedError):
                    saves.append(self.manifest(save_id))
            kept_ids = keep.choose(saves)
            newest = max(counter_of(save_id) for save_id in complete_ids)
            for save_id, names in files_by_save.items():
                # a save without manifest that is newer than all complete saves may be in transfer: keep it
                if save_id in kept_ids or (MANIFEST not in names and counter_of(save_id) >= newest):
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
    """Warning that a save or transfer failed, or that a save is damaged; the program continues."""


class Archive:
    """All saves of one job: the local folder, its mirror if there is one, and the rule that says which to keep."""

    def __init__(
        self, folder: SaveFolder, mirror: Mirror | None, keep: KeepRule, foreign_key: str | None
    ) -> None:
        self.folder, self.mirror, self.keep = folder, mirror, keep
        self._foreign_key = foreign_key
        self._counter: int | None = None
        self._mirror_counted = mirror is None
        self._lock = threading.Lock()
        self._sending_id: str | None = None
        """Id of the save in transfer, or None. `prune` does not remove the local copy of this save."""

    def write(
        self, write: Callable[[Path], object], *, counter: int, step: int, metric: float | None
    ) -> Save:
        """Make a local save with the function `write`, link the checkpoint file to the save, return the save."""
        save = self.folder.write(write, counter=counter, step=step, metric=metric)
        self.folder.show(save)
        return save

    def deliver(self, save: Save) -> None:
        """Send `save` to the mirror, if there is one; then remove the saves that the keep rule does not choose."""
        if self.mirror is not None:
            self.mirror.push(self.folder, save)
            self.mirror.prune(self.keep)
        self.prune()

    def deliver_kept(self) -> None:
        """Send the newest save, and the saves with the best metrics, to the mirror if they are not there yet.

        Other threads may write and prune saves during a transfer, so the next save to send is chosen after each
        transfer.
        """
        if self.mirror is None:
            return
        while True:
            with self._lock:
                saves = self.folder.saves()
                kept_ids = self.keep.choose(saves)
                unsent_saves = [save for save in saves if save.id in kept_ids]
                unsent_saves = [save for save in unsent_saves if save.id not in self.mirror.pushed]
                # a save that is neither the newest nor among the best was overtaken while waiting: do not send it
                best = self.keep.choose_best(saves)
                save = next(
                    (
                        candidate
                        for candidate in unsent_saves
                        if candidate is saves[0] or candidate.id in best
                    ),
                    None,
                )
                self._sending_id = None if save is None else save.id
            if save is None:
                return
            try:
                self.mirror.push(self.folder, save)
                self.mirror.prune(self.keep)
            finally:
                self._sending_id = None

    def prune(self) -> None:
        """Remove the local saves that the keep rule does not choose, except a save in transfer."""
        with self._lock:
            saves = self.folder.saves()
            kept_ids = {*self.keep.choose(saves), self._sending_id}
            self.folder.remove(save.id for save in saves if save.id not in kept_ids)
            self.folder.sweep()

    def push_newest(self) -> None:
        """Send the newest save to the mirror if it is not there yet."""
        saves = self.folder.saves()
        if self.mirror is not None and saves:
            self.mirror.push(self.folder, saves[0])

    @property
    def delivered(self) -> bool:
        """Whether any transfer has succeeded in this process."""
        return self.mirror is not None and bool(self.mirror.pushed)

    def next_counter(self) -> int:
        """Return the counter for a new save, higher than the counters of all local and mirrored saves.

        Raise `RemoteError` if the mirror cannot be reached. The property `counter` is then higher than the
        counters of the local saves, and the next call tries to reach the mirror again.
        """
        self._counter = (self.folder.last_counter() if self._counter is None else self._counter) + 1
        if not self._mirror_counted and self.mirror is not None:
            self._counter = max(self._counter, self.mirror.last_counter() + 1)
            self._mirror_counted = True
        return self._counter

    @property
    def counter(self) -> int:
        """The counter that `next_counter` chose last, or 0 before its first call."""
        return self._counter or 0

    def newest(self) -> Path | None:
        """Return a path to the newest intact save, fetched from the mirror if needed.

        Return None if there is no save. Raise `DamagedError` if saves exist and all are damaged.
        """
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
        return self._foreign_file()

    @property
    def exists(self) -> bool:
        """Whether a save exists, local or at the mirror; it may be damaged."""
        if self.folder.saves() or self.folder.foreign_file() is not None:
            return True
        if self.mirror is None:
            return False
        return bool(self.mirror.ids()) or self._mirror_has_foreign_file()

    def clean_up(self) -> None:
        """Remove all local saves, but only if the newest is in `Mirror.pushed` (this process sent or fetched it)."""
        saves = self.folder.saves()
        if self.mirror is not None and saves and saves[0].id in self.mirror.pushed:
            self.folder.clear()

    def _order(self, save_id: str, local_saves: dict[str, Save]) -> tuple[int, float]:
        if save_id in local_saves:
            return local_saves[save_id].order
        try:
            assert self.mirror is not None
            return self.mirror.manifest(save_id).order
        except DamagedError:
            return (counter_of(save_id), 0.0)

    def _mirror_has_foreign_file(self) -> bool:
        if self.mirror is None or self._foreign_key is None:
            return False
        return self.mirror.remote.stat(self._foreign_key) is not None

    def _foreign_file(self) -> Path | None:
        """Return the path of a checkpoint file without manifest, which another program wrote, or None.

        If the file exists only at the remote, it is fetched.
        """
        path = self.folder.foreign_file()
        if path is None and self.mirror is not None and self._mirror_has_foreign_file():
            assert self._foreign_key is not None
            self.mirror.remote.get(self._foreign_key, self.folder.file)
            return self.folder.file
        return path
