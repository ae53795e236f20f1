"""Bring the statements that the work tree adds into the source of every past run.

Files may have been renamed since: `Renaming` follows them from version to version.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property

from rearview.backfill.hand_places import Correction, Corrections, Identity
from rearview.errors import ProbeError, SourceError, UsageError
from rearview.model import Run
from rearview.model.wording import plural
from rearview.source.log_calls import names_logged
from rearview.source.moved_files import FileNames, renames
from rearview.source.notebooks import as_programs, name_cells
from rearview.source.probes.find import check, find
from rearview.source.probes.probe import (
    Probe,
    ProbeKind,
    Probes,
    VariableExtraction,
    fits,
    needed_probes,
)
from rearview.source.propagate.carry_statement import MIN_CONFIDENCE
from rearview.source.propagate.splice import SeparatedLines, separate_lines
from rearview.source.propagate.versions import (
    HandPlace,
    Statement,
    VersionOutcome,
    difference,
    through,
)
from rearview.source.scopes import bound_by
from rearview.source.statement_trees import blocks_of
from rearview.store.versions.versions import WORKTREE, Versions

Texts = Mapping[str, str]


@dataclass
class Renaming:
    """Follows files through the versions that were run, over all their renames."""

    text: Callable[[str], Texts]
    chain: Sequence[str]
    """Every version that was run, newest first."""
    edited: Texts
    """The work tree."""
    _known: dict[str, FileNames] = field(default_factory=dict)

    def now(self, version: str, used: Collection[str] | None = None) -> FileNames:
        """Return the names that the files of a version have in the work tree.

        `used` names the files that matter: if the work tree has all of them under the same names, no
        other file is looked at.
        """
        old = self.text(version)
        if all(path in self.edited for path in (old if used is None else used) if path in old):
            return FileNames({path: path for path in old if path in self.edited})
        if version not in self.chain:
            return renames(old, self.edited)
        return self._rest(self._last.after(self.newest(version)), old, self.edited)

    @cached_property
    def _last(self) -> FileNames:
        return renames(self.text(self.chain[0]), self.edited)

    def newest(self, version: str) -> FileNames:
        """Return the names that the files of `version` have in the newest version that was run."""
        newer: str | None = None
        for each in self.chain[: self.chain.index(version) + 1]:
            if each not in self._known:
                old = self.text(each)
                if newer is None:
                    self._known[each] = FileNames({path: path for path in old})
                else:
                    step = renames(old, self.text(newer))
                    later_names = self._known[newer].after(step)
                    self._known[each] = self._rest(later_names, old, self.text(self.chain[0]))
            newer = each
        return self._known[version]

    def _rest(self, file_names: FileNames, old: Texts, new: Texts) -> FileNames:
        """Pair the remaining files directly: no version in between had them."""
        gone = {path: old[path] for path in old if path not in file_names.now}
        if not gone:
            return file_names
        taken = set(file_names.now.values())
        free = {path: text for path, text in new.items() if path not in taken}
        more = renames(gone, free)
        doubtful = {
            path: several
            for path, several in {**file_names.doubtful, **more.doubtful}.items()
            if path not in more.now
        }
        return FileNames({**file_names.now, **more.now}, doubtful)

    def under_newest_names(self, version: str) -> dict[str, str]:
        """Return the files of a version under the names of the newest one."""
        old = self.text(version)
        return {now: old[then] for then, now in self.newest(version).unique_new_paths(old).items()}

    def under_own_names(self, version: str, outcome: VersionOutcome) -> VersionOutcome:
        """Return an outcome for files under their newest names with the version's own names."""
        old = self.text(version)
        then = {now: path for path, now in self.newest(version).unique_new_paths(old).items()}
        if all(path == now for now, path in then.items()):
            return outcome
        files = {then[path]: text for path, text in outcome.files.items()}
        placed = tuple(
            replace(statement, path=then[statement.path]) for statement in outcome.placed
        )
        today = self.now(version).changed
        rename_reasons = tuple(
            f"{today[path]} was {path} then"
            for path in dict.fromkeys(statement.path for statement in placed)
            if path in today
        )
        return replace(
            outcome,
            files=files,
            placed=placed,
            diff=difference(old, files),
            reasons=(*outcome.reasons, *rename_reasons),
        )

    def at_newest_name(self, version: str, place: HandPlace) -> HandPlace:
        """Return a place in a version with the newest name of its file."""
        now = self.newest(version).unique_new_paths(self.text(version))
        return replace(place, path=now.get(place.path, place.path))

    def sentences(self, with_probes: Iterable[tuple[str, Probes]]) -> list[str]:
        """Return a sentence for each file with probes that has another name in some versions."""
        runs: Counter[tuple[str, str]] = Counter()
        for version, probes in with_probes:
            paths = {probe.path for probe in probes.probes}
            changed = self.now(version, paths).changed
            runs.update((changed[path], path) for path in paths if path in changed)
        return [
            f"{now} is assumed to be the file that was {then} in {count} run{'s' * (count > 1)}"
            for (now, then), count in sorted(runs.items())
        ]


@dataclass(frozen=True, slots=True)
class Propagated:
    """The outcome of propagation for one version."""

    version: str
    runs: tuple[str, ...]
    diff: str
    confidence: float
    reasons: tuple[str, ...]
    reason: str = ""
    """Why it is refused; empty when it is not."""


@dataclass
class Probing:
    """Inserts the probes of the work tree into each past version."""

    versions: Versions
    runs: Sequence[Run]
    corrections: Corrections
    """Places given by hand."""
    only: tuple[str, ...] = ()
    """Only the statements that log these names count, with the statements that they need; empty: all."""
    sure: float = MIN_CONFIDENCE
    """Places less likely right than this are refused."""
    disproved: dict[str, dict[int, dict[tuple[str, int], str]]] = field(default_factory=dict)
    """Version -> number of a statement -> place that a replay showed to be wrong -> reason."""
    _texts: dict[str, dict[str, str]] = field(default_factory=dict)
    _older: dict[tuple[str, ...], Probing] = field(default_factory=dict)

    @cached_property
    def edited(self) -> dict[str, str]:
        """The Python files of the work tree."""
        return self.text(self.versions.save(WORKTREE))

    @cached_property
    def chain(self) -> tuple[str, ...]:
        """Every version that was run, newest first."""
        return self.all_versions

    def text(self, version: str) -> dict[str, str]:
        """Return the readable Python files of a version."""
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
        """Return the probes for `run`: unchanged, or carried back into its version."""
        try:
            return self._of(run, names)
        except SourceError as exc:
            exc.args = (name_cells(str(exc), self.edited), *exc.args[1:])
            exc.general = name_cells(exc.general, self.edited)
            raise

    def _of(self, run: Run, names: Sequence[str]) -> Probes:
        if not run.version:
            text = "The source of {run} was not kept, so it cannot be replayed.".format
            raise SourceError(
                text(run=f"run {run.id}"), general=text(run="the run"), slug="no-source"
            )
        used = run.end.files
        old = self.text(run.version)
        if names and not any(map(self.logs, names)):
            return Probes((), old)
        now = self.renaming.now(run.version, used)
        try:
            probes = find(old, self.edited, used=used, names=now)
        except ProbeError:
            # the user edited the newest version: say what else was changed there
            edited = run.version == self.chain[0] and not self.only
            if not names or edited or not (self.added or self.carrying(names) is not self):
                raise
            probes = None
        if probes is not None and all(probes.of(name) for name in names):
            return self._alone(run, probes, names)
        older = self.carrying(names)
        if older is not self and run.version in older.chain:
            return older.of(run, names)
        if run.version not in self.chain or not self.added:
            return probes if probes is not None else find(old, self.edited, used=used, names=now)
        outcome = self.outcomes[self.chain.index(run.version)]
        if outcome.refused:
            where = "The statement has no certain place in the source of {run}: ".format
            what = (
                f"{outcome.reason}. Put it there by hand: `rearview propagate "
                f"{(names or ('NAME',))[0]} --correct {run.id} FILE:LINE`."
            )
            raise SourceError(
                where(run=f"run {run.id}") + what,
                general=where(run="the run") + what,
                slug="no-place",
            )
        return find(old, {**old, **outcome.files}, used=used)

    def _alone(self, run: Run, probes: Probes, names: Sequence[str]) -> Probes:
        """Return what an edit adds, without log statements that were not requested."""
        probing = self.carrying(names)
        if not names or not probing.only or run.version not in probing.chain:
            return probes
        kept = needed_probes(probes, names)
        if all(probe in kept or probe.kind is ProbeKind.IMPORT for probe in probes.probes):
            return probes
        outcome = probing.outcomes[probing.chain.index(run.version)]
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
        """Return the probing that carries the statements that log `names`, with the statements they need.

        It may begin with an older version: a statement that the newest run had already is new to earlier
        versions.
        """
        requested = tuple(names)
        if self.only or not requested:
            return self
        if requested not in self._older:
            patterns = {each for probe in self.added for each in probe.names}
            if all(any(fits(each, name) for each in patterns) for name in requested):
                self._older[requested] = self._for_names(requested, self.runs)
            else:
                self._older[requested] = self._from_older_version(requested)
        return self._older[requested]

    def _for_names(self, names: tuple[str, ...], runs: Sequence[Run]) -> Probing:
        """Return the probing of some names alone, for the versions of `runs`."""
        probing = Probing(
            self.versions, runs, self.corrections, names, self.sure, _texts=self._texts
        )
        probing.__dict__["edited"] = self.edited
        if runs is self.runs:  # the same versions: reuse their results
            probing.__dict__["renaming"] = self.renaming
            probing.__dict__["_newest"] = self._newest
        return probing

    def edited_as(
        self,
        edited: dict[str, str],
        base: dict[str, str],
        others: Sequence[str],
        names: tuple[str, ...],
    ) -> Probing:
        """Return the probing of `names` if `edited` were an edit of `base` and `others` the past.

        `others` are versions, the nearest first. The first of the chain is `base`, which no run had.
        """
        base_id = f"base of {len(self._texts)}"
        texts = {**self._texts, base_id: base}
        probing = Probing(
            self.versions, self.runs, self.corrections, names, self.sure, _texts=texts
        )
        probing.__dict__["edited"] = edited
        probing.__dict__["chain"] = (base_id, *others)
        return probing

    @property
    def all_versions(self) -> tuple[str, ...]:
        """Every version that was run, newest first, independent of the chain."""
        return tuple(dict.fromkeys(run.version for run in reversed(self.runs) if run.version))

    def logs(self, name: str) -> bool:
        """Return True if the work tree logs a name anywhere."""
        return any(fits(each, name) for each in self._patterns)

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(names_logged(self.edited))

    def _from_older_version(self, names: tuple[str, ...]) -> Probing:
        if not all(map(self.logs, names)):
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
        """Statements that the work tree adds to the newest version that was run."""
        probes: Collection[Probe] = self._newest.probes if self._newest is not None else ()
        if self.only and self._newest is not None:
            probes = needed_probes(self._newest, self.only)
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
        versions = [self.renaming.under_newest_names(version) for version in self.chain]
        extractions = self._newest.extractions if self._newest is not None else ()
        edited = {**self._named, **{path: each.text for path, each in self._separated.items()}}
        through_versions = through(
            *(edited, self._statements, versions, self._by_hand()),
            list(map(self._moved, extractions)),
            self.sure,
            {self.chain.index(version): places for version, places in self.disproved.items()},
        )
        back = self.renaming.under_own_names
        return tuple(
            back(version, outcome)
            for version, outcome in zip(self.chain, through_versions, strict=True)
        )

    @cached_property
    def renaming(self) -> Renaming:
        """Finds what files were called in past versions."""
        return Renaming(self.text, self.chain, self.edited)

    @cached_property
    def _named(self) -> dict[str, str]:
        """The work tree under the names of the newest version that was run."""
        if not self.chain:
            return self.edited
        newest = self.chain[0]
        return self.renaming.now(newest).with_old_names(self.edited, self.text(newest))

    @cached_property
    def _separated(self) -> dict[str, SeparatedLines]:
        """The files with added statements, with each added statement on separate lines."""
        positions: dict[str, list[tuple[int, int]]] = {}
        for probe in self.added:
            positions.setdefault(probe.path, []).append((probe.line, probe.column))
        return {path: separate_lines(self._named[path], lines) for path, lines in positions.items()}

    @cached_property
    def _statements(self) -> list[Statement]:
        statements = []
        for probe in self.added:
            # a decorator shares its line with no other statement
            column = probe.column if probe.first == probe.line else 0
            first = self._separated[probe.path].line(probe.first, column)
            statements.append(Statement(probe.path, (first, first + probe.last - probe.first)))
        return statements

    def _moved(self, extraction: VariableExtraction) -> VariableExtraction:
        breaks = (
            self._separated[extraction.path].breaks if extraction.path in self._separated else ()
        )
        for line, _ in reversed(breaks):
            extraction = extraction.shifted(extraction.path, line + 1, 1)
        return extraction

    def is_carried(self, run: Run, names: Sequence[str], source: Texts) -> bool:
        """Return True if `source` is the version of a run with statements that were carried there.

        The newest version that was run is the one that was edited: nothing is carried there.
        """
        probing = self.carrying(names)
        if run.version not in probing.chain or run.version == self.chain[0] or not probing.added:
            return False
        outcome = probing.outcomes[probing.chain.index(run.version)]
        return bool(outcome.files) and all(source.get(p) == t for p, t in outcome.files.items())

    def disprove(self, run: Run, names: Sequence[str], where: tuple[str, int], how: str) -> bool:
        """Note that a carried statement is wrong at its place; return False if there is none.

        `where` is its file and line in the version with the statements.
        """
        probing = self.carrying(names)
        at = probing.chain.index(run.version) if run.version in probing.chain else None
        if at is None or probing.outcomes[at].refused:
            return False
        outcome = probing.outcomes[at]
        path, line = where
        now = (
            self.renaming.newest(run.version).unique_new_paths(self.text(run.version)) if at else {}
        )
        for number, (statement, placed) in enumerate(
            zip(outcome.locations, outcome.placed, strict=True)
        ):
            first, last = statement.lines
            if statement.path == now.get(path, path) and first <= line <= last and placed.text:
                places = probing.disproved.setdefault(run.version, {}).setdefault(number, {})
                old_line = self._old_line(run.version, path, probing, line)
                places[statement.path, placed.line] = f"before line {old_line} of {path} {how}"
                probing.__dict__.pop("outcomes", None)
                return True
        return False

    def _old_line(self, version: str, path: str, probing: Probing, line: int) -> int:
        """Return the line of the recorded file before which a line was inserted."""
        files = probing.outcomes[probing.chain.index(version)].files
        new, old = files[path].splitlines(), self.text(version)[path].splitlines()
        matcher = SequenceMatcher(None, new, old, autojunk=False)
        for tag, first, last, there, _ in matcher.get_opcodes():
            if tag != "equal" and first < line <= last:
                return there + 1
        return line

    def propagated(self) -> list[Propagated]:
        """Return the outcome for each version, newest first."""
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

        `statement` is a file and a line of the work tree; needed if several statements log a name.
        """
        lines = self.text(run.version).get(place.path, "").splitlines()
        if not 1 <= place.line <= len(lines) + 1:
            raise UsageError(
                f"{place.path} of run {run.id} has {plural(len(lines), 'line')}, so nothing goes before line "
                f"{place.line}. `rearview diff {run.id}` shows it.",
                slug="no-place",
            )
        corrections = [
            Correction(
                *(run.version, self._identities[number], place.path, place.line),
                *(place.after, dict(place.renames), run.id),
            )
            for number in self._statements_for(names, statement)
        ]
        self.corrections.add(corrections)
        return corrections

    def _statements_for(self, names: Sequence[str], statement: tuple[str, int] | None) -> list[int]:
        """Return the numbers of the added statements that a correction is for."""
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
                    f"belong to {' '.join(names)} are at {self._places_of(range(len(self.added)))}.",
                    slug="no-probe",
                )
            return hits
        logging_statements = [number for number, probe in enumerate(self.added) if probe.names]
        for name in names or {
            name for number in logging_statements for name in self.added[number].names
        }:
            hits = [
                k
                for k in logging_statements
                if any(fits(each, name) for each in self.added[k].names)
            ]
            if len(hits) > 1:
                raise UsageError(
                    f"{len(hits)} statements log {name}: {self._places_of(hits)}. Say which one goes "
                    "there with `--statement FILE:LINE`.",
                    slug="which-statement",
                )
        return [
            k
            for k in logging_statements
            if not names or any(fits(each, n) for each in self.added[k].names for n in names)
        ]

    def _places_of(self, numbers: Collection[int]) -> str:
        return ", ".join(f"{self.added[k].path}:{self.added[k].line}" for k in numbers)

    @cached_property
    def _identities(self) -> list[Identity]:
        """The identity of each added statement, independent of its text."""
        seen: Counter[tuple[str, tuple[str, ...], tuple[str, ...]]] = Counter()
        identities = []
        for number, probe in enumerate(self.added):
            sets: tuple[str, ...] = ()
            if not probe.names:
                sets = tuple(name for name, _ in bound_by(self._trees[number][0]))
            key = (probe.path, probe.names, sets)
            identities.append(Identity(*key, occurrence=seen[key]))
            seen[key] += 1
        return identities

    @cached_property
    def _trees(self) -> list[tuple[ast.stmt, int]]:
        """Each added statement as a tree, and a number for its block."""
        statements_at: dict[tuple[str, int, int], tuple[ast.stmt, int]] = {}
        for path in {probe.path for probe in self.added}:
            blocks: list[list[ast.stmt]] = [ast.parse(self._named[path]).body]
            while blocks:
                block = blocks.pop()
                for stmt in block:
                    statements_at[path, stmt.lineno, stmt.col_offset] = (stmt, id(block))
                    blocks += [inner for _, _, inner in blocks_of(stmt)]
        return [statements_at[probe.path, probe.line, probe.column] for probe in self.added]

    def _by_hand(self) -> dict[int, dict[int, HandPlace]]:
        """Return the places given by hand for statements that are still there.

        Added statements above one in its block, which compute what it logs, go to the same place.
        """
        places_by_version: dict[int, dict[int, HandPlace]] = {}
        for correction in self.corrections.all:
            number = correction.statement.find(self._identities)
            if number is None or correction.version not in self.chain:
                continue
            place = self.renaming.at_newest_name(correction.version, correction.place)
            at = self.chain.index(correction.version)
            places_by_version.setdefault(at, {})[number] = place
        for places in places_by_version.values():
            for number, place in sorted(places.items()):
                for other in self._serving(number):
                    places.setdefault(other, place)
        return places_by_version

    def _serving(self, number: int) -> list[int]:
        """Return the added statements above one, in its block, that log nothing."""
        probe, block = self.added[number], self._trees[number][1]
        return [
            k
            for k, other in enumerate(self.added)
            if self._trees[k][1] == block
            and not other.names
            and (other.line, other.column) < (probe.line, probe.column)
            and probe.names
        ]
