"""What the files of every past version are called in the newest one, and in the work tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rearview.source.probe import Probes
from rearview.source.renames import Names, renames
from rearview.source.through import HandPlace, Outcome, difference

Texts = Mapping[str, str]


@dataclass
class Renaming:
    """Follows files through the versions that were run, as they were renamed one after another."""

    text: Callable[[str], Texts]
    chain: Sequence[str]
    """Every version that was run, newest first."""
    edited: Texts
    """The work tree."""
    _known: dict[str, Names] = field(default_factory=dict)

    def now(self, version: str, used: Collection[str] | None = None) -> Names:
        """Return what the work tree calls the files of a version.

        `used` names those that matter: where all of them are there by their own names, nothing
        else is looked at.
        """
        old = self.text(version)
        if all(path in self.edited for path in (old if used is None else used) if path in old):
            return Names({path: path for path in old if path in self.edited})
        if version not in self.chain:
            return renames(old, self.edited)
        return self._rest(self._last.before(self.newest(version)), old, self.edited)

    @cached_property
    def _last(self) -> Names:
        return renames(self.text(self.chain[0]), self.edited)

    def newest(self, version: str) -> Names:
        """Return what the newest version that was run calls the files of another."""
        newer: str | None = None
        for each in self.chain[: self.chain.index(version) + 1]:
            if each not in self._known:
                old = self.text(each)
                if newer is None:
                    self._known[each] = Names({path: path for path in old})
                else:
                    step = renames(old, self.text(newer))
                    found = self._known[newer].before(step)
                    self._known[each] = self._rest(found, old, self.text(self.chain[0]))
            newer = each
        return self._known[version]

    def _rest(self, found: Names, old: Texts, new: Texts) -> Names:
        """Pair straight what was not there in between."""
        gone = {path: old[path] for path in old if path not in found.now}
        if not gone:
            return found
        taken = set(found.now.values())
        free = {path: text for path, text in new.items() if path not in taken}
        more = renames(gone, free)
        doubtful = {
            path: several
            for path, several in {**found.doubtful, **more.doubtful}.items()
            if path not in more.now
        }
        return Names({**found.now, **more.now}, doubtful)

    def named_anew(self, version: str) -> dict[str, str]:
        """Return the files of a version under the names of the newest one."""
        old = self.text(version)
        return {now: old[then] for then, now in self.newest(version).as_now(old).items()}

    def named_back(self, version: str, outcome: Outcome) -> Outcome:
        """Return an outcome for files under their newest names with the names of the version."""
        old = self.text(version)
        then = {now: path for path, now in self.newest(version).as_now(old).items()}
        if all(path == now for now, path in then.items()):
            return outcome
        files = {then[path]: text for path, text in outcome.files.items()}
        placed = tuple(replace(one, path=then[one.path]) for one in outcome.placed)
        today = self.now(version).changed
        told = tuple(
            f"{today[path]} was {path} then"
            for path in dict.fromkeys(one.path for one in placed)
            if path in today
        )
        return replace(
            outcome,
            files=files,
            placed=placed,
            diff=difference(old, files),
            reasons=(*outcome.reasons, *told),
        )

    def placed_anew(self, version: str, place: HandPlace) -> HandPlace:
        """Return a place in a version under the name that the newest one has for the file."""
        now = self.newest(version).as_now(self.text(version))
        return replace(place, path=now.get(place.path, place.path))

    def told(self, taken: Iterable[tuple[str, Probes]]) -> list[str]:
        """Return sentences on the files that are called otherwise in versions that take probes."""
        runs: Counter[tuple[str, str]] = Counter()
        for version, probes in taken:
            paths = {probe.path for probe in probes.probes}
            changed = self.now(version, paths).changed
            runs.update((changed[path], path) for path in paths if path in changed)
        return [
            f"{now} is taken to be what was {then} in {count} run{'s' * (count > 1)}"
            for (now, then), count in sorted(runs.items())
        ]
