"""What is asked of one run, and the segment file that tells a replay its part of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rearview.backfill.coverage import ALL, CoverageQuery
from rearview.model import Run, Segment, SegmentFile
from rearview.plan.facts import At
from rearview.source.probes.loop_carried import START
from rearview.source.probes.probe import Position, Probe, Probes

_Spans = dict[str, dict[int, tuple[int, int]]]
"""Id of an inner loop -> iteration of the main loop -> (first, last) iterations of the inner loop."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The values that are requested of one run: by which probes, in which iterations."""

    run: Run
    version: str
    """Source to execute: the run's own with the probes in it."""
    probes: Probes
    wanted: tuple[Probe, ...]
    """The probes whose values are asked for; none: a plain replay."""
    names: tuple[str, ...]
    coverage: CoverageQuery
    missing: frozenset[int] | None = None
    """Iterations of the outermost loop that lack a value; None: all."""
    digests: Mapping[str, str] | None = None
    """By name, how it is logged: stored with replays, to know later which edits they answer."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """By name, the kind of its values in other versions; given if probes were carried here."""

    @property
    def at(self) -> tuple[At, ...]:
        """Iterations that the user asks for; none: all."""
        return self.coverage.at

    @property
    def main_entered_once(self) -> bool:
        """Whether the main loop was entered only once.

        Else each entry may hold requested values, and only one of them could be divided.
        """
        return self.run.end.main.alone

    @property
    def main_loop(self) -> str | None:
        """Id of the run's main loop."""
        return self.run.end.main.site


def segment_file(request: RunRequest, segment: Segment, *, first: bool = True) -> SegmentFile:
    """Return the segment file for one segment of the plan; `first` if it is the run's first."""
    probes = request.wanted
    chains = [list(chain) for probe in probes for chain in (*probe.paths, *probe.fed_by)]
    # without any path, the loops around the statement are not known
    before_loops = bool(probes) and all(
        probe.place is Position.BEFORE and probe.paths and not any(probe.paths) for probe in probes
    )
    to_end = segment.tail or segment.loop is None
    other_loops = any(chain and chain[0] != segment.loop for chain in chains)
    spans = _inner_spans(request, segment)
    divided = request.main_entered_once or request.at
    ranges = _ranges(segment, spans) if divided else {}
    return SegmentFile(
        run=request.run.id,
        replay=f"{request.run.id}.{secrets.token_hex(4)}",
        report="",
        names=request.names,
        chains=chains,
        everywhere=not probes or any(not probe.paths for probe in probes),
        jump=not segment.rerun,
        levels=_levels_to_enter(probes),
        main=segment.loop or "" if ranges else "",
        ranges=ranges,
        spans=spans,
        owed=_owed_iterations(request, segment, to_end=to_end),
        after=not before_loops and (to_end or other_loops or not request.main_entered_once),
        head=first,
        tail=to_end,
        until=request.main_loop if before_loops else None,
        probes={
            path: [(line, column, list(drawn)) for (line, column), drawn in places.items()]
            for path in {probe.path for probe in request.probes.probes}
            if (places := request.probes.places(path))
        },
        ids={
            path: {line: str(loop) for line, loop in ids.items()}
            for path, ids in request.probes.loops.items()
        },
        kinds=dict(request.kinds),
    )


def replay_facts(request: RunRequest, segment: Segment) -> dict[str, Any]:
    """Return the facts that are stored with the replay of a segment, to know later what it covers."""
    return {
        "limits": request.coverage.limits,
        "same": dict(request.digests or {}),
        "inner": _inner_spans(request, segment),
    }


def _segment_iterations(segment: Segment) -> Sequence[int]:
    last = ALL if segment.last is None else segment.last
    return range(segment.first, last) if segment.only is None else segment.only


def _inner_spans(request: RunRequest, segment: Segment) -> _Spans:
    """Return the requested iterations of an inner loop, for the iterations of the segment."""
    within = request.coverage.within
    if within is None:
        return {}
    iterations = _segment_iterations(segment)
    spans = {
        index: (first, ALL if end is None else end)
        for index, (first, end) in within.spans.items()
        if index in iterations
    }
    return {within.loop: spans} if spans else {}


def _ranges(segment: Segment, inner: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
    """Return the iterations that the segment runs of the main loop and of loops inside it, by id."""
    ranges = {loop: [(0, ALL)] for loop in inner}
    if segment.loop is not None:
        if segment.only is not None:
            ranges[segment.loop] = [(k, k + 1) for k in segment.only]
        else:
            ranges[segment.loop] = [(segment.first, ALL if segment.last is None else segment.last)]
    for loop, first, last in segment.inner:
        ranges[loop] = [(first, ALL if last is None else last)]
    return ranges


def _levels_to_enter(probes: Sequence[Probe]) -> int:
    """Return how many loops, counted from the outermost, may be entered in the middle."""
    return min(
        (
            0 if probe.depth == START else len(chain) - len(probe.loops) + probe.depth
            for probe in probes
            for chain in probe.paths
        ),
        default=99,
    )


def _owed_iterations(request: RunRequest, segment: Segment, *, to_end: bool) -> dict[str, int]:
    """Return how many iterations the loops around the probes had in the run, by loop id.

    Only loops that the run counted to the end are included. A replay that executes fewer iterations
    of one lacks values.
    """
    run, main, coverage = request.run, request.run.end.main, request.coverage
    counted = {site: loop.iterations for site, loop in run.end.loops.items() if not loop.loose}
    if request.at or coverage.within is not None or not main.alone or run.ended is None:
        return {}
    first, end = main.counted or (0, 0)
    if first or coverage.count > end or main.counts is None:
        return {}  # a part of it ran in another process, or was not counted
    iterations = _segment_iterations(segment)
    owed: dict[str, int] = {}
    for path in {path for probe in request.wanted for path in probe.paths if path}:
        site = path[-1]
        if any(loop not in counted for loop in path):
            continue
        counts = main.counts.get(site, [])
        if site == main.site:
            owed[site] = sum(1 for k in range(coverage.count) if k in iterations)
        elif segment.loop is not None:
            owed[site] = sum(count for k, count in enumerate(counts) if k in iterations)
        else:
            owed[site] = sum(counts)
        if to_end and site != main.site:
            owed[site] += counted[site] - sum(counts)
    return owed
