"""What earlier replays have filled, so that nothing is filled twice and nothing is left out.

Which iterations a predicate on recorded values chooses, of the outermost loop and inside it.

What earlier replays have filled, so that nothing is filled twice and nothing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rearview.model import Verdict
from rearview.model.run import name_of
from rearview.plan.facts import At, LoopFacts, Within
from rearview.source.probes.probe import Position, Probe, Probes
from rearview.store.runs import Replay
from rearview.store.tables.tables import IterationRange

Chosen = dict[int, IterationRange]
"""By iteration of the outermost loop; one whose loops are no more than that is chosen whole."""


def joined(known: IterationRange | None, more: IterationRange) -> IterationRange:
    """Return one stretch that holds two of the same iteration.

    >>> joined(IterationRange("r", ("epoch", "step"), 3, 4, 6), IterationRange("r", ("epoch", "step"), 3, 8, 9))
    IterationRange(run='r', loops=('epoch', 'step'), outer=3, first=4, last=9)
    >>> joined(IterationRange("r", ("epoch", "step"), 3, 4, 6), IterationRange("r", ("epoch", "test"), 3, 1, 2))
    IterationRange(run='r', loops=('epoch',), outer=3, first=0, last=None)
    """
    if known is None:
        return more._replace(loops=more.loops[:2])
    if known.loops != more.loops[:2] or len(known.loops) < 2:
        return IterationRange(known.run, known.loops[:1], known.outer)
    last = None if known.last is None or more.last is None else max(known.last, more.last)
    return known._replace(first=min(known.first, more.first), last=last)


def within(
    chosen: Chosen, probes: Probes, names: Sequence[str], loops: Sequence[LoopFacts]
) -> Within | None:
    """Return which inner iterations are chosen, where all of `names` are logged in that loop.

    None: whole iterations of the outermost loop, as where several loops inside it share the name
    that recorded values tell of. `loops` are the outermost loop of the run and those inside it.
    """
    main, *inner = (loop.name for loop in loops)
    told = {one.loops[1] for one in chosen.values() if len(one.loops) > 1}
    asked = [probe for name in names for probe in probes.of(name)]
    meant = [loop for loop in inner if name_of(loop) in told]
    if len(told) != 1 or len(meant) != 1 or not asked:
        return None
    if not all(_inside(probe, main, meant[0]) for probe in asked):
        return None
    spans: Mapping[int, tuple[int, int | None]] = {
        index: (one.first, one.last)
        for index, one in chosen.items()
        if len(one.loops) > 1 and (one.first, one.last) != (0, None)
    }
    return Within(meant[0], spans) if spans else None


def _inside(probe: Probe, main: str, inner: str) -> bool:
    """Say whether a statement is executed in the inner loop alone, and needs nothing else to run."""
    inside = all(path[:2] == (main, inner) for path in probe.paths)
    return bool(probe.paths) and inside and not probe.feeds


Cell = int | str
"""An iteration of the main loop; or `head` or `tail`: what lies before it and after it."""
ALL = 1 << 62
"""Where a stretch of iterations ends that goes on as far as its loop does."""


_LIMITS = ("limits", "inner", "same", "version")
"""Facts that two replays of one statement share."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of one run, as far as it decides what an earlier replay is good for."""

    version: str
    """The source with the probes in it."""
    main: str | None
    """The loop that is divided among segments, by its id."""
    count: int
    """How many iterations it had."""
    at: tuple[At, ...]
    settled: float = math.inf
    """When the run recorded its last. What a later replay found nothing to compare with will never
    be proved, so it counts as filled; `inf`: it does not."""
    within: Within | None = None
    """Iterations of the inner loop that are asked for, where that is not all of them."""

    @property
    def limits(self) -> list[list[Any]]:
        """Iterations of other loops than the main one, as they are kept with a replay."""
        main = None if self.main is None else name_of(self.main)
        return [[at.loop, at.first, at.last, at.single] for at in self.at if at.loop != main]


def narrowed(
    asked: Asked,
    replays: Sequence[Replay],
    probes: Probes,
    names: tuple[str, ...],
    same: Callable[[str], str],
    picked: frozenset[int] | None,
) -> tuple[tuple[str, ...], frozenset[int] | None]:
    """Return which of `names` lack values, and in which iterations of the main loop; None: all.

    Only what is `picked` counts (None: everything). If nothing lacks, the names stay, with no
    iterations.
    """
    found = {name: lacking(asked, replays, name, probes.of(name), same) for name in names}
    kept = tuple(
        name
        for name, missing in found.items()
        if missing is None or (missing if picked is None else missing & picked)
    )
    if names and not kept:
        return names, frozenset()
    inside = [found[name] for name in kept if _looped(asked, probes.of(name))]
    if not inside or None in inside:
        return kept, None
    return kept, frozenset[int]().union(*(missing for missing in inside if missing))


def lacking(
    asked: Asked,
    replays: Sequence[Replay],
    name: str,
    probes: Sequence[Probe],
    same: Callable[[str], str],
) -> frozenset[int] | None:
    """Return the iterations of the main loop for which no replay that counts filled `name`.

    None: all of it. `same(name)` tells one way of logging it from another.
    """
    good = [replay for replay in replays if _good(asked, replay, name, same)]
    if not good:
        return None
    told = [replay for replay in good if "tail" in replay.facts]  # older ones did not say
    outside = _outside(asked, probes)
    if told and not all(any(replay.facts[end] for replay in told) for end in outside):
        return None
    if not _looped(asked, probes):
        return frozenset()
    return frozenset(range(asked.count)).difference(
        *(_iterations(asked, replay.facts) for replay in good)
    )


def taken(
    asked: Asked,
    replays: Sequence[Replay],
    name: str,
    probes: Sequence[Probe],
    same: Callable[[str], str],
) -> frozenset[Cell]:
    """Return the cells of `name` that replays filled which count."""
    good = (replay for replay in replays if _good(asked, replay, name, same))
    return frozenset[Cell]().union(*(cells(asked, probes, replay.facts) for replay in good))


def cells(asked: Asked, probes: Sequence[Probe], facts: Mapping[str, Any]) -> frozenset[Cell]:
    """Return the cells of what `probes` log that a replay with these facts is to fill."""
    ends = frozenset[Cell](end for end in _outside(asked, probes) if facts.get(end))
    return ends | _iterations(asked, facts) if _looped(asked, probes) else ends


def _iterations(asked: Asked, facts: Mapping[str, Any]) -> frozenset[int]:
    """Return the iterations of the main loop that a replay covers."""
    first, last = facts.get("covered", (0, 0))
    only = facts.get("only")
    reached = only if only is not None else range(first, min(last, asked.count))
    return frozenset(index for index in reached if _filled(asked, facts, index))


def _outside(asked: Asked, probes: Sequence[Probe]) -> set[str]:
    """Return the parts of a run, beside its main loop, that statements are executed in."""
    return {
        _end(probe, chain)
        for probe in probes
        for chain in probe.paths
        if not chain or chain[0] != asked.main
    }


def _filled(asked: Asked, facts: Mapping[str, Any], index: int) -> bool:
    """Say whether a replay fills what is asked for inside one iteration of the main loop."""
    for loop, spans in facts.get("inner", {}).items():
        span = spans.get(str(index))
        if span is None:
            continue
        if asked.within is None or loop not in (asked.within.loop, name_of(asked.within.loop)):
            return False
        low, high = asked.within.hull([index])
        if low < span[0] or (high is None and span[1] < ALL) or (high or 0) > span[1]:
            return False
    return True


def _looped(asked: Asked, probes: Sequence[Probe]) -> bool:
    """Say whether a statement may be executed in the main loop; one that nobody calls may be."""
    return any(
        not probe.paths or any(chain and chain[0] == asked.main for chain in probe.paths)
        for probe in probes
    )


def _end(probe: Probe, chain: tuple[str, ...]) -> str:
    """Return which part of a run, beside its main loop, a statement is executed in."""
    return "head" if not chain and probe.place is Position.BEFORE else "tail"


def uncompared(replay: Replay) -> bool:
    """Say whether a replay went well and found nothing recorded to compare itself with."""
    return replay.proof.verdict is Verdict.UNPROVED


def replaced(replay: Replay, replays: Iterable[Replay]) -> bool:
    """Return True if later exact replays did again all that `replay` was to do."""
    left = set(_stretches(replay))
    ends = {end for end in ("head", "tail") if replay.facts.get(end)}
    for other in replays:
        if (
            other.started <= replay.started
            or other.proof.verdict is not Verdict.EXACT
            or not set(replay.names) <= set(other.names)
            or any(other.facts.get(key) != replay.facts.get(key) for key in _LIMITS)
        ):
            continue
        ends -= {end for end in ends if other.facts.get(end)}
        for first, last in _stretches(other):
            left = {
                rest
                for low, high in left
                for rest in ((low, min(high, first)), (max(low, last), high))
                if rest[0] < rest[1]
            }
    return not left and not ends


def _stretches(replay: Replay) -> list[tuple[int, int]]:
    """Return the iterations of the main loop that a replay covers, from first to last."""
    only = replay.facts.get("only")
    if only is not None:
        return [(index, index + 1) for index in only]
    first, last = replay.facts.get("covered", (0, ALL))
    return [(first, last)]


def _good(asked: Asked, replay: Replay, name: str, same: Callable[[str], str]) -> bool:
    if name not in replay.names:
        return False
    if replay.proof.verdict is not Verdict.EXACT and (
        replay.started <= asked.settled or not uncompared(replay)
    ):
        return False
    kept: Mapping[str, Any] = replay.facts.get("same", {})
    if replay.version != asked.version and kept.get(name) != same(name):
        return False
    mine = {at.loop: at for at in asked.at}
    return all(_within(mine.get(limit[0]), At(*limit)) for limit in replay.facts.get("limits", ()))


def _within(asked: At | None, filled: At) -> bool:
    """Say whether all iterations that are asked for are among those that were filled.

    >>> _within(At("step", 2, 4), At("step", 0, 5)), _within(None, At("step", 0, 5))
    (True, False)
    >>> _within(At("step", 3, single=True), At("step", 0, 5))
    True
    """
    if asked is None:
        return False
    if asked == filled:
        return True
    ends = [asked.first, filled.first, *((filled.last,) if filled.last is not None else ())]
    if filled.single or not all(isinstance(end, int | float) for end in ends if end is not None):
        return False
    if filled.first is not None and (asked.first is None or asked.first < filled.first):  # type: ignore[operator]
        return False
    if filled.last is None:
        return True
    if asked.single:
        return asked.first < filled.last  # type: ignore[operator]
    return asked.last is not None and asked.last <= filled.last  # type: ignore[operator]
