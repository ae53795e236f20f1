"""Decide how far the values of a replay can be trusted.

`replay`, `backfill`, `show`, `table` and SQL all report the result of these functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rearview.model.process_messages import ReplayReport
from rearview.model.run import CAPTURED, Origin
from rearview.model.wording import in_words, plural


class Verdict(StrEnum):
    """Result of comparing one replay, or all replays of a run, with the recording."""

    EXACT = "exact"
    """Everything that was compared with the recording was equal."""
    UNPROVED = "unproved"
    """It ended without an error, and the run recorded nothing to compare with."""
    INCOMPLETE = "incomplete"
    """It was interrupted, failed, or has not ended yet."""
    INEXACT = "not exact"
    """It differed from the recording."""
    REDONE = "redone"
    """A second try, from the start of the run, replaces it."""


ORIGINS = {
    Verdict.EXACT: Origin.REPLAYED,
    Verdict.UNPROVED: Origin.UNPROVED,
    Verdict.INCOMPLETE: Origin.UNPROVED,
    Verdict.REDONE: Origin.REDONE,
    Verdict.INEXACT: Origin.INEXACT,
}
"""Origin of the values of a replay, by its verdict. If a cell has two values, tables show the one whose
verdict comes first here."""
TRUSTED = frozenset({Origin.RECORDED, Origin.REPLAYED, *CAPTURED})
"""Origins of values that tables show without a mark."""
WITHHELD = frozenset({Origin.REDONE, Origin.INEXACT})
"""Origins of values that tables show only on request."""
_WORST = (Verdict.INEXACT, Verdict.INCOMPLETE, Verdict.UNPROVED, Verdict.EXACT)
_REST = "; after the last of them there was nothing to compare with"


@dataclass(frozen=True, slots=True)
class Proof:
    """A verdict and its reason.

    >>> print(Proof(Verdict.INEXACT, "w at epoch=3: recorded 1, now 2"))
    not exact: w at epoch=3: recorded 1, now 2
    """

    verdict: Verdict
    why: str = ""

    @property
    def origin(self) -> Origin:
        """Origin of the values of the replay."""
        return ORIGINS[self.verdict]

    def __str__(self) -> str:
        return f"{self.verdict}: {self.why}" if self.why else str(self.verdict)


def proof_of(
    report: ReplayReport | None, *, proved: bool | None = None, redone: bool = False
) -> Proof:
    """Return the proof of one replay.

    `report` is its report, None if that is lost; `proved` is the stored verdict (None: it has not ended). A
    replay that was `redone` does not count.

    >>> print(proof_of(ReplayReport(finished=True, states=2)))
    exact: 0 states restored, 2 states and 0 recorded values equal
    >>> print(proof_of(None))
    incomplete: it has not ended, or was interrupted
    >>> print(proof_of(ReplayReport(finished=True, difference="w: recorded 1, now 2"), redone=True))
    redone: w: recorded 1, now 2
    """
    own = _own(report, proved)
    return Proof(Verdict.REDONE if redone else own.verdict, in_words(own.why))


def _own(report: ReplayReport | None, proved: bool | None) -> Proof:
    if report is None:
        if proved is None:
            return Proof(Verdict.INCOMPLETE, "it has not ended, or was interrupted")
        return Proof(Verdict.EXACT) if proved else Proof(Verdict.INCOMPLETE, "it left no report")
    about = f"; {'; '.join(report.surroundings)}" if report.surroundings else ""
    different = [report.difference] if report.difference is not None else []
    if report.differing:
        different.append(f"{', '.join(report.differing)} came out differently")
    if report.lacking:
        different.append(f"values are missing: the loop {report.lacking[0]}")
    if different:
        return Proof(Verdict.INEXACT, "; ".join(different) + about)
    if report.error is not None:
        return Proof(Verdict.INCOMPLETE, f"failed: {report.error}{about}")
    if not report.finished:
        return Proof(Verdict.INCOMPLETE, "it was interrupted")
    if report.proved:
        return Proof(Verdict.EXACT, compared([report]))
    if report.open:
        why = "nothing was recorded after the last part that it computed"
        return Proof(Verdict.UNPROVED, f"{why} ({compared([report])})")
    return Proof(Verdict.UNPROVED, "the run recorded nothing there to compare with")


def compared(reports: Iterable[ReplayReport]) -> str:
    """Return in words how much replays restored and compared."""
    reports = list(reports)
    restored, states, repeated = (
        sum(getattr(report, name) for report in reports)
        for name in ("restored", "states", "repeated")
    )
    text = (
        f"{plural(restored, 'state')} restored, {plural(states, 'state')} and "
        f"{plural(repeated, 'recorded value')} equal"
    )
    proved = all(report.proved for report in reports)
    return text + _REST * (proved and any(report.open for report in reports))


def worst(proofs: Iterable[Proof]) -> Proof | None:
    """Return the proof that decides for all of them: the first with the worst verdict.

    A replay that was redone does not count; the one that replaces it does.

    >>> print(worst([Proof(Verdict.EXACT), Proof(Verdict.REDONE, "x"), Proof(Verdict.UNPROVED)]))
    unproved
    """
    all_proofs = list(proofs)
    for verdict in _WORST:
        for proof in all_proofs:
            if proof.verdict is verdict:
                return proof
    return None
