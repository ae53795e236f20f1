"""Store *corrections*: lines of past versions where the user wants an added statement (`propagate --correct`).

Rearview inserts an added statement into past versions automatically. If it is not certain where the statement belongs
in a version, the user names the line.
"""

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
"""Number of the format of the file with corrections. Files of the first format have no number (`_first_format`)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The features by which an added statement is recognized after the user has edited its text."""

    path: str
    """Path of the file of the statement in the newest version that was run."""
    logs: tuple[str, ...]
    """The names that the statement logs."""
    sets: tuple[str, ...] = ()
    """The variables to which the statement binds values, if it logs nothing; else empty."""
    occurrence: int = 0
    """How many added statements earlier in the file log (or bind) exactly the same names."""

    def find(self, statements: Sequence[Identity]) -> int | None:
        """Return the index in `statements` of the statement that this identity means, or None if it is not certain.

        >>> now = [Identity("t.py", ("loss",)), Identity("t.py", ("norm",))]
        >>> Identity("t.py", ("norm",)).find(now), Identity("t.py", ("bce",)).find(now)
        (1, None)
        """
        own_names = set(self.logs or self.sets)
        similar = [
            (at, identity)
            for at, identity in enumerate(statements)
            if bool(identity.logs) == bool(self.logs)
            and own_names & set(identity.logs or identity.sets)
        ]
        equal = [
            (at, identity)
            for at, identity in similar
            if set(identity.logs or identity.sets) == own_names
        ]
        if not equal and len(similar) > 1:
            return None
        candidates = equal or similar
        in_same_file = [(at, identity) for at, identity in candidates if identity.path == self.path]
        if not in_same_file and len({identity.path for _, identity in candidates}) == 1:
            in_same_file = candidates  # all candidates are in one other file: the file was renamed
        return in_same_file[self.occurrence][0] if self.occurrence < len(in_same_file) else None


@dataclass(frozen=True, slots=True)
class Correction:
    """The line at which the user wants one added statement in one past version."""

    version: str
    statement: Identity
    path: str
    """Path of the file in `version`."""
    line: int
    after: bool = False
    """Whether `statement` is inserted after the statement on `line`; if False, before `line`."""
    renames: Mapping[str, str] = field(default_factory=dict)
    """Variable in `statement` -> name of the variable in `version`."""
    run: str = ""
    """Id of the run that the user named to choose `version`."""

    @property
    def place(self) -> HandPlace:
        """The file, line and renamed variables, as the functions take them that insert statements."""
        return HandPlace(self.path, self.line, self.after, self.renames)

    def concerns(self, names: Collection[str]) -> bool:
        """Return True if `statement` logs one of `names`."""
        return any(fits(pattern, name) for pattern in self.statement.logs for name in names)


@dataclass
class Corrections:
    """The corrections of a project (see `Correction`), and the file that stores them."""

    file: Path

    @cached_property
    def _read(self) -> tuple[tuple[Correction, ...], int]:
        """(corrections in the file, number of corrections that could not be read); raises if the file is damaged."""
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
        """A sentence for the user about stored corrections that cannot be read; empty if all can be read."""
        lost = self._read[1]
        if not lost:
            return ""
        return (
            f"{lost} correction{'s' * (lost > 1)} in {self.file} "
            f"{'is' if lost == 1 else 'are'} ignored: it is not certain which statement was meant. "
            "Make it again with `rearview propagate NAME --correct RUN FILE:LINE`."
        )

    def add(self, corrections: Sequence[Correction]) -> None:
        """Store `corrections`; each replaces an older correction of the same statement in the same version."""
        fresh = {(correction.version, correction.statement) for correction in corrections}
        unchanged = [
            correction
            for correction in self.all
            if (correction.version, correction.statement) not in fresh
        ]
        self._write([*unchanged, *corrections])

    def remove(self, corrections: Collection[Correction]) -> None:
        """Delete `corrections` from the file."""
        self._write([correction for correction in self.all if correction not in corrections])

    def _write(self, corrections: Sequence[Correction]) -> None:
        make_folder(self.file.parent)
        content = {
            "format": FORMAT,
            "corrections": [asdict(correction) for correction in corrections],
        }
        publish(self.file, add_check(json.dumps(content).encode()))
        self.__dict__.pop("_read", None)


def _correction(entry: Mapping[str, Any]) -> Correction:
    identity = entry["statement"]
    statement = Identity(
        str(identity["path"]),
        tuple(map(str, identity["logs"])),
        tuple(map(str, identity["sets"])),
        int(identity["occurrence"]),
    )
    return Correction(
        str(entry["version"]),
        statement,
        str(entry["path"]),
        int(entry["line"]),
        bool(entry["after"]),
        {str(new): str(old) for new, old in entry["renames"].items()},
        str(entry["run"]),
    )


def _first_format(content: Mapping[str, Any]) -> tuple[tuple[Correction, ...], int]:
    """Return (corrections in a file of the first format, number of versions whose corrections could not be read).

    Files of the first format store version -> list of path, line and text of each statement. The text shows which
    names the statement logs, and so which statement is meant.
    """
    all_corrections: list[Correction] = []
    lost = 0
    for version, places in content.items():
        corrections = []
        try:
            for each in places:
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
    """Return `text` with the indent of its first line removed from all lines."""
    lines = text.splitlines(keepends=True)
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())] if lines else ""
    return "".join(line.removeprefix(indent) for line in lines)
