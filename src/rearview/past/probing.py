"""Bring what the work tree adds into the source of a past run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field

from rearview.errors import ProbeError, SourceError
from rearview.model import Run
from rearview.source.probes import Kind, Probe, Probes, check, find
from rearview.source.propagate import carry
from rearview.store.versions import Versions

WORKTREE = "worktree"
"""Stands for the source as it is now, where a run is asked for."""

Texts = Mapping[str, str]


@dataclass
class Probing:
    """The probes in the work tree, as each past version takes them."""

    versions: Versions
    newest: str
    """Version that the work tree is compared with when a run's own version is too far away."""
    _texts: dict[str, dict[str, str]] = field(default_factory=dict)
    _edited: dict[str, str] | None = None

    def edited(self) -> dict[str, str]:
        """Return the Python files of the work tree."""
        if self._edited is None:
            self._edited = self.text(self.versions.save(WORKTREE))
        return self._edited

    def text(self, version: str) -> dict[str, str]:
        """Return the readable Python files of a version."""
        if version not in self._texts:
            found = {}
            for path, data in self.versions.files(version).items():
                if path.endswith(".py"):
                    try:
                        found[path] = importlib.util.decode_source(data)
                    except (SyntaxError, UnicodeDecodeError):
                        continue
            self._texts[version] = found
        return self._texts[version]

    def of(self, run: Run, names: tuple[str, ...] = ()) -> Probes:
        """Return the probes for `run`: as they stand, or carried back into its version."""
        if not run.version:
            raise SourceError(
                f"The source of run {run.id} was not kept, so it cannot be replayed.",
                slug="no-source",
            )
        used = run.facts.get("end", {}).get("files")
        old = self.text(run.version)
        try:
            found = find(old, self.edited(), used=used)
        except ProbeError:
            if run.version == self.newest:
                raise
            found = None
        if found is not None and all(found.of(name) for name in names):
            return found
        carried = self._carried(run, old)
        return find(old, carried, used=used)

    def _carried(self, run: Run, old: Texts) -> dict[str, str]:
        """Return the run's source with each statement that the work tree adds put in its place."""
        edited = self.edited()
        added, _ = check(self.text(self.newest), edited)
        result = dict(old)
        for probe in sorted(added.probes, key=lambda one: (one.path, one.first)):
            if probe.path not in result:
                if probe.kind is Kind.LOG:
                    raise SourceError(
                        f"{probe.path} did not exist in run {run.id}, so "
                        f"{', '.join(probe.names)} has no place there.",
                        slug="no-place",
                    )
                continue
            result[probe.path] = _put(probe, edited[probe.path], result[probe.path], run)
        for path in added.modules:
            result[path] = edited[path]
        return result


def _put(probe: Probe, new: str, old: str, run: Run) -> str:
    carried = carry(new, (probe.first, probe.last), old)
    if carried.line is None:
        raise SourceError(
            f"{probe.path}:{probe.first} has no certain place in run {run.id}: {carried.reason}. "
            "`rearview diff` shows how its source differs.",
            slug="no-place",
        )
    return carried.into(old)
