"""All saves of one job, here and away: the next one's number, the newest intact one."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from rearview.errors import DamagedError
from rearview.runtime.saving.keep import Keep
from rearview.runtime.saving.mirror import Mirror
from rearview.runtime.saving.saves import Save, SaveFolder, counter_of


class CheckpointerWarning(UserWarning):
    """A save is not where it should be, and the program goes on."""


class Archive:
    """The save folder, its mirror if there is one, and the rule of what to keep."""

    def __init__(
        self, folder: SaveFolder, mirror: Mirror | None, keep: Keep, foreign_key: str | None
    ) -> None:
        self.folder, self.mirror, self.keep = folder, mirror, keep
        self._foreign_key = foreign_key
        self._counter: int | None = None
        self._counted_far = mirror is None
        self._lock = threading.Lock()
        self._carried: str | None = None
        """Save that is being brought away and must stay until it is there."""

    def write(
        self, write: Callable[[Path], object], *, counter: int, step: int, metric: float | None
    ) -> Save:
        """Return the new save, which the checkpoint's own path now holds."""
        save = self.folder.write(write, counter=counter, step=step, metric=metric)
        self.folder.show(save)
        return save

    def deliver(self, save: Save) -> None:
        """Bring `save` away, then let go of what need not be kept."""
        if self.mirror is not None:
            self.mirror.push(self.folder, save)
            self.mirror.prune(self.keep)
        self.prune()

    def deliver_kept(self) -> None:
        """Bring away what is kept here and not there yet, the newest save first.

        Saves may be written and pruned meanwhile; each save is chosen when its turn comes.
        """
        if self.mirror is None:
            return
        while True:
            with self._lock:
                saves = self.folder.saves()
                kept = self.keep.choose(saves)
                waiting = [save for save in saves if save.id in kept]
                waiting = [save for save in waiting if save.id not in self.mirror.pushed]
                # one that is neither the newest nor among the best is not worth the way any more
                best = self.keep.choose_best(saves)
                save = next((one for one in waiting if one is saves[0] or one.id in best), None)
                self._carried = None if save is None else save.id
            if save is None:
                return
            try:
                self.mirror.push(self.folder, save)
                self.mirror.prune(self.keep)
            finally:
                self._carried = None

    def prune(self) -> None:
        """Remove the saves here that need not be kept, but not one that is being brought away."""
        with self._lock:
            saves = self.folder.saves()
            kept = {*self.keep.choose(saves), self._carried}
            self.folder.remove(one.id for one in saves if one.id not in kept)
            self.folder.sweep()

    def push_newest(self) -> None:
        """Bring the newest save away, unless it is there."""
        saves = self.folder.saves()
        if self.mirror is not None and saves:
            self.mirror.push(self.folder, saves[0])

    @property
    def delivered(self) -> bool:
        """Whether any transfer has succeeded in this process."""
        return self.mirror is not None and bool(self.mirror.pushed)

    def next_counter(self) -> int:
        """Return a count above all there are, so that the save is the newest wherever it is seen.

        Raises `RemoteError` if the mirror cannot be asked; the count then goes on from what is
        known here, and the next call asks again.
        """
        self._counter = (self.folder.last_counter() if self._counter is None else self._counter) + 1
        if not self._counted_far and self.mirror is not None:
            self._counter = max(self._counter, self.mirror.last_counter() + 1)
            self._counted_far = True
        return self._counter

    @property
    def counter(self) -> int:
        """The count given last."""
        return self._counter or 0

    def newest(self) -> Path | None:
        """Return the path of the newest intact save, brought here if it is away."""
        here = {save.id: save for save in self.folder.saves()}
        there = self.mirror.ids() if self.mirror is not None else ()
        damaged = []
        for save_id in sorted(
            {*here, *there}, key=lambda one: self._order(one, here), reverse=True
        ):
            if save_id in here and self.folder.intact(here[save_id]):
                return self.folder.show(here[save_id])
            reason = f"Save {save_id} in {self.folder.folder} is damaged."
            if save_id in there and self.mirror is not None:
                try:
                    return self.folder.show(self.mirror.fetch(save_id, self.folder))
                except DamagedError as exc:
                    reason = str(exc)
            warnings.warn(
                f"{reason} Going back to the one before.", CheckpointerWarning, stacklevel=4
            )
            damaged.append(save_id)
        if damaged:
            raise DamagedError(
                f"None of the {len(damaged)} saves of {self.folder.file.name} is intact "
                f"({', '.join(damaged[:3])}). Bring one back from a backup, or remove "
                f"{self.folder.folder} (and the copies at the target) to begin anew.",
                slug="save-damaged",
            )
        return self._foreign()

    @property
    def exists(self) -> bool:
        """Whether `newest` would find something."""
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
        """Return a checkpoint that another program left, without manifest, here or there."""
        path = self.folder.foreign()
        if path is None and self.mirror is not None and self._foreign_there():
            assert self._foreign_key is not None
            self.mirror.remote.get(self._foreign_key, self.folder.file)
            return self.folder.file
        return path
