"""Places that the user gave to statements by hand: kept, listed, undone."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rearview.errors import DamagedError, StoreError
from rearview.model.checksum import add_check, is_intact
from rearview.source.log_calls import names_logged
from rearview.source.probes.probe import fits
from rearview.source.propagate.versions import HandPlace
from rearview.store.files import make_folder, publish

FORMAT = 2
"""Number of the file's format. The first had none: version -> texts with their lines."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What makes an added statement the same one after its text was changed."""

    path: str
    """Its file, as the newest version that was run called it."""
    logs: tuple[str, ...]
    """The names that it logs."""
    sets: tuple[str, ...] = ()
    """The names that it binds, if it logs nothing."""
    occurrence: int = 0
    """Which one it is among those of the file that log (or bind) the same."""

    def find(self, statements: Sequence[Identity]) -> int | None:
        """Return which of the statements it is now; None if none is certainly it.

        >>> now = [Identity("t.py", ("loss",)), Identity("t.py", ("norm",))]
        >>> Identity("t.py", ("norm",)).find(now), Identity("t.py", ("bce",)).find(now)
        (1, None)
        """
        own = set(self.logs or self.sets)
        alike = [
            (at, one)
            for at, one in enumerate(statements)
            if bool(one.logs) == bool(self.logs) and own & set(one.logs or one.sets)
        ]
        equal = [(at, one) for at, one in alike if set(one.logs or one.sets) == own]
        if not equal and len(alike) > 1:
            return None
        found = equal or alike
        here = [(at, one) for at, one in found if one.path == self.path]
        if not here and len({one.path for _, one in found}) == 1:
            here = found  # the file was renamed
        return here[self.occurrence][0] if self.occurrence < len(here) else None


@dataclass(frozen=True, slots=True)
class Correction:
    """Where one statement goes in one version, as the user said."""

    version: str
    statement: Identity
    path: str
    """The file, as that version calls it."""
    line: int
    after: bool = False
    """Behind the statement on the line instead of before the line."""
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
    """The file of a project that keeps its corrections."""

    file: Path

    @cached_property
    def _read(self) -> tuple[tuple[Correction, ...], int]:
        """The corrections, and how many of the file could not be understood."""
        try:
            text = self.file.read_bytes()
            kept = json.loads(text)
        except OSError:
            return (), 0
        except ValueError:
            return (), 1
        if is_intact(text) is False or (
            isinstance(kept, dict) and "c" not in kept and "format" in kept
        ):
            raise DamagedError(
                f"{self.file} is not as it was written: a place given by hand may have been changed. "
                "Remove the file and give the places again (`rearview propagate --correct`).",
                slug="damaged",
            )
        if not isinstance(kept, dict):
            return (), 1
        if "format" not in kept:
            return _first_format(kept)
        if kept["format"] != FORMAT:
            raise StoreError(
                f"{self.file} has format {kept['format']}; this Rearview reads up to {FORMAT}. "
                "Use a newer Rearview.",
                slug="store-newer",
            )
        found, lost = [], 0
        for each in kept.get("corrections", ()):
            try:
                found.append(_correction(each))
            except (TypeError, KeyError, ValueError):
                lost += 1
        return tuple(found), lost

    @property
    def kept(self) -> tuple[Correction, ...]:
        """Every correction, in the order in which they were made."""
        return self._read[0]

    @property
    def note(self) -> str:
        """A sentence on what the file holds and nobody can use; empty if there is no such thing."""
        lost = self._read[1]
        if not lost:
            return ""
        return (
            f"{lost} correction{'s' * (lost > 1)} in {self.file} "
            f"{'is' if lost == 1 else 'are'} ignored: which statement was meant cannot be told. "
            "Make it again with `rearview propagate NAME --correct RUN FILE:LINE`."
        )

    def add(self, corrections: Sequence[Correction]) -> None:
        """Keep corrections, each in place of an older one for the same statement and version."""
        fresh = {(one.version, one.statement) for one in corrections}
        older = [one for one in self.kept if (one.version, one.statement) not in fresh]
        self._write([*older, *corrections])

    def remove(self, corrections: Collection[Correction]) -> None:
        """Forget corrections."""
        self._write([one for one in self.kept if one not in corrections])

    def _write(self, corrections: Sequence[Correction]) -> None:
        make_folder(self.file.parent)
        kept = {"format": FORMAT, "corrections": [asdict(one) for one in corrections]}
        publish(self.file, add_check(json.dumps(kept).encode()))
        self.__dict__.pop("_read", None)


def _correction(kept: Mapping[str, Any]) -> Correction:
    which = kept["statement"]
    statement = Identity(
        str(which["path"]),
        tuple(map(str, which["logs"])),
        tuple(map(str, which["sets"])),
        int(which["occurrence"]),
    )
    return Correction(
        str(kept["version"]),
        statement,
        str(kept["path"]),
        int(kept["line"]),
        bool(kept["after"]),
        {str(one): str(two) for one, two in kept["renames"].items()},
        str(kept["run"]),
    )


def _first_format(kept: Mapping[str, Any]) -> tuple[tuple[Correction, ...], int]:
    """Read a file that kept texts: what a text logs tells which statement was meant."""
    found: list[Correction] = []
    lost = 0
    for version, placed in kept.items():
        corrections = []
        try:
            for each in placed:
                path, line, text = str(each["path"]), int(each["line"]), str(each["text"])
                logs = tuple(names_logged({path: _outdented(text)}))
                if logs:
                    corrections.append(Correction(version, Identity(path, logs), path, line))
        except (TypeError, KeyError, ValueError, SyntaxError):
            corrections = []
        if corrections and len({one.statement for one in corrections}) == len(corrections):
            found += corrections
        else:
            lost += 1
    return tuple(found), lost


def _outdented(text: str) -> str:
    lines = text.splitlines(keepends=True)
    lead = lines[0][: len(lines[0]) - len(lines[0].lstrip())] if lines else ""
    return "".join(line.removeprefix(lead) for line in lines)
