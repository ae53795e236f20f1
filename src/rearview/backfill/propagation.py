"""Insert the statements that the work tree adds into the source of every past run.

If a version differs from the work tree in more than the added statements, the statements are *carried* into that
version: a line is searched where each belongs, with a confidence from 0 to 1. Lines that the user named for a
statement (`manual_placement`) are always used. Files may also have been renamed: `Renaming` follows them from version
to version.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property

from rearview.backfill.manual_placement import Correction, Corrections, Identity
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
    """Finds the path that a file of one version has in another version, if the file was renamed."""

    text: Callable[[str], Texts]
    """Function that returns the Python files of a version, path -> text."""
    chain: Sequence[str]
    """Ids of all versions that were run, newest first."""
    edited: Texts
    """The Python files of the work tree, path -> text."""
    _newest_names: dict[str, FileNames] = field(default_factory=dict)

    def names_in_work_tree(self, version: str, used: Collection[str] | None = None) -> FileNames:
        """Return the paths that the files of `version` have in the work tree.

        `used` are the paths that the caller needs; None means all. If the work tree has a file at each of these paths,
        the files are assumed not to have been renamed, which is fast.
        """
        old = self.text(version)
        if all(path in self.edited for path in (old if used is None else used) if path in old):
            return FileNames({path: path for path in old if path in self.edited})
        if version not in self.chain:
            return renames(old, self.edited)
        file_names = self._newest_to_work_tree.after(self.names_in_newest(version))
        return self._pair_remaining(file_names, old, self.edited)

    @cached_property
    def _newest_to_work_tree(self) -> FileNames:
        return renames(self.text(self.chain[0]), self.edited)

    def names_in_newest(self, version: str) -> FileNames:
        """Return the paths that the files of `version` have in the newest version that was run."""
        newer_version: str | None = None
        for each in self.chain[: self.chain.index(version) + 1]:
            if each not in self._newest_names:
                old = self.text(each)
                if newer_version is None:
                    self._newest_names[each] = FileNames({path: path for path in old})
                else:
                    step = renames(old, self.text(newer_version))
                    later_names = self._newest_names[newer_version].after(step)
                    self._newest_names[each] = self._pair_remaining(
                        later_names, old, self.text(self.chain[0])
                    )
            newer_version = each
        return self._newest_names[version]

    def _pair_remaining(self, file_names: FileNames, old: Texts, new: Texts) -> FileNames:
        """Return `file_names` completed: each `old` file that it lacks is compared directly with the `new` files.

        `file_names` was found by following files from version to version, and a version in between may lack a file.
        """
        unpaired = {path: old[path] for path in old if path not in file_names.now}
        if not unpaired:
            return file_names
        paired_paths = set(file_names.now.values())
        free = {path: text for path, text in new.items() if path not in paired_paths}
        added_names = renames(unpaired, free)
        doubtful = {
            path: candidates
            for path, candidates in {**file_names.doubtful, **added_names.doubtful}.items()
            if path not in added_names.now
        }
        return FileNames({**file_names.now, **added_names.now}, doubtful)

    def under_newest_names(self, version: str) -> dict[str, str]:
        """Return the files of `version`, with the paths that they have in the newest version that was run as keys."""
        old = self.text(version)
        newest_names = self.names_in_newest(version).unique_new_paths(old)
        return {newest_name: old[path] for path, newest_name in newest_names.items()}

    def under_own_names(self, version: str, outcome: VersionOutcome) -> VersionOutcome:
        """Return `outcome` with the paths that its files have in `version`, not those of the newest version.

        The reasons of the result also say which files have another path in the work tree.
        """
        old = self.text(version)
        newest_names = self.names_in_newest(version).unique_new_paths(old)
        own_names = {newest_name: path for path, newest_name in newest_names.items()}
        if all(path == newest_name for newest_name, path in own_names.items()):
            return outcome
        files = {own_names[path]: text for path, text in outcome.files.items()}
        placed = tuple(
            replace(statement, path=own_names[statement.path]) for statement in outcome.placed
        )
        today = self.names_in_work_tree(version).changed
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
        """Return `place`, a line in `version`, with the path that its file has in the newest version that was run."""
        newest_names = self.names_in_newest(version).unique_new_paths(self.text(version))
        return replace(place, path=newest_names.get(place.path, place.path))

    def sentences(self, with_probes: Iterable[tuple[str, Probes]]) -> list[str]:
        """Return a sentence for the user about each file with probes that had another path in some versions.

        `with_probes` has (version of the run, probes in that version) for each run.
        """
        runs: Counter[tuple[str, str]] = Counter()
        for version, probes in with_probes:
            paths = {probe.path for probe in probes.probes}
            changed = self.names_in_work_tree(version, paths).changed
            runs.update((changed[path], path) for path in paths if path in changed)
        return [
            f"{name} is assumed to be the file that was {old_name} in {count} run{'s' * (count > 1)}"
            for (name, old_name), count in sorted(runs.items())
        ]


@dataclass(frozen=True, slots=True)
class Propagated:
    """The result of inserting the statements of the work tree into one version: a diff, or the reason for refusing."""

    version: str
    runs: tuple[str, ...]
    """Ids of the runs of `version`."""
    diff: str
    confidence: float
    """How certain it is that the statements were inserted at the right lines, from 0 to 1."""
    reasons: tuple[str, ...]
    """Sentences on which the confidence is based, and on variables and files with other names in `version`."""
    reason: str = ""
    """Why the statements cannot be inserted; empty if they were inserted."""


@dataclass
class Probing:
    """Inserts the probes of the work tree into past versions.

    If a version is equal to the work tree except for the probes, they are inserted as they are. If not, they are
    carried from version to version along the `chain`, from the newest to the oldest. Added statements are numbered by
    their index in `added`.
    """

    versions: Versions
    runs: Sequence[Run]
    corrections: Corrections
    """Lines that the user named for statements in past versions."""
    only: tuple[str, ...] = ()
    """If not empty, only the statements that log these names are inserted, with the statements they depend on."""
    sure: float = MIN_CONFIDENCE
    """Least confidence, from 0 to 1; a version is refused if the lines for its statements are less certain."""
    disproved: dict[str, dict[int, dict[tuple[str, int], str]]] = field(default_factory=dict)
    """Version -> number of a statement -> (file, line) where a replay showed that the statement is wrong -> why."""
    _texts: dict[str, dict[str, str]] = field(default_factory=dict)
    _by_names: dict[tuple[str, ...], Probing] = field(default_factory=dict)

    @cached_property
    def edited(self) -> dict[str, str]:
        """The Python files of the work tree, path -> text."""
        return self.text(self.versions.save(WORKTREE))

    @cached_property
    def chain(self) -> tuple[str, ...]:
        """Ids of the versions into which statements are carried, newest first: by default all that were run."""
        return self.all_versions

    def text(self, version: str) -> dict[str, str]:
        """Return path -> text of the Python files of a version, without files that cannot be decoded."""
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
        """Return the probes that log `names` in the source of `run`; raise if it is uncertain where they belong there.

        If `names` is empty, return all probes that the work tree adds.
        """
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
        file_names = self.renaming.names_in_work_tree(run.version, used)
        try:
            probes = find(old, self.edited, used=used, names=file_names)
        except ProbeError:
            # a run of the newest version is refused: the message tells the user what else the edit changed
            edited_version = run.version == self.chain[0] and not self.only
            carries = bool(self.added) or self.carrying(names) is not self
            if not names or edited_version or not carries:
                raise
            probes = None
        if probes is not None and all(probes.of(name) for name in names):
            return self._only_requested(run, probes, names)
        probing = self.carrying(names)
        if probing is not self and run.version in probing.chain:
            return probing.of(run, names)
        if run.version not in self.chain or not self.added:
            if probes is None:
                return find(old, self.edited, used=used, names=file_names)
            return probes
        outcome = self.outcomes[self.chain.index(run.version)]
        if outcome.refused:
            where = "The statement has no certain place in the source of {run}: ".format
            advice = (
                f"{outcome.reason}. Put it there by hand: `rearview propagate "
                f"{(names or ('NAME',))[0]} --correct {run.id} FILE:LINE`."
            )
            raise SourceError(
                where(run=f"run {run.id}") + advice,
                general=where(run="the run") + advice,
                slug="no-place",
            )
        return find(old, {**old, **outcome.files}, used=used)

    def _only_requested(self, run: Run, probes: Probes, names: Sequence[str]) -> Probes:
        """Return the probes of `run` without the log statements that `names` do not need.

        Return `probes` unchanged if it has no others, or if the needed statements cannot be inserted alone.
        """
        probing = self.carrying(names)
        if not names or not probing.only or run.version not in probing.chain:
            return probes
        kept_probes = needed_probes(probes, names)
        if all(probe in kept_probes or probe.kind is ProbeKind.IMPORT for probe in probes.probes):
            return probes
        outcome = probing.outcomes[probing.chain.index(run.version)]
        if outcome.refused:
            return probes
        old = self.text(run.version)
        used = run.end.files
        try:
            requested = find(old, {**old, **outcome.files}, used=used)
        except ProbeError:
            return probes
        return requested if all(requested.of(name) for name in names) else probes

    def carrying(self, names: Sequence[str]) -> Probing:
        """Return the probing that carries only the statements that log `names`, and the statements these depend on.

        If the newest version has these statements already, the chain of the result begins with the newest version that
        lacks them. Return this probing itself if `only` is set, if `names` is empty, or if no version lacks them.
        """
        requested = tuple(names)
        if self.only or not requested:
            return self
        if requested not in self._by_names:
            patterns = {each for probe in self.added for each in probe.names}
            if all(any(fits(each, name) for each in patterns) for name in requested):
                self._by_names[requested] = self._for_names(requested, self.runs)
            else:
                self._by_names[requested] = self._from_older_version(requested)
        return self._by_names[requested]

    def _for_names(self, names: tuple[str, ...], runs: Sequence[Run]) -> Probing:
        """Return a probing that inserts only the statements that log `names`, into the versions of `runs`."""
        probing = Probing(
            self.versions, runs, self.corrections, names, self.sure, _texts=self._texts
        )
        probing.__dict__["edited"] = self.edited
        # with the same runs, the versions are the same, too: reuse properties that were computed from them
        if runs is self.runs:
            probing.__dict__["renaming"] = self.renaming
            probing.__dict__["_newest"] = self._newest
        return probing

    def edited_as(
        self,
        edited: dict[str, str],
        base: dict[str, str],
        past_versions: Sequence[str],
        names: tuple[str, ...],
    ) -> Probing:
        """Return the probing that inserts the statements for `names` that the files `edited` add to the files `base`.

        `edited` is used like the work tree. The chain is `base`, under an id that no run has, and then
        `past_versions`, which must be ordered from the version nearest to `base` to the most distant one.
        """
        base_id = f"base of {len(self._texts)}"
        texts = {**self._texts, base_id: base}
        probing = Probing(
            self.versions, self.runs, self.corrections, names, self.sure, _texts=texts
        )
        probing.__dict__["edited"] = edited
        probing.__dict__["chain"] = (base_id, *past_versions)
        return probing

    @property
    def all_versions(self) -> tuple[str, ...]:
        """Ids of all versions that were run, newest first; unlike `chain`, it never contains `base` of `edited_as`."""
        return tuple(dict.fromkeys(run.version for run in reversed(self.runs) if run.version))

    def logs(self, name: str) -> bool:
        """Return True if any statement of the work tree logs `name`."""
        return any(fits(each, name) for each in self._patterns)

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(names_logged(self.edited))

    def _from_older_version(self, names: tuple[str, ...]) -> Probing:
        """Return a probing whose chain begins with the newest version that lacks the statements that log `names`.

        Return this probing itself if there is no such version.
        """
        if not all(map(self.logs, names)):
            return self
        for at, version in enumerate(self.chain[1:], 1):
            try:
                probes = check(
                    self.text(version), self.edited, names=self.renaming.names_in_work_tree(version)
                )[0]
            except SourceError:
                continue
            if all(probes.of(name) for name in names):
                versions = set(self.chain[at:])
                return self._for_names(names, [run for run in self.runs if run.version in versions])
        return self

    @cached_property
    def added(self) -> tuple[Probe, ...]:
        """The statements that the work tree adds to the newest version of the chain, sorted by file and line.

        If `only` is set, statements that these names do not need are left out.
        """
        probes: Collection[Probe] = self._newest.probes if self._newest is not None else ()
        if self.only and self._newest is not None:
            probes = needed_probes(self._newest, self.only)
        return tuple(sorted(probes, key=lambda probe: (probe.path, probe.first)))

    @cached_property
    def _newest(self) -> Probes | None:
        if not self.chain:
            return None
        newest = self.chain[0]
        return check(
            self.text(newest), self.edited, names=self.renaming.names_in_work_tree(newest)
        )[0]

    @cached_property
    def outcomes(self) -> tuple[VersionOutcome, ...]:
        """The result of carrying the added statements into each version, in the order of `chain`."""
        versions = [self.renaming.under_newest_names(version) for version in self.chain]
        extractions = self._newest.extractions if self._newest is not None else ()
        edited = {
            **self._edited_under_newest_names,
            **{path: each.text for path, each in self._separated.items()},
        }
        through_versions = through(
            *(edited, self._statements, versions, self._manual_places()),
            list(map(self._shifted, extractions)),
            self.sure,
            {self.chain.index(version): places for version, places in self.disproved.items()},
        )
        return tuple(
            self.renaming.under_own_names(version, outcome)
            for version, outcome in zip(self.chain, through_versions, strict=True)
        )

    @cached_property
    def renaming(self) -> Renaming:
        """Finds the paths that renamed files had in past versions."""
        return Renaming(self.text, self.chain, self.edited)

    @cached_property
    def _edited_under_newest_names(self) -> dict[str, str]:
        """The files of the work tree, with the paths that they have in the newest version that was run as keys."""
        if not self.chain:
            return self.edited
        newest = self.chain[0]
        return self.renaming.names_in_work_tree(newest).with_old_names(
            self.edited, self.text(newest)
        )

    @cached_property
    def _separated(self) -> dict[str, SeparatedLines]:
        """Path -> text of each file with added statements, with line breaks inserted so that these share no line."""
        positions: dict[str, list[tuple[int, int]]] = {}
        for probe in self.added:
            positions.setdefault(probe.path, []).append((probe.line, probe.column))
        return {
            path: separate_lines(self._edited_under_newest_names[path], lines)
            for path, lines in positions.items()
        }

    @cached_property
    def _statements(self) -> list[Statement]:
        statements = []
        for probe in self.added:
            # no other statement can be on the line of a decorator
            column = probe.column if probe.first == probe.line else 0
            first = self._separated[probe.path].line(probe.first, column)
            statements.append(Statement(probe.path, (first, first + probe.last - probe.first)))
        return statements

    def _shifted(self, extraction: VariableExtraction) -> VariableExtraction:
        """Return `extraction` with its line numbers increased by the line breaks that `_separated` inserted."""
        divided_lines = (
            self._separated[extraction.path].breaks if extraction.path in self._separated else ()
        )
        for line, _ in reversed(divided_lines):
            extraction = extraction.shifted(extraction.path, line + 1, 1)
        return extraction

    def is_carried(self, run: Run, names: Sequence[str], source: Texts) -> bool:
        """Return True if `source` (path -> text) is the source of `run` with carried statements that log `names`.

        Return False for the newest version that was run, because the user edited that version directly.
        """
        probing = self.carrying(names)
        if run.version not in probing.chain or run.version == self.chain[0] or not probing.added:
            return False
        outcome = probing.outcomes[probing.chain.index(run.version)]
        return bool(outcome.files) and all(source.get(p) == t for p, t in outcome.files.items())

    def disprove(self, run: Run, names: Sequence[str], where: tuple[str, int], how: str) -> bool:
        """Record that a carried statement was inserted at a wrong line, so that the next likely line is tried.

        `where` is (file, line) in the source of `run` with the statements inserted, at which the replay failed; `how`
        says how it failed. Return False if no carried statement is there.
        """
        probing = self.carrying(names)
        at = probing.chain.index(run.version) if run.version in probing.chain else None
        if at is None or probing.outcomes[at].refused:
            return False
        outcome = probing.outcomes[at]
        path, line = where
        newest_names = (
            self.renaming.names_in_newest(run.version).unique_new_paths(self.text(run.version))
            if at
            else {}
        )
        for number, (statement, placed) in enumerate(
            zip(outcome.locations, outcome.placed, strict=True)
        ):
            first, last = statement.lines
            if (
                statement.path == newest_names.get(path, path)
                and first <= line <= last
                and placed.text
            ):
                places = probing.disproved.setdefault(run.version, {}).setdefault(number, {})
                old_line = self._old_line(run.version, path, probing, line)
                places[statement.path, placed.line] = f"before line {old_line} of {path} {how}"
                probing.__dict__.pop("outcomes", None)
                return True
        return False

    def _old_line(self, version: str, path: str, probing: Probing, line: int) -> int:
        """Return the line of the recorded file `path` before which `line` of the changed file was inserted."""
        files = probing.outcomes[probing.chain.index(version)].files
        new, old = files[path].splitlines(), self.text(version)[path].splitlines()
        matcher = SequenceMatcher(None, new, old, autojunk=False)
        for tag, first, last, old_index, _ in matcher.get_opcodes():
            if tag != "equal" and first < line <= last:
                return old_index + 1
        return line

    def propagated(self) -> list[Propagated]:
        """Return the result of carrying the added statements into each version, in the order of `chain`."""
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
        """Store `place` in the version of `run` for the statements that log `names`; return the stored corrections.

        `statement` is (file, line) of a statement in the work tree; it must be given if several statements log a name.
        Raise if the file has no such line.
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
        """Return the numbers of the added statements that log `names`, or of those at `statement` (file, line).

        Raise if several statements log one name, or if no added statement is at `statement`.
        """
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
        """The `Identity` of each added statement, in the order of `added`."""
        occurrences: Counter[tuple[str, tuple[str, ...], tuple[str, ...]]] = Counter()
        identities = []
        for number, probe in enumerate(self.added):
            sets: tuple[str, ...] = ()
            if not probe.names:
                sets = tuple(name for name, _ in bound_by(self._trees[number][0]))
            key = (probe.path, probe.names, sets)
            identities.append(Identity(*key, occurrence=occurrences[key]))
            occurrences[key] += 1
        return identities

    @cached_property
    def _trees(self) -> list[tuple[ast.stmt, int]]:
        """(syntax tree, id of the block that contains it) of each added statement, in the order of `added`."""
        statements_at: dict[tuple[str, int, int], tuple[ast.stmt, int]] = {}
        for path in {probe.path for probe in self.added}:
            blocks: list[list[ast.stmt]] = [ast.parse(self._edited_under_newest_names[path]).body]
            while blocks:
                block = blocks.pop()
                for stmt in block:
                    statements_at[path, stmt.lineno, stmt.col_offset] = (stmt, id(block))
                    blocks += [inner for _, _, inner in blocks_of(stmt)]
        return [statements_at[probe.path, probe.line, probe.column] for probe in self.added]

    def _manual_places(self) -> dict[int, dict[int, HandPlace]]:
        """Return the lines that the user named: index of a version in `chain` -> number of a statement -> its line.

        The line of a log statement also holds for the added statements that support it (`_supporting`).
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
                for supporting in self._supporting(number):
                    places.setdefault(supporting, place)
        return places_by_version

    def _supporting(self, number: int) -> list[int]:
        """Return the numbers of added statements that log nothing and precede log statement `number` in its block."""
        probe, block = self.added[number], self._trees[number][1]
        return [
            k
            for k, statement in enumerate(self.added)
            if self._trees[k][1] == block
            and not statement.names
            and (statement.line, statement.column) < (probe.line, probe.column)
            and probe.names
        ]
