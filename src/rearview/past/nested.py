"""How often the loops inside a run's outermost one went round, as far as the run counted them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rearview.model.point import name_of
from rearview.plan.facts import DeepFacts, LoopFacts, Shown

Spent = list[tuple[float, int]]


def inner_loops(main: Mapping[str, Any], end: Mapping[str, Any], count: int) -> list[LoopFacts]:
    """Return the loops directly inside the outermost one, which had `count` iterations."""
    found = []
    for site, spent in main.get("inner", {}).items():
        seen = _seen(main, end, site, len(spent), count)
        padded = _padded(_apart(main, [(s, n) for s, n in spent]), seen, count)
        most = max((n for _, n in padded), default=0)
        found.append(
            LoopFacts(
                site,
                [s for s, _ in padded],
                [n for _, n in padded],
                values=shown(
                    main.get("spans", {}).get(site), main.get("helds", {}).get(site), most
                ),
                counted=seen,
                varied=site in main.get("varied", ()),
            )
        )
    return found


def deep_loops(
    main: Mapping[str, Any],
    end: Mapping[str, Any],
    count: int,
    inner: Sequence[LoopFacts],
) -> dict[tuple[str, ...], DeepFacts]:
    """Return the loops inside of inner ones by the ids of those and their own, or by names.

    Runs of before told the names alone.

    One that was not watched to its end is taken to have gone round as often each time.
    """
    found: dict[tuple[str, ...], DeepFacts] = {}
    for names, deep in sorted(main.get("deep", {}).items(), key=_levels):
        chain = tuple(deep.get("path") or names.split("/"))
        around: LoopFacts | DeepFacts | None = found.get(chain[:-1])
        if len(chain) == 2:
            here = (loop for loop in inner if chain[0] in (loop.name, name_of(loop.name)))
            around = next(here, None)
        counts = list(deep["counts"])
        seen = _seen(main, end, deep["site"], len(counts), count)
        each = sum(counts) / max(1, deep["entries"])
        counts += [0] * (count - len(counts))
        if around is not None:
            counts = [
                have if k in seen else round(around.counts[k] * each)
                for k, have in enumerate(counts)
            ]
        found[chain] = DeepFacts(counts, seen)
    return found


def _levels(item: tuple[str, Mapping[str, Any]]) -> int:
    names, deep = item
    return len(deep.get("path") or names.split("/"))


def _seen(
    main: Mapping[str, Any], end: Mapping[str, Any], site: str, known: int, count: int
) -> range:
    """Return the iterations of the outermost loop in which an inner one was counted for certain.

    A loop of short iterations is not watched for ever; the iteration in which that ended may have
    had more of it. Runs of before counted several iterations together.
    """
    quiet = site not in end.get("loops", {})
    if "counted" not in main:
        together = quiet or any(many > 1 for many, _ in main["iterations"])
        return range(0 if together else count)
    first, last = main["counted"]
    return range(first, min(last, known - 1) if quiet else min(last, count))


def _apart(main: Mapping[str, Any], spent: Spent) -> Spent:
    """Return what was counted for several iterations together as so much for each of them.

    >>> _apart({"iterations": [(1, 0.1), (2, 0.1)]}, [(0.1, 3), (0.0, 0), (0.2, 6)])
    [(0.1, 3), (0.1, 3), (0.1, 3)]
    """
    if "counted" in main:
        return spent
    found: Spent = []
    for many, _ in main["iterations"]:
        part = spent[len(found) : len(found) + many]
        seconds, count = sum(s for s, _ in part), sum(n for _, n in part)
        found += [(seconds / many, round(count / many))] * len(part)
    return found


def _padded(spent: Spent, seen: range, count: int) -> Spent:
    """Return seconds and iterations of an inner loop in each iteration around it.

    Where they were not counted, it went on as it was.

    >>> _padded([(0.25, 10), (0.75, 10)], range(1), 3)
    [(0.25, 10), (0.75, 10), (0.5, 10)]
    >>> _padded([(0.25, 10)], range(3), 3)
    [(0.25, 10), (0.0, 0), (0.0, 0)]
    """
    known = [(seconds, number) for seconds, number in spent if number]
    usual = (0.0, 0)
    if known:
        usual = (
            sum(s for s, _ in known) / len(known),
            round(sum(n for _, n in known) / len(known)),
        )
    found = [*spent, *[(0.0, 0)] * (count - len(spent))][:count]
    return [each if k in seen or each[1] else usual for k, each in enumerate(found)]


def shown(
    span: Sequence[int] | None, held: Sequence[Shown] | None, count: int
) -> Sequence[Shown] | None:
    """Return what a loop's target held in `count` iterations, where that is known and no index.

    >>> shown([1, 1], None, 3), shown([0, 1], None, 3), shown(None, None, 3)
    ([1, 2, 3], None, None)
    >>> shown(None, ["a", "b", "c"], 2), shown(None, ["a"], 2)
    (['a', 'b'], None)
    """
    if span is not None:
        return [span[0] + span[1] * k for k in range(count)] if list(span) != [0, 1] else None
    if held is None or len(held) < count or list(held) == list(range(len(held))):
        return None
    return held[:count]
