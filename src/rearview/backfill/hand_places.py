"""Places that the user gave by hand for added statements: stored in a file, listed, removed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rearview.durable_files import add_check, is_intact
from rearview.errors import DamagedError, StoreError
from rearview.source.log_calls import names_logged
from rearview.source.probes.probe import fits
from rearview.source.propagate.versions import HandPlace
from rearview.store.create_files import make_folder, publish

FORMAT = 2
"""Number of the file's format. The first format had no number: version -> statement texts with lines."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies an added statement, even after its text was changed."""

    path: str
    """Its file, with the name in the newest version that was run."""
    logs: tuple[str, ...]
    """The names that it logs."""
    sets: tuple[str, ...] = ()
    """The names that it binds, if it logs nothing."""
    occurrence: int = 0
    """Its number among the statements of the file that log (or bind) the same names."""

    def find(self, statements: Sequence[Identity]) -> int | None:
        """Return the index of this statement among `statements`; None if it is not certain.

        >>> now = [Identity("t.py", ("loss",)), Identity("t.py", ("norm",))]
        >>> Identity("t.py", ("norm",)).find(now), Identity("t.py", ("bce",)).find(now)
        (1, None)
        """
        own = set(self.logs or self.sets)
        alike = [
            (at, identity)
            for at, identity in enumerate(statements)
            if bool(identity.logs) == bool(self.logs) and own & set(identity.logs or identity.sets)
        ]
        equal = [
            (at, identity) for at, identity in alike if set(identity.logs or identity.sets) == own
        ]
        if not equal and len(alike) > 1:
            return None
        candidates = equal or alike
        in_same_file = [(at, identity) for at, identity in candidates if identity.path == self.path]
        if not in_same_file and len({identity.path for _, identity in candidates}) == 1:
            in_same_file = candidates  # the file was renamed
        return in_same_file[self.occurrence][0] if self.occurrence < len(in_same_file) else None


@dataclass(frozen=True, slots=True)
class Correction:
    """Where one statement goes in one version, as the user decided."""

    version: str
    statement: Identity
    path: str
    """The file, with its name in that version."""
    line: int
    after: bool = False
    """Whether the statement goes after the statement on the line, instead of before the line."""
    renames: Mapping[str, str] = field(default_factory=dict)
    run: str = ""
    """The run that the user named."""

    @property
    def place(self) -> HandPlace:
        """The place, for propagation."""
        return HandPlace(self.path, self.line, self.after, self.renames)

    def concerns(self, names: Collection[str]) -> bool:
        """Return True if the statement logs one of `names`."""
        return any(fits(pattern, name) for pattern in self.statement.logs for name in names)


@dataclass
class Corrections:
    """The file that stores the corrections of a project."""

    file: Path

    @cached_property
    def _read(self) -> tuple[tuple[Correction, ...], int]:
        """The corrections, and how many entries of the file could not be read."""
        try:
            text = self.file.read_bytes()
            content = json.loads(text)
        except FileNotFoundError:
            return (), 0
        except OSError as exc:
            raise StoreError(
                f"{self.file} cannot be read: {exc.strerror}. It holds the places that you gave by hand; "
                "make it readable.",
                slug="store-unreadable",
            ) from exc
        except ValueError:
            return (), 1
        if is_intact(text) is False or (
            isinstance(content, dict) and "c" not in content and "format" in content
        ):
            raise DamagedError(
                f"{self.file} is not as it was written: a place given by hand may have been changed. "
                "Remove the file and give the places again (`rearview propagate --correct`).",
                slug="damaged",
            )
        if not isinstance(content, dict):
            return (), 1
        if "format" not in content:
            return _first_format(content)
        if content["format"] != FORMAT:
            raise StoreError(
                f"{self.file} has format {content['format']}; this Rearview reads up to {FORMAT}. "
                "Use a newer Rearview.",
                slug="store-newer",
            )
        corrections, lost = [], 0
        for each in content.get("corrections", ()):
            try:
                corrections.append(_correction(each))
            except (TypeError, KeyError, ValueError):
                lost += 1
        return tuple(corrections), lost

    @property
    def all(self) -> tuple[Correction, ...]:
        """All corrections, in the order in which they were made."""
        return self._read[0]

    @property
    def note(self) -> str:
        """A sentence about entries that cannot be used; empty if there are none."""
        lost = self._read[1]
        if not lost:
            return ""
        return (
            f"{lost} correction{'s' * (lost > 1)} in {self.file} "
            f"{'is' if lost == 1 else 'are'} ignored: it is not certain which statement was meant. "
            "Make it again with `rearview propagate NAME --correct RUN FILE:LINE`."
        )

    def add(self, corrections: Sequence[Correction]) -> None:
        """Store corrections; each replaces an older one for the same statement and version."""
        fresh = {(correction.version, correction.statement) for correction in corrections}
        older = [
            correction
            for correction in self.all
            if (correction.version, correction.statement) not in fresh
        ]
        self._write([*older, *corrections])

    def remove(self, corrections: Collection[Correction]) -> None:
        """Delete corrections."""
        self._write([correction for correction in self.all if correction not in corrections])

    def _write(self, corrections: Sequence[Correction]) -> None:
        make_folder(self.file.parent)
        content = {
            "format": FORMAT,
            "corrections": [asdict(correction) for correction in corrections],
        }
        publish(self.file, add_check(json.dumps(content).encode()))
        self.__dict__.pop("_read", None)


def _correction(stored: Mapping[str, Any]) -> Correction:
    identity = stored["statement"]
    statement = Identity(
        str(identity["path"]),
        tuple(map(str, identity["logs"])),
        tuple(map(str, identity["sets"])),
        int(identity["occurrence"]),
    )
    return Correction(
        str(stored["version"]),
        statement,
        str(stored["path"]),
        int(stored["line"]),
        bool(stored["after"]),
        {str(new): str(old) for new, old in stored["renames"].items()},
        str(stored["run"]),
    )


def _first_format(content: Mapping[str, Any]) -> tuple[tuple[Correction, ...], int]:
    """Read a file of the first format, in which a statement is identified by the names its text logs."""
    all_corrections: list[Correction] = []
    lost = 0
    for version, placed in content.items():
        corrections = []
        try:
            for each in placed:
                path, line, text = str(each["path"]), int(each["line"]), str(each["text"])
                logs = tuple(names_logged({path: _outdented(text)}))
                if logs:
                    corrections.append(Correction(version, Identity(path, logs), path, line))
        except (TypeError, KeyError, ValueError, SyntaxError):
            corrections = []
        if corrections and len({correction.statement for correction in corrections}) == len(
            corrections
        ):
            all_corrections += corrections
        else:
            lost += 1
    return tuple(all_corrections), lost


def _outdented(text: str) -> str:
    lines = text.splitlines(keepends=True)
    lead = lines[0][: len(lines[0]) - len(lines[0].lstrip())] if lines else ""
    return "".join(line.removeprefix(lead) for line in lines)
