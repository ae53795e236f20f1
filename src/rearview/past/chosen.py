"""Which iterations a predicate on recorded values chooses, of the outermost loop and inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rearview.model.point import name_of
from rearview.plan.facts import LoopFacts, Within
from rearview.source.probes import Probe, Probes
from rearview.store.views import Stretch

Chosen = dict[int, Stretch]
"""By iteration of the outermost loop; one whose loops are no more than that is chosen whole."""


def joined(known: Stretch | None, more: Stretch) -> Stretch:
    """Return one stretch that holds two of the same iteration.

    >>> joined(Stretch("r", ("epoch", "step"), 3, 4, 6), Stretch("r", ("epoch", "step"), 3, 8, 9))
    Stretch(run='r', loops=('epoch', 'step'), outer=3, first=4, last=9)
    >>> joined(Stretch("r", ("epoch", "step"), 3, 4, 6), Stretch("r", ("epoch", "test"), 3, 1, 2))
    Stretch(run='r', loops=('epoch',), outer=3, first=0, last=None)
    """
    if known is None:
        return more._replace(loops=more.loops[:2])
    if known.loops != more.loops[:2] or len(known.loops) < 2:
        return Stretch(known.run, known.loops[:1], known.outer)
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
