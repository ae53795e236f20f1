"""Take the statement for a name from the work tree or, if that does not log it, from a past version.

A name that only a past version logs can be filled in all other runs: the statement of the newest version that
logs it is carried into all other versions, newer and older, as if that version had been edited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rearview.backfill.obstacles import logged_in_unparsable_file
from rearview.backfill.propagation import Probing, Propagated
from rearview.errors import SourceError, UsageError
from rearview.model import Run
from rearview.source.log_calls import LogPlace, names_logged
from rearview.source.probes.probe import Probes, fits
from rearview.source.propagate.remove_log_statements import without_logs


@dataclass(frozen=True)
class PastStatement:
    """The statements that log some names in the newest version that has them."""

    names: tuple[str, ...]
    version: str
    run: str
    """The newest run of that version."""
    places: tuple[LogPlace, ...]
    probings: tuple[Probing, ...]
    """Bring the statements into the other versions: without, then with, the variables that only they read;
    newer versions, then older ones."""

    def serving(self, run: Run) -> list[Probing]:
        """Return the ways to bring the statements into the version of a run."""
        return [each for each in self.probings if run.version in each.chain[1:]]

    def of(self, run: Run) -> Probes:
        """Return the probes for a run; none for one whose own source logs the names."""
        refusal: SourceError | None = None
        for probing in self.serving(run):
            own = names_logged(probing.text(run.version))
            if all(any(fits(each, name) for each in own) for name in self.names):
                return Probes((), probing.text(run.version))
            try:
                probes = probing.of(run, self.names)
            except SourceError as exc:
                refusal = refusal or exc
                continue
            if all(probes.of(name) for name in self.names):
                return probes
        if refusal is not None:
            raise refusal
        return Probes((), self.probings[0].text(run.version))

    def propagated(self) -> list[Propagated]:
        """Return the outcome for each other version, newest first."""
        by_version: dict[str, Propagated] = {}
        for probing in self.probings:
            for each in probing.propagated()[1:]:
                if each.version not in by_version or by_version[each.version].reason:
                    by_version[each.version] = each
        newest_first = [v for v in self.probings[0].all_versions if v in by_version]
        return [by_version[version] for version in newest_first]

    def __str__(self) -> str:
        places = ", ".join(f"{each.path}:{each.line}" for each in self.places)
        return (
            f"{', '.join(self.names)}: the work tree does not log this; the statement is taken from "
            f"{places} of run {self.run} (version {self.version[:12]}), the newest that has it"
        )


@dataclass
class StatementSources:
    """The probes of the work tree and, for names that it does not log, those of past versions."""

    probing: Probing
    _by_names: dict[tuple[str, ...], PastStatement | None] = field(default_factory=dict)

    @property
    def edited(self) -> dict[str, str]:
        """The Python files of the work tree."""
        return self.probing.edited

    def of(self, run: Run, names: Sequence[str] = ()) -> Probes:
        """Return the probes for a run that log `names`."""
        past = self.past(names)
        return self.probing.of(run, names) if past is None else past.of(run)

    def past(self, names: Sequence[str]) -> PastStatement | None:
        """Return where the statements come from, if that is a past version; None: the work tree."""
        key = tuple(names)
        if key not in self._by_names:
            self._by_names[key] = self._find(key)
        return self._by_names[key]

    def is_carried(self, run: Run, names: Sequence[str], source: Mapping[str, str]) -> bool:
        """Return True if `source` is the version of a run with statements that were carried there."""
        return any(each.is_carried(run, names, source) for each in self._serving(run, names))

    def disprove(self, run: Run, names: Sequence[str], where: tuple[str, int], how: str) -> bool:
        """Note that a carried statement is wrong at its place; return False if there is none."""
        return any(each.disprove(run, names, where, how) for each in self._serving(run, names))

    def _serving(self, run: Run, names: Sequence[str]) -> list[Probing]:
        past = self.past(names)
        return [self.probing] if past is None else past.serving(run)

    @property
    def used(self) -> list[PastStatement]:
        """The past statements that were requested so far."""
        return [each for each in self._by_names.values() if each is not None]

    def _find(self, names: tuple[str, ...]) -> PastStatement | None:
        lacking = tuple(name for name in names if not self.probing.logs(name))
        broken = any(logged_in_unparsable_file(name, self.edited) for name in lacking)
        if not lacking or broken:
            return None
        for at, version in enumerate(self.probing.chain):
            logged = names_logged(self.probing.text(version))
            places = [
                place
                for name in lacking
                for pattern, logged_places in logged.items()
                if fits(pattern, name)
                for place in logged_places
            ]
            if all(any(fits(each, name) for each in logged) for name in lacking):
                if lacking != names:
                    others = [name for name in names if name not in lacking]
                    raise UsageError(
                        f"The work tree logs {', '.join(others)} but not {', '.join(lacking)}, which "
                        f"version {version[:12]} logs. Fill them one after the other: "
                        f"`rearview backfill {' '.join(lacking)}`.",
                        slug="two-sources-of-names",
                    )
                return self._past_statement(names, at, places)
        return None

    def _past_statement(
        self, names: tuple[str, ...], at: int, places: Sequence[LogPlace]
    ) -> PastStatement | None:
        chain = self.probing.chain
        version = chain[at]
        probings: list[Probing] = []
        text = self.probing.text(version)
        for with_values in (False, True):
            base = without_logs(text, names, with_values=with_values)
            if base is None:
                raise UsageError(
                    f"{', '.join(names)}: the work tree does not log this. Version {version[:12]} does, "
                    f"at {places[0].path}:{places[0].line}, but in a statement that does more than log. "
                    f"Add a statement of its own to the newest source.",
                    slug="no-probe",
                )
            if with_values and base == without_logs(text, names):
                break
            # nearest first, as the versions before an edited work tree are
            sides = (tuple(reversed(chain[:at])), chain[at + 1 :])
            probings += [self.probing.edited_as(text, base, each, names) for each in sides]
        runs = [run.id for run in self.probing.runs if run.version == version]
        return PastStatement(
            names, version, runs[-1], tuple(dict.fromkeys(places)), tuple(probings)
        )
