"""What is known of the power in the grid, now and in the hours to come."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

WIND = 12.0
GAS = 490.0
"""Grams of CO2 per kWh over the life cycle, medians of IPCC AR5 (WG III, annex III, 2014)."""

STALE = 6 * 3600.0
"""Seconds after which the last sample says nothing about now."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The grid from `start` on, until the next sample. What is not known is None."""

    start: float
    """Seconds since 1970."""
    share: float | None = None
    """Renewable share of the load in percent; above 100 when power is exported."""
    light: int | None = None
    """Traffic light: -1 grid congested, 0 red, 1 yellow, 2 green."""
    grams: float | None = None
    """CO2 per kWh as the source states it."""

    @property
    def intensity(self) -> float | None:
        """Grams of CO2 per kWh: as stated, or estimated cautiously from the share.

        The estimate takes all that is not renewable for gas, so it never overstates a saving
        where coal is burnt.

        >>> Sample(0, share=50.0).intensity
        251.0
        """
        if self.grams is not None:
            return self.grams
        if self.share is not None:
            renewable = min(max(self.share, 0.0), 100.0) / 100
            return renewable * WIND + (1 - renewable) * GAS
        if self.light is not None:
            return {-1: GAS, 0: GAS, 1: (GAS + WIND) / 2, 2: WIND}.get(self.light)
        return None


@dataclass(frozen=True, slots=True)
class Outlook:
    """Samples of one source, in order of time; empty when there is nothing to be had."""

    source: str
    attribution: str
    samples: tuple[Sample, ...] = ()
    fetched: float = 0.0
    substitute: bool = False
    """Whether the source itself had to guess."""
    problem: str = ""
    """Why there is nothing, or nothing new; empty when all is well."""

    @classmethod
    def of(
        cls,
        source: str,
        attribution: str,
        samples: Iterable[Sample],
        *,
        fetched: float,
        substitute: bool = False,
    ) -> Outlook:
        """Return an outlook of the samples that say anything, sorted."""
        useful = sorted(
            (sample for sample in samples if sample.intensity is not None),
            key=lambda sample: sample.start,
        )
        problem = "" if useful else f"{source} answered without a single value"
        return cls(source, attribution, tuple(useful), fetched, substitute, problem)

    def at(self, time: float) -> Sample | None:
        """Return the sample that holds at `time`, or None if none does.

        The last one holds as long as the one before it did, an hour if it is the only one.
        """
        index = bisect_right([sample.start for sample in self.samples], time) - 1
        if index < 0:
            return None
        return self.samples[index] if time < self.end_of(index) else None

    @property
    def end(self) -> float:
        """When knowledge ends; 0 if there is none."""
        return self.end_of(len(self.samples) - 1) if self.samples else 0.0

    def end_of(self, index: int) -> float:
        """Return when the sample at `index` ceases to hold."""
        samples = self.samples
        step = samples[-1].start - samples[-2].start if len(samples) > 1 else 3600.0
        step = min(step, STALE)
        if index + 1 < len(samples):
            return min(samples[index + 1].start, samples[index].start + STALE)
        return samples[index].start + step
