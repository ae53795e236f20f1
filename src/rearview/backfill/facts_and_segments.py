"""Convert a run's measurements into facts for the planner, and a planned segment into a segment file.

A run records the number and seconds of the iterations of its loops, and the checkpoints it saved. A run that was
killed recorded less: its checkpoints show how far it came. If the iterations of an inner loop are short, the run stops
counting them after a while; the uncounted iterations are assumed to be like the counted ones.
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
"""Id of an inner loop -> iteration of the main loop -> (first, end): inner iterations `first <= i < end`."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The values that are requested of one run: which probes log them, in which iterations."""

    run: Run
    version: str
    """Id of the version to execute: the source of the run with the probes inserted."""
    probes: Probes
    requested: tuple[Probe, ...]
    """Those of `probes` that log requested values; empty if the replay only proves that the run can be repeated."""
    names: tuple[str, ...]
    """The requested names of which values are missing."""
    coverage: CoverageQuery
    missing_iterations: frozenset[int] | None = None
    """Iterations of the outermost loop that lack a value; None means all iterations."""
    digests: Mapping[str, str] | None = None
    """Name -> digest of the statements that log it. The digests are stored with a replay: its values also count for
    later versions of the source in which these statements are unchanged.
    """
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Name -> kind of its values in other versions, such as "a number". A probe that logs another kind was inserted at
    a wrong line. Empty if the user added the probes to this version directly.
    """

    @property
    def at(self) -> tuple[At, ...]:
        """The iterations that the user selected; empty means all."""
        return self.coverage.at

    @property
    def main_entered_once(self) -> bool:
        """Whether the run entered the main loop only once.

        If not, the loop is not divided: requested values may be logged each time that the run enters it.
        """
        return self.run.end.main.alone

    @property
    def main_loop(self) -> str | None:
        """Id of the run's main loop, or None if the run has no loop."""
        return self.run.end.main.site


def segment_file(request: RunRequest, segment: Segment, *, first: bool = True) -> SegmentFile:
    """Return the segment file that tells a replay what to do; `first` says that `segment` is the first of its run.

    Only the first segment of a run logs the values from before the main loop.
    """
    probes = request.requested
    chains = [list(chain) for probe in probes for chain in (*probe.paths, *probe.feeding_paths)]
    # a probe without loop paths may run in any loop, because the loops around it are not known
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


def replay_start(request: RunRequest, segment: Segment, backfill: str) -> ReplayStart:
    """Return the record that is stored when a replay of `segment` starts; other backfills read what it will fill.

    `backfill` is the id of the backfill that starts the replay. `ReplayJobs.prepare` sets the other fields.
    """
    return ReplayStart(
        limits=request.coverage.limits,
        same=dict(request.digests or {}),
        inner=_inner_spans(request, segment),
        crew=backfill,
    )


def _segment_iterations(segment: Segment) -> Sequence[int]:
    last = ALL if segment.last is None else segment.last
    return range(segment.first, last) if segment.only is None else segment.only


def _inner_spans(request: RunRequest, segment: Segment) -> _Spans:
    """Return the requested iterations of the inner loop, for those iterations of the main loop that `segment` runs.

    The result is empty if all iterations of all inner loops are requested.
    """
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
    """Return loop id -> ranges (first, end) of requested iterations in `segment`; `end` is not included.

    The loops are the main loop, loops inside it that `segment` restricts, and `inner`, whose ranges are unrestricted.
    """
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
    """Return how many nested loops, from the outermost in, a replay may enter at a later iteration than the first.

    All `probes` must log correctly if it does so. Without a known loop path, the result is 99: any number.
    """
    return min(
        (
            0 if probe.depth == START else len(chain) - len(probe.loops) + probe.depth
            for probe in probes
            for chain in probe.paths
        ),
        default=99,
    )


def _owed_iterations(request: RunRequest, segment: Segment, *, to_end: bool) -> dict[str, int]:
    """Return loop id -> number of iterations that the recorded run had in `segment`, for the loops around the probes.

    If a replay executes fewer iterations of such a loop, values are missing. `to_end` says that the replay runs to the
    end of the program. Loops whose iterations the run did not count to the end are left out.
    """
    run, main, coverage = request.run, request.run.end.main, request.coverage
    counted = {site: loop.iterations for site, loop in run.end.loops.items() if not loop.loose}
    if request.at or coverage.within is not None or not main.alone or run.ended is None:
        return {}
    first, end = main.counted or (0, 0)
    if first or coverage.count > end or main.counts is None:
        return {}  # a part of the main loop was not counted, for example because it ran in another process
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
"""Start time of a replay as a fraction of the start time of the recorded run; a replay loads about half as much."""
_Spent = list[tuple[float, int]]
"""(seconds, number of iterations) of an inner loop, for each iteration of the outermost loop."""


def run_facts(
    run: Run,
    version: str,
    checkpoints: Sequence[Checkpoint],
    *,
    blocked: str = "",
    machine: planning.Machine | None = None,
) -> planning.RunFacts:
    """Return the facts about `run` that the planner needs, from the measurements that the run recorded.

    `version` is the id of the version that replays execute. `blocked` says why the run cannot be replayed; it is empty
    if it can. `machine` is the machine that recorded the run.
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
    """Return the value of the main loop's target variable in each of `count` iterations.

    Return None if the values are unknown or equal to the indices of the iterations.
    """
    span = main.span
    if span is None and main.range is not None:  # recorded by an older version of Rearview
        span = (main.range[0], main.range[2])
    return target_values(span, main.held, count)


def checkpoint_facts(
    site: str, checkpoints: Iterable[Checkpoint]
) -> Iterable[planning.CheckpointFacts]:
    """Yield the planner's facts about each of `checkpoints` that is in the main loop `site`.

    `nbytes` is the number of bytes that a replay reads if it has just restored the previous checkpoint of the same
    edge and loop depth: only the bytes that changed. These are the bytes that the run stored in between. If another
    run had stored some of them before, all bytes of the checkpoint are counted.
    """
    sized = [(checkpoint, checkpoint.nbytes) for checkpoint in checkpoints]
    stored_all = sum(each.stored + each.shrunk for each, _ in sized) >= max(
        (size for _, size in sized), default=0
    )
    stored_bytes = 0
    bytes_before: dict[tuple[str, int], int] = {}
    for checkpoint, size in sized:
        stored_bytes += checkpoint.stored + checkpoint.shrunk
        path = checkpoint.meta.path
        if path and path[0].loop == site:
            series = (checkpoint.edge, len(checkpoint.point.steps))
            nbytes = size
            if stored_all:
                nbytes = min(size, stored_bytes - bytes_before.get(series, 0))
            bytes_before[series] = stored_bytes
            steps = tuple(Step(step.loop, step.iteration) for step in path)
            yield planning.CheckpointFacts(
                checkpoint.id,
                Point(steps),
                checkpoint.edge,
                complete=checkpoint.complete,
                nbytes=nbytes,
            )


def _main_from_checkpoints(checkpoints: Sequence[Checkpoint]) -> MainLoop:
    """Return the main loop as far as the checkpoints of a run show it, for a run that did not record its end.

    The seconds between the first and the last checkpoint are divided equally among the iterations.
    """
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
    """Return the planner's facts about the loops directly inside the loop `main`, which had `count` iterations."""
    loops = []
    for site, spent in main.inner.items():
        counted = _counted_iterations(main, end, site, len(spent), count)
        padded = _pad(_per_iteration(main, [(s, n) for s, n in spent]), counted, count)
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
    """Return loop path without the outermost loop -> facts, for the loops inside the loops `inner` of the loop `main`.

    `count` is the number of iterations of `main`. In runs of older versions of Rearview, the loop path consists of
    names, not of ids. If a loop was not counted to the end, it is assumed to have had its mean number of iterations
    each time that it was entered.
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
        mean = sum(counts) / max(1, deep.entries)
        counts += [0] * (count - len(counts))
        if around is not None:
            counts = [
                own_count if k in counted else round(around.counts[k] * mean)
                for k, own_count in enumerate(counts)
            ]
        deep_facts[chain] = DeepFacts(counts, counted)
    return deep_facts


def _depth(item: tuple[str, DeepLoop]) -> int:
    names, deep = item
    return len(deep.path or names.split("/"))


def _counted_iterations(main: MainLoop, end: RunEnd, site: str, recorded: int, count: int) -> range:
    """Return the iterations of the outermost loop in which all iterations of the inner loop `site` were counted.

    The outermost loop had `count` iterations, of which `recorded` have a count for `site`. A run stops counting if the
    inner iterations are short, so the last of these counts may be too small. Older versions of Rearview counted
    several outer iterations together; then no single count is known.
    """
    stopped = site not in end.loops
    if main.counted is None:
        together = stopped or any(many > 1 for many, _ in main.iterations)
        return range(0 if together else count)
    first, last = main.counted
    return range(first, min(last, recorded - 1) if stopped else min(last, count))


def _per_iteration(main: MainLoop, spent: _Spent) -> _Spent:
    """Return `spent` with one item for each iteration of the loop `main`.

    Older versions of Rearview measured groups of iterations of `main` together; the sum of each group is divided
    equally.

    >>> _per_iteration(MainLoop(iterations=[(1, 0.1), (2, 0.1)]), [(0.1, 3), (0.0, 0), (0.2, 6)])
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
    """Return `spent`, the measurements of an inner loop, with exactly `count` items, one for each outer iteration.

    Outer iterations that are not in `counted`, and have no measurement, get the mean of the others.

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
    """Return the values of a loop's target variable in `count` iterations.

    Return None if they are unknown, or equal to the indices of the iterations. `span` is (start, step) if the loop is
    over a range; `recorded` are the values if it is over another iterable.

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
    """Return `probes` with two fields of each probe adapted to `run`: the loop ids of its paths, and `runs_first`.

    The source alone gives each loop an id by its place in a function. But if the loop is over `rearview.loop`, the run
    recorded an id that is made of the name in that call. `runs_first` is cleared unless the probe surely runs before
    the main loop.
    """
    recorded = run.end.loops
    main = run.end.main.site
    main_loops = [loop for loop in probes.known_loops if main in (str(loop), NAMED + loop.name)]

    def runs_first(probe: Probe) -> bool:
        """Return True if `probe` surely runs before the main loop; False if that depends on the order of imports."""
        in_order = bool(main_loops) and all(
            (loop.path == probe.path or loop.function != MODULE)
            and (loop.path == probe.path or probe.function != MODULE or _is_script(probe.path, run))
            for loop in main_loops
        )
        return probe.runs_first and (in_order or main is None)

    def with_loop_ids(path: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(
            named if (named := NAMED + name_of(loop)) in recorded and loop not in recorded else loop
            for loop in path
        )

    changed = (
        replace(
            probe,
            paths=tuple(map(with_loop_ids, probe.paths)),
            feeding_paths=tuple(map(with_loop_ids, probe.feeding_paths)),
            runs_first=runs_first(probe),
        )
        for probe in probes.probes
    )
    return replace(probes, probes=tuple(changed))


def _is_script(path: str, run: Run) -> bool:
    """Return True if the file `path` is the script or module that the run was started with."""
    module = run.script.removeprefix("-m ").replace(".", "/")
    return path == run.script or path.endswith((f"{module}.py", f"{module}/__main__.py"))
