"""When a run was on, what it used, and what waiting saved."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rearview.energy.outlook import Outlook, Sample
from rearview.model.checksum import add_check, is_intact

FORMAT = 2
"""From 2 on, every line carries a checksum."""
_GAP = 0.001
"""Seconds between two notes of one execution: none, but for rounding."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of time in which the run was on."""

    begin: float
    end: float
    kwh: float
    how: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a run used, and what it would have used had it run at once."""

    intervals: tuple[Interval, ...]
    kwh: float
    how: tuple[str, ...]
    grams: float | None
    """CO2 of the hours it ran in; None where the grid's state is not known."""
    grams_at_once: float | None
    """CO2 of as many hours, one after the other, from when the run was asked for."""
    attribution: tuple[str, ...] = ()
    asked: float | None = None
    """When it was asked for, if that was noted."""

    @property
    def seconds(self) -> float:
        """How long it was on."""
        return sum(one.end - one.begin for one in self.intervals)

    @property
    def stretches(self) -> tuple[Interval, ...]:
        """The intervals, those that follow one another without a gap joined."""
        joined: list[Interval] = []
        for one in self.intervals:
            last = joined[-1] if joined else None
            if last is not None and one.begin - last.end < _GAP and one.how == last.how:
                joined[-1] = Interval(last.begin, one.end, last.kwh + one.kwh, one.how)
            else:
                joined.append(one)
        return tuple(joined)

    @property
    def saved(self) -> float | None:
        """Grams saved; negative if waiting was the worse choice."""
        if self.grams is None or self.grams_at_once is None:
            return None
        return self.grams_at_once - self.grams


class Account:
    """The file in which a run writes down when it was on; one line each, never rewritten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[float, Sample] = {}

    def asked(self, time: float) -> None:
        """Note when the run was asked for; the first time counts."""
        self._append({"asked": time})

    def on(self, interval: Interval) -> None:
        """Note a stretch in which it ran."""
        self._append({"on": asdict(interval)})

    def grid(self, outlook: Outlook) -> None:
        """Note what was known of the grid, for the report; what has not changed is left out."""
        fresh = [one for one in outlook.samples if self._known.get(one.start) != one]
        self._known |= {one.start: one for one in fresh}
        if not fresh:
            return
        samples = [(s.start, s.share, s.light, s.grams) for s in fresh]
        self._append(
            {"grid": samples, "source": outlook.source, "attribution": outlook.attribution}
        )

    def report(self, measured: Outlook | None = None) -> Report:
        """Return the account of all that was noted; a torn last line is left out.

        What was `measured` of the grid since is better than what was known at the time.
        """
        asked: float | None = None
        intervals: list[Interval] = []
        samples: dict[float, Sample] = {}
        sources: dict[str, str] = {}
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            lines = []
        for line in lines:
            row = _row(line)
            if row is None:
                continue
            if "asked" in row and asked is None:
                asked = row["asked"]
            if "on" in row:
                intervals.append(Interval(**row["on"]))
            if "grid" in row:
                # a later answer knows better
                samples |= {values[0]: Sample(*values) for values in row["grid"]}
                sources[row["source"]] = row["attribution"]
        self._known = dict(samples)
        if measured is not None and measured.samples:
            first, last = measured.samples[0].start, measured.end
            samples = {t: s for t, s in samples.items() if not first <= t < last}
            samples |= {one.start: one for one in measured.samples}
            sources[measured.source] = measured.attribution
        outlook = Outlook.of(", ".join(sources), "", samples.values(), fetched=0.0)
        return report(intervals, outlook, asked=asked, attribution=tuple(sources.values()))

    def _append(self, row: dict[str, object]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = add_check(json.dumps({"format": FORMAT, **row}).encode()) + b"\n"
        # for whom the folder is: its owner, or also its group
        mode = 0o660 if self.path.parent.stat().st_mode & 0o020 else 0o600
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode)
        if mode != 0o600 and os.fstat(fd).st_uid == os.geteuid():
            os.fchmod(fd, mode)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


def _row(line: bytes) -> dict[str, Any] | None:
    """Return what a line says; None if it was cut off or is damaged. Format 1 has no checksums."""
    intact = is_intact(line)
    try:
        row = json.loads(line) if intact is not False else None
    except ValueError:
        return None
    if not isinstance(row, dict) or (intact is None and row.get("format") != 1):
        return None
    return row


def report(
    intervals: Sequence[Interval],
    outlook: Outlook,
    *,
    asked: float | None = None,
    attribution: tuple[str, ...] = (),
) -> Report:
    """Return what the run used in `intervals`, by the grid that `outlook` describes.

    >>> grid = Outlook.of("x", "", [Sample(0, grams=400.0), Sample(3600, grams=100.0)], fetched=0)
    >>> ran = [Interval(3600, 7200, kwh=2.0, how="RAPL")]
    >>> report(ran, grid, asked=0.0).saved
    600.0
    """
    ordered = sorted(intervals, key=lambda one: one.begin)
    kwh = sum(one.kwh for one in ordered)
    seconds = sum(one.end - one.begin for one in ordered)
    parts = [_mean(outlook, one.begin, one.end) for one in ordered]
    grams = None
    if ordered and all(part is not None for part in parts):
        grams = sum(one.kwh * (part or 0.0) for one, part in zip(ordered, parts, strict=True))
    at_once = None
    if ordered:
        begin = ordered[0].begin if asked is None else asked
        mean = _mean(outlook, begin, begin + seconds)
        at_once = None if mean is None else kwh * mean
    how = tuple(dict.fromkeys(one.how for one in ordered))
    return Report(tuple(ordered), kwh, how, grams, at_once, attribution, asked)


def _mean(outlook: Outlook, begin: float, end: float) -> float | None:
    """Return the mean intensity from `begin` to `end`, or None if part of it is not known."""
    if end <= begin:
        sample = outlook.at(begin)
        return None if sample is None else sample.intensity
    total = covered = 0.0
    for index, sample in enumerate(outlook.samples):
        length = min(end, outlook.end_of(index)) - max(begin, sample.start)
        if length > 0:
            total += length * (sample.intensity or 0.0)
            covered += length
    return total / covered if covered >= (end - begin) * 0.999 else None
