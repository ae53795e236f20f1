"""Bring what the work tree adds into the source of every past run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from rearview.errors import ProbeError, SourceError, UsageError
from rearview.model import Run
from rearview.past.renaming import Renaming
from rearview.source.apart import Apart, apart
from rearview.source.logged import names_logged
from rearview.source.naming import Naming
from rearview.source.probes import Probe, Probes, check, find, fits
from rearview.source.propagate import Outcome, Placed, Statement, through
from rearview.source.sameness import needed
from rearview.store.project import publish
from rearview.store.versions import Versions

WORKTREE = "worktree"
"""Stands for the source as it is now, where a run is asked for."""

Texts = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Propagated:
    """What becomes of a version that lacks the statements."""

    version: str
    runs: tuple[str, ...]
    diff: str
    confidence: float
    reasons: tuple[str, ...]
    reason: str = ""
    """Why it is refused; empty when it is not."""


@dataclass
class Probing:
    """The probes in the work tree, as each past version takes them."""

    versions: Versions
    runs: Sequence[Run]
    corrections: Path
    """File that keeps placements made by hand."""
    only: tuple[str, ...] = ()
    """Names of which alone the statements count, with what these need; none: all that is added."""
    _texts: dict[str, dict[str, str]] = field(default_factory=dict)
    _older: dict[tuple[str, ...], Probing] = field(default_factory=dict)

    @cached_property
    def edited(self) -> dict[str, str]:
        """The Python files of the work tree."""
        return self.text(self.versions.save(WORKTREE))

    @cached_property
    def chain(self) -> tuple[str, ...]:
        """Every version that was run, newest first."""
        return tuple(dict.fromkeys(run.version for run in reversed(self.runs) if run.version))

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

    def of(self, run: Run, names: Sequence[str] = ()) -> Probes:
        """Return the probes for `run`: as they stand, or carried back into its version."""
        if not run.version:
            raise SourceError(
                f"The source of run {run.id} was not kept, so it cannot be replayed.",
                slug="no-source",
            )
        used = run.facts.get("end", {}).get("files")
        old = self.text(run.version)
        if names and not any(map(self._logs, names)):
            return Probes((), old)
        now = self.renaming.now(run.version, used)
        try:
            found = find(old, self.edited, used=used, names=now)
        except ProbeError:
            # The newest version is the one that was edited: what else was changed there is said.
            edited = run.version == self.chain[0] and not self.only
            if not names or edited or not (self.added or self.carrying(names) is not self):
                raise
            found = None
        if found is not None and all(found.of(name) for name in names):
            return found
        older = self.carrying(names)
        if older is not self and run.version in older.chain:
            return older.of(run, names)
        if run.version not in self.chain or not self.added:
            return found if found is not None else find(old, self.edited, used=used, names=now)
        outcome = self.outcomes[self.chain.index(run.version)]
        if outcome.refused:
            raise SourceError(
                f"The statement has no certain place in the source of run {run.id}: "
                f"{outcome.reason}. Put it there by hand: `rearview propagate "
                f"{(names or ('NAME',))[0]} --correct {run.id} FILE:LINE`.",
                slug="no-place",
            )
        return find(old, {**old, **outcome.files}, used=used)

    def carrying(self, names: Sequence[str]) -> Probing:
        """Return what carries `names` back: this, or one that begins with an older version.

        A statement that the newest run had already is new to the versions from before it.
        """
        wanted = tuple(names)
        patterns = {each for probe in self.added for each in probe.names}
        if self.only or all(any(fits(each, name) for each in patterns) for name in wanted):
            return self
        if wanted not in self._older:
            self._older[wanted] = self._begun_earlier(wanted)
        return self._older[wanted]

    def _logs(self, name: str) -> bool:
        """Say whether the work tree logs a name anywhere."""
        return any(fits(each, name) for each in self._patterns)

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(names_logged(self.edited))

    def _begun_earlier(self, names: tuple[str, ...]) -> Probing:
        if not all(map(self._logs, names)):
            return self
        for at, version in enumerate(self.chain[1:], 1):
            try:
                found = check(self.text(version), self.edited, names=self.renaming.now(version))[0]
            except SourceError:
                continue
            if all(found.of(name) for name in names):
                older = set(self.chain[at:])
                runs = [run for run in self.runs if run.version in older]
                probing = Probing(self.versions, runs, self.corrections, names, self._texts)
                probing.__dict__["edited"] = self.edited
                return probing
        return self

    @cached_property
    def added(self) -> tuple[Probe, ...]:
        """What the work tree adds to the newest version that was run."""
        found: Collection[Probe] = self._newest.probes if self._newest is not None else ()
        if self.only and self._newest is not None:
            found = needed(self._newest, self.only)
        return tuple(sorted(found, key=lambda probe: (probe.path, probe.first)))

    @cached_property
    def _newest(self) -> Probes | None:
        if not self.chain:
            return None
        newest = self.chain[0]
        return check(self.text(newest), self.edited, names=self.renaming.now(newest))[0]

    @cached_property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Where the added statements belong in each version of the chain."""
        versions = [self.renaming.named_anew(version) for version in self.chain]
        namings = self._newest.namings if self._newest is not None else ()
        edited = {**self._named, **{path: each.text for path, each in self._apart.items()}}
        found = through(
            edited, self._statements, versions, self._by_hand(), list(map(self._moved, namings))
        )
        back = self.renaming.named_back
        return tuple(back(version, one) for version, one in zip(self.chain, found, strict=True))

    @cached_property
    def renaming(self) -> Renaming:
        """What files were called then and are called now."""
        return Renaming(self.text, self.chain, self.edited)

    @cached_property
    def _named(self) -> dict[str, str]:
        """The work tree under the names of the newest version that was run."""
        if not self.chain:
            return self.edited
        newest = self.chain[0]
        return self.renaming.now(newest).as_then(self.edited, self.text(newest))

    @cached_property
    def _apart(self) -> dict[str, Apart]:
        """The files with added statements, each of these on lines of its own."""
        spots: dict[str, list[tuple[int, int]]] = {}
        for probe in self.added:
            spots.setdefault(probe.path, []).append((probe.line, probe.column))
        return {path: apart(self._named[path], found) for path, found in spots.items()}

    @cached_property
    def _statements(self) -> list[Statement]:
        found = []
        for probe in self.added:
            # what is decorated shares its first line with nothing
            column = probe.column if probe.first == probe.line else 0
            first = self._apart[probe.path].line(probe.first, column)
            found.append(Statement(probe.path, (first, first + probe.last - probe.first)))
        return found

    def _moved(self, naming: Naming) -> Naming:
        cuts = self._apart[naming.path].cuts if naming.path in self._apart else ()
        for line, _ in reversed(cuts):
            naming = naming.pushed(naming.path, line + 1, 1)
        return naming

    def propagated(self) -> list[Propagated]:
        """Return what becomes of each version, newest first."""
        return [
            Propagated(
                version,
                tuple(run.id for run in self.runs if run.version == version),
                outcome.diff,
                outcome.confidence,
                outcome.reasons,
                outcome.reason,
            )
            for version, outcome in zip(self.chain, self.outcomes, strict=True)
        ]

    def correct(self, run: Run, path: str, line: int) -> None:
        """Keep that the added statements go before `line` of `path` in the version of `run`."""
        lines = self.text(run.version).get(path, "").splitlines()
        if not 1 <= line <= len(lines) + 1:
            raise UsageError(
                f"{path} of run {run.id} has {len(lines)} lines, so nothing goes before line "
                f"{line}. `rearview diff {run.id}` shows it.",
                slug="no-place",
            )
        model = lines[line - 1] if line <= len(lines) else lines[-1] if lines else ""
        indent = model[: len(model) - len(model.lstrip())]
        placed = [
            Placed(path, line, _indented(self._apart[one.path].text, one.lines, indent))
            for one in self._statements
        ]
        known = self._kept()
        known[run.version] = [asdict(one) for one in placed]
        self.corrections.parent.mkdir(parents=True, exist_ok=True)
        publish(self.corrections, json.dumps(known, indent=1).encode())

    def _kept(self) -> dict[str, list[dict[str, object]]]:
        try:
            kept: dict[str, list[dict[str, object]]] = json.loads(self.corrections.read_bytes())
        except (OSError, ValueError):
            return {}
        return kept

    def _by_hand(self) -> dict[int, list[Placed]]:
        """Return the placements made by hand that are for as many statements as there are now."""
        found = {}
        for version, placed in self._kept().items():
            if version in self.chain and len(placed) == len(self.added):
                given = [
                    Placed(str(one["path"]), int(str(one["line"])), str(one["text"]))
                    for one in placed
                ]
                found[self.chain.index(version)] = self.renaming.placed_anew(version, given)
        return found


def _indented(text: str, lines: tuple[int, int], indent: str) -> str:
    """Return the lines of a statement, indented as the place where they go."""
    chosen = text.splitlines()[lines[0] - 1 : lines[1]]
    own = chosen[0][: len(chosen[0]) - len(chosen[0].lstrip())]
    return "".join(f"{indent}{line.removeprefix(own)}\n" for line in chosen)
