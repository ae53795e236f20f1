"""Judge a replay by its report: whether its values can be trusted, and why (`proof_of`).

The commands `replay`, `backfill`, `show` and `table`, and SQL, all show the result of these functions.
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
    """The replay ended without an error, and the run recorded nothing to compare with."""
    INCOMPLETE = "incomplete"
    """The replay was interrupted, failed, or has not ended yet."""
    INEXACT = "not exact"
    """The replay differed from the recording."""
    REDONE = "redone"
    """A second try, from the start of the run, replaces the replay."""


ORIGINS = {
    Verdict.EXACT: Origin.REPLAYED,
    Verdict.UNPROVED: Origin.UNPROVED,
    Verdict.INCOMPLETE: Origin.UNPROVED,
    Verdict.REDONE: Origin.REDONE,
    Verdict.INEXACT: Origin.INEXACT,
}
"""Verdict on a replay -> origin of the replay's values. If a cell of a table has two values, the table shows the value
whose verdict comes first here.
"""
TRUSTED = frozenset({Origin.RECORDED, Origin.REPLAYED, *CAPTURED})
"""Origins of values that tables show without a mark."""
WITHHELD = frozenset({Origin.REDONE, Origin.INEXACT})
"""Origins of values that tables show only on request."""
_WORST = (Verdict.INEXACT, Verdict.INCOMPLETE, Verdict.UNPROVED, Verdict.EXACT)
"""Verdicts that `worst` considers, the worst first."""
_UNCOMPARED_END = "; after the last of them there was nothing to compare with"


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
        """Origin with which tables show the values of the replay."""
        return ORIGINS[self.verdict]

    def __str__(self) -> str:
        return f"{self.verdict}: {self.why}" if self.why else str(self.verdict)


def proof_of(
    report: ReplayReport | None, *, proved: bool | None = None, redone: bool = False
) -> Proof:
    """Return the verdict on one replay and its reason.

    `report` is the report of the replay, or None if the report is lost. `proved` is the verdict that was stored when the
    replay ended, or None if it has not ended. With `redone`, the verdict is REDONE: a second try has replaced the
    replay.

    >>> print(proof_of(ReplayReport(finished=True, states=2)))
    exact: 0 states restored, 2 states and 0 recorded values equal
    >>> print(proof_of(None))
    incomplete: it has not ended, or was interrupted
    >>> print(proof_of(ReplayReport(finished=True, difference="w: recorded 1, now 2"), redone=True))
    redone: w: recorded 1, now 2
    """
    proof = _judge(report, proved)
    return Proof(Verdict.REDONE if redone else proof.verdict, in_words(proof.why))


def _judge(report: ReplayReport | None, proved: bool | None) -> Proof:
    if report is None:
        if proved is None:
            return Proof(Verdict.INCOMPLETE, "it has not ended, or was interrupted")
        return Proof(Verdict.EXACT) if proved else Proof(Verdict.INCOMPLETE, "it left no report")
    environment_note = f"; {'; '.join(report.surroundings)}" if report.surroundings else ""
    different = [report.difference] if report.difference is not None else []
    if report.differing:
        different.append(f"{', '.join(report.differing)} came out differently")
    if report.lacking:
        different.append(f"values are missing: the loop {report.lacking[0]}")
    if different:
        return Proof(Verdict.INEXACT, "; ".join(different) + environment_note)
    if report.error is not None:
        return Proof(Verdict.INCOMPLETE, f"failed: {report.error}{environment_note}")
    if not report.finished:
        return Proof(Verdict.INCOMPLETE, "it was interrupted")
    if report.proved:
        return Proof(Verdict.EXACT, compared([report]))
    if report.open:
        why = "nothing was recorded after the last part that it computed"
        return Proof(Verdict.UNPROVED, f"{why} ({compared([report])})")
    return Proof(Verdict.UNPROVED, "the run recorded nothing there to compare with")


def compared(reports: Iterable[ReplayReport]) -> str:
    """Return in words how many states the replays restored, and how many states and values they found equal."""
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
    return text + _UNCOMPARED_END * (proved and any(report.open for report in reports))


def worst(proofs: Iterable[Proof]) -> Proof | None:
    """Return the proof with the worst verdict, which decides for all replays of a run, or None if no proof counts.

    A proof with the verdict REDONE does not count, because the second try has a proof of its own. Of several proofs
    with the worst verdict, the first is returned.

    >>> print(worst([Proof(Verdict.EXACT), Proof(Verdict.REDONE, "x"), Proof(Verdict.UNPROVED)]))
    unproved
    """
    all_proofs = list(proofs)
    for verdict in _WORST:
        for proof in all_proofs:
            if proof.verdict is verdict:
                return proof
    return None
