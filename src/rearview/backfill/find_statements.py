"""Find the statements that log requested names: in the work tree or, if it does not log them, in a past version.

A name that only past versions log can be filled in the runs of all other versions. The statement is taken from the
newest version that logs the name, and is inserted into all newer and older versions.

If no statement logs a name, functions of this module return hints for the user: the statement is outside the project,
the script has moved, or a file does not parse.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rearview.backfill.propagation import Probing, Propagated
from rearview.errors import SourceError, UsageError
from rearview.model import Run
from rearview.source.log_calls import LogPlace, names_logged
from rearview.source.probes.probe import Probes, fits
from rearview.source.propagate.remove_log_statements import without_logs
from rearview.source.text import try_parse
from rearview.store.project import repository_top

_MAX_FILES = 5_000
"""Most Python files of a git repository that are searched for a log statement."""
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


@dataclass(frozen=True)
class PastStatement:
    """The statements of a past version that log `names`; the version is the newest one that contains them."""

    names: tuple[str, ...]
    version: str
    run: str
    """Id of the newest run of `version`."""
    places: tuple[LogPlace, ...]
    """Files and lines of the statements in `version`."""
    probings: tuple[Probing, ...]
    """Objects that insert the statements into newer versions (the first) and older versions (the second). Two more
    follow if the statements read variables that nothing else reads: these two also insert the assignments of the
    variables.
    """

    def probings_for(self, run: Run) -> list[Probing]:
        """Return those of `probings` that can insert the statements into the version of `run`, in the order to try."""
        return [each for each in self.probings if run.version in each.chain[1:]]

    def of(self, run: Run) -> Probes:
        """Return the probes that log `names` in the source of `run`; raise if no place for them is certain.

        Return no probes if the recorded source of the run logs the names itself, or if none can be inserted.
        """
        refusal: SourceError | None = None
        for probing in self.probings_for(run):
            recorded_names = names_logged(probing.text(run.version))
            if all(any(fits(each, name) for each in recorded_names) for name in self.names):
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
        """Return the result of inserting the statements into each version except `version`, newest version first."""
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
    """Finds the statements that log names: in the work tree or, for names that it does not log, in past versions."""

    probing: Probing
    _past_statements: dict[tuple[str, ...], PastStatement | None] = field(default_factory=dict)
    """Requested names -> their statements in a past version, or None if those of the work tree are used."""

    @property
    def edited(self) -> dict[str, str]:
        """The Python files of the work tree, path -> text."""
        return self.probing.edited

    def of(self, run: Run, names: Sequence[str] = ()) -> Probes:
        """Return the probes that log `names` in the source of `run`; no names: all that the work tree adds."""
        past = self.past(names)
        return self.probing.of(run, names) if past is None else past.of(run)

    def past(self, names: Sequence[str]) -> PastStatement | None:
        """Return the statements of a past version that log `names`, or None if those of the work tree are used."""
        key = tuple(names)
        if key not in self._past_statements:
            self._past_statements[key] = self._find(key)
        return self._past_statements[key]

    def is_carried(self, run: Run, names: Sequence[str], source: Mapping[str, str]) -> bool:
        """Return True if `source` is the version of `run` with inserted statements; see `Probing.is_carried`."""
        return any(each.is_carried(run, names, source) for each in self._probings_for(run, names))

    def disprove(self, run: Run, names: Sequence[str], where: tuple[str, int], how: str) -> bool:
        """Record that the statement inserted at `where` is wrong there; see `Probing.disprove` for all parameters.

        Return False if no statement was inserted at `where`.
        """
        return any(each.disprove(run, names, where, how) for each in self._probings_for(run, names))

    def _probings_for(self, run: Run, names: Sequence[str]) -> list[Probing]:
        past = self.past(names)
        return [self.probing] if past is None else past.probings_for(run)

    @property
    def used(self) -> list[PastStatement]:
        """All statements of past versions that `past` has returned."""
        return [each for each in self._past_statements.values() if each is not None]

    def _find(self, names: tuple[str, ...]) -> PastStatement | None:
        """Return the statements of the newest version that logs `names`.

        Return None if the work tree logs all `names`, if no version does, or if a file that may log them cannot be
        parsed.
        """
        unlogged = tuple(name for name in names if not self.probing.logs(name))
        broken = any(logged_in_unparsable_file(name, self.edited) for name in unlogged)
        if not unlogged or broken:
            return None
        for at, version in enumerate(self.probing.chain):
            logged = names_logged(self.probing.text(version))
            places = [
                place
                for name in unlogged
                for pattern, logged_places in logged.items()
                if fits(pattern, name)
                for place in logged_places
            ]
            if all(any(fits(each, name) for each in logged) for name in unlogged):
                if unlogged != names:
                    logged_now = [name for name in names if name not in unlogged]
                    raise UsageError(
                        f"The work tree logs {', '.join(logged_now)} but not {', '.join(unlogged)}, which "
                        f"version {version[:12]} logs. Fill them one after the other: "
                        f"`rearview backfill {' '.join(unlogged)}`.",
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
            # newer and older versions, each from the version next to `version` to the most distant one
            sides = (tuple(reversed(chain[:at])), chain[at + 1 :])
            probings += [self.probing.edited_as(text, base, each, names) for each in sides]
        runs = [run.id for run in self.probing.runs if run.version == version]
        return PastStatement(
            names, version, runs[-1], tuple(dict.fromkeys(places)), tuple(probings)
        )


def logged_outside_project(name: str, root: Path) -> str:
    """Return a hint to the user if a file outside the project folder `root`, but in its git repository, logs `name`.

    Return an empty text if there is no such file.
    """
    top = repository_top(root.resolve())
    if top is None or top == root.resolve():
        return ""
    for path in _python_files(top, root.resolve()):
        try:
            text = path.read_text("utf-8")
        except (OSError, ValueError):
            continue
        if name in text and name in names_logged({path.name: text}):
            return (
                f" {path} logs it, but is outside the project {root}; only files inside it are "
                f"recorded: set REARVIEW_ROOT={top} and record a new run."
            )
    return ""


def script_is_gone(run: Run, root: Path) -> str:
    """Return a hint to the user if the script of `run` no longer exists at its path; an empty text if it exists."""
    target = run.facts.target or run.script
    if run.facts.module or not target.endswith(".py"):
        return ""
    script = Path(run.current_path(os.path.join(run.cwd or str(root), target), str(root)))  # noqa: PTH118
    if script.exists():
        return ""
    return f" The run's script {script} is not there any more: put the statement where its code is now."


def logged_in_unparsable_file(name: str, files: Mapping[str, str]) -> str:
    """Return a hint to the user if one of `files` (path -> text) does not parse; an empty text if all of them parse.

    The log statements of such a file cannot be found. If there are several, the hint names one that mentions `name`.
    """
    reasons = {path: try_parse(text) for path, text in files.items()}
    broken = {path: reason for path, reason in reasons.items() if isinstance(reason, str)}
    for path, reason in broken.items():
        if name in files[path]:
            return f" {path} mentions it, but {reason}: correct that first."
    for path, reason in broken.items():
        return f" The log statements of {path} are not seen, because {reason}: correct that first."
    return ""


def _python_files(top: Path, root: Path) -> Iterator[Path]:
    """Yield at most `_MAX_FILES` Python files below `top` that are not below the project's folder `root`."""
    count = 0
    for folder, folders, names in os.walk(top):
        folder_path = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED_FOLDERS
            and folder_path / name != root
            and not (folder_path / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            if name.endswith(".py"):
                count += 1
                if count > _MAX_FILES:
                    return
                yield folder_path / name
