"""Explain a plan to the user: its work, its cost, and how the question could be changed to cost less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import lt

from rearview.model import Plan, Segment
from rearview.model.run import columns_of, name_of
from rearview.plan.demand import RUN
from rearview.plan.divide_work import divide, schedule, shortest_possible
from rearview.plan.facts import At, RunQuestion, TargetValue, ValueRequest
from rearview.plan.survey_work import Survey, Work, work_of

SAMPLE = 20
"""Approximate number of runs for which a cheaper question is planned, to estimate the seconds that it saves."""


@dataclass(frozen=True, slots=True)
class CheaperQuestion:
    """A suggestion to the user how to change the question so that replays take less time."""

    saves: float
    """Predicted seconds of computing that the changed question saves."""
    text: str


@dataclass(frozen=True, slots=True)
class WorkerEstimate:
    """The predicted duration of the work with a certain number of workers."""

    workers: int
    seconds: float
    segments: int
    balance: float
    """Lower bound of the duration divided by `seconds`; 1 if no plan can be faster."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The predicted cost of a plan, and how it is composed."""

    segments: tuple[Segment, ...]
    seconds: float
    """Predicted seconds of computing of all segments together."""
    low: float
    """Lower end of the interval in which `seconds` probably are."""
    high: float
    """Upper end of the interval in which `seconds` probably are."""
    startup: float
    """Seconds until the programs enter their outermost loops; one process for each run."""
    restoring: float
    """Seconds of restoring checkpoints."""
    running: float
    """Seconds of computing iterations."""
    wasted: float
    """The part of `running` that is only needed to reach the requested iterations."""
    cells: int
    """Number of missing values."""
    nbytes_written: int
    """Bytes of the new values in the store."""
    nbytes_read: int
    """Bytes of the checkpoints that are read."""
    workers: tuple[WorkerEstimate, ...]
    cheaper: tuple[CheaperQuestion, ...]
    refusals: tuple[tuple[str, str], ...]
    """(run, reason) for each run that cannot be replayed."""


def explain(
    survey: Survey, plan: Plan, *, workers: Sequence[int] = (1, 2, 4, 8), rerun: bool = False
) -> Explanation:
    """Return the cost of `plan`, its duration with each number in `workers`, and cheaper questions.

    `survey` is the work from which the plan was made. `rerun` is explained at `divide`.
    """
    startup = sum(work.startup.seconds for work in survey.work)
    rerun_runs = {segment.run for segment in plan.segments if segment.rerun}
    restoring = sum(
        work.cost.restore(checkpoint)
        for work in survey.work
        if work.facts.run not in rerun_runs
        for group in (work.cold_restores[:1] + work.warm_restores[1:])
        for checkpoint in group
    )
    total = sum(
        work.rerun if work.facts.run in rerun_runs else work.seconds for work in survey.work
    )
    return Explanation(
        segments=plan.segments,
        seconds=plan.seconds,
        low=sum(segment.low for segment in plan.segments),
        high=sum(segment.high for segment in plan.segments),
        startup=startup,
        restoring=restoring,
        running=max(0.0, total - startup - restoring),
        wasted=sum(work.lead_seconds for work in survey.work),
        cells=sum(work.cells for work in survey.work),
        nbytes_written=sum(work.nbytes for work in survey.work),
        nbytes_read=sum(segment.nbytes for segment in plan.segments),
        workers=tuple(_estimate(survey, count, rerun=rerun) for count in workers),
        cheaper=tuple(sorted(_cheaper_questions(survey, total), key=lambda c: -c.saves)),
        refusals=plan.refusals,
    )


def _estimate(survey: Survey, workers: int, *, rerun: bool) -> WorkerEstimate:
    divided = divide(survey, workers=workers, rerun=rerun)
    seconds = [segment.seconds for segment in divided.segments]
    duration = schedule(seconds, workers).seconds
    balance = min(1.0, shortest_possible(survey, workers) / duration) if duration else 1.0
    return WorkerEstimate(workers, duration, len(seconds), balance)


def _cheaper_questions(survey: Survey, total: float) -> list[CheaperQuestion]:
    if not survey.work or total <= 0:
        return []
    suggestions: list[CheaperQuestion] = []
    most_expensive = sorted(survey.work, key=lambda work: -work.seconds)
    if len(most_expensive) > 1:
        few = most_expensive[: max(1, len(most_expensive) // 10)]
        suggestions.append(
            CheaperQuestion(
                sum(work.seconds for work in few),
                f"Leave out the {_count(len(few), 'most expensive run')} with `--where` or "
                f"`--runs`: {', '.join(work.facts.run for work in few[:3])}"
                f"{' …' if len(few) > 3 else ''}.",
            )
        )
    suggestions += _fewer_iterations(survey.work)
    lead = sum(work.lead_seconds for work in survey.work if not work.whole)
    if lead > 0.05 * total:
        suggestions.append(
            CheaperQuestion(
                lead,
                "Part of the time only serves to get from the nearest checkpoint to the requested "
                "iterations. Ask for iterations that follow a checkpoint, or record checkpoints "
                "more often.",
            )
        )
    carrying = [work for work in survey.work if work.whole]
    if carrying:
        suggestions.append(
            CheaperQuestion(
                sum(work.seconds - work.startup.seconds for work in carrying),
                "A probe keeps a value from one iteration to the next, so these runs start from the "
                "beginning. Log the single values and add them up in the query.",
            )
        )
    suggestions += _first_inner_iterations(survey.work)
    return [item for item in suggestions if item.saves > 0]


def _fewer_iterations(all_work: Sequence[Work]) -> list[CheaperQuestion]:
    """Return a suggestion to request only half of the iterations of the outermost loop; empty if no run has several."""
    iterated = [work for work in all_work if len(work.iterations) > 1 and not work.whole]
    if not iterated:
        return []
    main = iterated[0].facts.loops[0]
    middle = iterated[0].iterations[len(iterated[0].iterations) // 2]

    def half(work: Work, request: ValueRequest) -> ValueRequest:
        first_half = work.iterations[: len(work.iterations) // 2]
        return replace(request, missing_iterations=frozenset(first_half))

    last = main.values[middle] if main.values is not None and middle < len(main.values) else middle
    how = (
        f"`--at {name_of(main.name)}=:{last}`, or with `--where`"
        if _rising(main.values)
        else "`--where`"
    )
    text = f"Ask for part of the iterations only: {how}."
    return [CheaperQuestion(_saved(iterated, half), text)]


def _first_inner_iterations(all_work: Sequence[Work]) -> list[CheaperQuestion]:
    """Return a suggestion to request only the first iterations of the inner loop.

    Return an empty list if no inner loop must run, or the values of its target variable do not increase.
    """
    inner = [
        work
        for work in all_work
        if len(work.facts.loops) > 1
        and work.inner == ()
        and not work.whole
        and any(need & RUN for need in work.needs)
        and any(len(request.loops) > 1 for request in _requests(work))
    ]
    if not inner:
        return []
    facts = next(
        (loop for loop in inner[0].facts.loops[1:] if loop.name == _inner_name(inner[0])),
        inner[0].facts.loops[1],
    )
    typical = sorted(facts.counts)[len(facts.counts) // 2] if facts.counts else 0
    few = 10 if typical >= 100 else max(1, typical // 10)
    first, step = 0.0, 1.0
    if facts.values and all(isinstance(value, int | float) for value in facts.values[:2]):
        numbers = [float(value) for value in facts.values[:2]]
        first, step = numbers[0], numbers[-1] - numbers[0] or 1.0
    last = first + few * step
    if step < 0 or not _rising(facts.values):
        return []

    def first_few(_: Work, request: ValueRequest) -> ValueRequest:
        if len(request.loops) < 2:
            return request
        return replace(request, at=(*request.at, At(columns_of(request.loops)[1], first, last)))

    loops = next(request.loops for request in _requests(inner[0]) if len(request.loops) > 1)
    column = columns_of(loops)[1]
    text = f"Ask for the beginning of the inner loop only: `--at {column}={first:g}:{last:g}`."
    return [CheaperQuestion(_saved(inner, first_few), text)]


def _rising(values: Sequence[TargetValue] | None) -> bool:
    """Return True if the values of a loop's target variable increase; an upper bound then selects first iterations.

    `values` of None are the indices of the iterations.
    """
    if values is None:
        return True
    numbers = [value for value in values if isinstance(value, int | float)]
    return len(numbers) == len(values) and all(map(lt, numbers, numbers[1:]))


def _inner_name(work: Work) -> str:
    return next(request.loops[1] for request in _requests(work) if len(request.loops) > 1)


def _requests(work: Work) -> tuple[ValueRequest, ...]:
    return work.question.requests if work.question is not None else ()


def _saved(all_work: Sequence[Work], change: Callable[[Work, ValueRequest], ValueRequest]) -> float:
    """Return how many seconds of `all_work` a changed question would save.

    `change` is a function (work of a run, request) -> changed request. If there are many runs, only a sample is
    planned.
    """
    sample = all_work[:: max(1, len(all_work) // SAMPLE)]
    before = after = 0.0
    for work in sample:
        requests = tuple(change(work, request) for request in _requests(work))
        other_work = work_of(RunQuestion(work.facts, requests), work.cost)
        if isinstance(other_work, Work):
            before += work.seconds
            after += other_work.seconds
    if before <= 0:
        return 0.0
    return (before - after) / before * sum(work.seconds for work in all_work)


def _count(number: int, noun: str) -> str:
    return noun if number == 1 else f"{number} {noun}s"
