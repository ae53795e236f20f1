"""Saves brought to a remote and back; a manifest at the far end means a whole save."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

from rearview.errors import DamagedError
from rearview.remote.base import HIDDEN, Remote
from rearview.runtime.saving.keep import Keep
from rearview.runtime.saving.saves import (
    ID,
    MANIFEST,
    Save,
    SaveFolder,
    counter_of,
    file_intact,
    write_durably,
)


class Mirror:
    """The copy of a save folder at `remote`, under `prefix`."""

    def __init__(self, remote: Remote, prefix: str) -> None:
        self.remote, self.prefix = remote, prefix.strip("/")
        self.pushed: set[str] = set()
        """Saves that this process knows to be there whole."""
        self._manifests: dict[str, Save] = {}
        self._one_at_a_time = threading.RLock()

    def push(self, folder: SaveFolder, save: Save) -> None:
        """Bring `save` there: its files, each compared at the far end, then its manifest."""
        with self._one_at_a_time:
            if save.id in self.pushed:
                return
            for name in (*(file.name for file in save.files), MANIFEST):
                self.remote.put(folder.folder / save.id / name, self._key(save.id, name))
            self.pushed.add(save.id)
            self._manifests[save.id] = save

    def ids(self) -> tuple[str, ...]:
        """Return the names of the whole saves there, the highest count first."""
        return tuple(save_id for save_id, names in self._found().items() if MANIFEST in names)

    def last_counter(self) -> int:
        """Return the highest count there, of whole saves or not."""
        return max((counter_of(save_id) for save_id in self._found()), default=0)

    def manifest(self, save_id: str) -> Save:
        """Return what the manifest of `save_id` says."""
        if save_id not in self._manifests:
            with tempfile.TemporaryDirectory(prefix=HIDDEN) as folder:
                path = Path(folder, MANIFEST)
                self.remote.get(self._key(save_id, MANIFEST), path)
                save = Save.from_json(path.read_bytes())
            if save is None or save.id != save_id:
                raise DamagedError(
                    f"The manifest of save {save_id} at {self.remote} cannot be read. An older "
                    "save is used if there is one; delete this one.",
                    slug="save-damaged",
                )
            self._manifests[save_id] = save
        return self._manifests[save_id]

    def fetch(self, save_id: str, folder: SaveFolder) -> Save:
        """Bring a save here and return it; a fetch that was broken off goes on."""
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
                    f"{file.name} of save {save_id} at {self.remote} is not what was saved (it "
                    f"should have {file.checksum}). An older save is used if there is one.",
                    slug="save-damaged",
                )
        write_durably(staged / MANIFEST, save.to_json())
        folder.publish(staged, save)
        self.pushed.add(save_id)
        return save

    def prune(self, keep: Keep) -> None:
        """Remove what need not be kept there; at least the newest whole save stays."""
        with self._one_at_a_time:
            found = self._found()
            whole = [save_id for save_id, names in found.items() if MANIFEST in names]
            if not whole:
                return
            saves = []
            for save_id in whole:
                with contextlib.suppress(DamagedError):
                    saves.append(self.manifest(save_id))
            kept = keep.choose(saves)
            newest = max(counter_of(save_id) for save_id in whole)
            for save_id, names in found.items():
                # a save without manifest and not older than the newest may be on its way
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

    def _found(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for key in self.remote.list(f"{self.prefix}/"):
            save_id, _, name = key.removeprefix(f"{self.prefix}/").partition("/")
            if ID.fullmatch(save_id) and name:
                found[save_id].add(name)
        return dict(sorted(found.items(), key=lambda item: counter_of(item[0]), reverse=True))
