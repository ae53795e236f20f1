"""Work is divided by predicted seconds, at checkpoints, in the order of priorities."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.runs import ends, run, starts
from rearview.model import Operator
from rearview.plan.divide_work import divide, lower_bound, schedule
from rearview.plan.facts import RunQuestion, ValueRequest
from rearview.plan.survey_work import survey

DEEP = ValueRequest(("n",), ("epoch", "step"))
TAIL = ValueRequest(("n",), ("epoch",), place="after")


def asked(*facts, wanted=DEEP):
    return survey([RunQuestion(one, (wanted,)) for one in facts])


def long_run(count=24, every=1, name="r", seconds=10.0, inner=8.0, **more):
    points = starts(*range(1, count, every))
    return run([seconds] * count, points, inner=[inner] * count, name=name, **more)


def covered(plan):
    found = []
    for segment in plan.segments:
        wanted = segment.only or range(segment.first, segment.last)
        found += [(segment.run, k) for k in wanted]
    return sorted(found)


def test_one_worker_gets_one_segment_per_run():
    plan = divide(asked(long_run(), long_run(name="q")), workers=1)
    assert len(plan.segments) == 2


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 24, 50])
def test_iterations_are_shared_out_once_each(workers):
    plan = divide(asked(long_run()), workers=workers)
    assert covered(plan) == [("r", k) for k in range(24)]
    assert all(s.start == (f"s{s.first}" if s.first else None) for s in plan.segments)
    assert all(s.operator is Operator.INNER for s in plan.segments)


def test_two_workers_take_half_the_time_and_their_start():
    seconds = [s.seconds for s in divide(asked(long_run()), workers=2).segments]
    assert schedule(seconds, 2).seconds == pytest.approx(3 + 1 + 120, abs=1.0)


def test_the_remainders_of_several_runs_fill_one_worker():
    runs = [long_run(count=40, name=f"r{k}", seconds=4.0 + 1.7 * k) for k in range(7)]
    plan = divide(asked(*runs), workers=24)
    seconds = [segment.seconds for segment in plan.segments]
    assert covered(plan) == sorted((one.run, k) for one in runs for k in range(40))
    assert schedule(seconds, 24).seconds < sum(seconds) / 24 * 1.05


def test_a_run_without_a_loop_is_one_piece():
    plan = divide(
        asked(run([], name="s"), wanted=ValueRequest(("n",), (), place="before")), workers=4
    )
    assert [segment.run for segment in plan.segments] == ["s"]


def test_cuts_are_made_only_at_checkpoints():
    plan = divide(asked(long_run(every=8)), workers=8)
    begun = set()
    for segment in plan.segments:
        wanted = segment.only or range(segment.first, segment.last)
        begun |= {k for k in wanted if k - 1 not in wanted}
    assert {0, 9} <= begun <= {0, 1, 9, 17}


def test_a_run_is_not_divided_if_another_start_costs_more_than_it_saves():
    plan = divide(asked(long_run(count=4, seconds=10.0, setup=500.0)), workers=4)
    assert len(plan.segments) == 1


def test_priorities_come_before_length():
    plan = divide(
        asked(long_run(name="b", priority=2.0), long_run(6, name="a", priority=1.0)), workers=2
    )
    names = [s.run for s in plan.segments]
    assert names == sorted(names)


def test_a_budget_keeps_the_segments_that_end_in_time():
    work = asked(*(long_run(4, name=f"r{i}", priority=float(i)) for i in range(10)))
    plan = divide(work, workers=1, budget=100.0)
    assert [s.run for s in plan.segments] == ["r0", "r1"]
    assert divide(work, workers=1, budget=1.0).segments == ()
    assert len(divide(work, workers=2, budget=100.0).segments) >= 4


def test_work_for_outer_probes_is_divided_too():
    facts = run([10.0] * 64, ends(*range(64)), inner=[9.0] * 64, setup=0.5, start=0.0)
    plan = divide(asked(facts, wanted=TAIL), workers=4)
    assert covered(plan) == [("r", k) for k in range(64)]
    assert {s.operator for s in plan.segments} == {Operator.OUTER}
    seconds = [s.seconds for s in plan.segments]
    assert schedule(seconds, 4).seconds < 64 * 2 / 4 + 3


def test_the_interval_holds_the_prediction_and_grows_with_noise():
    calm = divide(asked(long_run())).segments[0]
    wild = run([5.0, 15.0] * 12, starts(1), inner=[4.0] * 24)
    noisy = divide(asked(wild)).segments[0]
    for segment in (calm, noisy):
        assert segment.low < segment.seconds < segment.high
    assert noisy.high - noisy.low > calm.high - calm.low


def best_by_trying_everything(sizes, workers):
    return min(
        max(sum(s for s, w in zip(sizes, given, strict=True) if w == i) for i in range(workers))
        for given in product(range(workers), repeat=len(sizes))
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_the_bound_is_never_above_the_best_schedule(sizes, workers):
    best = best_by_trying_everything(sizes, workers)
    assert lower_bound(sizes, workers) <= best
    longest_first = schedule(sorted(sizes, reverse=True), workers).seconds
    assert best <= longest_first <= best * (4 / 3)


def least_time(cold, going, start, workers):
    """Try every way to cut one run into at most `workers` stretches."""
    count = len(going)
    best = float("inf")
    for marks in product([False, True], repeat=count - 1):
        cuts = [0, *(i + 1 for i, mark in enumerate(marks) if mark), count]
        if len(cuts) - 1 > workers:
            continue
        best = min(best, max(start + cold[a] + sum(going[a + 1 : b]) for a, b in pairwise(cuts)))
    return best


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30).map(float), min_size=2, max_size=8), st.integers(2, 4))
def test_a_run_is_cut_as_evenly_as_it_can_be(seconds, workers):
    facts = run(seconds, starts(*range(1, len(seconds))), inner=seconds, start=0.0, setup=0.0)
    work = asked(facts)
    plan = divide(work, workers=workers)
    taken = schedule([s.seconds for s in plan.segments], workers).seconds
    only = work.work[0]
    best = least_time(only.cold_seconds, only.warm_seconds, 0.0, workers)
    assert taken <= best * 1.006 + 0.1


@pytest.mark.parametrize("workers", [4, 16, 64])
def test_many_versions_of_different_length_are_balanced(workers):
    facts = [long_run(10 + (7 * i) % 50, name=f"r{i}", seconds=3.0 + i % 5) for i in range(40)]
    seconds = [s.seconds for s in divide(asked(*facts), workers=workers).segments]
    assert lower_bound(seconds, workers) / schedule(seconds, workers).seconds >= 0.95


def test_a_segment_has_its_bytes_and_restored_checkpoints():
    wanted = ValueRequest(("n",), ("epoch", "step"), missing_iterations=frozenset({2, 20}))
    (segment,) = divide(asked(long_run(), wanted=wanted)).segments
    assert segment.restores == ((2, "s2"), (20, "s20"))
    assert segment.nbytes == 20
    assert replace(segment, seconds=0.0).only == (2, 20)


def test_workers_who_may_come_later_find_segments_where_starts_cost_little():
    cheap = asked(long_run(400, start=0.1, setup=0.2))
    few, many = divide(cheap, workers=2), divide(cheap, workers=2, growth=4)
    assert len(few.segments) < len(many.segments) <= 8
    assert many.seconds <= 1.011 * few.seconds
    assert covered(many) == covered(few)
    assert schedule([s.seconds for s in many.segments], 8).seconds < 0.3 * few.seconds
    dear = asked(long_run(24, setup=60.0))
    assert len(divide(dear, workers=2, growth=4).segments) == len(divide(dear, workers=2).segments)


def small_run(seconds=0.02, **more):
    """Return a run of ten short iterations, each with a checkpoint after its inner loop."""
    points = [*starts(*range(1, 10), restore=0.001), *ends(*range(10), restore=0.001)]
    return run([seconds] * 10, points, inner=[0.9 * seconds] * 10, **more)


@pytest.mark.parametrize(
    "wanted", [TAIL, DEEP, replace(DEEP, missing_iterations=frozenset({3, 7}))]
)
def test_a_run_that_restoring_would_not_answer_noticeably_sooner_runs_again(wanted):
    (segment,) = divide(asked(small_run(), wanted=wanted), workers=2, growth=4, rerun=True).segments
    assert segment.rerun
    assert (segment.operator, segment.start, segment.restores) == (Operator.FULL, None, ())
    last = max(wanted.missing_iterations or {9})
    assert segment.seconds == pytest.approx(3.0 + 0.02 * (last + 1))
    assert segment.only == (None if wanted.missing_iterations is None else (3, 7))


@pytest.mark.parametrize("wanted", [TAIL, replace(DEEP, missing_iterations=frozenset({7}))])
def test_a_run_that_restoring_answers_sooner_is_not_run_again(wanted):
    (segment,) = divide(asked(small_run(2.0), wanted=wanted), rerun=True).segments
    assert not segment.rerun
    assert segment.restores


def test_values_before_the_loops_need_only_the_set_up_and_no_rerun():
    setup = ValueRequest(("n",), (), place="before")
    (segment,) = divide(asked(small_run(), wanted=setup), rerun=True).segments
    assert segment.operator is Operator.SETUP
    assert not segment.rerun


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0.001, 3.0),
    st.sampled_from([TAIL, DEEP, replace(DEEP, missing_iterations=frozenset({1, 5}))]),
    st.integers(1, 4),
)
def test_a_rerun_never_takes_noticeably_longer_than_the_segments_it_replaces(
    seconds, wanted, workers
):
    work = asked(small_run(seconds), wanted=wanted)
    before = schedule([s.seconds for s in divide(work, workers=workers).segments], workers).seconds
    after = divide(work, workers=workers, rerun=True).segments
    taken = schedule([s.seconds for s in after], workers).seconds
    assert taken <= before + max(0.5, 0.05 * taken) + 1e-6


def computing(plan):
    return sum(segment.seconds for segment in plan.segments)


def test_short_pieces_of_one_run_share_a_process():
    short = long_run(count=10, seconds=0.1, inner=0.08)
    assert len(divide(asked(short), workers=2, growth=4).segments) == 1
    longer = long_run(count=10, seconds=1.0)
    assert len(divide(asked(longer), workers=2).segments) == 2


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.0, 20.0])
def test_dividing_is_worth_the_computing_that_it_adds(seconds, workers):
    work = asked(long_run(count=20, seconds=seconds))
    one, several = divide(work), divide(work, workers=workers)
    won = computing(one) - schedule([s.seconds for s in several.segments], workers).seconds
    added = computing(several) - computing(one)
    assert won >= 2 / 3 * added / workers - 1e-6
    assert len(several.segments) == 1 or won > 0.5


def test_a_run_is_divided_further_if_its_start_is_shared():
    alone = long_run(count=20, seconds=0.2, start=4.0)
    shared = replace(alone, shareable=5.9)
    assert len(divide(asked(alone), workers=2).segments) == 1
    assert len(divide(asked(shared), workers=2).segments) == 2
