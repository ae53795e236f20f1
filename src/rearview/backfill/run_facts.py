"""Convert a run's measurements into facts for the planner, and a planned segment into a segment file.

A run counts the iterations of its loops, their seconds, and the checkpoints it saved. A run that was killed
recorded less: its checkpoints show how far it came. Inner loops with short iterations are not counted to the
end: the remaining iterations are assumed to be like the counted ones.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rearview.backfill.coverage import ALL, CoverageQuery
from rearview.model import (
    Checkpoint,
    MainLoop,
    Point,
    ReplayStart,
    Run,
    RunEnd,
    Segment,
    SegmentFile,
    Step,
)
from rearview.model.run import NAMED, DeepLoop, name_of
from rearview.plan import facts as planning
from rearview.plan.facts import At, DeepFacts, LoopFacts, TargetValue
from rearview.source.loops import MODULE
from rearview.source.probes.loop_carried import START
from rearview.source.probes.probe import Probe, Probes

_Spans = dict[str, dict[int, tuple[int, int]]]
"""Id of an inner loop -> iteration of the main loop -> (first, last) iterations of the inner loop."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The values that are requested of one run: by which probes, in which iterations."""

    run: Run
    version: str
    """Source to execute: the run's own with the probes in it."""
    probes: Probes
    requested: tuple[Probe, ...]
    """The probes whose values are asked for; none: a plain replay."""
    names: tuple[str, ...]
    coverage: CoverageQuery
    missing: frozenset[int] | None = None
    """Iterations of the outermost loop that lack a value; None: all."""
    digests: Mapping[str, str] | None = None
    """By name, a digest of how it is logged; stored with replays, to know later for which edits they count."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """By name, the kind of its values in other versions; given if probes were carried here."""

    @property
    def at(self) -> tuple[At, ...]:
        """Iterations that the user asks for; none: all."""
        return self.coverage.at

    @property
    def main_entered_once(self) -> bool:
        """Whether the main loop was entered only once.

        Otherwise each entry may log requested values, and only one entry could be divided.
        """
        return self.run.end.main.alone

    @property
    def main_loop(self) -> str | None:
        """Id of the run's main loop."""
        return self.run.end.main.site


def segment_file(request: RunRequest, segment: Segment, *, first: bool = True) -> SegmentFile:
    """Return the segment file for one segment of the plan; `first` if it is the run's first."""
    probes = request.requested
    chains = [list(chain) for probe in probes for chain in (*probe.paths, *probe.feeding_paths)]
    # without any path, the loops around the statement are not known
    before_loops = bool(probes) and all(
        probe.runs_first and probe.paths and not any(probe.paths) for probe in probes
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


def replay_start(request: RunRequest, segment: Segment, crew: str) -> ReplayStart:
    """Return what to store with the replay of a segment: it shows later backfills what the replay covers.

    `crew` is the id of the backfill that starts it.
    """
    return ReplayStart(
        limits=request.coverage.limits,
        same=dict(request.digests or {}),
        inner=_inner_spans(request, segment),
        crew=crew,
    )


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
    for path in {path for probe in request.requested for path in probe.paths if path}:
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


START_SHARE = 0.5
"""Seconds that a replay takes to start, as a fraction of the recording's: a replay loads half as much."""
_Spent = list[tuple[float, int]]
"""(seconds, iterations) of an inner loop in each iteration of the outermost one."""


def run_facts(
    run: Run,
    version: str,
    checkpoints: Sequence[Checkpoint],
    *,
    blocked: str = "",
    machine: planning.Machine | None = None,
) -> planning.RunFacts:
    """Return the facts that a run measured about itself.

    `version` is the source that replays of it execute; `blocked` says why it cannot be replayed.
    """
    end, finished = run.end, run.ended is not None
    measured = finished and end.main != MainLoop()
    main = end.main if measured else _main_from_checkpoints(checkpoints)
    began = main.start * START_SHARE
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
    values = _main_values(main, len(iterations))
    inner = inner_loops(main, end, len(iterations))
    return planning.RunFacts(
        run.id,
        version,
        loops=(planning.LoopFacts(main.site, iterations, values=values), *inner),
        deep=deep_loops(main, end, len(iterations), inner),
        start=began,
        setup=main.entered,
        after=max(0.0, end.seconds - main.left) if end.seconds else 0.0,
        checkpoints=tuple(checkpoint_facts(main.site, checkpoints)),
        finished=finished,
        blocked=blocked,
        machine=machine,
    )


def _main_values(main: MainLoop, count: int) -> Sequence[planning.TargetValue] | None:
    """Return the values of the main loop's target in each iteration; None if they are its indices."""
    span = main.span
    if span is None and main.range is not None:  # of older runs
        span = (main.range[0], main.range[2])
    return target_values(span, main.held, count)


def checkpoint_facts(
    site: str, checkpoints: Iterable[Checkpoint]
) -> Iterable[planning.CheckpointFacts]:
    """Yield the checkpoints of the main loop with the bytes that a replay reads for each.

    A replay that passes several checkpoints reads only what changed since the last one of the same kind.
    That is what was stored in between, unless another run had stored it before.
    """
    sized = [(checkpoint, checkpoint.nbytes) for checkpoint in checkpoints]
    stored_all = sum(each.stored + each.shrunk for each, _ in sized) >= max(
        (size for _, size in sized), default=0
    )
    stored = 0
    before: dict[tuple[str, int], int] = {}
    for checkpoint, size in sized:
        stored += checkpoint.stored + checkpoint.shrunk
        path = checkpoint.meta.path
        if path and path[0].loop == site:
            kind = (checkpoint.edge, len(checkpoint.point.steps))
            nbytes = min(size, stored - before.get(kind, 0)) if stored_all else size
            before[kind] = stored
            steps = tuple(Step(step.loop, step.iteration) for step in path)
            yield planning.CheckpointFacts(
                checkpoint.id,
                Point(steps),
                checkpoint.edge,
                complete=checkpoint.complete,
                nbytes=nbytes,
            )


def _main_from_checkpoints(checkpoints: Sequence[Checkpoint]) -> MainLoop:
    """Return the main loop of a run that did not record its end, as far as its checkpoints show."""
    in_loops = [checkpoint for checkpoint in checkpoints if checkpoint.meta.path]
    if not in_loops:
        return MainLoop()
    site = in_loops[-1].meta.path[0].loop
    in_main = [each for each in in_loops if each.meta.path[0].loop == site]
    seconds = {each.meta.path[0].iteration: each.meta.seconds for each in in_main}
    low, high = min(seconds), max(seconds)
    each = (seconds[high] - seconds[low]) / (high - low) if high > low else seconds[high]
    inner = {
        checkpoint.meta.path[1].loop: [(each, checkpoint.meta.path[1].iteration or 1)] * (high + 1)
        for checkpoint in in_main
        if len(checkpoint.meta.path) > 1
    }
    return MainLoop(
        site=site,
        name=name_of(site),
        entered=max(0.0, seconds[low] - each * max(1, low)),
        left=seconds[high],
        iterations=[(high + 1, each)],
        inner=inner,
    )


def inner_loops(main: MainLoop, end: RunEnd, count: int) -> list[LoopFacts]:
    """Return the loops directly inside the outermost one, which had `count` iterations."""
    loops = []
    for site, spent in main.inner.items():
        counted = _counted_iterations(main, end, site, len(spent), count)
        padded = _pad(_spread(main, [(s, n) for s, n in spent]), counted, count)
        most_iterations = max((n for _, n in padded), default=0)
        loops.append(
            LoopFacts(
                site,
                [s for s, _ in padded],
                [n for _, n in padded],
                values=target_values(main.spans.get(site), main.helds.get(site), most_iterations),
                counted=counted,
                varied=site in main.varied,
            )
        )
    return loops


def deep_loops(
    main: MainLoop,
    end: RunEnd,
    count: int,
    inner: Sequence[LoopFacts],
) -> dict[tuple[str, ...], DeepFacts]:
    """Return the loops inside inner loops, by the ids of the loops around them and their own id.

    Older runs recorded names instead of ids. A loop that was not counted to the end is taken to have
    had as many iterations each time.
    """
    deep_facts: dict[tuple[str, ...], DeepFacts] = {}
    for names, deep in sorted(main.deep.items(), key=_depth):
        chain = tuple(deep.path or names.split("/"))
        around: LoopFacts | DeepFacts | None = deep_facts.get(chain[:-1])
        if len(chain) == 2:
            outer = (loop for loop in inner if chain[0] in (loop.name, name_of(loop.name)))
            around = next(outer, None)
        counts = list(deep.counts)
        counted = _counted_iterations(main, end, deep.site, len(counts), count)
        each = sum(counts) / max(1, deep.entries)
        counts += [0] * (count - len(counts))
        if around is not None:
            counts = [
                have if k in counted else round(around.counts[k] * each)
                for k, have in enumerate(counts)
            ]
        deep_facts[chain] = DeepFacts(counts, counted)
    return deep_facts


def _depth(item: tuple[str, DeepLoop]) -> int:
    names, deep = item
    return len(deep.path or names.split("/"))


def _counted_iterations(main: MainLoop, end: RunEnd, site: str, recorded: int, count: int) -> range:
    """Return the iterations of the outermost loop in which an inner loop was counted completely.

    A loop with short iterations is no longer counted after a while; in the iteration in which counting
    ended it may have had more of them. Older runs counted several iterations together.
    """
    quiet = site not in end.loops
    if main.counted is None:
        together = quiet or any(many > 1 for many, _ in main.iterations)
        return range(0 if together else count)
    first, last = main.counted
    return range(first, min(last, recorded - 1) if quiet else min(last, count))


def _spread(main: MainLoop, spent: _Spent) -> _Spent:
    """Return counts of several iterations together divided equally among them.

    >>> _spread(MainLoop(iterations=[(1, 0.1), (2, 0.1)]), [(0.1, 3), (0.0, 0), (0.2, 6)])
    [(0.1, 3), (0.1, 3), (0.1, 3)]
    """
    if main.counted is not None:
        return spent
    equal: _Spent = []
    for many, _ in main.iterations:
        part = spent[len(equal) : len(equal) + many]
        seconds, count = sum(s for s, _ in part), sum(n for _, n in part)
        equal += [(seconds / many, round(count / many))] * len(part)
    return equal


def _pad(spent: _Spent, counted: range, count: int) -> _Spent:
    """Return seconds and iterations of an inner loop for each iteration around it.

    Where they were not counted, the mean is taken.

    >>> _pad([(0.25, 10), (0.75, 10)], range(1), 3)
    [(0.25, 10), (0.75, 10), (0.5, 10)]
    >>> _pad([(0.25, 10)], range(3), 3)
    [(0.25, 10), (0.0, 0), (0.0, 0)]
    """
    entered = [(seconds, number) for seconds, number in spent if number]
    mean = (0.0, 0)
    if entered:
        mean = (
            sum(s for s, _ in entered) / len(entered),
            round(sum(n for _, n in entered) / len(entered)),
        )
    padded = [*spent, *[(0.0, 0)] * (count - len(spent))][:count]
    return [each if k in counted or each[1] else mean for k, each in enumerate(padded)]


def target_values(
    span: Sequence[int] | None, recorded: Sequence[TargetValue] | None, count: int
) -> Sequence[TargetValue] | None:
    """Return the values of a loop's target in `count` iterations.

    None: they are not known, or they are the indices. `span` is (start, step) of a range.

    >>> target_values([1, 1], None, 3), target_values([0, 1], None, 3), target_values(None, None, 3)
    ([1, 2, 3], None, None)
    >>> target_values(None, ["a", "b", "c"], 2), target_values(None, ["a"], 2)
    (['a', 'b'], None)
    """
    if span is not None:
        return [span[0] + span[1] * k for k in range(count)] if list(span) != [0, 1] else None
    if recorded is None or len(recorded) < count or list(recorded) == list(range(len(recorded))):
        return None
    return recorded[:count]


def with_run_loop_ids(probes: Probes, run: Run) -> Probes:
    """Return the probes as the run sees them: with its ids of loops, and whether they run before its main loop.

    A loop over `rearview.loop` has the name that the program gave it as its id, in any function.
    """
    recorded = run.end.loops
    main = run.end.main.site
    main_loops = [loop for loop in probes.known_loops if main in (str(loop), NAMED + loop.name)]

    def runs_first(probe: Probe) -> bool:
        """Return False also if the main loop is in a library, or is called by one."""
        in_order = bool(main_loops) and all(
            (loop.path == probe.path or loop.function != MODULE)
            and (loop.path == probe.path or probe.function != MODULE or _is_script(probe.path, run))
            for loop in main_loops
        )
        return probe.runs_first and (in_order or main is None)

    def renamed(path: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            named if (named := NAMED + name_of(loop)) in recorded and loop not in recorded else loop
            for loop in path
        )

    changed = (
        replace(
            probe,
            paths=tuple(map(renamed, probe.paths)),
            feeding_paths=tuple(map(renamed, probe.feeding_paths)),
            runs_first=runs_first(probe),
        )
        for probe in probes.probes
    )
    return replace(probes, probes=tuple(changed))


def _is_script(path: str, run: Run) -> bool:
    """Return True if a file is the one that the run was started with."""
    module = run.script.removeprefix("-m ").replace(".", "/")
    return path == run.script or path.endswith((f"{module}.py", f"{module}/__main__.py"))
