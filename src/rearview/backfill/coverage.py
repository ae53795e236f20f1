"""Find which values earlier replays have filled, so that each missing value is computed, and only once.

A *cell* is the smallest part of a name's values that a replay can fill: the values of one iteration of the main loop, or
those from before the loop (`head`) or after the loop (`tail`). Only the values of an exact replay count, and only if
the replay logged the name by equal statements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rearview.model import ReplayStart, Verdict
from rearview.model.process_messages import LoopLimit
from rearview.model.run import name_of
from rearview.plan.facts import At, InnerIterations, LoopFacts
from rearview.source.probes.probe import Probe, Probes
from rearview.store.runs import Replay
from rearview.store.tables.answer_queries import IterationRange

SelectedIterations = dict[int, IterationRange]
"""Iteration of the outermost loop -> the inner iterations that a condition (`--where`) selects in it. A range that
names no inner loop selects the whole iteration.
"""
Cell = int | str
"""Part of a run: the number of an iteration of the main loop, `"head"` (the code before that loop) or `"tail"` (the
code after it).
"""
ALL = 1 << 62
"""End of a range of iterations without upper bound; larger than any number of iterations."""
DigestOf = Callable[[str], str]
"""Function: logged name -> digest of the statements that log it. Statements with equal digests log equal values."""


def merge_ranges(first: IterationRange | None, second: IterationRange) -> IterationRange:
    """Return the smallest range that contains two ranges of one outer iteration; `first` of None is an empty range.

    If the ranges are in different inner loops, the result is the whole outer iteration.

    >>> a, b, c = (IterationRange("r", ("epoch", "step"), 3, 4, 6),
    ...            IterationRange("r", ("epoch", "step"), 3, 8, 9),
    ...            IterationRange("r", ("epoch", "test"), 3, 1, 2))
    >>> merge_ranges(a, b)
    IterationRange(run='r', loops=('epoch', 'step'), outer=3, first=4, last=9)
    >>> merge_ranges(a, c)
    IterationRange(run='r', loops=('epoch',), outer=3, first=0, last=None)
    """
    if first is None:
        return second._replace(loops=second.loops[:2])
    if first.loops != second.loops[:2] or len(first.loops) < 2:
        return IterationRange(first.run, first.loops[:1], first.outer)
    last = None if first.last is None or second.last is None else max(first.last, second.last)
    return first._replace(first=min(first.first, second.first), last=last)


def inner_spans(
    selected: SelectedIterations, probes: Probes, names: Sequence[str], loops: Sequence[LoopFacts]
) -> InnerIterations | None:
    """Return the iterations that `selected` contains of one inner loop, if all `names` are logged only in that loop.

    Return None if whole iterations of the outermost loop must run: if `selected` restricts no inner loop, if several
    inner loops have the selected name, or if `probes` log one of `names` elsewhere. `loops` are the outermost loop of
    the run and the loops directly inside it.
    """
    main, *inner = (loop.name for loop in loops)
    selected_names = {span.loops[1] for span in selected.values() if len(span.loops) > 1}
    logging_probes = [probe for name in names for probe in probes.of(name)]
    matching = [loop for loop in inner if name_of(loop) in selected_names]
    if len(selected_names) != 1 or len(matching) != 1 or not logging_probes:
        return None
    if not all(_runs_only_in(probe, main, matching[0]) for probe in logging_probes):
        return None
    spans: Mapping[int, tuple[int, int | None]] = {
        index: (span.first, span.last)
        for index, span in selected.items()
        if len(span.loops) > 1 and (span.first, span.last) != (0, None)
    }
    return InnerIterations(matching[0], spans) if spans else None


def _runs_only_in(probe: Probe, main: str, inner: str) -> bool:
    """Return True if `probe` runs only in loop `inner` of loop `main`, and reads no value assigned in other loops."""
    inside = all(path[:2] == (main, inner) for path in probe.paths)
    return bool(probe.paths) and inside and not probe.feeding_loops


@dataclass(frozen=True, slots=True)
class CoverageQuery:
    """A request for values of one run. It decides which earlier replays count: their values are not computed again."""

    version: str
    """The version of the run with the probes inserted."""
    main: str | None
    """Id of the main loop, which is divided among segments; None if no loop can be divided."""
    count: int
    """Number of iterations of the main loop."""
    at: tuple[At, ...]
    """The iterations that the user selected with `--at`; empty means all."""
    recorded_until: float = math.inf
    """Unix time of the run's last record. If a replay that started later found nothing to compare with, it can never
    be proved, so its values count as filled. If `inf`, unproved values never count.
    """
    within: InnerIterations | None = None
    """Requested iterations of one inner loop; None means all iterations of all inner loops."""

    @property
    def limits(self) -> tuple[LoopLimit, ...]:
        """The selections in `at` of loops other than the main loop, in the form that is stored with a replay."""
        main = None if self.main is None else name_of(self.main)
        return tuple((at.loop, at.first, at.last, at.single) for at in self.at if at.loop != main)


def missing_values(
    query: CoverageQuery,
    replays: Sequence[Replay],
    probes: Probes,
    names: tuple[str, ...],
    digest_of: DigestOf,
    selected: frozenset[int] | None,
) -> tuple[tuple[str, ...], frozenset[int] | None]:
    """Return (those of `names` that lack values, iterations of the main loop in which one of them lacks values).

    Iterations of None mean all. A name that has values in all `selected` iterations lacks none; `selected` of None
    means all iterations. If no name lacks values, return all `names` and an empty set.
    """
    iterations_by_name = {
        name: missing_iterations(query, replays, name, probes.of(name), digest_of) for name in names
    }
    incomplete = tuple(
        name
        for name, iterations in iterations_by_name.items()
        if iterations is None or (iterations if selected is None else iterations & selected)
    )
    if names and not incomplete:
        return names, frozenset()
    in_main = [
        iterations_by_name[name] for name in incomplete if _runs_in_main(query, probes.of(name))
    ]
    if not in_main or None in in_main:
        return incomplete, None
    return incomplete, frozenset[int]().union(*(iterations for iterations in in_main if iterations))


def missing_iterations(
    query: CoverageQuery,
    replays: Sequence[Replay],
    name: str,
    probes: Sequence[Probe],
    digest_of: DigestOf,
) -> frozenset[int] | None:
    """Return the iterations of the main loop in which none of `replays` filled `name`, which is logged by `probes`.

    Replays that do not count for `query` are ignored. Return None for all iterations: if no replay counts, or if
    values from before or after the main loop are missing.
    """
    counting = [replay for replay in replays if _counts(query, replay, name, digest_of)]
    if not counting:
        return None
    # replays in older stores did not record whether they ran the code before and after the main loop
    with_ends = [replay for replay in counting if replay.start.tail is not None]
    ends = _ends_of(query, probes)
    if with_ends and not all(
        any(_fills_end(each.start, end) for each in with_ends) for end in ends
    ):
        return None
    if not _runs_in_main(query, probes):
        return frozenset()
    return frozenset(range(query.count)).difference(
        *(_covered_iterations(query, replay.start) for replay in counting)
    )


def filled_cells(
    query: CoverageQuery,
    replays: Sequence[Replay],
    name: str,
    probes: Sequence[Probe],
    digest_of: DigestOf,
) -> frozenset[Cell]:
    """Return the cells of `name` that `replays` have filled; replays that do not count for `query` are ignored."""
    counting = (replay for replay in replays if _counts(query, replay, name, digest_of))
    return frozenset[Cell]().union(*(cells_of(query, probes, each.start) for each in counting))


def cells_of(query: CoverageQuery, probes: Sequence[Probe], start: ReplayStart) -> frozenset[Cell]:
    """Return the cells (see `Cell`) that a replay fills of the name that `probes` log; `start` says what it runs."""
    ends = frozenset[Cell](end for end in _ends_of(query, probes) if _fills_end(start, end))
    return ends | _covered_iterations(query, start) if _runs_in_main(query, probes) else ends


def _fills_end(start: ReplayStart, end: str) -> bool:
    """Return True if a replay logs the values at `end`: `head` (before the main loop) or `tail` (after it)."""
    return bool(start.head if end == "head" else start.tail)


def is_unproved(replay: Replay) -> bool:
    """Return True if `replay` succeeded, but the run recorded no values or checkpoints to compare with it."""
    return replay.proof.verdict is Verdict.UNPROVED


def is_superseded(replay: Replay, replays: Iterable[Replay]) -> bool:
    """Return True if later exact replays have filled all cells of `replay`; `replays` are all replays of the run."""
    uncovered = set(_covered_ranges(replay))
    ends = {end for end in ("head", "tail") if _fills_end(replay.start, end)}
    for later in replays:
        if (
            later.started <= replay.started
            or later.proof.verdict is not Verdict.EXACT
            or not set(replay.names) <= set(later.names)
            or not _logs_equally(later, replay)
        ):
            continue
        ends -= {end for end in ends if _fills_end(later.start, end)}
        for first, last in _covered_ranges(later):
            uncovered = {
                remainder
                for low, high in uncovered
                for remainder in ((low, min(high, first)), (max(low, last), high))
                if remainder[0] < remainder[1]
            }
    return not uncovered and not ends


def _logs_equally(first: Replay, second: Replay) -> bool:
    """Return True if two replays log their names by equal statements, in the same inner iterations.

    Replays in older stores have no digests of the statements. Two of these must have run the same version.
    """
    a, b = first.start, second.start
    if not a.same and not b.same and a.version != b.version:
        return False
    return (a.limits, a.inner, a.same) == (b.limits, b.inner, b.same)


def _covered_ranges(replay: Replay) -> list[tuple[int, int]]:
    """Return the ranges (first, end) of iterations of the main loop that a replay covers; `end` is not included."""
    if replay.start.only is not None:
        return [(index, index + 1) for index in replay.start.only]
    return [replay.start.covered or (0, ALL)]


def _covered_iterations(query: CoverageQuery, start: ReplayStart) -> frozenset[int]:
    """Return the main-loop iterations that a replay runs with all inner iterations that `query` requests in them."""
    first, last = start.covered or (0, 0)
    reached = start.only if start.only is not None else range(first, min(last, query.count))
    return frozenset(index for index in reached if _covers_inside(query, start, index))


def _covers_inside(query: CoverageQuery, start: ReplayStart, index: int) -> bool:
    """Return True if a replay runs all inner iterations that `query` requests in iteration `index` of the main loop."""
    for loop, spans in start.inner.items():
        span = spans.get(index)
        if span is None:
            continue
        if query.within is None or loop not in (query.within.loop, name_of(query.within.loop)):
            return False
        low, high = query.within.enclosing_range([index])
        if low < span[0] or (high is None and span[1] < ALL) or (high or 0) > span[1]:
            return False
    return True


def _runs_in_main(query: CoverageQuery, probes: Sequence[Probe]) -> bool:
    """Return True if one of `probes` may run in the main loop. If the callers of a probe are not known, it may.

    Return False if `query.main` is None: then no loop is divided, and replays of the run go to its end.
    """
    return query.main is not None and any(
        not probe.paths or any(path and path[0] == query.main for path in probe.paths)
        for probe in probes
    )


def _ends_of(query: CoverageQuery, probes: Sequence[Probe]) -> set[str]:
    """Return where `probes` log outside the main loop: `head` (before the loop), `tail` (after it), both or neither."""
    anywhere = query.main is None and any(not probe.paths for probe in probes)
    ends = {"tail"} if anywhere else set[str]()
    return ends | {
        "head" if not path and probe.runs_first else "tail"
        for probe in probes
        for path in probe.paths
        if not path or path[0] != query.main
    }


def _counts(query: CoverageQuery, replay: Replay, name: str, digest_of: DigestOf) -> bool:
    """Return True if values of `name` that `replay` filled count for `query`, so that they are not computed again.

    The replay must be exact (or impossible to prove), must have logged `name` by equal statements, and must contain
    the requested iterations of the loops inside the main loop.
    """
    if name not in replay.names:
        return False
    if replay.proof.verdict is not Verdict.EXACT and (
        replay.started <= query.recorded_until or not is_unproved(replay)
    ):
        return False
    if replay.version != query.version and replay.start.same.get(name) != digest_of(name):
        return False
    requested = {at.loop: at for at in query.at}
    limits = (At(*limit) for limit in replay.start.limits)
    return all(_contains(limit, requested.get(limit.loop)) for limit in limits)


def _contains(filled: At, requested: At | None) -> bool:
    """Return True if the selection `filled` contains `requested`, of the same loop; None selects all iterations.

    >>> _contains(At("step", 0, 5), At("step", 2, 4)), _contains(At("step", 0, 5), None)
    (True, False)
    >>> _contains(At("step", 0, 5), At("step", 3, single=True))
    True
    """
    if requested is None:
        return False
    if requested == filled:
        return True
    ends = [requested.first, filled.first, *((filled.last,) if filled.last is not None else ())]
    if filled.single or not all(isinstance(end, int | float) for end in ends if end is not None):
        return False
    if filled.first is not None and (requested.first is None or requested.first < filled.first):  # type: ignore[operator]
        return False
    if filled.last is None:
        return True
    if requested.single:
        return requested.first < filled.last  # type: ignore[operator]
    return requested.last is not None and requested.last <= filled.last  # type: ignore[operator]
