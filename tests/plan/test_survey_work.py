"""The operator follows from where the probe stands; the least that must run is what runs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan.runs import checkpoint, ends, run, starts
from rearview.model import Operator, Point, Step
from rearview.plan.divide_work import divide
from rearview.plan.facts import (
    CheckpointFacts,
    DeepFacts,
    LoopFacts,
    RunFacts,
    RunQuestion,
    ValueRequest,
    parse_at,
)
from rearview.plan.survey_work import survey

EPOCHS = [10.0] * 5
INNER = [8.0] * 5
SETUP = ValueRequest(("n",), (), place="before")
AFTER = ValueRequest(("n",), (), place="after")
HEAD = ValueRequest(("n",), ("epoch",), place="before")
TAIL = ValueRequest(("n",), ("epoch",), place="after")
DEEP = ValueRequest(("n",), ("epoch", "step"))


def plan(facts, *wanted, **more):
    return divide(survey([RunQuestion(facts, wanted)]), **more)


def only(facts, *wanted):
    (segment,) = plan(facts, *wanted).segments
    return segment


def test_a_probe_in_the_setup_runs_the_setup_alone():
    segment = only(run(EPOCHS, starts(1, 2)), SETUP)
    assert (segment.operator, segment.seconds, segment.loop) == (Operator.SETUP, 3.0, None)


def test_a_probe_after_the_inner_loop_restores_each_iteration_and_skips_the_work():
    segment = only(run(EPOCHS, ends(*range(5)), inner=INNER), TAIL)
    assert segment.operator is Operator.OUTER
    assert segment.restores == tuple((k, f"e{k}") for k in range(5))
    assert segment.seconds == pytest.approx(3 + 5 * (1 + 2))
    assert (segment.first, segment.last, segment.only) == (0, 5, None)


def test_a_probe_before_the_inner_loop_needs_the_checkpoint_that_begins_the_iteration():
    segment = only(run(EPOCHS, [*starts(*range(5)), *ends(*range(5))], inner=INNER), HEAD)
    assert segment.operator is Operator.OUTER
    assert [c for _, c in segment.restores] == ["s1", "s2", "s3", "s4"]  # the first needs none
    assert segment.start is None


def test_probes_at_both_ends_restore_both_checkpoints_of_each_iteration():
    segment = only(run(EPOCHS, [*starts(1, 2), *ends(0, 1, 2)], inner=INNER), HEAD, TAIL)
    assert [c for _, c in segment.restores][:4] == ["e0", "s1", "e1", "s2"]


def test_a_probe_after_the_loop_restores_the_last_checkpoint():
    final = checkpoint("end", 5, edge="end")
    segment = only(run(EPOCHS, [*starts(1, 4), final], after=4.0), AFTER)
    assert (segment.operator, segment.start, segment.tail) == (Operator.AFTER, "end", True)
    assert segment.seconds == pytest.approx(3 + 1 + 4)
    assert (segment.first, segment.last) == (5, None)


def test_without_a_last_checkpoint_the_iterations_since_the_nearest_run_again():
    segment = only(run(EPOCHS, starts(1, 4), after=4.0), AFTER)
    assert (segment.start, segment.seconds) == ("s4", pytest.approx(3 + 1 + 10 + 4))


def test_a_probe_in_the_inner_loop_runs_from_the_nearest_checkpoint():
    wanted = ValueRequest(("n",), ("epoch", "step"), at=parse_at("epoch=3:5"))
    segment = only(run(EPOCHS, starts(1, 2), inner=INNER), wanted)
    assert (segment.operator, segment.start) == (Operator.INNER, "s2")
    assert segment.seconds == pytest.approx(3 + 1 + 10 + 20)
    assert (segment.first, segment.last) == (3, 5)


def test_no_checkpoint_means_from_the_start():
    wanted = ValueRequest(("n",), ("epoch", "step"), at=parse_at("epoch=3"))
    segment = only(run(EPOCHS, inner=INNER), wanted)
    assert (segment.operator, segment.start) == (Operator.FULL, None)
    assert segment.seconds == pytest.approx(3 + 40)


def test_a_range_of_steps_begins_at_a_checkpoint_inside_the_iteration():
    middle = checkpoint("m", 3, 5)
    wanted = ValueRequest(("n",), ("epoch", "step"), at=parse_at("epoch=3/step=6:8"))
    segment = only(run(EPOCHS, [*starts(3), middle], inner=INNER), wanted)
    assert segment.start == "m"
    assert segment.inner == (("step", 6, 8),)
    assert segment.seconds == pytest.approx(3 + 1 + 3 * 0.8)


def test_a_probe_that_reads_its_own_variable_of_the_same_iteration_begins_the_iteration():
    middle = checkpoint("m", 3, 5)
    wanted = ValueRequest(("n",), ("epoch", "step"), at=parse_at("epoch=3/step=6:8"), depth=1)
    assert only(run(EPOCHS, [*starts(3), middle], inner=INNER), wanted).start == "s3"


def test_a_probe_that_carries_values_over_iterations_runs_everything_before_it():
    wanted = ValueRequest(("n",), ("epoch",), place="after", depth=0, at=parse_at("epoch=3"))
    found = plan(run(EPOCHS, [*starts(1, 2), *ends(1, 2, 3)], inner=INNER), wanted, workers=4)
    (segment,) = found.segments
    assert (segment.operator, segment.start, segment.last) == (Operator.FULL, None, 4)
    assert segment.seconds == pytest.approx(3 + 40)


def test_a_probe_that_collects_values_in_the_inner_loop_makes_it_run():
    wanted = ValueRequest(("n",), ("epoch",), place="after", feeds=True)
    segment = only(run(EPOCHS, [*starts(*range(5)), *ends(*range(5))], inner=INNER), wanted)
    assert segment.operator is Operator.INNER
    assert segment.seconds == pytest.approx(3 + 50)


def test_iterations_chosen_by_value_are_jumped_to_one_by_one():
    wanted = ValueRequest(("n",), ("epoch", "step"), missing_iterations=frozenset({0, 3}))
    segment = only(run(EPOCHS, starts(1, 2, 3), inner=INNER), wanted)
    assert segment.only == (0, 3)
    assert segment.restores == ((3, "s3"),)
    assert segment.seconds == pytest.approx(3 + 10 + 1 + 10)


def test_running_on_is_preferred_where_restoring_is_slower():
    slow = starts(*range(5), restore=50.0)
    segment = only(
        run(EPOCHS, slow, inner=INNER),
        ValueRequest(("n",), ("epoch", "step"), missing_iterations=frozenset({0, 3})),
    )
    assert segment.restores == ()
    assert segment.seconds == pytest.approx(3 + 40)


def test_a_partial_checkpoint_is_never_counted_on():
    partial = [*starts(*range(5), complete=False), *ends(*range(5), complete=False)]
    inner = ValueRequest(("n",), ("epoch", "step"), at=parse_at("epoch=3"))
    for wanted in (inner, TAIL):
        bare = only(run(EPOCHS, inner=INNER), wanted)
        segment = only(run(EPOCHS, partial, inner=INNER), wanted)
        assert (segment.restores, segment.seconds) == ((), bare.seconds)
    assert only(run(EPOCHS, partial, inner=INNER), inner).seconds == pytest.approx(3 + 4 * 10)


def test_several_names_are_answered_in_one_pass():
    segment = only(
        run(EPOCHS, [*starts(*range(5)), *ends(*range(5))], inner=INNER), SETUP, TAIL, DEEP
    )
    assert segment.operator is Operator.INNER
    assert segment.seconds == pytest.approx(3 + 50)


def test_a_range_of_values_of_the_loop_selects_its_iterations():
    facts = RunFacts("r", "v", (LoopFacts("epoch", [1.0] * 3, values=[1, 2, 3]),))
    segment = only(facts, ValueRequest(("n",), ("epoch",), at=parse_at("epoch=2")))
    assert (segment.first, segment.last) == (1, 2)


@pytest.mark.parametrize(
    ("facts", "wanted", "reason"),
    [
        (run(EPOCHS, blocked="torch 2.1 is not installed"), SETUP, "torch 2.1"),
        (run(EPOCHS, finished=False), AFTER, "never finished"),
        (run(EPOCHS), ValueRequest(("n",), ("fold",)), "no loop `fold`"),
        (
            run(EPOCHS),
            ValueRequest(("n",), ("epoch",), at=parse_at("epoch=7")),
            "no iteration epoch=7",
        ),
        (
            run(EPOCHS, inner=INNER),
            ValueRequest(("n",), ("epoch", "step"), at=parse_at("step=50:")),
            "at most 10",
        ),
        (
            run(EPOCHS),
            ValueRequest(("n",), ("epoch",), at=parse_at("batch=1")),
            "not logged in a loop",
        ),
        (
            run(EPOCHS),
            ValueRequest(("n",), (), at=parse_at("epoch=1")),
            "not logged in a loop `epoch`",
        ),
    ],
)
def test_an_unanswerable_request_is_refused_with_the_reason(facts, wanted, reason):
    found = plan(facts, wanted)
    assert not found.segments
    assert reason in found.refusals[0][1]


def test_nothing_missing_means_nothing_to_do_and_no_refusal():
    found = plan(run(EPOCHS), ValueRequest(("n",), ("epoch",), missing_iterations=frozenset()))
    assert (found.segments, found.refusals) == ((), ())


def test_iterations_that_took_no_time_at_all_keep_their_order():
    wanted = ValueRequest(("n",), ("epoch", "step"), at=parse_at("epoch=1"))
    segment = only(run([0.0] * 5, starts(1, 2, 3, restore=0.0), inner=[0.0] * 5), wanted)
    assert segment.start in {None, "s1"}


def brute(facts, atoms):
    """Least seconds of one process that does the atoms: every way to get to each is tried.

    An atom is (begin, end, extra, then): places on the axis as (place, time).
    """
    edges = [0.0]
    for value in facts.loops[0].seconds:
        edges.append(edges[-1] + value)
    inner = facts.loops[1].seconds
    stops = [((0, -1), 0.0, 0.0)]
    for c in facts.checkpoints:
        k = c.point.steps[0].index
        if len(c.point.steps) == 1:
            stops.append(((k, -1), edges[k], c.restore))
        elif c.edge == "end":
            stops.append(((k, 99), edges[k] + inner[k], c.restore))
        else:
            i = c.point.steps[1].index
            stops.append(((k, i), edges[k] + i * inner[k] / 10, c.restore))

    def least(number, position):
        if number == len(atoms):
            return 0.0
        place, end, extra = atoms[number]
        ways = [cost + end - time for key, time, cost in stops if key <= place]
        if position is not None:
            ways.append(end - position)
        return min(ways) + extra + least(number + 1, end)

    return facts.start + facts.setup + least(0, None)


times = st.integers(1, 20).map(float)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_other_way_through_the_checkpoints_is_cheaper(data):
    count = data.draw(st.integers(1, 5))
    outside = data.draw(st.lists(times, min_size=count, max_size=count))
    inner = data.draw(st.lists(times, min_size=count, max_size=count))
    seconds = [a + b for a, b in zip(outside, inner, strict=True)]
    found = []
    for k in range(count):
        for kind in data.draw(st.sets(st.sampled_from(["start", "end", "middle"]))):
            cost = data.draw(times)
            step = {"start": None, "end": 10, "middle": data.draw(st.integers(1, 9))}[kind]
            edge = "end" if kind == "end" else "start"
            found.append(checkpoint(f"{kind}{k}", k, step, edge=edge, restore=cost))
    facts = run(seconds, found, inner=inner)
    chosen = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    edges = [sum(seconds[:k]) for k in range(count + 1)]
    kind = data.draw(st.sampled_from(["head", "tail", "deep", "steps"]))
    more = {"missing_iterations": frozenset(chosen)}
    if kind == "head":
        wanted = ValueRequest(("n",), ("epoch",), place="before", **more)
        atoms = [((k, -1), edges[k], outside[k]) for k in chosen]
    elif kind == "tail":
        wanted = ValueRequest(("n",), ("epoch",), place="after", **more)
        atoms = [((k, 99), edges[k + 1], 0.0) for k in chosen]
    elif kind == "deep":
        wanted = ValueRequest(("n",), ("epoch", "step"), **more)
        atoms = [((k, -1), edges[k + 1], 0.0) for k in chosen]
    else:
        low = data.draw(st.integers(1, 8))
        wanted = ValueRequest(
            ("n",), ("epoch", "step"), at=parse_at(f"step={low}:{low + 2}"), **more
        )
        atoms = [((k, low), edges[k] + (low + 2) * inner[k] / 10, 0.0) for k in chosen]
    assert only(facts, wanted).seconds == pytest.approx(brute(facts, atoms))


def two_loops(checkpoints):
    facts = run(EPOCHS, checkpoints, inner=[6.0] * 5)
    val = LoopFacts("val", [3.0] * 5, [4] * 5)
    return replace(facts, loops=(*facts.loops, val))


def val_end(k):
    return CheckpointFacts(f"v{k}", Point((Step("epoch", k), Step("val", 4))), "end", restore=1.0)


def test_after_two_inner_loops_the_one_whose_end_is_recorded_is_skipped():
    facts = two_loops([val_end(k) for k in range(5)])
    assert only(facts, TAIL).start == "v0"


def test_between_two_inner_loops_the_end_of_the_second_is_too_late():
    facts = two_loops([val_end(k) for k in range(5)])
    between = ValueRequest(("n",), ("epoch",), place="between")
    assert only(facts, between).restores == ()


def test_a_range_of_the_second_inner_loop_is_counted_by_its_own_iterations():
    wanted = ValueRequest(("n",), ("epoch", "val"), at=parse_at("val=3"))
    assert only(two_loops([]), wanted).inner == (("val", 3, 4),)
    far = ValueRequest(("n",), ("epoch", "val"), at=parse_at("val=7"))
    assert "at most 4" in plan(two_loops([]), far).refusals[0][1]


def test_checkpoints_of_other_loops_are_left_alone():
    strange = CheckpointFacts("x", Point((Step("epoch", 2), Step("batch", 1))), restore=0.1)
    other = CheckpointFacts("y", Point((Step("fold", 2),)), restore=0.1)
    wanted = ValueRequest(("n",), ("epoch", "step"), at=parse_at("epoch=3"))
    assert only(run(EPOCHS, [strange, other, *starts(1)], inner=INNER), wanted).start == "s1"


def test_cells_of_loops_that_were_not_counted_are_a_lower_bound():
    facts = run(EPOCHS, starts(1, 2), inner=INNER)
    deeper = ValueRequest(("n",), ("epoch", "step", "part"))
    work = survey([RunQuestion(facts, (deeper,))]).work[0]
    assert (work.cells, work.at_least) == (sum(facts.loops[1].counts), True)
    counted = replace(facts, deep={("step", "part"): DeepFacts([7] * len(EPOCHS))})
    work = survey([RunQuestion(counted, (deeper,))]).work[0]
    assert (work.cells, work.at_least, work.approximate) == (7 * len(EPOCHS), False, False)
