"""From a probe to what has to run again: questions for the planner, segment files for replays.

How often the loops inside a run's outermost one went round, as far as the run counted them.

From a probe to what has to run again: questions for the planner, segment files for replays.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rearview.backfill.coverage import ALL, Asked
from rearview.backfill.shared_imports import Lead, waited
from rearview.model import (
    Checkpoint,
    MainLoop,
    Point,
    Run,
    RunEnd,
    Segment,
    SegmentFile,
    Step,
)
from rearview.model.run import NAMED, columns_of, name_of
from rearview.model.run_facts import DeepLoop
from rearview.plan import facts as planning
from rearview.plan.facts import At, DeepFacts, LoopFacts, Shown
from rearview.source.probes.loop_carried import START
from rearview.source.probes.probe import Position, Probe, Probes

Spent = list[tuple[float, int]]


def inner_loops(main: MainLoop, end: RunEnd, count: int) -> list[LoopFacts]:
    """Return the loops directly inside the outermost one, which had `count` iterations."""
    found = []
    for site, spent in main.inner.items():
        seen = _seen(main, end, site, len(spent), count)
        padded = _padded(_apart(main, [(s, n) for s, n in spent]), seen, count)
        most = max((n for _, n in padded), default=0)
        found.append(
            LoopFacts(
                site,
                [s for s, _ in padded],
                [n for _, n in padded],
                values=shown(main.spans.get(site), main.helds.get(site), most),
                counted=seen,
                varied=site in main.varied,
            )
        )
    return found


def deep_loops(
    main: MainLoop,
    end: RunEnd,
    count: int,
    inner: Sequence[LoopFacts],
) -> dict[tuple[str, ...], DeepFacts]:
    """Return the loops inside of inner ones by the ids of those and their own, or by names.

    Runs of before told the names alone.

    One that was not watched to its end is taken to have gone round as often each time.
    """
    found: dict[tuple[str, ...], DeepFacts] = {}
    for names, deep in sorted(main.deep.items(), key=_levels):
        chain = tuple(deep.path or names.split("/"))
        around: LoopFacts | DeepFacts | None = found.get(chain[:-1])
        if len(chain) == 2:
            here = (loop for loop in inner if chain[0] in (loop.name, name_of(loop.name)))
            around = next(here, None)
        counts = list(deep.counts)
        seen = _seen(main, end, deep.site, len(counts), count)
        each = sum(counts) / max(1, deep.entries)
        counts += [0] * (count - len(counts))
        if around is not None:
            counts = [
                have if k in seen else round(around.counts[k] * each)
                for k, have in enumerate(counts)
            ]
        found[chain] = DeepFacts(counts, seen)
    return found


def _levels(item: tuple[str, DeepLoop]) -> int:
    names, deep = item
    return len(deep.path or names.split("/"))


def _seen(main: MainLoop, end: RunEnd, site: str, known: int, count: int) -> range:
    """Return the iterations of the outermost loop in which an inner one was counted for certain.

    A loop of short iterations is not watched for ever; the iteration in which that ended may have
    had more of it. Runs of before counted several iterations together.
    """
    quiet = site not in end.loops
    if main.counted is None:
        together = quiet or any(many > 1 for many, _ in main.iterations)
        return range(0 if together else count)
    first, last = main.counted
    return range(first, min(last, known - 1) if quiet else min(last, count))


def _apart(main: MainLoop, spent: Spent) -> Spent:
    """Return what was counted for several iterations together as so much for each of them.

    >>> _apart(MainLoop(iterations=[(1, 0.1), (2, 0.1)]), [(0.1, 3), (0.0, 0), (0.2, 6)])
    [(0.1, 3), (0.1, 3), (0.1, 3)]
    """
    if main.counted is not None:
        return spent
    found: Spent = []
    for many, _ in main.iterations:
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


FORKED = 0.04
"""Seconds that it takes to begin if it is forked from a process that has."""
LIGHTER = 0.5
"""How long a replay takes to begin, of what the recording took: it loads half as much."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run with the probes that are wanted of it, ready to be planned."""

    run: Run
    version: str
    """Source to execute: the run's own with the probes in it."""
    probes: Probes
    asked: tuple[Probe, ...]
    names: tuple[str, ...]
    facts: planning.RunFacts
    about: Asked
    missing: frozenset[int] | None = None
    """Iterations of the outermost loop without a value; None: all."""
    at: tuple[At, ...] = ()
    told: Mapping[str, Any] = field(default_factory=dict)
    """What is kept with its replays, to know later what they are good for."""
    known: frozenset[str] = frozenset()
    """Replays that had ended when this was prepared."""
    unproved: tuple[str, ...] = ()
    """Names of which some values are there that nothing recorded can be compared with."""
    lead: Lead | None = None
    """How its replays begin, if that is something that can be shared."""
    spared: float = 0.0
    """Seconds that were left out of its facts since its start will be shared."""

    def led(self) -> Prepared:
        """Return it without the part of its start that others will have made already."""
        if self.lead is None:
            return self
        facts = self.facts
        imports = min(waited(self.run, self.lead), facts.setup)
        start = min(facts.start, FORKED)
        shorter = replace(facts, start=start, setup=facts.setup - imports)
        return replace(self, facts=shorter, spared=facts.start - start + imports)

    def question(self) -> planning.RunQuestion:
        """Return what the planner is to answer."""
        wanted = []
        if not self._alone() and self.asked and not self.at:
            everything = planning.Want(
                self.names, (), Position.AFTER.value, missing=self.missing, several=True
            )
            return planning.RunQuestion(self.facts, (everything,))
        for probe in self.asked:
            chains = probe.paths or (self._deepest(),)
            if not probe.paths:
                # Nobody is seen to call its function: it may well be called after the loops.
                after = Position.AFTER.value
                wanted.append(
                    planning.Want(self.names, (), after, missing=self.missing, several=True)
                )
            for chain in chains:
                main = self.facts.loops[0].name if self.facts.loops else None
                if chain and chain[0] != main and not (main is None and self.at):
                    # Another loop than the main one, or one in a coroutine, which nobody divides:
                    # run to the end, and pass the main one by.
                    other = tuple(at for at in self.at if at.loop not in columns_of(chain))
                    wanted.append(
                        planning.Want(
                            *(self.names, (), Position.AFTER.value),
                            at=other,
                            missing=self.missing,
                            several=True,
                        )
                    )
                    continue
                depth = len(chain) - len(probe.loops) + probe.depth
                wanted.append(
                    planning.Want(
                        names=self.names,
                        loops=chain,
                        place=self._place(probe, chain),
                        depth=-1 if probe.depth == START else depth,
                        feeds=bool(probe.feeds),
                        at=self.at,
                        missing=self.missing,
                        within=self.about.within,
                    )
                )
        if not self.asked:
            wanted.append(planning.Want((), self._deepest(), at=self.at))
        return planning.RunQuestion(self.facts, tuple(wanted))

    def _place(self, probe: Probe, chain: tuple[str, ...]) -> str:
        """Return where a statement stands among the inner loops.

        Inner loops in functions that its function calls are not seen in the text, but were in
        the run: the statement may stand before or after them.
        """
        if probe.place is Position.ALONE and 0 < len(chain) < len(self.facts.loops):
            return Position.BETWEEN.value
        return probe.place.value

    def _deepest(self) -> tuple[str, ...]:
        """Return the loops that may be around a statement of which nothing is known."""
        return tuple(loop.name for loop in self.facts.loops[:2])

    def wanted(self, segment: Segment, *, first: bool = True) -> SegmentFile:
        """Return the segment file for one segment of the plan; `first` if it is the run's first."""
        asked = self.asked
        chains = [list(chain) for probe in asked for chain in (*probe.paths, *probe.fed_by)]
        everywhere = not asked or any(not probe.paths for probe in asked)
        # without any path it is not known which loops are around the statement
        before = bool(asked) and all(
            probe.place is Position.BEFORE and probe.paths and not any(probe.paths)
            for probe in asked
        )
        to_end = segment.tail or segment.loop is None
        alone = self._alone()
        others = any(chain and chain[0] != segment.loop for chain in chains)
        spans = self._spans(segment)
        ranges = _ranges(segment, spans) if alone or self.at else {}
        return SegmentFile(
            run=self.run.id,
            replay=f"{self.run.id}.{secrets.token_hex(4)}",
            report="",
            names=self.names,
            chains=chains,
            everywhere=everywhere,
            levels=self._levels(),
            main=segment.loop or "" if ranges else "",
            ranges=ranges,
            spans=spans,
            owed=self._owed(segment, to_end=to_end),
            after=not before and (to_end or others or not alone),
            head=first,
            tail=to_end,
            until=self._main() if before else None,
            probes={
                path: [(line, column, list(drawn)) for (line, column), drawn in places.items()]
                for path in {probe.path for probe in self.probes.probes}
                if (places := self.probes.places(path))
            },
            ids={
                path: {line: str(one) for line, one in ids.items()}
                for path, ids in self.probes.loops.items()
            },
        )

    def kept(self, segment: Segment) -> dict[str, Any]:
        """Return what is kept with the replay of a segment, to know later what it is good for."""
        return {**self.told, "inner": self._spans(segment)}

    def _spans(self, segment: Segment) -> dict[str, dict[int, tuple[int, int]]]:
        """Return which iterations of an inner loop are wanted in those of the segment."""
        within = self.about.within
        if within is None:
            return {}
        last = ALL if segment.last is None else segment.last
        here = range(segment.first, last) if segment.only is None else segment.only
        spans = {
            index: (first, ALL if end is None else end)
            for index, (first, end) in within.spans.items()
            if index in here
        }
        return {within.loop: spans} if spans else {}

    def _owed(self, segment: Segment, *, to_end: bool) -> dict[str, int]:
        """Return how often the loops around what is wanted went round in the run, as it counted.

        Only loops of which that is known for certain: those that were watched to their end.
        """
        main = self.run.end.main
        known = {
            site: loop.iterations for site, loop in self.run.end.loops.items() if not loop.loose
        }
        if self.at or self.about.within is not None or not main.alone or self.run.ended is None:
            return {}
        first, most = main.counted or (0, 0)
        if first or self.about.count > most or main.counts is None:
            return {}  # a part of it ran in another process, or was not counted
        last = ALL if segment.last is None else segment.last
        here = range(segment.first, last) if segment.only is None else segment.only
        owed: dict[str, int] = {}
        for path in {path for probe in self.asked for path in probe.paths if path}:
            site = path[-1]
            if any(loop not in known for loop in path):
                continue
            counts = main.counts.get(site, [])
            if site == main.site:
                owed[site] = sum(1 for k in range(self.about.count) if k in here)
            elif segment.loop is not None:
                owed[site] = sum(count for k, count in enumerate(counts) if k in here)
            else:
                owed[site] = sum(counts)
            if to_end and site != main.site:
                owed[site] += known[site] - sum(counts)
        return owed

    def _alone(self) -> bool:
        """Return True if the main loop was entered only once.

        If not, each time may hold what is wanted, and only one of them can be divided.
        """
        return self.run.end.main.alone

    def _levels(self) -> int:
        return min(
            (
                0 if probe.depth == START else len(chain) - len(probe.loops) + probe.depth
                for probe in self.asked
                for chain in probe.paths
            ),
            default=99,
        )

    def _main(self) -> str | None:
        return self.run.end.main.site


def _ranges(segment: Segment, inner: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
    found = {loop: [(0, ALL)] for loop in inner}
    if segment.loop is not None:
        if segment.only is not None:
            found[segment.loop] = [(k, k + 1) for k in segment.only]
        else:
            found[segment.loop] = [(segment.first, ALL if segment.last is None else segment.last)]
    for loop, first, last in segment.inner:
        found[loop] = [(first, ALL if last is None else last)]
    return found


def as_run(probes: Probes, run: Run) -> Probes:
    """Return the probes with the loops around them as the run calls them.

    A loop over `rearview.loop` goes by the name that the program gave it, wherever it stands.
    """
    known = run.end.loops

    def renamed(path: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            named if (named := NAMED + name_of(loop)) in known and loop not in known else loop
            for loop in path
        )

    changed = (
        replace(
            probe,
            paths=tuple(map(renamed, probe.paths)),
            fed_by=tuple(map(renamed, probe.fed_by)),
        )
        for probe in probes.probes
    )
    return replace(probes, probes=tuple(changed))


def run_facts(
    run: Run,
    version: str,
    checkpoints: Sequence[Checkpoint],
    *,
    blocked: str = "",
    machine: planning.Machine | None = None,
) -> planning.RunFacts:
    """Return what a run measured about itself, as the planner takes it."""
    end, finished = run.end, run.ended is not None
    main = end.main if finished and end.main != MainLoop() else _from_checkpoints(checkpoints)
    began = main.start * LIGHTER
    if main.site is None:
        return planning.RunFacts(
            run.id,
            version,
            start=began,
            setup=end.seconds,
            finished=finished,
            blocked=blocked,
            machine=machine,
        )
    iterations = [each for count, each in main.iterations for _ in range(count)]
    values = _values(main, len(iterations))
    inner = inner_loops(main, end, len(iterations))
    return planning.RunFacts(
        run.id,
        version,
        loops=(planning.LoopFacts(main.site, iterations, values=values), *inner),
        deep=deep_loops(main, end, len(iterations), inner),
        start=began,
        setup=main.entered,
        after=max(0.0, end.seconds - main.left) if end.seconds else 0.0,
        checkpoints=tuple(_of_main(main.site, checkpoints)),
        finished=finished,
        blocked=blocked,
        machine=machine,
    )


def _values(main: MainLoop, count: int) -> Sequence[planning.Shown] | None:
    """Return what the target held in each iteration, where that is not the index."""
    span = main.span
    if span is None and main.range is not None:  # of runs before inner loops had one
        span = (main.range[0], main.range[2])
    return shown(span, main.held, count)


def _of_main(site: str, checkpoints: Iterable[Checkpoint]) -> Iterable[planning.CheckpointFacts]:
    """Yield those of the main loop, with the bytes that a replay on its way through them reads.

    What stayed the same since the last one of the same kind is in memory already. That is known by
    what was stored meanwhile, unless another run had stored it before.
    """
    sized = [(one, one.nbytes) for one in checkpoints]
    first = sum(one.stored + one.shrunk for one, _ in sized) >= max(
        (size for _, size in sized), default=0
    )
    stored = 0
    before: dict[tuple[str, int], int] = {}
    for one, size in sized:
        stored += one.stored + one.shrunk
        if one.meta.path and one.meta.path[0].loop == site:
            kind = (one.edge, len(one.point.steps))
            nbytes = min(size, stored - before.get(kind, 0)) if first else size
            before[kind] = stored
            steps = tuple(Step(step.loop, step.iteration) for step in one.meta.path)
            yield planning.CheckpointFacts(
                one.id, Point(steps), one.edge, complete=one.complete, nbytes=nbytes
            )


def _from_checkpoints(checkpoints: Sequence[Checkpoint]) -> MainLoop:
    """Return the main loop of a run that never said how it ended, as its checkpoints tell."""
    known = [one for one in checkpoints if one.meta.path]
    if not known:
        return MainLoop()
    last = known[-1]
    site = last.meta.path[0].loop
    mine = [one for one in known if one.meta.path[0].loop == site]
    places = {one.meta.path[0].iteration: one.meta.seconds for one in mine}
    low, high = min(places), max(places)
    each = (places[high] - places[low]) / (high - low) if high > low else places[high]
    inner = {
        one.meta.path[1].loop: [(each, one.meta.path[1].iteration or 1)] * (high + 1)
        for one in mine
        if len(one.meta.path) > 1
    }
    return MainLoop(
        site=site,
        name=name_of(site),
        entered=max(0.0, places[low] - each * max(1, low)),
        left=places[high],
        iterations=[(high + 1, each)],
        inner=inner,
    )
