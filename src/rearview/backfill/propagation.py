"""Find where the statements that the work tree adds belong in the source of every past run.

`Probing` is what a backfill asks for the probes of a run. Files may have been renamed between versions:
`Renaming` follows them from version to version.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rearview.backfill.corrections import Correction, Corrections, Identity
from rearview.errors import ProbeError, SourceError, UsageError
from rearview.model import Run
from rearview.source.log_calls import names_logged
from rearview.source.moved_files import FileNames, renames
from rearview.source.notebooks import as_programs, in_cells
from rearview.source.probes.find import check, find
from rearview.source.probes.probe import Naming, Probe, ProbeKind, Probes, fits, needed
from rearview.source.propagate.splice import Apart, apart
from rearview.source.propagate.statement import SURE
from rearview.source.propagate.versions import (
    HandPlace,
    Statement,
    VersionOutcome,
    difference,
    through,
)
from rearview.source.scopes import bound_by
from rearview.source.trees import blocks_of
from rearview.store.versions.versions import WORKTREE, Versions

Texts = Mapping[str, str]


@dataclass
class Renaming:
    """Follows renamed files through the chain of versions that were run."""

    text: Callable[[str], Texts]
    chain: Sequence[str]
    """Every version that was run, newest first."""
    edited: Texts
    """The source of the work tree."""
    _names_in_newest: dict[str, FileNames] = field(default_factory=dict)

    def now(self, version: str, used: Collection[str] | None = None) -> FileNames:
        """Return the names in the work tree of the files of a version.

        `used` names the files that matter: if the work tree has all of them under the same names, the others
        are not compared.
        """
        old = self.text(version)
        if all(path in self.edited for path in (old if used is None else used) if path in old):
            return FileNames({path: path for path in old if path in self.edited})
        if version not in self.chain:
            return renames(old, self.edited)
        return self._pair_directly(self._last.before(self.newest(version)), old, self.edited)

    @cached_property
    def _last(self) -> FileNames:
        return renames(self.text(self.chain[0]), self.edited)

    def newest(self, version: str) -> FileNames:
        """Return the names in the newest version that was run of the files of another version."""
        newer: str | None = None
        for each in self.chain[: self.chain.index(version) + 1]:
            if each not in self._names_in_newest:
                old = self.text(each)
                if newer is None:
                    self._names_in_newest[each] = FileNames({path: path for path in old})
                else:
                    step = renames(old, self.text(newer))
                    names = self._names_in_newest[newer].before(step)
                    self._names_in_newest[each] = self._pair_directly(
                        names, old, self.text(self.chain[0])
                    )
            newer = each
        return self._names_in_newest[version]

    def _pair_directly(self, names: FileNames, old: Texts, new: Texts) -> FileNames:
        """Return `names`, with files of `old` that versions in between lacked paired directly with `new`."""
        unpaired = {path: old[path] for path in old if path not in names.now}
        if not unpaired:
            return names
        used = set(names.now.values())
        free = {path: text for path, text in new.items() if path not in used}
        direct = renames(unpaired, free)
        doubtful = {
            path: candidates
            for path, candidates in {**names.doubtful, **direct.doubtful}.items()
            if path not in direct.now
        }
        return FileNames({**names.now, **direct.now}, doubtful)

    def with_newest_names(self, version: str) -> dict[str, str]:
        """Return the files of a version under the names that they have in the newest version."""
        old = self.text(version)
        return {now: old[then] for then, now in self.newest(version).as_now(old).items()}

    def with_own_names(self, version: str, outcome: VersionOutcome) -> VersionOutcome:
        """Return an outcome, whose files have the newest names, with the names of the version itself."""
        old = self.text(version)
        own_name = {now: path for path, now in self.newest(version).as_now(old).items()}
        if all(path == now for now, path in own_name.items()):
            return outcome
        files = {own_name[path]: text for path, text in outcome.files.items()}
        placed = tuple(
            replace(placement, path=own_name[placement.path]) for placement in outcome.placed
        )
        today = self.now(version).changed
        notes = tuple(
            f"{today[path]} was {path} then"
            for path in dict.fromkeys(placement.path for placement in placed)
            if path in today
        )
        return replace(
            outcome,
            files=files,
            placed=placed,
            diff=difference(old, files),
            reasons=(*outcome.reasons, *notes),
        )

    def place_with_newest_name(self, version: str, place: HandPlace) -> HandPlace:
        """Return a place in a version with the name that its file has in the newest version."""
        now = self.newest(version).as_now(self.text(version))
        return replace(place, path=now.get(place.path, place.path))

    def sentences(self, with_probes: Iterable[tuple[str, Probes]]) -> list[str]:
        """Return a sentence for each file with probes that has another name in some versions."""
        runs: Counter[tuple[str, str]] = Counter()
        for version, probes in with_probes:
            paths = {probe.path for probe in probes.probes}
            changed = self.now(version, paths).changed
            runs.update((changed[path], path) for path in paths if path in changed)
        return [
            f"{now} is taken to be the renamed {then} of {count} run{'s' * (count > 1)}"
            for (now, then), count in sorted(runs.items())
        ]


@dataclass(frozen=True, slots=True)
class Propagated:
    """Where the added statements go in one version, or why they are refused."""

    version: str
    runs: tuple[str, ...]
    diff: str
    confidence: float
    reasons: tuple[str, ...]
    reason: str = ""
    """Why the version is refused; empty if it is not."""


@dataclass
class Probing:
    """Finds the probes of the work tree for each past version: in place, or carried back into its source."""

    versions: Versions
    runs: Sequence[Run]
    corrections: Corrections
    """Places that the user gave by hand."""
    only: tuple[str, ...] = ()
    """Only statements that log these names count, with the statements they need; empty: all that
    are added.
    """
    sure: float = SURE
    """Places with a lower confidence than this are refused."""
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
        """Return the Python files of a version that can be decoded."""
        if version not in self._texts:
            texts = {}
            for path, data in as_programs(self.versions.files(version)).items():
                if path.endswith(".py"):
                    try:
                        texts[path] = importlib.util.decode_source(data)
                    except (SyntaxError, UnicodeDecodeError):
                        continue
            self._texts[version] = texts
        return self._texts[version]

    def of(self, run: Run, names: Sequence[str] = ()) -> Probes:
        """Return the probes for `run`: as the work tree adds them, or carried back into the run's version."""
        try:
            return self._of(run, names)
        except SourceError as exc:
            exc.args = (in_cells(str(exc), self.edited), *exc.args[1:])
            exc.general = in_cells(exc.general, self.edited)
            raise

    def _of(self, run: Run, names: Sequence[str]) -> Probes:
        if not run.version:
            text = "The source of {run} was not kept, so it cannot be replayed.".format
            raise SourceError(
                text(run=f"run {run.id}"), general=text(run="the run"), slug="no-source"
            )
        used = run.end.files
        old = self.text(run.version)
        if names and not any(map(self._logs, names)):
            return Probes((), old)
        now = self.renaming.now(run.version, used)
        try:
            probes = find(old, self.edited, used=used, names=now)
        except ProbeError:
            # the user edited the newest version: report what else was changed there
            edited = run.version == self.chain[0] and not self.only
            if not names or edited or not (self.added or self.carrying(names) is not self):
                raise
            probes = None
        if probes is not None and all(probes.of(name) for name in names):
            return self._only_requested(run, probes, names)
        older = self.carrying(names)
        if older is not self and run.version in older.chain:
            return older.of(run, names)
        if run.version not in self.chain or not self.added:
            return probes if probes is not None else find(old, self.edited, used=used, names=now)
        outcome = self.outcomes[self.chain.index(run.version)]
        if outcome.refused:
            where = "The statement has no certain place in the source of {run}: ".format
            remedy = (
                f"{outcome.reason}. Put it there by hand: `rearview propagate "
                f"{(names or ('NAME',))[0]} --correct {run.id} FILE:LINE`."
            )
            raise SourceError(
                where(run=f"run {run.id}") + remedy,
                general=where(run="the run") + remedy,
                slug="no-place",
            )
        return find(old, {**old, **outcome.files}, used=used)

    def _only_requested(self, run: Run, probes: Probes, names: Sequence[str]) -> Probes:
        """Return the probes of an edit without log statements for names that were not requested."""
        carrier = self.carrying(names)
        if not names or not carrier.only or run.version not in carrier.chain:
            return probes
        kept = needed(probes, names)
        if all(probe in kept or probe.kind is ProbeKind.IMPORT for probe in probes.probes):
            return probes
        outcome = carrier.outcomes[carrier.chain.index(run.version)]
        if outcome.refused:
            return probes
        old = self.text(run.version)
        used = run.end.files
        try:
            alone = find(old, {**old, **outcome.files}, used=used)
        except ProbeError:
            return probes
        return alone if all(alone.of(name) for name in names) else probes

    def carrying(self, names: Sequence[str]) -> Probing:
        """Return a `Probing` for the statements that log `names` and those they need.

        It may begin with an older version: a statement that the newest run already had is new to the versions
        before it.
        """
        key = tuple(names)
        if self.only or not key:
            return self
        if key not in self._older:
            patterns = {each for probe in self.added for each in probe.names}
            if all(any(fits(each, name) for each in patterns) for name in key):
                self._older[key] = self._for_names(key, self.runs)
            else:
                self._older[key] = self._from_older_version(key)
        return self._older[key]

    def _for_names(self, names: tuple[str, ...], runs: Sequence[Run]) -> Probing:
        """Return a `Probing` for some names only, in the versions of `runs`."""
        probing = Probing(self.versions, runs, self.corrections, names, self.sure, self._texts)
        probing.__dict__["edited"] = self.edited
        return probing

    def _logs(self, name: str) -> bool:
        """Return True if any statement of the work tree logs `name`."""
        return any(fits(each, name) for each in self._patterns)

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(names_logged(self.edited))

    def _from_older_version(self, names: tuple[str, ...]) -> Probing:
        if not all(map(self._logs, names)):
            return self
        for at, version in enumerate(self.chain[1:], 1):
            try:
                probes = check(self.text(version), self.edited, names=self.renaming.now(version))[0]
            except SourceError:
                continue
            if all(probes.of(name) for name in names):
                older = set(self.chain[at:])
                return self._for_names(names, [run for run in self.runs if run.version in older])
        return self

    @cached_property
    def added(self) -> tuple[Probe, ...]:
        """The statements that the work tree adds to the newest version that was run."""
        probes: Collection[Probe] = self._newest.probes if self._newest is not None else ()
        if self.only and self._newest is not None:
            probes = needed(self._newest, self.only)
        return tuple(sorted(probes, key=lambda probe: (probe.path, probe.first)))

    @cached_property
    def _newest(self) -> Probes | None:
        if not self.chain:
            return None
        newest = self.chain[0]
        return check(self.text(newest), self.edited, names=self.renaming.now(newest))[0]

    @cached_property
    def outcomes(self) -> tuple[VersionOutcome, ...]:
        """Where the added statements belong in each version of the chain."""
        versions = [self.renaming.with_newest_names(version) for version in self.chain]
        namings = self._newest.namings if self._newest is not None else ()
        edited = {
            **self._edited_with_newest_names,
            **{path: each.text for path, each in self._on_own_lines.items()},
        }
        outcomes = through(
            *(edited, self._statements, versions, self._by_hand()),
            list(map(self._moved, namings)),
            self.sure,
        )
        back = self.renaming.with_own_names
        return tuple(
            back(version, outcome) for version, outcome in zip(self.chain, outcomes, strict=True)
        )

    @cached_property
    def renaming(self) -> Renaming:
        """Which files were renamed between the versions and the work tree."""
        return Renaming(self.text, self.chain, self.edited)

    @cached_property
    def _edited_with_newest_names(self) -> dict[str, str]:
        """The source of the work tree, with the file names of the newest version that was run."""
        if not self.chain:
            return self.edited
        newest = self.chain[0]
        return self.renaming.now(newest).as_then(self.edited, self.text(newest))

    @cached_property
    def _on_own_lines(self) -> dict[str, Apart]:
        """The files with added statements, in which each added statement has lines of its own."""
        positions: dict[str, list[tuple[int, int]]] = {}
        for probe in self.added:
            positions.setdefault(probe.path, []).append((probe.line, probe.column))
        return {
            path: apart(self._edited_with_newest_names[path], positions_in_file)
            for path, positions_in_file in positions.items()
        }

    @cached_property
    def _statements(self) -> list[Statement]:
        statements = []
        for probe in self.added:
            # a decorated definition has its first line for itself
            column = probe.column if probe.first == probe.line else 0
            first = self._on_own_lines[probe.path].line(probe.first, column)
            statements.append(Statement(probe.path, (first, first + probe.last - probe.first)))
        return statements

    def _moved(self, naming: Naming) -> Naming:
        cuts = self._on_own_lines[naming.path].cuts if naming.path in self._on_own_lines else ()
        for line, _ in reversed(cuts):
            naming = naming.pushed(naming.path, line + 1, 1)
        return naming

    def propagated(self) -> list[Propagated]:
        """Return, for each version, newest first, where the added statements go."""
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

    def correct(
        self,
        run: Run,
        place: HandPlace,
        names: Sequence[str] = (),
        statement: tuple[str, int] | None = None,
    ) -> list[Correction]:
        """Store that the statements that log `names` go to a place in the version of `run`.

        `statement` is a file and a line of the work tree; it is needed if several statements log a name.
        """
        lines = self.text(run.version).get(place.path, "").splitlines()
        if not 1 <= place.line <= len(lines) + 1:
            raise UsageError(
                f"{place.path} of run {run.id} has {len(lines)} lines, so nothing goes before line "
                f"{place.line}. `rearview diff {run.id}` shows it.",
                slug="no-place",
            )
        corrections = [
            Correction(
                *(run.version, self._identities[number], place.path, place.line),
                *(place.after, dict(place.renames), run.id),
            )
            for number in self._statements_to_correct(names, statement)
        ]
        self.corrections.add(corrections)
        return corrections

    def _statements_to_correct(
        self, names: Sequence[str], statement: tuple[str, int] | None
    ) -> list[int]:
        """Return the indices of the added statements that a correction is for."""
        if statement is not None:
            path, line = statement
            hits = [
                number
                for number, probe in enumerate(self.added)
                if probe.path == path and probe.first <= line <= probe.last
            ]
            if not hits:
                raise UsageError(
                    f"There is no added statement at {path}:{line} of the work tree. Those that "
                    f"belong to {' '.join(names)} are at {self._places_text(range(len(self.added)))}.",
                    slug="no-probe",
                )
            return hits
        with_names = [number for number, probe in enumerate(self.added) if probe.names]
        for name in names or {name for number in with_names for name in self.added[number].names}:
            hits = [k for k in with_names if any(fits(each, name) for each in self.added[k].names)]
            if len(hits) > 1:
                raise UsageError(
                    f"{len(hits)} statements log {name}: {self._places_text(hits)}. Say which one goes "
                    "there with `--statement FILE:LINE`.",
                    slug="which-statement",
                )
        return [
            k
            for k in with_names
            if not names or any(fits(each, n) for each in self.added[k].names for n in names)
        ]

    def _places_text(self, numbers: Collection[int]) -> str:
        return ", ".join(f"{self.added[k].path}:{self.added[k].line}" for k in numbers)

    @cached_property
    def _identities(self) -> list[Identity]:
        """For each added statement, what identifies it even after its text was changed."""
        counts: Counter[tuple[str, tuple[str, ...], tuple[str, ...]]] = Counter()
        identities = []
        for number, probe in enumerate(self.added):
            sets: tuple[str, ...] = ()
            if not probe.names:
                sets = tuple(name for name, _ in bound_by(self._trees[number][0]))
            key = (probe.path, probe.names, sets)
            identities.append(Identity(*key, occurrence=counts[key]))
            counts[key] += 1
        return identities

    @cached_property
    def _trees(self) -> list[tuple[ast.stmt, int]]:
        """Each added statement as a syntax tree, with a number for the block that contains it."""
        by_position: dict[tuple[str, int, int], tuple[ast.stmt, int]] = {}
        for path in {probe.path for probe in self.added}:
            blocks: list[list[ast.stmt]] = [ast.parse(self._edited_with_newest_names[path]).body]
            while blocks:
                block = blocks.pop()
                for stmt in block:
                    by_position[path, stmt.lineno, stmt.col_offset] = (stmt, id(block))
                    blocks += [inner for _, _, inner in blocks_of(stmt)]
        return [by_position[probe.path, probe.line, probe.column] for probe in self.added]

    def _by_hand(self) -> dict[int, dict[int, HandPlace]]:
        """Return the places that the user gave by hand for statements that still exist, by version and statement.

        Statements of the same block that only compute something for a statement go to its place too.
        """
        by_version: dict[int, dict[int, HandPlace]] = {}
        for correction in self.corrections.kept:
            number = correction.statement.find(self._identities)
            if number is None or correction.version not in self.chain:
                continue
            place = self.renaming.place_with_newest_name(correction.version, correction.place)
            at = self.chain.index(correction.version)
            by_version.setdefault(at, {})[number] = place
        for places in by_version.values():
            for number, place in sorted(places.items()):
                for helper in self._helpers_of(number):
                    places.setdefault(helper, place)
        return by_version

    def _helpers_of(self, number: int) -> list[int]:
        """Return the indices of the added statements before one, in its block, that log nothing."""
        probe, block = self.added[number], self._trees[number][1]
        return [
            k
            for k, candidate in enumerate(self.added)
            if self._trees[k][1] == block
            and not candidate.names
            and (candidate.line, candidate.column) < (probe.line, probe.column)
            and probe.names
        ]
